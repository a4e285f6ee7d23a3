"""Form + Schedule -> TileProgram: scopes, passes, loops. One algorithm for every kernel.

`scope` computes what is wanted where some axes are bound: it takes the outermost unbound class, gives every fold over
it and every output that uses it a pass number, and writes one loop per pass. A pass number belongs to folds and
outputs only; pointwise expressions are evaluated on demand wherever they are needed, with a memo per scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from ..ir import dims
from ..ir.dtype import i64
from ..ir.expr import Axis, Expr, axes_of, axis, both, call, const, make, walk, where
from ..ir.program import (
    Buffer,
    Collapse,
    Compute,
    Declare,
    Dot,
    GridAxis,
    Loop,
    Place,
    Prefix,
    Stmt,
    TileProgram,
    Update,
    Var,
    value_of,
)  # fmt: skip
from ..ir.reduction import Reduction, highest, maximum, minimum
from .contract import Contraction, contraction, stored_half
from .evaluate import Evaluation, Kept
from .form import Form, Item, folds_read
from .keep import params_by_pass, worth_keeping
from .passes import pass_numbers
from .predicate import Truths
from .ranges import Piece, segments, split_range
from .roles import block_lengths, check_roles, grain
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
        schedule.warps,
        schedule.stages,
    )
    program.verify()
    return program


class _Lowering(Evaluation):
    def __init__(self, form: Form, schedule: Schedule) -> None:
        super().__init__(form, schedule)
        self.scratch: list[Buffer] = []
        self.ranges: dict[Axis, tuple[Expr, Expr]] = {}
        self.whole: list[tuple[Axis, int, Expr]] = []
        tile = lambda a: schedule.plan(a).tile  # noqa: E731
        found = {i: contraction(t, form.params, tile) for i, t in form.folds.items()}
        self.contractions = {i: product for i, product in found.items() if product is not None}
        """Classes that are one block of the grid point: tile and first value."""
        self.buffers: dict[tuple[Expr, Expr], Buffer] = {}
        self.states: dict[int, tuple[Var, ...]] = {}

    # -- binding

    def bind_grid(self) -> list[GridAxis]:
        grid: list[GridAxis] = []
        for c in self.schedule.classes:
            if c.role is not Role.GRID:
                continue
            if not c.chunk:
                self.scope.bound[c.axis] = 1
                grid.append(GridAxis(c.axis, c.axis.extent))
                continue
            point = Axis(f"g{c.axis.name[1:]}", dims.ceildiv(c.axis.extent, dims.integer(c.chunk)))
            start = dims.mul(axis(point), dims.integer(c.chunk))
            grid.append(GridAxis(point, point.extent))
            if c.tile == c.chunk and not self.schedule.peel:
                self.whole.append((c.axis, c.tile, start))
            else:
                stop = dims.minimum(c.axis.extent, dims.add(start, dims.integer(c.chunk)))
                self.ranges[c.axis] = (start, stop)
        return grid

    def run(self) -> None:
        self.whole += [(c.axis, c.tile, dims.ZERO) for c in self.schedule.classes if c.role is Role.RESIDENT]
        self.nest(self.whole, lambda: self.compute([], self.form.outputs))

    def nest(self, axes: Sequence[tuple[Axis, int, Expr]], inner: Callable[[], None]) -> None:
        """Bind classes that are one block: loops of a single step."""
        if not axes:
            inner()
            return
        (a, tile, start), *rest = axes
        mask = None if dims.divisible(a.extent, tile) else call("lt", axis(a), a.extent)
        body = self.block(a, tile, mask, lambda: self.nest(rest, inner))
        self.out.append(Loop(a, start, dims.add(start, dims.integer(tile)), tile, body))

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
        lengths = block_lengths(c, targets, self.schedule) if outermost and not merged else ()
        if lengths:
            self.walk_blocks(c, lengths, targets, outs)
        else:
            self.walk(c, targets, outs, merged)
        if outermost:
            for t in targets:
                self.finish(t, merged)
            self.scope.ready |= self.written & set(self.scope.kept)

    def walk(self, c: Axis, targets: Sequence[Item], outs: Sequence[Item], merged: dict[int, int]) -> None:
        tile = self.schedule.plan(c).tile
        exact = bool(self.schedule.plan(c).chunk) and dims.divisible(c.extent, tile)
        for piece in self.pieces(c, targets, outs):
            truths = piece.truths
            for start, stop, mask in segments(c, tile, piece, exact and not truths, self.schedule.peel):
                body = self.block(c, tile, mask, lambda: self.body(targets, outs, merged), truths)
                self.out.append(Loop(c, start, stop, tile, body))

    def walk_blocks(
        self, c: Axis, lengths: Sequence[int], targets: Sequence[Item], outs: Sequence[Item]
    ) -> None:
        """Several levels of states, so that no sum in floating point is one long chain."""
        if not lengths:
            self.walk(c, targets, outs, {})
            return
        start, stop = self.range_of(c)
        length, *rest = lengths
        step = dims.integer(length)
        point = Axis(f"b{len(lengths)}_{c.name[1:]}", dims.ceildiv(dims.sub(stop, start), step))
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
            self.walk_blocks(c, rest, targets, outs)
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
        tile = self.schedule.plan(c).tile if self.schedule.peel else 1
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
        kept = tuple(a for a in t.kept if a != t.scan)
        folded = t.reduce if self.schedule.lanes and t.id not in self.contractions else ()
        blocks = tuple(a for a in (*kept, *folded) if self.tile_of(a) > 1)
        names = tuple(self.var(d, blocks) for d in t.reduction.state)
        self.states[t.id] = names
        self.out.append(Declare(names, t.reduction.identity))

    def tile_of(self, a: Axis) -> int:
        return self.scope.bound.get(a) or self.schedule.plan(a).tile

    def lifted(self, t: Item) -> tuple[Expr, ...]:
        assert t.reduction is not None
        return t.reduction.lifted([self.eval(b) for b in t.body])

    def elements(self, t: Item) -> tuple[Sequence[Expr], Expr | None]:
        """The states of a step's elements and the mask of those that count: one per lane, or all merged into one."""
        mask = self.tail(t.reduce)
        lifted = self.lifted(t)
        if self.schedule.lanes or all(self.tile_of(a) == 1 for a in t.reduce):
            return lifted, mask
        return [value_of(v) for v in self.collapse(t, self.parts(t, lifted, mask))], None

    def parts(self, t: Item, lifted: Sequence[Expr], mask: Expr | None) -> tuple[Var, ...]:
        """The block of the states of elements, with the identity where `mask` does not hold."""
        assert t.reduction is not None
        blocks = tuple(a for a in t.axes if self.scope.bound[a] > 1)
        made = tuple(self.var(e.dtype, blocks) for e in lifted)
        for part, e, identity in zip(made, lifted, t.reduction.identity, strict=True):
            self.out.append(Compute(part, e if mask is None else call("where", mask, e, identity)))
        return made

    def update(self, t: Item, upstream: int | None) -> None:
        """state = merge(state, element), after repair if the upstream maximum has just moved."""
        assert t.reduction is not None
        if t.scan is not None:
            self.advance(t)
            return
        names = self.states[t.id]
        old: list[Expr] = [value_of(v) for v in names]
        product = self.contractions.get(t.id)
        operands = self.operands(product) if product is not None else None
        elements, mask = self.elements(t) if product is None else ((), None)
        if upstream is not None:
            k = degree(t, self.form.items[upstream])
            assert k is not None
            old = [call("mul", old[0], self.factor(upstream, k))]
        if product is None or operands is None:
            self.out.append(Update(names, t.reduction.merged(old, elements), mask))
            return
        if upstream is not None:
            self.out.append(Update(names, tuple(old)))
        self.out.append(Dot(names[0], *operands, product.k))

    def operands(self, product: Contraction) -> tuple[Var, Var]:
        """Both sides of a contraction as blocks, zero where its folded class is past the end."""
        mask = self.tail((product.k,))
        made: list[Var] = []
        for side in (product.left, product.right):
            half = stored_half(side, self.form.params)
            e = self.eval(make("read", side.args, half, side.value) if half is not None else side)
            if mask is not None and side.op != "read":
                e = call("where", mask, e, const(0.0, e.dtype))
            var = self.var(product.operand, self.blocks(e))
            self.out.append(Compute(var, call("cast", e, dtype=product.operand)))
            made.append(var)
        return made[0], made[1]

    def advance(self, t: Item) -> None:
        """One step of a running fold: the values at this step, and the state behind it."""
        assert t.reduction is not None and t.scan is not None
        names = self.states[t.id]
        old: list[Expr] = [value_of(v) for v in names]
        if self.tile_of(t.scan) == 1:
            self.out.append(Update(names, t.reduction.merged(old, self.lifted(t)), self.tail(t.reduce)))
            self.result(t, [value_of(v) for v in names])
            return
        parts = self.parts(t, self.lifted(t), self.tail((*t.reduce, t.scan)))
        inner = tuple(self.var(p.dtype, p.axes) for p in parts)
        self.out.append(Prefix(inner, parts, t.reduction, t.scan))
        here = [self.named(e) for e in t.reduction.merged(old, [value_of(v) for v in inner])]
        self.result(t, here)
        whole = tuple(self.var(p.dtype, tuple(a for a in p.axes if a != t.scan)) for p in parts)
        self.out.append(Collapse(whole, parts, t.reduction, t.scan))
        self.out.append(Update(names, t.reduction.merged(old, [value_of(v) for v in whole])))

    def run_ahead(self, t: Item) -> tuple[tuple[Var, ...], tuple[Expr, ...]]:
        """The new running maximum, before its state is assigned: dependents of this pass read it guarded
        against -inf."""
        (name,) = self.states[t.id]
        (element,), mask = self.elements(t)
        moved = call("maximum", value_of(name), element)
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
        # Neighbours in memory first: they are in one thread or in threads in step.
        for a in sorted(t.reduce, key=lambda a: a != self.schedule.lane):
            if a in parts[0].axes:
                if t.reduction.extreme is not None and not self.schedule.peel:
                    parts = self.first_extreme(t, t.reduction, parts, a)
                else:
                    parts = self.collapsed(t.reduction, parts, a)
        return parts

    def collapsed(self, reduction: Reduction, parts: tuple[Var, ...], a: Axis) -> tuple[Var, ...]:
        rest = tuple(x for x in parts[0].axes if x != a)
        names = tuple(self.var(p.dtype, rest) for p in parts)
        self.out.append(Collapse(names, parts, reduction, a))
        return names

    def first_extreme(
        self, t: Item, reduction: Reduction, parts: tuple[Var, ...], a: Axis
    ) -> tuple[Var, ...]:
        """The extreme value and its first place as two plain folds, of which machines have quick ones."""
        value, place = map(value_of, parts)
        plain = maximum if reduction.extreme == "maximum" else minimum
        (best,) = self.collapsed(plain(parts[0].dtype), parts[:1], a)
        here = call("eq", value, value_of(best))
        if best.dtype.is_float:
            here = call("or", here, both(call("isnan", value), call("isnan", value_of(best))) or here)
        none = _beyond(t.body[1])
        there = where(call("and", here, call("ge", place, const(0, i64))), place, none)
        candidates = self.var(i64, parts[1].axes)
        self.out.append(Compute(candidates, there))
        (first,) = self.collapsed(minimum(i64), (candidates,), a)
        found = self.var(i64, first.axes)
        self.out.append(
            Compute(found, where(call("eq", value_of(first), none), const(-1, i64), value_of(first)))
        )
        return best, found

    def result(self, t: Item, state: Sequence[Expr]) -> None:
        assert t.reduction is not None
        for r, e in enumerate(t.reduction.finished(state)):
            self.scope.results[t.id, r] = self.named(e)

    def tile_fold(self, t: Item) -> None:
        """A fold whose classes are all bound: computed in the tile."""
        product = self.contractions.get(t.id)
        if product is not None:
            operands = self.operands(product)
            self.declare(t)
            self.out.append(Dot(self.states[t.id][0], *operands, product.k))
            self.result(t, [value_of(v) for v in self.states[t.id]])
            return
        parts = self.parts(t, self.lifted(t), self.tail(t.reduce))
        self.result(t, [value_of(v) for v in self.collapse(t, parts)])

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
        self.scope.kept[x] = Kept(buffer, offset)
        self.written.discard(x)

    # -- evaluation


def _beyond(place: Expr) -> Expr:
    """A number that an index never reaches, a small one if its range is known."""
    index = all(x.dtype is i64 and x.op not in ("read", "value", "var") for x in walk(place))
    _, high = dims.bounds(place) if index else (None, None)
    return const(highest(i64), i64) if high is None or axes_of(high) else dims.add(high, dims.ONE)
