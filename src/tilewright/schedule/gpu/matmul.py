"""Tiles, warps and stages of kernels with products of blocks, where threads share a grid point.

Candidates are enumerated and held against the target's limits: accumulators and scores in registers without spills, the
operands of all stages in shared memory. The best is the quickest by a model in which blocks that share a core overlap
what each of them does in turn: products, special functions, the rest of a step. Measured entries overrule the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product as choices

from tilewright.analysis.contraction import Contraction, contraction, factors, product_sides, stored_half
from tilewright.analysis.loop_segments import growth
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import SCALARS, SPECIAL_COST, Axis, Expr, axes_of, axis, substitute, walk
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.selection import Precision
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.schedule.cpu.vectors import points
from tilewright.schedule.table import Tuning
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import MATMUL_BLOCKS
from tilewright.tuning.thresholds import CONTRACTION, GPU_MATMUL

from .block_shape import Shape


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """A candidate: the tile of every class, the warps of a block, the stages of its loops, the folds that keep a state
    per element of the block, whether all products are of halves, and whether descriptors are used."""

    tiles: Mapping[Axis, int]
    warps: int
    stages: int
    spread: tuple[int, ...] = ()
    halves: bool = False
    descriptors: bool = False


@dataclass(frozen=True, slots=True)
class BlockProducts:
    """The products of a form: which classes they tile, on the grid or inside, and its other folds of blocks."""

    form: Form
    grid: tuple[Axis, ...]
    tiled: tuple[Axis, ...]
    streamed: tuple[Axis, ...]
    fixed: Mapping[Axis, int]
    sums: tuple[int, ...]
    singles: Precision = "ieee"
    """What products of fp32 read of it."""


@dataclass(frozen=True, slots=True)
class TileLimits:
    """What tiles are held to: `most` are bounds of extents, `lists` lengths that tiles divide if they can."""

    most: Mapping[Axis, int]
    lists: Mapping[Axis, int]


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
        legal = _legal(known, limits, target, hints)
        if not legal:
            continue
        beside = _calculating(known, target, hints)
        measured = _measured(known, legal, tuning, hints)
        if measured is not None:
            return measured
        best.append(
            min(((seconds_of(known, c, target, hints, beside), c) for c in legal), key=lambda f: f[0])
        )
    return min(best, key=lambda f: f[0])[1] if best else None


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


def _legal(known: BlockProducts, limits: TileLimits, target: Target, hints: SizeHints) -> list[ProductBlocks]:
    """The candidates that fit shared memory, and registers as well as any do."""
    shared = target.level(MemoryKind.SHARED)
    made = [
        c for c in _candidates(known, hints) if shared is None or shared_bytes(known, c) <= shared.capacity
    ]
    if not made:
        return []
    held = [registers(known, c, target) for c in made]
    room = min(GPU_MATMUL.max_registers, target.vector_registers)
    split = any(_is_split(known, product) for _, product in _made(known, made[0]))
    limit = max(2 * room if split else room, min(held))
    legal = [c for c, n in zip(made, held, strict=True) if n <= limit]
    return [c for c in legal if not any(n % c.tiles.get(a, 1) for a, n in limits.lists.items())] or legal


def _candidates(known: BlockProducts, hints: SizeHints) -> Iterator[ProductBlocks]:
    open_ = (*known.grid, *known.streamed)
    on_grid, inside = MATMUL_BLOCKS.grid_tiles, MATMUL_BLOCKS.streamed_tiles
    if len(known.sums) > MATMUL_BLOCKS.max_wide_products:
        on_grid, inside = ((*MATMUL_BLOCKS.small_tiles, *tiles) for tiles in (on_grid, inside))
    ladders = [ladder(a, on_grid if a in known.grid else inside, hints) for a in open_]
    for tiles in choices(*ladders):
        complete = dict(known.fixed) | dict(zip(open_, tiles, strict=True))
        made = _contractions(known.form, known.sums, tuple(complete.items()))
        if made is None:
            continue
        spread = _spread(known, complete)
        halves = all(c.operand.is_half for c in made)
        split = [c.m for c in made if _is_split(known, c)]
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
            yield ProductBlocks(complete, warps, ahead, spread, halves)


def ladder(a: Axis, sizes: Sequence[int], hints: SizeHints) -> list[int]:
    """Tiles for a class: none that is more than the next power of two of its extent."""
    extent = hints.likely(a.extent)
    if extent is None:
        return list(sizes)
    top = max(CONTRACTION.min_block_side, next_power_of_two(extent))
    return sorted({min(s, top) for s in sizes})


def _spread(known: BlockProducts, tiles: Mapping[Axis, int]) -> tuple[int, ...]:
    """Folds over a streamed class that keep a class of the block, and neither follow another fold over that class nor
    are followed: each element of the block has a state of its own, and they are merged once, after the loop."""
    found: list[int] = []
    for i in known.form.folds.values():
        over = [a for a in i.reduce if a in known.streamed]
        if i.id in known.sums or not over or not any(tiles[a] > 1 for a in i.kept):
            continue
        before = [known.form.items[f] for f in folds_read(i.roots)]
        after = [x for x in known.form.folds.values() if i.id in folds_read(x.roots)]
        if not any(set(over) & set(x.reduce) for x in (*before, *after)):
            found.append(i.id)
    return tuple(found)


def registers(known: BlockProducts, c: ProductBlocks, target: Target, *, packed: bool = False) -> int:
    """Registers of a thread (an estimate): accumulators, scores of a step with their copy for the next product, states
    per element, and the rest. `packed`: what is read beside loops counts by its bytes, as it does where it goes into
    the result at once."""
    elements = 0.0
    added = _added(known.form, known.sums)
    for item, product in _made(known, c):
        size = 0 if item.id in added else c.tiles[product.m] * c.tiles[product.n]
        elements += size
        if not any(u.operand == product.operand.name for u in target.matrix_units):
            # Without matrix units, a thread holds the rows and columns that it multiplies.
            threads = c.warps * target.lanes
            elements += c.tiles[product.k] * (size * threads) ** 0.5
        if set(item.reduce) & set(known.streamed):
            elements += 0 if c.halves else size  # a step's own sums
        else:
            fed = any(
                item.id in _reached(known.form, known.form.items[i]) for i in known.sums if i != item.id
            )
            held = GPU_MATMUL.split_register_bytes if _is_split(known, product) else product.operand.bytes
            elements += size * _alike(c, product) * held / 4 if fed else 0
        if _is_split(known, product) and set(known.streamed) & classes_of(product.left):
            elements += (
                c.tiles[product.m] * c.tiles[product.k] * _alike(c, product) * GPU_MATMUL.piece_bytes / 4
            )
    for f in c.spread:
        item = known.form.items[f]
        elements += _volume(c, item.axes)
    for item in known.form.folds.values():
        if item.scan in known.streamed:  # what is run over, and the results, which lie otherwise in threads
            elements += 2 * _volume(c, item.kept)
    for read, axes in _beside(known.form, known.sums):
        size = _volume(c, axes)
        if size >= CONTRACTION.min_block_side**2:
            elements += (
                size * read.dtype.bytes / f32.bytes
                if packed and not set(axes) & set(known.streamed)
                else size
            )
    return int(elements / (c.warps * target.lanes)) + GPU_MATMUL.other_registers


def shared_bytes(known: BlockProducts, c: ProductBlocks) -> int:
    """Shared memory of a block (an estimate from above): operands from memory, those of a loop once per stage; what
    else a loop reads, which is fetched as many steps ahead as there are further stages."""
    total = GPU_MATMUL.merge_bytes
    for r, axes in _beside(known.form, known.sums):
        if isinstance(r.value, int) and any(a in known.streamed and c.tiles[a] > 1 for a in axes):
            total += _volume(c, axes) * known.form.params[r.value].dtype.bytes * (c.stages - 1)
    held: set[Expr] = set()
    pieces = 0
    for item, product in _made(known, c):
        loops = set(known.streamed) & set(item.axes)
        for side, own in ((product.left, product.m), (product.right, product.n)):
            block = _block_of(side, c)
            if block in held or not any(x.op == "read" for x in walk(side)):
                continue
            held.add(block)
            size = c.tiles[own] * c.tiles[product.k]
            plain = stored_half(side, known.form.params) is not None or side.op == "read"
            looped = bool(loops & {own, product.k})
            if _is_split(known, product) and not looped:
                total += size * GPU_MATMUL.piece_bytes
            elif _is_split(
                known, product
            ):  # pieces of left sides stay in registers, with few rows all pieces
                single = size * product.operand.bytes
                total += single * (c.stages - 1) if plain else 0
                right = own != product.m and c.tiles[product.m] >= GPU_MATMUL.warp_group_rows
                pieces = max(
                    pieces, size * GPU_MATMUL.piece_bytes if right else single if c.stages == 1 else 0
                )
            else:
                total += size * product.operand.bytes * (c.stages if plain and looped else 1)
    return total + pieces


def _block_of(side: Expr, c: ProductBlocks) -> Expr:
    """Equal for sides that are the same block of memory, whatever the classes are called that walk it: values that are
    the first part of keys are loaded once."""
    if side.op != "read":
        return side
    tiles = tuple((a.value, c.tiles.get(a.value, 1)) for a in axes_of(side) if isinstance(a.value, Axis))
    return _renamed(side, tiles)


@lru_cache(1 << 10)
def _renamed(side: Expr, tiles: tuple[tuple[Axis, int], ...]) -> Expr:
    """A read with its classes called by their extents and tiles, where these tell them apart."""
    table = {axis(a): axis(Axis(f"{a.extent}/{tile}", a.extent)) for a, tile in tiles}
    return substitute(side, table) if len(set(table.values())) == len(table) else side


def _is_split(known: BlockProducts, product: Contraction) -> bool:
    """Whether matrix units take pieces of the operands."""
    return product.operand is f32 and known.singles == "bf16x6"


def classes_of(e: Expr) -> set[Axis]:
    """The classes that an expression depends on."""
    return {a.value for a in axes_of(e) if isinstance(a.value, Axis)}


def _alike(c: ProductBlocks, product: Contraction) -> int:
    """How many warps hold the same rows of a product's left side."""
    return max(1, c.warps * CONTRACTION.min_block_side // c.tiles[product.m])


def seconds_of(
    known: BlockProducts,
    c: ProductBlocks,
    target: Target,
    hints: SizeHints,
    beside: tuple[float, float] | None = None,
) -> float:
    """Modelled seconds, memory apart; `beside` are those of `_calculating`, which are the same for all candidates."""
    threads = c.warps * target.lanes
    room = target.level(MemoryKind.REGISTER)
    near = target.level(MemoryKind.SHARED)
    together = target.threads // threads
    held = registers(known, c, target)
    over = max(0, held - target.vector_registers)
    if room is not None:
        together = min(together, room.capacity // (4 * threads * (held - over)))
    if near is not None:
        together = min(together, near.capacity // max(1, shared_bytes(known, c)))
    together = max(1, together)
    count, steps = _turns(known, c, hints)
    share = min(1.0, count / target.cores)
    parts = [
        _multiplying(known, c, target, hints),
        *(w / share for w in beside or _calculating(known, target, hints)),
    ]
    waves = count / (target.cores * together)
    tail = -(-count // (target.cores * together)) / waves if waves > 1 else 1.0
    rounds = max(1.0, count / target.cores)
    split = any(_is_split(known, product) for _, product in _made(known, c))
    step = GPU_MATMUL.step_seconds * (GPU_MATMUL.piece_products if split else 1) + (
        target.latency if c.stages == 1 and steps > 1 else 0.0
    )
    waiting = sum(parts) - max(parts) + step * steps * rounds
    if over and near is not None:  # registers that are written to memory and read again in each step
        waiting += 8 * over * threads * count * steps / (near.bandwidth * share)
    busy = (max(parts) + waiting / min(together, rounds)) * tail
    return max(busy, _arriving(known, c, count, target, hints)) * _part(known)


def _arriving(known: BlockProducts, c: ProductBlocks, count: int, target: Target, hints: SizeHints) -> float:
    """Seconds in which the last cache hands all blocks their operands."""
    cache = target.level(MemoryKind.L2)
    blocks: dict[Expr, int] = {}
    for _, product in _made(known, c):
        for side, own in ((product.left, product.m), (product.right, product.n)):
            if side.op != "read":
                continue
            steps = 1
            for a in {own, product.k} & set(known.streamed):
                steps *= -(-max(1, hints.estimate(a.extent)) // c.tiles[a])
            blocks[_block_of(side, c)] = c.tiles[own] * c.tiles[product.k] * product.operand.bytes * steps
    rate = 0.0 if cache is None else cache.bandwidth * GPU_MATMUL.read_over_copy_ratio
    return count * sum(blocks.values()) / rate if rate else 0.0


@lru_cache(1 << 6)
def _added(form: Form, sums: tuple[int, ...]) -> frozenset[int]:
    """Products that are only added to another one of the same place, and so go on in its block."""
    found: set[int] = set()
    for x in (x for i in form.items for b in i.body for x in walk(b) if x.op == "add"):
        ids = [y.value[0] for y in _terms(x) if isinstance(y.value, tuple) and y.value[0] in sums]
        alike = len({form.items[i].kept for i in ids}) == 1
        found |= set(ids[1:]) if alike else set()
    return frozenset(found)


def _terms(e: Expr) -> list[Expr]:
    """The terms of a sum."""
    return [t for a in e.args for t in _terms(a)] if e.op == "add" else [e]


@lru_cache(1 << 6)
def _beside(form: Form, sums: tuple[int, ...]) -> tuple[tuple[Expr, tuple[Axis, ...]], ...]:
    """What is read from memory and is no operand of a product, with its classes."""
    operands: set[Expr] = set()
    for i in sums:
        for factor in factors(form.items[i].body[0]):
            inside = list(walk(factor))
            if all(x.op != "value" for x in inside):
                operands.update(inside)
    reads = {x: None for i in form.items for b in i.body for x in walk(b) if x.op == "read"}
    return tuple(
        (x, tuple(a.value for a in axes_of(x) if isinstance(a.value, Axis)))
        for x in reads
        if x not in operands
    )


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
    return None if found is None else seconds_of(*found, target, hints)


def _multiplying(known: BlockProducts, c: ProductBlocks, target: Target, hints: SizeHints) -> float:
    """Seconds of the matrix units."""
    total = 0.0
    for item, product in _made(known, c):
        rates = [u.flops for u in target.matrix_units if u.operand == product.operand.name]
        width = c.tiles[product.n]
        waste = 1.0
        for a in (product.m, product.n, product.k):
            extent = max(1, hints.estimate(a.extent))
            waste *= -(-extent // c.tiles[a]) * c.tiles[a] / extent
        again = _turned_again(known, c, item, hints)
        rate = (
            max(rates) * width / (width + GPU_MATMUL.half_rate_columns)
            if rates
            else target.flops * GPU_MATMUL.reached_without_units_ratio
        )
        total += 2 * points(item, hints) * waste * again / rate
    return total


def _turned_again(known: BlockProducts, c: ProductBlocks, item: Item, hints: SizeHints) -> int:
    """How often a product is computed: again in each step of a class that it lacks, and a product made of it has."""
    readers = (x for x in known.form.folds.values() if x.id != item.id and item.id in _reached(known.form, x))
    beside = {a for x in readers if x.id in known.sums for a in x.axes} - set(item.axes)
    turns = 1
    for a in beside & set(known.streamed):
        turns *= -(-max(1, hints.estimate(a.extent)) // c.tiles[a])
    return turns


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


def _turns(known: BlockProducts, c: ProductBlocks, hints: SizeHints) -> tuple[int, int]:
    """Grid points, and steps of each."""
    count = steps = 1
    form = known.form
    grid = [a for a in form.classes() if all(a in i.axes for i in form.items)]
    for a, tile in c.tiles.items():
        turns = -(-max(1, hints.estimate(a.extent)) // tile)
        if a in grid:
            count *= turns
        elif a in known.streamed or tile == 1:
            steps *= turns
    return count, steps


def _made(known: BlockProducts, c: ProductBlocks) -> list[tuple[Item, Contraction]]:
    made = _contractions(known.form, known.sums, tuple(c.tiles.items()))
    assert made is not None
    return [(known.form.items[i], m) for i, m in zip(known.sums, made, strict=True)]


@lru_cache(1 << 6)
def _contractions(
    form: Form, sums: tuple[int, ...], tiles: tuple[tuple[Axis, int], ...]
) -> tuple[Contraction, ...] | None:
    """The sums as products of blocks with these tiles; None if one is none."""
    tile = dict(tiles).__getitem__
    made = [contraction(form.items[i], form.params, tile) for i in sums]
    return None if any(m is None for m in made) else tuple(m for m in made if m is not None)


@lru_cache(1 << 8)
def _reached(form: Form, item: Item) -> frozenset[int]:
    found: set[int] = set()
    stack = folds_read(item.roots)
    while stack:
        f = stack.pop()
        if f not in found:
            found.add(f)
            stack += folds_read(form.items[f].roots)
    return frozenset(found)


def _volume(c: ProductBlocks, axes: Sequence[Axis]) -> int:
    size = 1
    for a in axes:
        size *= c.tiles[a]
    return size


def kind_of(known: BlockProducts, hints: SizeHints) -> tuple[str, int, int]:
    """Kind, bytes of an operand and length, as `Tuning.find` takes them: kernels that add up products over their steps,
    or that fold the scores of each step; the length is that of the first product's folded class."""
    first = known.form.items[known.sums[0]]
    adding = any(set(known.form.items[i].reduce) & set(known.streamed) for i in known.sums)
    one = dict(known.fixed) | {a: MATMUL_BLOCKS.streamed_tiles[1] for a in known.tiled if known.fixed[a] == 1}
    made = contraction(first, known.form.params, one.__getitem__)
    folded = max(first.reduce, key=lambda a: hints.estimate(a.extent))
    size = made.operand.bytes if made is not None else first.body[0].dtype.bytes
    return ("products" if adding else "scores"), size, hints.estimate(folded.extent)


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
