"""Keys and values of bytes, unpacked on the way to matrix units in the type in which the program multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.end_to_end.attention.split_keys import right, statements
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.ir.dtype import f16
from tilewright.ir.program import Dot

Function = Callable[..., Tensor]


def rows(q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor) -> Tensor:
    keys, values = k.to(q.dtype) * k_scale, v.to(q.dtype) * v_scale
    s = (q @ keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return torch.softmax(s, -1).to(values.dtype) @ values


def weights(q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor) -> Tensor:
    """Small weights of many keys: times a small scale they are no halves any more, times an element they are."""
    s = q @ (k.to(q.dtype) * k_scale).transpose(-1, -2)
    return (torch.sigmoid(s.float() - 9.0).to(q.dtype)) @ (v.to(q.dtype) * v_scale)


def operands(scale: float, columns: int) -> list[Tensor]:
    shape, scales = (1, 2, 80, 32), (1, 2, 80, columns)
    stored = [torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(2)]
    made = [torch.rand(scales).add(0.5).mul(scale).half() for _ in range(2)]
    return [torch.randn(shape).half(), stored[0], made[0], stored[1], made[1]]


CASES: dict[str, tuple[Function, list[Tensor]]] = {
    "rows": (rows, operands(0.02, 1)),
    "elements": (rows, operands(0.02, 32)),
    "small": (weights, operands(0.001, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_unpacked_beside_the_product(name: str, tmp_path: Path) -> None:
    function, given = CASES[name]
    made = compiled(function, given)
    (kernel,) = made.kernels
    products = [s for s in statements(kernel.program.body) if isinstance(s, Dot)]
    assert products and all(s.a.dtype is f16 and s.b.dtype is f16 for s in products)
    right(made, function, given, tmp_path)
