"""Tiles, warps and stages of kernels with products of blocks, where threads share a grid point.

Candidates are enumerated and held against the target's limits: accumulators and scores in registers without spills, the
operands of all stages in shared memory. The best is the quickest by a model in which blocks that share a core overlap
what each of them does in turn: products, special functions, the rest of a step. Measured entries overrule the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product as choices

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
    BlockSum,
    ProductBlocks,
    SharedNeeds,
    made_products,
    products_of,
    registers_of,
    shared_needs,
)
from .block_shape import Shape


@dataclass(frozen=True, slots=True)
class TileLimits:
    """What tiles are held to: `most` are bounds of extents, `lists` lengths that tiles divide if they can."""

    most: Mapping[Axis, int]
    lists: Mapping[Axis, int]


class BlockModel:
    """What blocks of products of one form hold and take: here what no tile decides, found once for all candidates."""

    def __init__(self, known: BlockProducts, target: Target, hints: SizeHints) -> None:
        self.known, self.target, self.hints = known, target, hints
        form = known.form
        self._extents: dict[Axis, int] = {}
        self.grid = frozenset(a for a in form.classes() if all(a in i.axes for i in form.items))
        self.points = {i: points(form.items[i], hints) for i in known.sums}
        self.repeats = {i: _repeats(known, form.items[i]) for i in known.sums}
        """Streamed classes in each step of which a product is computed again."""
        self.calculating = _calculating(known, target, hints)
        """Seconds of special functions and of plain operations."""
        self.part = _part(known)
        self.lone = _lone_folds(known)

    def extent(self, a: Axis) -> int:
        """Elements of a class."""
        if a not in self._extents:
            self._extents[a] = max(1, self.hints.estimate(a.extent))
        return self._extents[a]

    def turns(self, a: Axis, tile: int) -> int:
        """How many tiles a class has."""
        return -(-self.extent(a) // tile)


class TiledModel:
    """The same of blocks with the same `tiles`: what these decide is found once for all numbers of warps and stages."""

    def __init__(self, model: BlockModel, made: Sequence[BlockSum], tiles: Mapping[Axis, int]) -> None:
        self.model, self.made, self.tiles = model, made, tiles
        self._registers: dict[int, int] = {}

    @cached_property
    def needs(self) -> SharedNeeds:
        """Shared memory of a block."""
        return shared_needs(self.model.known, self.made, self.tiles)

    def registers(self, c: ProductBlocks) -> int:
        """Registers of a thread, whatever the stages are."""
        if c.warps not in self._registers:
            model = self.model
            self._registers[c.warps] = registers_of(model.known, self.made, c, model.target)
        return self._registers[c.warps]

    @cached_property
    def turns(self) -> tuple[int, int]:
        """Grid points, and steps of each."""
        count = steps = 1
        for a, tile in self.tiles.items():
            turns = self.model.turns(a, tile)
            if a in self.model.grid:
                count *= turns
            elif a in self.model.known.streamed or tile == 1:
                steps *= turns
        return count, steps

    @cached_property
    def arriving(self) -> float:
        """Seconds in which the last cache hands all blocks their operands."""
        cache, known = self.model.target.level(MemoryKind.L2), self.model.known
        blocks: dict[object, int] = {}
        for s in self.made:
            k = s.product.k
            for side in s.sides:
                if side.side.op != "read":
                    continue
                steps = 1
                for a in {side.own, k} & set(known.streamed):
                    steps *= self.model.turns(a, self.tiles[a])
                size = self.tiles[side.own] * self.tiles[k] * s.product.operand.bytes * steps
                blocks[side.block(self.tiles)] = size
        rate = 0.0 if cache is None else cache.bandwidth * GPU_MATMUL.read_over_copy_ratio
        return self.turns[0] * sum(blocks.values()) / rate if rate else 0.0

    @cached_property
    def multiplying(self) -> float:
        """Seconds of the matrix units."""
        model, target = self.model, self.model.target
        total = 0.0
        for s in self.made:
            product = s.product
            rates = [u.flops for u in target.matrix_units if u.operand == product.operand.name]
            width = self.tiles[product.n]
            waste = 1.0
            for a in (product.m, product.n, product.k):
                waste *= model.turns(a, self.tiles[a]) * self.tiles[a] / model.extent(a)
            again = math.prod(model.turns(a, self.tiles[a]) for a in model.repeats[s.item.id])
            rate = (
                max(rates) * width / (width + GPU_MATMUL.half_rate_columns)
                if rates
                else target.flops * GPU_MATMUL.reached_without_units_ratio
            )
            total += 2 * model.points[s.item.id] * waste * again / rate
        return total

    def seconds(self, c: ProductBlocks) -> float:
        """Modelled seconds, memory apart."""
        target = self.model.target
        threads = c.warps * target.lanes
        room, near = target.level(MemoryKind.REGISTER), target.level(MemoryKind.SHARED)
        together = target.threads // threads
        held = self.registers(c)
        over = max(0, held - target.vector_registers)
        if room is not None:
            together = min(together, room.capacity // (4 * threads * (held - over)))
        if near is not None:
            together = min(together, near.capacity // max(1, self.needs.bytes(c.stages)))
        together = max(1, together)
        count, steps = self.turns
        share = min(1.0, count / target.cores)
        parts = [self.multiplying, *(w / share for w in self.model.calculating)]
        waves = count / (target.cores * together)
        tail = -(-count // (target.cores * together)) / waves if waves > 1 else 1.0
        rounds = max(1.0, count / target.cores)
        split = any(s.split for s in self.made)
        step = GPU_MATMUL.step_seconds * (GPU_MATMUL.piece_products if split else 1) + (
            target.latency if c.stages == 1 and steps > 1 else 0.0
        )
        waiting = sum(parts) - max(parts) + step * steps * rounds
        if over and near is not None:  # registers that are written to memory and read again in each step
            waiting += 8 * over * threads * count * steps / (near.bandwidth * share)
        busy = (max(parts) + waiting / min(together, rounds)) * tail
        return max(busy, self.arriving) * self.model.part


Candidate = tuple[TiledModel, ProductBlocks]


def product_blocks(
    form: Form, shape: Shape, limits: TileLimits, target: Target, tuning: Tuning, hints: SizeHints
) -> ProductBlocks | None:
    """Blocks for matrix units; None if the form has no sum of products, or not all of them can have their tiles."""
    most = limits.most
    found = {i.id: s for i in form.folds.values() if (s := product_sides(i)) is not None}
    if not found:
        return None
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
    best: list[tuple[float, ProductBlocks]] = []
    for extent in whole:
        streamed, fixed = _streamed(shape, tiled, most, passed, extent)
        grid = tuple(a for a in shape.grid if a in tiled)
        known = BlockProducts(form, grid, tuple(tiled), streamed, fixed, tuple(found), target.singles)
        model = BlockModel(known, target, hints)
        legal = _legal(model, limits)
        if not legal:
            continue
        measured = _measured(known, [c for _, c in legal], tuning, hints)
        if measured is not None:
            return measured
        timed = [(tiled.seconds(c), tiled, c) for tiled, c in legal]
        least, tiled, first = min(timed, key=lambda f: f[0])
        best.append((least, _further_ahead(tiled, first, least, [c for t, _, c in timed if t <= least])))
    return min(best, key=lambda f: f[0])[1] if best else None


def _further_ahead(
    tiled: TiledModel, first: ProductBlocks, seconds: float, same: Sequence[ProductBlocks]
) -> ProductBlocks:
    """Of blocks that the model takes for equal, the `first`; with the loads of more steps under way if operands arrive
    in not much less than all of the time: it does not see how long one step waits for them."""
    if tiled.arriving * tiled.model.part < GPU_MATMUL.min_arriving_ratio * seconds:
        return first
    return max((c for c in same if replace(c, stages=first.stages) == first), key=lambda c: c.stages)


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


def _legal(model: BlockModel, limits: TileLimits) -> list[Candidate]:
    """The candidates that fit shared memory, and registers as well as any do."""
    target = model.target
    shared = target.level(MemoryKind.SHARED)
    made = [
        (tiled, c)
        for tiled, c in _candidates(model)
        if shared is None or tiled.needs.bytes(c.stages) <= shared.capacity
    ]
    if not made:
        return []
    held = [tiled.registers(c) for tiled, c in made]
    room = min(GPU_MATMUL.max_registers, target.vector_registers)
    split = any(s.split for s in made[0][0].made)
    limit = max(2 * room if split else room, min(held))
    legal = [found for found, n in zip(made, held, strict=True) if n <= limit]
    whole = [(t, c) for t, c in legal if not any(n % c.tiles.get(a, 1) for a, n in limits.lists.items())]
    return whole or legal


def _candidates(model: BlockModel) -> Iterator[Candidate]:
    known, hints = model.known, model.hints
    open_ = (*known.grid, *known.streamed)
    on_grid, inside = MATMUL_BLOCKS.grid_tiles, MATMUL_BLOCKS.streamed_tiles
    if len(known.sums) > MATMUL_BLOCKS.max_wide_products:
        on_grid, inside = ((*MATMUL_BLOCKS.small_tiles, *tiles) for tiles in (on_grid, inside))
    ladders = [ladder(a, on_grid if a in known.grid else inside, hints) for a in open_]
    for tiles in choices(*ladders):
        complete = dict(known.fixed) | dict(zip(open_, tiles, strict=True))
        made = products_of(known, complete)
        if made is None:
            continue
        tiled = TiledModel(model, made, complete)
        spread = tuple(i.id for i in model.lone if any(complete[a] > 1 for a in i.kept))
        halves = all(s.product.operand.is_half for s in made)
        split = [s.product.m for s in made if s.split]
        if any(
            complete[a] < min(GPU_MATMUL.warp_group_rows, hints.estimate(a.extent)) and a in known.streamed
            for a in split
        ):
            continue
        stages = (
            (1,) if not known.streamed else MATMUL_BLOCKS.stages if halves else (1, *MATMUL_BLOCKS.stages)
        )
        wide = min(
            (complete[a] for a in split if complete[a] >= GPU_MATMUL.warp_group_rows),
            default=MATMUL_BLOCKS.warps[-1] * CONTRACTION.min_block_side,
        )
        for warps, ahead in choices(
            [w for w in MATMUL_BLOCKS.warps if w * CONTRACTION.min_block_side <= wide], stages
        ):
            yield tiled, ProductBlocks(complete, warps, ahead, spread, halves)


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
    made = made_products(known, blocks.tiles)
    return TiledModel(BlockModel(known, target, hints), made, blocks.tiles).seconds(blocks)


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
    known: BlockProducts, legal: Sequence[ProductBlocks], tuning: Tuning, hints: SizeHints
) -> ProductBlocks | None:
    """What the table says, if it is among the candidates: `elements` on the grid, `lane` per step. Shorter classes,
    which fill no such tile, are another matter."""
    kind, size, length = kind_of(known, hints)
    found = tuning.find(kind, size, length)
    if found is None or found.length != next_power_of_two(length) or len(known.grid) != 1:
        return None
    wanted = dict(known.fixed) | dict.fromkeys(known.grid, found.elements)
    wanted |= dict.fromkeys(known.streamed, found.lane)
    same = [c for c in legal if dict(c.tiles) == wanted and c.warps == found.warps]
    # What was measured may have had less to hold: then with fewer stages.
    best = max((c for c in same if c.stages <= found.stages), key=lambda c: c.stages, default=None)
    return best and replace(best, descriptors=found.descriptors)
