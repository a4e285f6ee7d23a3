"""Convolutions whose windows part the image are products, where a clock says so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.support.library_calls import agrees, captured
from torch import Tensor, nn

from tilewright.ir.graph import Graph, LibraryCall, Value
from tilewright.library.convolution_layout import Strides
from tilewright.library.offers.offer import channels_last
from tilewright.library.patch_convolutions import PatchConvolution, multiply_patches
from tilewright.library.select import select


class Timed:
    """Products take so long, convolutions one second."""

    def __init__(self, product: float | None) -> None:
        self.product, self.asked = product, 0

    def seconds(
        self, call: LibraryCall, inputs: Sequence[Value], laid: Sequence[Strides | None]
    ) -> float | None:
        self.asked += 1
        return self.product if isinstance(call.function, PatchConvolution) else 1.0

    def pass_seconds(self, moved: Sequence[Value]) -> float:
        raise AssertionError("nothing is copied")


def graph_of(layer: nn.Module, x: Tensor) -> Graph:
    return select(captured(layer.half().eval(), (x,), frozen=False))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_they_agree_with_what_is_left_over(layout: torch.memory_format, bias: bool) -> None:
    layer = nn.Conv2d(3, 5, (4, 2), stride=(4, 2), bias=bias)
    layer.weight.data = layer.weight.data.to(memory_format=layout)
    x = torch.randn(2, 3, 14, 9).half().to(memory_format=layout)
    graph = multiply_patches(graph_of(layer, x), Timed(0.5))
    graph.verify()
    (op,) = (op for op in graph.ops if op.call is not None)
    assert op.call is not None and isinstance(op.call.function, PatchConvolution)
    assert op.call.strides == (channels_last(op.output.shape),)
    agrees(graph, layer, (x,), *(p.detach() for p in layer.parameters()))
    made = PatchConvolution()(x, *(p.detach() for p in layer.parameters()), *(() if bias else (None,)))
    assert isinstance(made, Tensor) and made.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("timer", [Timed(0.99), Timed(None)], ids=["as fast", "refused"])
def test_the_library_keeps_them_where_they_are_not_faster(timer: Timed) -> None:
    graph = graph_of(nn.Conv2d(3, 5, 4, stride=4), torch.randn(2, 3, 8, 8).half())
    assert multiply_patches(graph, timer) is graph and timer.asked


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 2, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(4, 4, 1),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
    ],
)
def test_others_are_not_asked_for(layer: nn.Module) -> None:
    timer = Timed(0.1)
    graph = graph_of(layer, torch.randn(2, 4, 8, 8).half())
    assert multiply_patches(graph, timer) is graph and not timer.asked
