"""What each phase of a compilation made, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from tilewright import progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FinishedPhase:
    """One phase that ran: name, seconds, its result, and the seconds that processors worked for this process."""

    name: str
    seconds: float
    result: object
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """What each phase made, in order."""

    phases: tuple[FinishedPhase, ...] = ()

    def __getitem__(self, name: str) -> object:
        """The result of phase `name`; raises KeyError if it did not run."""
        for phase in self.phases:
            if phase.name == name:
                return phase.result
        raise KeyError(name)

    @property
    def seconds(self) -> float:
        """Time of all phases together."""
        return sum(p.seconds for p in self.phases)

    def __str__(self) -> str:
        return "\n".join(f"{p.name:<12}{p.seconds * 1e3:9.1f} ms" for p in self.phases)


class PhaseRecorder:
    """Runs phases and writes the trace. What a phase runs through this again is no part of its own time."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._inside = (0.0, 0.0)
        """Seconds, of the clock and of processors, in phases that the running one has run."""

    def add(self, name: str, seconds: float) -> None:
        """A phase that was not run through this, and made nothing."""
        self.trace = replace(self.trace, phases=(*self.trace.phases, FinishedPhase(name, seconds, None)))

    def __call__(
        self, name: str, phase: Callable[[], T], shown: Callable[[T], object] = lambda made: made
    ) -> T:
        """Run one phase; what is `shown` of what it makes is kept."""
        start, worked = time.perf_counter(), time.process_time()
        around, self._inside = self._inside, (0.0, 0.0)
        try:
            with progress.phase(name):
                made = phase()
        finally:
            # A busy system takes the processor away in this call: the clock is read behind it, or nobody has that time.
            work = time.process_time() - worked
            whole = time.perf_counter() - start
            (inside, busy), self._inside = self._inside, (around[0] + whole, around[1] + work)
        done = FinishedPhase(name, whole - inside, shown(made), max(0.0, work - busy))
        self.trace = replace(self.trace, phases=(*self.trace.phases, done))
        return made
