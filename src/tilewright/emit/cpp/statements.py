"""Statements as C++: neighbouring statements over the same block axes become one loop over its registers."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod

from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, conjuncts, transform
from tilewright.ir.program import (
    Branch,
    Check,
    Collapse,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    defines,
    expressions,
    uses,
    value_of,
)
from tilewright.ir.selection import IN_PLACE, Access, MicroKernel
from tilewright.lower.legalise.blocks import Dims, blocks_of
from tilewright.tuning.thresholds import CPP_TEXT

from .expr import Expressions, typed
from .memory import Memory
from .scope import Lines, Place, Scope, Unit, bare, count_uses


@dataclass(slots=True)
class Run:
    """Statements that share one loop nest over `dims` (block axes with tiles, the vector axis last; empty: scalars)."""

    dims: Dims
    body: list[Stmt] = field(default_factory=list)
    merges: list[Collapse] = field(default_factory=list)
    """Merges over an axis of `dims`, not the vector axis, of values made here."""


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
        memory: Memory,
        special: Special,
    ) -> None:
        self.program = program
        self.special = special
        self.printer = printer
        self.memory = memory
        self.blocks = blocks_of(program, printer.style.lanes)
        self.axes: dict[Axis, str] = {}
        """The first values of the axes that are bound."""
        self.names: dict[Axis, str] = {}
        loads = (s for s in program.statements() if isinstance(s, Load) and s.access == IN_PLACE)
        self.in_place = {s.var.id: s for s in loads}
        """What products read where it lies, by the number of the value."""
        self.uses: dict[int, int] = {}
        for s in program.statements():
            for v in set(uses(s)) | _updated(s):
                self.uses[v] = self.uses.get(v, 0) + 1

    @property
    def lines(self) -> Lines:
        """Where text goes."""
        return self.printer.lines

    # --- shapes ------------------------------------------------------------

    def axis_name(self, axis: Axis) -> str:
        """Our name of an axis."""
        return self.names.setdefault(axis, f"a{len(self.names)}")

    def place(self, var: Var, dims: Dims, array: bool) -> Place:
        """Give `var` its name and remember where it lives."""
        made = Place(f"v{var.id}", var, dims, array and bool(self.blocks.counts(dims)))
        self.printer.places[var.id] = made
        return made

    def unit(self, dims: Dims) -> Unit:
        """The unit of a block whose loops are open: `u<n>` are loop variables, `x<n>` values of block axes."""
        lanes = self.blocks.lanes(dims)
        values = dict(self.axes)
        index: dict[Axis, str] = {}
        for a, _ in self.blocks.counts(dims):
            number = self.axis_name(a)[1:]
            index[a] = f"u{number}"
            if a in values:
                values[a] = f"x{number}"
        return Unit(values, dims[-1][0] if lanes > 1 else None, str(lanes), index)

    @contextmanager
    def nest(self, dims: Dims, unroll: bool, inner: bool = False) -> Generator[None]:
        """Open the loops over the registers of a block (none for one register), with their unit and scope. They are
        unrolled (`inner`: the innermost one, if it is short)."""
        outer_unit, outer_scope = self.printer.unit, self.printer.scope
        counts, unit, lanes = self.blocks.counts(dims), self.unit(dims), self.blocks.lanes(dims)
        self.printer.unit = unit
        if counts:
            self.printer.scope = Scope(outer_scope, frozenset(a for a, _ in counts))
        side_by_side = not (unroll or inner) and len(counts) == 2 and counts[0][0] == self.program.beside
        for a, n in reversed(counts) if side_by_side else counts:
            u = unit.index[a]
            last = a == counts[0 if side_by_side else -1][0]
            if unroll or ((inner or side_by_side) and last and n <= CPP_TEXT.max_unrolled_registers // 4):
                self.lines.put(f"#pragma GCC unroll {n}")
            self.lines.put(f"for (i64 {u} = 0; {u} < {n}; {u}++) {{")
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

    # --- runs --------------------------------------------------------------

    def statement_dims(self, s: Stmt) -> Dims:
        """The block over which a statement without a body works."""
        match s:
            case Load() | Compute():
                return self.blocks.dims(s.var.axes)
            case Declare() | Update():
                return self.blocks.dims(s.vars[0].axes)
            case Store() | Check():
                return self.blocks.dims(s.axes)
            case _:
                return ()

    def runs(self, body: Sequence[Stmt]) -> list[Run]:
        """Statements in groups that may share loops, in an order with the same meaning."""
        out: list[Run] = []
        open_: Run | None = None
        for s in body:
            if (isinstance(s, (Declare, Update)) and s.absorbed) or (
                isinstance(s, Load) and s.access == IN_PLACE
            ):
                continue  # part of a product
            if isinstance(s, Collapse) and self.merged_into(out, s):
                continue
            if isinstance(s, (Loop, Branch, Collapse, Dot)):
                out.append(Run((), [s]))
                open_ = None
                continue
            dims = self.statement_dims(s)
            if isinstance(s, (Load, Store)) and s.access is not None:
                out.append(Run(dims, [s]))
                open_ = None
                continue
            if (
                open_ is not None
                and not dims
                and open_.dims
                and _may_precede(s, [*open_.body, *open_.merges])
            ):
                out.insert(len(out) - 1, Run((), [s]))
                continue
            if open_ is None or dims != open_.dims or _clashes(s, open_.body) or _waits(s, open_.merges):
                open_ = Run(dims)
                out.append(open_)
            open_.body.append(s)
        return out

    def merged_into(self, runs: Sequence[Run], s: Collapse) -> bool:
        """Let the run that makes all parts of `s` merge them on the way, if there is one that can."""
        made = {p.id for p in s.parts}
        for run in runs:
            values = {d.id for r in run.body if isinstance(r, Compute) for d in defines(r)}
            if made <= values and self.program.lane not in s.axes:
                if set(s.axes) <= dict(self.blocks.counts(run.dims)).keys():
                    run.merges.append(s)
                    return True
        return False

    def body(self, body: Sequence[Stmt]) -> None:
        """Print the statements of one block of the program, in a scope of their own."""
        printer = self.printer
        counts, scope = printer.counts, printer.scope
        printer.counts = count_uses([e for s in body for e in expressions(s)])
        printer.scope = Scope(scope)
        printer.unit = self.unit(())
        for run in self.runs(body):
            first = run.body[0]
            match first:
                case Loop():
                    self.loop(first)
                case Branch():
                    self.branch(first)
                case Collapse():
                    self.special.collapse(self, first)
                case Dot(method=MicroKernel() as kernel):
                    self.special.dot(self, first, kernel)
                case Dot():
                    self.dot(first)
                case Load(access=Access() as access) | Store(access=Access() as access):
                    self.special.turn(self, first, run.dims, access)
                case _:
                    self.run(run)
                    continue
            printer.scope.forget(printer.states)
        printer.counts, printer.scope = counts, scope

    def run(self, run: Run) -> None:
        """Print one run."""
        made = [v for s in run.body for v in defines(s)]
        inside: dict[int, int] = {}
        for s in (*run.body, *run.merges):
            for v in set(uses(s)) | _updated(s):
                inside[v] = inside.get(v, 0) + 1
        for s in run.merges:
            self.special.begin(self, s)
        for v in made:
            outlives = self.uses.get(v.id, 0) > inside.get(v.id, 0)
            if self.place(v, run.dims, outlives).array:
                self.declare_array(v, run.dims)
        registers = prod(n for _, n in self.blocks.counts(run.dims))
        arrays = any(
            self.printer.places[v].array for s in run.body for v in (*uses(s), *(d.id for d in defines(s)))
        )
        with self.nest(run.dims, arrays and registers <= CPP_TEXT.max_unrolled_registers, bool(run.merges)):
            self._leave_at_tail(run)
            for s in run.body:
                self.simple(s)
            for s in run.merges:
                self.special.merge(self, s)
        if self.blocks.counts(run.dims):
            self.printer.scope.forget(self.printer.states)

    def _leave_at_tail(self, run: Run) -> None:
        """Leave the loop over registers at the first one that a mask, common to all its effects, excludes whole."""
        unit = self.printer.unit
        if unit.lane is None or unit.lane not in unit.index:
            return
        effects = [s for s in run.body if isinstance(s, (Load, Store, Update, Check))]
        made = [v for s in run.body for v in defines(s)]
        if run.merges or not effects or any(self.printer.places[v.id].array for v in made):
            return
        common = set(conjuncts(effects[0].mask)).intersection(*(conjuncts(s.mask) for s in effects))
        for term in conjuncts(effects[0].mask):
            bound = self.printer.lane_bound(term) if term in common else None
            if bound is not None and bound[0] == "below":
                self.lines.put(f"if ({bound[1]} <= 0) break;")
                return

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

    def dot(self, s: Dot) -> None:
        """Print a product of blocks, summed over one axis, as a loop over registers."""
        dims = self.blocks.dims(s.acc.axes)
        steps = dict(self.blocks.dims((s.k,))).get(s.k, 1)
        spans = s.k in s.a.axes and steps > 1
        u = f"u{self.axis_name(s.k)[1:]}"
        if spans:
            self.lines.put(f"for (i64 {u} = 0; {u} < {steps}; {u}++) {{")
            self.lines.depth += 1
        with self.nest(dims, prod(n for _, n in self.blocks.counts(dims)) <= CPP_TEXT.max_unrolled_registers):
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

    def _operand(self, v: Var, unit: Unit) -> str:
        text = self.printer.access(v.id)
        if unit.lane is None or unit.lane in v.axes:
            return text
        return self.printer.splat(v.dtype, text)


def _waits(s: Stmt, merges: Sequence[Collapse]) -> bool:
    """Whether a statement reads what a run has only behind its loops."""
    return bool(set(uses(s)) & {v.id for m in merges for v in m.vars})


def _updated(s: Stmt) -> set[int]:
    return {v.id for v in s.vars} if isinstance(s, Update) else set()


def _may_precede(s: Stmt, run: Sequence[Stmt]) -> bool:
    """Whether a scalar statement may move before `run`: it reads nothing from it and no store may change it."""
    if not isinstance(s, (Load, Compute)):
        return False
    made = {v.id for r in run for v in defines(r)}
    if made & set(uses(s)):
        return False
    return isinstance(s, Compute) or not any(isinstance(r, Store) for r in run)


def _clashes(s: Stmt, run: Sequence[Stmt]) -> bool:
    """Whether `s` may touch memory that the run stores to at another place (registers are done one by one)."""
    if not isinstance(s, (Load, Store)):
        return False
    return any(isinstance(r, Store) and r.buffer == s.buffer and r.offset is not s.offset for r in run) or (
        isinstance(s, Store)
        and any(isinstance(r, Load) and r.buffer == s.buffer and r.offset is not s.offset for r in run)
    )
