"""Statements of a tile program as Triton text. Blocks are tensors with one dimension per block axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewright.errors import UnsupportedError, VerifyError
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr
from tilewright.ir.program import (
    Await,
    Branch,
    Check,
    Collapse,
    Compute,
    Declare,
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
from tilewright.ir.selection import MatrixMultiply

from .accesses import Accesses
from .expr import Expressions
from .reduce import print_merge
from .scope import AND, ATOM, PRODUCT, SUM, UNARY, Scope, Term, named_type

MAX_BLOCK_ELEMENTS = 1 << 20
"""Elements that a block may have."""


def printed(program: TileProgram) -> list[Expr]:
    """The expressions that the text of a program has, as often as it has them."""
    found = [g.extent for g in program.grid[1:]]
    for s in program.statements():
        found += [s.start] if isinstance(s, Loop) and is_binding(s) else expressions(s)
    return found


class Body(Accesses):
    """Prints the statements of one program."""

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

    def nested(self, statements: Sequence[Stmt]) -> None:
        """Print statements with a scope of their own."""
        outer = self.printer.scope
        self.printer.scope = Scope(outer)
        self.body(statements)
        self.printer.scope = outer
        outer.forget(self.changed(statements))

    @staticmethod
    def changed(statements: Iterable[Stmt]) -> set[int]:
        """Numbers of the states that statements change."""
        return _updated(statements)

    def loop(self, s: Loop) -> None:
        """A loop of one step only binds its axis, unless it is to stay one."""
        start = self.printer.offset(s.start)
        number = self.fresh(s.axis)
        if is_binding(s) and not s.looped:
            self.bind(s, start, number)
            self.nested(s.body)
            return
        bounds = [start.text, self.printer.offset(s.stop).text] + ([str(s.tile)] if s.tile > 1 else [])
        told = [f"num_stages={s.stages}"] if s.stages > 1 else []
        told += [f"loop_unroll_factor={s.unrolled}"] if s.unrolled > 1 else []
        head = f"{'tl.' if told else ''}range({', '.join([*bounds, *told])})"
        plain = s.tile == 1 and not self.wide
        base = Term(f"{'a' if plain else 'b'}{number}")
        with self.lines.block(f"for {base.text} in {head}"):
            if plain:
                self.printer.axes[s.axis] = base
            else:
                start = Term(f"tl.cast({base.text}, tl.int64)") if self.wide else base
                self.bind(s, start, number)
            self.nested(s.body)

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
