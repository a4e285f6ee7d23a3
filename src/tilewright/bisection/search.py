"""The halving: runs of a model in chosen states, until two that follow each other are right and wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, fx

from tilewright.accuracy import TreeVerdict
from tilewright.capture.aliasing.shares import output_shares
from tilewright.errors import TilewrightError, VerifyError
from tilewright.options import Options
from tilewright.pipeline.compiler import Compiled, watch_compilations
from tilewright.runtime.call.fallback import Captured
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.known_sizes import Result
from tilewright.tuning.search_limits import BISECTION

from .nodes import Compared
from .states import CompiledStates, Suspect

Runs = Callable[[list[Argument], Sequence[Tensor] | None], list[Result]]


def excess(verdict: TreeVerdict) -> float:
    """The smallest k of the worst leaf, in units of the k that it is allowed: at most 1 if all passed."""
    worst = 0.0
    for _, leaf in verdict.leaves:
        ratio = leaf.relative_k / leaf.k if leaf.k else math.inf
        worst = max(worst, math.inf if not leaf.passed and ratio <= 1 else ratio)
    return worst


def bar(found: float) -> float:
    """Errors above this are nearer to one that was `found`, in the logarithm, than to what is allowed."""
    return math.sqrt(min(found, BISECTION.max_excess_ratio))


@dataclass(frozen=True, slots=True)
class Finding:
    """The culprit, its number among `candidates` (all of them, in order; 1 is the first), and the runs it took."""

    culprit: Suspect
    number: int
    candidates: tuple[Suspect, ...]
    runs: int
    wrong: float
    """The error in the first wrong state and, `right`, in the one before, in units of what is allowed."""
    right: float | None

    @property
    def most_runs(self) -> float:
        """What the search may take at most: log2 of the number of candidates, plus 2."""
        return math.log2(len(self.candidates)) + 2


class _Switch(Captured):
    """A compiled graph whose calls run what is set: the captured program, or a state of its lowering."""

    def __init__(
        self,
        gm: fx.GraphModule,
        frozen: Mapping[str, Tensor],
        compiled: Compiled,
        lowering: CompiledStates | None,
    ) -> None:
        super().__init__(gm, frozen)
        self.gm, self.fixed = gm, frozen
        self.compiled = compiled
        self.made = compiled.executable
        self.record = compiled.executable.record
        self.lowering = lowering
        self.current: Runs | None = compiled.executable
        """None runs the captured program."""

    def __call__(self, args: list[Argument], out: Sequence[Tensor] | None = None) -> list[Result]:
        """Run on flat arguments."""
        if self.current is None:
            return super().__call__(args, out)
        return self.current(args, out)

    def admits(self, args: Sequence[Argument]) -> bool:
        """Whether the graph was compiled for arguments like these."""
        return self.made.admits(args)

    def compare(self, found: list[Suspect]) -> None:
        """Run as captured, and add to `found` the first node of which the graph's own calls make something else."""
        if self.lowering is not None:
            self.current = Compared(self.gm, self.fixed, self.lowering, found)

    def set(self, k: int | None) -> None:
        """State `k` of the lowering, or as near before it as there is a plan; None: as captured."""
        if self.lowering is None or k is None:
            self.current = None if k is None else self.made
            return
        while True:
            try:
                self.current = self.lowering.state(k)
                return
            except VerifyError:
                if not k:
                    self.current = None
                    return
                k -= 1


class Bisection:
    """Watches graphs being compiled, and then finds which candidate of all of them makes a result wrong."""

    def __init__(self) -> None:
        self._switches: list[_Switch] = []

    @contextmanager
    def watching(self) -> Generator[None]:
        """What is compiled meanwhile can be searched."""
        with watch_compilations(self._seen):
            yield

    def _seen(
        self, gm: fx.GraphModule, frozen: Mapping[str, Tensor], compiled: Compiled, options: Options
    ) -> Compiled:
        made = compiled.executable
        lowering = None
        if isinstance(made, Executable):
            name = f"{compiled.compilation.kind} graph {len(self._switches)}"
            lowering = CompiledStates(name, compiled.trace, made, options, output_shares(gm))
        switch = _Switch(gm, frozen, compiled, lowering)
        self._switches.append(switch)
        return replace(compiled, executable=switch)

    @property
    def lowerings(self) -> list[CompiledStates]:
        """The graphs that were lowered, in the order in which they were compiled."""
        return [s.lowering for s in self._switches if s.lowering is not None]

    @property
    def candidates(self) -> tuple[Suspect, ...]:
        """All of them: that torch's program was understood, and then graph by graph."""
        capture = Suspect("all graphs", "capture", "capture", "captured program")
        rest = (c for s in self._switches if s.lowering is not None for c in s.lowering.candidates)
        return (capture, *rest)

    def set(self, k: int) -> None:
        """Let the first `k` candidates hold, everywhere."""
        left = k - 1
        for switch in self._switches:
            count = len(switch.lowering.candidates) if switch.lowering is not None else 0
            switch.set(None if k <= 0 else max(0, min(left, count)))
            left -= count

    def search(self, error: Callable[[], float], compiled: float) -> Finding | None:
        """The culprit, or None if what was compiled is right. `compiled` is the error of the first run (`excess`), and
        `error` runs the model again from the same inputs and state and gives that of this run."""
        if compiled <= 1:
            return None
        candidates = self.candidates
        most = bar(compiled)
        low, high, runs = 0, len(candidates), 1
        right, wrong = None, compiled
        while high - low > 1:
            middle = (low + high) // 2
            runs += 1
            found = self.error_in(middle, error)
            if found > most:
                high, wrong = middle, found
            else:
                low, right = middle, found
        culprit = candidates[high - 1]
        if high == 1:
            runs += 1
            culprit = self._misunderstood(culprit, error)
        self.set(len(candidates))
        culprit = replace(culprit, detail=self.detail(high))
        return Finding(culprit, high, candidates, runs, wrong, right)

    def error_in(self, k: int, error: Callable[[], float]) -> float:
        """The error of a run in which the first `k` candidates hold."""
        self.set(k)
        return _error_of(error)

    def _misunderstood(self, culprit: Suspect, error: Callable[[], float]) -> Suspect:
        """The first node whose library calls give something else than torch's: one run, node by node."""
        found: list[Suspect] = []
        for switch in self._switches:
            switch.compare(found)
        _error_of(error)
        return found[0] if found else culprit

    def detail(self, number: int) -> str:
        """The source of a kernel, or the rules that a phase went wrong by; candidates count from 1."""
        k = number - 2
        for switch in self._switches:
            count = len(switch.lowering.candidates) if switch.lowering is not None else 0
            if switch.lowering is not None and 0 <= k < count:
                return switch.lowering.detail(k, switch.compiled.kernels)
            k -= count
        return ""


def _error_of(error: Callable[[], float]) -> float:
    """The error of a run; one that raises is infinitely wrong."""
    try:
        found = error()
    except (TilewrightError, RuntimeError, ArithmeticError, LookupError, ValueError, TypeError):
        return math.inf
    return math.inf if math.isnan(found) else found
