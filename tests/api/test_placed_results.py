"""Results that torch makes anew from an input, at the place that it reads off what the graph returned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright


def broadcast(x: Tensor) -> Tensor:
    x[0] = 0.5
    return x.broadcast_to(2, *x.shape)


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    x[0] = 0.5
    return x.flatten(), x[1:]


def mapped(x: Tensor) -> Tensor:
    return torch.select_scatter(x, x[0] * 2, 0, 1).transpose(0, 1)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("function", [broadcast, two, mapped])
def test_results_lie_where_eagers_do(function: Callable[[Tensor], object], offset: int) -> None:
    """Also behind the start of a storage, with sizes that are not known."""
    compiled = torch.compile(function, backend=tilewright.backend, dynamic=True)
    for sizes in ((2, 4, 3, 4), (2, 4, 8, 7)):
        base = torch.randn(offset + torch.Size(sizes).numel())
        x, y = (t[offset:].view(sizes) for t in (base.clone(), base.clone()))
        ours, eager = (r if isinstance(r, tuple) else (r,) for r in (compiled(x), function(y)))
        assert x.equal(y)
        for a, b in zip(ours, eager, strict=True):
            assert isinstance(a, Tensor) and isinstance(b, Tensor) and a.equal(b) and a.stride() == b.stride()
            assert (a.data_ptr() - x.data_ptr() == b.data_ptr() - y.data_ptr()) or function is mapped


@pytest.mark.parametrize(
    "pieces", [lambda x: x.chunk(2, 1), lambda x: x.split(3, 1), lambda x: x[:, 2:].unbind(1)]
)
def test_pieces_of_a_part(pieces: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """Of a part whose sizes are not proved, so that a call makes it (found by the fuzz, 5300035)."""

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return pieces(x.tensor_split(2, -1)[1])[:2]

    tilewright.reset()
    compiled = torch.compile(parts, backend=tilewright.backend, dynamic=True)
    for sizes in ((33, 8), (11, 31), (7, 33), (5, 40)):
        x = torch.randn(*sizes)
        with torch.no_grad():
            for a, b in zip(compiled(x), parts(x), strict=True):
                assert a.equal(b) and a.data_ptr() == b.data_ptr() and a.stride(0) == b.stride(0)
