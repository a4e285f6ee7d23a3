"""Results that torch makes anew from inputs which the program writes: they lie where eager's do, for each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright

Program = Callable[..., Tensor]
Cut = Callable[[Tensor], Tensor]


def part(x: Tensor) -> Tensor:
    b = x.split([1, x.shape[1] - 1], 1)[1]
    b.neg_()
    return b


def diagonal(x: Tensor) -> Tensor:
    d = x.diagonal(dim1=1, dim2=2)
    d.add_(1)
    return d


def last(x: Tensor) -> Tensor:
    x[:, -1] += 1
    return x[:, -1]


def checked(f: Program, run: Program, sizes: tuple[int, ...], cut: Cut, *more: Tensor) -> None:
    ours = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    eager = ours.clone()
    x, y = cut(ours), cut(eager)
    made, wanted = run(x, *more), f(y, *more)
    assert torch.equal(made, wanted) and torch.equal(ours, eager)
    assert (made.stride(), made.storage_offset()) == (wanted.stride(), wanted.storage_offset())
    assert made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("cut", [
    lambda m: m[1:, 1:, 1:], lambda m: m[:, :, ::2], lambda m: m[1:], lambda m: m[1:].permute(0, 2, 1),
], ids=["with gaps and behind others", "with gaps", "behind others", "turned"])  # fmt: skip
@pytest.mark.parametrize("f", [part, diagonal, last])
def test_views_of_written_inputs_of_free_sizes(f: Program, cut: Cut) -> None:
    tilewright.reset()
    run = torch.compile(f, backend="tilewright", dynamic=True)
    for sizes in ((3, 5, 8), (4, 7, 6)):
        checked(f, run, sizes, cut)
    assert all("begins where" not in str(c.coverage) for c in tilewright.compilations())


def behind_data(x: Tensor, at: Tensor) -> Tensor:
    i = at.item()
    torch._check(i >= 0)  # pyright: ignore[reportPrivateUsage]
    torch._check(i < x.shape[0])  # pyright: ignore[reportPrivateUsage]
    y = x[i:]  # pyright: ignore[reportArgumentType]
    y.add_(1)
    return y


@pytest.mark.parametrize("cut", [lambda m: m, lambda m: m[1:, 1:, 1:]], ids=["whole", "with gaps"])
def test_a_view_that_begins_where_data_says_runs_in_eager_mode(cut: Cut) -> None:
    tilewright.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # pyright: ignore[reportPrivateUsage]
        run = torch.compile(behind_data, backend="tilewright", dynamic=True)
        for sizes in ((4, 5, 8), (5, 7, 6)):
            checked(behind_data, run, sizes, cut, torch.tensor(2))
    assert "begins where data says" in str(tilewright.compilations()[0].coverage)
