"""One planted defect, searched: whether its name is found, and in how many runs."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tilewright
from benchmarks.bisect.models import make
from benchmarks.bisect.planting import Bug, planted
from tilewright.accuracy import compare_trees, in_float64
from tilewright.bisection import Bisection, excess
from tilewright.bisection.states import CompiledStates
from tilewright.cli.checking import training

ATTEMPTS = 12
"""Places in a kernel's text or a graph that are tried until one makes the result wrong."""
GROSS = 100.0
"""A planted defect counts if it makes an error this many times what is allowed."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came out: the culprit as text, whether it is the planted one, runs, candidates, and what the runs may be."""

    bug: Bug
    named: bool
    culprit: str
    runs: int
    candidates: int
    most_runs: float

    @property
    def passed(self) -> bool:
        """Whether the culprit is named within the runs."""
        return self.named and self.runs <= self.most_runs


def find(bug: Bug) -> Found | None:
    """Plant a defect and search it; None where none of the places that were tried makes a result wrong."""
    module, inputs = make(bug.model)
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as cache, planted(bug, attempt) as state:
            torch._dynamo.reset()
            found = _searched(bug, module, inputs, cache, lambda state=state: state.met)
            if not state.met:
                return None
            if found is not None:
                bisection, finding = found
                lowerings: list[CompiledStates] = bisection.lowerings
                return Found(
                    bug, state.is_it(finding.culprit, lowerings), str(finding.culprit), finding.runs,
                    len(finding.candidates), finding.most_runs,
                )  # fmt: skip
    return None


def _searched(bug: Bug, module: nn.Module, inputs: tuple[Tensor, ...], cache: str, met: Callable[[], bool]):
    run, eager, exact = _program(bug, module, inputs, cache)
    bisection = Bisection()

    def error() -> float:
        return excess(compare_trees(run(), eager, exact))

    with bisection.watching():
        try:
            full = error()
        except Exception:  # noqa: BLE001  (a defect may raise; then it is no silent one)
            full = math.inf
    if not met() or full < GROSS:
        return None
    finding = bisection.search(error, full)
    return None if finding is None else (bisection, finding)


def _program(
    bug: Bug, module: nn.Module, inputs: tuple[Tensor, ...], cache: str
) -> tuple[Callable[[], object], object, object]:
    """The compiled program as a function of nothing, eager's result, and that of float64."""
    options = {"cache_dir": cache, "measure": False}
    if not bug.training:
        plain = copy.deepcopy(module).eval()
        compiled = tilewright.compile(plain, None, freeze=bug.freeze, options=options)

        def infer() -> object:
            with torch.no_grad():
                return compiled(*(x.clone() for x in inputs))

        with torch.no_grad():
            return infer, plain(*inputs), in_float64(plain)(*inputs)
    copied = training.in_training(module)
    state = {name: b.detach().clone() for name, b in copied.named_buffers()}
    trained = tilewright.compile(copied, None, options=options)

    def step() -> object:
        with torch.no_grad():
            for name, b in copied.named_buffers():
                b.copy_(state[name])
        return training.step(trained, copied, inputs).made

    return step, training.in_eager(module, inputs).made, training.in_double(module, inputs).made
