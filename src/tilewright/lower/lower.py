"""Form + Schedule -> TileProgram: scopes, passes, loops. One algorithm for every kernel.

`scope` computes what is wanted where some axes are bound: it takes the outermost unbound class, gives every fold over
it and every output that uses it a pass number, and writes one loop per pass. A pass number belongs to folds and
outputs only; pointwise expressions are evaluated on demand wherever they are needed, with a memo per scope.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from tilewright.analysis.condition_ranges import Steps
from tilewright.analysis.loop_segments import Segment, segments, split_range, tiled_segments
from tilewright.analysis.predicate import constant_under
from tilewright.errors import VerifyError
from tilewright.form.implied import drop_implied
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, const, walk
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.program import Branch, Buffer, GridAxis, Loop, Place, Stmt, TileProgram  # fmt: skip
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims

from .alignment import alignment_pays
from .data_bounds import compute_ends, readable_ends
from .descriptors import with_descriptors
from .evaluate import Evaluator, Kept, plain_reads
from .legality import block_lengths, check_roles, grain
from .passes import Merges, Numbers, pass_numbers
from .rescale import add_level, advance_states, finish_states
from .scratch import params_by_pass, worth_keeping
from .skip_tiles import hiding_masks, skip_hidden
from .states import compute_in_tile, declare_state, stored_operand, takes_one_each, widen_state
from .tile_lists import list_segments, loop_over_list


def lower(form: Form, schedule: Schedule) -> TileProgram:
    """The tile program of a form under a schedule. Raises IllegalSchedule, naming the law, if the roles are
    not legal, and VerifyError for a defect of ours."""
    check_roles(form, schedule)
    lowering = Lowering(form, schedule)
    grid = lowering.bind_grid()
    lowering.run()
    buffers = lowering.ev.params
    program = TileProgram(
        buffers,
        tuple(grid),
        tuple(lowering.ev.out),
        tuple(lowering.scratch),
        schedule.tiling.lane,
        grain(form, schedule),
        schedule.launch.warps,
        schedule.launch.stages,
        schedule.tiling.beside,
        schedule.math.reciprocals,
        contracted=schedule.math.contracted,
    )
    if schedule.memory.descriptors:
        program = with_descriptors(program)
    program = replace(program, aligned=schedule.tiling.peel or alignment_pays(program))
    try:
        program.verify()
    except ValueError as bad:
        raise VerifyError(str(bad), phase="schedule") from bad
    return program


class Lowering:
    """Writes the loops of a form under a schedule; `ev` writes what is computed inside them."""

    def __init__(self, form: Form, schedule: Schedule) -> None:
        self.form, self.schedule = drop_implied(form), schedule
        self.ev = Evaluator(self.form, schedule, self.compute)
        self.hinted = form
        self.scratch: list[Buffer] = []
        self.ranges: dict[Axis, tuple[Expr, Expr]] = {}
        self.whole: list[tuple[Axis, int, Expr]] = []
        """Classes that are one block of the grid point: tile and first value."""
        self.buffers: dict[tuple[Expr, Expr], Buffer] = {}

    # -- binding

    def bind_grid(self) -> list[GridAxis]:
        grid: list[GridAxis] = []
        for c in self.schedule.tiling.classes:
            if c.role is not Role.GRID:
                continue
            if not c.chunk:
                self.ev.scope.bound[c.axis] = 1
                self.ev.scope.spans[c.axis] = axis(c.axis), axis(c.axis)
                grid.append(GridAxis(c.axis, c.axis.extent))
                continue
            point = Axis(f"g{c.axis.name[1:]}", dims.ceildiv(c.axis.extent, dims.integer(c.chunk)))
            place = dims.sub(point.extent, dims.add(axis(point), dims.ONE)) if c.descending else axis(point)
            start = dims.mul(place, dims.integer(c.chunk))
            grid.append(GridAxis(point, point.extent))
            if c.tile == c.chunk and (self.ev.contractions or not self.schedule.tiling.peel):
                self.whole.append((c.axis, c.tile, start))
            else:
                stop = dims.minimum(c.axis.extent, dims.add(start, dims.integer(c.chunk)))
                self.ranges[c.axis] = (start, stop)
        return grid[::-1] if self.schedule.tiling.last_outermost else grid

    def run(self) -> None:
        self.whole += [
            (c.axis, c.tile, dims.ZERO) for c in self.schedule.tiling.classes if c.role is Role.RESIDENT
        ]
        uneven = [
            (tile, a.extent, start) for a, tile, start in self.whole if not dims.divisible(a.extent, tile)
        ]
        inner = partial(self.compute, [], self.form.outputs)
        never = any((most := dims.static(n)) is not None and most < tile for tile, n, _ in uneven)
        if not self.schedule.tiling.tail_block or not uneven or never:
            self.ev.out += self.nest(self.whole, inner)
            return
        inside = [call("le", dims.add(start, dims.integer(tile)), n) for tile, n, start in uneven]
        whole = functools.reduce(lambda p, q: call("and", p, q), inside)
        self.ev.out.append(Branch(whole, self.nest(self.whole, inner, False), self.nest(self.whole, inner)))

    def nest(
        self, axes: Sequence[tuple[Axis, int, Expr]], inner: Callable[[], None], masked: bool = True
    ) -> tuple[Stmt, ...]:
        """Classes that are one block bound around what `inner` writes: loops of a single step, of none where there are
        no elements. Unless `masked`, no block reaches past its extent."""
        outer, self.ev.out = self.ev.out, []
        if not axes:
            inner()
        else:
            (a, tile, start), *rest = axes
            whole = not masked or dims.divisible(a.extent, tile)
            mask = None if whole else call("lt", axis(a), a.extent)
            stop = start if a.extent is dims.ZERO else dims.add(start, dims.integer(tile))
            span = start, dims.sub(stop, dims.ONE)
            put = lambda: self.ev.out.extend(self.nest(rest, inner, masked))  # noqa: E731
            self.ev.out.append(Loop(a, start, stop, tile, self.ev.block(a, tile, mask, put, span)))
        made, self.ev.out = tuple(self.ev.out), outer
        return made

    # -- scopes and passes

    def compute(self, wanted: Iterable[int], outputs: Sequence[Item]) -> None:
        """Write what computes the folds `wanted` and stores `outputs`, given what is bound."""
        cone = self.cone([*wanted, *(f for o in outputs for f in folds_read(o.roots))])
        users = [*cone, *outputs]
        open_ = [
            c.axis
            for c in self.schedule.tiling.classes
            if c.axis not in self.ev.scope.bound and any(c.axis in u.axes for u in users)
        ]
        if not open_:
            if cone:
                self.load_early(cone, outputs)
            for f in cone:
                compute_in_tile(self.ev, f)
            for o in outputs:
                self.ev.store(o)
            return
        c = open_[0]
        cone, passes, merged = self.passes(cone, outputs, c)
        users = [*cone, *outputs]
        over = lambda i: c in i.reduce or i.scan == c  # noqa: E731
        for x in worth_keeping(cone, outputs, c, passes, self.schedule):
            if x not in self.ev.scope.kept:
                self.keep(x)
        numbers = sorted(
            {passes[i.id] for i in cone if over(i)} | {passes[o.id] for o in outputs if c in o.axes}
        )
        read = params_by_pass([i for i in users if c in i.axes], passes, self.ev.scope.kept)
        around = self.ev.fetching
        for n, q in enumerate(numbers):
            self.free_folds(cone, c)
            self.ev.fetching = around.intersection(read[q]).difference(*(read[r] for r in numbers[n + 1 :]))
            targets = [i for i in cone if over(i) and passes[i.id] == q]
            self.loop(c, targets, [o for o in outputs if c in o.axes and passes[o.id] == q], merged, True)
        self.ev.fetching = around
        self.compute(
            [f.id for f in cone if c not in f.axes and f.id in wanted],
            [o for o in outputs if c not in o.axes],
        )

    def load_early(self, folds: Sequence[Item], outputs: Sequence[Item]) -> None:
        """Load what outputs read besides `folds`, if that is no more than what these read: memory is waited for
        once, not again behind them."""
        first = dict.fromkeys(r for f in folds for b in f.body for r in plain_reads(b))
        known = {x for f in folds for root in f.roots for x in walk(root)}
        found = dict.fromkeys(r for o in outputs for r in plain_reads(o.body[0]) if r not in known)
        if self.block_bytes(found) <= min(self.schedule.memory.hoisted_bytes, self.block_bytes(first)):
            for r in (*first, *found) if found else ():
                self.ev.eval(r)

    def block_bytes(self, reads: Iterable[Expr]) -> int:
        """Bytes of the blocks that are read."""
        size = 0
        for r in reads:
            assert isinstance(r.value, int)
            block = math.prod(
                self.ev.scope.bound.get(a.value, 1) for a in axes_of(r) if isinstance(a.value, Axis)
            )
            size += block * self.ev.params[r.value].dtype.bytes
        return size

    def passes(
        self, cone: list[Item], outputs: Sequence[Item], c: Axis
    ) -> tuple[list[Item], Numbers, Merges]:
        """Pass numbers along `c`; the cone, with what merged folds need beside them; how folds are merged."""
        online = self.schedule.reductions.online
        open_ = (
            {f: i for f, i in self.form.folds.items() if (f, 0) not in self.ev.scope.results}
            if online
            else None
        )
        while True:
            numbers, merged = pass_numbers(cone, outputs, c, open_, self.schedule.reductions.merged_each_step)
            inside = {i.id for i in cone}
            beside = [f for m in merged.values() for f in m.beside if f not in inside]
            if not beside:
                return cone, numbers, merged
            cone = self.cone([*(i.id for i in cone), *beside])

    def cone(self, roots: Iterable[int]) -> list[Item]:
        """Folds needed for `roots` and not known here, producers first."""
        order: list[Item] = []
        seen: set[int] = set()

        def visit(f: int) -> None:
            if f in seen or (f, 0) in self.ev.scope.results:
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
        known = {f for f, _ in self.ev.scope.results}
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
        self, c: Axis, targets: Sequence[Item], outs: Sequence[Item], merged: Merges, outermost: bool
    ) -> None:
        """One loop over `c` that advances the states of `targets` and stores `outs`."""
        rescaled = any(t.id in merged and t.id in self.ev.contractions for t in targets)
        plain = not any(t.id in merged or t.id in self.ev.contractions for t in targets)
        levels = not rescaled if outermost else plain
        lengths = block_lengths(c, targets, self.schedule, nested=plain) if levels else ()
        if outermost:
            for t in targets:
                declare_state(self.ev, t, thin=not lengths and t.reduce == (c,))
        self.ev.hoist([r for i in (*targets, *outs) for j in self.reachable(i) for r in self.steady(j)], c)
        before = self.ev.written
        if outermost:
            # What a part of a loop around this one left in scratch, other parts did not.
            self.ev.written = set()
        self.walk_blocks(c, lengths, targets, outs, merged)
        if outermost:
            finish_states(self.ev, targets, merged)
            self.ev.scope.ready |= self.ev.written & set(self.ev.scope.kept)
            self.ev.written |= before

    def walk(self, c: Axis, targets: Sequence[Item], outs: Sequence[Item], merged: Merges) -> None:
        tile = self.schedule.plan(c).tile
        exact = c in self.ranges and dims.divisible(c.extent, tile)
        masks = () if outs or self.ev.scope.kept else hiding_masks(self.ev, c, targets)

        def body_of_step() -> None:
            skip_hidden(self.ev, masks, lambda: self.body(targets, outs, merged))

        joint = self.schedule.reductions.lane_states and any(
            t.id in merged or takes_one_each(self.ev, t) for t in targets
        )
        for s in self.segments(c, tile, exact, targets, outs, joint):
            for t in targets:
                widen_state(self.ev, t, c, s.truths, s.mask)
            span = s.start, dims.sub(s.stop, dims.ONE)
            inner = (lambda: self.leave(targets)) if s.left_out else body_of_step
            if s.entries is not None:
                self.ev.out.append(
                    loop_over_list(self.ev, s, s.entries, partial(self.one_step, c, tile, s, inner))
                )
                continue
            body = self.ev.block(c, tile, s.mask, inner, span, s.truths)
            # Where there is one step: no loop, whose loads would be under way ahead of time.
            if s.once and any(takes_one_each(self.ev, t) for t in targets):
                only = Loop(c, s.start, dims.add(s.start, dims.integer(tile)), tile, body)
                self.ev.out.append(Branch(call("lt", s.start, s.stop), (only,)))
            else:
                self.ev.out.append(Loop(c, s.start, s.stop, tile, body))

    def one_step(self, c: Axis, tile: int, s: Segment, inner: Callable[[], None], start: Expr) -> Loop:
        """A step of a segment, from `start` on."""
        stop = dims.add(start, dims.integer(tile))
        span = start, dims.sub(stop, dims.ONE)
        return Loop(c, start, stop, tile, self.ev.block(c, tile, s.mask, inner, span, s.truths))

    def walk_blocks(
        self, c: Axis, lengths: Sequence[int], targets: Sequence[Item], outs: Sequence[Item], merged: Merges
    ) -> None:
        """Several levels of states, so that no sum in floating point is one long chain."""
        if not lengths:
            self.walk(c, targets, outs, merged)
            return
        start, stop = self.range_of(c)
        length, *rest = lengths
        step = dims.integer(length)
        point = Axis(f"b{len(lengths)}_{c.name[1:]}", dims.ceildiv(dims.sub(stop, start), step))
        first = dims.add(start, dims.mul(axis(point), step))
        last = dims.add(first, step)
        whole = {t.id: self.ev.states[t.id] for t in targets}

        def inner() -> None:
            for t in targets:
                declare_state(self.ev, t)
            self.ranges[c] = (
                first,
                last if dims.divisible(dims.sub(stop, start), length) else dims.minimum(stop, last),
            )
            self.walk_blocks(c, rest, targets, outs, merged)
            self.ranges[c] = (start, stop)
            add_level(self.ev, targets, whole, merged)

        body = self.ev.block(point, 1, None, inner)
        self.ev.states |= whole
        self.ev.out.append(Loop(point, dims.ZERO, point.extent, 1, body))

    def segments(
        self, c: Axis, tile: int, exact: bool, targets: Sequence[Item], outs: Sequence[Item], joint: bool
    ) -> list[Segment]:
        """The loops over `c`: parts of its range in which conditions do not change. `joint`: lanes have states that
        depend on each other, which a mask makes dear."""
        reached = [j for i in (*targets, *outs) for j in self.reachable(i)]
        roots = [r for i in reached for r in self.hinted.items[i.id].roots]
        trimmed = () if outs or not self.schedule.reductions.trim else targets
        start, stop = self.range_of(c)
        product = any(c in i.axes and i.id in self.ev.contractions for i in reached)
        kept = self.unwritten(reached)
        if product or not self.schedule.tiling.peel:
            steps = Steps(c, start, stop, tile)
            hinted = () if kept else [self.hinted.items[t.id] for t in trimmed]
            whole = start is dims.ZERO and stop is c.extent
            listed = list_segments(self.ev, c, tile, whole, hinted, roots)
            if listed is not None:
                return listed
            ends = readable_ends(self.ev)
            found = tiled_segments(steps, roots, self.ev.scope.spans, hinted, exact, product or joint, ends)
            return compute_ends(self.ev, found, ends)
        scalars = frozenset(a for a, t in self.ev.scope.bound.items() if t == 1)
        pieces = split_range(c, (start, stop), tile, roots, scalars, trimmed, kept, self.ev.scope.truths)
        return [
            s for p in pieces for s in segments(c, tile, p, exact and not p.truths, self.schedule.tiling.peel)
        ]

    def unwritten(self, items: Sequence[Item]) -> list[Expr]:
        """The expressions of `items` that this pass is to leave in scratch."""
        inside = {x for i in items for r in i.roots for x in walk(r)}
        return [x for x in self.ev.scope.kept if x not in self.ev.scope.ready and x in inside]

    def leave(self, targets: Sequence[Item]) -> None:
        """Put into scratch what later passes find there, where the folds `targets` take only identities."""
        for x in self.unwritten([j for t in targets for j in self.reachable(t)]):
            value = constant_under(x, self.ev.scope.truths)
            assert value is not None
            self.fill(x, const(value, x.dtype))

    def fill(self, x: Expr, value: Expr) -> None:
        """Put one value into all of the place of `x` in scratch that belongs to what is bound here."""
        placed = {a.value for a in axes_of(self.ev.scope.kept[x].offset)} - set(self.ev.scope.bound)
        c = next((c for c in self.schedule.tiling.classes if c.axis in placed), None)
        if c is None:
            self.ev.leave_in_scratch(x, value)
            return
        start, stop = self.range_of(c.axis)
        whole = dims.divisible(dims.sub(stop, start), c.tile)
        mask = None if whole else call("lt", axis(c.axis), stop)
        body = self.ev.block(
            c.axis, c.tile, mask, lambda: self.fill(x, value), (start, dims.sub(stop, dims.ONE))
        )
        self.ev.out.append(Loop(c.axis, start, stop, c.tile, body))

    def range_of(self, c: Axis) -> tuple[Expr, Expr]:
        return self.ranges.get(c, (dims.ZERO, c.extent))

    def reachable(self, item: Item) -> list[Item]:
        """An item and the folds that it would have computed inside its loop."""
        return [*self.cone(folds_read(item.roots)), item]

    def steady(self, item: Item) -> tuple[Expr, ...]:
        """The expressions of an item of which parts may be the same in every step."""
        product = self.ev.contractions.get(item.id)
        return (
            item.roots
            if product is None
            else (stored_operand(self.ev, product.left), stored_operand(self.ev, product.right))
        )

    def body(self, targets: Sequence[Item], outs: Sequence[Item], merged: Merges) -> None:
        here: list[Item] = []
        inner: dict[Axis, list[Item]] = {}
        for t in targets:
            rest = [
                c.axis
                for c in self.schedule.tiling.classes
                if c.axis in t.reduce and c.axis not in self.ev.scope.bound
            ]
            if rest:
                inner.setdefault(rest[0], []).append(t)
            else:
                here.append(t)
        advance_states(self.ev, here, merged)
        for c, group in inner.items():
            self.compute(self.whole_before(c, group), [])
            self.loop(c, group, [], merged, False)
        if outs:
            self.compute([], outs)

    def whole_before(self, c: Axis, targets: Iterable[Item]) -> list[int]:
        """The folds that `targets` read in a loop over `c`, but that need all of `c` themselves, or what they are made
        of does: a step of that loop has a part of it only."""
        found: dict[int, None] = {}
        todo = list(dict.fromkeys(f for t in targets for f in folds_read(t.roots)))
        for f in todo:
            if c in self.form.items[f].kept:
                todo += [d for d in folds_read(self.form.items[f].roots) if d not in todo]
            elif any(c in g.reduce for g in self.cone([f])):
                found[f] = None
        return list(found)

    def keep(self, x: Expr) -> None:
        free = {a.value for a in axes_of(x)}
        axes = [
            p.axis
            for p in self.schedule.tiling.classes
            if p.axis in free and self.ev.scope.bound.get(p.axis, 2) > 1
        ]
        offset, size = dims.ZERO, dims.ONE
        for a in sorted(axes, key=lambda a: a == self.schedule.tiling.lane, reverse=True):
            start, _ = self.range_of(a)
            length = self.schedule.plan(a).chunk or a.extent
            offset = dims.add(offset, dims.mul(dims.sub(axis(a), start), size))
            size = dims.mul(size, length if isinstance(length, Expr) else dims.integer(length))
        buffer = self.buffers.get((x, size))
        if buffer is None:
            buffer = self.buffers[x, size] = Buffer(f"s{len(self.scratch)}", x.dtype, size, Place.SCRATCH)
            self.scratch.append(buffer)
        self.ev.scope.kept[x] = Kept(buffer, offset)
        self.ev.written.discard(x)
