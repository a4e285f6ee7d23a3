"""Times the ways to do a region of library calls, and remembers the fastest on disk.

Weights of a real model are not in a core's own cache when their turn comes, but what was computed just before is: so a
stream of other data goes through these caches before each run, then the operands are touched. The ways take turns; the
best time of each counts, since disturbances only add. Where they added much, the choice is not final: later processes
that measure anyway do it again, and the best times of all count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.graph import Operand, Value, bind
from tilewright.ir.sizes import dims
from tilewright.library.choose import Pass, TimedOffer
from tilewright.options import Options
from tilewright.runtime.cpu.pool import running
from tilewright.runtime.plan.tensors import filled, torch_dtype
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.cache import ContentStore, digest
from tilewright.runtime.store.tuned import Tuned
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import COMPARISON, TIMER
from tilewright.tuning.thresholds import LIBRARY, SIZES

from .native import SOURCES

LOG = logging.getLogger("tilewright")
REFUSALS = (RuntimeError, MemoryError)
"""What a way raises that does not take these operands on this machine; anything else is a defect and is logged."""

Run = Callable[[], object]
Made = dict[tuple[int, tuple[int, ...], tuple[int, ...], DType], Tensor]
"""Operands by place, sizes, strides and type."""


@dataclass(slots=True)
class Timer:
    """Finds which `TimedOffer` is the fastest, with the threads in use. `sizes` are example values of size symbols."""

    target: Target
    store: ContentStore
    options: Options
    sizes: Mapping[str, int]
    spent: float = 0.0
    repeated: int = 0
    tuned: Tuned = field(default_factory=Tuned)
    """What a tuning file says comes first; who tunes says how long timing may take."""
    _noise: Tensor | None = None
    _identity: str = field(default="")

    def __post_init__(self) -> None:
        threads = self.options.threads or torch.get_num_threads()
        own = [path.read_bytes() for path in SOURCES]
        self._identity = digest(
            self.target.digest(),
            processor(),
            str(threads),
            str(self.options.pin_threads),
            torch.__version__,
            *own,
        )

    def size(self, e: Expr) -> int:
        """The value of a size."""
        names = [s.value.name for s in dims.symbols_of(e) if isinstance(s.value, Symbol)]
        return dims.evaluate(e, {name: self.sizes.get(name, SIZES.unseen_size) for name in names})

    def known_choice(self, task: str) -> str | None:
        """The winner of an earlier measurement, of another process perhaps; None if there was none, or if those that
        were are too noisy to tell and this compilation, which has measured others or tunes, can measure it again."""
        match self.tuned.get("call", self._task_key(task)):
            case {"fastest": str(fastest)} as entry:
                self.tuned.note("call", self._task_key(task), entry)
                return fastest
            case _:
                last = self._trials(task)[-1:]
        if not last:
            return None
        if not last[0]["final"] and self._repeats():
            return None
        self._tell(task, last[0])
        return str(last[0]["fastest"])

    def _repeats(self) -> bool:
        """Whether a noisy choice is measured again."""
        if self.tuned.session is not None:
            return self.tuned.session.left > 0
        self.repeated += 1
        return bool(self.spent) and self.repeated <= TIMER.max_repeated_choices

    def _tell(self, task: str, trial: Mapping[str, Any]) -> None:
        """A choice was made, or found."""
        entry = {"what": trial["what"], "fastest": trial["fastest"], "seconds": trial["seconds"]}
        self.tuned.note("call", self._task_key(task), entry, final=bool(trial["final"]))

    def _task_key(self, task: str) -> str:
        return digest("choice", self._identity, task)

    def _trials(self, task: str) -> list[dict[str, Any]]:
        """What earlier measurements found, each with the best times of all up to it."""
        found: list[dict[str, Any]] = []
        while (
            len(found) < TIMER.max_measurements
            and (folder := self.store.get(self._key(task, len(found)))) is not None
        ):
            try:
                trial = json.loads((folder / "choice.json").read_text())
                found.append({name: trial[name] for name in ("what", "fastest", "seconds", "final")})
            except (OSError, ValueError, KeyError, TypeError) as error:
                LOG.info("the choice in %s cannot be read: %s", folder, error)
                break
            if found[-1]["final"]:
                break
        return found

    def _key(self, task: str, trial: int) -> str:
        return digest("choice", self._identity, task, str(trial))

    def measure(self, task: str, candidates: Sequence[TimedOffer]) -> str:
        """The name of the fastest; what raises, or is faster than memory, loses. The first where there is no time."""
        if not self.tuned.seconds():
            self.tuned.leave("call", self._task_key(task))
            return candidates[0].name
        STATS.timed += 1
        start = time.perf_counter()
        before = self._trials(task)
        try:
            times, spread = self._times(candidates)
        except (
            REFUSALS
        ) as refused:  # as text: the traceback of an error that a log keeps would hold the operands
            LOG.info("%s is not timed: %s", candidates[0].name, str(refused))
            return candidates[0].name
        for name, seconds in before[-1]["seconds"].items() if before else ():
            if name in times:
                times[name] = min(times[name], float(seconds))
        bound = self._bound(candidates[0]) * TIMER.min_bound_ratio
        best = candidates[0].name
        for name, seconds in times.items():
            if seconds >= bound and (
                best not in times or seconds < COMPARISON.max_preferred_ratio * times[best]
            ):
                best = name
        self.spent += time.perf_counter() - start
        final = spread.get(best, 1.0) <= TIMER.max_steady_ratio or len(before) + 1 >= TIMER.max_measurements
        facts = {"what": _told(candidates[0]), "fastest": best, "seconds": times}
        shown = {"task": task, **facts, "spread": spread, "final": final}
        files = {"choice.json": json.dumps(shown, indent=1).encode()}
        self._tell(task, shown)
        self.store.put(self._key(task, len(before)), files)
        return best

    def _bound(self, candidate: TimedOffer) -> float:
        """Seconds in which no way can read its operands and write its result, from the caches."""
        moved = sum(self.size(v.numel) * v.dtype.bytes for v in candidate.inputs)
        level = next(x for x in self.target.levels if x.kind > MemoryKind.DEVICE)
        return moved / (4 * level.bandwidth)

    def _times(self, candidates: Sequence[TimedOffer]) -> tuple[dict[str, float], dict[str, float]]:
        """The best time of each way, and its middle one over its best."""
        runs: dict[str, Run] = {}
        made: Made = {}
        operands: dict[int, Tensor] = {}
        with torch.no_grad():
            for candidate in candidates:
                tensors = self._operands(candidate, made)
                run = None if tensors is None else _bound_call(candidate, tensors)
                if tensors is not None and run is not None and _runs(candidate.name, run):
                    runs[candidate.name] = run
                    operands |= {id(t): t for t in tensors}
            rounds = self._rounds(runs, list(operands.values()))
            times = {name: min(each) for name, each in rounds.items()}
            spread = {name: statistics.median(each) / times[name] for name, each in rounds.items()}
            for candidate in candidates:
                if candidate.name in times:
                    times[candidate.name] += sum(map(self._pass, candidate.passes))
                    times[candidate.name] += self.target.parting_seconds if candidate.parts else 0.0
        return times, spread

    def _rounds(self, runs: dict[str, Run], operands: Sequence[Tensor]) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {name: [] for name in runs}
        runs = dict(runs)
        start = time.perf_counter()
        left = min(TIMER.max_region_seconds, TIMER.max_seconds - self.spent)
        if self.tuned.session is not None:
            left = self.tuned.seconds(TIMER.max_region_seconds)
        for done in range(COMPARISON.max_rounds):
            if done >= COMPARISON.min_rounds:
                limit = TIMER.hopeless_ratio * min(map(min, taken.values()), default=0.0)
                runs = {name: run for name, run in runs.items() if min(taken[name]) <= limit}
                if len(runs) < 2 or time.perf_counter() - start > left:
                    break
            for name, run in tuple(runs.items()):
                self._disturb(operands)
                began = time.perf_counter()
                if _runs(name, run):
                    taken[name].append(time.perf_counter() - began)
                else:  # it ran before: now there is no memory for it
                    del runs[name], taken[name]
        return taken

    def _disturb(self, operands: Sequence[Tensor]) -> None:
        """Other data in the cores' own caches, and then the operands."""
        if self._noise is None:
            self._noise = torch.zeros(
                self.target.core.capacity * self.target.cores
            )  # four times as many bytes
        self._noise.add_(1.0)
        for t in operands:
            if t.is_floating_point():
                t.mul_(1.0)
        threads = running()
        if threads is not None:  # a way of ours is not left to one core by what came late before
            threads.rejoin()

    def _pass(self, left: Pass) -> float:
        """Seconds that one more pass takes; instructions do not overlap with memory in the short run."""
        t = self._tensor(left.value, None)
        best = float("inf")
        for _ in range(4):
            began = time.perf_counter()
            t.mul_(1.0)
            best = min(best, time.perf_counter() - began)
        return best + left.work * t.numel() / (self.target.flops / LIBRARY.work_per_chained_instruction)

    def _operands(self, candidate: TimedOffer, made: Made) -> list[Tensor] | None:
        """What a way reads, each operand another tensor; None where there is no memory for it. Ways share what was
        `made`: all find the same data in the caches."""
        try:
            found: list[Tensor] = []
            for k, (v, strides) in enumerate(self._laid(candidate)):
                laid = self._sizes(strides if strides is not None else dims.dense_strides(v.shape))
                key = k, self._sizes(v.shape), laid, v.dtype
                if key not in made:
                    made[key] = self._tensor(v, strides)
                found.append(made[key])
            return found
        except REFUSALS as refused:
            LOG.info("%s is not timed: %s", candidate.name, str(refused))
            return None

    def _laid(self, candidate: TimedOffer) -> list[tuple[Value, Sequence[Expr] | None]]:
        wants = [*candidate.call.wants, *[None] * len(candidate.inputs)]
        return list(zip(candidate.inputs, wants, strict=False))

    def _tensor(self, v: Value, strides: Sequence[Expr] | None) -> Tensor:
        """Any values of this shape, ones if they are no floats."""
        laid = self._sizes(strides if strides is not None else dims.dense_strides(v.shape))
        t = torch.empty_strided(self._sizes(v.shape), laid, dtype=torch_dtype(v.dtype))
        return filled(t) if t.is_floating_point() else t.fill_(1)

    def _sizes(self, of: Sequence[Expr]) -> tuple[int, ...]:
        return tuple(map(self.size, of))


def _runs(name: str, run: Run) -> bool:
    """Whether a way works here: one that fails is not one."""
    try:
        run()
    except REFUSALS as refused:
        LOG.info("%s is not a way here: %s", name, str(refused))
        return False
    except Exception:
        LOG.exception("%s failed in a way that nobody expects; it is not taken", name)
        return False
    return True


def _told(candidate: TimedOffer) -> str:
    """What a region computes, in words."""
    read = ", ".join(f"{v.dtype.name}[{', '.join(map(str, v.shape))}]" for v in candidate.inputs)
    return f"{candidate.call.reason or candidate.name} of {read}"


def _bound_call(candidate: TimedOffer, tensors: Sequence[Tensor]) -> Run:
    call = candidate.call
    fill = lambda a: tensors[a.index] if isinstance(a, Operand) else a  # noqa: E731
    args, kwargs = [fill(a) for a in call.args], {name: fill(a) for name, a in call.kwargs}
    function = bind(call.function)
    return lambda: function(*args, **kwargs)


def processor() -> str:
    """The model of the processor; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line
    return ""
