"""A plan under exact sizes: where its buffers lie, what it makes, launch tables. And the workspace of one run."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from tilewright.errors import NoElements, OutOfMemory
from tilewright.ir.graph import DIVISION, PART
from tilewright.ir.sizes.host import Number, size
from tilewright.machine_memory import reachable_bytes
from tilewright.plan.data import (
    CallStep,
    Copy,
    Home,
    Launches,
    Plan,
    PlanSegment,
    Step,
    View,
)
from tilewright.runtime.cpu.huge_pages import large_maker, on_large_pages
from tilewright.runtime.cpu.native_call import NativeCall, Outside
from tilewright.runtime.objects.reading import Lies, Reader, reader
from tilewright.tuning.runtime_thresholds import CPU_WORK

from . import steps
from .call_results import Act, Promise, Tensors, counting, receiving
from .launch import BuiltUnit, DivisionByZero, LaunchList
from .layouts import Layouts, Made, arena_of, buffers_of
from .tensors import maker_on, torch_dtype
from .verified import Checks


def check_preconditions(segment: PlanSegment, sizes: Mapping[str, Number]) -> None:
    """Raise NoElements unless `sizes` fulfil what the segment requires, DivisionByZero where they make a divisor 0."""
    for p in segment.preconditions:
        if size(p.size, sizes) == 0 and (p.count is None or size(p.count, sizes) != 0):
            if p.why == DIVISION:
                raise DivisionByZero(
                    f"ZeroDivisionError: {p.why}: {p.size} is 0", phase="run", op=p.op, place=p.place,
                    hint="give another size",
                )  # fmt: skip
            what, hint = f"{p.why}: {p.size} is 0", "give that dim at least one element"
            if p.why == PART:
                what, hint = p.why, "call it without compiling to see the sizes"
            raise NoElements(what, phase="run", op=p.op, place=p.place, hint=hint)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltPlan:
    """A plan with its kernels and its frozen tensors, whatever sizes it runs under; `checks` look at each step."""

    plan: Plan
    unit: BuiltUnit | None = None
    constants: tuple[Tensor, ...] = ()
    checks: Checks | None = None


class BoundSegment:
    """One segment under exact sizes: what to allocate and what to do."""

    def __init__(
        self, built: BuiltPlan, number: int, sizes: Mapping[str, Number], before: BoundSegment | None = None
    ) -> None:
        """The segment with that number. `before`: a segment under other sizes, of which is taken what has not
        changed."""
        self.built = built
        self.plan = plan = built.plan
        self.segment = segment = plan.segments[number]
        self.unit, self.checks = built.unit, built.checks
        check_preconditions(segment, sizes)
        self.make = maker_on(plan.device)
        self.layouts = layouts = Layouts(plan, sizes, None if before is None else before.layouts)
        self.sizes = array("q", [int(sizes.get(name, 0)) for name in plan.symbols] or [0])
        same = before if before is not None and before.segment is segment else None
        self.buffers = buffers = buffers_of(plan, segment, number) if same is None else same.buffers
        self.arena = arena_of(plan, layouts, buffers.arena, None if same is None else same.arena)
        self.place, self.arena_bytes = self.arena.places, self.arena.bytes
        stays = same is not None and same.arena is self.arena and same.layouts.offsets == layouts.offsets
        self._located: dict[int, tuple[Launches, LaunchList]] = (
            same._located if same is not None and stays else {}
        )
        self._roots: dict[int, frozenset[int]] = {} if same is None else same._roots
        self._readers: dict[frozenset[int], Reader | None] = {} if same is None else same._readers
        changed = self.layouts.changed if same is not None else range(len(plan.buffers))
        self.made: dict[int, Made] = {} if same is None else dict(same.made)
        for k in changed:
            if k in buffers.tensors:
                self.made[k] = k, layouts.shapes[k], layouts.strides[k], buffers.tensors[k]
        """How tensors of their own are made; those that are not `later` are made first."""
        self.outputs = tuple([o for k, o in self.made.items() if k not in buffers.later])
        self.large = same is not None and same.large
        """Whether some tensor may be worth large pages."""
        if plan.device == "cpu":
            self._look_at_memory(k for k in changed if k in buffers.large)

    def _look_at_memory(self, buffers: Iterable[int]) -> None:
        """Raise OutOfMemory where the arena, or one of these, needs more at a time than the machine has: Linux promises
        it all the same, and ends the process when it is used. And see which are worth large pages."""
        layouts, plan, there = self.layouts, self.plan, reachable_bytes()
        if there and max(self.arena_bytes, layouts.largest) > there:
            sized = [b for b in buffers if len(layouts.strides[b]) == len(plan.buffers[b].spec.shape)]
            needed = max([self.arena_bytes, *(layouts.bytes_of(plan, b) for b in sized)])
            if needed > there:
                raise OutOfMemory("cpu", needed, there, "all that the machine has")
        least = CPU_WORK.min_huge_page_bytes
        if self.large or layouts.largest >= least:
            self.large = any(layouts.bytes_of(plan, k) >= least for k in self.made)
            if self.large:
                self.make = large_maker(self.make)

    def promise(self, b: int) -> Promise:
        """What a library call's result in buffer `b` must be, as far as sizes are known."""
        spec, layouts = self.plan.buffers[b].spec, self.layouts
        ready, rank = layouts.ready[b], len(spec.shape)
        strides = layouts.strides[b] if ready and len(spec.strides) == rank else None
        device = torch.device(self.plan.device)
        return Promise(torch_dtype(spec.dtype), device, rank, layouts.shapes[b] if ready else None, strides)

    def receive_measured(self, before: PlanSegment, tensors: Tensors) -> None:
        """Hold results whose sizes were unknown when their call, the last step of the segment `before`, ended against
        what was promised."""
        last = before.steps[-1] if before.steps else None
        for k, b in enumerate(last.outputs if isinstance(last, CallStep) else ()):
            if (
                isinstance(last, CallStep)
                and self.plan.buffers[b].home is not Home.NUMBER
                and tensors[b] is not None
            ):
                receiving(last, k, self.promise(b))(tensors)

    def locate(self, b: int) -> tuple[int, int]:
        """Slot among the bases of a workspace, of which the arena's is the last, and byte offset behind it where
        buffer `b` starts."""
        buffers = self.plan.buffers
        offset = 0
        while buffers[b].home is Home.VIEW:
            offset += self.layouts.offsets[b] * buffers[b].spec.dtype.bytes
            b = buffers[b].source
        if buffers[b].home is Home.ARENA:
            return len(buffers), offset + self.place.get(b, 0)
        return b, offset

    def located(self, step: Launches) -> LaunchList:
        """Launches with the memory of their parameters, those of a list as one."""
        known = self._located.get(id(step))  # which keeps the step, so that no other one has its number
        if known is not None:
            return known[1]
        found = LaunchList()
        for rows in step.together():
            places = [self.locate(p) for x in rows for p in x.params]
            found.append((rows[0].kernel, places, len(rows)) if len(rows) > 1 else (rows[0].kernel, places))
        if self.checks is None:  # who checks each kernel makes steps of its own
            self._located[id(step)] = step, found
        return found

    def roots(self, step: int) -> frozenset[int]:
        """Slots that the launches of the step with that number need. Sizes do not matter."""
        found = self._roots.get(step)
        if found is None:
            launches = self.segment.steps[step]
            places = self.located(launches) if isinstance(launches, Launches) else []
            found = self._roots[step] = frozenset(slot for row in places for slot, _ in row[1])
        return found

    def reader_of_constants(self, buffers: frozenset[int]) -> Reader | None:
        """Reads the addresses of the constants that these buffers are."""
        if buffers not in self._readers:
            constants = self.built.constants
            numbers = [(self.plan.buffers[b].index, b) for b in sorted(buffers)]
            self._readers[buffers] = reader(
                [Lies(k, b, tuple(constants[k].shape), constants[k].stride()) for k, b in numbers]
            )
        return self._readers[buffers]

    def allocate_outputs(self, tensors: Tensors) -> None:
        """Make the tensors that leave the plan, but those that the caller brought."""
        for b, shape, strides, dtype in self.outputs:
            if tensors[b] is None:
                tensors[b] = self.make(shape, strides, dtype)


class Workspace:
    """Memory and prepared steps for one run of one segment at a time."""

    def __init__(self, part: BoundSegment) -> None:
        self.part = part
        self.constants = constants = list(part.built.constants)
        plan, buffers = part.plan, part.buffers
        self.arena = torch.empty(max(1, part.arena_bytes), dtype=torch.uint8, device=plan.device)
        if plan.device == "cpu" and part.arena_bytes >= CPU_WORK.min_huge_page_bytes:
            on_large_pages(self.arena)
        self.bases = array("Q", [0]) * (len(plan.buffers) + 1)
        self.bases[-1] = self.arena.data_ptr()
        self.lasting = {b: self._view(b, part.place[b]) for b in buffers.arena if b in buffers.used}
        """Tensors that are the same in every run."""
        for k, index in buffers.constants:
            self.bases[k] = constants[index].data_ptr()
            self.lasting[k] = constants[index]
        self.address = self.bases.buffer_info()[0]
        self.addressed = set[int]()
        """Buffers whose addresses a run must know; found with the first `acts`."""
        self._made: Sequence[int] | None = None
        self.runs: list[Callable[[], int]] = []
        self.pending: Callable[[], None] | None = None
        """What is to be done in front of the next run under the same sizes."""
        self.views: tuple[tuple[int, Tensor], ...] = ()
        """Tensors that each run begins with; known with its `acts`."""

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """What a run does, in order. Made when it is first asked for: a native call has no need of it."""
        steps = self.part.segment.steps
        if self._made is None:
            self.add_addressed(slot for k in range(len(steps)) for slot in self.part.roots(k))
        launched = [step for step in steps if isinstance(step, Launches)]
        if len(launched) < len(steps) or self.part.checks is not None or self.part.buffers.later:
            made = self.acts_between(0, len(steps))
        else:
            made = tuple(map(self._launches, launched))
        self.views = tuple(self.lasting.items())
        return made

    def resize(self, part: BoundSegment) -> bool:
        """Serve the same segment under other sizes from now on, if all lies where it lay. For one that nobody uses."""
        old, new = self.part.layouts, part.layouts
        if part.segment is not self.part.segment or part.arena is not self.part.arena:
            return False
        self.part = part
        self.__dict__.pop("acts", None)
        self.runs, self.pending = [], None
        for b in part.buffers.arena if self.lasting else ():
            if b in self.lasting and (new.shapes[b], new.strides[b]) != (old.shapes[b], old.strides[b]):
                self.lasting[b] = self._view(b, part.place[b])
        return True

    def prepare(self) -> Workspace:
        """This one, with what a run does at hand: made here, by one thread."""
        _ = self.acts
        return self

    def add_addressed(self, buffers: Iterable[int]) -> None:
        """Each run must know the addresses of these too."""
        self.addressed |= set(buffers)
        known = self.part.plan.buffers
        mine = [b for b in self.addressed if b < len(known)]
        self._made = [b for b in mine if known[b].home not in (Home.INPUT, Home.CONSTANT)]
        frozen = frozenset(b for b in mine if known[b].home is Home.CONSTANT)
        self._read_constants = self.part.reader_of_constants(frozen)

    def point(self, tensors: Tensors, *, read: bool) -> None:
        """Note where the tensors of a run lie. Those of the inputs are there if they were `read`."""
        bases, constants = self.bases, self._read_constants
        known = read and constants is not None and constants(self.constants, self.address)
        for b in self._made or () if known else self.addressed:
            if b < len(tensors) and (t := tensors[b]) is not None:
                bases[b] = t.data_ptr()

    def _view(self, b: int, place: int) -> Tensor:
        part = self.part
        flat = self.arena[place : place + part.layouts.bytes_of(part.plan, b)]
        typed = flat.view(torch_dtype(part.plan.buffers[b].spec.dtype))
        return typed.as_strided(part.layouts.shapes[b], part.layouts.strides[b])

    def locate(self, b: int) -> tuple[int, int]:
        """Slot in `bases` and byte offset behind it where buffer `b` starts."""
        return self.part.locate(b)

    def acts_between(self, start: int, end: int) -> tuple[Act, ...]:
        """What a run does in the steps from `start` up to `end`, in order. Calls that the caller's thread does
        alone become one act with their like and what stands between them."""
        made: list[Act] = []
        segment = self.part.segment
        calls = any(isinstance(s, CallStep) for s in segment.steps)
        makes = segment.makes or ((),) * len(segment.steps)
        table = list(zip(segment.steps, makes, segment.frees, strict=True))[start:end]
        for alone, run in groupby(table, lambda row: calls and self._is_alone(row[0])):
            acts: list[Act] = []
            rows = list(run)
            for copies, group in groupby(rows, lambda row: isinstance(row[0], Copy)):
                together = list(group)
                for part in [together] if copies else [[row] for row in together]:
                    own = [b for _, made_first, _ in part for b in made_first]
                    acts += [steps.making(*self.part.made[b], self.part.make, self.bases) for b in own]
                    acts += self._acts_of([step for step, *_ in part])
                    last = tuple(b for *_, frees in part for b in frees)
                    acts += [steps.freeing(last)] if last and calls else []
            some = any(isinstance(step, CallStep) for step, *_ in rows)
            made += steps.alone(acts) if alone and some else acts
        return tuple(made)

    def freeing_between(self, start: int, end: int) -> list[Act]:
        """Forgets the tensors that no step behind some reads."""
        last = tuple(b for frees in self.part.segment.frees[start:end] for b in frees)
        return [steps.freeing(last)] if last else []

    def _acts_of(self, together: Sequence[Step]) -> list[Act]:
        """What one step does, or copies that follow each other."""
        copies = [(step.target, step.source) for step in together if isinstance(step, Copy)]
        if len(copies) <= 1 or self.part.plan.device == "cpu":
            return [act for step in together for act in self._acts(step)]
        return [
            steps.copying(*group[0]) if len(group) == 1 else steps.copying_all(group)
            for group in steps.independent(copies, self.part.plan.buffers)
        ]

    def _look(self, b: int, tensors: Tensors) -> Tensor:
        """The tensor of any buffer, also one that only kernels see."""
        t, buffer, layouts = tensors[b], self.part.plan.buffers[b], self.part.layouts
        if t is not None:
            return t
        if buffer.home is Home.ARENA:
            return self._view(b, self.part.place[b])
        source = self._look(buffer.source, tensors)
        offset = source.storage_offset() + layouts.offsets[b]
        return source.as_strided(layouts.shapes[b], layouts.strides[b], offset)

    def _acts(self, step: Step) -> list[Act]:
        checks, sizes = self.part.checks, self.part.layouts.sizes
        if checks is None:
            return self._plain_acts(step)
        if isinstance(step, Launches):
            if not checks.each_kernel:
                return self._plain_acts(step)
            acts = [(x, self._launches(Launches((x,)))) for x in step.launches]
            return [a for x, act in acts for a in checks.around_launch(x, act, self._look, sizes)]
        acts = self._plain_acts(step)
        return (
            checks.around_call(step, acts, lambda s: steps.calling(s, sizes))
            if isinstance(step, CallStep)
            else acts
        )

    def _plain_acts(self, step: Step) -> list[Act]:
        match step:
            case Launches():
                return [self._launches(step)]
            case CallStep():
                call = [steps.calling(step, self.part.layouts.sizes)]
                (took,) = self.part.layouts.nanoseconds(step)
                if took is not None and took > self.part.plan.alone_ns:
                    call = [steps.sharing(call[0], took)]
                guards = [steps.guarding(step)] if step.guarded else []
                return [*call, *guards, *self._results(step)]
            case View(buffer=b):
                return self.viewing(b)
            case Copy():
                return [steps.copying(step.target, step.source)]

    def _is_alone(self, step: Step) -> bool:
        """Whether the caller's thread does a step alone."""
        match step:
            case Launches() | CallStep():
                least = self.part.plan.alone_ns
                return all(ns is not None and ns <= least for ns in self.part.layouts.nanoseconds(step))
            case View():
                return True
            case Copy():
                return False

    def viewing(self, b: int) -> list[Act]:
        """The tensor of a view: made now if what it shows lasts."""
        source, layouts = self.part.plan.buffers[b].source, self.part.layouts
        shape, strides, offset = layouts.shapes[b], layouts.strides[b], layouts.offsets[b]
        t = self.lasting.get(source)
        if t is None:
            leaves = b in self.part.plan.outputs
            return [steps.viewing(b, source, shape, strides, offset, leaves=leaves)]
        self.lasting[b] = t.as_strided(shape, strides, t.storage_offset() + offset)
        return []

    def native_call(self, outside: Outside) -> NativeCall | None:
        """A call that does nothing but run kernels once, as a function of its own that keeps this memory."""
        unit, steps = self.part.unit, self.part.segment.steps
        if unit is None or len(steps) != 1 or not isinstance(steps[0], Launches):
            return None
        return unit.native_call(self.located(steps[0]), self.bases, self.part.sizes, outside, self)

    def located(self, step: Launches) -> LaunchList:
        """Launches with the memory of their parameters, those of a list as one."""
        return self.part.located(step)

    def left_alone(self, step: Launches) -> list[bool]:
        """Which launches the caller's thread does alone."""
        least = self.part.plan.alone_ns
        return [ns is not None and ns <= least for ns in self.part.layouts.nanoseconds_together(step)]

    def left_alone_held(self, step: Launches) -> list[bool]:
        """The same where threads watch for work."""
        least = self.part.plan.handover_ns
        return [ns is None or ns <= least for ns in self.part.layouts.nanoseconds_together(step)]

    def takes(self, step: Step) -> int:
        """Nanoseconds that a step takes one core, as far as they are known."""
        return sum(ns or 0 for ns in self.part.layouts.nanoseconds(step))

    def _launches(self, step: Launches) -> Act:
        unit = self.part.unit
        assert unit is not None
        run = unit.prepare(self.located(step), self.bases, self.part.sizes, self.left_alone(step))
        self.runs.append(run)
        return steps.launching(run)

    def _results(self, step: CallStep) -> list[Act]:
        """What follows a call: its results are held against what was promised, and kernels get their addresses."""
        acts: list[Act] = []
        for k, b in enumerate(step.outputs):
            if self.part.plan.buffers[b].home is Home.NUMBER:
                acts.append(counting(step, k))
                continue
            if b in self.part.buffers.seen:
                acts.append(receiving(step, k, self.part.promise(b), by_kernels=b in self.addressed))
            if b in self.addressed:
                acts.append(steps.pointing(b, self.bases, b))
        return acts
