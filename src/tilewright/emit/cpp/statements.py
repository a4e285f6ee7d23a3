"""Statements as C++: a nest becomes loops over registers, another statement over a block has loops of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tilewright.errors import UnsupportedError, VerifyError
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, transform
from tilewright.ir.program import (
    Branch,
    Check,
    Collapse,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Nest,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    defines,
    expressions,
    in_order,
    value_of,
)
from tilewright.ir.selection import IN_PLACE, Access, MicroKernel, RegisterLoop
from tilewright.lower.legalise.blocks import Dims, blocks_of

from .expr import Expressions, typed
from .memory import MemoryPrinter
from .scope import Lines, RegisterPlace, Scope, VectorUnit, bare, count_uses


@dataclass(frozen=True, slots=True)
class Special:
    """What other files print: merges over an axis (at once, or `begin` and `merge` inside the run that makes parts),
    accesses along another axis than the vector axis, products of blocks."""

    collapse: Callable[[Body, Collapse], None]
    begin: Callable[[Body, Collapse], None]
    merge: Callable[[Body, Collapse], None]
    turn: Callable[[Body, Load | Store, Dims, Access], None]
    dot: Callable[[Body, Dot, MicroKernel], None]


class Body:
    """Prints the statements of one program."""

    def __init__(
        self,
        program: TileProgram,
        printer: Expressions,
        memory: MemoryPrinter,
        special: Special,
    ) -> None:
        self.program = program
        self.special = special
        self.printer = printer
        self.memory = memory
        self.blocks = blocks_of(program)
        self.axes: dict[Axis, str] = {}
        """The first values of the axes that are bound."""
        self.names: dict[Axis, str] = {}
        loads = (s for s in program.statements() if isinstance(s, Load) and s.access == IN_PLACE)
        self.in_place = {s.var.id: s for s in loads}
        """What products read where it lies, by the number of the value."""

    @property
    def lines(self) -> Lines:
        """Where text goes."""
        return self.printer.lines

    # --- shapes ------------------------------------------------------------

    def axis_name(self, axis: Axis) -> str:
        """Our name of an axis."""
        return self.names.setdefault(axis, f"a{len(self.names)}")

    def place(self, var: Var, dims: Dims, array: bool) -> RegisterPlace:
        """Give `var` its name and remember where it lives."""
        made = RegisterPlace(f"v{var.id}", var, dims, array and bool(self.blocks.counts(dims)))
        self.printer.places[var.id] = made
        return made

    def unit(self, dims: Dims) -> VectorUnit:
        """The unit of a block whose loops are open: `u<n>` are loop variables, `x<n>` values of block axes."""
        lanes = self.blocks.lanes(dims)
        values = dict(self.axes)
        index: dict[Axis, str] = {}
        for a, _ in self.blocks.counts(dims):
            number = self.axis_name(a)[1:]
            index[a] = f"u{number}"
            if a in values:
                values[a] = f"x{number}"
        return VectorUnit(values, dims[-1][0] if lanes > 1 else None, str(lanes), index)

    @contextmanager
    def nest(self, dims: Dims, given: Sequence[RegisterLoop] | None = None) -> Generator[None]:
        """Open the loops over the registers of a block (none for one register), with their unit and scope; those that
        are `given`, else one for each axis in order."""
        outer_unit, outer_scope = self.printer.unit, self.printer.scope
        counts, unit, lanes = self.blocks.counts(dims), self.unit(dims), self.blocks.lanes(dims)
        self.printer.unit = unit
        if counts:
            self.printer.scope = Scope(outer_scope, frozenset(a for a, _ in counts))
        loops = [RegisterLoop(a, n) for a, n in counts] if given is None else given
        if {(x.axis, x.count) for x in loops} != set(counts) or len(loops) != len(counts):
            raise VerifyError("a nest has other loops than its block has registers", phase="emit")
        for x in loops:
            u = unit.index[x.axis]
            if x.unrolled:
                self.lines.put(f"#pragma GCC unroll {x.count}")
            self.lines.put(f"for (i64 {u} = 0; {u} < {x.count}; {u}++) {{")
            self.lines.depth += 1
        first = len(self.lines.lines)
        for a, _ in counts:
            if a in self.axes:
                step = f" * {lanes}" if lanes > 1 and a == unit.lane else ""
                self.lines.put(f"const i64 {unit.values[a]} = {self.axes[a]} + {unit.index[a]}{step};")
        yield
        self._drop_unused(first, [unit.values[a] for a, _ in counts if a in self.axes])
        for _ in counts:
            self.lines.depth -= 1
            self.lines.put("}")
        self.printer.unit, self.printer.scope = outer_unit, outer_scope

    def _drop_unused(self, first: int, names: Sequence[str]) -> None:
        """Take back the definitions at line `first` of those `names` that no later line uses."""
        lines = self.lines.lines
        for k in reversed(range(len(names))):
            if not re.search(rf"\b{names[k]}\b", "\n".join(lines[first + len(names) :])):
                del lines[first + k]
                names = [*names[:k], *names[k + 1 :]]

    # --- bodies ------------------------------------------------------------

    def block_of(self, s: Stmt) -> Dims:
        """The block over which a statement without loops of its own works."""
        match s:
            case Load() | Compute():
                return self.blocks.dims(s.var.axes)
            case Declare() | Update():
                return self.blocks.dims(s.vars[0].axes)
            case Store() | Check():
                return self.blocks.dims(s.axes)
            case Dot():
                return self.blocks.dims(s.acc.axes)
            case _:
                return ()

    def body(self, body: Sequence[Stmt]) -> None:
        """Print the statements of one block of the program, in a scope of their own."""
        printer = self.printer
        counts, scope = printer.counts, printer.scope
        printer.counts = count_uses([e for s in in_order(body) for e in expressions(s)])
        printer.scope = Scope(scope)
        printer.unit = self.unit(())
        for s in body:
            match s:
                case Loop():
                    self.loop(s)
                case Branch():
                    self.branch(s)
                case Collapse():
                    self.special.collapse(self, s)
                case Dot(method=MicroKernel() as kernel):
                    self.special.dot(self, s, kernel)
                case Dot():
                    self.dot(s)
                case Nest(body=(Dot() as product,)):
                    self.dot(product, s.loops)
                case Nest():
                    self.together(s)
                    continue
                case Declare(absorbed=True) | Update(absorbed=True) | Load(access=Access(kind="in place")):
                    continue  # part of a product
                case Load(access=Access() as access) | Store(access=Access() as access):
                    self.special.turn(self, s, self.block_of(s), access)
                case _:
                    loops = [RegisterLoop(*n) for n in self.blocks.counts(self.block_of(s))]
                    self.together(Nest(tuple(loops), (s,), tuple(v.id for v in defines(s))))
                    continue
            printer.scope.forget(printer.states)
        printer.counts, printer.scope = counts, scope

    def together(self, nest: Nest) -> None:
        """Print statements in the same loops over the registers of their block."""
        merges = [s for s in nest.body if isinstance(s, Collapse)]
        body = [s for s in nest.body if not isinstance(s, Collapse)]
        dims = self.block_of(body[0])
        if any(self.block_of(s) != dims for s in body):
            raise VerifyError("statements of different blocks in one nest", phase="emit")
        for s in merges:
            self.special.begin(self, s)
        for v in (v for s in body for v in defines(s)):
            if self.place(v, dims, v.id in nest.keeps).array:
                self.declare_array(v, dims)
        with self.nest(dims, nest.loops):
            if nest.until is not None:
                self.leave(nest.until)
            for s in body:
                self.simple(s)
            for s in merges:
                self.special.merge(self, s)
        if self.blocks.counts(dims):
            self.printer.scope.forget(self.printer.states)

    def leave(self, mask: Expr) -> None:
        """Leave the loop over registers at the first one that a mask of lanes excludes whole."""
        bound = self.printer.lane_bound(mask)
        if bound is None or bound[0] != "below":
            raise VerifyError(f"no loop ends where {mask} fails", phase="emit")
        self.lines.put(f"if ({bound[1]} <= 0) break;")

    def declare_array(self, var: Var, dims: Dims) -> None:
        """Print the array of registers that holds a block."""
        sizes = "".join(f"[{n}]" for _, n in self.blocks.counts(dims))
        self.lines.put(f"{typed(var, self.printer.style, self.unit(dims))} v{var.id}{sizes};")

    def define(self, var: Var, text: str, mutable: bool = False) -> None:
        """Print the definition of this unit's part of `var`."""
        place = self.printer.places[var.id]
        if place.array:
            self.lines.put(f"{self.printer.access(var.id)} = {bare(text)};")
        else:
            kind = typed(var, self.printer.style, self.printer.unit)
            self.lines.put(f"{'' if mutable else 'const '}{kind} {place.name} = {bare(text)};")

    def value(self, e: Expr, var: Var) -> str:
        """`e` as what a register of `var` holds in this unit."""
        lane = self.printer.unit.lane
        return self.printer.vector(e) if lane is not None and lane in var.axes else self.printer.scalar(e)

    def fused(self, e: Expr, state: Var) -> str:
        """The new value of a state, a product in it added with one rounding."""
        for product, other in (e.args, e.args[::-1]) if e.op == "add" and e.dtype.is_float else ():
            if product.op == "mul":
                return f"fma({', '.join(bare(self.value(x, state)) for x in (*product.args, other))})"
        return self.value(e, state)

    def simple(self, s: Stmt) -> None:
        """Print a statement without a body, for this unit."""
        match s:
            case Load():
                self.define(s.var, self.memory.load(s))
            case Compute():
                self.define(s.var, self.value(s.expr, s.var))
                if s.var.dtype is i64 and not self.printer.facts(s.expr)[1] & self.printer.states:
                    self.printer.definitions[value_of(s.var)] = transform(
                        s.expr, self.printer.definitions.get
                    )
            case Declare():
                texts = [self.value(e, v) for e, v in zip(s.values, s.vars, strict=True)]
                for v, text in zip(s.vars, texts, strict=True):
                    self.define(v, text, mutable=True)
                self.printer.states |= {v.id for v in s.vars}
            case Update():
                self.update(s)
            case Store():
                self.memory.store(s)
            case Check():
                self.memory.check(s)
            case _:
                raise UnsupportedError(f"statement {type(s).__name__} inside a block", phase="emit")

    def update(self, s: Update) -> None:
        """Print the assignment of new values to states, all at once."""
        guard = self.memory.guard(s.mask)
        mask = self.memory.lanes_of(guard)
        texts: list[str] = []
        for v, e in zip(s.vars, s.values, strict=True):
            text = bare(self.fused(e, v) if s.fused else self.value(e, v))
            if mask is not None:
                text = f"select({bare(mask)}, {text}, {self.printer.access(v.id)})"
            texts.append(text)
        if len(s.vars) > 1:
            for k, (v, text) in enumerate(zip(s.vars, texts, strict=True)):
                name = self.printer.fresh()
                self.lines.put(f"const {typed(v, self.printer.style, self.printer.unit)} {name} = {text};")
                texts[k] = name
        pairs = [f"{self.printer.access(v.id)} = {t};" for v, t in zip(s.vars, texts, strict=True)]
        if guard.when is None:
            for pair in pairs:
                self.lines.put(pair)
        else:
            self.lines.put(f"if ({bare(guard.when)}) {{ {' '.join(pairs)} }}")
        self.printer.scope.forget({v.id for v in s.vars})

    # --- structure -----------------------------------------------------------

    def loop(self, s: Loop) -> None:
        """Print a loop."""
        name = self.axis_name(s.axis)
        start, stop = bare(self.printer.scalar(s.start)), bare(self.printer.scalar(s.stop))
        if not stop.isalnum():
            limit = self.printer.fresh()
            self.lines.put(f"const i64 {limit} = {stop};")
            stop = limit
        step = f"{name}++" if s.tile == 1 else f"{name} += {s.tile}"
        with self.lines.block(f"for (i64 {name} = {start}; {name} < {stop}; {step})"):
            outer, self.blocks = self.blocks, self.blocks.inside(s)
            self.axes[s.axis] = name
            self.body(s.body)
            del self.axes[s.axis]
            self.blocks = outer
        self.printer.unit = self.unit(())

    def branch(self, s: Branch) -> None:
        """Print a branch."""
        condition = bare(self.printer.scalar(s.condition))
        with self.lines.block(f"if ({condition})", "}" if not s.orelse else "} else {"):
            self.body(s.body)
        if s.orelse:
            self.lines.depth += 1
            self.body(s.orelse)
            self.lines.depth -= 1
            self.lines.put("}")
        self.printer.unit = self.unit(())

    def dot(self, s: Dot, loops: Sequence[RegisterLoop] | None = None) -> None:
        """Print a product of blocks, summed over one axis, as a loop over registers."""
        dims = self.block_of(s)
        steps = dict(self.blocks.dims((s.k,))).get(s.k, 1)
        spans = s.k in s.a.axes and steps > 1
        u = f"u{self.axis_name(s.k)[1:]}"
        if spans:
            self.lines.put(f"for (i64 {u} = 0; {u} < {steps}; {u}++) {{")
            self.lines.depth += 1
        with self.nest(dims, loops):
            unit = self.printer.unit
            if spans:
                self.printer.unit = unit = replace(unit, index={**unit.index, s.k: u})
            a, b = (self._operand(v, unit) for v in (s.a, s.b))
            acc = self.printer.access(s.acc.id)
            text = f"fma({a}, {b}, {acc})" if s.acc.dtype.is_float else f"{acc} + {a} * {b}"
            self.lines.put(f"{acc} = {text};")
        if spans:
            self.lines.depth -= 1
            self.lines.put("}")

    def _operand(self, v: Var, unit: VectorUnit) -> str:
        text = self.printer.access(v.id)
        if unit.lane is None or unit.lane in v.axes:
            return text
        return self.printer.splat(v.dtype, text)
