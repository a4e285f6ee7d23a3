"""A tile program that loads what it stores, held against the law of writes in place by its loads and stores alone.

Two parameters, one that is loaded and one that is stored, may be the same memory. Each load must then come before the
store to its element, whichever points of the grid run first. That holds if

    the load's offset and the store's are one expression of bound axes,
    which gives each combination of their values another place,
    in which all axes occur that both statements share, so that no other point or step touches the element,
    and in the body that they share the load stands first, or both walk different parts of one axis.

An axis of the grid, or of a loop, that counts tiles occurs through the loop that walks its tile. Where a tile ends is
told by the stops of loops and by masks. What is not seen to hold does not: such a program gets a buffer and a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilewright.errors import VerifyError
from tilewright.ir.expr import Axis, Expr, axes_of, axis, conjuncts, substitute, walk
from tilewright.ir.ops.strided import nested
from tilewright.ir.program import Branch, Load, Loop, Nest, Stmt, Store, TileProgram, is_binding
from tilewright.ir.sizes import dims


def check_order(program: TileProgram, loaded: str, stored: str, shift: Expr = dims.ZERO) -> None:
    """Raise VerifyError unless the buffer `stored` may lie in the memory of `loaded`, from its element `shift` on."""
    touched = list(_accesses(program.body, ()))
    loads = [a for a in touched if isinstance(a.does, Load) and a.does.buffer.name == loaded]
    stores = [a for a in touched if isinstance(a.does, Store) and a.does.buffer.name == stored]
    for load in loads:
        for store in stores:
            why = _Pair(program, load, store, shift).fault()
            if why:
                raise VerifyError(f"{stored} is stored over {loaded}: {why}", phase="plan", op=str(load.does))


def keeps_order(program: TileProgram, loaded: str, stored: str, shift: Expr = dims.ZERO) -> bool:
    """Whether `check_order` holds."""
    try:
        check_order(program, loaded, stored, shift)
    except VerifyError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Within:
    """A statement that another one stands in; of a branch, on the side of `condition` (None: the other one)."""

    statement: Loop | Branch | Nest
    condition: Expr | None = None

    def is_same(self, other: _Within) -> bool:
        """Whether both are one body."""
        return self.statement is other.statement and self.condition is other.condition


@dataclass(frozen=True, slots=True)
class _Access:
    """A load or store, what it stands in, outermost first, and its place among the statements of each body."""

    does: Load | Store
    within: tuple[_Within, ...]
    place: tuple[int, ...]

    @property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(w.statement for w in self.within if isinstance(w.statement, Loop))

    @property
    def conditions(self) -> tuple[Expr, ...]:
        """What is known where it runs."""
        return tuple(c for w in self.within for c in conjuncts(w.condition)) + conjuncts(self.does.mask)


def _accesses(
    body: Sequence[Stmt], within: tuple[_Within, ...], place: tuple[int, ...] = ()
) -> Iterator[_Access]:
    for n, s in enumerate(body):
        here = (*place, n)
        match s:
            case Load() | Store():
                yield _Access(s, within, here)
            case Loop() | Nest():
                yield from _accesses(s.body, (*within, _Within(s)), here)
            case Branch():
                yield from _accesses(s.body, (*within, _Within(s, s.condition)), here)
                yield from _accesses(s.orelse, (*within, _Within(s)), here)
            case _:
                pass


class _Pair:
    """A load and a store of what may be one memory."""

    def __init__(self, program: TileProgram, load: _Access, store: _Access, shift: Expr) -> None:
        self.program, self.load, self.store, self.shift = program, load, store, shift
        pairs = zip(load.within, store.within, strict=False)
        self.common = 0
        for a, b in pairs:
            if not a.is_same(b):
                break
            self.common += 1

    def fault(self) -> str:
        """What the law forbids in them; empty if nothing."""
        offset = self.load.does.offset
        if not dims.equal(offset, dims.add(self.store.does.offset, self.shift)):
            return "another element is loaded than stored"
        if any(x.op in ("var", "read") for x in walk(offset)):
            return "the element depends on data"
        used = axes_of(offset)
        if not self._is_apart(offset, [a for a in self._bound() if axis(a) in used]):
            return "two points may have one element"
        walked = [self._walked(loop) for loop in self._all_loops() if axis(loop.axis) in used]
        if None in walked:
            return "where a tile ends is not seen"
        for a in self._shared():
            if axis(a) not in used and a not in walked:
                return f"each step of {a.name} touches the element"
        if self.load.place < self.store.place or self._are_beside() or self._exclude_each_other():
            return ""
        return "it is stored before it is loaded"

    def _bound(self) -> list[Axis]:
        """All axes in reach of either, each once."""
        axes = [g.axis for g in self.program.grid] + [loop.axis for loop in self._all_loops()]
        return list(dict.fromkeys(axes))

    def _all_loops(self) -> list[Loop]:
        return [*self.load.loops, *(s for s in self.store.loops if not any(s is x for x in self.load.loops))]

    def _shared(self) -> list[Axis]:
        """The axes whose steps both see, other than those of a single step."""
        shared = [w.statement for w in self.load.within[: self.common]]
        loops = [s for s in shared if isinstance(s, Loop) and not is_binding(s)]
        return [g.axis for g in self.program.grid if g.extent is not dims.ONE] + [s.axis for s in loops]

    def _is_apart(self, offset: Expr, axes: Sequence[Axis]) -> bool:
        """Whether each combination of the axes' values has a place of its own."""
        moving = [a for a in axes if a.extent is not dims.ONE]
        steps = [dims.coefficient(offset, axis(a)) for a in moving]
        known = [s for s in steps if s is not None and dims.at_least(s, 1)]
        if len(known) < len(steps):
            return False
        rest = dims.sub(
            offset, dims.add(dims.ZERO, *(dims.mul(axis(a), s) for a, s in zip(moving, known, strict=True)))
        )
        return not (axes_of(rest) & {axis(a) for a in moving}) and _all_move(moving, known)

    def _walked(self, loop: Loop) -> Axis | None:
        """The axis of the grid, or of an outer loop, whose tiles a loop walks: its own where it walks all of the axis.
        None where that is not seen, or it may run past the axis's end."""
        row = self._row(loop)
        if not all(map(self._stays_inside, row)) or not self._is_bounded(loop):
            return None
        only = {axis(g.axis): dims.ZERO for g in self.program.grid if g.extent is dims.ONE}
        start, *cuts, stop = (substitute(e, only) for e in (row[0].start, *(one.stop for one in row)))
        if start is dims.ZERO and dims.at_least(dims.sub(stop, loop.axis.extent), 0):
            return loop.axis if all(dims.at_least(dims.sub(stop, cut), 0) for cut in cuts) else None
        outer = [g.axis for g in self.program.grid] + [s.axis for s in self._all_loops() if s.tile == 1]
        for a in outer:
            size = dims.coefficient(start, axis(a))
            if size is None or not dims.at_least(size, 1) or not dims.equal(start, dims.mul(size, axis(a))):
                continue
            end = dims.add(start, size)
            ends = dims.equal(stop, end) or dims.equal(stop, dims.minimum(loop.axis.extent, end))
            if ends and all(_is_between(cut, stop, size) for cut in cuts):
                return a
        return None

    def _is_bounded(self, loop: Loop) -> bool:
        """Whether what the load and the store do in a loop stays in front of the end of its axis."""
        end = loop.axis.extent
        if dims.at_least(dims.sub(end, loop.stop), 0):
            return True
        inside = [a for a in (self.load, self.store) if any(s is loop for s in a.loops)]
        return all(
            any(_is_below(c, loop, end) or _says_at_most(c, loop.stop, end) for c in a.conditions)
            for a in inside
        )

    def _row(self, loop: Loop) -> list[Loop]:
        """The loops over one axis, of one body, that follow each other with `loop` among them."""
        for body in _bodies(self.program.body):
            if not any(s is loop for s in body):
                continue
            rows: list[list[Loop]] = []
            for s in body:
                if not isinstance(s, Loop) or s.axis != loop.axis:
                    continue
                if rows and dims.equal(rows[-1][-1].stop, s.start):
                    rows[-1].append(s)
                else:
                    rows.append([s])
            return next(row for row in rows if any(s is loop for s in row))
        return [loop]

    def _stays_inside(self, loop: Loop) -> bool:
        """Whether what the load and the store do in a loop stays in front of its stop."""
        if _is_multiple(loop.start, loop.tile) and _is_multiple(loop.stop, loop.tile):
            return True
        inside = [a for a in (self.load, self.store) if any(s is loop for s in a.loops)]
        return all(any(_is_below(c, loop, loop.stop) for c in a.conditions) for a in inside)

    def _are_beside(self) -> bool:
        """Whether the two walk different parts of one axis, which follow each other."""
        both = self._parting()
        if both is None:
            return False
        mine, other = (w.statement for w in both)
        if not isinstance(mine, Loop) or not isinstance(other, Loop) or mine.axis != other.axis:
            return False
        row = self._row(mine)
        followed = all(dims.equal(a.stop, b.start) for a, b in pairwise(row))
        return followed and any(s is other for s in row) and axis(mine.axis) in axes_of(self.load.does.offset)

    def _parting(self) -> tuple[_Within, _Within] | None:
        """The outermost of what either stands in alone, if both do."""
        if len(self.load.within) <= self.common or len(self.store.within) <= self.common:
            return None
        return self.load.within[self.common], self.store.within[self.common]

    def _exclude_each_other(self) -> bool:
        """Whether only one of the two runs: they stand on different sides of a branch."""
        both = self._parting()
        return both is not None and both[0].statement is both[1].statement


def _bodies(body: Sequence[Stmt]) -> Iterator[Sequence[Stmt]]:
    yield body
    for s in body:
        if isinstance(s, (Loop, Nest)):
            yield from _bodies(s.body)
        elif isinstance(s, Branch):
            yield from _bodies(s.body)
            yield from _bodies(s.orelse)


def _is_multiple(e: Expr, n: int) -> bool:
    if e.op in ("minimum", "maximum"):
        return all(_is_multiple(a, n) for a in e.args)
    return dims.mod(e, dims.integer(n)) is dims.ZERO


def _is_below(c: Expr, loop: Loop, end: Expr) -> bool:
    """Whether a condition says that the axis of a loop is in front of an end."""
    return c.op == "lt" and c.args[0] is axis(loop.axis) and dims.equal(c.args[1], end)


def _says_at_most(c: Expr, stop: Expr, end: Expr) -> bool:
    """Whether a condition says that a stop is no further than an end."""
    return c.op == "le" and dims.equal(c.args[0], stop) and dims.equal(c.args[1], end)


def _all_move(axes: Sequence[Axis], steps: Sequence[Expr]) -> bool:
    order = nested([a.extent for a in axes], list(steps))
    return order is not None and len(order) == len(axes)


def _is_between(cut: Expr, stop: Expr, size: Expr) -> bool:
    """Whether a cut lies in the tile that stops so: at the last multiple of a number that divides the tile's size."""
    if dims.equal(cut, stop):
        return True
    whole, n = dims.static(size), _rounding(cut)
    if n is None or whole is None or whole % n:
        return False
    return dims.equal(cut, dims.mul(dims.floordiv(stop, dims.integer(n)), dims.integer(n)))


def _rounding(cut: Expr) -> int | None:
    """n, of (something // n) * n."""
    quotients = [x for x in walk(cut) if x.op == "floordiv"]
    found = dims.static(quotients[0].args[1]) if quotients else None
    return found
