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


def filled(h: Tensor, rows: Tensor) -> Tensor:
    """Of these writes eager mode takes those that are the same in any order."""
    rows.fill_(0.5)
    return h + rows[0]


@pytest.mark.parametrize("steps", [windows, strided, given, filled])
@pytest.mark.parametrize("trains", [False, True])
def test_eager_mode_runs_such_a_program(steps: Callable[[Tensor, Tensor], Tensor], trains: bool) -> None:
    tilewright.reset()
    found: list[list[Tensor]] = []
    for f in (torch.compile(steps, backend="tilewright"), steps):
        h, rows = torch.linspace(0, 1, 6).requires_grad_(trains), torch.zeros(8).as_strided((3, 6), (1, 1))
        made = f(h, rows)
        made.sum().backward() if trains and made.requires_grad else None
        found.append([made.detach(), rows, *([] if h.grad is None else [h.grad])])
    torch.testing.assert_close(found[0], found[1])
    assert tilewright.stats().fallbacks == 1
    (told,) = tilewright.compilations()
    assert "several elements lie in one place" in str(told.coverage) and not told.kernels


@pytest.mark.parametrize("steps", [windows, strided, given])
def test_strict_refuses_it(steps: Callable[[Tensor, Tensor], Tensor]) -> None:
    tilewright.reset()
    rows = torch.zeros(8).as_strided((3, 6), (1, 1))
    with pytest.raises(Exception, match="several elements lie in one place") as caught:
        torch.compile(steps, backend="tilewright", options={"strict": True})(torch.randn(6), rows)
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, UnsupportedError)
    assert "clone()" in str(inner)
    assert not rows.any(), "bad input loses nothing"


def test_what_eager_mode_refuses_is_refused() -> None:
    tilewright.reset()
    compiled = torch.compile(lambda x: x.add_(1), backend="tilewright")
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        compiled(torch.zeros(1, 6).expand(3, 6))


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


def in_windows_with_gaps(x: Tensor) -> Tensor:
    x.unfold(0, 2, 3).mul_(2)
    return x + 1


def in_windows_of_all(x: Tensor) -> Tensor:
    x.unfold(0, 2, 2).mul_(2)
    return x + 1


class Module(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return in_windows_with_gaps(x)


def test_what_no_window_holds_stays_as_it_is() -> None:
    """Torch takes it for zeros when it makes the write functional."""
    tilewright.reset()
    for count, f in ((1, in_windows_with_gaps), (1, in_windows_of_all)):
        given, x = torch.arange(8.0), torch.arange(8.0)
        torch.testing.assert_close(torch.compile(f, backend="tilewright")(given), f(x))
        torch.testing.assert_close(given, x)
        assert tilewright.stats().fallbacks == count


def test_an_exported_program_that_writes_so_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="windows that leave elements out"):
        tilewright.compile(torch.export.export(Module(), (torch.arange(8.0),)))
