"""A kernel and its schedule give the tile program again, on a machine: nothing else was decided."""

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import CASES, Case
from tests.support.one_kernel import capture, one_kernel

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.errors import IllegalSchedule
from tilewright.form.steps import STEPS
from tilewright.ir.schedule import Schedule
from tilewright.ir.text.schedule import parse
from tilewright.options import Options
from tilewright.schedule.solver import Solver, form_of, replay
from tilewright.target import PRESETS

LONG_ROWS = Case("long rows", lambda x: torch.softmax(x, -1), ((2, 1 << 20),))
FEW_QUERIES = Case(
    "few queries",
    torch.nn.functional.scaled_dot_product_attention,
    ((2, 8, 1, 64), (2, 8, 96, 64), (2, 8, 96, 64)),
)


@pytest.mark.parametrize("machine", ["x86-64-v4", "sm_80", "sm_90", "gfx942"])
def test_programs_are_made_again(machine: str) -> None:
    target, options = PRESETS[machine], Options()
    solver = Solver(target, options)
    taken: set[str] = set()
    replayed = in_buckets = 0
    for case in (*CASES, FEW_QUERIES, LONG_ROWS):
        for dynamic in (False, True):
            graph = capture(case, dynamic and case in CASES)
            kernel = one_kernel(graph)
            try:
                found = solver.solve(kernel, graph.layouts)
            except IllegalSchedule:
                continue
            made = [(found.schedule, found.program), *((b.schedule, b.program) for b in found.buckets)]
            for schedule, program in made:
                assert isinstance(schedule, Schedule)
                again = replay(kernel, graph.layouts, schedule, target, options, NO_HINTS)
                assert again == program and again.show() == program.show()
                taken |= {step.name for step in schedule.form_steps}
            replayed += 1
            in_buckets += len(found.buckets)
    assert taken <= set(STEPS) and taken, "no step was tried"
    assert replayed > len(CASES)
    assert (in_buckets > 0) == (machine != "x86-64-v4"), "buckets are for blocks of threads"


def test_steps_are_read_back() -> None:
    graph = capture(CASES[0], False)
    axes = form_of(one_kernel(graph), graph.layouts, PRESETS["sm_90"], Options()).classes()
    text = f"{axes[0].name}:grid form_steps=[use_log2, pack_rows({axes[0].name}=4), with_companions]"
    assert str(parse(text, axes)) == text
    for wrong in ("[use log2]", "[pack_rows(c1)]", "[pack_rows(c1=x)]", "use_log2"):
        with pytest.raises(ValueError, match=r"no step|no numbers|no number|no list"):
            parse(f"{axes[0].name}:grid form_steps={wrong}", axes)
