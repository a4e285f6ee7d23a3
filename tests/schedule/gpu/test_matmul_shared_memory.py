"""Shared memory of kernels with products: the estimate is from above, and a kernel that is refused gets another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import build, print_triton
from torch import Tensor

from tilewright.analysis.contraction import contraction
from tilewright.form.classes import make_form
from tilewright.ir.kernel import Scheduled
from tilewright.ir.schedule import Role, Schedule
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.schedule.gpu import matmul
from tilewright.schedule.gpu.block_memory import BlockProducts, ProductBlocks, shared_bytes
from tilewright.schedule.solver import Solver
from tilewright.schedule.table import FastestBlock, Tuning
from tilewright.target import MemoryKind, preset


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2)).float() - torch.log(bias)
    return torch.softmax(s, -1).to(v.dtype) @ v


def inputs(length: int = 512, heads: int = 32) -> list[Tensor]:
    given = [torch.empty(1, heads, length, 128, dtype=torch.float16) for _ in range(3)]
    return [*given, torch.empty(1, heads, length, length)]


def estimate(scheduled: Scheduled) -> int:
    form, schedule = make_form(scheduled.kernel, {}), scheduled.schedule
    assert isinstance(schedule, Schedule)
    tiles = {p.axis: p.tile for p in schedule.tiling.classes}
    if set(tiles) != set(form.classes()):
        pytest.skip("the form was changed")
    sums = [i.id for i in form.folds.values() if contraction(i, form.params, tiles.__getitem__) is not None]
    streamed = tuple(p.axis for p in schedule.tiling.classes if p.role is Role.STREAMED)
    known = BlockProducts(form, (), tuple(tiles), streamed, tiles, tuple(sums))
    return shared_bytes(
        known,
        ProductBlocks(
            tiles, schedule.launch.warps, schedule.launch.stages, schedule.reductions.lane_states_of
        ),
    )


def shared(scheduled: Scheduled, folder: Path) -> int:
    program = scheduled.program
    return build(folder, print_triton(program, (), preset("sm_90"), variants(program)[0], "k0")).facts.shared


def capacity() -> int:
    level = preset("sm_90").level(MemoryKind.SHARED)
    assert level is not None
    return level.capacity


def test_what_is_read_beside_operands_is_counted(tmp_path: Path) -> None:
    (made,) = compiled(biased, inputs()).kernels
    assert shared(made, tmp_path) <= estimate(made) <= capacity()


def test_measured_stages_must_fit() -> None:
    """The entry is for kernels that hold less."""
    tuning = Tuning((FastestBlock("products", 2, 128, 128, 64, 8, 4),))
    made = compiled(biased, inputs())
    (found,) = made.kernels
    scheduled = Solver(preset("sm_90"), Options(), tuning).solve(found.kernel, made.cover.layouts)
    assert scheduled.program.stages < 4 and estimate(scheduled) <= capacity()


@pytest.mark.parametrize(("depth", "rows"), [(64, 64), (80, 128), (128, 128)])
def test_an_entry_is_for_the_columns_that_are_held(depth: int, rows: int) -> None:
    """A score of depth 80 is summed in parts, of 64 and 16, but its values take 128 columns of registers."""
    entries = [FastestBlock("products", 2, 64, 64, 32, 4, 2), FastestBlock("products", 2, 128, 128, 32, 8, 2)]
    given = [torch.empty(1, 32, 512, depth, dtype=torch.float16) for _ in range(3)]
    made = compiled(biased, [*given, torch.empty(1, 32, 512, 512)])
    (found,) = made.kernels
    scheduled = Solver(preset("sm_90"), Options(), Tuning(tuple(entries))).solve(
        found.kernel, made.cover.layouts
    )
    schedule = scheduled.schedule
    assert isinstance(schedule, Schedule)
    grid = [c.tile for c in schedule.tiling.classes if c.role is Role.GRID and c.tile > 1]
    assert grid == [rows] and schedule.launch.warps == rows // 16


@pytest.mark.parametrize(("columns", "stages"), [(512, 3), (64, 2)])
def test_operands_that_arrive_late_are_loaded_further_ahead(columns: int, stages: int) -> None:
    """Values of 512 columns come from the last cache in about the time in which they are multiplied."""

    def weighed(s: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(s.float(), -1).to(v.dtype) @ v

    given = [
        torch.empty(16, 4096, 4096, dtype=torch.float16),
        torch.empty(16, 4096, columns, dtype=torch.float16),
    ]
    (made,) = compiled(weighed, given).kernels
    assert made.program.stages == stages


def test_a_refused_kernel_gets_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = matmul.shared_bytes
    monkeypatch.setattr(matmul, "shared_bytes", lambda known, c: right(known, c) // 2)
    tuning = Tuning((FastestBlock("products", 2, 128, 128, 128, 8, 4),))
    monkeypatch.setattr(matmul, "registers", lambda known, c, target, packed=False: 128)
    made = compiled(biased, inputs())
    (found,) = made.kernels
    solver = Solver(preset("sm_90"), Options(), tuning)
    first = solver.solve(found.kernel, made.cover.layouts)
    needed = shared(first, tmp_path / "a")
    assert needed > capacity()
    solver.shrink_shared_memory(found.kernel, made.cover.layouts, capacity() / needed)
    second = solver.solve(found.kernel, made.cover.layouts)
    assert second.program is not first.program
    assert shared(second, tmp_path / "b") <= capacity()
