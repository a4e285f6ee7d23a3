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
from tilewright.ir.program import Collapse, Load
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


def plain(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.silu(x @ a.T) * w[:N]


def both(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What each point would compute again is a result, too."""
    h = F.rms_norm(x, (K,), w)
    return h @ a.T, h.square().sum(-1)


def repeated(
    function: Callable[..., object], dtype: torch.dtype, rows: int = 1
) -> tuple[Schedule, list[np.ndarray], object] | None:
    """The schedule of all of a function as one kernel whose points fold anew, what it gives, and what the function
    gives; None where there is none."""
    torch.manual_seed(0)
    inputs = (torch.randn(rows, K), torch.randn(K), torch.randn(N, K), torch.randn(N, K))
    given = [t.to(dtype) for t in inputs]
    graph = compiled(function, given).cover.graph
    whole = Kernel(graph.ops, tuple(v for v in graph.outputs if isinstance(v, Value)))
    solver = Solver(preset("sm_90"), Options(contractions="inside"))
    found = solver.repeating(whole, {})
    if found is None:
        return None
    made = solver.solve(whole, {}, found.schedule)
    held = dict(zip(graph.inputs, given, strict=True))
    buffers = [held[v].float().numpy().ravel().astype(np.float32) if v in held else None for v in made.params]
    assert isinstance(made.schedule, Schedule)
    return made.schedule, run_program(made.program, buffers)[len(whole.inputs) :], function(*given)


def on_grid(schedule: Schedule) -> list[int | None]:
    return [dims.static(c.axis.extent) for c in schedule.tiling.classes if c.role is Role.GRID]


@pytest.mark.parametrize("function", [normed, gated])
def test_columns_of_the_product_are_on_the_grid(function: Callable[..., object]) -> None:
    made = repeated(function, torch.float32)
    assert made is not None
    schedule, (found,), wanted = made
    assert on_grid(schedule) == [N]
    np.testing.assert_allclose(found, np.asarray(wanted).ravel(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("function", [scaled, both, plain])
def test_much_work_and_results_are_not_repeated(function: Callable[..., object]) -> None:
    assert repeated(function, torch.float32) is None


def test_what_matrix_units_multiply_is_not_summed_by_rows() -> None:
    assert repeated(normed, torch.float32, rows=16) is None


def test_nobody_repeats_without_being_asked() -> None:
    """The model knows too little of what each point waits for."""
    inputs = (torch.randn(1, K), torch.randn(K), torch.randn(N, K), torch.randn(N, K))
    graph = compiled(normed, inputs).cover.graph
    whole = Kernel(graph.ops, tuple(v for v in graph.outputs if isinstance(v, Value)))
    made = Solver(preset("sm_90"), Options(contractions="inside")).solve(whole, {})
    assert isinstance(made.schedule, Schedule) and N not in on_grid(made.schedule)


def test_the_matrix_is_loaded_before_the_norm_is_known() -> None:
    """Memory is waited for once."""
    torch.manual_seed(0)
    inputs = (torch.randn(1, K), torch.randn(K), torch.randn(N, K), torch.randn(N, K))
    graph = compiled(normed, inputs).cover.graph
    whole = Kernel(graph.ops, tuple(v for v in graph.outputs if isinstance(v, Value)))
    solver = Solver(preset("sm_90"), Options(contractions="inside"))
    found = solver.repeating(whole, {})
    assert found is not None
    for hoisted, before in ((found.schedule.memory.hoisted_bytes, 3), (0, 1)):
        program = solver.solve(whole, {}, found.schedule.changed(hoisted_bytes=hoisted)).program
        kinds = [type(s) for s in program.statements()]
        assert kinds[: kinds.index(Collapse)].count(Load) == before
