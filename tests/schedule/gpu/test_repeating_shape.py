"""A norm in front of the product of a matrix and a vector: each grid point computes it again, and no one else does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.interp.program import run_program
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset

K, N = 256, 96


def normed(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.rms_norm(x, (K,), w) @ a.T


def gated(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = F.layer_norm(x, (K,), w)
    return F.silu(h @ a.T) * (h @ b.T)


def scaled(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What is folded beside is longer than what each point folds."""
    return (x @ a.T) * (a @ b.T).sum()


def both(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What each point would compute again is a result, too."""
    h = F.rms_norm(x, (K,), w)
    return h @ a.T, h.square().sum(-1)


def solved(function: Callable[..., object], dtype: torch.dtype) -> tuple[Schedule, list[np.ndarray], object]:
    """The schedule of all of a function as one kernel, what it gives, and what the function gives."""
    torch.manual_seed(0)
    inputs = (torch.randn(1, K), torch.randn(K), torch.randn(N, K), torch.randn(N, K))
    given = [t.to(dtype) for t in inputs]
    graph = compiled(function, given).cover.graph
    whole = Kernel(graph.ops, tuple(v for v in graph.outputs if isinstance(v, Value)))
    made = Solver(preset("sm_90"), Options(contractions="inside")).solve(whole, {})
    held = dict(zip(graph.inputs, given, strict=True))
    buffers = [held[v].float().numpy().ravel().astype(np.float32) if v in held else None for v in made.params]
    assert isinstance(made.schedule, Schedule)
    return made.schedule, run_program(made.program, buffers)[len(whole.inputs) :], function(*given)


def on_grid(schedule: Schedule) -> list[int | None]:
    return [dims.static(c.axis.extent) for c in schedule.tiling.classes if c.role is Role.GRID]


@pytest.mark.parametrize("function", [normed, gated])
def test_columns_of_the_product_are_on_the_grid(function: Callable[..., object]) -> None:
    schedule, (found,), wanted = solved(function, torch.float32)
    assert on_grid(schedule) == [N]
    np.testing.assert_allclose(found, np.asarray(wanted).ravel(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("function", [scaled, both])
def test_much_work_is_not_repeated(function: Callable[..., object]) -> None:
    schedule, found, wanted = solved(function, torch.float32)
    assert N not in on_grid(schedule)
    for got, want in zip(found, wanted if isinstance(wanted, tuple) else [wanted], strict=True):
        np.testing.assert_allclose(got, np.asarray(want).ravel(), rtol=2e-4, atol=2e-3)
