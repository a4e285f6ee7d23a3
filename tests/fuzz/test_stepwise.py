"""Steps on halves that round correctly, as a yardstick beside an eager that is lucky."""

from __future__ import annotations

import pytest
import torch
from benchmarks.fuzz.judge import _as_stepwise
from benchmarks.fuzz.outcome import Draw, Outcome, ran
from benchmarks.fuzz.program import Given, Program, Statement, function
from benchmarks.fuzz.stepwise import has_halves, ran_stepwise

TEXT = "(({0} + 0.2) * {0}).sum(-1)"
PROGRAM = Program(
    (Given("x0", (8, 40), "float16", grad=True),), (Statement(("v0",), TEXT, ("x0",)),), ("v0",), {}, {}
)


def test_a_step_is_rounded_once_and_both_passes_are_stepwise() -> None:
    x = PROGRAM.inputs(0)[0]
    made = ran_stepwise(function(PROGRAM.source()), [x], training=True, draw=0)
    wide = x.detach().double()
    first = (wide + 0.2).half()
    product = (first.double() * wide).half()
    assert torch.equal(made.results[0], product.double().sum(-1).half())
    assert not torch.equal(first, x.detach() + 0.2), "torch rounds the number first"
    assert made.gradients[0].dtype is torch.float16


def test_views_and_asked_types_stay() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.t().clone()
        y.mul_(2)
        return y[1:], x.sum(dtype=torch.float32)

    x = torch.randn(3, 4).half()
    made = ran_stepwise(forward, [x], training=False, draw=0)
    for a, b in zip(made.results, forward(x), strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


@pytest.mark.parametrize(("times", "excused"), [(1, True), (1.9, True), (12, False)])
def test_errors_beyond_those_of_correct_steps_are_not_excused(times: float, excused: bool) -> None:
    plain, draws = function(PROGRAM.source()), list[Draw]()
    for seed in range(64):
        steps = ran_stepwise(plain, PROGRAM.inputs(seed), training=True, draw=seed)
        exact = ran(
            function(PROGRAM.source(), double=True),
            PROGRAM.inputs(seed, double=True),
            training=True,
            draw=seed,
        )
        off = [
            (e + times * (s.double() - e)).half() for s, e in zip(steps.results, exact.results, strict=True)
        ]
        ours = Outcome(off, steps.gradients, steps.inputs)
        draws.append(Draw(seed, (ours, ours, exact)))
    assert _as_stepwise(PROGRAM, draws, "results", 0, training=True, later=False, device="cpu") == excused


def test_programs_without_halves_have_no_such_steps() -> None:
    single = Program(
        (Given("x0", (4,), "float32"),), (Statement(("v0",), "{0} + 1", ("x0",)),), ("v0",), {}, {}
    )
    assert not has_halves(single.source(), single.inputs(0))
    assert has_halves(PROGRAM.source(), PROGRAM.inputs(0))
