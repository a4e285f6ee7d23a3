"""`check`: results against float64, and which part of what was compiled makes one wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tilewright import measure
from tilewright.accuracy import TreeVerdict, compare_trees
from tilewright.bisection import Bisection, Finding, bar, excess
from tilewright.cli.model import Model
from tilewright.cli.request import CommandRequest, ExitCode
from tilewright.cli.work import compile_for, prepared, threads_of
from tilewright.errors import InputError, SeveralGraphs
from tilewright.report.records import Compiled
from tilewright.runtime.call.model import CompiledModel

from . import training
from .departure import first_departure, peers_of, show_failure, show_peers
from .inference import compared, results_of
from .parts import compile_parts, compile_whole_or_parts
from .reproduction import CASE, FailedCheck, write_case
from .state import TrainedState, trained_in


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A compiled model with what it is compared with: `run` makes the results anew, from the same inputs and state."""

    compiled: Compiled
    run: Callable[[], object]
    eager: object
    exact: object

    def verdict(self, k: float | None) -> TreeVerdict:
        """What the rule says of one run."""
        return compare_trees(self.run(), self.eager, self.exact, k=k)


def _trained(request: CommandRequest, model: Model, inputs: tuple[Tensor, ...]) -> CheckedModel:
    """A training step: compiled, as torch runs it, and in float64."""
    if isinstance(model.target, Path | CompiledModel):
        raise InputError(
            "a file has no parameters to train", phase="check", hint="give package.module:function"
        )
    copied = training.in_training(model.eager)
    state, before = TrainedState.of(copied), training.cloned(trained_in(copied))
    compiled = compile_for(request, replace(model, target=copied), None)

    def run() -> training.Trained:
        state.put_back()
        torch.manual_seed(request.seed)
        return training.step(compiled, copied, inputs)

    as_torch, exact = training.in_eager(model.eager, inputs), training.in_double(model.eager, inputs)
    try:
        first = run()
    except SeveralGraphs:
        if request.dims:
            raise
        compiled = compile_parts(request, copied)
        first = run()
    written = training.written_by([as_torch, first], before)
    return CheckedModel(compiled, lambda: run().told(written), as_torch.told(written), exact.told(written))


def _inferred(request: CommandRequest, model: Model, inputs: tuple[Tensor, ...]) -> CheckedModel:
    """The results, and what is written: compiled, as torch runs it, and in float64."""
    compiled = compile_whole_or_parts(request, model, inputs)
    apart = isinstance(model.target, Path | CompiledModel)
    made = compared(compiled, apart, model.eager, model.names, inputs)
    return CheckedModel(compiled, made.run, made.eager, made.exact)


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """How a model is checked: errors allowed (`k`; None: the rule's), a training step instead of results, whether what
    makes it wrong is searched and the program that shows it goes to `reproduction`, and the peers to be checked too."""

    k: float | None = None
    backward: bool = False
    bisect: bool = False
    reproduction: str = CASE
    against: str = "none"


def check_model(request: CommandRequest, plan: CheckPlan) -> int:
    """`check`: the fp64 rule for every output, or for what a training step makes; `CHECK_FAILED` if one fails."""
    k, backward, bisect, peers = plan.k, plan.backward, plan.bisect, peers_of(plan.against)
    found: Finding | None = None
    departure = ""
    with request.progress(f"checking {request.model}"), measure.settings(threads_of(request)):
        model, chosen = prepared(request)
        inputs = chosen.inputs
        bisection = Bisection()
        with bisection.watching() if bisect else nullcontext():
            trial = (_trained if backward else _inferred)(request, model, inputs)
            verdict = trial.verdict(k)
        if bisect and not verdict.passed:
            found = bisection.search(lambda: excess(trial.verdict(k)), excess(verdict))
        elif not backward and not verdict.passed:
            departure = first_departure(request, model, inputs)
    _show(request, trial, verdict)
    if departure:
        show_failure(request, departure)
    if peers and not backward:
        workload = measure.Workload(model.name, model.runnable, inputs)
        show_peers(request, peers, workload, results_of(trial.eager), results_of(trial.exact), k)
    if found is not None:
        _show_finding(request, found)
        place = write_case(Path(plan.reproduction), FailedCheck.of(request, k, backward, found))
        request.screen.line(f"run it again with: python {place}")
        request.screen.facts["reproduction"] = str(place)
    return ExitCode.OK if verdict.passed else ExitCode.CHECK_FAILED


def _show(request: CommandRequest, trial: CheckedModel, verdict: TreeVerdict) -> None:
    screen, coverage = request.screen, str(trial.compiled.coverage)
    for path, each in verdict.leaves:
        screen.line(f"output {path}: {each}", style="" if each.passed else "red")
    screen.line(coverage)
    style = "green" if verdict.passed else "bold red"
    text = f"{'PASS' if verdict.passed else 'FAIL'}: smallest k {verdict.smallest_k:.3g}"
    screen.line(text, style, verdict=True)
    screen.facts |= {
        "passed": verdict.passed,
        "smallest_k": verdict.smallest_k,
        "coverage": coverage,
        "outputs": [
            {
                "output": path,
                "passed": each.passed,
                "smallest_k": each.smallest_k,
                "eager_k": each.eager_k,
                "text": str(each),
            }
            for path, each in verdict.leaves
        ],
    }


def _show_finding(request: CommandRequest, found: Finding) -> None:
    screen, culprit = request.screen, found.culprit
    screen.line(f"wrong by: {culprit}", style="bold red")
    if found.number == 1 and not culprit.ops:
        screen.line(ALREADY)
    screen.line(f"found in {found.runs} runs among {len(found.candidates)} candidates")
    if culprit.detail:
        screen.block(culprit.detail)
    screen.facts["bisection"] = {
        "culprit": str(culprit), "kind": culprit.kind, "phase": culprit.phase, "graph": culprit.graph,
        "ops": list(culprit.ops), "places": list(culprit.places), "value": culprit.value, "detail": culprit.detail,
        "number": found.number, "candidates": len(found.candidates), "runs": found.runs,
    }  # fmt: skip


ALREADY = (
    "the captured program, which torch runs op by op, errs as much, and no op of it by itself: what torch made of the "
    "program rounds otherwise than eager, or k is smaller than eager's own differences"
)
SAME = "it is right now, though printed as it was: what was built then is not in the cache, or it fails by chance"
OTHER = "it is right now, and another one than it was then"


def again(case: FailedCheck, detail: str = "") -> int:
    """Run a model with and without the candidate of a reproduction: 1 if it still makes the result wrong, else 0.
    `detail` is what it was like, which may have changed since then: kernels come from the cache of the code that
    printed them, or are printed anew."""
    request = case.request()
    with measure.settings(threads_of(request)):
        model, chosen = prepared(request)
        inputs = chosen.inputs
        bisection = Bisection()
        with bisection.watching():
            trial = (_trained if case.backward else _inferred)(request, model, inputs)
            trial.verdict(case.k)
        named = [n for n, c in enumerate(bisection.candidates, 1) if str(c) == case.culprit]
        number = min(named, key=lambda n: abs(n - case.number), default=case.number)
        error = lambda: excess(trial.verdict(case.k))  # noqa: E731
        without, beside = (bisection.error_in(n, error) for n in (number - 1, number))
    request.screen.line(f"without: {without:.3g} of the error that is allowed")
    request.screen.line(f"with {ascii(case.culprit)}: {beside:.3g}")
    wrong = beside > bar(case.error) and beside > without
    if not wrong and detail:
        request.screen.line(SAME if bisection.detail(number) == detail else OTHER)
    return int(wrong)
