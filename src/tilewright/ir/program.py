"""The tile program: how one kernel computes. Grid, loops, loads and stores of blocks, states, reductions over a block.

Meaning. A program runs its body once per point of the grid; points are independent, in any order or at once. An axis
that is *bound* with tile t stands for t consecutive values base .. base+t-1: with t = 1 it is a scalar, with t > 1 it
is a *block axis*, and a value that depends on it is a block with that named axis. Blocks of different axes combine by
name, as in broadcasting. A bound axis may run past its extent; statements that would then touch memory or a state
carry a mask that excludes those lanes.

A buffer is addressed by an element offset from its base. Offsets, masks and computations are `Expr`s whose leaves are
bound axes, size symbols, constants, and `var` leaves (`value_of(var)`) for values computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from .dtype import DType
from .expr import Axis, Expr, make, show, walk
from .identity import TOLD
from .reduction import Reduction
from .selection import Access, MatrixMultiply, MicroKernel
from .sizes import dims


class Place(Enum):
    """Where a buffer of a program lives."""

    PARAMETER = "parameter"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat array of `size` elements (an index expression over symbols). A scratch buffer is private to a grid point
    and holds nothing when the point starts."""

    name: str
    dtype: DType
    size: Expr
    place: Place = Place.PARAMETER


@dataclass(frozen=True, slots=True)
class Var:
    """A computed value: number, type, and the block axes it has (those bound with tile > 1 that it depends on)."""

    id: int
    dtype: DType
    axes: tuple[Axis, ...] = ()

    def __repr__(self) -> str:
        return f"v{self.id}" + (f"<{','.join(a.name for a in self.axes)}>" if self.axes else "")


def value_of(var: Var) -> Expr:
    """The expression leaf that stands for `var`."""
    return make("var", (), var.dtype, var.id)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A buffer as a tensor that is copied block by block: its element (i, j, ...) stands at offset `start` plus the
    sum of each index times its stride, the last stride is 1, and an element outside `extents` reads as 0. `tile` is
    the shape of a block; the rest are index expressions over symbols."""

    start: Expr
    extents: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    tile: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """var = buffer[offset] in lanes where `mask` holds (None = all), else `other`. Masked lanes touch no memory.

    The buffer's element is converted to `var.dtype` (a half is held as fp32). With `checked`, an offset that depends on
    data has been clamped and `Check`ed before. `ahead` is an offset that a grid point soon reads: fetching it early is
    only a hint, may lie outside the buffer, and changes nothing. With a `descriptor`, the block of it at the indices
    `at` is the same value (of a dim with a tile, the index is the block axis, which begins there): another way to
    load it, where the machine has it and addresses are aligned. A half `as_stored` is held as what it is: only products
    of blocks read it. `access`: how the block moves (None: along the vector axis)."""

    var: Var
    buffer: Buffer
    offset: Expr
    mask: Expr | None = None
    other: Expr | None = None
    ahead: Expr | None = None
    descriptor: Descriptor | None = None
    at: tuple[Expr, ...] = ()
    as_stored: bool = False
    access: Access | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """var = expr, elementwise over the axes of `var`."""

    var: Var
    expr: Expr


@dataclass(frozen=True, slots=True)
class Store:
    """buffer[offset] = value, converted to the buffer's type, in lanes where `mask` holds. `axes` are its block axes.

    Under the condition `stream` (on sizes; None: never) nobody reads the data soon, so it may bypass the caches."""

    buffer: Buffer
    offset: Expr
    value: Expr
    axes: tuple[Axis, ...] = ()
    mask: Expr | None = None
    stream: Expr | None = None
    access: Access | None = None

    @property
    def unrounded(self) -> Expr:
        """The value without a rounding to the type in which it is stored anyway."""
        e, stored = self.value, self.buffer.dtype
        rounds = e.op in ("cast", "narrow") and e.dtype is stored and stored.is_half
        return e.args[0] if rounds and e.args[0].dtype.compute is stored.compute else e


@dataclass(frozen=True, slots=True)
class Declare:
    """Make `vars` a mutable state with these initial values. Only `Update` and `Dot` change it. A statement that is
    `absorbed` is part of the product behind it."""

    vars: tuple[Var, ...]
    values: tuple[Expr, ...]
    absorbed: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """Assign new values to states, all at once; lanes where `mask` fails keep the old ones.

    With `fused`, a product that a value adds to something is rounded once, with the sum, where the machine can: nothing
    else computes the same value again, as other loops may do with elements."""

    vars: tuple[Var, ...]
    values: tuple[Expr, ...]
    mask: Expr | None = None
    fused: bool = True
    absorbed: bool = False


@dataclass(frozen=True, slots=True)
class Collapse:
    """vars = the merge, in a fixed order, of the states `parts` over their block axes `axes` (which `vars` lack).

    Several axes at once is for machines whose threads share a grid point: each thread merges what it holds before any
    speaks to another one. On others the order is that of the axis, `pairwise` (registers, then their lanes), or in
    blocks of `block` elements, one after the other."""

    vars: tuple[Var, ...]
    parts: tuple[Var, ...]
    reduction: Reduction
    axes: tuple[Axis, ...]
    pairwise: bool = False
    block: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """vars = the inclusive running merge, in order, of the states `parts` along their block axis `axis`."""

    vars: tuple[Var, ...]
    parts: tuple[Var, ...]
    reduction: Reduction
    axis: Axis


@dataclass(frozen=True, slots=True)
class Dot:
    """acc[m, n] += sum over k of a[m, k] * b[k, n]: the block axes of `acc` are those of `a` and `b` without `k`. With
    a `chain`, the sum is one of sums of so many products. `method` says how (None: multiply and add)."""

    acc: Var
    a: Var
    b: Var
    k: Axis
    chain: int = 0
    method: MatrixMultiply | MicroKernel | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """If `condition` (bool) fails in any lane of `mask`, the run reports error number `code` (index out of range, ...)
    after it ends; nothing is touched out of bounds because loads use clamped offsets."""

    condition: Expr
    code: int
    axes: tuple[Axis, ...] = ()
    mask: Expr | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """for base in range(start, stop, tile): bind `axis` to base .. base+tile-1; run `body`. Sequential. Bounds are
    scalars, and may be values computed from data. The loads of `stages` steps are under way at once."""

    axis: Axis
    start: Expr
    stop: Expr
    tile: int
    body: tuple[Stmt, ...]
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Branch:
    """Run `body` if the scalar condition holds, else `orelse`."""

    condition: Expr
    body: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()


Stmt = Load | Compute | Store | Declare | Update | Collapse | Prefix | Dot | Check | Loop | Branch


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One dimension of the grid: `axis` takes 0 .. extent-1, one value per point (a tile number if loops refine it)."""

    axis: Axis
    extent: Expr


@dataclass(frozen=True, slots=True)
class TileProgram:
    """`params` in calling order, `grid` outermost first, and the body of one grid point.

    `lane` is the axis that becomes vector lanes where the machine has vectors of elements (None: all is scalar).
    `grain` is how many grid points are worth handing to another thread at once. On machines whose threads share a grid
    point, `warps` groups of threads in step work on it, and loops have the loads of `stages` steps under way; points
    are numbered with the last axis innermost, or `order` rows of the last two axes at a time, column by column.

    Blocks along `beside` are walked with that axis innermost, so that memory sees a stream for each of its values. With
    `reciprocals`, lanes that one number divides are multiplied by its reciprocal, kept in two parts.
    With `contracted`, a product and the sum that it goes into may round once anywhere: what another kernel, or a
    reduction, made of the product may then differ from it. Unless `aligned`, no code is made that relies on aligned
    pointers. With `odd_steps`, where a block begins says nothing of how what lies behind it is aligned."""

    params: tuple[Buffer, ...]
    grid: tuple[GridAxis, ...]
    body: tuple[Stmt, ...]
    scratch: tuple[Buffer, ...] = ()
    lane: Axis | None = None
    grain: Expr = dims.ONE
    warps: int = 1
    stages: int = 1
    order: int = 0
    beside: Axis | None = None
    reciprocals: bool = False
    aligned: bool = True
    contracted: bool = False
    odd_steps: bool = False
    notes: tuple[str, ...] = field(default=(), compare=False, metadata=TOLD)

    def statements(self) -> Iterator[Stmt]:
        """Every statement, outer before inner."""
        yield from walk_statements(self.body)

    def loops(self) -> list[Loop]:
        """Every loop, outer before inner."""
        return [s for s in self.statements() if isinstance(s, Loop)]

    def is_checked(self) -> bool:
        """Whether what it reads may be found wrong: an index out of range, a divisor of 0."""
        return any(isinstance(s, Check) for s in self.statements())

    def show(self) -> str:
        """The program as text: every statement and decision. Of expressions it tells what `ir.expr.show` tells: types
        of variables, not those of constants inside."""
        lines = ["program(" + ", ".join(f"{b.name}:{b.dtype}[{show(b.size)}]" for b in self.params) + ")"]
        decided = [f for f in fields(self) if f.name in _DECIDED and getattr(self, f.name) != f.default]
        lines += [f"  {f.name} = {_shown(getattr(self, f.name))}" for f in decided]
        lines += [f"  scratch {b.name}:{b.dtype}[{show(b.size)}]" for b in self.scratch]
        lines += [f"  grid {g.axis.name} < {show(g.extent)}" for g in self.grid]
        _show(self.body, 1, lines)
        return "\n".join(lines)

    def verify(self) -> None:
        """Raise ValueError unless values are defined before use, axes are bound where used, and states stay states."""
        bound = {g.axis for g in self.grid}
        known = {b.name for b in (*self.params, *self.scratch)}
        _verify(self.body, set(), set(), set(), bound, known)


def walk_statements(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """The statements of a body and of what is inside them, outer before inner."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            yield from walk_statements(s.body)
        elif isinstance(s, Branch):
            yield from walk_statements(s.body)
            yield from walk_statements(s.orelse)


def is_binding(s: Loop) -> bool:
    """Whether a loop has one step."""
    length = dims.static(dims.sub(s.stop, s.start))
    return length is not None and 0 < length <= s.tile


def expressions(s: Stmt) -> list[Expr]:
    """The expressions that a statement evaluates itself (not those of its body)."""
    match s:
        case Load():
            found = [s.offset, s.mask, s.other, s.ahead]
        case Compute():
            found = [s.expr]
        case Store():
            found = [s.offset, s.value, s.mask, s.stream]
        case Declare():
            found = list(s.values)
        case Update():
            found = [*s.values, s.mask]
        case Check():
            found = [s.condition, s.mask]
        case Loop():
            found = [s.start, s.stop]
        case Branch():
            found = [s.condition]
        case Collapse() | Prefix() | Dot():
            found = []
    return [e for e in found if e is not None]


def defines(s: Stmt) -> tuple[Var, ...]:
    """The values that a statement defines."""
    match s:
        case Load() | Compute():
            return (s.var,)
        case Declare() | Collapse() | Prefix():
            return s.vars
        case _:
            return ()


def uses(s: Stmt) -> tuple[int, ...]:
    """Numbers of the values that a statement reads."""
    found = [x.value for e in expressions(s) for x in walk(e) if x.op == "var"]
    if isinstance(s, (Collapse, Prefix)):
        found += [v.id for v in s.parts]
    if isinstance(s, Dot):
        found += [s.acc.id, s.a.id, s.b.id]
    return tuple(v for v in found if isinstance(v, int))


def _verify(
    body: Sequence[Stmt],
    known: set[int],
    blocks: set[int],
    states: set[int],
    bound: set[Axis],
    buffers: set[str],
) -> None:
    known, blocks, states = set(known), set(blocks), set(states)
    for s in body:
        loose = [v for v in uses(s) if v not in known]
        if loose:
            raise ValueError(f"{s}: uses v{loose[0]} before definition")
        if isinstance(s, Loop) and any(v in blocks for v in uses(s)):
            raise ValueError(f"a loop over {s.axis.name} ends at a block")
        for e in expressions(s):
            unbound = [
                x for x in walk(e) if isinstance(x.value, Axis) and x.op == "axis" and x.value not in bound
            ]
            if unbound:
                raise ValueError(f"{s}: axis {unbound[0]} is not bound here")
        if isinstance(s, (Load, Store)) and s.buffer.name not in buffers:
            raise ValueError(f"{s}: unknown buffer {s.buffer.name}")
        if isinstance(s, Update) and not all(v.id in states for v in s.vars):
            raise ValueError(f"{s}: updates a value that is not a state")
        known |= {v.id for v in defines(s)}
        blocks |= {v.id for v in defines(s) if v.axes}
        if isinstance(s, Declare):
            states |= {v.id for v in s.vars}
        if isinstance(s, Loop):
            if s.axis in bound:
                raise ValueError(f"axis {s.axis.name} is bound twice")
            _verify(s.body, known, blocks, states, bound | {s.axis}, buffers)
        if isinstance(s, Branch):
            _verify(s.body, known, blocks, states, bound, buffers)
            _verify(s.orelse, known, blocks, states, bound, buffers)


_DECIDED = ("lane", "grain", "warps", "stages", "order", "beside", "reciprocals", "aligned", "contracted",
            "odd_steps")  # fmt: skip
"""Fields of a program that are told where they have another value than the default."""


def _shown(x: object) -> str:
    return show(x) if isinstance(x, Expr) else x.name if isinstance(x, Axis) else str(x)


def _names(axes: Sequence[Axis]) -> str:
    return ", ".join(a.name for a in axes)


def _defined(variables: Sequence[Var]) -> str:
    """Variables where they are defined, with their types."""
    return ", ".join(f"{v}:{v.dtype}" for v in variables)


def _block(s: Load) -> str:
    """The block that a descriptor reaches, and the tensor that it is a block of."""
    if s.descriptor is None:
        return ""
    d, of = s.descriptor, lambda es: ", ".join(map(show, es))
    whole = f"{show(d.start)} + [{of(d.extents)}] by [{of(d.strides)}]"
    return f" as block ({of(s.at)}) of {' x '.join(map(str, d.tile))} in {whole}"


def _told(selected: object) -> str:
    return "" if selected is None else f" {selected}"


def _suffix(mask: Expr | None) -> str:
    return "" if mask is None else f" if {show(mask)}"


def _unless_sure(condition: Expr) -> Expr | None:
    return None if condition.op == "const" and condition.value else condition


def _show(body: Sequence[Stmt], depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for s in body:
        match s:
            case Load():
                other = "" if s.other is None else f" else {show(s.other)}"
                ahead = "" if s.ahead is None else f" fetching [{show(s.ahead)}]"
                how = f"{' as stored' if s.as_stored else ''}{_told(s.access)}"
                read = f"{s.buffer.name}[{show(s.offset)}]{_suffix(s.mask)}{other}{ahead}{_block(s)}{how}"
                lines.append(f"{pad}{_defined([s.var])} = {read}")
            case Compute():
                lines.append(f"{pad}{_defined([s.var])} = {show(s.expr)}")
            case Store():
                past = "" if s.stream is None else f" past the caches{_suffix(_unless_sure(s.stream))}"
                how = f"{past}{_told(s.access)}"
                over = f"<{_names(s.axes)}>" if s.axes else ""
                lines.append(
                    f"{pad}{s.buffer.name}{over}[{show(s.offset)}] = {show(s.value)}{_suffix(s.mask)}{how}"
                )
            case Declare():
                values = f"{', '.join(map(show, s.values))}{' absorbed' if s.absorbed else ''}"
                lines.append(f"{pad}state {_defined(s.vars)} = {values}")
            case Update():
                values = f"{', '.join(map(show, s.values))}{_suffix(s.mask)}{'' if s.fused else ' rounding products'}"
                values += " absorbed" if s.absorbed else ""
                lines.append(f"{pad}{', '.join(map(repr, s.vars))} := {values}")
            case Collapse():
                of = ", ".join(map(repr, s.parts))
                order = f"{' pairwise' if s.pairwise else ''}{f' in blocks of {s.block}' if s.block else ''}"
                lines.append(
                    f"{pad}{_defined(s.vars)} = {s.reduction.name} of {of} over {_names(s.axes)}{order}"
                )
            case Prefix():
                of = ", ".join(map(repr, s.parts))
                lines.append(
                    f"{pad}{_defined(s.vars)} = running {s.reduction.name} of {of} along {s.axis.name}"
                )
            case Dot():
                sums = f" in sums of {s.chain}" if s.chain else ""
                lines.append(f"{pad}{s.acc} += dot({s.a}, {s.b}) over {s.k.name}{sums}{_told(s.method)}")
            case Check():
                over = f" over {_names(s.axes)}" if s.axes else ""
                lines.append(f"{pad}check {show(s.condition)}{_suffix(s.mask)} error {s.code}{over}")
            case Loop():
                step = f" step {s.tile}" if s.tile != 1 else ""
                stages = f" in {s.stages} stages" if s.stages != 1 else ""
                lines.append(f"{pad}for {s.axis.name} in {show(s.start)} .. {show(s.stop)}{step}{stages}")
                _show(s.body, depth + 1, lines)
            case Branch():
                lines.append(f"{pad}if {show(s.condition)}")
                _show(s.body, depth + 1, lines)
                if s.orelse:
                    lines.append(f"{pad}else")
                    _show(s.orelse, depth + 1, lines)


def rewrite_body(body: Sequence[Stmt], change: Callable[[Stmt], Sequence[Stmt] | None]) -> tuple[Stmt, ...]:
    """Replace statements bottom up: `change` returns the statements that stand for one (None = keep)."""
    out: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop):
            s = replace(s, body=rewrite_body(s.body, change))
        elif isinstance(s, Branch):
            s = replace(s, body=rewrite_body(s.body, change), orelse=rewrite_body(s.orelse, change))
        changed = change(s)
        out.extend((s,) if changed is None else changed)
    return tuple(out)
