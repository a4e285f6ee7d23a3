"""Solves each distinct kernel once: identical regions (the layers of a network) share one program and one price."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tilewright.analysis.data_masks import explain_unbounded_loops
from tilewright.analysis.size_hints import NO_HINTS, SizeHints
from tilewright.errors import IllegalSchedule
from tilewright.form.classes import make_form
from tilewright.form.companions import refusals
from tilewright.form.implied import by_lists
from tilewright.form.lane_softmax import with_neighbours
from tilewright.form.products.product_chains import limit_product_chains
from tilewright.form.steps import take, take_again
from tilewright.form.wide_sums import with_wide_sums
from tilewright.ir.dtype import f32
from tilewright.ir.form import Form, FormStep
from tilewright.ir.graph import Layout, Value
from tilewright.ir.identity import identity
from tilewright.ir.kernel import Bucket, Kernel, Note, Scheduled
from tilewright.ir.program import Dot, Stmt, TileProgram
from tilewright.ir.schedule import Schedule
from tilewright.ir.selection import Precision
from tilewright.ir.text.schedule import form_steps, parse
from tilewright.lower.legality import check_roles
from tilewright.lower.lower import lower
from tilewright.options import Options
from tilewright.partition.greedy import Afar
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import SCHEDULES

from .equal_kernels import at_first_step
from .places import stored_at
from .product_table import MeasuredBlocks
from .scheduler import Scheduler, Solution
from .schedulers import scheduler_of
from .table import Tuning, table

MULTIPLIED: Mapping[Precision, str] = {
    "tf32": "its products of fp32 are TF32",
    "bf16x6": "its products of fp32 are six of their pieces in bf16, which hold all bits",
}
"""What is told of kernels whose products of fp32 go to matrix units that read something else."""


Layouts = Mapping[Value, Layout]


@dataclass(frozen=True, slots=True)
class _Lowered:
    program: TileProgram
    buckets: tuple[Bucket, ...]


class Solver:
    """Prices and lowers kernels for one target, where unknown sizes are what the hints say; results are remembered by
    the structure of the kernel."""

    def __init__(
        self, target: Target, options: Options, tuning: Tuning | None = None, hints: SizeHints = NO_HINTS,
        scheduler: Scheduler | None = None,
    ) -> None:  # fmt: skip
        """`tuning` stands in for the table of the package, `scheduler` for the one that serves such a machine."""
        self.target, self.options, self.hints = target, options, hints
        self.scheduler = scheduler_of(target) if scheduler is None else scheduler
        self.tuning = table(target.name) if tuning is None else tuning
        self.known: dict[str, Solution | IllegalSchedule] = {}
        self.forms: dict[str, Form | IllegalSchedule] = {}
        """The forms that kernels have before any step, which sizes, and what a level holds, do not change."""
        self.preferred: dict[str, Solution] = {}
        """What a clock found faster, by the keys that kernels have whose values are all dense."""
        self._on_forgotten: dict[str, Callable[[str], None]] = {}
        self.preferred_as_laid: dict[str, Solution | None] = {}
        """The same by the keys of kernels as their values lie; None where it is not legal so, or nothing is known."""
        self.lowered: dict[str, _Lowered] = {}
        self.shrunk: dict[str, Solver] = {}
        """For kernels that did not get the shared memory that they wanted: who counts on less."""

    def at(self, hints: SizeHints) -> Solver:
        """The same for other sizes; it remembers nothing of these."""
        if hints == self.hints:
            return self
        return self._like(self.target, hints)

    def _like(self, target: Target, hints: SizeHints) -> Solver:
        """A solver that shares the forms of kernels with this one."""
        made = Solver(target, self.options, self.tuning, hints, self.scheduler)
        made.forms = self.forms
        return made

    def price(self, kernel: Kernel, layouts: Layouts) -> float:
        """Modelled seconds of a kernel. Raises IllegalSchedule if it has no legal form."""
        return self._alike(kernel, layouts).seconds

    def seconds_at(self, kernel: Kernel, layouts: Layouts, hints: SizeHints) -> float:
        """Modelled seconds of what was decided for a kernel at the usual sizes, at other ones. Raises IllegalSchedule
        if it has no legal form."""
        key = kernel_key(kernel, layouts)
        if key in self.shrunk and self._preferred(kernel, layouts, key) is None:
            return self.shrunk[key].seconds_at(kernel, layouts, hints)
        found = self.solution(kernel, layouts, key)
        return self.scheduler.seconds(found.form, found.schedule, self.target, hints)

    @property
    def afar(self) -> Afar | None:
        """What kernels cost that find nothing in the last cache; None where there is none."""
        cache = self.target.level(MemoryKind.L2)
        if cache is None:
            return None
        target = self.target.without(MemoryKind.L2)

        def price(kernel: Kernel, layouts: Layouts) -> float:
            found = self._alike(kernel, layouts)
            return self.scheduler.seconds(found.form, found.schedule, target, self.hints)

        return Afar(cache.lasting_bytes, price)

    def proposals(
        self, kernel: Kernel, layouts: Layouts, blocks: MeasuredBlocks | None = None
    ) -> tuple[Solution, ...]:
        """Other schedules of a kernel, the fastest by the model first, each with the form that it is of: for a clock to
        decide; none where the scheduler proposes none. With `blocks`, only those that have them, or them with other
        stages. Raises IllegalSchedule if the kernel has no legal form."""
        return tuple(self.scheduler.proposals(self.solution(kernel, layouts), self, blocks))

    def specialised(self, kernel: Kernel, layouts: Layouts) -> tuple[Solution, ...]:
        """A kernel's schedule for warps that have different work, in several ways, for a clock to decide. Raises
        IllegalSchedule if the kernel has no legal form."""
        return tuple(self.scheduler.specialised(self.solution(kernel, layouts), self))

    def other_blocks(self, kernel: Kernel, layouts: Layouts) -> tuple[Solution, ...]:
        """A kernel in other blocks, for a clock to decide; none of one that a clock has decided about before. Raises
        IllegalSchedule if the kernel has no legal form."""
        found = self.solution(kernel, layouts)
        preferred = self._preferred(kernel, layouts, kernel_key(kernel, layouts))
        return () if found is preferred else tuple(self.scheduler.other_blocks(found, self))

    def repeating(self, kernel: Kernel, layouts: Layouts) -> Solution | None:
        """A kernel whose grid points all fold anew what they have in common, for a clock to decide; None where the
        scheduler has none. Raises IllegalSchedule if the kernel has no legal form."""
        return self.scheduler.repeating(self._with_quick_functions(self.find_form(kernel, layouts)), self)

    def read_solution(self, kernel: Kernel, layouts: Layouts, text: str, seconds: float) -> Solution:
        """What a text says of a kernel of known sizes whose values lie so: its schedule, from an earlier process, which
        took so many seconds. Raises ValueError for a text that is no schedule of it, IllegalSchedule if a law forbids
        it."""
        form = self._under(kernel, layouts, form_steps(text))
        schedule = parse(text, form.classes())
        check_roles(form, schedule)
        return Solution(schedule, form, seconds, form)

    def prefer(
        self, kernel: Kernel, solution: Solution, on_forgotten: Callable[[str], None] = lambda why: None
    ) -> None:
        """From now on, equal kernels are solved so, however their values lie, if this is legal: a clock found it faster
        than what the model prefers. `on_forgotten` is called if that turns out not to build, with the reason; what it
        raises is told to whoever builds."""
        key = kernel_key(kernel, {})
        self.preferred[key], self._on_forgotten[key] = solution, on_forgotten
        self.preferred_as_laid.clear()
        self.lowered.clear()

    def is_preferred(self, kernel: Kernel) -> bool:
        """Whether kernels equal to this one are solved in a way that a clock found faster."""
        return _key_anywhere(kernel) in self.preferred

    def forget_preferred(self, kernel: Kernel, why: str = "") -> bool:
        """From now on, solve kernels equal to this one as the model prefers: the other way was refused, and `why`.
        Whether something else was preferred."""
        key = _key_anywhere(kernel)
        found = self.preferred.pop(key, None)
        self.preferred_as_laid.clear()
        self.lowered.clear()
        told = self._on_forgotten.pop(key, None)
        if told is not None:
            told(why)
        return found is not None

    def solve(self, kernel: Kernel, layouts: Layouts, schedule: Schedule | None = None) -> Scheduled:
        """Schedule and tile program of a kernel. Equal kernels get the same program object.

        With a `schedule`, that one, for all sizes: tiles and fields are taken as they are (`replay`). Raises
        IllegalSchedule if a law forbids it, or if a level cannot hold a tile."""
        if schedule is not None:
            return self._given(kernel, layouts, schedule)
        key = kernel_key(kernel, layouts)
        if key in self.shrunk and self._preferred(kernel, layouts, key) is None:
            return self.shrunk[key].solve(kernel, layouts)
        found = self.solution(kernel, layouts, key)
        made = self.lowered.get(key)
        if made is None:
            # What a clock found was timed at several sizes, as it is.
            buckets = () if found is self._preferred(kernel, layouts, key) else self._buckets(found)
            made = _in_inputs(kernel, _Lowered(lower_form(found.form, found.schedule), buckets))
            self.lowered[key] = made
        notes = (*self.notes(kernel, layouts), *self._rounding(made.program))
        return Scheduled(
            kernel, found.schedule, made.program, _params(kernel), made.buckets, notes, found.seconds
        )

    def _given(self, kernel: Kernel, layouts: Layouts, schedule: Schedule) -> Scheduled:
        """A kernel under a schedule that somebody gives."""
        target, hints = self.target, self.hints
        form = self._under(kernel, layouts, schedule.form_steps)
        check_roles(form, schedule)
        self.scheduler.check_capacity(form, schedule, target)
        program = _in_input(kernel, lower_form(form, schedule))
        notes = (*_notes(kernel, form, schedule), *self._rounding(program))
        seconds = self.scheduler.tile_seconds(form, schedule, target, hints)
        return Scheduled(kernel, schedule, program, _params(kernel), (), notes, seconds)

    def _rounding(self, program: TileProgram) -> tuple[Note, ...]:
        """What is told of a program whose products of fp32 read something else."""
        said = MULTIPLIED.get(self.target.singles)
        return (Note(said),) if said is not None and any(_is_single(s) for s in program.statements()) else ()

    def notes(self, kernel: Kernel, layouts: Layouts) -> tuple[Note, ...]:
        """What is refused in a kernel: folds that wait for others, masks that skip nothing. Nothing of one that has no
        legal form."""
        try:
            found = self.solution(kernel, layouts)
        except IllegalSchedule:
            return ()
        return _notes(kernel, found.form, found.schedule)

    def shrink_shared_memory(self, kernel: Kernel, layouts: Layouts, share: float) -> bool:
        """From now on, solve this kernel as if a block had only this `share` of the shared memory that was counted on
        so far, or less, until it gets another schedule: it needs more than the estimate says. Whether there is one."""
        key = kernel_key(kernel, layouts)
        target = self.shrunk[key].target if key in self.shrunk else self.target
        level = target.level(MemoryKind.SHARED)
        if level is None:
            return False
        before, capacity = self.solve(kernel, layouts).programs, int(level.capacity * share)
        while capacity >= SCHEDULES.min_shared_bytes:
            less = target.resized(capacities={MemoryKind.SHARED: capacity})
            self.shrunk[key] = self._like(less, self.hints)
            if self.solve(kernel, layouts).programs != before:
                return True
            capacity //= 2
        return False

    def _buckets(self, found: Solution) -> tuple[Bucket, ...]:
        return tuple(
            Bucket(when, schedule.changed(form_steps=form.steps), lower_form(form, schedule))
            for when, form, schedule in self.scheduler.buckets(found, self)
        )

    def _with_options(self, schedule: Schedule) -> Schedule:
        quick = self.target.quick if schedule.math.exp2 else ()
        return schedule.changed(
            trim=self.options.trim != "exact",
            fast=quick,
            wide_sums=self.target.wide_sums,
            product_chain=self.target.dot_chain,
        )

    def solution(self, kernel: Kernel, layouts: Layouts, key: str | None = None) -> Solution:
        """What is decided of a kernel, whose `key` the caller may know: its schedule, and the form that this is of.
        Raises IllegalSchedule if the kernel has no legal form."""
        key = key or kernel_key(kernel, layouts)
        found = self._preferred(kernel, layouts, key) or self.known.get(key)
        if found is None:
            try:
                found = self._best(kernel, layouts, key)
            except IllegalSchedule as refused:
                found = refused
            self.known[key] = found
        if isinstance(found, IllegalSchedule):
            raise found
        return found

    def find_form(self, kernel: Kernel, layouts: Layouts, key: str | None = None) -> Form:
        """The form that the ops of a kernel have, before any step. Raises IllegalSchedule if there is none."""
        key = key or kernel_key(kernel, layouts)
        found = self.forms.get(key)
        if found is None:
            try:
                found = form_of(kernel, layouts, self.target, self.options)
            except IllegalSchedule as refused:
                found = refused
            self.forms[key] = found
        if isinstance(found, IllegalSchedule):
            raise found
        return found

    def _under(self, kernel: Kernel, layouts: Layouts, steps: tuple[FormStep, ...]) -> Form:
        """The form to which these steps lead. Raises IllegalSchedule if there is none."""
        return take_again(steps, self.find_form(kernel, layouts), self.target, self.hints)

    def _best(self, kernel: Kernel, layouts: Layouts, key: str) -> Solution:
        return self.scheduler.best(self._with_quick_functions(self.find_form(kernel, layouts, key)), self)

    def _with_quick_functions(self, form: Form) -> Form:
        return self.take("use_erfc", form) if "erfc" in self.target.quick else form

    def _preferred(self, kernel: Kernel, layouts: Layouts, key: str) -> Solution | None:
        """What is preferred for a kernel, where it is legal for values that lie so."""
        if not self.preferred:
            return None
        if key not in self.preferred_as_laid:
            found = self.preferred.get(_key_anywhere(kernel))
            self.preferred_as_laid[key] = None if found is None else self._laid(found, kernel, layouts)
        return self.preferred_as_laid[key]

    def _laid(self, found: Solution, kernel: Kernel, layouts: Layouts) -> Solution | None:
        try:
            form = self._under(kernel, layouts, found.schedule.form_steps)
            if set(form.classes()) != {c.axis for c in found.schedule.tiling.classes}:
                return None
            check_roles(form, found.schedule)
        except IllegalSchedule:
            return None
        return replace(found, form=form, rows=form)

    def _alike(self, kernel: Kernel, layouts: Layouts) -> Solution:
        """The solution of a kernel, or of one that costs the same."""
        key = kernel_key(kernel, layouts)
        first = kernel if key in self.known else at_first_step(kernel, layouts, self.scheduler.begin_multiple)
        return self.solution(first, layouts, key if first is kernel else None)

    def take(self, step: str, form: Form) -> Form:
        """See `Comparison`."""
        return take(step, form, self.target, self.hints)

    def chosen(self, form: Form) -> Solution:
        """See `Comparison`."""
        schedule = self.scheduler.choose(form, self.target, self.tuning, self.hints)
        form, schedule = self.completed(form, schedule)
        check_roles(form, schedule)
        return Solution(schedule, form, self.scheduler.seconds(form, schedule, self.target, self.hints), form)

    def completed(self, form: Form, schedule: Schedule) -> tuple[Form, Schedule]:
        """See `Comparison`."""
        form, schedule = with_neighbours(form, self._with_options(schedule), self.target)
        return form, self._fitted(form, schedule.changed(form_steps=form.steps))

    def completed_as_it_is(self, form: Form, schedule: Schedule) -> tuple[Form, Schedule]:
        """See `Comparison`."""
        return form, self._fitted(form, self._with_options(schedule))

    def _fitted(self, form: Form, schedule: Schedule) -> Schedule:
        return self.scheduler.fitted(form, schedule, self.target, lower_form)


def form_of(kernel: Kernel, layouts: Layouts, target: Target, options: Options) -> Form:
    """The form that the ops of a kernel have, before any step. Raises IllegalSchedule if there is none."""
    return make_form(kernel, layouts, round_halves=options.round_intermediates, coarse=target.coarse)


def lower_form(form: Form, schedule: Schedule) -> TileProgram:
    """The tile program of a form under a schedule, with the sums that the schedule asks for."""
    return limit_product_chains(
        lower(with_wide_sums(form, schedule), schedule), form, schedule.reductions.product_chain
    )


def replay(
    kernel: Kernel, layouts: Layouts, schedule: Schedule, target: Target, options: Options, hints: SizeHints
) -> TileProgram:
    """The tile program that a schedule stands for. Tiles and fields are taken as they are; what a step of the form
    looks up in the machine, or in the `hints` of sizes, it looks up again."""
    return lower_form(form_under(kernel, layouts, schedule, target, options, hints), schedule)


def form_under(
    kernel: Kernel, layouts: Layouts, schedule: Schedule, target: Target, options: Options, hints: SizeHints
) -> Form:
    """The form that a schedule is of. Raises IllegalSchedule if there is none."""
    return take_again(schedule.form_steps, form_of(kernel, layouts, target, options), target, hints)


def _notes(kernel: Kernel, form: Form, schedule: Schedule) -> tuple[Note, ...]:
    """What was refused in a kernel: folds that wait for others, masks that skip nothing; and loops by lists."""
    notes: list[Note] = []
    for later in refusals(form, schedule):
        ops = (kernel.ops[later.fold], *(kernel.ops[n] for n in later.others))
        others = ", ".join(f"{{{k}}}" for k in range(1, len(ops))) or "what it reads"
        notes.append(Note(f"{{0}} runs after {others} ({later.why})", ops))
    listed = by_lists(form) if schedule.reductions.trim else ()
    listing = [(folds, f"loops over the tiles that a list names ({size} numbers)") for folds, size in listed]
    for folds, why in (*explain_unbounded_loops(form, schedule), *listing):
        names = ", ".join(f"{{{k}}}" for k in range(len(folds)))
        notes.append(Note(f"{names}: {why}", tuple(kernel.ops[n] for n in folds)))
    return tuple(notes)


def _params(kernel: Kernel) -> tuple[Value, ...]:
    """What a kernel's program takes, in calling order."""
    return (*kernel.inputs, *kernel.outputs)


def _is_single(s: Stmt) -> bool:
    """Whether a statement is a product of fp32."""
    return isinstance(s, Dot) and s.a.dtype is f32


def _in_inputs(kernel: Kernel, made: _Lowered) -> _Lowered:
    """The programs of a kernel that may store over what it loads, or at places that data name."""
    if not kernel.over and not kernel.lines:
        return made
    buckets = tuple(replace(b, program=_in_input(kernel, b.program)) for b in made.buckets)
    return _Lowered(_in_input(kernel, made.program), buckets)


def _in_input(kernel: Kernel, program: TileProgram) -> TileProgram:
    first = len(kernel.inputs)
    for output, place in kernel.lines:
        program = stored_at(program, first + output, kernel.inputs.index(place.index), place)
    return replace(program, over=tuple(sorted({first + b for _, b in kernel.over})))


def kernel_key(kernel: Kernel, layouts: Layouts) -> str:
    """Equal for kernels that differ only in which values they read and make, and in what is told of them."""
    return identity(kernel, tuple(map(layouts.get, (*kernel.inputs, *kernel.outputs))))


def _key_anywhere(kernel: Kernel) -> str:
    """The same, however values lie and wherever results are stored."""
    return kernel_key(replace(kernel, over=(), lines=()), {})
