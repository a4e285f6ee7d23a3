"""Gradients of average pools and of nearest neighbours are sums of what each element was read for."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import pytest
import torch
from tests.support.ops.captured_op import agree, capture
from torch import Tensor
from torch.nn.functional import avg_pool2d, avg_pool3d, interpolate

import tilewright

POOLS = {
    "tiles": ([2, 2], [2, 2], [0, 0], False, True, None),
    "tiles that leave a rest": ([3, 2], [3, 2], [0, 0], False, True, None),
    "tiles over the border": ([3, 4], [3, 4], [1, 2], True, True, None),
    "border not counted": ([3, 4], [3, 4], [1, 1], True, False, None),
    "at each place": ([3, 5], [1, 1], [1, 2], False, True, None),
    "at each place, border not counted": ([3, 3], [1, 1], [1, 1], False, False, None),
    "a divisor": ([2, 3], [1, 3], [0, 0], False, True, 7),
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_average_pools(pool: str, dynamic: bool) -> None:
    kernel, stride, padding, ceil, counted, divisor = POOLS[pool]
    x = torch.randn(2, 3, 9, 11)
    y = avg_pool2d(x, kernel, stride, padding, ceil, counted, divisor)

    def gradient(g: Tensor, t: Tensor) -> Tensor:
        return torch.ops.aten.avg_pool2d_backward(g, t, kernel, stride, padding, ceil, counted, divisor)

    args = [torch.randn_like(y), x]
    batch = [True, False, False, False]
    graph = capture(gradient, args, [batch, batch] if dynamic else None)
    assert not [op for op in graph.ops if op.call is not None]
    agree(graph, gradient, args)


def test_windows_that_overlap_stay_calls() -> None:
    x = torch.randn(2, 3, 9, 9)
    y = avg_pool2d(x, 3, 2)

    def gradient(g: Tensor, t: Tensor) -> Tensor:
        return torch.ops.aten.avg_pool2d_backward(g, t, [3, 3], [2, 2], [0, 0], False, True, None)

    graph = capture(gradient, [torch.randn_like(y), x])
    assert [op.call.name for op in graph.ops if op.call is not None] == ["aten.avg_pool2d_backward"]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("size", [(8, 12), (4, 9), (3, 17), (2, 2), (13, 5)])
def test_nearest_neighbours(mode: str, size: tuple[int, int]) -> None:
    name = "upsample_nearest2d" if mode == "nearest" else "_upsample_nearest_exact2d"
    op = getattr(torch.ops.aten, f"{name}_backward")

    def gradient(g: Tensor) -> Tensor:
        return op(g, size, [2, 3, 4, 6])

    args = [torch.randn(2, 3, *size)]
    graph = capture(gradient, args)
    agree(graph, gradient, args)
    assert not [op for op in graph.ops if op.call is not None]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_training_step_generates_them(form: torch.memory_format) -> None:
    def loss(x: Tensor) -> Tensor:
        small = avg_pool2d(x.sin(), 2)
        return (interpolate(small, scale_factor=2.0) * x).square().sum()

    torch._dynamo.reset()
    tilewright.reset()
    found = torch.compile(loss, backend=tilewright.backend)
    x = torch.randn(2, 4, 8, 6).to(memory_format=form).requires_grad_()
    y = x.detach().clone().requires_grad_()
    found(x).backward()
    loss(y).backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert x.grad is not None and y.grad is not None and x.grad.stride() == y.grad.stride()
    assert all(c.coverage.ops == c.coverage.generated for c in tilewright.compilations())


def test_pools_of_volumes() -> None:
    x = torch.randn(2, 3, 4, 6, 4)
    y = avg_pool3d(x, 2)

    def gradient(g: Tensor, t: Tensor) -> Tensor:
        return torch.ops.aten.avg_pool3d_backward(g, t, [2], [2], [0], False, True, None)

    args = [torch.randn_like(y), x]
    graph = capture(gradient, args)
    assert not [op for op in graph.ops if op.call is not None]
    agree(graph, gradient, args)
