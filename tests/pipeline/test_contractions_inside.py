"""With `contractions="inside"` whatever has an expression is a kernel, plain products and convolutions too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

import tilewright


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).half() / 4


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
    "linear": (F.linear, ((48, 80), (64, 80))),
    "bmm": (torch.bmm, ((3, 33, 40), (3, 40, 50))),
    "gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), ((2, 24, 80), (64, 80), (64,))),
    "gated": (gated, ((40, 64), (96, 64), (96, 64))),
    "convolution": (F.conv2d, ((2, 8, 9, 9), (16, 8, 3, 3))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_is_kernels(name: str) -> None:
    """(`compiled` refuses library calls.)"""
    torch.manual_seed(0)
    run, shapes = PROGRAMS[name]
    inputs = [halves(*shape) for shape in shapes]
    made = compiled(run, inputs)
    results, _ = made.run(inputs)
    torch.testing.assert_close(results[0], run(*inputs), rtol=4e-3, atol=4e-3)


def test_the_default_calls_a_library() -> None:
    with pytest.raises(AssertionError, match="a library call is left"):
        compiled(F.linear, [halves(48, 80), halves(64, 80)], contractions="modelled")


def test_products_of_frozen_weights_too() -> None:
    layer = torch.nn.Linear(24, 40)
    fast = tilewright.compile(
        layer, (torch.randn(6, 24),), options={"contractions": "inside", "strict": True}
    )
    x = torch.randn(6, 24)
    torch.testing.assert_close(fast(x), layer(x))
    assert fast.kernels and not fast.calls
