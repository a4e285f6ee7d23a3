"""What the judge makes of eager's luck, and of torch's faults: more draws, and torch's own decompositions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.fuzz import judge
from benchmarks.fuzz.contradiction import contradicted
from benchmarks.fuzz.judge import Setting, judged
from benchmarks.fuzz.outcome import Outcome, ran
from benchmarks.fuzz.program import Given, Program, Statement, function


def test_a_tensor_in_which_one_sum_errs_is_judged_over_many_draws() -> None:
    """It has many numbers, all exact but one: of six such sums eager had all nearly exact."""
    made = (
        Statement(("v2",), "{0}.sum()", ("x0",)),
        Statement(("v4",), "F.pad({0}, (1, 2))", ("x0",)),
        Statement(("v5",), "torch.where({0} > {1}, {0}, {1} * 2)", ("v2", "v4")),
    )
    program = Program((Given("x0", (4, 33), "float32"),), made, ("v5",), {}, {})
    assert judged(program, Setting(seed=992470)) is None


def test_a_gradient_of_one_number_is_not_judged_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other inputs are smooth, those of the first draw serve, and other weights of what is differentiated."""
    monkeypatch.setattr(judge, "is_smooth", lambda *_: False)
    made = Statement(("v0",), "{0}.exp() * {1}", ("x0", "x1"))
    givens = (Given("x0", (1,), "float32", grad=True), Given("x1", (50,), "float32"))
    program = Program(givens, (made,), ("v0",), {}, {})
    plain = function(program.source())
    draws = judge._drawn(program, Setting(training=True, seed=3), range(6), plain, plain, False, "cpu")
    assert [d.seed for d in draws] == [3] * 6
    assert len({float(d.outcomes[1].gradients[0]) for d in draws}) == 6


def test_only_results_that_are_right_by_the_decompositions_are_excused_by_a_contradiction() -> None:
    x = Given("x0", (40,), "float32", grad=True)
    program = Program((x,), (Statement(("v0",), "torch.sin({0})", ("x0",)),), ("v0",), {}, {})

    def inputs(double: bool) -> list[torch.Tensor]:
        return program.inputs(0, double=double)

    ours, exact = (ran(function(program.source(), double=d), inputs(d)) for d in (False, True))
    assert contradicted(program, inputs, True, ours, exact) == ""
    faulty = replace(exact, gradients=[exact.gradients[0] + 1])
    assert contradicted(program, inputs, True, ours, faulty) == "gradients[0]"
    wrong: Outcome = replace(ours, gradients=[ours.gradients[0] * 1.001])
    assert contradicted(program, inputs, True, wrong, faulty) == ""
