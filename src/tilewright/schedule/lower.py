"""Form + Schedule -> TileProgram: scopes, passes, loops. One algorithm for every kernel.

`scope` computes what is wanted where some axes are bound: it takes the outermost unbound class, gives every fold over
it and every output that uses it a pass number, and writes one loop per pass. A pass number belongs to folds and
outputs only; pointwise expressions are evaluated on demand wherever they are needed, with a memo per scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ..ir import dims
from ..ir.dtype import DType
from ..ir.expr import SCALARS, Axis, Expr, axes_of, axis, both, call, const, rebuild, substitute, walk
from ..ir.program import (
    Buffer,
    Check,
    Collapse,
    Compute,
    Declare,
    GridAxis,
    Load,
    Loop,
    Place,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    value_of,
)  # fmt: skip
from .checks import DIVISION_ERROR, INDEX_ERROR, divisor, unsafe
from .form import Form, Item, folds_read
from .keep import params_by_pass, worth_keeping
from .passes import pass_numbers
from .predicate import Truths, decide
from .ranges import Piece, segments, split_range
from .roles import block_length, check_roles, grain
from .schedule import Role, Schedule
from .transport import degree


def lower(form: Form, schedule: Schedule) -> TileProgram:
    """The tile program of a form under a schedule. Raises IllegalSchedule, naming the law, if the roles are
    not legal."""
    check_roles(form, schedule)
    lowering = _Lowering(form, schedule)
    grid = lowering.bind_grid()
    lowering.run()
    buffers = lowering.params
    program = TileProgram(
        buffers,
        tuple(grid),
        tuple(lowering.out),
        tuple(lowering.scratch),
        schedule.lane,
        grain(form, schedule),
    )
    program.verify()
    return program


@dataclass(frozen=True, slots=True)
class _Kept:
    """Where an expression is held in scratch between passes."""

    buffer: Buffer
    offset: Expr


@dataclass(slots=True)
class _Scope:
    """What is known here: evaluated expressions, results of folds, bound axes with their tiles, tails that need masks,
    expressions with a place in scratch, those of them whose loop is complete, and conditions known to hold or not."""

    memo: dict[tuple[Expr, Expr | None], Expr] = field(default_factory=dict)
    results: dict[tuple[int, int], Expr] = field(default_factory=dict)
    bound: dict[Axis, int] = field(default_factory=dict)
    tails: dict[Axis, Expr] = field(default_factory=dict)
    kept: dict[Expr, _Kept] = field(default_factory=dict)
    ready: set[Expr] = field(default_factory=set)
    truths: dict[Expr, bool] = field(default_factory=dict)

    def child(self) -> _Scope:
        return _Scope(
            dict(self.memo), dict(self.results), dict(self.bound), dict(self.tails), dict(self.kept), set(self.ready),
            dict(self.truths),
        )  # fmt: skip


class _Lowering:
    def __init__(self, form: Form, schedule: Schedule) -> None:
        self.form, self.schedule = form, schedule
        self.params = tuple(
            Buffer(f"p{k}", v.dtype, size)
            for k, (v, size) in enumerate(zip(form.params, form.sizes, strict=True))
        )
        self.scratch: list[Buffer] = []
        self.out: list[Stmt] = []
        self.scope = _Scope()
        self.vars: dict[int, Var] = {}
        self.ranges: dict[Axis, tuple[Expr, Expr]] = {}
        self.shared = _shared([r for i in form.items for r in i.roots])
        self.buffers: dict[tuple[Expr, Expr], Buffer] = {}
        self.written: set[Expr] = set()
        self.states: dict[int, tuple[Var, ...]] = {}
        self.fetching: set[int] = set()

    # -- binding

    def bind_grid(self) -> list[GridAxis]:
        grid: list[GridAxis] = []
        for c in self.schedule.classes:
            if c.role is not Role.GRID:
                continue
            if c.chunk:
                point = Axis(f"g{c.axis.name[1:]}", dims.ceildiv(c.axis.extent, dims.integer(c.chunk)))
                start = dims.mul(axis(point), dims.integer(c.chunk))
                stop = dims.minimum(c.axis.extent, dims.add(start, dims.integer(c.chunk)))
                self.ranges[c.axis] = (start, stop)
                grid.append(GridAxis(point, point.extent))
            else:
                self.scope.bound[c.axis] = 1
                grid.append(GridAxis(c.axis, c.axis.extent))
        return grid

    def run(self) -> None:
        resident = [c for c in self.schedule.classes if c.role is Role.RESIDENT]
        self.nest([(c.axis, c.tile) for c in resident], lambda: self.compute([], self.form.outputs))

    def nest(self, axes: Sequence[tuple[Axis, int]], inner: Callable[[], None]) -> None:
        """Bind resident classes: loops of a single step whose tile covers the extent."""
        if not axes:
            inner()
            return
        (a, tile), *rest = axes
        mask = None if dims.static(a.extent) == tile else call("lt", axis(a), a.extent)
        body = self.block(a, tile, mask, lambda: self.nest(rest, inner))
        self.out.append(Loop(a, dims.ZERO, dims.integer(tile), tile, body))

    def block(
        self, a: Axis, tile: int, mask: Expr | None, inner: Callable[[], None], truths: Truths | None = None
    ) -> tuple[Stmt, ...]:
        """The statements that `inner` writes with `a` bound; what it learns is forgotten afterwards."""
        outer_scope, outer_out = self.scope, self.out
        self.scope, self.out = outer_scope.child(), []
        if truths:
            self.scope.truths |= truths
            tested = set(truths)
            self.scope.memo = {k: v for k, v in self.scope.memo.items() if not tested & set(walk(k[0]))}
        self.scope.bound[a] = tile
        if mask is not None:
            self.scope.tails[a] = mask
        inner()
        body = tuple(self.out)
        self.scope, self.out = outer_scope, outer_out
        return body

    # -- scopes and passes

    def compute(self, wanted: Iterable[int], outputs: Sequence[Item]) -> None:
        """Write what computes the folds `wanted` and stores `outputs`, given what is bound."""
        cone = self.cone([*wanted, *(f for o in outputs for f in folds_read(o.roots))])
        users = [*cone, *outputs]
        open_ = [
            c.axis
            for c in self.schedule.classes
            if c.axis not in self.scope.bound and any(c.axis in u.axes for u in users)
        ]
        if not open_:
            for f in cone:
                self.tile_fold(f)
            for o in outputs:
                self.store(o)
            return
        c = open_[0]
        passes, merged = pass_numbers(cone, outputs, c, self.schedule.online)
        over = lambda i: c in i.reduce or i.scan == c  # noqa: E731
        for x in worth_keeping(cone, outputs, c, passes, self.schedule):
            if x not in self.scope.kept:
                self.keep(x)
        numbers = sorted(
            {passes[i.id] for i in cone if over(i)} | {passes[o.id] for o in outputs if c in o.axes}
        )
        read = params_by_pass([i for i in users if c in i.axes], passes, self.scope.kept)
        for n, q in enumerate(numbers):
            self.free_folds(cone, c)
            again = read[q] if n else set[int]()
            self.fetching = again.intersection(self.schedule.ahead).difference(
                *(read[r] for r in numbers[n + 1 :])
            )
            targets = [i for i in cone if over(i) and passes[i.id] == q]
            self.loop(c, targets, [o for o in outputs if c in o.axes and passes[o.id] == q], merged, True)
        self.compute(
            [f.id for f in cone if c not in f.axes and f.id in wanted],
            [o for o in outputs if c not in o.axes],
        )

    def cone(self, roots: Iterable[int]) -> list[Item]:
        """Folds needed for `roots` and not known here, producers first."""
        order: list[Item] = []
        seen: set[int] = set()

        def visit(f: int) -> None:
            if f in seen or (f, 0) in self.scope.results:
                return
            seen.add(f)
            for d in folds_read(self.form.items[f].roots):
                visit(d)
            order.append(self.form.items[f])

        for r in roots:
            visit(r)
        return order

    def free_folds(self, cone: Sequence[Item], c: Axis) -> None:
        """Before a loop over `c`: compute folds that do not use it and wait for nothing that does."""
        known = {f for f, _ in self.scope.results}
        ready: list[int] = []
        for i in cone:
            if (
                i.id not in known
                and c not in i.axes
                and all(d in known or d in ready for d in folds_read(i.roots))
            ):
                ready.append(i.id)
        if ready:
            self.compute(ready, [])

    # -- loops

    def loop(
        self, c: Axis, targets: Sequence[Item], outs: Sequence[Item], merged: dict[int, int], outermost: bool
    ) -> None:
        """One loop over `c` that advances the states of `targets` and stores `outs`."""
        if outermost:
            for t in targets:
                self.declare(t)
        self.hoist([r for i in (*targets, *outs) for r in i.roots], c)
        length = block_length(c, targets, self.schedule) if outermost and not merged else None
        if length is None:
            self.walk(c, targets, outs, merged)
        else:
            self.walk_blocks(c, length, targets, outs)
        if outermost:
            for t in targets:
                self.finish(t, merged)
            self.scope.ready |= self.written & set(self.scope.kept)

    def walk(self, c: Axis, targets: Sequence[Item], outs: Sequence[Item], merged: dict[int, int]) -> None:
        tile = self.schedule.plan(c).tile
        exact = bool(self.schedule.plan(c).chunk) and dims.divisible(c.extent, tile)
        for piece in self.pieces(c, targets, outs):
            truths = piece.truths
            for start, stop, mask in segments(c, tile, piece, exact and not truths):
                body = self.block(c, tile, mask, lambda: self.body(targets, outs, merged), truths)
                self.out.append(Loop(c, start, stop, tile, body))

    def walk_blocks(self, c: Axis, length: int, targets: Sequence[Item], outs: Sequence[Item]) -> None:
        """Two levels of states, so that no sum in floating point is one long chain."""
        start, stop = self.range_of(c)
        step = dims.integer(length)
        point = Axis(f"b{c.name[1:]}", dims.ceildiv(dims.sub(stop, start), step))
        first = dims.add(start, dims.mul(axis(point), step))
        last = dims.add(first, step)
        whole = {t.id: self.states[t.id] for t in targets}

        def inner() -> None:
            for t in targets:
                self.declare(t)
            self.ranges[c] = (
                first,
                last if dims.divisible(dims.sub(stop, start), length) else dims.minimum(stop, last),
            )
            self.walk(c, targets, outs, {})
            self.ranges[c] = (start, stop)
            for t in targets:
                assert t.reduction is not None
                old, new = whole[t.id], self.states[t.id]
                values = t.reduction.merged([value_of(v) for v in old], [value_of(v) for v in new])
                self.out.append(Update(old, values))

        body = self.block(point, 1, None, inner)
        self.states |= whole
        self.out.append(Loop(point, dims.ZERO, point.extent, 1, body))

    def pieces(self, c: Axis, targets: Sequence[Item], outs: Sequence[Item]) -> list[Piece]:
        """The parts of the range of `c` in which conditions do not change."""
        roots = [r for i in (*targets, *outs) for r in self.reachable(i)]
        scalars = frozenset(a for a, t in self.scope.bound.items() if t == 1)
        trimmed = () if outs or not self.schedule.trim else targets
        tile = self.schedule.plan(c).tile
        return split_range(c, self.range_of(c), tile, roots, scalars, trimmed, self.scope.truths)

    def range_of(self, c: Axis) -> tuple[Expr, Expr]:
        return self.ranges.get(c, (dims.ZERO, c.extent))

    def reachable(self, item: Item) -> list[Expr]:
        """The expressions of an item and of the folds that it would have computed inside its loop."""
        pending = [f for f in folds_read(item.roots) if (f, 0) not in self.scope.results]
        return [*item.roots, *(r for f in pending for r in self.form.items[f].roots)]

    def body(self, targets: Sequence[Item], outs: Sequence[Item], merged: dict[int, int]) -> None:
        late: list[tuple[tuple[Var, ...], tuple[Expr, ...]]] = []
        inner: dict[Axis, list[Item]] = {}
        upstream = set(merged.values())
        for t in targets:
            rest = [
                c.axis for c in self.schedule.classes if c.axis in t.reduce and c.axis not in self.scope.bound
            ]
            if rest:
                inner.setdefault(rest[0], []).append(t)
            elif t.id in upstream:
                late.append(self.run_ahead(t))
            else:
                self.update(t, merged.get(t.id))
        for c, group in inner.items():
            self.loop(c, group, [], merged, False)
        for names, values in late:
            self.out.append(Update(names, values))
        if outs:
            self.compute([], outs)

    def declare(self, t: Item) -> None:
        assert t.reduction is not None
        blocks = tuple(a for a in t.axes if self.tile_of(a) > 1)
        names = tuple(self.var(d, blocks) for d in t.reduction.state)
        self.states[t.id] = names
        self.out.append(Declare(names, t.reduction.identity))

    def tile_of(self, a: Axis) -> int:
        return self.scope.bound.get(a) or self.schedule.plan(a).tile

    def lifted(self, t: Item) -> tuple[Expr, ...]:
        assert t.reduction is not None
        return t.reduction.lifted([self.eval(b) for b in t.body])

    def update(self, t: Item, upstream: int | None) -> None:
        """state = merge(state, element), after repair if the upstream maximum has just moved."""
        assert t.reduction is not None
        names = self.states[t.id]
        old: list[Expr] = [value_of(v) for v in names]
        lifted = self.lifted(t)
        if upstream is not None:
            k = degree(t, self.form.items[upstream])
            assert k is not None
            old = [call("mul", old[0], self.factor(upstream, k))]
        values = t.reduction.merged(old, lifted)
        self.out.append(Update(names, values, self.tail(t.reduce)))
        if t.scan is not None:
            self.result(t, [value_of(v) for v in names])

    def run_ahead(self, t: Item) -> tuple[tuple[Var, ...], tuple[Expr, ...]]:
        """The new running maximum, before its state is assigned: dependents of this pass read it guarded
        against -inf."""
        (name,) = self.states[t.id]
        (element,) = self.lifted(t)
        moved = call("maximum", value_of(name), element)
        mask = self.tail(t.reduce)
        new = self.named(moved if mask is None else call("where", mask, moved, value_of(name)))
        infinite = call("eq", new, const(float("-inf"), new.dtype))
        self.scope.results[t.id, 0] = self.named(call("where", infinite, const(0.0, new.dtype), new))
        return (name,), (new,)

    def factor(self, upstream: int, k: Fraction) -> Expr:
        (name,) = self.states[upstream]
        gap = call("sub", value_of(name), self.scope.results[upstream, 0])
        return self.named(call("exp", gap if k == 1 else call("mul", gap, const(k, gap.dtype))))

    def finish(self, t: Item, merged: dict[int, int]) -> None:
        """After the loops: merge the lanes of a state and compute its results."""
        assert t.reduction is not None
        if t.scan is not None:
            return
        parts = self.states[t.id]
        if t.id in merged:
            parts = (self.rescaled(t, merged[t.id]),)
        self.result(t, [value_of(v) for v in self.collapse(t, parts)])

    def rescaled(self, t: Item, upstream: int) -> Var:
        """Lanes ran with maxima of their own: bring every lane to the common one before they are added."""
        (name,), (lane,) = self.states[t.id], self.states[upstream]
        if not lane.axes:
            return name
        k = degree(t, self.form.items[upstream])
        assert k is not None
        top = self.scope.results[upstream, 0]
        zero, empty = const(0.0, name.dtype), call("eq", top, const(float("-inf"), top.dtype))
        gap = call("sub", value_of(lane), call("where", empty, zero, top))
        scaled = call("mul", value_of(name), call("exp", call("mul", gap, const(k, gap.dtype))))
        var = self.var(name.dtype, name.axes)
        self.out.append(Compute(var, scaled))
        return var

    def collapse(self, t: Item, parts: tuple[Var, ...]) -> tuple[Var, ...]:
        assert t.reduction is not None
        for a in t.reduce:
            if a in parts[0].axes:
                rest = tuple(x for x in parts[0].axes if x != a)
                names = tuple(self.var(p.dtype, rest) for p in parts)
                self.out.append(Collapse(names, parts, t.reduction, a))
                parts = names
        return parts

    def result(self, t: Item, state: Sequence[Expr]) -> None:
        assert t.reduction is not None
        for r, e in enumerate(t.reduction.finished(state)):
            self.scope.results[t.id, r] = self.named(e)

    def tile_fold(self, t: Item) -> None:
        """A fold whose classes are all bound: computed in the tile."""
        assert t.reduction is not None
        mask = self.tail(t.reduce)
        parts: list[Var] = []
        blocks = tuple(a for a in t.axes if self.scope.bound[a] > 1)
        for e, identity in zip(self.lifted(t), t.reduction.identity, strict=True):
            part = self.var(e.dtype, blocks)
            self.out.append(Compute(part, e if mask is None else call("where", mask, e, identity)))
            parts.append(part)
        self.result(t, [value_of(v) for v in self.collapse(t, tuple(parts))])

    def tail(self, axes: Iterable[Axis]) -> Expr | None:
        mask: Expr | None = None
        for a in axes:
            mask = both(mask, self.scope.tails.get(a))
        return mask

    # -- what is kept in scratch between passes

    def keep(self, x: Expr) -> None:
        free = {a.value for a in axes_of(x)}
        axes = [
            p.axis for p in self.schedule.classes if p.axis in free and self.scope.bound.get(p.axis, 2) > 1
        ]
        offset, size = dims.ZERO, dims.ONE
        for a in sorted(axes, key=lambda a: a == self.schedule.lane, reverse=True):
            start, _ = self.range_of(a)
            length = self.schedule.plan(a).chunk or a.extent
            offset = dims.add(offset, dims.mul(dims.sub(axis(a), start), size))
            size = dims.mul(size, length if isinstance(length, Expr) else dims.integer(length))
        buffer = self.buffers.get((x, size))
        if buffer is None:
            buffer = self.buffers[x, size] = Buffer(f"s{len(self.scratch)}", x.dtype, size, Place.SCRATCH)
            self.scratch.append(buffer)
        self.scope.kept[x] = _Kept(buffer, offset)
        self.written.discard(x)

    # -- evaluation

    def var(self, dtype: DType, axes: tuple[Axis, ...]) -> Var:
        v = Var(len(self.vars), dtype, axes)
        self.vars[v.id] = v
        return v

    def blocks(self, e: Expr) -> tuple[Axis, ...]:
        """Block axes of an evaluated expression."""
        found: dict[Axis, None] = {}
        for x in walk(e):
            if x.op == "var" and isinstance(x.value, int):
                found |= dict.fromkeys(self.vars[x.value].axes)
            elif x.op == "axis" and isinstance(x.value, Axis) and self.scope.bound.get(x.value, 1) > 1:
                found[x.value] = None
        return tuple(found)

    def named(self, e: Expr) -> Expr:
        if not e.args:
            return e
        v = self.var(e.dtype, self.blocks(e))
        self.out.append(Compute(v, e))
        return value_of(v)

    def eval(self, e: Expr, guard: Expr | None = None) -> Expr:
        """`e` with reads loaded and folds resolved; `guard` is the condition under which its reads are meant."""
        if e.op in ("const", "symbol", "axis"):
            return e
        key = (e, guard if guard is not None and unsafe(e, self.params) else None)
        done = self.scope.memo.get(key)
        if done is None:
            done = self.evaluated(e, key[1])
            self.scope.memo[key] = done
        return done

    def evaluated(self, e: Expr, guard: Expr | None) -> Expr:
        if e in self.scope.kept and e in self.scope.ready:
            return self.reload(e)
        if e.op == "value" and isinstance(e.value, tuple):
            if e.value not in self.scope.results:
                self.compute([e.value[0]], [])
            return self.scope.results[e.value]
        if e.op == "read":
            return self.load(e, guard)
        if e.op == "where":
            asked = decide(e.args[0], self.scope.truths)
            if asked.op == "const":
                return self.eval(e.args[1] if asked.value else e.args[2], guard)
            condition = self.eval(asked, guard)
            yes = self.eval(e.args[1], both(guard, condition))
            no = self.eval(e.args[2], both(guard, call("not", condition)))
            result = call("where", condition, yes, no)
        else:
            result = rebuild(e, tuple(self.eval(a, guard) for a in e.args))
            if divisor(e) is not None:
                tested = call("ne", result.args[1], const(0, e.dtype))
                self.check(tested, DIVISION_ERROR, guard)
        if e in self.scope.kept:
            result = self.named(result)
            where = self.scope.kept[e]
            self.written.add(e)
            blocks = self.blocks(result)
            self.out.append(Store(where.buffer, where.offset, result, blocks, self.tail(blocks)))
        return self.named(result) if e in self.shared and result.args else result

    def reload(self, e: Expr) -> Expr:
        where = self.scope.kept[e]
        blocks = self.blocks(where.offset)
        var = self.var(e.dtype, blocks)
        self.out.append(Load(var, where.buffer, where.offset, self.tail(blocks), const(0, e.dtype)))
        return value_of(var)

    def check(self, tested: Expr, code: int, guard: Expr | None) -> None:
        blocks = self.blocks(tested)
        self.out.append(Check(tested, code, blocks, both(self.tail(blocks), guard)))

    def load(self, e: Expr, guard: Expr | None) -> Expr:
        assert isinstance(e.value, int)
        offset = self.eval(e.args[0], guard)
        blocks = self.blocks(offset)
        mask = both(self.tail(blocks), guard)
        for condition in self.form.checks.get(e.args[0], ()):
            self.check(self.eval(condition, guard), INDEX_ERROR, guard)
        if mask is not None:
            blocks = tuple(dict.fromkeys(blocks + self.blocks(mask)))
        var = self.var(e.dtype, blocks)
        other = None if mask is None else const(0, e.dtype)
        self.out.append(Load(var, self.params[e.value], offset, mask, other, self.ahead(e.value, offset)))
        return value_of(var)

    def ahead(self, param: int, offset: Expr) -> Expr | None:
        """Where the next grid point reads `param`, if this load, in the last pass that reads it, is to fetch it."""
        if param not in self.fetching:
            return None
        point = axis([c.axis for c in self.schedule.classes if c.role is Role.GRID][-1])
        return substitute(offset, {point: dims.add(point, dims.ONE)})

    def hoist(self, roots: Sequence[Expr], c: Axis) -> None:
        """Evaluate before the loop what does not change in it."""
        seen: set[Expr] = set()

        def visit(x: Expr) -> None:
            if x in seen or x.op in ("const", "axis", "symbol"):
                return
            seen.add(x)
            if self.fixed(x, c):
                if (
                    x.op != "value"
                    and (x, None) not in self.scope.memo
                    and not unsafe(x, self.params)
                    and not _is_index(x)
                ):
                    self.scope.memo[x, None] = self.named(self.eval(x))
                return
            for a in x.args:
                visit(a)

        for r in roots:
            visit(r)

    def fixed(self, x: Expr, c: Axis) -> bool:
        for y in walk(x):
            if isinstance(y.value, Axis) and y.value not in self.scope.bound:
                return False
            if y.op == "value" and y.value not in self.scope.results:
                return False
        return True

    def store(self, o: Item) -> None:
        value = self.eval(o.body[0])
        blocks = tuple(dict.fromkeys((*self.blocks(o.offset), *self.blocks(value))))
        stream = o.param in self.schedule.stream
        self.out.append(Store(self.params[o.param], o.offset, value, blocks, self.tail(blocks), stream))


def _shared(roots: Sequence[Expr]) -> set[Expr]:
    """Data expressions with more than one parent: they get a name, so they are computed once."""
    parents: dict[Expr, int] = {}
    seen: set[Expr] = set()
    for r in roots:
        parents[r] = parents.get(r, 0) + 1
        for x in walk(r):
            if x not in seen:
                seen.add(x)
                for a in x.args:
                    parents[a] = parents.get(a, 0) + 1
    return {x for x, n in parents.items() if n > 1 and x.op in SCALARS and not _is_index(x)}


def _is_index(x: Expr) -> bool:
    return all(y.op not in ("read", "value", "var") for y in walk(x))
