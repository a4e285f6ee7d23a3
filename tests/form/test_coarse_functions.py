"""Where a coarse function takes the place of a rounding: as a factor of a result in half precision, nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from torch import Tensor
from torch.nn import functional as F

from tilewright.ir.expr import walk
from tilewright.ir.program import expressions

X = torch.randn(64, 64)


def slope(x: Tensor) -> Tensor:
    """Two parts that may cancel."""
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x)


@pytest.mark.parametrize(
    ("function", "x", "options", "found"),
    [
        (F.gelu, X.half(), {}, {"coarse_erfc"}),
        (F.gelu, X.bfloat16(), {}, {"coarse_erfc"}),
        (lambda x: F.gelu(x @ x).sin(), X.half(), {}, {"coarse_erfc"}),
        (lambda x: F.gelu(x, approximate="tanh"), X.half(), {}, {"coarse_tanh"}),
        (F.gelu, X, {}, {"quick_erfc"}),
        (F.gelu, X.half(), {"round_intermediates": True}, {"quick_erfc"}),
        (slope, X.half(), {}, {"quick_erfc"}),
        (torch.erfc, X.bfloat16(), {}, set()),
        (lambda x: F.gelu(x.float()).half(), X.half(), {}, {"quick_erfc"}),
    ],
    ids=[
        "fp16",
        "bf16",
        "behind a product",
        "tanh",
        "fp32",
        "rounded",
        "slope",
        "erfc",
        "rounded by the program",
    ],
)
def test_factors_of_halves(
    function: Callable[[Tensor], Tensor], x: Tensor, options: dict[str, bool], found: set[str]
) -> None:
    kernels = compiled(function, [x], **options).kernels  # pyright: ignore[reportArgumentType]
    roots = [e for k in kernels for s in k.program.statements() for e in expressions(s)]
    ops = {y.op for e in roots for y in walk(e)}
    assert {op for op in ops if op.startswith("coarse_") or op == "quick_erfc"} == found
