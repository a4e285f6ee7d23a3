"""A plan whose kernels and calls are timed one by one, as it runs: each finds the caches as the step before left them.

Steps that one native call runs otherwise are launched apart, so that together they take a little longer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tilewright.plan.data import CallStep, Launch, Plan

from .call_results import Act, Tensors
from .executable import Executable
from .verified import Checks, Look, Sizes


@dataclass(frozen=True, eq=False)
class StepClock(Checks):
    """Writes down how long each step takes, in the order of the plan."""

    launches: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Seconds of each launch, by its identity."""
    called: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Seconds of each call."""

    @property
    def each_kernel(self) -> bool:
        """Each is timed."""
        return True

    def around_launch(self, launch: Launch, act: Act, look: Look, sizes: Sizes) -> list[Act]:
        """Time a kernel."""
        del look, sizes
        return [_timed([act], self.launches.setdefault(id(launch), []))]

    def around_call(self, step: CallStep, acts: list[Act], run: object) -> list[Act]:  # pyright: ignore[reportIncompatibleMethodOverride]  (it runs nothing again)
        """Time a call, with what is done to its results."""
        del run
        return [_timed(acts, self.called.setdefault(id(step), []))]

    def forget(self) -> None:
        """Begin anew."""
        for seconds in (*self.launches.values(), *self.called.values()):
            seconds.clear()


def _timed(acts: list[Act], seconds: list[float]) -> Act:
    def act(tensors: Tensors) -> None:
        start = time.perf_counter()
        for each in acts:
            each(tensors)
        seconds.append(time.perf_counter() - start)

    return act


def clocked(executable: Executable) -> tuple[Executable, StepClock]:
    """The same plan on the CPU, with a clock around each step."""
    plan: Plan = executable.plan
    homes = tuple((b.home, b.source) for b in plan.buffers)
    clock = StepClock(False, plan.device, "inference", homes, {}, {})
    made = Executable(
        plan,
        executable.constants,
        executable.unit,
        guards=executable.guards,
        checks=clock,
        join=executable.join,
    )
    made.record = executable.record
    return made, clock
