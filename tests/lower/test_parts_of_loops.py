"""Blocks that reach past an extent: what a condition admits there is not read, and what one part of a loop left in
scratch is not taken for what the next part leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.lowered import form_of
from torch import Tensor

import tilewright.accuracy
from tilewright.interp.program import run_program
from tilewright.ir.form import Form
from tilewright.ir.schedule import ClassPlan, Memory, Role, Schedule, Tiling
from tilewright.ir.sizes import dims
from tilewright.lower.lower import lower
from tilewright.tuning.search_limits import LoweringLimits


def on_diagonal(x: Tensor) -> Tensor:
    return torch.diagonal_scatter(torch.zeros(5, 8), x, dim1=1, dim2=0)


def angles(x: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of each column, a result and read behind a sum over all of them."""
    norms = x.norm(dim=0)
    return norms, torch.atan2(x.sum(), (x / norms.clamp(min=1e-12)).abs() + 0.3)


def results(case: Case, schedule: Schedule, form: Form) -> list[np.ndarray]:
    inputs = [x.numpy().reshape(-1) for x in case.inputs()]
    rest = [None] * (len(form.params) - len(inputs))
    return run_program(lower(form, schedule), [*inputs, *rest])[len(inputs) :]


def test_a_condition_holds_inside_the_extents_of_its_axes() -> None:
    """Place (5, 5) is on the diagonal and in the last block, but in no row."""
    case = Case("diagonal", on_diagonal, ((5,),))
    form = form_of(case)
    row, column = sorted(form.classes(), key=lambda a: dims.static(a.extent) or 0)
    plans = (ClassPlan(row, Role.GRID, 2, 2), ClassPlan(column, Role.GRID, 8, 8))
    (made,) = results(case, Schedule(Tiling(plans, column, peel=False)), form)
    np.testing.assert_array_equal(made, on_diagonal(*case.inputs()).reshape(-1))


def test_each_part_of_a_loop_leaves_its_own() -> None:
    """Four columns at once, and the fifth in a part of its own."""
    case = Case("angles", angles, ((16, 5),))
    form = form_of(case)
    column, row = sorted(form.classes(), key=lambda a: dims.static(a.extent) or 0)
    plans = (ClassPlan(column, Role.STREAMED, 4), ClassPlan(row, Role.STREAMED))
    kept = Schedule(Tiling(plans, column), memory=Memory(scratch_cost=1))
    assert lower(form, kept).scratch
    for schedule in (kept, kept.changed(scratch_cost=0)):
        for made, wanted in zip(results(case, schedule, form), angles(*case.inputs()), strict=True):
            np.testing.assert_allclose(made, wanted.reshape(-1), rtol=1e-5)


def padded_rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A norm over windows of an image with a border: whole rows of a window lie outside it, where sums take nothing."""
    windows = torch.nn.functional.unfold(x, 3, padding=1) * 0.1
    return torch.nn.functional.layer_norm(torch.cat([windows, windows[:1]]), (144,), w, b)


def test_what_an_outer_part_leaves_out_is_left_for_all_inner_steps() -> None:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=draw) for size in ((2, 4, 12, 12), (144,), (144,))]
    made = torch.compile(padded_rows, backend=tilewright.backend, options={"strict": True})(*given)
    exact = padded_rows(*(x.double() for x in given))
    assert tilewright.accuracy.compare(made, padded_rows(*given), exact).passed


def framed(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (1, 2, 2, 1), mode="constant", value=3.0) * 2


def test_a_step_stands_in_no_more_places_than_a_compiler_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of each dim are nine bodies; where these would be too long, inner loops keep one, with masks."""
    case = Case("framed", framed, ((16, 21),))
    form = form_of(case)
    row, column = sorted(form.classes(), key=lambda a: dims.static(a.extent) or 0)
    plans = (ClassPlan(row, Role.STREAMED, 2), ClassPlan(column, Role.STREAMED, 8))
    schedule, loops = Schedule(Tiling(plans, column)), list[int]()
    for most in (1 << 20, 100, 1):
        monkeypatch.setattr("tilewright.lower.lower.LOWERING", LoweringLimits(most))
        loops.append(len(list(lower(form, schedule).loops())))
        (made,) = results(case, schedule, form)
        np.testing.assert_array_equal(made, framed(*case.inputs()).reshape(-1))
    assert loops[0] > loops[1] > loops[2]
