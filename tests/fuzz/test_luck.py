"""What the judge makes of eager's luck, of chance and of torch's faults: more draws, and torch's own decompositions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from benchmarks.fuzz import judge
from benchmarks.fuzz.chance import is_chance
from benchmarks.fuzz.contradiction import contradicted
from benchmarks.fuzz.judge import Setting, judged
from benchmarks.fuzz.outcome import Draw, Outcome, ran
from benchmarks.fuzz.program import Given, Program, Statement, function

from tilewright import accuracy


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

    def inputs(double: bool, device: str = "cpu") -> list[torch.Tensor]:
        return program.inputs(0, double=double)

    ours, exact = (ran(function(program.source(), double=d), inputs(d)) for d in (False, True))
    assert contradicted(program, inputs, True, ours, exact) == ""
    faulty = replace(exact, gradients=[exact.gradients[0] + 1])
    assert contradicted(program, inputs, True, ours, faulty) == "gradients[0]"
    wrong: Outcome = replace(ours, gradients=[ours.gradients[0] * 1.001])
    assert contradicted(program, inputs, True, wrong, faulty) == ""


@pytest.mark.parametrize("text", ["{0} * {0}.stride(0)", "torch.as_strided({0}, (4, 5), (1, 4))"])
def test_results_of_row_major_inputs_excuse_where_layouts_are_no_part_of_the_meaning(text: str) -> None:
    """A kernel that gives something else for the same numbers when these lie otherwise is at fault."""
    x = Given("x0", (4, 5), "float32", layout="turned")
    program = Program((x,), (Statement(("v0",), text, ("x0",)),), ("v0",), {}, {})

    def inputs(double: bool, device: str = "cpu") -> list[torch.Tensor]:
        return program.inputs(0, double=double)

    exact = ran(function(program.source(), double=True), inputs(True))
    laid = [x.contiguous() for x in inputs(False)]
    ours = ran(function(program.source()), laid)
    found = contradicted(program, inputs, True, ours, exact)
    assert found == ("results[0]" if "as_strided" not in text else "")
    wrong = replace(ours, results=[ours.results[0] + 1])
    assert contradicted(program, inputs, True, wrong, exact) == ""


def test_results_of_operands_without_repeats_excuse() -> None:
    """A median along a dim of stride 0 is what memory held before."""
    made = Statement(("v0",), "{0}.expand(3, 40).median(0)[0]", ("x0",))
    program = Program((Given("x0", (40,), "float32"),), (made,), ("v0",), {}, {})

    def inputs(double: bool, device: str = "cpu") -> list[torch.Tensor]:
        return program.inputs(0, double=double)

    ours = Outcome(inputs(False), [], inputs(False))
    exact = Outcome([x + 1 for x in inputs(True)], [], inputs(True))
    assert contradicted(program, inputs, False, ours, exact) == "results[0]"
    wrong = replace(ours, results=[ours.results[0] * 1.001])
    assert contradicted(program, inputs, False, wrong, exact) == ""


def test_results_on_the_cpu_excuse_where_another_device_computes_something_else() -> None:
    """A kernel of the other device that is at fault however its operands lie: as if these were twice as large."""
    x = Given("x0", (40,), "float32", grad=True)
    program = Program((x,), (Statement(("v0",), "torch.sin({0})", ("x0",)),), ("v0",), {}, {})

    def inputs(double: bool, device: str = "cpu") -> list[torch.Tensor]:
        given = program.inputs(0, double=double)
        return given if device == "cpu" else [x.detach().mul(2).requires_grad_() for x in given]

    ours = ran(function(program.source()), inputs(False))
    exact = ran(function(program.source(), double=True), inputs(True, "faulty"))
    assert contradicted(program, inputs, True, ours, exact, "faulty") == "results[0]"
    wrong = replace(ours, results=[ours.results[0] * 1.001])
    assert contradicted(program, inputs, True, wrong, exact, "faulty") == ""
    right = ran(function(program.source(), double=True), inputs(True))
    assert contradicted(program, inputs, True, wrong, right, "cpu") == ""


def test_a_contradiction_in_one_result_excuses_no_other() -> None:
    given = Given("x0", (40,), "float32"), Given("x1", (40,), "float32")
    made = (Statement((f"v{k}",), "torch.sin({0})", (f"x{k}",)) for k in range(2))
    program = Program(given, tuple(made), ("v0", "v1"), {}, {})

    def inputs(double: bool, device: str = "cpu") -> list[torch.Tensor]:
        x, y = program.inputs(0, double=double)
        return [x if device == "cpu" else x * 2, y]

    exact = ran(function(program.source(), double=True), inputs(True, "faulty"))
    ours = ran(function(program.source()), inputs(False))
    assert contradicted(program, inputs, False, ours, exact, "faulty") == "results[0]"
    wrong = replace(ours, results=[ours.results[0], ours.results[1] * 1.001])
    assert contradicted(program, inputs, False, wrong, exact, "faulty") == ""


def program_of(text: str) -> Program:
    """One statement on two vectors."""
    made = Statement(("v0",), text, ("x0", "x1"))
    return Program((Given("x0", (50,), "float32"), Given("x1", (50,), "float32")), (made,), ("v0",), {}, {})


STEEP = program_of("1 / ({0} - {1})")
"""Where x0 and x1 lie close together, the last bit of either moves the result far."""
SIGNED = program_of("F.mish(torch.sign({0} * {1}))")
LOST = program_of("({0} + 10000.0) - 10000.0 + {1}")
Ours = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
KEPT: Ours = lambda seed, eager, exact: eager  # noqa: E731


def draws_of(program: Program, ours: Ours) -> list[Draw]:
    """Draws in which `ours` makes our result of a draw's number, eager's result and the exact one."""
    found: list[Draw] = []
    for seed in range(64):
        eager, exact = (
            ran(function(program.source(), double=d), program.inputs(seed, double=d), training=False)
            for d in (False, True)
        )
        made = ours(seed, eager.results[0], exact.results[0])
        found.append(Draw(seed, (replace(eager, results=[made]), eager, exact)))
    return found


def chance(draws: Sequence[Draw], program: Program) -> bool:
    return is_chance(program, draws, "results", 0, training=False, later=False, device="cpu")


@pytest.mark.parametrize(("moved", "excused"), [(2e-7, True), (2e-5, False)])
def test_one_steep_place_may_err_as_far_as_a_rounding_moves_it(moved: float, excused: bool) -> None:
    """At the steepest place of all, ours is what other inputs would give: 2e-7 is the last bits of two."""

    def ours(seed: int, eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        made = eager.clone()
        if seed == steepest:
            place = int(exact.abs().argmax())
            made[place] += moved * exact[place].square()
        return made

    steepest = -1
    tops = [float(d.outcomes[2].results[0].abs().max()) for d in draws_of(STEEP, KEPT)]
    steepest = tops.index(max(tops))
    draws = draws_of(STEEP, ours)
    pooled = [torch.cat([d.outcomes[i].results[0] for d in draws]) for i in range(3)]
    assert not accuracy.compare(*pooled).passed
    assert chance(draws, STEEP) == excused


@pytest.mark.parametrize(("units", "excused"), [(1.4, True), (20.0, False)])
def test_few_different_numbers_are_few_samples(units: float, excused: bool) -> None:
    """What follows a sign errs alike wherever it stands: ours by a last bit everywhere, eager by less."""

    def ours(seed: int, eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        return (exact * (1 + units * 2**-23)).to(eager.dtype)

    draws = draws_of(SIGNED, ours)
    pooled = [torch.cat([d.outcomes[i].results[0] for d in draws]) for i in range(3)]
    assert len(pooled[2].unique()) <= 4 and not accuracy.compare(*pooled).passed
    assert chance(draws, SIGNED) == excused


@pytest.mark.parametrize(("times", "excused"), [(3, True), (30, False)])
def test_where_eager_errs_most_ours_may_err_nearly_as_far(times: float, excused: bool) -> None:
    """Rounded inputs move next to nothing here; what is lost on the way is a thousand times as large."""
    errors = [
        (eager.results[0] - exact.results[0]).abs()
        for eager, exact in (d.outcomes[1:] for d in draws_of(LOST, KEPT))
    ]
    worst = max(range(64), key=lambda n: float(errors[n].max()))

    def ours(seed: int, eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        made = eager.clone()
        if seed == worst:
            place = int(errors[worst].argmax())
            made[place] = (exact + times * (eager - exact))[place]
        return made

    assert chance(draws_of(LOST, ours), LOST) == excused


@pytest.mark.parametrize(("error", "excused"), [(6e-4, True), (6e-2, False)])
def test_what_is_lost_on_the_way_may_be_lost_where_eager_loses_nothing(error: float, excused: bool) -> None:
    """The sum with 10000 is off by up to 5e-4 anywhere."""

    def ours(seed: int, eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        made = eager.clone()
        if seed == 7:
            place = int((eager - exact).abs().argmin())
            made[place] = exact[place] + error
        return made

    assert chance(draws_of(LOST, ours), LOST) == excused


def test_small_errors_of_most_draws_are_no_chance() -> None:
    assert not chance(draws_of(STEEP, lambda _, eager, exact: (exact + 4 * (eager - exact)).float()), STEEP)


def test_what_is_no_number_is_no_chance() -> None:
    assert not chance(
        draws_of(STEEP, lambda seed, eager, _: eager * float("nan") if seed == 9 else eager), STEEP
    )
