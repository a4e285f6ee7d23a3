"""Results of library calls are matched by place and kind, and held against what was promised for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.errors import BrokenPromise
from tilewright.ir.graph import LibraryCall
from tilewright.plan import CallStep
from tilewright.runtime.plan.call_results import Promise, receiving

Kernel = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def define() -> Iterator[Callable[[str, Kernel, Kernel], Kernel]]:
    """`define(schema, real, fake)` is an op whose fake kernel may promise anything."""
    library = torch.library.Library("promises", "FRAGMENT")

    def make(schema: str, real: Kernel, fake: Kernel) -> Kernel:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, real, "CPU")
        torch.library.register_fake(f"promises::{name}", fake, lib=library)
        return getattr(torch.ops.promises, name).default

    yield make
    library._destroy()


def compiled(program: Kernel, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return torch.compile(program, backend="tilewright")(*inputs)


def test_numbers_and_nothing_keep_their_places(define: Callable[[str, Kernel, Kernel], Kernel]) -> None:
    def mixed(x: Tensor) -> tuple[Tensor, int, Tensor]:
        return x * 2, x.shape[0], x + 1

    op = define("mixed(Tensor x) -> (Tensor, SymInt, Tensor)", mixed, mixed)

    def program(x: Tensor) -> Tensor:
        a, n, b = op(x.sin())
        return a * n - b.exp()

    x = torch.randn(5, 7)
    torch.testing.assert_close(compiled(program, x), program(x))


def test_a_number_that_only_data_know(define: Callable[[str, Kernel, Kernel], Kernel]) -> None:
    def count(x: Tensor) -> tuple[int, Tensor]:
        return int((x > 0).sum()), x + 1

    def fake(x: Tensor) -> tuple[Any, Tensor]:
        n = torch.library.get_ctx().new_dynamic_size()
        return n, torch.empty_like(x)

    op = define("count(Tensor x) -> (SymInt, Tensor)", count, fake)

    def program(x: Tensor) -> Tensor:
        n, y = op(x.sin())
        return y * n

    x = torch.randn(5, 7)
    torch.testing.assert_close(compiled(program, x), program(x))


def test_lists_among_results(define: Callable[[str, Kernel, Kernel], Kernel]) -> None:
    def parts(x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        return x.sum(0), [x * 2, x * 3], x - 1

    op = define("parts(Tensor x) -> (Tensor, Tensor[], Tensor)", parts, parts)

    def program(x: Tensor) -> Tensor:
        a, (b, c), d = op(x.sin())
        return (b - c * d).exp() + a

    x = torch.randn(5, 7)
    torch.testing.assert_close(compiled(program, x), program(x))


def test_what_is_wider_or_lies_otherwise_is_brought_into_form(
    define: Callable[[str, Kernel, Kernel], Kernel],
) -> None:
    op = define(
        "narrow(Tensor x) -> Tensor", lambda x: x.half().t().contiguous().t(), lambda x: torch.empty_like(x)
    )
    x = torch.randn(50, 7)
    torch.testing.assert_close(compiled(lambda x: op(x.sin()).exp(), x), x.sin().half().float().exp())
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(lambda x: op(x.sin()), x), x.sin().half().float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "real", "promised", "said"),
    [
        ("short", lambda x: x[:2].clone(), lambda x: torch.empty_like(x), r"shape \(2, 7\), \(50, 7\) was promised"),
        ("flat", lambda x: x.flatten().clone(), lambda x: torch.empty_like(x), r"shape \(350,\)"),
        ("wide", lambda x: x.double(), lambda x: torch.empty_like(x), "float64, torch.float32 was promised"),
        ("whole", lambda x: x.long(), lambda x: torch.empty_like(x), "int64, torch.float32 was promised"),
    ],
)  # fmt: skip
def test_what_readers_cannot_take_is_refused(
    define: Callable[[str, Kernel, Kernel], Kernel], name: str, real: Kernel, promised: Kernel, said: str
) -> None:
    op = define(f"{name}(Tensor x) -> Tensor", real, promised)
    with pytest.raises(BrokenPromise, match=said) as caught:
        compiled(lambda x: op(x.sin()).exp(), torch.randn(50, 7))
    assert caught.value.op == f"promises.{name}" and "test_call_results.py" in caught.value.place
    torch._dynamo.reset()
    with pytest.raises(BrokenPromise, match=said):  # the caller reads it as well
        compiled(lambda x: op(x.sin()), torch.randn(50, 7))


def test_kinds_are_held_against_the_promise(define: Callable[[str, Kernel, Kernel], Kernel]) -> None:
    def real(x: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, x + 1

    op = define(
        "absent(Tensor x) -> (Tensor, Tensor)", real, lambda x: (torch.empty_like(x), torch.empty_like(x))
    )
    x = torch.randn(5, 7)
    torch.testing.assert_close(
        compiled(lambda x: op(x)[1].exp(), x), (x + 1).exp()
    )  # what nobody reads may be absent
    torch._dynamo.reset()
    with pytest.raises(BrokenPromise, match="is nothing, a tensor was promised"):
        compiled(lambda x: op(x)[0].exp(), x)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_statistics_in_half_types(half: torch.dtype) -> None:
    """The library returns halves where the captured program promises singles."""

    def program(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        op = torch.ops.aten._batch_norm_with_update_functional.default
        y, saved, inverse, reserve, new_mean, new_var = op(x, weight, bias, mean, var, 0.1, 1e-5)
        return y, saved * 2, inverse * 2, new_mean + 1, new_var + 1

    x = torch.randn(4, 300, 3, 3).to(half)
    given = [torch.rand(300).to(half) + 0.5 for _ in range(4)]
    wanted, got = program(x, *given), compiled(program, x, *given)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


def test_a_number_in_the_hosts_memory_stays_there_unless_a_kernel_reads_it() -> None:
    """As the state of the generator does that an attention op with dropout leaves."""
    call = LibraryCall("op", torch.sin, (), ())
    step = CallStep(call, (), (0,))
    promise = Promise(torch.int64, torch.device("cuda:0"), 0, (), ())
    seed = torch.tensor(7)
    tensors: list[Tensor | None] = [seed]
    receiving(step, 0, promise, by_kernels=False)(tensors)
    assert tensors[0] is seed
    with pytest.raises(BrokenPromise, match="cuda:0 was promised"):
        receiving(step, 0, promise)(tensors)
    with pytest.raises(BrokenPromise, match="cuda:0 was promised"):
        receiving(step, 0, replace(promise, rank=1, shape=(1,), strides=(1,)), by_kernels=False)(
            [torch.ones(1).long()]
        )


def test_a_view_of_a_detached_result_asks_for_no_gradient() -> None:
    def scaled(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x * w
        return y, y.detach().flatten(-2)

    torch._dynamo.reset()
    x, w = torch.randn(4, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    whole, shown = torch.compile(scaled, backend="tilewright")(x, w)
    assert whole.requires_grad and not shown.requires_grad
    assert shown.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    whole.sum().backward()
    torch.testing.assert_close(x.grad, w.detach().expand(4, 5, 8))
