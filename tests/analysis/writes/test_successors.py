"""Results that lie where an operand lay: which do, what that spares, and that a wrong decision is refused."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilewright.analysis.writes import successors
from tilewright.errors import VerifyError
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.writes import DoneInPlace
from tilewright.pipeline.build import number_kernels
from tilewright.pipeline.phases import check_phases
from tilewright.pipeline.state import State
from tilewright.plan import Plan
from tilewright.plan.build import build_plan
from tilewright.plan.overwritten import check_overwritten
from tilewright.runtime.plan.layouts import intermediate_bytes
from tilewright.tuning.thresholds import MEMORY

Program = Callable[..., object]
SIDE = 48
BYTES = 2 * SIDE * SIDE * 4


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Nothing is too small to be reused."""
    monkeypatch.setattr(successors, "MEMORY", replace(MEMORY, min_reused_bytes=1))
    yield


def operands() -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (torch.randn(2, SIDE, SIDE) for _ in range(3))
    return a, b, c


def state_of(program: Program) -> State:
    """What the phases made of a program, whose results are eager's."""
    torch.compiler.reset()
    found: list[State] = []
    fast = torch.compile(program, backend="tilewright", options={"contractions": "library"})
    with check_phases(lambda name, state: found.append(state) if name == "plan" else None):
        for given in (operands(), operands()):
            # What is computed in floats is no more exact where it ends in doubles.
            torch.testing.assert_close(fast(*given), program(*given), rtol=1.3e-6, atol=1e-5)
    return found[-1]


def weighed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.softmax(a @ b * 0.1, -1) @ c


def twice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.softmax(torch.softmax(a @ b, -1) @ c, -1) @ c


@pytest.mark.usefixtures("costs_of_wide_vectors")
@pytest.mark.parametrize(("program", "spared"), [(weighed, 1), (twice, 2)])
def test_a_pass_over_a_product_takes_no_memory(program: Program, spared: int) -> None:
    made = state_of(program)
    assert made.cover is not None and made.plan is not None
    assert len(made.cover.in_place.successors) == spared
    apart = plan_of(made, {})
    assert intermediate_bytes(apart, {}) == 2 * BYTES
    assert intermediate_bytes(made.plan, {}) == spared * BYTES


def read_later(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    s = a @ b
    return torch.softmax(s, -1) @ c, s.mT @ c


def given_back(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    s = a @ b
    return torch.softmax(s, -1) @ c, s


def returned(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.softmax(a @ b, -1)


def wider(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.softmax(a @ b, -1).double() @ c.double()


def turned(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a @ b).mT.sin().contiguous() @ c


def of_an_input(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.softmax(a, -1) @ c


@pytest.mark.usefixtures("costs_of_wide_vectors")
@pytest.mark.parametrize("program", [read_later, given_back, returned, wider, turned, of_an_input])
def test_what_is_needed_stays(program: Program) -> None:
    made = state_of(program)
    assert made.cover is not None and not made.cover.in_place.successors


def plan_of(made: State, over: dict[Value, Value]) -> Plan:
    """The plan of a cover in which so many results lie where others lay."""
    assert made.cover is not None and made.kernels is not None
    cover = replace(made.cover, in_place=DoneInPlace(successors=over))
    plan = build_plan(cover, number_kernels(cover, made.kernels.numbers))
    kernels, numbers = made.kernels, list(made.kernels.numbers)
    check_overwritten(plan, lambda number: kernels.scheduled[numbers.index(number)].programs)
    return plan


@pytest.mark.parametrize(
    ("program", "said"),
    [(read_later, "holds|written there"), (turned, "another element"), (of_an_input, "input")],
)
def test_a_wrong_decision_is_refused(program: Program, said: str) -> None:
    made = state_of(program)
    assert made.cover is not None
    kernel = next(step for step in made.cover.steps if isinstance(step, Kernel))
    with pytest.raises(VerifyError, match=said):
        plan_of(made, {kernel.outputs[0]: kernel.inputs[0]})
