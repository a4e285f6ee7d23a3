"""What torch declares of its ops, as programs are traced by it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewright
from tilewright.capture.torch_declarations import vector_norm_counted

assert tilewright.backend  # with it, declarations are put right


@pytest.mark.parametrize("ord", [0, 1, 2, 3, float("inf")])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_over_dims_of_size_one_have_the_declared_shape(ord: float, keepdim: bool) -> None:
    """Seen with torch 2.11: a dim counted from the end stayed, so that programs were traced with other shapes."""
    for shape in ((1, 5), (5, 1), (1, 1), (3, 1, 4)):
        x = torch.randn(shape)
        for dim in (None, 0, -1, -2, [0, -1]):
            made = torch.linalg.vector_norm(x, ord, dim, keepdim)
            with FakeTensorMode() as mode:
                told = torch.linalg.vector_norm(mode.from_tensor(x), ord, dim, keepdim)
            assert (told.shape, told.stride()) == (made.shape, made.stride())


def test_dims_are_counted_from_the_start() -> None:
    asked: list[object] = []

    def usual(x: Tensor, ord: float, dim: object, keepdim: bool, *, dtype: torch.dtype | None) -> Tensor:
        asked.append(dim)
        return x

    declared = vector_norm_counted(usual)
    for dim in (-1, [-2, 0], None, 1, 7):
        declared(torch.zeros(2, 3, 4), 2.0, dim)
    assert asked == [[2], [1, 0], None, [1], [7]]


def test_whoever_asks_for_the_backend_has_them_put_right() -> None:
    """Also who gives it to `torch.compile` itself, where torch's entry point is not asked."""
    code = "import sys, tilewright; tilewright.backend; print('tilewright.capture.torch_declarations' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
