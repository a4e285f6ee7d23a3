"""Ops that address storage by place see what eager's would: values and gradients, whichever way operands lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import tilewright
from tilewright.errors import InputError

Program = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def trained(program: Program, *inputs: Tensor) -> list[Tensor]:
    """The result and the gradients of its sum, each element weighted on its own."""
    given = [x.detach().clone().requires_grad_() for x in inputs]
    out = program(*given)
    (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    return [out.detach(), *(g for x in given if (g := x.grad) is not None)]


def last(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


def squeezed(x: Tensor) -> Tensor:
    """A block that squeezes and excites: channels are weighted by their own means."""
    return x * torch.sigmoid(F.adaptive_avg_pool2d(F.silu(x), 1) * 2 - 1)


PROGRAMS: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    "windows that share elements": (lambda x: (x * 2).unfold(-1, 3, 2), (torch.randn(2, 9),)),
    "flat": (lambda x: x.as_strided((24,), (1,)) * 2, (torch.randn(4, 6),)),
    "windows": (lambda x: x.sin().as_strided((5, 3), (2, 1), 1) * 2, (torch.randn(4, 6),)),
    "whole of a part": (lambda x: (x * 2)[1:].as_strided((3, 4), (4, 1), 2) * 2, (torch.randn(4, 6),)),
    "copy of columns": (lambda x: torch.as_strided_copy(x.t() * 3, (24,), (1,)), (torch.randn(4, 6),)),
    "scatter": (
        lambda x, s: torch.as_strided_scatter(
            x * 3, s.exp(), (5,), (4,), 1
        ).atan(),  # no poles: inputs are any
        (torch.randn(4, 6), torch.randn(5)),
    ),
    "squeeze and excite": (squeezed, (last(2, 8, 5, 5),)),
    "pools": (lambda x: F.adaptive_avg_pool2d(x.relu(), 1) * F.avg_pool2d(x, 5), (last(2, 8, 5, 5),)),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_values_and_gradients(name: str) -> None:
    program, inputs = PROGRAMS[name]
    wanted = trained(program, *inputs)
    got = trained(torch.compile(program, backend="tilewright"), *inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_scatter_by_place_writes_where_it_did_when_it_is_compiled_again() -> None:
    """Torch's cache of fakes answers the second time, and forgets where in its storage the result lies."""

    def program(x: Tensor, s: Tensor) -> Tensor:
        made = torch.as_strided_scatter(x, s, (3,), (1,), 3)
        return torch.as_strided_scatter(made, s * 2, (3,), (1,), 5) + 0

    x, s = torch.arange(12.0).reshape(4, 3)[1:], torch.tensor([5.0, 6, 7])
    wanted = program(x, s)
    for _ in range(3):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(program, backend="tilewright")(x, s), wanted)


def test_views_of_a_scatter_by_place_lie_where_it_does() -> None:
    """What the cache forgets of a result, its views have never known."""

    def program(x: Tensor, s: Tensor) -> list[Tensor]:
        made = torch.as_strided_scatter(x, s, (3,), (1,), 3)
        below = made[1:]
        return [
            torch.as_strided(below, (3,), (1,), 8) + 0,
            torch.as_strided_scatter(below, s * 2, (3,), (1,), 9) + 0,
            torch.as_strided(below, (3,), (2,)) + 0,
            torch.as_strided(made.t(), (3,), (2,), 4)[1:] + 0,
        ]

    x, s = torch.arange(18.0).reshape(6, 3)[1:], torch.tensor([5.0, 6, 7])
    wanted = program(x, s)
    for _ in range(2):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(program, backend="tilewright")(x, s), wanted)


def test_a_call_by_place_gets_a_storage_of_its_own() -> None:
    """Strides that are not nested are no access map: the library's call stands between kernels, in the arena."""

    def program(x: Tensor, s: Tensor) -> Tensor:
        kept = (x.exp() + 1).cumsum(0)
        a = kept.sort(0)[0]
        b = torch.as_strided_scatter(a.sin() * 3 + a.sum(), s * 2, (3, 2), (2, 3), 1)
        return b.softmax(0) * kept

    x, s = torch.randn(12, 2), torch.randn(3, 2)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program, backend="tilewright")(x, s), program(x, s))


def test_a_storage_that_is_known_in_part_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        return x.as_strided((6,), (2,), 0) + 1

    x = torch.randn(6, 4)[:, ::2]
    with torch.no_grad():
        compiled = torch.compile(program, backend="tilewright")
        torch.testing.assert_close(compiled(x[1:]), program(x[1:]))
        torch._dynamo.reset()
        strict = torch.compile(program, backend="tilewright", options={"strict": True})
        with pytest.raises(BackendCompilerFailed, match="no more than a part"):
            strict(x[1:])
    assert tilewright.stats().fallbacks


def test_an_input_that_begins_elsewhere_is_never_read_at_the_wrong_place() -> None:
    base = torch.arange(40.0)
    absolute = torch.compile(lambda x: x.as_strided((3,), (2,), 0) * 2, backend="tilewright")
    relative = torch.compile(lambda x: x.as_strided((3,), (2,)) * 2, backend="tilewright")
    with torch.no_grad():
        assert absolute(base[:8]).tolist() == [0, 4, 8]
        with pytest.raises(InputError, match="begins at element 4"):
            absolute(base[4:12])
        for start in (0, 4):
            torch.testing.assert_close(relative(base[start : start + 8]), base[start : start + 6 : 2] * 2)
