"""Convolutions with one place each: products on CPUs, with eager's results, gradients and strides; others stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tilewright
from tilewright.accuracy import compare
from tilewright.capture.aten.whole_windows import LAST, multiply_whole_windows

ONE_PLACE = {
    "the whole image": ((2, 5, 4, 4), (7, 5, 4, 4), (1, 1), (0, 0), (1, 1)),
    "the middle tap": ((2, 5, 1, 1), (7, 5, 3, 3), (1, 1), (1, 1), (1, 1)),
    "two taps of three": ((1, 6, 2), (4, 6, 3), (2,), (1,), (1,)),
    "spread beyond the image": ((2, 5, 3, 4), (7, 5, 3, 3), (4, 4), (6, 6), (6, 6)),
    "in three dims": ((2, 3, 2, 1, 3), (4, 3, 2, 3, 3), (1, 1, 1), (0, 1, 0), (1, 1, 1)),
    "less than the image": ((2, 5, 5, 5), (7, 5, 3, 3), (3, 3), (0, 0), (1, 1)),
    "no image": ((0, 5, 2, 2), (7, 5, 2, 2), (1, 1), (0, 0), (1, 1)),
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("last", ["", "x", "w", "xw"], ids=["nchw", "x nhwc", "w nhwc", "nhwc"])
@pytest.mark.parametrize("name", ONE_PLACE)
def test_one_place_is_a_product(name: str, *, last: str, bias: bool) -> None:
    shape, window, stride, padding, dilation = ONE_PLACE[name]
    torch.manual_seed(0)
    x, w = torch.randn(shape), torch.randn(window)
    if x.dim() in LAST:
        x = x.to(memory_format=LAST[x.dim()]) if "x" in last else x
        w = w.to(memory_format=LAST[x.dim()]) if "w" in last else w
    b = torch.randn(window[0]) if bias else None
    rest = (stride, padding, dilation, False, (0,) * len(stride), 1)
    made = multiply_whole_windows(x, w, b, *rest)
    assert isinstance(made, Tensor)
    eager = torch.ops.aten.convolution(x, w, b, *rest)
    exact = torch.ops.aten.convolution(x.double(), w.double(), None if b is None else b.double(), *rest)
    assert made.shape == eager.shape and (made.stride() == eager.stride() or not made.numel())
    assert compare(made, eager, exact).passed


ROW, COLUMN, TAPS = torch.zeros(2, 4, 3), torch.zeros(5), torch.zeros(5, 4, 3)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "rest"),
    [
        (ROW, TAPS, None, ((1,), (1,), (1,), False, (0,), 1)),
        (ROW, TAPS[..., :1], None, ((4,), (0,), (1,), False, (0,), 1)),
        (ROW, TAPS[:4, :1], None, ((1,), (0,), (1,), False, (0,), 4)),
        (ROW, TAPS.transpose(0, 1), None, ((1,), (0,), (1,), True, (0,), 1)),
        (ROW[..., :1], TAPS[..., :2], None, ((9,), (2,), (4,), False, (0,), 1)),
        (ROW, TAPS[:, :3], None, ((1,), (0,), (1,), False, (0,), 1)),
        (ROW, TAPS, COLUMN[:1], ((1,), (0,), (1,), False, (0,), 1)),
        (ROW, TAPS, None, ((0,), (0,), (1,), False, (0,), 1)),
        (ROW.to("meta"), TAPS.to("meta"), None, ((1,), (0,), (1,), False, (0,), 1)),
    ],
    ids=[
        "places",
        "one tap",
        "groups",
        "transposed",
        "zeros alone",
        "channels",
        "bias",
        "no stride",
        "device",
    ],
)
def test_others_stay(x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[object, ...]) -> None:
    assert multiply_whole_windows(x, weight, bias, *rest) is NotImplemented  # type: ignore[arg-type]


def test_gradients_and_a_free_batch() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.relu(functional.conv2d(x, w, b, stride=2, padding=1))

    fast = tilewright.compile(
        program, (torch.zeros(3, 4, 2, 2), torch.zeros(5, 4, 3, 3), torch.zeros(5)), dims={"x": {0: "batch"}}
    )
    x, w, b = torch.randn(6, 4, 2, 2), torch.randn(5, 4, 3, 3), torch.randn(5)
    made = fast(x, w, b)
    assert isinstance(made, Tensor)
    assert compare(made, program(x, w, b), program(x.double(), w.double(), b.double())).passed
    trained = torch.compile(program, backend="tilewright")
    found: list[tuple[Tensor, ...]] = []
    for run, dtype in ((trained, torch.float32), (program, torch.float32), (program, torch.float64)):
        given = [t.detach().to(dtype).requires_grad_() for t in (x, w, b)]
        found.append(torch.autograd.grad(run(*given).square().sum(), given))
    for ours, eager, exact in zip(*found, strict=True):
        assert compare(ours, eager, exact).passed
