"""How the buffers of a plan lie under exact sizes. What no changed size says anything of is taken from the sizes
before: a cache that grows by one place changes a few buffers of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import le, mul

import torch

from tilewright import allocate
from tilewright.errors import InputError
from tilewright.ir.expr import Expr, integer
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.host import Number, size
from tilewright.ir.sizes.tape import SizeTape, TapePass
from tilewright.plan.bind import names_in
from tilewright.plan.data import Buffer, CallStep, Copy, Home, Launches, Plan, PlanSegment, Step, View
from tilewright.plan.lazy_allocation import root_of
from tilewright.tuning.input_limits import KEPT_MEMORY

from .tensors import torch_dtype


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """What must be done again where some sizes are others: the pass over all numbers, which gives shape and strides
    of each buffer that is `known`, and then bytes of those that are `sized`."""

    numbers: TapePass
    buffers: tuple[int, ...]
    """Those that may lie otherwise than before."""
    known: tuple[int, ...]
    sized: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    """Those of them that may lie at another offset, and where it stands on the tape."""
    unknown: tuple[int, ...]


class LayoutRules:
    """How the buffers of a plan lie, and how long its steps take, as functions of its sizes. What must be done again is
    found once for each set of sizes that change."""

    def __init__(self, plan: Plan) -> None:
        self._specs = [(b.spec.shape, b.spec.strides, b.offset) for b in plan.buffers]
        steps = [step for segment in plan.segments for step in segment.steps]
        times = [e for step in steps for e in _times(step) if e is not None]
        self._bytes = {
            k: e for k, b in enumerate(plan.buffers) if (e := _bytes_where_none_is_empty(b)) is not None
        }
        exprs = [e for b in plan.buffers for e in _exprs(b)]
        self.tape = SizeTape([*exprs, *self._bytes.values(), *times])
        places = self.tape.places
        self.times = {
            id(step): (step, [None if e is None else places[e] for e in _times(step)]) for step in steps
        }
        """Where the times of a step stand on the tape, by the identity of the step, which is kept."""
        launched = [step for step in steps if isinstance(step, Launches)]
        self.plain = {id(step) for step in launched if all(x.list < 0 for x in step.launches)}
        """Those of them that hold no list."""
        self.names = tuple(frozenset(names_in(_exprs(b))) for b in plan.buffers)
        """Names of the sizes that say how a buffer lies."""
        self._changes: dict[tuple[frozenset[str] | None, frozenset[str]], LayoutChange] = {}

    def change(self, moved: frozenset[str] | None, known: frozenset[str]) -> LayoutChange:
        """What to do where `known` are the names of known sizes, of which `moved` (None: all) are others."""
        found = self._changes.get((moved, known))
        if found is None:
            if len(self._changes) >= KEPT_MEMORY.max_size_changes:
                self._changes.clear()
            found = self._changes[moved, known] = self._made(moved, known)
        return found

    def _made(self, moved: frozenset[str] | None, known: frozenset[str]) -> LayoutChange:
        buffers = tuple(
            k for k, names in enumerate(self.names) if moved is None or not moved.isdisjoint(names)
        )
        there = tuple(k for k in buffers if self.names[k] <= known)
        known_now = set(there)
        offsets = tuple(
            (k, self.tape.places[self._specs[k][2]])
            for k in there
            if moved is None or not moved.isdisjoint(names_in(self._specs[k][2:]))
        )
        sized = tuple(k for k in there if k in self._bytes)
        wanted = [exprs for k in there for exprs in self._specs[k][:2]]
        return LayoutChange(
            self.tape.pass_of(moved, known, [*wanted, [self._bytes[k] for k in sized]]), buffers, there, sized,
            offsets, tuple(k for k in buffers if k not in known_now),
        )  # fmt: skip


class Layouts:
    """Numbers of every buffer: shapes, strides, byte sizes, and offsets of views (strides and offsets in elements).
    `before`: those of other sizes of the same plan."""

    def __init__(self, plan: Plan, sizes: Mapping[str, Number], before: Layouts | None = None) -> None:
        self.sizes = dict(sizes)
        known = frozenset(self.sizes)
        if before is None:
            count = len(plan.buffers)
            self.rules = LayoutRules(plan)
            change = self.rules.change(None, known)
            self.shapes: list[tuple[int, ...]] = [()] * count
            self.strides: list[tuple[int, ...]] = [()] * count
            self.offsets: list[int] = [0] * count
            self.ready: list[bool] = [False] * count
            """Whether every size of a buffer is known yet."""
            self._bytes: list[int | None] = [None] * count
            self._values = self.rules.tape.start[:]
        else:
            self.rules = before.rules
            change = self.rules.change(_moved(self.sizes, before.sizes), known)
            self.shapes, self.strides = before.shapes[:], before.strides[:]
            self.offsets, self.ready, self._bytes = before.offsets[:], before.ready[:], before._bytes[:]
            self._values = before._values[:]
        self.changed = change.buffers
        """Buffers that may lie otherwise than before."""
        self._lay(change, change.numbers.run(self._values, self.sizes))

    def _lay(self, change: LayoutChange, found: Sequence[tuple[int, ...]]) -> None:
        """Fill in what has changed."""
        for k, shape, strides in zip(change.known, found[:-1:2], found[1:-1:2], strict=True):
            self.shapes[k], self.strides[k], self.ready[k], self._bytes[k] = shape, strides, True, None
            if shape and min(shape) < 0:
                raise InputError(
                    f"sizes {self.sizes} leave a tensor of the program with {list(shape)} elements", phase="run",
                    hint="give larger inputs",
                )  # fmt: skip
        for k, needed in zip(change.sized, found[-1], strict=True):
            self._bytes[k] = 0 if 0 in self.shapes[k] else needed
        self.largest = max(found[-1], default=0)
        """No buffer that a segment makes and that has changed has more bytes."""
        for k, at in change.offsets:
            self.offsets[k] = self._values[at]
        for k in change.unknown:
            self.shapes[k], self.strides[k], self.offsets[k] = (), (), 0
            self.ready[k], self._bytes[k] = False, None

    def nanoseconds(self, step: Step) -> Sequence[int | None]:
        """How long each launch of a step takes one core, or a call; None where nobody knows."""
        known, values = self.rules.times.get(id(step)), self._values
        if known is not None:
            return [None if at is None else values[at] for at in known[1]]
        there = self.sizes.keys()
        return [
            None if e is None or not there >= set(names_in((e,))) else size(e, self.sizes)
            for e in _times(step)
        ]

    def nanoseconds_together(self, step: Launches) -> Sequence[int | None]:
        """The same of launches of a list together."""
        found = self.nanoseconds(step)
        if id(step) in self.rules.plain:
            return found
        parts = iter(found)
        each = [[next(parts) for _ in rows] for rows in step.together()]
        return [None if None in rows else sum(ns or 0 for ns in rows) for rows in each]

    def bytes_of(self, plan: Plan, b: int) -> int:
        """Bytes from the first to the last element of buffer `b`."""
        found = self._bytes[b]
        if found is None:
            shape, strides = self.shapes[b], self.strides[b]
            reach = sum(map(mul, shape, strides)) - sum(strides)
            found = self._bytes[b] = 0 if 0 in shape else (reach + 1) * plan.buffers[b].spec.dtype.bytes
        return found


def _times(step: Step) -> list[Expr | None]:
    match step:
        case Launches():
            return [x.core_ns for x in step.launches]
        case CallStep():
            return [step.core_ns]
        case _:
            return []


def _bytes_where_none_is_empty(b: Buffer) -> Expr | None:
    """Bytes from the first to the last element of a buffer that a segment makes, if it has elements; None for others
    and for what has no strides."""
    shape, strides = b.spec.shape, b.spec.strides
    if b.home not in (Home.ARENA, Home.OUTPUT, Home.LIBRARY) or len(shape) != len(strides):
        return None
    reach = dims.ONE
    for n, s in zip(shape, strides, strict=True):
        reach = dims.add(reach, dims.mul(dims.sub(n, dims.ONE), s))
    return dims.mul(reach, integer(b.spec.dtype.bytes))


def _exprs(b: Buffer) -> tuple[Expr, ...]:
    return (*b.spec.shape, *b.spec.strides, b.offset)


def _moved(sizes: Mapping[str, Number], before: Mapping[str, Number]) -> frozenset[str]:
    """Names of sizes that are others than before, or are known in one of the two."""
    moved = {n for n, s in sizes.items() if n not in before or before[n] != s}
    return frozenset(moved | (before.keys() - sizes.keys()))


Made = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""How a tensor of its own is made: its buffer, shape, strides and type."""


@dataclass(frozen=True, slots=True)
class SegmentBuffers:
    """What does not depend on sizes: buffers between the steps of a segment; tensors that it makes, with their types,
    some of them `later`, in front of the step that stores into them; buffers whose memory is asked for at once;
    constants with their numbers; those that steps take as tensors; and those that anybody sees (none without calls)."""

    arena: tuple[int, ...]
    tensors: Mapping[int, torch.dtype]
    later: frozenset[int]
    large: frozenset[int]
    constants: tuple[tuple[int, int], ...]
    used: frozenset[int]
    seen: frozenset[int]


def buffers_of(plan: Plan, segment: PlanSegment, number: int) -> SegmentBuffers:
    """Of the segment with that number."""
    own = {k: b for k, b in enumerate(plan.buffers) if b.segment == number}
    calls = any(isinstance(s, CallStep) for s in segment.steps)
    return SegmentBuffers(
        tuple(k for k, b in own.items() if b.home is Home.ARENA),
        {k: torch_dtype(b.spec.dtype) for k, b in own.items() if b.home is Home.OUTPUT},
        frozenset(k for made in segment.makes for k in made),
        frozenset(k for k, b in own.items() if b.home in (Home.OUTPUT, Home.LIBRARY) and b.source < 0),
        tuple((k, b.index) for k, b in enumerate(plan.buffers) if b.home is Home.CONSTANT),
        frozenset(x.source for x in plan.buffers) | frozenset(_tensors_used(segment)),
        frozenset(_tensors_seen(plan)) if calls else frozenset(),
    )


@dataclass(frozen=True, slots=True)
class Arena:
    """Memory between the steps of a segment: the place of each buffer, how much it may take there, and all bytes."""

    places: Mapping[int, int]
    room: Mapping[int, int]
    bytes: int


def arena_of(plan: Plan, layouts: Layouts, buffers: Sequence[int], before: Arena | None) -> Arena:
    """Where buffers lie between steps: as `before` if each fits where it lay. A small arena that is packed again, since
    a cache has outgrown it, has some room for what depends on the sizes that changed, if it stays small: a buffer of
    800 bytes gets 900, so that the next 12 lines of 8 bytes leave all in place."""
    if before is not None:
        small, room = before.bytes <= KEPT_MEMORY.max_small_arena_bytes, before.room
        changed = [k for k in layouts.changed if k in room]
        needs, rooms = [layouts.bytes_of(plan, k) for k in changed], [room[k] for k in changed]
        if needs == rooms or (small and all(map(le, needs, rooms))):
            return before
    else:
        small, changed = False, []
    needed = {k: layouts.bytes_of(plan, k) for k in buffers}
    if small:
        room = dict(needed)
        for k in changed:
            room[k] += room[k] // KEPT_MEMORY.arena_growth_parts
        places, total = _packed(plan, room)
        if total <= KEPT_MEMORY.max_small_arena_bytes:
            return Arena(places, room, total)
    places, total = _packed(plan, needed)
    return Arena(places, needed, total)


def _packed(plan: Plan, room: Mapping[int, int]) -> tuple[Mapping[int, int], int]:
    blocks = [allocate.Block(n, plan.buffers[k].start, plan.buffers[k].end) for k, n in room.items()]
    align = KEPT_MEMORY.cpu_alignment_bytes if plan.device == "cpu" else KEPT_MEMORY.gpu_alignment_bytes
    places, total = allocate.pack(blocks, align)
    return dict(zip(room, places, strict=True)), total


def intermediate_bytes(plan: Plan, sizes: Mapping[str, Number]) -> int | None:
    """The most bytes that one call has between its kernels and calls at a time (calls may take memory of their own
    besides); None where sizes come from data."""
    if any(segment.measures for segment in plan.segments) or not sizes.keys() >= set(plan.symbols):
        return None
    align = KEPT_MEMORY.cpu_alignment_bytes if plan.device == "cpu" else KEPT_MEMORY.gpu_alignment_bytes
    return sum(allocate.pack(blocks, align)[1] for blocks in _held(plan, sizes, results=False))


def live_bytes(plan: Plan, sizes: Mapping[str, Number], steps: int) -> tuple[int, ...] | None:
    """Bytes of what a call has made and still holds while each of the `steps` of a cover runs, results among them; None
    where sizes come from data."""
    if any(segment.measures for segment in plan.segments) or not sizes.keys() >= set(plan.symbols):
        return None
    change = [0] * (steps + 1)
    for block in (block for blocks in _held(plan, sizes, results=True) for block in blocks):
        change[min(block.start, steps)] += block.size
        change[min(block.end, steps)] -= block.size
    return tuple(accumulate(change))[:steps]


def _held(plan: Plan, sizes: Mapping[str, Number], *, results: bool) -> list[list[allocate.Block]]:
    """What lies between the kernels and calls of each segment, with what is returned or without it."""
    layouts = Layouts(plan, sizes)
    returned = {b for b in plan.outputs if isinstance(b, int)}
    found: list[list[allocate.Block]] = [[] for _ in plan.segments]
    for k, b in enumerate(plan.buffers):
        own = b.home in (Home.LIBRARY, Home.OUTPUT) and (results or k not in returned)
        if b.source < 0 and (b.home is Home.ARENA or own):
            found[b.segment].append(allocate.Block(layouts.bytes_of(plan, k), b.start, b.end))
    return found


def copied_bytes(plan: Plan, sizes: Mapping[str, Number]) -> int | None:
    """Bytes that one call copies into its inputs behind what makes them; None where sizes come from data."""
    if any(segment.measures for segment in plan.segments) or not sizes.keys() >= set(plan.symbols):
        return None
    layouts = Layouts(plan, sizes)
    into = [s.target for segment in plan.segments for s in segment.steps if isinstance(s, Copy)]
    inside = [b for b in into if plan.buffers[root_of(plan.buffers, b)].home is Home.INPUT]
    return sum(prod(layouts.shapes[b]) * plan.buffers[b].spec.dtype.bytes for b in inside)


def _tensors_seen(plan: Plan) -> set[int]:
    """Buffers that some step or the caller reads or shows, and what these are views of."""
    found = {o for o in plan.outputs if isinstance(o, int)}
    for segment in plan.segments:
        found |= {m.buffer for m in segment.measures} | set(_tensors_used(segment))
        for step in segment.steps:
            match step:
                case Launches():
                    found |= {p for launch in step.launches for p in launch.params}
                case View():
                    found.add(step.buffer)
                case CallStep() | Copy():
                    pass
    todo = list(found)
    while todo:
        source = plan.buffers[todo.pop()].source
        if source >= 0 and source not in found:
            found.add(source)
            todo.append(source)
    return found


def _tensors_used(segment: PlanSegment) -> list[int]:
    found: list[int] = []
    for step in segment.steps:
        match step:
            case CallStep():
                found += step.inputs
            case Copy():
                found += (step.source, step.target)
            case View() | Launches():
                pass
    return found
