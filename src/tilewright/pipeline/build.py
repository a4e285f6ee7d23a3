"""Builds the kernels of covers, with whatever backend runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor
from torch._dispatch.python import no_python_dispatcher

from tilewright import progress
from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import BuildError, KernelRefused
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Layout, Value
from tilewright.ir.kernel import Cover, Kernel, Scheduled
from tilewright.ir.program import TileProgram
from tilewright.ir.schedule import Schedule
from tilewright.options import Options
from tilewright.plan import Plan
from tilewright.runtime.plan.executable import Executable, Guards
from tilewright.runtime.plan.launch import BuiltUnit
from tilewright.runtime.plan.verified import Checks
from tilewright.runtime.store.decisions import Decisions
from tilewright.runtime.store.tuned import Tuned
from tilewright.schedule.scheduler import Scheduler
from tilewright.schedule.solver import Solver
from tilewright.target import Target

from .loops import LoopBackend

T = TypeVar("T")
PlacedKernel = tuple[Kernel, Mapping[Value, Layout]]
"""A kernel, and how values lie in the cover that it is of."""
Clock = Callable[[Callable[[], object]], float]
"""Seconds of one run."""


class PhaseRunner(Protocol):
    """Runs a phase under a name."""

    def __call__(self, name: str, phase: Callable[[], T]) -> T:
        """The result of the phase."""
        ...


def in_silence(name: str, phase: Callable[[], T]) -> T:
    """Runs a phase of which nothing is kept."""
    return phase()


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that are built: how each is scheduled, its number in the unit, and how many programs that has."""

    scheduled: Sequence[Scheduled] = ()
    unit: BuiltUnit | None = None
    numbers: Sequence[int] = ()
    programs: int = 0


class JoinedKernelRefused(BuildError):
    """A kernel that is there because a clock preferred it to others, and that does not build: these are wanted."""


class ProductRefused(BuildError):
    """The kernel of a product (by the key of its task) that is there because it was measured as faster than a library,
    and that does not build: the library's is wanted."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message, phase="build")
        self.key = key


class RefusedKernels(KernelRefused):
    """`kernels` of a cover that the compiler behind us refuses, in its words."""

    def __init__(self, message: str, kernels: Sequence[Kernel]) -> None:
        super().__init__(message)
        self.kernels = tuple(kernels)


@dataclass(frozen=True, slots=True, eq=False)
class Runnable:
    """What an executable is made of: a plan, frozen tensors on its device, built kernels, and how much is checked.
    `saves` is the first result that is saved for a backward pass."""

    plan: Plan
    held: Sequence[Tensor]
    unit: BuiltUnit | None
    options: Options
    guards: Guards
    checks: Checks | None
    saves: int | None


class Backend(LoopBackend, Protocol):
    """What makes tile programs run on one kind of device."""

    def missing(self, device: str) -> str:
        """What keeps kernels from being generated for a device here; empty if nothing does."""
        ...

    def target(self, device: str, options: Options) -> Target:
        """The machine behind a device, as the options let it compute."""
        ...

    def scheduler(self, target: Target) -> Scheduler:
        """What chooses the schedules of its kernels on such a machine."""
        ...

    def built(
        self,
        builder: KernelBuilder,
        steps: Sequence[PlacedKernel],
        symbols: Sequence[Expr],
        *,
        only_timed: bool,
    ) -> Kernels:
        """Some kernels, at least one, in one unit: scheduled, legalised, printed, built (or recalled) and loaded; each
        of these goes by the builder's `run`. `only_timed` and errors are as in `KernelBuilder.built`."""
        ...

    def legalise(self, program: TileProgram, target: Target) -> TileProgram:
        """A program with the instructions of the target selected, as it is printed: see `lower/legalise`."""
        ...

    def show_source(self, program: TileProgram, symbols: Sequence[str], target: Target) -> str:
        """What is printed for one program."""
        ...

    def executable(self, parts: Runnable) -> Executable:
        """What runs a plan."""
        ...

    def clock(self, device: str) -> Clock | None:
        """What times runs on a device, whichever is the current one; None where there is no such device."""
        ...

    def replay_clock(self, device: str) -> Clock | None:
        """As `clock`, without what a launch costs the host; None where nothing is replayed."""
        ...

    def timing_key(self, device: str, options: Options) -> str:
        """Where times hold: the device and how much of it is used."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KernelBuilder:
    """Builds the kernels of covers for the machine and the sizes of `solver`. `ordinal` is the number of the device
    among its kind, None where it need not be here."""

    run: PhaseRunner
    backend: Backend
    solver: Solver
    decisions: Decisions
    ordinal: int | None = 0
    given: Mapping[Kernel, Schedule] = field(default_factory=dict[Kernel, Schedule])
    """Schedules of kernels that the solver is not asked for."""
    tuned: Tuned = field(default_factory=Tuned)
    """What a tuning file says of the device."""
    listed: Set[Kernel] = frozenset()
    """Kernels that run in lists."""

    @property
    def hints(self) -> SizeHints:
        """The sizes that kernels are built for."""
        return self.solver.hints

    def built(self, covers: Sequence[Cover], symbols: Sequence[Expr], *, only_timed: bool = False) -> Kernels:
        """All kernels of some covers in one unit, those of each cover in its order. `only_timed`: a clock calls them,
        at the typical sizes, and nobody else. Raises Refused for one that does not build, BuildError where none
        would."""
        steps = [(step, c.layouts) for c in covers for step in c.steps if isinstance(step, Kernel)]
        return self.backend.built(self, steps, symbols, only_timed=only_timed) if steps else Kernels()

    def solved(self, steps: Sequence[PlacedKernel]) -> list[Scheduled]:
        """Schedules and programs of kernels."""
        found: list[Scheduled] = []
        with no_python_dispatcher():
            for number, (kernel, layouts) in enumerate(steps):
                if self.run is not in_silence:
                    progress.count("schedule", number, len(steps))
                found.append(self.solver.solve(kernel, layouts, self.given.get(kernel)))
        return found


def kernels_behind(
    steps: Sequence[PlacedKernel], scheduled: Sequence[Scheduled], programs: Sequence[TileProgram]
) -> list[PlacedKernel]:
    """The kernels that some of these programs run."""
    wanted = {id(p) for p in programs}
    pairs = zip(steps, scheduled, strict=True)
    return [step for step, s in pairs if wanted & {id(p) for p in s.programs}]


def name_refused(
    refused: KernelRefused, steps: Sequence[PlacedKernel], scheduled: Sequence[Scheduled],
    programs: Sequence[TileProgram],
) -> BuildError:  # fmt: skip
    """The refusal of the kernels behind some programs. Where these are none, or all of several, it is no fault of
    kernels: the same as it was."""
    kernels = [kernel for kernel, _ in kernels_behind(steps, scheduled, programs)]
    return RefusedKernels(refused.message, kernels) if 0 < len(kernels) < max(2, len(steps)) else refused


def names_of(symbols: Iterable[Expr]) -> list[str]:
    """The names of size symbols, in the order in which generated code receives them."""
    return sorted({str(s) for s in symbols})


def programs_of(scheduled: Sequence[Scheduled]) -> list[TileProgram]:
    """The distinct programs of kernels."""
    return list({id(p): p for s in scheduled for p in s.programs}.values())


def number_kernels(cover: Cover, numbers: Sequence[int]) -> dict[Kernel, tuple[int, tuple[Value, ...]]]:
    """The kernels of a cover as `build_plan` takes them."""
    kernels = [step for step in cover.steps if isinstance(step, Kernel)]
    return {k: (n, (*k.inputs, *k.outputs)) for k, n in zip(kernels, numbers, strict=True)}
