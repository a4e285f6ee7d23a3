"""Tiles, warps and stages of kernels with products of blocks, where threads share a grid point.

Candidates are enumerated and held against the target's limits: accumulators and scores in registers without spills, the
operands of all stages in shared memory. The best is the quickest by a model in which blocks that share a core overlap
what each of them does in turn: products, special functions, the rest of a step. Measured entries overrule the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tilewright.analysis.contraction import contraction, product_sides
from tilewright.analysis.loop_segments import growth
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import i64
from tilewright.ir.expr import SCALARS, SPECIAL_COST, Axis, Expr, axes_of, walk
from tilewright.ir.form import Form, Item, folds_read, reached_folds
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.schedule.cpu.vectors import points
from tilewright.schedule.table import Tuning
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import MATMUL_BLOCKS
from tilewright.tuning.thresholds import CONTRACTION, GPU_MATMUL

from .block_memory import (
    BlockProducts,
    Count,
    ProductBlocks,
    SomeBlocks,
    any_of,
    largest,
    made_products,
    negated,
    products_of,
    registers,
    shared_bytes,
    where,
)
from .block_shape import Shape


@dataclass(frozen=True, slots=True)
class TileLimits:
    """What tiles are held to: `most` are bounds of extents, `lists` lengths that tiles divide if they can."""

    most: Mapping[Axis, int]
    lists: Mapping[Axis, int]


class BlockModel:
    """What blocks of products of one form take: what no tile decides is found once for all of them."""

    def __init__(self, known: BlockProducts, target: Target, hints: SizeHints) -> None:
        self.known, self.target, self.hints = known, target, hints
        form = known.form
        self.grid = frozenset(a for a in form.classes() if all(a in i.axes for i in form.items))
        self.points = {i: points(form.items[i], hints) for i in known.sums}
        self.repeats = {i: _repeats(known, form.items[i]) for i in known.sums}
        """Streamed classes in each step of which a product is computed again."""
        self.calculating = _calculating(known, target, hints)
        """Seconds of special functions and of plain operations."""
        self.part = _part(known)
        self.folds_beside = any(
            i.id not in known.sums and not set(known.streamed).isdisjoint(i.reduce)
            for i in form.folds.values()
        )
        """Whether other folds go through the steps of products, as in attention, or a norm in a product's own loop."""

    def turns(self, a: Axis, c: SomeBlocks) -> Count:
        """How many tiles a class has."""
        return -(-max(1, self.hints.estimate(a.extent)) // c.tiles[a])

    def counts(self, c: SomeBlocks) -> tuple[Count, Count]:
        """Grid points, and steps of each."""
        count: Count = 1.0  # arrays of whole numbers would wrap around
        steps: Count = 1.0
        for a, tile in c.tiles.items():
            turns = self.turns(a, c)
            if a in self.grid:
                count = count * turns
            elif a in self.known.streamed:
                steps = steps * turns
            else:
                steps = steps * where(tile == 1, turns, 1)
        return count, steps

    def arriving(self, c: SomeBlocks, count: Count) -> Count:
        """Seconds in which the last cache hands `count` blocks their operands."""
        cache, walked = self.target.level(MemoryKind.L2), set(self.known.streamed)
        if cache is None:
            return 0.0
        read = [
            (side, s.product)
            for s in made_products(self.known, c.tiles)
            for side in s.sides
            if side.side.op == "read"
        ]
        total: Count = 0
        for n, (side, product) in enumerate(read):
            size = c.tiles[side.own] * c.tiles[product.k] * product.operand.bytes
            for a in {side.own, product.k} & walked:
                size = size * self.turns(a, c)
            again = any_of(side.is_same_block(other, c.tiles) for other, _ in read[n + 1 :])
            total = total + where(again, 0, size)
        return count * total / (cache.bandwidth * GPU_MATMUL.read_over_copy_ratio)

    def multiplying(self, c: SomeBlocks) -> Count:
        """Seconds of the matrix units."""
        target = self.target
        total: Count = 0.0
        for s in made_products(self.known, c.tiles):
            product = s.product
            rates = [u.flops for u in target.matrix_units if u.operand == product.operand.name]
            width = c.tiles[product.n]
            waste: Count = 1.0
            for a in (product.m, product.n, product.k):
                extent = max(1, self.hints.estimate(a.extent))
                waste = waste * (self.turns(a, c) * c.tiles[a] / extent)
            again: Count = 1
            for a in self.repeats[s.item.id]:
                again = again * self.turns(a, c)
            rate = (
                max(rates) * width / (width + GPU_MATMUL.half_rate_columns)
                if rates
                else target.flops * GPU_MATMUL.reached_without_units_ratio
            )
            total = total + 2 * self.points[s.item.id] * waste * again / rate
        return total

    def seconds(self, c: SomeBlocks) -> Count:
        """Modelled seconds, memory apart."""
        target = self.target
        threads = c.warps * target.lanes
        room, near = target.level(MemoryKind.REGISTER), target.level(MemoryKind.SHARED)
        together = target.threads // threads
        held = registers(self.known, c, target)
        over = largest(0, held - target.vector_registers)
        if room is not None:
            together = -largest(-together, -(room.capacity // (4 * threads * (held - over))))
        if near is not None:
            needed = largest(1, shared_bytes(self.known, c))
            together = -largest(-together, -(near.capacity // needed))
        together = largest(1, together)
        count, steps = self.counts(c)
        share = _least(1.0, count / target.cores)
        # Where other folds share the loop, products are priced as if all cores had blocks. Priced by its blocks, small
        # attention takes its keys in parts, which no clock has been asked about.
        multiplying = self.multiplying(c) / (1.0 if self.folds_beside else share)
        parts = [multiplying, *(work / share for work in self.calculating)]
        most = _most(parts)
        waves = count / (target.cores * together)
        tail = where(waves > 1, -(-count // (target.cores * together)) / waves, 1.0)
        rounds = _most([1.0, count / target.cores])
        split = any(s.split for s in made_products(self.known, c.tiles))
        step = GPU_MATMUL.step_seconds * (GPU_MATMUL.piece_products if split else 1)
        step = step + where((c.stages == 1) & (steps > 1), target.latency, 0.0)
        waiting = sum(parts) - most + step * steps * rounds
        if near is not None:  # registers that are written to memory and read again in each step
            waiting = waiting + 8.0 * over * threads * count * steps / (near.bandwidth * share)
        busy = (most + waiting / _least(together, rounds)) * tail
        return _most([busy, self.arriving(c, count)]) * self.part


def _most(numbers: Sequence[Count]) -> Count:
    found = numbers[0]
    for number in numbers[1:]:
        found = where(number > found, number, found)
    return found


def _least(one: Count, other: Count) -> Count:
    return where(other < one, other, one)


@dataclass(frozen=True, slots=True, eq=False)
class BlockGrid:
    """All candidates at once: tiles of a class, warps and stages, each along a dim of its own. Which of them `may` be,
    and the numbers that stand along the dims."""

    tiles: Mapping[Axis, Count]
    warps: Count
    stages: Count
    spread: tuple[int, ...]
    halves: bool
    may: NDArray[np.bool_]

    def candidate(self, place: tuple[int, ...]) -> ProductBlocks:
        """The one at a place."""
        at = lambda n: int(np.broadcast_to(n, self.may.shape)[place])  # noqa: E731
        tiles = {a: t if isinstance(t, int) else at(t) for a, t in self.tiles.items()}
        return ProductBlocks(tiles, at(self.warps), at(self.stages), self.spread, self.halves)


def product_blocks(
    form: Form, shape: Shape, limits: TileLimits, target: Target, tuning: Tuning, hints: SizeHints
) -> ProductBlocks | None:
    """Blocks for matrix units; None if the form has no sum of products, or not all of them can have their tiles."""
    best: list[tuple[float, ProductBlocks]] = []
    for known in _products(form, shape, limits.most, target, hints):
        grid_of = _grid(known, hints)
        legal = None if grid_of is None else _legal(known, grid_of, limits, target)
        if grid_of is None or legal is None:
            continue
        measured = _measured(known, grid_of, legal, tuning, hints)
        if measured is not None:
            return measured
        model = BlockModel(known, target, hints)
        seconds = np.where(legal, np.broadcast_to(model.seconds(grid_of), legal.shape), np.inf)
        least = float(seconds.min())
        same = [grid_of.candidate(place) for place in _places(seconds <= least)]
        best.append((least, _further_ahead(model, least, same)))
    return min(best, key=lambda f: f[0])[1] if best else None


def other_blocks(
    form: Form, shape: Shape, limits: TileLimits, target: Target, hints: SizeHints
) -> list[tuple[float, ProductBlocks]]:
    """One of each tile and number of warps, with modelled seconds, the quickest first. Registers are counted as they
    are where a schedule is given: more of them fit than `product_blocks` counts on."""
    found: list[tuple[float, ProductBlocks]] = []
    for known in _products(form, shape, limits.most, target, hints):
        grid_of = _grid(known, hints)
        legal = None if grid_of is None else _legal(known, grid_of, limits, target, packed=True)
        if grid_of is None or legal is None:
            continue
        modelled = BlockModel(known, target, hints).seconds(grid_of)
        seconds = np.where(legal, np.broadcast_to(modelled, legal.shape), np.inf)
        for place in _places(np.isfinite(seconds.min(-1))):
            stages = int(seconds[place].argmin())
            found.append((float(seconds[place][stages]), grid_of.candidate((*place, stages))))
    return sorted(found, key=lambda f: f[0])


def _products(
    form: Form, shape: Shape, most: Mapping[Axis, int], target: Target, hints: SizeHints
) -> Iterator[BlockProducts]:
    """The products of a form with the classes that are tiled: those that products pass on walked in steps, and, where
    registers may hold one of them, that one whole; nothing if it has none."""
    found = {i.id: s for i in form.folds.values() if (s := product_sides(i)) is not None}
    if not found:
        return
    tiled = dict.fromkeys(
        max(side, key=lambda x: hints.estimate(x.extent)) for s in found.values() for side in s
    )
    passed = {a for s in found.values() for side in s[:2] for a in side} & {
        a for s in found.values() for a in s[2]
    }
    passed |= {a for i in form.folds.values() if i.id not in found for a in i.reduce}
    held = [n for a in tiled if a not in passed and (n := most.get(a, 0)) > GPU_MATMUL.max_untiled_extent]
    whole = [GPU_MATMUL.max_untiled_extent]
    if passed and held and min(held) <= GPU_MATMUL.max_held_extent:
        whole.append(
            GPU_MATMUL.max_held_extent
        )  # beside scores, nothing is computed again for the rest of it
    for extent in whole:
        streamed, fixed = _streamed(shape, tiled, most, passed, extent)
        grid = tuple(a for a in shape.grid if a in tiled)
        yield BlockProducts(form, grid, tuple(tiled), streamed, fixed, tuple(found), target.singles)


def _further_ahead(model: BlockModel, seconds: float, same: Sequence[ProductBlocks]) -> ProductBlocks:
    """Of blocks that the model takes for equal, the first; with the loads of more steps under way if operands arrive
    in not much less than all of the time: it does not see how long one step waits for them."""
    first = same[0]
    arriving = model.arriving(first, model.counts(first)[0]) * model.part
    if arriving < GPU_MATMUL.min_arriving_ratio * seconds:
        return first
    return max((c for c in same if replace(c, stages=first.stages) == first), key=lambda c: c.stages)


def _places(chosen: NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """Where candidates are that are `chosen`, in order."""
    return [tuple(map(int, place)) for place in np.argwhere(chosen)]


def _streamed(
    shape: Shape, tiled: Collection[Axis], most: Mapping[Axis, int], passed: Collection[Axis], whole: int
) -> tuple[tuple[Axis, ...], dict[Axis, int]]:
    """The classes that steps walk, and the tiles of the others: those that products pass on have a block of a step at
    most, others one of `whole` elements."""
    fixed = dict.fromkeys((*shape.grid, *shape.inner), 1)
    streamed: list[Axis] = []
    for a in tiled:
        if a in shape.grid:
            continue
        if most.get(a, whole + 1) <= (MATMUL_BLOCKS.streamed_tiles[1] if a in passed else whole):
            fixed[a] = max(CONTRACTION.min_block_side, next_power_of_two(most[a]))
        else:
            streamed.append(a)
    return tuple(streamed), fixed


def _legal(
    known: BlockProducts, grid: BlockGrid, limits: TileLimits, target: Target, *, packed: bool = False
) -> NDArray[np.bool_] | None:
    """Which candidates fit shared memory, and registers (see `registers`) as well as any do; None if none does."""
    shared = target.level(MemoryKind.SHARED)
    fit = grid.may if shared is None else grid.may & (shared_bytes(known, grid) <= shared.capacity)
    if not fit.any():
        return None
    held = np.broadcast_to(registers(known, grid, target, packed=packed), fit.shape)
    room = min(GPU_MATMUL.max_registers, target.vector_registers)
    split = any(s.split for s in made_products(known, grid.tiles))
    limit = max(2 * room if split else room, int(held[fit].min()))
    legal = fit & (held <= limit)
    whole = legal & negated(any_of(n % grid.tiles.get(a, 1) != 0 for a, n in limits.lists.items()))
    return whole if whole.any() else legal


def _grid(known: BlockProducts, hints: SizeHints) -> BlockGrid | None:
    """The candidates; None if the sums are no products of blocks."""
    open_ = (*known.grid, *known.streamed)
    on_grid, inside = MATMUL_BLOCKS.grid_tiles, MATMUL_BLOCKS.streamed_tiles
    if len(known.sums) > MATMUL_BLOCKS.max_wide_products:
        on_grid, inside = ((*MATMUL_BLOCKS.small_tiles, *tiles) for tiles in (on_grid, inside))
    sizes = {a: ladder(a, on_grid if a in known.grid else inside, hints) for a in open_}
    made = products_of(known, dict(known.fixed) | {a: min(tiles) for a, tiles in sizes.items()})
    if made is None:
        return None
    halves = all(s.product.operand.is_half for s in made)
    stages = (1,) if not known.streamed else MATMUL_BLOCKS.stages if halves else (1, *MATMUL_BLOCKS.stages)
    shape = (*map(len, sizes.values()), len(MATMUL_BLOCKS.warps), len(stages))

    def along(numbers: Sequence[int], dim: int) -> NDArray[np.int64]:
        return np.array(numbers, np.int64).reshape([n if d == dim else 1 for d, n in enumerate(shape)])

    tiles = dict(known.fixed) | {a: along(tiles, n) for n, (a, tiles) in enumerate(sizes.items())}
    warps = along(MATMUL_BLOCKS.warps, len(sizes))
    may = np.ones(shape, np.bool_)
    for a in (s.product.m for s in made if s.split):
        rows = GPU_MATMUL.warp_group_rows
        if a in known.streamed:
            may &= tiles[a] >= min(rows, hints.estimate(a.extent))
        may &= (tiles[a] < rows) | (warps * CONTRACTION.min_block_side <= tiles[a])
    alone = _lone_folds(known)
    spread = tuple(i.id for i in alone if any(a in sizes or known.fixed[a] > 1 for a in i.kept))
    return BlockGrid(tiles, warps, along(stages, len(sizes) + 1), spread, halves, may)


def ladder(a: Axis, sizes: Sequence[int], hints: SizeHints) -> list[int]:
    """Tiles for a class: none that is more than the next power of two of its extent."""
    extent = hints.likely(a.extent)
    if extent is None:
        return list(sizes)
    top = max(CONTRACTION.min_block_side, next_power_of_two(extent))
    return sorted({min(s, top) for s in sizes})


def _lone_folds(known: BlockProducts) -> tuple[Item, ...]:
    """Folds over a streamed class, no products, that neither follow another fold over that class nor are followed: if a
    block has a class that they keep, each of its elements has a state of its own, and they are merged once, after the
    loop."""
    found: list[Item] = []
    read = {x.id: folds_read(x.roots) for x in known.form.folds.values()}
    for i in known.form.folds.values():
        over = {a for a in i.reduce if a in known.streamed}
        if i.id in known.sums or not over:
            continue
        beside = [*read[i.id], *(x for x, sources in read.items() if i.id in sources)]
        if not any(over & set(known.form.items[x].reduce) for x in beside):
            found.append(i)
    return tuple(found)


def _part(known: BlockProducts) -> float:
    """The part of the work that masks leave, as far as it is easily seen: half under a diagonal."""
    return 0.5 if any(growth(known.form.items, a) for a in known.grid) else 1.0


def blocks_of(form: Form, schedule: Schedule, target: Target) -> tuple[BlockProducts, ProductBlocks] | None:
    """The products of blocks that a form has under a schedule, and these blocks; None if it has none."""
    tiles = {p.axis: p.tile for p in schedule.tiling.classes}
    sums = [i.id for i in form.folds.values() if contraction(i, form.params, tiles.__getitem__) is not None]
    if not sums:
        return None
    walked = (p for p in schedule.tiling.classes if p.role in (Role.STREAMED, Role.SCAN))
    streamed = tuple(p.axis for p in walked if p.tile > 1)
    grid = tuple(p.axis for p in schedule.tiling.classes if p.role is Role.GRID and p.tile > 1)
    known = BlockProducts(form, grid, (*grid, *streamed), streamed, tiles, tuple(sums), target.singles)
    launch = schedule.launch
    return known, ProductBlocks(tiles, launch.warps, launch.stages, schedule.reductions.lane_states_of)


def product_seconds(form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float | None:
    """Modelled seconds of a schedule with products of blocks, memory apart; None if it has none."""
    found = blocks_of(form, schedule, target)
    if found is None:
        return None
    known, blocks = found
    return float(BlockModel(known, target, hints).seconds(blocks))


def _repeats(known: BlockProducts, item: Item) -> tuple[Axis, ...]:
    """Streamed classes that a product lacks, and one that is made of it has: it is computed again in each step."""
    readers = (
        x for x in known.form.folds.values() if x.id != item.id and item.id in reached_folds(known.form, x)
    )
    beside = {a for x in readers if x.id in known.sums for a in x.axes} - set(item.axes)
    return tuple(a for a in known.streamed if a in beside)


def _calculating(known: BlockProducts, target: Target, hints: SizeHints) -> tuple[float, float]:
    """Seconds of special functions and of plain operations; an expression that several folds share counts once."""
    special = plain = 0.0
    seen: set[Expr] = set()
    for item in known.form.items:
        for x in (x for root in item.body for x in walk(root)):
            used = {a.value for a in axes_of(x)}
            multiplied = item.id in known.sums and used >= set(item.axes)
            if x in seen or multiplied or x.op not in SCALARS or x.dtype is i64:
                continue
            seen.add(x)
            cost = SCALARS[x.op].cost * hints.estimate(dims.prod(a.extent for a in item.axes if a in used))
            if SCALARS[x.op].cost >= SPECIAL_COST:
                special += cost / SPECIAL_COST
            else:
                plain += cost
        if item.scan is not None:
            plain += GPU_MATMUL.running_operations * points(item, hints)
    return special / target.special, plain / target.flops


def kind_of(known: BlockProducts, hints: SizeHints) -> tuple[str, int, int]:
    """Kind, bytes of an operand and length, as `Tuning.find` takes them: kernels that add up products over their steps,
    or that fold the scores of each step. The length is that of the first product's folded class, of which a score may
    have a part only, or of the columns that are added up: these are held in registers."""
    first = known.form.items[known.sums[0]]
    items = [known.form.items[i] for i in known.sums]
    adding = [i for i in items if set(i.reduce) & set(known.streamed)]
    columns = max((known.fixed[a] for i in adding for a in i.kept if a in known.fixed), default=0)
    one = dict(known.fixed) | {a: MATMUL_BLOCKS.streamed_tiles[1] for a in known.tiled if known.fixed[a] == 1}
    made = contraction(first, known.form.params, one.__getitem__)
    folded = max(first.reduce, key=lambda a: hints.estimate(a.extent))
    size = made.operand.bytes if made is not None else first.body[0].dtype.bytes
    return ("products" if adding else "scores"), size, max(hints.estimate(folded.extent), columns)


def _measured(
    known: BlockProducts, grid: BlockGrid, legal: NDArray[np.bool_], tuning: Tuning, hints: SizeHints
) -> ProductBlocks | None:
    """What the table says, if it is among the candidates: `elements` on the grid, `lane` per step. Shorter classes,
    which fill no such tile, are another matter."""
    kind, size, length = kind_of(known, hints)
    found = tuning.find(kind, size, length)
    if found is None or found.length != next_power_of_two(length) or len(known.grid) != 1:
        return None
    wanted = dict.fromkeys(known.grid, found.elements) | dict.fromkeys(known.streamed, found.lane)
    same = legal & (grid.warps == found.warps)
    for a, tile in wanted.items():
        same = same & (grid.tiles[a] == tile)
    # What was measured may have had less to hold: then with fewer stages.
    fit = (c for place in _places(same) if (c := grid.candidate(place)).stages <= found.stages)
    best = max(fit, key=lambda c: c.stages, default=None)
    return best and replace(best, descriptors=found.descriptors)
