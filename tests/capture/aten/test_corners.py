"""Ops at the corners of what they take: one element, no number, indices from the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright

Program = Callable[[Tensor], Tensor]


def _same(program: Program, x: Tensor) -> None:
    torch._dynamo.reset()
    want, got = program(x), torch.compile(program, backend=tilewright.backend)(x)
    assert got.dtype is want.dtype and got.stride() == want.stride()
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("order", [-torch.inf, -2, 0, 0.5, 2, 3, torch.inf])
def test_the_norm_of_one_number_is_its_magnitude(order: float) -> None:
    """Its square would be 0, or infinite."""
    x = torch.tensor([[1e-30], [-1e30], [0.0], [torch.nan], [torch.inf], [-3.0]])
    _same(lambda x: torch.linalg.vector_norm(x, order, dim=1), x)
    _same(lambda x: torch.linalg.vector_norm(x[None], order, dim=(0, 2), keepdim=True), x)
    _same(lambda x: torch.linalg.vector_norm(x[:1], order, dtype=torch.float64), x)


def test_the_gradient_of_the_norm_of_one_number_is_its_sign() -> None:
    x = torch.tensor([[1e-30], [-1e30], [-3.0]], requires_grad=True)
    torch.compile(lambda x: x.norm(dim=1), backend=tilewright.backend)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[1.0], [-1.0], [-1.0]]))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("corners", [False, True])
def test_a_place_that_is_no_number_is_the_first(mode: str, corners: bool) -> None:
    x = torch.arange(12.0).view(1, 1, 3, 4)
    nan, inf = torch.nan, torch.inf
    grid = torch.tensor([[[[nan, 0.0], [0.5, nan], [nan, nan], [inf, -inf], [1e30, 0.5], [1.0, -1.0]]]])
    _same(lambda g: F.grid_sample(x, g, mode, "border", corners), grid)


@pytest.mark.parametrize("program", [
    lambda x: x.index_fill(0, torch.tensor([0, -1]), 4.0),
    lambda x: x.t().index_fill(-1, torch.tensor(-2), torch.tensor(3.0)),
    lambda x: (x + 1).index_fill_(1, torch.tensor([-3]), 2),
])  # fmt: skip
def test_indices_that_are_filled_count_from_the_end(program: Program) -> None:
    _same(program, torch.randn(4, 5))


@pytest.mark.parametrize("size", [(2, 3, 1, 5), (2, 3, 4, 1), (2, 3, 1, 1)])
def test_a_grid_of_one_row_lies_in_the_middle(size: tuple[int, ...]) -> None:
    """Torch takes the op apart with a tensor of a number, which it detaches in place."""
    theta = torch.randn(2, 2, 3)
    made = torch.compile(lambda t: F.affine_grid(t, size, align_corners=False), backend=tilewright.backend)
    torch.testing.assert_close(made(theta), F.affine_grid(theta, size, align_corners=False))


def test_lists_of_tensors_become_zeros() -> None:
    """Torch's form of the op writes into copies."""

    def program(given: list[Tensor]) -> list[Tensor]:
        made = [x * 2 for x in given]
        torch._foreach_zero_(made)
        torch._foreach_zero_(given)
        return made

    given = [torch.ones(3), torch.ones(2, 2)]
    made = torch.compile(program, backend=tilewright.backend)(given)
    assert all(not t.any() for t in (*made, *given))


PARTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "slice": (lambda x, y: torch.slice_scatter(x, y, 0, 1, 3), (1, 4)),
    "a longer slice": (lambda x, y: torch.slice_scatter(x, y, 0, 1, 3), (3, 4)),
    "select": (lambda x, y: torch.select_scatter(x, y, 0, 1), (1,)),
    "diagonal": (lambda x, y: torch.diagonal_scatter(x, y), (1,)),
}


@pytest.mark.parametrize("what", PARTS)
def test_parts_of_another_size_are_refused_as_in_eager_mode(what: str) -> None:
    function, shape = PARTS[what]
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="expected src to have a size equal"):
        torch.compile(function, backend=tilewright.backend)(torch.ones(4, 4), torch.ones(shape))


def test_a_diagonal_of_free_sizes_is_written_by_a_kernel() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.diagonal().zero_()
        return y

    x = torch.ones(5, 7)
    run = tilewright.compile(function, (x,), dims={"x": {0: "rows", 1: "columns"}})
    assert torch.equal(run(x), function(x))  # type: ignore[arg-type]
    assert run.coverage is not None and run.coverage.generated == run.coverage.ops


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_whole_numbers_at_equal_distances(dtype: torch.dtype) -> None:
    """The 28th of 50 from 0 to 7 is 4, or next to it, and then 3: as eager's kernel rounds."""

    def numbers(start: float | Tensor, end: float | Tensor) -> Tensor:
        return torch.linspace(start, end, 50, dtype=dtype) * 2

    compiled = torch.compile(numbers, backend="tilewright")
    for start, end in ((0, 7), (3, 9), (60, 4)):
        for given in ((start, end), (torch.tensor(start), torch.tensor(end))):
            assert torch.equal(compiled(*given), numbers(*given))


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("count", [0, 1, 30])
@pytest.mark.parametrize(
    "among", [[], [torch.nan], [torch.nan, torch.inf, 1.0], [-torch.inf, torch.nan], [2.0]]
)
def test_what_is_among_numbers_and_none(among: list[float], count: int, invert: bool) -> None:
    """Many values are looked up in a sorted list, where a search finds nothing behind NaN."""
    values = torch.tensor(among + among[-1:] * count)
    x = torch.tensor([0.0, torch.inf, torch.nan, 1.0, -torch.inf, 2.0] * 4).reshape(4, 6)
    _same(lambda x: torch.isin(x, values, invert=invert), x)
    _same(lambda x: torch.isin(x.half(), values.half(), invert=invert), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.float32])
def test_a_number_is_divided_by_a_tensor(dtype: torch.dtype) -> None:
    x = torch.arange(1, 25).reshape(1, 4, 3, 2).to(dtype)
    _same(lambda x: 7 // x, x.permute(0, 3, 1, 2))
    _same(lambda x: 7.5 // x, x[0, 0, 0, 0])
