"""Statements of a tile program as Triton text. Blocks are tensors with one dimension per block axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.errors import UnsupportedError, VerifyError
from tilewright.ir.dtype import DType, bool_, f32, i32, i64
from tilewright.ir.expr import Axis, Expr, axis, substitute
from tilewright.ir.program import (
    Await,
    Branch,
    Check,
    Collapse,
    Compute,
    Declare,
    Descriptor,
    Dot,
    Load,
    Loop,
    Nest,
    Prefix,
    Release,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    expressions,
    is_binding,
)
from tilewright.ir.selection import MatrixMultiply, SharedElement
from tilewright.ir.sizes import dims

from .addresses import BoundAxes
from .expr import Expressions
from .reduce import print_merge
from .repeat import repeated
from .scope import AND, ATOM, PRODUCT, SUM, UNARY, Scope, Term, named_type

MAX_BLOCK_ELEMENTS = 1 << 20
"""Elements that a block may have."""


def printed(program: TileProgram) -> list[Expr]:
    """The expressions that the text of a program has, as often as it has them."""
    found = [g.extent for g in program.grid[1:]]
    for s in program.statements():
        found += [s.start] if isinstance(s, Loop) and is_binding(s) else expressions(s)
    return found


class Body:
    """Prints the statements of one program. `pointers` are the names of its buffers, which are `aligned` or may not be.
    `descriptors` are the names of those that loads may use, by buffer."""

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

    # --- bodies --------------------------------------------------------------

    def body(self, statements: Sequence[Stmt]) -> None:
        """Print statements in order."""
        for s in statements:
            self.loads |= not isinstance(s, (Compute, Store))
            match s:
                case Load():
                    self.load(s)
                case Compute():
                    self.compute(s)
                case Store():
                    self.store(s)
                case Declare():
                    self.declare(s)
                case Update():
                    self.update(s)
                case Collapse() | Prefix():
                    self.collapse(s)
                case Dot():
                    self.dot(s)
                case Check():
                    self.check(s)
                case Loop():
                    self.loop(s)
                case Branch():
                    self.branch(s)
                case Nest():
                    self.body(s.body)
                case Await():
                    self.lines.put("tl.extra.cuda.gdc_wait()")
                case Release():
                    self.lines.put("tl.extra.cuda.gdc_launch_dependents()")

    def compute(self, s: Compute) -> None:
        """Another name for a value that stays as it is needs no text."""
        of = s.expr.value
        if s.expr.op == "var" and isinstance(of, int) and of not in self.printer.states:
            self.printer.values[s.var.id] = self.printer.values[of]
        else:
            self.define(s.var, self.printer.held(s.var, s.expr))

    def define(self, var: Var, term: Term) -> None:
        """`var` is `term` from here on."""
        name = f"v{var.id}"
        self.lines.put(f"{name} = {term.text}")
        self.printer.values[var.id] = Term(name, ATOM, term.dims)

    def nested(self, statements: Sequence[Stmt]) -> None:
        """Print statements with a scope of their own."""
        outer = self.printer.scope
        self.printer.scope = Scope(outer)
        self.body(statements)
        self.printer.scope = outer
        outer.forget(_updated(statements))

    def loop(self, s: Loop) -> None:
        """A loop of one step only binds its axis, unless it is to stay one."""
        start = self.printer.offset(s.start)
        number = self._fresh(s.axis)
        if is_binding(s) and not s.looped:
            self.bind(s, start, number)
            self.nested(s.body)
            return
        bounds = [start.text, self.printer.offset(s.stop).text] + ([str(s.tile)] if s.tile > 1 else [])
        head = f"range({', '.join(bounds)})"
        if s.stages > 1:
            head = f"tl.range({', '.join(bounds)}, num_stages={s.stages})"
        plain = s.tile == 1 and not self.wide
        base = Term(f"{'a' if plain else 'b'}{number}")
        with self.lines.block(f"for {base.text} in {head}"):
            if plain:
                self.printer.axes[s.axis] = base
            else:
                start = Term(f"tl.cast({base.text}, tl.int64)") if self.wide else base
                self.bind(s, start, number)
            self.nested(s.body)

    def _fresh(self, axis: Axis) -> str:
        """The number of an axis, another one each time that it is bound."""
        number = self._number.setdefault(axis, len(self._number))
        self._bound[axis] += 1
        again = self._bound[axis]
        return f"{number}" + (f"_{again}" if again > 1 else "")

    @property
    def wide(self) -> bool:
        """Whether indices have 64 bits."""
        return self.printer.index_type is i64

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

    def branch(self, s: Branch) -> None:
        """An `if` over a scalar."""
        condition = self.printer.term(s.condition)
        if condition.dims:
            raise VerifyError(f"a branch on a block: {s.condition}", phase="emit")
        with self.lines.block(f"if {condition.text}"):
            self.nested(s.body)
        if s.orelse:
            with self.lines.block("else"):
                self.nested(s.orelse)

    # --- memory ----------------------------------------------------------------

    def address(self, s: Load | Store, offset: Term, wanted: tuple[Axis, ...]) -> str:
        """The pointers of an access at `offset` whose lanes are those of `wanted`."""
        pointer = self.pointers[s.buffer.name]
        if self.split and (found := self.places.address(pointer, s.offset, wanted)) is not None:
            return found
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
        number = f"{self._number[a]}_{shared.count}"
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
        places: list[str] = []
        own: list[Axis] = []
        for place, length in zip(at, tile, strict=True):
            if length > 1 and isinstance(place.value, Axis):
                own.append(place.value)
                places.append(self.firsts[place.value].text)
            else:
                places.append(self.printer.term(place).text)
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

    def check(self, s: Check) -> None:
        """Lanes in which the condition fails write the code into the error word."""
        printer = self.printer
        good, mask = printer.term(s.condition), self.mask(s.mask)
        bad = Term(f"~{good.at(UNARY)}", UNARY, good.dims)
        if mask is not None:
            bad = printer.infix("&", AND, [mask, bad])
        place = f"tl.broadcast_to(error, {printer.shape(bad.dims)})" if bad.dims else "error"
        self.lines.put(f"tl.store({place}, {s.code}, mask={bad.text})")

    # --- states ------------------------------------------------------------------

    def full(self, var: Var, term: Term) -> Term:
        """`term` with all the block axes of the state `var`."""
        wanted = self.printer.ordered(var.axes)
        if not set(term.dims) <= set(wanted):
            raise VerifyError(f"{var} varies along an axis that it lacks", phase="emit")
        return self.printer.spread(term, wanted, self.printer.type_held(var))

    def declare(self, s: Declare) -> None:
        """States start as whole blocks, so that loops carry one shape."""
        printer = self.printer
        first = [
            printer.data(e) if e.op == "const" else printer.held(v, e)
            for v, e in zip(s.vars, s.values, strict=True)
        ]
        values = [self.full(v, term) for v, term in zip(s.vars, first, strict=True)]
        for var, value in zip(s.vars, values, strict=True):
            self.define(var, value)
            printer.states.add(var.id)

    def update(self, s: Update) -> None:
        """All new values are computed before the first is assigned."""
        printer = self.printer
        mask = self.mask(s.mask)
        new: list[Term] = []
        for var, e in zip(s.vars, s.values, strict=True):
            value = printer.held(var, e)
            if mask is not None:
                value = printer.call("tl.where", [mask, value, printer.values[var.id]])
            new.append(self.full(var, value))
        printer.scope.forget({v.id for v in s.vars})
        names = ", ".join(f"v{v.id}" for v in s.vars)
        self.lines.put(f"{names} = {', '.join(t.text for t in new)}")

    # --- whole blocks ----------------------------------------------------------------

    def collapse(self, s: Collapse | Prefix) -> None:
        """A merge along one dimension, or all; along an axis that is no dimension there is nothing to merge."""
        printer = self.printer
        parts = [printer.values[p.id] for p in s.parts]
        axes = printer.ordered(s.axes if isinstance(s, Collapse) else [s.axis])
        if not axes:
            for var, part in zip(s.vars, parts, strict=True):
                self.define(var, part)
            return
        wanted = printer.ordered([*axes, *printer.union(parts)])
        full = [printer.spread(p, wanted, v.dtype) for p, v in zip(parts, s.parts, strict=True)]
        first, *others = axes
        if others and axes != wanted:
            raise VerifyError("a merge of several axes leaves one", phase="emit")
        place = None if others else wanted.index(first)
        rest = wanted if isinstance(s, Prefix) else tuple(a for a in wanted if a not in axes)
        text = print_merge(s, full, place, printer.helpers)
        self.lines.put(f"{', '.join(f'v{v.id}' for v in s.vars)} = {text}")
        for var in s.vars:
            printer.values[var.id] = Term(f"v{var.id}", ATOM, rest)

    def dot(self, s: Dot) -> None:
        """A product on a matrix unit, or products summed along the axis."""
        printer = self.printer
        if isinstance(s.method, MatrixMultiply):
            self._matrix_multiply(s, s.method)
            return
        a, b = (printer.converted(self._single(v), v.dtype, s.acc.dtype) for v in (s.a, s.b))
        term = printer.infix("*", PRODUCT, [a, b])
        if s.k in term.dims:
            rest = tuple(x for x in term.dims if x != s.k)
            term = Term(f"tl.sum({term.text}, {term.dims.index(s.k)})", ATOM, rest)
        self._assign(s.acc, printer.infix("+", SUM, [printer.values[s.acc.id], term]))

    def _matrix_multiply(self, s: Dot, by: MatrixMultiply) -> None:
        acc, a, b = self.printer.values[s.acc.id], self._operand(s.a), self._operand(s.b)
        if not len(acc.dims) == len(a.dims) == len(b.dims) == 2:
            raise VerifyError("a matrix unit multiplies matrices", phase="emit")
        if by.sides == "swapped":
            a, b = b, a
        left = a.text if a.dims[1] == s.k else f"tl.trans({a.text})"
        right = b.text if b.dims[0] == s.k else f"tl.trans({b.text})"
        how = "" if by.precision is None else f', input_precision="{by.precision}"'
        if by.apart:
            how += f", max_num_imprecise_acc={self.printer.tiles[s.k]}"
        if s.acc.dtype is not f32:
            how += f", out_dtype={named_type(s.acc.dtype)}"
        turned = by.sides == "turned"
        start = f"tl.trans({acc.text})" if turned else acc.text
        product = f"tl.dot({left}, {right}, {start}{how})"
        self._assign(s.acc, Term(f"tl.trans({product})" if turned else product, ATOM, acc.dims))

    def _operand(self, var: Var) -> Term:
        """A block in the type in which it is multiplied: halves stay halves."""
        term = self.printer.values[var.id]
        return (
            self.printer.cast_text(term, var.dtype) if var.dtype.is_half and var.id not in self.raw else term
        )

    def _single(self, var: Var) -> Term:
        term = self.printer.values[var.id]
        return self.printer.cast_text(term, f32) if var.id in self.raw else term

    def _assign(self, var: Var, value: Term) -> None:
        value = self.full(var, value)
        self.printer.scope.forget({var.id})
        self.lines.put(f"v{var.id} = {value.text}")


def _updated(statements: Iterable[Stmt]) -> set[int]:
    """Numbers of the states that statements change."""
    found: set[int] = set()
    for s in statements:
        if isinstance(s, Update):
            found |= {v.id for v in s.vars}
        elif isinstance(s, Dot):
            found.add(s.acc.id)
        elif isinstance(s, (Loop, Nest)):
            found |= _updated(s.body)
        elif isinstance(s, Branch):
            found |= _updated((*s.body, *s.orelse))
    return found


def check_size(printer: Expressions) -> None:
    """Raise UnsupportedError if values in use have more elements than the language takes."""
    for term in printer.values.values():
        size = 1
        for a in term.dims:
            size *= printer.tiles[a]
        if size > MAX_BLOCK_ELEMENTS:
            raise UnsupportedError(
                f"a block of {size} elements", phase="emit", hint="a schedule with smaller tiles"
            )
