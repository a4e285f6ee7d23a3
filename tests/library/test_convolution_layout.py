"""Convolutions that are done on images whose channels lie innermost: when, with which result, and where they stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.support.library_calls import agrees, captured
from torch import Tensor, nn

from tilewright.ir.graph import Graph, LibraryCall, Value
from tilewright.library.convolution_layout import (
    ConvolutionOfChannels,
    Strides,
    lay_channels_innermost,
)
from tilewright.library.offers.offer import channels_last
from tilewright.library.select import select


class Timed:
    """Convolutions of channels take so long, others one second, a pass so long."""

    def __init__(self, channels: float | None, passes: float = 0.0) -> None:
        self.channels, self.passes = channels, passes
        self.asked: list[tuple[bool, Sequence[Strides | None]]] = []

    def seconds(
        self, call: LibraryCall, inputs: Sequence[Value], laid: Sequence[Strides | None]
    ) -> float | None:
        of_channels = isinstance(call.function, ConvolutionOfChannels)
        self.asked.append((of_channels, laid))
        return self.channels if of_channels else 1.0

    def pass_seconds(self, moved: Sequence[Value]) -> float:
        return self.passes


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 6, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.first(x)))


def graph_of(module: nn.Module, x: Tensor, frozen: bool = False) -> Graph:
    return captured(module.to(x.dtype).eval(), (x,), frozen=frozen)


def images(dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(2, 8, 9, 7).to(dtype)


@pytest.mark.parametrize("frozen", [False, True])
def test_all_of_them_are_if_that_is_faster(frozen: bool) -> None:
    module, x, timer = Two(), images(), Timed(0.5)
    graph = select(lay_channels_innermost(graph_of(module, x, frozen), timer))
    graph.verify()
    made = [op for op in graph.ops if op.call is not None]
    assert [type(op.call.function) for op in made if op.call] == [ConvolutionOfChannels] * 2
    for op in made:
        assert op.call is not None and op.call.strides == (channels_last(op.output.shape),)
        assert op.call.wants[:2] == tuple(channels_last(v.shape) for v in op.inputs[:2])
    for op, laid in zip(made, (laid for of_channels, laid in timer.asked if of_channels), strict=True):
        assert op.call is not None and tuple(laid) == op.call.wants, "timed on what a kernel makes or copies"
    image, *_ = (v for v in graph.inputs if isinstance(v, Value))
    (copy,) = (op for op in graph.ops if op.inputs == (image,))
    assert copy.kernel >= 0 and graph.layouts[copy.output].strides == channels_last(image.shape)
    for v, held in graph.constants.items():
        if isinstance(held, Tensor) and held.dim() == 4:
            assert graph.layouts[v].strides == channels_last(v.shape)
            assert held.is_contiguous(memory_format=torch.channels_last)
    agrees(graph, module, (x,), *(() if frozen else (p.detach() for p in module.parameters())))


def test_copies_of_equal_shapes_share_a_kernel() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (nn.Conv2d(8, 8, n, padding=1) for n in (3, 3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.second(self.first(x)))

    graph = lay_channels_innermost(graph_of(Three(), images()), Timed(0.5))
    copies = [op for op in graph.ops if op.kernel >= 0]
    sizes = sorted(str(op.output.shape[2:]) for op in copies)
    assert len(copies) == 4 and len({op.kernel for op in copies}) == 3, sizes


@pytest.mark.parametrize(
    "timer", [Timed(1.0), Timed(None), Timed(0.9, passes=0.3)], ids=["slower", "refused", "copies"]
)
def test_they_stay_where_it_is_not(timer: Timed) -> None:
    graph = graph_of(Two(), images())
    assert lay_channels_innermost(graph, timer) is graph and timer.asked


def test_others_are_not_asked_for() -> None:
    timer = Timed(0.1)
    wide = graph_of(Two(), images(torch.float32))
    last = graph_of(Two(), images().to(memory_format=torch.channels_last))
    assert lay_channels_innermost(wide, timer) is wide and lay_channels_innermost(last, timer) is last
    assert not timer.asked


@pytest.mark.parametrize("channels", [1, 3])
def test_results_have_channels_innermost_whatever_comes_in(channels: int) -> None:
    """With one channel torch cannot tell the formats apart, and takes the other one."""
    run = ConvolutionOfChannels((1, 1), (0, 0), (1, 1), (0, 0), 1, False)
    x, w = torch.randn(2, channels, 9, 7).half(), torch.randn(4, channels, 3, 3).half()
    made = run(x, w, None)
    assert isinstance(made, Tensor) and made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made, torch.conv2d(x, w))
