"""Convolutions that take the sum and the ReLU behind them: which ones, and with which result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.library_calls import agrees, calls, captured, generated
from torch import Tensor, nn

from tilewright.ir.graph import Graph
from tilewright.library.fuse_convolutions import FusedForm, fuse_convolutions
from tilewright.library.offers.cudnn import FusibleConvolution, RectifiedConvolution
from tilewright.library.select import select

FUSED = "cudnn.convolution_relu"


class Block(nn.Module):
    """A residual block, as networks of images have it."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu, bias: bool = True) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(8, 8, 3, padding=1, bias=bias) for _ in range(2))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.last(self.act(self.first(x))) + x)


class Measured:
    """Says the same of every form, and writes down what it is asked."""

    def __init__(self, faster: bool = True) -> None:
        self.faster = faster
        self.asked: list[FusedForm] = []

    def __call__(self, form: FusedForm) -> bool:
        self.asked.append(form)
        return self.faster


def images(dtype: torch.dtype = torch.float16, layout: torch.memory_format = torch.channels_last) -> Tensor:
    return torch.randn(2, 8, 6, 5).to(dtype).to(memory_format=layout)


def selected(module: nn.Module, x: Tensor) -> Graph:
    return select(captured(module.eval().to(x.dtype), (x,), frozen=False))


def fused(module: nn.Module, x: Tensor, timer: Measured) -> Graph:
    for weight in module.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.to(memory_format=torch.channels_last)
    graph = selected(module, x)
    made = fuse_convolutions(graph, timer)
    made.verify()
    assert not any(op.call and isinstance(op.call.function, FusibleConvolution) for op in made.ops)
    return made


def on_the_cpu(form: RectifiedConvolution) -> Callable[..., Tensor]:
    """What cuDNN computes, summed in fp32 and rounded once."""

    def run(x: Tensor, w: Tensor, b: Tensor | None, z: Tensor | None = None) -> Tensor:
        wide = None if b is None else b.float()
        y = torch.conv2d(x.float(), w.float(), wide, form.stride, form.padding, form.dilation, form.groups)
        return torch.relu(y if z is None else y + z.float()).to(x.dtype)

    return run


@pytest.mark.parametrize("bias", [True, False])
def test_a_residual_block_is_two_calls(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RectifiedConvolution, "bind", on_the_cpu)
    module, x, timer = Block(bias=bias), images(), Measured()
    graph = fused(module, x, timer)
    assert calls(graph) == [FUSED, FUSED] and not generated(graph)
    assert [form.second is None for form in timer.asked] == [True, False]
    agrees(graph, module, (x,), *(p.detach() for p in module.parameters()))


@pytest.mark.parametrize(
    ("why", "act", "x"),
    [
        ("another activation", torch.sigmoid, images()),
        ("fp32", torch.relu, images(torch.float32)),
        ("rows innermost", torch.relu, images(layout=torch.contiguous_format)),
    ],
)
def test_what_cudnn_has_no_form_for_stays(why: str, act: Callable[[Tensor], Tensor], x: Tensor) -> None:
    timer = Measured()
    graph = selected(Block(act), x)
    assert calls(fuse_convolutions(graph, timer)) == calls(graph) and not timer.asked, why


def test_unknown_sizes_stay() -> None:
    """Which kernel cuDNN takes, and so what becomes of NaN, hangs on them."""
    marks = [[True, False, False, False]]
    timer, x, module = Measured(), images(), Block().eval().to(torch.float16)
    graph = select(captured(module, (x,), frozen=False, dynamic=marks))
    assert calls(fuse_convolutions(graph, timer)) == calls(graph) and not timer.asked


def test_what_is_slower_stays() -> None:
    x, timer = images(), Measured(faster=False)
    assert FUSED not in calls(fused(Block(), x, timer)) and len(timer.asked) == 2


def test_a_result_that_only_a_kernel_reads_stays() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.layer(x)).mean((2, 3))

    timer = Measured()
    assert FUSED not in calls(fused(Pooled(), images(), timer)) and not timer.asked


def test_a_sum_that_is_read_elsewhere_stays() -> None:
    class Branching(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) + x
            return torch.relu(y) * torch.sigmoid(y)

    assert FUSED not in calls(fused(Branching(), images(), Measured()))
