"""Programs without eager code behind them: what they write must lie apart from what they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import InputError, UnsupportedError


class Writes(nn.Module):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        c[3:5] = x[:2]
        c.mul_(2)
        return c.sum(0) + x.sum(0)


def _loaded(folder: Path) -> Callable[..., object]:
    fast = tilewright.compile(Writes(), (torch.ones(9, 7), torch.ones(9, 7)))
    tilewright.save(fast, folder / "writes.tw")
    return tilewright.load(folder / "writes.tw")


def _exported(folder: Path) -> Callable[..., object]:
    return tilewright.compile(torch.export.export(Writes(), (torch.ones(9, 7), torch.ones(9, 7))))


@pytest.mark.parametrize("made", [_loaded, _exported])
def test_what_is_written_lies_apart(made: Callable[[Path], Callable[..., object]], tmp_path: Path) -> None:
    fast, base = made(tmp_path), torch.randn(20, 7)
    before = base.clone()
    for x, c in ((base[:9], base[5:14]), (base[:9], base[:9]), (base[2:11], base[:9])):
        with pytest.raises(InputError, match="is written and shares memory"):
            fast(x, c)
    assert torch.equal(base, before)
    other = base.clone()
    result, wanted = fast(base[:9], base[9:18]), Writes()(other[:9], other[9:18])
    torch.testing.assert_close((result, base), (wanted, other))


@pytest.mark.parametrize("made", [_loaded, _exported])
def test_no_gradient_is_lost(made: Callable[[Path], Callable[..., object]], tmp_path: Path) -> None:
    fast, (x, c) = made(tmp_path), torch.randn(2, 9, 7)
    with pytest.raises(UnsupportedError, match="a gradient is asked for"):
        fast(x.clone().requires_grad_(), c)
    with torch.no_grad():
        fast(x.clone().requires_grad_(), c)
