"""Zeros around images become part of the convolutions that read them; what is no zero, or no frame, stays."""

from __future__ import annotations

import pytest
import torch
from tests.support.library_calls import captured
from torch import Tensor, nn
from torch.nn import functional as F

import tilewright
from tilewright import accuracy
from tilewright.ir.graph import Graph
from tilewright.ir.task import Convolution
from tilewright.library.padded_convolutions import take_zeros, zeros_around
from tilewright.library.select import select
from tilewright.rewrite import interpret
from tilewright.rewrite.normal.normalise import normalise


class Padded(nn.Module):
    """An image with something around it, and a convolution."""

    def __init__(
        self, pad: tuple[int, ...], value: float = 0.0, mode: str = "constant", **window: int
    ) -> None:
        super().__init__()
        self.pad, self.value, self.mode = pad, value, mode
        self.convolution = nn.Conv2d(24, 24, 3, **window)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        value = self.value if self.mode == "constant" else None
        return torch.relu(self.convolution(F.pad(torch.tanh(x), self.pad, self.mode, value)))


def selected(module: nn.Module, x: Tensor, *, frozen: bool = True) -> Graph:
    """A graph whose convolution is a call."""
    return normalise(select(captured(module.eval(), (x,), frozen=frozen)), interpret)


def task_of(module: nn.Module, x: Tensor) -> Convolution:
    graph = take_zeros(selected(module, x))
    (found,) = [
        op.call.task for op in graph.ops if op.call is not None and isinstance(op.call.task, Convolution)
    ]
    assert isinstance(found, Convolution)
    return found


@pytest.mark.parametrize(
    ("pad", "own", "padding", "uneven"),
    [
        ((1, 1, 1, 1), 0, (1, 1), ()),
        ((2, 2, 1, 1), 1, (2, 3), ()),
        ((0, 1, 0, 1), 0, (0, 0), ((0, 1), (0, 1))),
        ((3, 1, 0, 2), 1, (1, 2), ((0, 2), (2, 0))),
        ((1, -1, 0, 1), 0, (0, 0), ()),
        ((0, 0, 1, 1, 0, 0), 0, (1, 0), ()),
    ],
)
def test_zeros_on_each_side_are_counted(
    pad: tuple[int, ...], own: int, padding: tuple[int, int], uneven: tuple[tuple[int, int], ...]
) -> None:
    task = task_of(Padded(pad, padding=own), torch.randn(1, 24, 10, 12))
    assert (task.padding, task.uneven) == (padding, uneven)


def test_what_is_no_frame_of_zeros_stays() -> None:
    x = torch.randn(1, 24, 10, 12)
    for module in (
        Padded((1, 1, 1, 1), 0.5),
        Padded((1, 1, 1, 1), mode="reflect"),
        Padded((1, 1, 1, 1), mode="replicate"),
    ):
        assert task_of(module, x).padding == (0, 0)
    graph = selected(Padded((1, 1, 1, 1)), x, frozen=False)
    assert take_zeros(graph) is graph, "a weight that may change"
    assert sum(zeros_around(op) == ((0, 0), (0, 0), (1, 1), (1, 1)) for op in graph.ops) == 1


@pytest.mark.parametrize("groups", [1, 24])
@pytest.mark.parametrize(("pad", "stride"), [((0, 1, 0, 1), 2), ((1, 1, 1, 1), 1), ((2, 0, 1, 3), 1)])
def test_they_give_what_eager_gives(groups: int, pad: tuple[int, ...], stride: int) -> None:
    module = Padded(pad, groups=groups, stride=stride).eval()
    for own in ("1", "0"):
        x = torch.randn(2, 24, 12 + int(own), 11)
        with torch.no_grad():
            fast = tilewright.compile(module, (x,), freeze=True, options={"measure": own == "1"})
            made, again = fast(x), fast(x)
            assert isinstance(made, Tensor) and isinstance(again, Tensor)
            verdict = accuracy.compare(made, module(x), accuracy.in_float64(module)(x))
        assert verdict.passed and torch.equal(made, again), str(verdict)
