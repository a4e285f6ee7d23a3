"""How the buffers of a plan lie under exact sizes. What no changed size says anything of is taken from the sizes
before: a cache that grows by one place changes a few buffers of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright import allocate
from tilewright.errors import InputError
from tilewright.ir.expr import Expr
from tilewright.ir.sizes.host import Number, size
from tilewright.plan.bind import names_in
from tilewright.plan.data import Buffer, Home, Plan, PlanSegment
from tilewright.tuning.input_limits import KEPT_MEMORY


class Layouts:
    """Numbers of every buffer: shapes, strides, byte sizes, and offsets of views (strides and offsets in elements).
    `before`: those of other sizes of the same plan."""

    def __init__(self, plan: Plan, sizes: Mapping[str, Number], before: Layouts | None = None) -> None:
        self.sizes = dict(sizes)
        count = len(plan.buffers)
        if before is None:
            self.names = tuple(frozenset(names_in(_exprs(b))) for b in plan.buffers)
            """Names of the sizes that say how a buffer lies."""
            self.changed: Sequence[int] = range(count)
            """Buffers that may lie otherwise than before."""
            self.shapes: list[tuple[int, ...]] = [()] * count
            self.strides: list[tuple[int, ...]] = [()] * count
            self.offsets: list[int] = [0] * count
            self.ready: list[bool] = [False] * count
            """Whether every size of a buffer is known yet."""
            self._bytes: list[int | None] = [None] * count
            self._numbers: dict[Expr, int | None] = {}
        else:
            self.names, moved = before.names, _moved(self.sizes, before.sizes)
            self.changed = [k for k, own in enumerate(self.names) if not moved.isdisjoint(own)]
            self.shapes, self.strides = before.shapes[:], before.strides[:]
            self.offsets, self.ready, self._bytes = before.offsets[:], before.ready[:], before._bytes[:]
            self._numbers = {
                e: n for e, n in list(before._numbers.items()) if moved.isdisjoint(names_in((e,)))
            }
        self._lay(plan)

    def _lay(self, plan: Plan) -> None:
        """Fill in what has changed."""
        known = self.sizes.keys()

        def value(e: Expr) -> int:
            found = self.number(e)
            assert found is not None, "its names are known"
            return found

        for k in self.changed:
            b, ready = plan.buffers[k], known >= self.names[k]
            self.ready[k], self._bytes[k] = ready, None
            self.shapes[k] = tuple(map(value, b.spec.shape)) if ready else ()
            if min(self.shapes[k], default=0) < 0:
                raise InputError(
                    f"sizes {self.sizes} leave a tensor of the program with {list(self.shapes[k])} elements",
                    phase="run", hint="give larger inputs",
                )  # fmt: skip
            self.strides[k] = tuple(map(value, b.spec.strides)) if ready else ()
            self.offsets[k] = value(b.offset) if ready else 0

    def number(self, e: Expr) -> int | None:
        """The value of an index expression; None as long as a size in it is not known."""
        try:
            return self._numbers[e]
        except KeyError:
            ready = all(name in self.sizes for name in names_in((e,)))
            found = self._numbers[e] = size(e, self.sizes) if ready else None
            return found

    def bytes_of(self, plan: Plan, b: int) -> int:
        """Bytes from the first to the last element of buffer `b`."""
        found = self._bytes[b]
        if found is None:
            shape = self.shapes[b]
            reach = sum((n - 1) * s for n, s in zip(shape, self.strides[b], strict=True))
            found = self._bytes[b] = 0 if 0 in shape else (reach + 1) * plan.buffers[b].spec.dtype.bytes
        return found


def _exprs(b: Buffer) -> tuple[Expr, ...]:
    return (*b.spec.shape, *b.spec.strides, b.offset)


def _moved(sizes: Mapping[str, Number], before: Mapping[str, Number]) -> set[str]:
    """Names of sizes that are others than before, or are known in one of the two."""
    return {n for n, s in sizes.items() if n not in before or before[n] != s} | (before.keys() - sizes.keys())


@dataclass(frozen=True, slots=True)
class SegmentBuffers:
    """The buffers that a segment makes: all of them, those between its steps, and tensors, some of them `later`, in
    front of the step that stores into them."""

    own: tuple[int, ...]
    arena: tuple[int, ...]
    tensors: tuple[int, ...]
    later: frozenset[int]


def buffers_of(plan: Plan, segment: PlanSegment, number: int) -> SegmentBuffers:
    """Of the segment with that number."""
    own = tuple(k for k, b in enumerate(plan.buffers) if b.segment == number)
    later = frozenset(k for made in segment.makes for k in made)
    arena, tensors = (
        tuple(k for k in own if plan.buffers[k].home is home) for home in (Home.ARENA, Home.OUTPUT)
    )
    return SegmentBuffers(own, arena, tensors, later)


@dataclass(frozen=True, slots=True)
class Arena:
    """Memory between the steps of a segment: the place of each buffer, how much it may take there, and all bytes."""

    places: Mapping[int, int]
    room: tuple[int, ...]
    bytes: int


def arena_of(plan: Plan, layouts: Layouts, buffers: Sequence[int], before: Arena | None) -> Arena:
    """Where buffers lie between steps: as `before` if each fits where it lay. A small arena that is packed again, since
    a cache has outgrown it, has some room for what depends on the sizes that changed, if it stays small: a buffer of
    800 bytes gets 900, so that the next 12 lines of 8 bytes leave all in place."""
    needed = tuple(layouts.bytes_of(plan, k) for k in buffers)
    small = before is not None and before.bytes <= KEPT_MEMORY.max_small_arena_bytes
    if before is not None and (needed == before.room or (small and _fits(needed, before.room))):
        return before
    changed = set(layouts.changed) if small else set[int]()
    room = tuple(
        n + n // KEPT_MEMORY.arena_growth_parts if k in changed else n
        for k, n in zip(buffers, needed, strict=True)
    )
    places, total = _packed(plan, buffers, room)
    if small and total > KEPT_MEMORY.max_small_arena_bytes:
        room, (places, total) = needed, _packed(plan, buffers, needed)
    return Arena(dict(zip(buffers, places, strict=True)), room, total)


def _packed(plan: Plan, buffers: Sequence[int], room: Sequence[int]) -> tuple[tuple[int, ...], int]:
    blocks = [
        allocate.Block(n, plan.buffers[k].start, plan.buffers[k].end)
        for k, n in zip(buffers, room, strict=True)
    ]
    align = KEPT_MEMORY.cpu_alignment_bytes if plan.device == "cpu" else KEPT_MEMORY.gpu_alignment_bytes
    return allocate.pack(blocks, align)


def _fits(needed: Sequence[int], room: Sequence[int]) -> bool:
    return all(n <= most for n, most in zip(needed, room, strict=True))
