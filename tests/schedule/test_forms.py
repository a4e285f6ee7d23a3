"""How often the form of a kernel is made."""

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel

from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import IllegalSchedule
from tilewright.form.classes import make_form
from tilewright.ir.form import Form
from tilewright.ir.schedule import Schedule
from tilewright.options import Options
from tilewright.schedule import solver as module
from tilewright.schedule.solver import Solver
from tilewright.target import preset

SOFTMAX = Case("softmax", lambda x: torch.softmax(x, -1), ((12, 64),), ({0: "rows"},))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Form]:
    """The forms that are made meanwhile."""
    found: list[Form] = []

    def noted(*given: object, **named: object) -> Form:
        found.append(make_form(*given, **named))  # pyright: ignore[reportArgumentType]
        return found[-1]

    monkeypatch.setattr(module, "make_form", noted)
    return found


def test_a_kernel_has_one_form_at_all_sizes_and_under_all_schedules(made: list[Form]) -> None:
    """Other sizes have other tiles, and what a clock prefers is looked at again for values that lie otherwise."""
    graph = capture(SOFTMAX, True)
    kernel = one_kernel(graph)
    solver = Solver(preset("sm_90"), Options())
    (rows,) = map(str, graph.symbols())
    few, many = (solver.at(SizeHints({rows: n})) for n in (2, 1 << 20))
    assert few.price(kernel, {}) < many.price(kernel, {})
    found = many.solve(kernel, {})
    assert isinstance(found.schedule, Schedule)
    few.prefer(kernel, few.read_solution(kernel, {}, str(found.schedule), 1e-6))
    assert few.solve(kernel, {}).seconds == 1e-6
    few.solve(kernel, {}, found.schedule)
    assert len(made) == 1


def test_a_refusal_is_found_once(made: list[Form], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(*given: object, **named: object) -> Form:
        asked.append(given)
        raise IllegalSchedule("no", law="none", phase="schedule")

    monkeypatch.setattr(module, "make_form", refuse)
    graph = capture(SOFTMAX, False)
    solver = Solver(preset("sm_90"), Options())
    for by in (solver, solver.at(SizeHints({"rows": 7})), solver):
        with pytest.raises(IllegalSchedule, match="no"):
            by.price(one_kernel(graph), {})
    assert len(asked) == 1 and not made
