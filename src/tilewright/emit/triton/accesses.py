"""Loads and stores of a tile program as Triton text, and the block axes that their addresses are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.ir.dtype import DType, bool_, f32, i32, i64
from tilewright.ir.expr import Axis, Expr, axis, substitute
from tilewright.ir.program import Descriptor, Load, Loop, Store, StoredBlock, TileProgram, Var
from tilewright.ir.selection import ElementRun, InterleavedStore, SharedElement
from tilewright.ir.sizes import dims

from .addresses import BoundAxes
from .expr import Expressions
from .repeat import repeated
from .scope import ATOM, PRODUCT, SUM, Term


class Accesses:
    """Prints what one program reads and writes. `pointers` are the names of its buffers, which are `aligned` or may not
    be. `descriptors` are the names of those that loads may use, by buffer."""

    def __init__(
        self,
        program: TileProgram,
        printer: Expressions,
        pointers: dict[str, str],
        aligned: bool,
        descriptors: Mapping[tuple[str, Descriptor], str] = MappingProxyType({}),
    ) -> None:
        self.program, self.printer, self.pointers = program, printer, pointers
        self.descriptors = descriptors
        self.firsts: dict[Axis, Term] = {}
        """The first value of each block axis."""
        self.lines = printer.lines
        self.raw: set[int] = set()
        """Halves that are held as what they are."""
        self.places = BoundAxes(printer)
        self.split = self.wide or not aligned or program.odd_steps
        """Whether addresses are printed as those of a block and what lies behind them."""
        self.loads = True
        """Whether threads may load since they last waited for each other."""
        self._bound: Counter[Axis] = Counter()
        self._number: dict[Axis, int] = {}

    def define(self, var: Var, term: Term) -> None:
        """`var` is `term` from here on."""
        name = f"v{var.id}"
        self.lines.put(f"{name} = {term.text}")
        self.printer.values[var.id] = Term(name, ATOM, term.dims)

    @property
    def wide(self) -> bool:
        """Whether indices have 64 bits."""
        return self.printer.index_type is i64

    def fresh(self, axis: Axis) -> str:
        """The number of an axis, another one each time that it is bound."""
        number = self._number.setdefault(axis, len(self._number))
        self._bound[axis] += 1
        again = self._bound[axis]
        return f"{number}" + (f"_{again}" if again > 1 else "")

    def bind(self, s: Loop, start: Term, number: str) -> None:
        """Print the values of the axis of `s` in a step that begins at `start`."""
        self.firsts[s.axis] = start
        lanes = Term(f"tl.arange(0, {s.tile})", ATOM, (s.axis,))
        if s.tile == 1:
            term = self.printer.spread(start, (), self.printer.index_type)
        elif self.split:
            term = self.places.bind(s.axis, s.tile, start, number)
        elif start.number and start.text == "0":
            term = lanes
        else:
            term = self.printer.infix("+", SUM, [start, lanes])
        if term.text.isidentifier():  # lanes that are the values
            self.printer.axes[s.axis] = term
            return
        self.lines.put(f"a{number} = {term.text}")
        self.printer.axes[s.axis] = Term(f"a{number}", ATOM, term.dims)

    def address(self, s: Load | Store, offset: Term, wanted: tuple[Axis, ...]) -> str:
        """The pointers of an access at `offset` whose lanes are those of `wanted`."""
        pointer = self.pointers[s.buffer.name]
        if self.split and (found := self.places.address(pointer, s.offset, wanted)) is not None:
            return found
        if s.behind:
            rest = self.printer.offset(dims.sub(s.offset, dims.integer(s.behind)))
            shared = self.printer.spread(rest, wanted, self.printer.index_type)
            sign = "-" if s.behind < 0 else "+"
            return f"{pointer} + {shared.at(SUM)} {sign} {abs(s.behind)}"
        offset = offset if offset.text else self.printer.offset(s.offset)
        if offset.dims != wanted:
            offset = self.printer.spread(offset, wanted, self.printer.index_type)
        if offset.number and offset.text == "0":
            return pointer
        offset = self.told(s, offset, wanted)
        return f"{pointer} + {offset.at(SUM + 1 if offset.text.startswith('-') else SUM)}"

    @staticmethod
    def told(s: Load | Store, offset: Term, wanted: tuple[Axis, ...]) -> Term:
        """The offset of an access, with what is told of its runs."""
        if not s.runs:
            return offset
        along = {r.axis: r for r in s.runs}
        lengths, multiples = [along[a].length for a in wanted], [along[a].multiple for a in wanted]
        return Term(f"tl.max_contiguous(tl.multiple_of({offset.text}, {multiples}), {lengths})", ATOM, wanted)

    def offset(self, s: Load | Store) -> Term:
        """The offset of an access; no more than its axes where it is printed in parts."""
        axes = self.places.axes(s.offset) if self.split else ()
        return Term("", ATOM, axes) if axes else self.printer.offset(s.offset)

    def mask(self, mask: Expr | None) -> Term | None:
        """The lanes of an access."""
        return None if mask is None else self.printer.term(mask)

    def load(self, s: Load) -> None:
        """Masked lanes touch no memory; a half becomes a single unless it is held as stored."""
        name = s.descriptor and self.descriptors.get((s.buffer.name, s.descriptor))
        if s.descriptor is not None and name:
            self.define(s.var, self._held(s, self.block(name, s.at, s.descriptor.tile)))
            return
        found = self.shared_load(s) if s.alike else self.loaded(s)
        self.define(s.var, self._held(s, found))

    def loaded(self, s: Load) -> Term:
        """The elements of an access as memory has them."""
        printer = self.printer
        mask, offset = self.mask(s.mask), self.offset(s)
        other = None
        if s.other is not None and mask is not None:
            other = self._memory_value(s.other, s.buffer.dtype)
        wanted = printer.union([t for t in (offset, mask, other) if t is not None])
        wanted = printer.ordered((*wanted, *s.copied)) if s.copied else wanted
        text = self.address(s, offset, wanted)
        if mask is not None:
            text += f", mask={printer.fit(mask, wanted).text}"
        if other is not None:
            text += f", other={printer.fit(other, wanted).text}"
        return Term(f"tl.load({text})", ATOM, wanted)

    def shared_load(self, s: Load) -> Term:
        """The same, loaded once for neighbours that are one element. What a whole block has in common has no dimension
        for it."""
        places: dict[Expr, Expr] = {}
        spread: list[tuple[Axis, Axis, int]] = []
        for shared in s.alike:
            own, count = self.words(shared), shared.count
            places[axis(shared.axis)] = dims.mul(axis(own), dims.integer(count))
            if count < self.printer.tiles[shared.axis]:
                spread.append((own, shared.axis, count))
        few = replace(s, offset=substitute(s.offset, places), alike=(), runs=())
        found = self.loaded(few)
        for own, whole, count in spread:
            name = f"u{s.var.id}_{own.name}"
            self.lines.put(f"{name} = {found.text}")
            found = repeated(Term(name, ATOM, found.dims), own, whole, count, self.printer)
        return found

    def words(self, shared: SharedElement) -> Axis:
        """An axis, bound here, of the elements that neighbours along a block axis are."""
        printer, a = self.printer, shared.axis
        size, first = dims.integer(shared.count), self.firsts[a]
        number = f"{self._number[a]}w{shared.count}"
        own = Axis(f"w{number}", dims.ceildiv(a.extent, size))
        tile = printer.tiles[a] // shared.count
        zero = first.number and first.text == "0"
        start = first if zero else Term(f"{first.at(PRODUCT)} // {shared.count}", PRODUCT)
        if tile > 1:
            printer.divide(a, own, tile)
        self.bind(Loop(own, dims.ZERO, dims.ZERO, tile, ()), start, number)
        return own

    def block(self, name: str, at: Sequence[Expr], tile: Sequence[int]) -> Term:
        """The block of a descriptor at some indices, with the dimensions that it has here."""
        places = [self.first(p, n) for p, n in zip(at, tile, strict=True)]
        own = [p.value for p, n in zip(at, tile, strict=True) if n > 1 and isinstance(p.value, Axis)]
        text = f"{name}.load([{', '.join(places)}])"
        if len(own) < len(places):
            text = f"tl.reshape({text}, {self.printer.shape(own)})"
        wanted = self.printer.ordered(own)
        if list(wanted) != own:
            order = ", ".join(str(own.index(a)) for a in wanted)
            text = f"tl.trans({text})" if len(own) == 2 else f"tl.permute({text}, ({order}))"
        return Term(text, ATOM, wanted)

    def _held(self, s: Load, found: Term) -> Term:
        have, want = s.buffer.dtype, s.var.dtype
        if have is bool_:
            found = self.printer.converted(found, i32, bool_)
        if s.as_stored:
            self.raw.add(s.var.id)
            return found
        if have.is_half:
            found = self.printer.cast_text(found, f32)
        return found if have.compute is want.compute else self.printer.converted(found, have, want)

    def _memory_value(self, e: Expr, dtype: DType) -> Term:
        """`e` in the type of memory, for the lanes that are not loaded."""
        if e.op == "const" and dtype is bool_:
            return Term(str(int(bool(e.value))), number=True)
        found = self.printer.data(e)
        if found.number:
            return found
        return self.stored(found, e.dtype, dtype)

    def stored(self, term: Term, have: DType, dtype: DType) -> Term:
        """A value of type `have` in the type that it has in memory."""
        printer = self.printer
        if dtype is bool_:
            term = term if have is bool_ else printer.converted(term, have, bool_)
            return Term(f"{term.at(ATOM)}.to(tl.uint8)", ATOM, term.dims)
        if dtype.is_half:
            single = term if have.compute is f32 else printer.cast_text(term, f32)
            return printer.cast_text(single, dtype)
        return term if have.compute is dtype else printer.converted(term, have, dtype)

    def store(self, s: Store) -> None:
        """One store; lanes that write the same place write the same value."""
        printer = self.printer
        value_of = s.unrounded
        value = self.stored(printer.value(value_of), value_of.dtype, s.buffer.dtype)
        name = s.block and self.descriptors.get((s.buffer.name, s.block.descriptor))
        if s.block is not None and name:
            self.store_block(name, s.block, value, s.buffer.dtype)
            return
        if s.interleaved is not None:
            s, value = self.along_memory(s, s.interleaved, value)
        mask, offset = self.mask(s.mask), self.offset(s)
        wanted = printer.union([t for t in (offset, mask, value) if t is not None])
        text = f"{self.address(s, offset, wanted)}, {printer.fit(value, wanted).text}"
        if mask is not None:
            text += f", mask={printer.fit(mask, wanted).text}"
        if s.stream is not None:
            text += ', cache_modifier=".cs"'
        if self.loads and any(s.buffer == self.program.params[k] for k in self.program.over):
            self.lines.put("tl.debug_barrier()")  # other threads may hold copies of what is stored over
            self.loads = False
        self.lines.put(f"tl.store({text})")

    def store_block(self, name: str, block: StoredBlock, value: Term, dtype: DType) -> None:
        """A store by descriptor, of the pieces of a block one after the other. It has an element for each place, also
        where `value` is the same along an axis."""
        printer, tile = self.printer, block.descriptor.tile
        own = [p.value for p, n in zip(block.at, tile, strict=True) if n > 1 and isinstance(p.value, Axis)]
        text = printer.spread(value, printer.ordered(own), dtype).text
        if list(printer.ordered(own)) != own:
            text = f"tl.trans({text})"
        parts = [text]
        if block.pieces > 1:
            rows, width = (printer.tiles[a] for a in own)
            shape = f"[{rows}, {block.pieces}, {width // block.pieces}]"
            names = [f"{name}_{k}" for k in range(block.pieces)]
            split = f"tl.split(tl.permute(tl.reshape({text}, {shape}), (0, 2, 1)))"
            self.lines.put(f"{', '.join(names)} = {split}")
            parts = names
        for k, part in enumerate(parts):
            if len(tile) > len(own):
                part = f"tl.reshape({part}, {list(tile)})"
            places = [self.first(p, n) for p, n in zip(block.at, tile, strict=True)]
            places[-1] = f"{places[-1]} + {k * tile[-1]}" if k else places[-1]
            self.lines.put(f"{name}.store([{', '.join(places)}], {part})")

    def first(self, place: Expr, length: int) -> str:
        """Where a block begins in a dim: a block axis, or one place."""
        if length > 1 and isinstance(place.value, Axis):
            return self.firsts[place.value].text
        return self.printer.term(place).text

    def along_memory(self, s: Store, how: InterleavedStore, value: Term) -> tuple[Store, Term]:
        """A store of `value` over two other axes: groups of columns, and within a group all that lies side by side. No
        element changes its place in memory; threads are dealt out along it."""
        printer, rows, columns, count = self.printer, how.rows, how.columns, how.count
        value = printer.spread(value, printer.ordered((rows, columns)), s.buffer.dtype)
        groups, along = self.words(SharedElement(columns, count)), self.bind_runs(rows, count)
        tile, number = printer.tiles[rows], dims.integer(count)
        parts = [str(printer.tiles[groups]), str(count)]
        first = value.dims[0] == rows
        shape, order = ([str(tile), *parts], "1, 0, 2") if first else ([*parts, str(tile)], "0, 2, 1")
        apart = f"tl.permute(tl.reshape({value.text}, [{', '.join(shape)}]), ({order}))"
        laid = Term(f"tl.reshape({apart}, {printer.shape((groups, along))})", ATOM, (groups, along))
        places = {
            axis(rows): dims.floordiv(axis(along), number),
            axis(columns): dims.add(dims.mul(axis(groups), number), dims.mod(axis(along), number)),
        }
        runs = (ElementRun(groups, 1, 1), ElementRun(along, how.length, how.multiple))
        mask = None if s.mask is None else substitute(s.mask, places)
        moved = replace(s, offset=substitute(s.offset, places), mask=mask, runs=runs, interleaved=None)
        return moved, laid

    def bind_runs(self, rows: Axis, count: int) -> Axis:
        """An axis, bound here, of `count` elements for each of some rows, one row after the other."""
        printer, first = self.printer, self.firsts[rows]
        own = Axis(f"t{self._number[rows]}_{count}", dims.mul(rows.extent, dims.integer(count)))
        tile = printer.tiles[rows] * count
        printer.append(own, tile)
        zero = first.number and first.text == "0"
        start = first if zero else Term(f"{first.at(PRODUCT)} * {count}", PRODUCT)
        self.bind(Loop(own, dims.ZERO, dims.ZERO, tile, ()), start, f"{own.name}")
        return own
