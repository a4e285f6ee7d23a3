"""Writes into tensors that overlap with themselves are refused; such tensors that are only read are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.errors import UnsupportedError


def windows(h: Tensor, _: Tensor) -> Tensor:
    rows = torch.zeros(8).unfold(0, 6, 1)
    rows[0] += h
    rows[1] += h
    return rows * 1


def strided(h: Tensor, _: Tensor) -> Tensor:
    rows = torch.zeros(8).as_strided((3, 6), (1, 1))
    rows[0].copy_(h)
    return rows * 1


def given(h: Tensor, rows: Tensor) -> Tensor:
    rows[1] += h
    return h + rows[0]


@pytest.mark.parametrize("steps", [windows, strided, given])
def test_a_write_is_refused(steps: Callable[[Tensor, Tensor], Tensor]) -> None:
    tilewright.reset()
    rows = torch.zeros(8).as_strided((3, 6), (1, 1))
    with pytest.raises(Exception, match="several elements lie in one place") as caught:
        torch.compile(steps, backend="tilewright")(torch.randn(6), rows)
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, UnsupportedError)
    assert "clone()" in str(inner)
    assert not rows.any(), "bad input loses nothing"


def test_a_write_into_an_expanded_input_is_refused() -> None:
    tilewright.reset()
    with pytest.raises(Exception, match="several elements lie in one place"):
        torch.compile(given, backend="tilewright")(torch.randn(6), torch.zeros(1, 6).expand(3, 6))


def read(h: Tensor, rows: Tensor) -> Tensor:
    return (rows * h).sum(0)


def written_beside(h: Tensor, rows: Tensor) -> Tensor:
    line = torch.zeros(8)
    shown = line.unfold(0, 6, 1)
    line[1] += h[0]
    return shown * h + rows


def expanded(h: Tensor, _: Tensor) -> Tensor:
    rows = h.clone().expand(3, 6)
    rows[0] += h
    return rows.sum(0)


def checkpointed(h: Tensor, rows: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(read, h, rows, use_reentrant=False)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("steps", [read, written_beside, expanded, checkpointed])
def test_what_is_only_read_is_compiled(steps: Callable[[Tensor, Tensor], Tensor]) -> None:
    tilewright.reset()
    h, rows = torch.randn(6), torch.randn(8).as_strided((3, 6), (1, 1))
    torch.testing.assert_close(
        torch.compile(steps, backend="tilewright", fullgraph=True)(h, rows), steps(h, rows)
    )
