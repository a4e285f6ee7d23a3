"""Form + Schedule -> TileProgram: writes the loops that `plan` plans. One algorithm for every kernel.

Pointwise expressions are evaluated on demand wherever they are needed, with a memo per scope; where one needs a fold
that has no result yet, the loops that are planned for that fold are written there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tilewright.analysis.condition_ranges import Steps
from tilewright.analysis.loop_segments import (
    Hidden,
    LoopSegment,
    RangePiece,
    segments,
    split_range,
    tiled_segments,
)
from tilewright.analysis.predicate import constant_under
from tilewright.errors import VerifyError
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, const, walk
from tilewright.ir.form import Form, Item
from tilewright.ir.program import Branch, Buffer, GridAxis, Loop, Place, Stmt, TileProgram  # fmt: skip
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import LOWERING

from .access.carried_loads import with_carried_loads
from .access.descriptors import with_descriptors, with_stored_blocks
from .alignment import alignment_pays
from .data_bounds import compute_ends, readable_ends
from .evaluate import Evaluator, Kept
from .legality import check_roles, grain
from .plan import LoopPlan, known_at_start, plan_loops, plan_scope, takes_one_each
from .rescale import add_level, advance_states, finish_states
from .skip_tiles import skip_hidden
from .specialise.analyse import specialise
from .states import compute_in_tile, declare_state, stored_operand, widen_state
from .tile_lists import list_segments, loop_over_list


def lower(form: Form, schedule: Schedule) -> TileProgram:
    """The tile program of a form under a schedule. Raises IllegalSchedule, naming the law, if the roles are
    not legal, and VerifyError for a defect of ours."""
    check_roles(form, schedule)
    lowering = Lowering(form, schedule)
    grid = lowering.bind_grid()
    lowering.run()
    program = TileProgram(
        lowering.ev.params,
        tuple(grid),
        tuple(lowering.ev.out),
        tuple(lowering.scratch),
        schedule.tiling.lane,
        grain(form, schedule),
        schedule.launch.warps,
        schedule.launch.stages,
        beside=schedule.tiling.beside,
        reciprocals=schedule.math.reciprocals,
        order=schedule.launch.order if len(grid) > 1 else 0,
        contracted=schedule.math.contracted,
        own_copies=schedule.memory.own_copies,
        persistent=schedule.launch.persistent and len(grid) > 0,
    )
    if schedule.memory.carried:
        program = with_carried_loads(program)
    if schedule.memory.descriptors:
        program = with_descriptors(program)
    if schedule.memory.stored_pieces:
        program = with_stored_blocks(program, schedule.memory.stored_pieces)
    program = replace(program, aligned=schedule.tiling.peel or alignment_pays(program))
    if schedule.memory.warp_specialised:
        program = replace(program, warp_specialised=True)
        specialise(program)  # what is not understood is refused here
    try:
        program.verify()
    except ValueError as bad:
        raise VerifyError(str(bad), phase="schedule") from bad
    return program


class Lowering:
    """Writes the loops of a form under a schedule; `ev` writes what is computed inside them, and `at` is the loop whose
    step is being written."""

    def __init__(self, form: Form, schedule: Schedule) -> None:
        self.start, self.schedule = known_at_start(form, schedule), schedule
        self.plans = plan_loops(form, schedule)
        self.ev = Evaluator(self.start, self.compute)
        self.at: LoopPlan | None = None
        self.scratch: list[Buffer] = []
        self.ranges: dict[Axis, tuple[Expr, Expr]] = {}
        self.copies = 1
        """In how many places the step that is being written stands."""
        self.blocks: list[tuple[Axis, int, Expr]] = []
        """Classes that are one block of the grid point: tile and first value."""
        self.buffers: dict[tuple[Expr, Expr], Buffer] = {}

    # -- binding

    def bind_grid(self) -> list[GridAxis]:
        grid: list[GridAxis] = []
        for c in self.schedule.tiling.classes:
            if c.role is not Role.GRID:
                continue
            if not c.chunk:
                grid.append(GridAxis(c.axis, c.axis.extent))
                continue
            point = Axis(f"g{c.axis.name[1:]}", dims.ceildiv(c.axis.extent, dims.integer(c.chunk)))
            place = dims.sub(point.extent, dims.add(axis(point), dims.ONE)) if c.descending else axis(point)
            start = dims.mul(place, dims.integer(c.chunk))
            grid.append(GridAxis(point, point.extent))
            if c.axis in self.start.bound:
                self.blocks.append((c.axis, c.tile, start))
            else:
                stop = dims.minimum(c.axis.extent, dims.add(start, dims.integer(c.chunk)))
                self.ranges[c.axis] = (start, stop)
        return grid[::-1] if self.schedule.tiling.last_outermost else grid

    def run(self) -> None:
        classes = self.schedule.tiling.classes
        self.blocks += [(c.axis, c.tile, dims.ZERO) for c in classes if c.role is Role.RESIDENT]
        ends = [(tile, a.extent, start) for a, tile, start in self.blocks]
        uneven = [(tile, n, start) for tile, n, start in ends if not dims.divisible(n, tile)]
        inner = partial(self.write, self.plans)
        never = any((most := dims.static(n)) is not None and most < tile for tile, n, _ in uneven)
        if not self.schedule.tiling.tail_block or not uneven or never:
            self.ev.out += self.nest(self.blocks, inner)
            return
        inside = [call("le", dims.add(start, dims.integer(tile)), n) for tile, n, start in uneven]
        condition = functools.reduce(lambda p, q: call("and", p, q), inside)
        self.ev.out.append(
            Branch(condition, self.nest(self.blocks, inner, False), self.nest(self.blocks, inner))
        )

    def nest(
        self, axes: Sequence[tuple[Axis, int, Expr]], inner: Callable[[], None], masked: bool = True
    ) -> tuple[Stmt, ...]:
        """Classes that are one block bound around what `inner` writes: loops of a single step, of none where there are
        no elements. Unless `masked`, no block reaches past its extent."""
        if not axes:
            return self.ev.apart(self.ev.scope, inner)
        (a, tile, start), *rest = axes
        unmasked = not masked or dims.divisible(a.extent, tile)
        mask = None if unmasked else call("lt", axis(a), a.extent)
        stop = start if a.extent is dims.ZERO else dims.add(start, dims.integer(tile))
        span = start, dims.sub(stop, dims.ONE)
        put = lambda: self.ev.out.extend(self.nest(rest, inner, masked))  # noqa: E731
        return (Loop(a, start, stop, tile, self.ev.block(a, tile, mask, put, span)),)

    # -- scopes and passes

    def compute(self, fold: int) -> None:
        """Write what computes a fold that is read here and has no result: as planned for this step, unless what is
        known in a part of the range made another order of reading."""
        scope = self.ev.scope
        folds = frozenset(f for f, _ in scope.results)
        asked = self.at.asked if self.at is not None else ()
        found = next((a.loops for a in asked if a.fold == fold and a.known == folds), None)
        if found is None:
            known = replace(self.start, bound=scope.bound, folds=folds, fetching=self.ev.fetching)
            known = replace(known, kept=frozenset(scope.kept), ready=frozenset(scope.ready))
            found = plan_scope(known, (fold,), ())
        self.write(found)

    def write(self, plans: Sequence[LoopPlan]) -> None:
        """Write what is planned."""
        around = self.ev.fetching
        for plan in plans:
            for x in plan.scratch:
                self.place_in_scratch(x)
            self.ev.fetching = plan.fetching
            if plan.axis is not None:
                self.loop(plan, plan.axis)
                continue
            for r in plan.hoisted:
                self.ev.eval(r)
            for f in plan.folds:
                compute_in_tile(self.ev, f)
            for o in plan.outputs:
                self.ev.store(o)
        self.ev.fetching = around

    # -- loops

    def loop(self, loop: LoopPlan, c: Axis) -> None:
        """One loop over `c` that advances the states of folds and stores outputs."""
        if not loop.continues:
            for t in loop.folds:
                declare_state(self.ev, t, thin=not loop.levels and t.reduce == (c,))
        self.ev.hoist([r for i in loop.reached for r in self.steady(i)])
        before = self.ev.written
        if not loop.continues:
            # What a part of a loop around this one left in scratch, other parts did not.
            self.ev.written = set()
        self.walk_blocks(loop, c, loop.levels)
        if not loop.continues:
            finish_states(self.ev, loop.folds, loop.merges)
            self.ev.scope.ready.update(self.ev.written.intersection(self.ev.scope.kept))
            self.ev.written |= before

    def walk(self, loop: LoopPlan, c: Axis) -> None:
        """The segments of a loop."""
        targets, tile = loop.folds, loop.tile
        masks = () if self.ev.scope.kept else loop.skipped

        def body_of_step() -> None:
            skip_hidden(self.ev, masks, lambda: self.body(loop))
            self.complete(loop)

        parts, around = self.segments(loop, c), self.copies
        self.copies *= max(1, len(parts))
        for s in parts:
            for t in targets:
                widen_state(self.ev, t, c, s.truths, s.mask)
            piece = partial(
                self.piece, c, tile, s, (lambda: self.leave(loop)) if s.left_out else body_of_step
            )
            if s.entries is not None:
                self.ev.out.append(loop_over_list(self.ev, s, s.entries, piece))
            # Where there is one step: no loop, whose loads would be under way ahead of time.
            elif s.once and any(takes_one_each(self.schedule, t) for t in targets):
                only = replace(piece(s.start, s.stop), stop=dims.add(s.start, dims.integer(tile)))
                self.ev.out.append(Branch(call("lt", s.start, s.stop), (only,)))
            else:
                self.ev.out.append(piece(s.start, s.stop))
        self.copies = around

    def piece(
        self, c: Axis, tile: int, s: LoopSegment, inner: Callable[[], None], start: Expr, stop: Expr
    ) -> Loop:
        """The loop over `c` from `start` to `stop`, which lie in a segment."""
        span = start, dims.sub(stop, dims.ONE)
        return Loop(c, start, stop, tile, self.ev.block(c, tile, s.mask, inner, span, s.truths))

    def walk_blocks(self, loop: LoopPlan, c: Axis, lengths: Sequence[int]) -> None:
        """Several levels of states, so that no sum in floating point is one long chain."""
        if not lengths:
            self.walk(loop, c)
            return
        targets = loop.folds
        start, stop = self.range_of(c)
        length, *rest = lengths
        step = dims.integer(length)
        point = Axis(f"b{len(lengths)}_{c.name[1:]}", dims.ceildiv(dims.sub(stop, start), step))
        first = dims.add(start, dims.mul(axis(point), step))
        last = dims.add(first, step)
        totals = {t.id: self.ev.states[t.id] for t in targets}

        def inner() -> None:
            for t in targets:
                declare_state(self.ev, t)
            even = dims.divisible(dims.sub(stop, start), length)
            self.ranges[c] = first, last if even else dims.minimum(stop, last)
            self.walk_blocks(loop, c, rest)
            self.ranges[c] = (start, stop)
            add_level(self.ev, targets, totals, loop.merges)

        body = self.ev.block(point, 1, None, inner)
        self.ev.states |= totals
        self.ev.out.append(Loop(point, dims.ZERO, point.extent, 1, body))

    def segments(self, loop: LoopPlan, c: Axis) -> list[LoopSegment]:
        """Parts of a loop's range in which conditions do not change."""
        scope, tile = self.ev.scope, loop.tile
        exact = c in self.ranges and dims.divisible(c.extent, tile)
        roots = [r for i in loop.reached for r in self.start.hinted.items[i.id].roots]
        trimmed = () if loop.outputs or not self.schedule.reductions.trim else loop.folds
        start, stop = self.range_of(c)
        unwritten = self.unwritten(loop)
        if not loop.tiled:
            scalars = frozenset(a for a, t in scope.bound.items() if t == 1)
            pieces = split_range(c, (start, stop), tile, roots, scalars, trimmed, unwritten, scope.truths)
            if not trimmed and not unwritten and self.is_too_long(len(pieces), roots):
                pieces = [RangePiece(start, stop)]
            peel = self.schedule.tiling.peel
            return [s for p in pieces for s in segments(c, tile, p, exact and not p.truths, peel)]
        steps = Steps(c, start, stop, tile, exact)
        listed = None if unwritten else list_segments(self.ev, steps, loop.listed, roots)
        if listed is not None:
            return listed
        ends, hidden = readable_ends(self.ev), Hidden() if unwritten else loop.hidden
        made = tiled_segments(steps, roots, scope.spans, hidden, loop.split, ends)
        return compute_ends(self.ev, made, ends)

    def is_too_long(self, pieces: int, roots: Sequence[Expr]) -> bool:
        """Whether `roots` written in each of some pieces of a range, in each segment of the loops around, are more than
        the next compiler should read. What conditions decide is then masked in one piece."""
        nodes = len({x for root in roots for x in walk(root)})
        return pieces > 1 and self.copies * pieces * nodes > LOWERING.max_copied_nodes

    def unwritten(self, loop: LoopPlan) -> list[Expr]:
        """The expressions that a pass is to leave in scratch."""
        if not self.ev.scope.kept:
            return []
        inside = {x for i in loop.reached for r in i.roots for x in walk(r)}
        return [x for x in self.ev.scope.kept if x not in self.ev.scope.ready and x in inside]

    def complete(self, loop: LoopPlan) -> None:
        """Leave in scratch what a step did not need because its conditions are known: later passes ask for it under
        others."""
        for x in self.unwritten(loop):
            if all(a.value in self.ev.scope.bound for a in axes_of(x)):
                self.ev.part(x, None)

    def leave(self, loop: LoopPlan) -> None:
        """Put into scratch what later passes find there, where the folds of a loop take only identities."""
        for x in self.unwritten(loop):
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
        divisible = dims.divisible(dims.sub(stop, start), c.tile)
        mask = None if divisible else call("lt", axis(c.axis), stop)
        span = start, dims.sub(stop, dims.ONE)
        body = self.ev.block(c.axis, c.tile, mask, lambda: self.fill(x, value), span)
        self.ev.out.append(Loop(c.axis, start, stop, c.tile, body))

    def range_of(self, c: Axis) -> tuple[Expr, Expr]:
        return self.ranges.get(c, (dims.ZERO, c.extent))

    def steady(self, item: Item) -> tuple[Expr, ...]:
        """The expressions of an item of which parts may be the same in every step."""
        product = self.ev.contractions.get(item.id)
        sides = () if product is None else (product.left, product.right)
        return tuple(stored_operand(self.ev, side) for side in sides) or item.roots

    def body(self, loop: LoopPlan) -> None:
        """What a step of a loop does."""
        around, self.at = self.at, loop
        advance_states(self.ev, loop.advanced, loop.merges)
        self.write(loop.inside)
        self.at = around

    def place_in_scratch(self, x: Expr) -> None:
        free = {a.value for a in axes_of(x)}
        classes = [p.axis for p in self.schedule.tiling.classes]
        axes = [a for a in classes if a in free and self.ev.scope.bound.get(a, 2) > 1]
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
