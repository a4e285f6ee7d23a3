"""Results have eager's form where torch's fake kernels promise another."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright

CL, CL3 = torch.channels_last, torch.channels_last_3d


def _normed(training: bool) -> Callable[[Tensor], Tensor]:
    def normed(x: Tensor) -> Tensor:
        channels = x.shape[1]
        return F.batch_norm(x, torch.zeros(channels), torch.ones(channels), training=training)

    return normed


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "roll of one dim": lambda x: torch.roll(x, 2, 1),
    "roll of two dims": lambda x: torch.roll(x, (1, -2), (0, -1)),
    "roll round a dim": lambda x: torch.roll(x, (1, x.shape[-1]), (0, -1)),
    "roll of all": lambda x: torch.roll(x, 7),
    "channel shuffle": lambda x: F.channel_shuffle(x, x.shape[1] // 3 if x.shape[1] % 3 == 0 else 1),
    "alias_copy": torch.alias_copy,
    "t_copy": lambda x: torch.t_copy(x.flatten(2)[0]),
    "batch norm, training": _normed(True),
    "batch norm, evaluating": _normed(False),
}
OPERANDS: dict[str, Callable[[], Tensor]] = {
    "row-major": lambda: torch.randn(4, 6, 5, 3),
    "channels-last": lambda: torch.randn(4, 6, 5, 3).contiguous(memory_format=CL),
    "3d channels-last": lambda: torch.randn(2, 3, 4, 5, 3).contiguous(memory_format=CL3),
    "part of channels-last": lambda: torch.randn(4, 5, 3, 12)[..., 3:9].permute(0, 3, 1, 2),
    "permuted": lambda: torch.randn(5, 6, 4, 3).permute(2, 1, 0, 3),
    "permuted and offset": lambda: torch.randn(3, 4, 6, 6).permute(1, 2, 3, 0)[:, :, 1:],
    "sliced": lambda: torch.randn(4, 12, 5, 3)[:, ::2],
}


def _all(x: Tensor) -> dict[str, Tensor]:
    return {name: program(x) for name, program in PROGRAMS.items()}


@pytest.mark.parametrize("operand", OPERANDS)
def test_results_lie_as_eagers(operand: str) -> None:
    torch.manual_seed(0)
    x = OPERANDS[operand]()
    expected = _all(x)
    for grad in (False, True):
        torch._dynamo.reset()
        made = torch.compile(_all, backend="tilewright", dynamic=False)(x.detach().requires_grad_(grad))
        for name in PROGRAMS:
            assert made[name].stride() == expected[name].stride(), (name, operand, grad)
        torch.testing.assert_close(made, expected)


def test_it_holds_for_one_graph_of_all_sizes() -> None:
    torch._dynamo.reset()
    fast = torch.compile(_all, backend="tilewright", dynamic=True, fullgraph=True)
    for size, stance in ((5, "default"), (7, "fail_on_recompile")):
        x = torch.randn(size, 6, 4, 3).permute(2, 1, 0, 3)
        with torch.compiler.set_stance(stance):
            made = fast(x)
        assert {k: v.stride() for k, v in made.items()} == {k: v.stride() for k, v in _all(x).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_that_the_library_leaves_out(dtype: torch.dtype, weighted: bool) -> None:
    """The real kernel sums halves the fast way, without the bag of each index; the gradient computes it."""
    torch.manual_seed(0)
    table = torch.randn(10, 5, dtype=dtype, requires_grad=True)
    scale = torch.randn(7, dtype=dtype, requires_grad=True) if weighted else None
    indices, offsets = torch.randint(0, 10, (7,)), torch.tensor([0, 2, 4])

    def bags(table: Tensor, scale: Tensor | None, padding: int | None) -> Tensor:
        return F.embedding_bag(
            indices, table, offsets, mode="sum", per_sample_weights=scale, padding_idx=padding
        ).float()

    starts = [t for t in (table, scale) if t is not None]
    for dynamic, padding in ((False, None), (True, None), (False, 1)):
        torch._dynamo.reset()
        fast = torch.compile(bags, backend="tilewright", dynamic=dynamic)
        made, expected = fast(table, scale, padding), bags(table, scale, padding)
        torch.testing.assert_close(made, expected)
        gradients = (torch.autograd.grad(y.square().sum(), starts) for y in (made, expected))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_halves_that_an_evaluating_norm_leaves_alone(dtype: torch.dtype) -> None:
    """Torch hands them on as singles; what is captured computes with them."""
    torch.manual_seed(0)
    x, given = torch.randn(3, 2, 3, 4).to(dtype), [(torch.rand(2) + 0.5).to(dtype) for _ in range(4)]

    def normed(x: Tensor, *given: Tensor) -> Tensor:
        return torch.ops.aten._native_batch_norm_legit(x, *given, False, 0.1, 1e-5)[0]

    torch._dynamo.reset()
    tilewright.reset()
    kept = [t.clone() for t in given]
    with torch.no_grad():
        made = torch.compile(normed, backend="tilewright")(x, *given)
    assert tilewright.stats().fallbacks == 0 and tilewright.compilations()[-1].kernels
    torch.testing.assert_close(made, normed(x, *kept))
    torch.testing.assert_close(given, kept, rtol=0, atol=0)


ITERATED = (
    torch.copysign,
    torch.heaviside,
    torch.xlogy,
    torch.special.xlog1py,
    torch.logical_and,
    torch.logical_xor,
    torch.logaddexp,
)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("op", ITERATED, ids=lambda op: op.__name__)
def test_pointwise_results_lie_as_operands_do(op: Callable[[Tensor, Tensor], Tensor], dynamic: bool) -> None:
    """Torch's fake kernels say that they are row-major; a program that addresses memory was wrong in silence."""

    def addressed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = op(x, y)
        return made, made.as_strided((made.numel() // 2,), (1,))

    x = torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last)
    row, turned = torch.randn(3, 5), torch.randn(5, 3, 4, 2).permute(3, 2, 1, 0)
    torch._dynamo.reset()
    compiled = torch.compile(addressed, backend="tilewright", dynamic=dynamic)
    for pair in ((x, row), (row, x), (x, turned), (turned, x), (x.contiguous(), x), (row, row)):
        made, expected = compiled(*pair), addressed(*pair)
        assert [t.stride() for t in made] == [t.stride() for t in expected]
        torch.testing.assert_close(made, expected, equal_nan=True)


@pytest.mark.parametrize("op", [torch.copysign, torch.xlogy])
def test_operands_that_are_spread_both_ways(op: Callable[[Tensor, Tensor], Tensor]) -> None:
    """No order of the dims is settled by both: asked again of the operands so ordered, torch names another one."""
    x, y = torch.rand(1, 2, 8).transpose(0, 2), torch.rand(1, 2, 16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: op((x / (y + 0.5))[None], y), backend="tilewright")
    made, expected = compiled(x, y), op((x / (y + 0.5))[None], y)
    torch.testing.assert_close(made, expected)
    assert made.stride()[1:] == expected.stride()[1:], "the first dim has one element"


@pytest.mark.parametrize("op", [torch.copysign, torch.xlogy, torch.logaddexp])
def test_a_number_has_no_say_in_the_type(op: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.rand(2, 4, 3, 5).to(torch.bfloat16).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    for pair in ((torch.tensor(0.5), x), (x, torch.tensor(0.5))):
        if op is torch.logaddexp:  # which takes one type alone
            pair = pair[0].to(x.dtype), pair[1].to(x.dtype)
        made, expected = torch.compile(op, backend="tilewright")(*pair), op(*pair)
        assert made.dtype is expected.dtype is torch.bfloat16 and made.stride() == expected.stride()
        torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_what_is_unpooled_lies_as_its_operand(memory_format: torch.memory_format) -> None:
    def unpooled(x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        made = F.max_unpool2d(x, places, (3, 2), output_size=(2, 3, 6, 8))
        return made, made.as_strided((made.numel() // 2,), (1,))

    x, places = F.max_pool2d(torch.randn(2, 3, 6, 8), (3, 2), return_indices=True)
    pair = x.to(memory_format=memory_format), places.to(memory_format=memory_format)
    torch._dynamo.reset()
    made, expected = torch.compile(unpooled, backend="tilewright", dynamic=False)(*pair), unpooled(*pair)
    assert [t.stride() for t in made] == [t.stride() for t in expected]
    torch.testing.assert_close(made, expected)


def test_floor_divisions_by_a_number_lie_as_operands_do() -> None:
    def divided(x: Tensor) -> tuple[Tensor, ...]:
        made = torch.floor_divide(x, torch.tensor(2.0)), torch.div(x, x[0, 0], rounding_mode="floor")
        return (*made, *(y.as_strided((y.numel() // 2,), (1,)) for y in made))

    torch._dynamo.reset()
    x = torch.randn(4, 6).t()
    made, expected = torch.compile(divided, backend="tilewright")(x), divided(x)
    assert [t.stride() for t in made] == [t.stride() for t in expected]
    torch.testing.assert_close(made, expected)


def test_powers_of_a_number_are_row_major() -> None:
    """As eager mode's: torch's fake kernel says that they lie as the exponents."""

    def addressed(x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.pow(2, x)
        return made, made.as_strided((made.numel() // 2,), (1,))

    torch._dynamo.reset()
    compiled = torch.compile(addressed, backend="tilewright")
    for x in (torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last), torch.randn(4, 6).t()):
        made, expected = compiled(x), addressed(x)
        assert [t.stride() for t in made] == [t.stride() for t in expected]
        torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_medians_of_what_repeats_are_its_elements(
    median: Callable[..., tuple[Tensor, Tensor]], dim: int
) -> None:
    """Eager mode's own results are what memory held before."""
    x = torch.randn(1, 6, 3).expand(16, 6, 3)
    compiled = torch.compile(lambda x: median(x, dim), backend="tilewright", dynamic=False)
    values, places = compiled(x)
    assert torch.equal(values, median(x.contiguous(), dim)[0])
    assert torch.equal(x.gather(dim, places.unsqueeze(dim)).squeeze(dim), values)
