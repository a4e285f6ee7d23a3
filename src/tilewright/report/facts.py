"""What a report says of something compiled, as plain frozen values: seconds, bytes, counts and texts."""

from __future__ import annotations

from dataclasses import dataclass

OUTSIDE = "outside"
"""Where an edge begins that no step makes, or ends that no step reads."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One kernel or call, in the order of execution. What is not known is None.

    `how` is "generated", or whose code a call is ("own", a library's by "choice" or by "need"). `boundary` is one of
    the closed list of `plan.boundary` (empty for calls), `reason` the same in words. `kept` values stay on chip between
    its ops, so many bytes of them. `source` is a number among the report's sources (None: a call). What is `looped`
    runs in each step of a loop, which is one call; its figures are those of one step."""

    name: str
    how: str
    ops: tuple[str, ...]
    bytes_moved: int | None
    bytes_lower_bound: int | None
    flops: int | None
    exps: int | None
    modelled: float | None
    measured: float | None
    boundary: str
    reason: str
    schedule: str
    source: int | None
    results: tuple[str, ...]
    notes: tuple[str, ...] = ()
    kept: int = 0
    kept_bytes: int = 0
    looped: bool = False

    @property
    def is_kernel(self) -> bool:
        """Whether it was generated."""
        return self.how == "generated"

    @property
    def seconds(self) -> float | None:
        """Measured where it was, else as modelled."""
        return self.modelled if self.measured is None else self.measured

    @property
    def over_bound(self) -> float | None:
        """Bytes moved over the least that they could be."""
        moved, bound = self.bytes_moved, self.bytes_lower_bound
        return moved / bound if moved is not None and bound else None


@dataclass(frozen=True, slots=True)
class CallGroup:
    """Calls of one name for one reason: how many, whose code they are, their seconds together, what they make."""

    name: str
    whose: str
    reason: str
    count: int
    seconds: float
    results: tuple[str, ...]
    notes: tuple[str, ...]


WHOSE = {
    "own": "ours, written by hand",
    "choice": "a library's, as the faster one",
    "need": "a library's, for lack of a kernel",
}


@dataclass(frozen=True, slots=True)
class EdgeFacts:
    """A tensor between two steps, by number; without `start` it comes from the caller, without `end` it goes there (or
    nobody reads it). `bytes` is None where a size comes from data."""

    start: int | None
    end: int | None
    tensor: str
    bytes: int | None
    level: str


@dataclass(frozen=True, slots=True)
class LevelFacts:
    """A level of memory: how many edges between ops lie there, and the bytes that move."""

    name: str
    edges: int
    bytes_moved: int | None


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """A phase of the compilation."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What bounds any program there, as the model has it: bytes per second from memory and from the cache that all
    cores share (None: there is none), operations per second."""

    name: str
    bandwidth: float
    cache_bandwidth: float | None
    flops: float


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One graph: its steps, the tensors between them, and what was decided of it.

    `live_bytes` are those of intermediate tensors and results while each step runs (empty where sizes come from data),
    and `intermediate_bytes` what one call needs for the former at a time."""

    title: str
    kind: str
    coverage: str
    sizes: tuple[str, ...]
    machine: MachineFacts | None
    steps: tuple[StepFacts, ...]
    edges: tuple[EdgeFacts, ...]
    levels: tuple[LevelFacts, ...]
    phases: tuple[PhaseFacts, ...]
    live_bytes: tuple[int, ...]
    intermediate_bytes: int | None
    regions: tuple[str, ...] = ()

    @property
    def modelled(self) -> float:
        """Modelled seconds of all steps."""
        return sum(s.modelled or 0.0 for s in self.steps)

    @property
    def measured(self) -> float | None:
        """Measured seconds of all steps; None unless each was."""
        found = [s.measured for s in self.steps if s.measured is not None]
        return sum(found) if found and len(found) == len(self.steps) else None

    @property
    def seconds(self) -> float:
        """Of all steps: measured where they were, else as modelled."""
        return sum(s.seconds or 0.0 for s in self.steps)

    @property
    def clock(self) -> str:
        """Where these seconds come from."""
        found = {s.measured is not None for s in self.steps}
        return (
            "Time, in part measured"
            if len(found) > 1
            else "Measured time"
            if found == {True}
            else "Modelled time"
        )

    @property
    def by_share(self) -> list[tuple[int, StepFacts]]:
        """The steps with their numbers, those that take longest first."""
        return sorted(enumerate(self.steps), key=lambda each: (-(each[1].seconds or 0.0), each[0]))

    @property
    def grouped_calls(self) -> list[CallGroup]:
        """The calls, those that take longest first."""
        groups: dict[tuple[str, str, str], list[StepFacts]] = {}
        for s in self.steps:
            if not s.is_kernel:
                groups.setdefault((s.name, s.how, s.reason), []).append(s)
        found = [
            CallGroup(
                name,
                WHOSE.get(how, how),
                reason,
                len(steps),
                sum(s.seconds or 0.0 for s in steps),
                tuple(dict.fromkeys(r for s in steps for r in s.results)),
                tuple(dict.fromkeys(n for s in steps for n in s.notes)),
            )
            for (name, how, reason), steps in groups.items()
        ]
        return sorted(found, key=lambda g: -g.seconds)

    @property
    def bytes_moved(self) -> int:
        """Of all steps."""
        return sum(s.bytes_moved or 0 for s in self.steps)

    @property
    def bytes_lower_bound(self) -> int:
        """Of all steps."""
        return sum(s.bytes_lower_bound or 0 for s in self.steps)


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """A model: its graphs, where it was compiled and with which versions. `sources` are texts of kernels, each once."""

    title: str
    made: str
    environment: tuple[tuple[str, str], ...]
    graphs: tuple[GraphFacts, ...]
    sources: tuple[str, ...]
