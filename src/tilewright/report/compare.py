"""Two runs beside each other: the steps that both have, and what only one has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tilewright.tuning.page_limits import PAGE

from .facts import GraphFacts, StepFacts


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """The same ops in the earlier and in this run; None where a run has no such step."""

    before: StepFacts | None
    now: StepFacts | None
    number: int | None
    """In this run."""

    @property
    def change(self) -> float:
        """Seconds that were added."""
        return _seconds(self.now) - _seconds(self.before)

    @property
    def name(self) -> str:
        """Its name in this run, or in the earlier one."""
        found = self.now or self.before
        return "" if found is None else found.name

    @property
    def ops(self) -> tuple[str, ...]:
        """What it computes."""
        found = self.now or self.before
        return () if found is None else found.ops


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The steps that changed most, and both graphs. `steps` leaves out the `rest`."""

    before: GraphFacts
    now: GraphFacts
    steps: tuple[ComparedStep, ...]
    rest: int


def compared(before: GraphFacts, now: GraphFacts) -> RunComparison:
    """Steps of the same ops, the first of one run beside the first of the other; those that differ most first."""
    earlier = {key: step for key, _, step in _keyed(before)}
    found: list[ComparedStep] = []
    for key, number, step in _keyed(now):
        found.append(ComparedStep(earlier.pop(key, None), step, number))
    found += [ComparedStep(step, None, None) for step in earlier.values()]
    found.sort(key=lambda s: -abs(s.change))
    return RunComparison(
        before, now, tuple(found[: PAGE.max_compared_rows]), max(0, len(found) - PAGE.max_compared_rows)
    )


def _keyed(graph: GraphFacts) -> list[tuple[tuple[tuple[str, ...], int], int, StepFacts]]:
    seen: Counter[tuple[str, ...]] = Counter()
    found: list[tuple[tuple[tuple[str, ...], int], int, StepFacts]] = []
    for number, step in enumerate(graph.steps):
        found.append(((step.ops, seen[step.ops]), number, step))
        seen[step.ops] += 1
    return found


def _seconds(step: StepFacts | None) -> float:
    return (step.seconds or 0.0) if step is not None else 0.0
