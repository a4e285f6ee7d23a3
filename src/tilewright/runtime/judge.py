"""Times the ways to do a region of library calls, and remembers the fastest on disk.

Weights of a real model are not in a core's own cache when their turn comes, but what was computed just before is: so a
stream of other data goes through these caches before each run, then the operands are touched. The ways take turns; the
best time of each counts, since disturbances only add.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tilewright.ir import dims
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.graph import Operand, Value
from tilewright.options import Options
from tilewright.partition.choose import Entrant, Pass
from tilewright.runtime.cache import Store, digest
from tilewright.runtime.product import SOURCES
from tilewright.runtime.tensors import torch_dtype
from tilewright.target import MemoryKind, Target

TYPICAL = 64
"""What a size counts for if no example tells."""
SECONDS = 1.5
"""About how long all measuring of one compilation may take."""
SHARE = 0.08
"""The same for one region."""
ROUNDS = 9
"""Runs of each way at most."""
FEWEST = 3
HOPELESS = 1.5
"""How much longer than the best a way may take after so many rounds to be timed on."""
GAIN = 0.97
"""A later way must take at most this part of the time of an earlier one to be preferred."""
INSTRUCTION = 4
"""Operations of the peak rate that one instruction of a chain takes the time of, for each element."""
SLACK = 0.95
"""A time may be this part of what memory allows at least; one below was not that of the whole work."""

Run = Callable[[], object]


@dataclass(slots=True)
class Timer:
    """Finds which `Entrant` is the fastest, with the threads in use. `sizes` are example values of size symbols."""

    target: Target
    store: Store
    options: Options
    sizes: Mapping[str, int]
    spent: float = 0.0
    _noise: Tensor | None = None
    _identity: str = field(default="")

    def __post_init__(self) -> None:
        threads = self.options.threads or torch.get_num_threads()
        own = [path.read_bytes() for path in SOURCES]
        self._identity = digest(
            self.target.digest(),
            _processor(),
            str(threads),
            str(self.options.pin_threads),
            torch.__version__,
            *own,
        )

    def size(self, e: Expr) -> int:
        """The value of a size."""
        names = [s.value.name for s in dims.symbols_of(e) if isinstance(s.value, Symbol)]
        return dims.evaluate(e, {name: self.sizes.get(name, TYPICAL) for name in names})

    def verdict(self, task: str) -> str | None:
        """The winner of an earlier measurement, of another process perhaps."""
        folder = self.store.get(self._key(task))
        if folder is None:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((folder / "verdict.json").read_text())["fastest"])
        return None

    def _key(self, task: str) -> str:
        return digest("verdict", self._identity, task)

    def measure(self, task: str, entrants: Sequence[Entrant]) -> str:
        """The name of the fastest; what raises, or is faster than memory, loses."""
        start = time.perf_counter()
        times = self._times(entrants)
        bound = self._bound(entrants[0]) * SLACK
        best = entrants[0].name
        for name, seconds in times.items():
            if seconds >= bound and (best not in times or seconds < GAIN * times[best]):
                best = name
        self.spent += time.perf_counter() - start
        shown = {"task": task, "fastest": best, "seconds": times}
        self.store.put(self._key(task), {"verdict.json": json.dumps(shown, indent=1).encode()})
        return best

    def _bound(self, entrant: Entrant) -> float:
        """Seconds in which no way can read its operands and write its result, from the caches."""
        moved = sum(self.size(v.numel) * v.dtype.bytes for v in entrant.inputs)
        level = next(x for x in self.target.levels if x.kind > MemoryKind.DEVICE)
        return moved / (4 * level.bandwidth)

    def _times(self, entrants: Sequence[Entrant]) -> dict[str, float]:
        runs: dict[str, Run] = {}
        operands: list[Tensor] = []
        with torch.no_grad():
            for entrant in entrants:
                tensors = [self._tensor(v, s) for v, s in self._laid(entrant)]
                run = _bound_call(entrant, tensors)
                with contextlib.suppress(Exception):  # a way that fails here is not one
                    run()
                    runs[entrant.name] = run
                    operands += tensors
            times = self._rounds(runs, operands)
            for entrant in entrants:
                if entrant.name in times:
                    times[entrant.name] += sum(map(self._pass, entrant.passes))
        return times

    def _rounds(self, runs: dict[str, Run], operands: Sequence[Tensor]) -> dict[str, float]:
        best = dict.fromkeys(runs, float("inf"))
        start = time.perf_counter()
        left = min(SHARE, SECONDS - self.spent)
        for done in range(ROUNDS):
            if done >= FEWEST:
                limit = HOPELESS * min(best.values(), default=0.0)
                runs = {name: run for name, run in runs.items() if best[name] <= limit}
                if len(runs) < 2 or time.perf_counter() - start > left:
                    break
            for name, run in runs.items():
                self._disturb(operands)
                began = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - began)
        return best

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

    def _pass(self, left: Pass) -> float:
        """Seconds that one more pass takes; instructions do not overlap with memory in the short run."""
        t = self._tensor(left.value, None)
        best = float("inf")
        for _ in range(4):
            began = time.perf_counter()
            t.mul_(1.0)
            best = min(best, time.perf_counter() - began)
        return best + left.work * t.numel() / (self.target.flops / INSTRUCTION)

    def _laid(self, entrant: Entrant) -> list[tuple[Value, Sequence[Expr] | None]]:
        wants = [*entrant.call.wants, *[None] * len(entrant.inputs)]
        return list(zip(entrant.inputs, wants, strict=False))

    def _tensor(self, v: Value, strides: Sequence[Expr] | None) -> Tensor:
        """Any values of this shape, ones if they are no floats."""
        shape, dtype = [self.size(n) for n in v.shape], torch_dtype(v.dtype)
        laid = [self.size(s) for s in (strides if strides is not None else dims.dense_strides(v.shape))]
        t = torch.empty_strided(shape, laid, dtype=dtype)
        return t.normal_() if dtype.is_floating_point else t.fill_(1)


def _bound_call(entrant: Entrant, tensors: Sequence[Tensor]) -> Run:
    call = entrant.call
    fill = lambda a: tensors[a.index] if isinstance(a, Operand) else a  # noqa: E731
    args, kwargs = [fill(a) for a in call.args], {name: fill(a) for name, a in call.kwargs}
    return lambda: call.function(*args, **kwargs)


def _processor() -> str:
    """The model of the processor; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line
    return ""
