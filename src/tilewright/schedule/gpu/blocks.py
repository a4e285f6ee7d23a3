"""Schedules for machines whose threads share a grid point: every class in blocks, whose lengths are powers of two.

A grid point is a block of a few thousand elements, worked on by a few warps. Rows that fit the registers stay in them;
longer ones are streamed. All figures follow from the target's: bytes of one access, threads in step, cores.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tilewright.analysis.loop_segments import growth
from tilewright.analysis.size_hints import SizeHints
from tilewright.form.implied import drop_implied, listed_tiles
from tilewright.form.lane_softmax import one_each
from tilewright.form.steps import take
from tilewright.ir.dtype import f16
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, walk
from tilewright.ir.form import Form, folds_read
from tilewright.ir.schedule import ClassPlan, LaunchConfig, Math, Reductions, Role, Schedule, Tiling
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import last_power_of_two, next_power_of_two
from tilewright.schedule.table import HELD, FastestBlock, Tuning
from tilewright.target import Target
from tilewright.tuning.thresholds import (
    CONTRACTION,
    GPU_BLOCKS,
    GPU_COLUMNS,
    GPU_ROWS,
    SKINNY_MATMUL,
    SUM_LEVELS,
)

from .block_memory import ProductBlocks
from .block_shape import Shape, is_narrow, is_odd, misalignment, repeating_shape, shape_of
from .matmul import TileLimits, product_blocks
from .skinny_matmul import open_rows, summed_blocks

NOTHING = Tuning()


ANYWHERE = frozenset({"flat", "square", "columns", "row_totals", "stream_totals"})
"""Kinds of kernels with blocks of their own for rows that begin anywhere at sizes not known before. Those that write
rows along memory (`rows`) do only if elements are longer than halves, whose addresses take
most registers, in whatever block."""


def block_schedule(
    form: Form, target: Target, hints: SizeHints, limits: Mapping[Axis, int] | None = None, tuning: Tuning = NOTHING,
    odd: bool = False,
) -> Schedule:  # fmt: skip
    """A schedule of power-of-two blocks. `limits` are extents that classes of unknown extent do not exceed; `tuning`
    holds what was measured. `odd`: rows begin where no wide access may, although that is not known of all sizes."""
    lists, form = listed_tiles(form), drop_implied(form)
    shape = shape_of(form, hints)
    most = {a: n for a in shape.inner if (n := dims.static(a.extent)) is not None} | dict(limits or {})
    products = summed_blocks(form, shape.grid, shape.inner, most, target, hints)
    products = products or product_blocks(form, shape, TileLimits(most, lists), target, tuning, hints)
    if products is not None:
        made = schedule_of_blocks(form, shape, products, most, multiplied=True)
        return made.changed(descriptors=products.descriptors and target.descriptors)
    return _row_schedule(form, shape, RowLimits(most, tuning, odd), target, hints)


def repeating_schedule(form: Form, target: Target, hints: SizeHints, tuning: Tuning) -> Schedule | None:
    """Blocks of a form without products of blocks, in which a class is on the grid that some folds lack; None if there
    is no such class, or if matrix units multiply."""
    lists, form = listed_tiles(form), drop_implied(form)
    usual, shape = shape_of(form, hints), repeating_shape(form, hints)
    if shape == usual:
        return None
    known = {a: n for a in usual.inner if (n := dims.static(a.extent)) is not None}
    if product_blocks(form, usual, TileLimits(known, lists), target, tuning, hints) is not None:
        return None
    most = {a: n for a in shape.inner if (n := dims.static(a.extent)) is not None}
    return _row_schedule(form, shape, RowLimits(most, tuning), target, hints)


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What blocks of rows are held to: bounds of extents, what was measured, and whether rows begin where no wide
    access may."""

    most: Mapping[Axis, int]
    tuning: Tuning
    odd: bool = False


def _row_schedule(form: Form, shape: Shape, limits: RowLimits, target: Target, hints: SizeHints) -> Schedule:
    """The schedule of blocks without products."""
    most, tuning, odd = limits.most, limits.tuning, limits.odd
    access = next_power_of_two(target.vector_bytes // shape.element + 1) // 2 or 1
    per_warp = target.lanes * access * GPU_BLOCKS.accesses_per_thread
    inner = _inner_tiles(form, shape, per_warp * GPU_BLOCKS.usual_warps, most, hints)
    kind, size, length = _kind(form, shape, inner, most, hints)
    differs = kind in ANYWHERE or (kind == "rows" and size > f16.bytes)
    misaligned = (odd and differs) or is_odd(form, shape, target)
    found = tuning.find(kind, size, length, misaligned)
    entry = found or FastestBlock("", 0, 0, per_warp * GPU_BLOCKS.usual_warps, 0, 0, GPU_BLOCKS.usual_stages)
    if found and found.kind in ("streams", "stream_totals") and shape.lane is not None:
        beside = _product(t for a, t in inner.items() if a != shape.lane)
        held = found.elements // (GPU_ROWS.choosing_shrink_ratio if _chooses(form, shape.lane) else 1)
        inner[shape.lane] = min(max(1, held // beside), _longest(shape.lane, hints))
        entry = replace(found, elements=per_warp * GPU_BLOCKS.usual_warps)
    elif kind == "columns" and any(i.reduction.step for i in form.items if i.reduction is not None):
        inner, entry = _chunk_blocks(
            shape, most, GPU_COLUMNS.odd_columns if misaligned else access, target, hints
        )
    elif (
        found
        and found.kind == "columns"
        and not misaligned
        and _underfills(form, shape, found, target, hints)
    ):
        inner, entry = _deep_blocks(shape, most, access, target, hints)
    elif found and found.kind == "columns":
        wide = _beside(shape, target, hints) if len(inner) == 1 else GPU_BLOCKS.enough_contiguous_elements
        inner, entry = _column_blocks(form, inner, most, found, wide)
    tiles = inner | _grid_tiles(form, shape, inner, entry, target, hints)
    warps = entry.warps or max(
        1, min(target.block_threads // target.lanes, _product(tiles.values()) // per_warp)
    )
    open_ = [a for a in inner if dims.static(a.extent) is None and inner[a] > 1]
    enough = GPU_BLOCKS.min_elements_per_thread * warps * target.lanes
    if kind in HELD and len(open_) > 1 and _product(tiles.values()) < enough:
        warps = max(1, warps // 2)
    if kind == "flat":
        warps = _filling(form, tiles, warps, access, target)
    made = schedule_of_blocks(form, shape, ProductBlocks(tiles, warps, entry.stages), most, multiplied=False)
    hoisted = GPU_ROWS.max_hoisted_bytes_per_thread * made.launch.warps * target.lanes
    return made.changed(descriptors=entry.descriptors and target.descriptors, hoisted_bytes=hoisted)


def _column_blocks(
    form: Form, inner: dict[Axis, int], most: Mapping[Axis, int], found: FastestBlock, wide: int
) -> tuple[dict[Axis, int], FastestBlock]:
    """Blocks that fold columns, `wide` of them: all rows at once where these are few, else a step of rows at a time."""
    narrow = wide < GPU_BLOCKS.enough_contiguous_elements
    if narrow:
        inner = {
            a: next_power_of_two(most[a]) if t < most.get(a, 0) <= GPU_COLUMNS.max_resident_rows else t
            for a, t in inner.items()
        }
    if any(a in most and t >= most[a] > 1 for a, t in inner.items()):
        return inner, replace(found, elements=wide * _product(inner.values()), lane=wide, warps=0)
    if any(len(i.reduction.state) > 1 for i in form.items if i.reduction is not None):
        few = replace(found, lane=wide, elements=wide * GPU_COLUMNS.step_rows)
        found = replace(few if narrow else found, warps=0)
    return {a: max(1, found.elements // found.lane) if t > 1 else 1 for a, t in inner.items()}, found


def _chooses(form: Form, lane: Axis) -> bool:
    """Whether what a fold over `lane` of unknown extent takes depends on the place: a condition is held for every
    element, beside the mask of the last ones (with full tiles a causal softmax put 192 bytes aside). A choice between
    the whole element and nothing is a mask."""
    if dims.static(lane.extent) is not None:
        return False
    folds = (item for item in form.folds.values() if lane in item.reduce)
    chosen = (
        x.args[0] for item in folds for b in item.body for x in walk(b) if x.op == "where" and x is not b
    )
    return any(axis(lane) in axes_of(c) and not any(y.op == "read" for y in walk(c)) for c in chosen)


def _filling(form: Form, tiles: Mapping[Axis, int], warps: int, access: int, target: Target) -> int:
    """More warps for a block of `tiles` while the machine has room for them and each thread has several accesses."""
    sizes = [dims.static(dims.prod(a.extent for a in o.axes)) for o in form.outputs]
    total, block = max((n or 0 for n in sizes), default=0), _product(tiles.values())
    enough = target.cores * target.threads // (2 * target.lanes)
    while total and warps * total < enough * block and block >= 2 * warps * target.lanes * access:
        warps *= 2
    return warps


def schedule_of_blocks(
    form: Form, shape: Shape, blocks: ProductBlocks, most: Mapping[Axis, int], *, multiplied: bool
) -> Schedule:
    """The schedule of `blocks`, which have products of blocks if they are `multiplied`."""
    tiles = dict(blocks.tiles)
    # Points with long loops start before those with short ones, whatever else they belong to.
    uneven = [growth(form.items, a) if multiplied else 0 for a in shape.grid]
    order = sorted(zip(shape.grid, uneven, strict=True), key=lambda item: item[1] == 0)
    plans = [_grid_plan(a, tiles, more > 0) for a, more in order]
    plans += [_inner_plan(a, shape, tiles, most) for a in shape.inner]
    walked = {Role.STREAMED, Role.SCAN} if multiplied else {Role.STREAMED}
    streamed = any(p.role in walked for p in plans)
    apart = not shape.inner and not form.folds and _open(form, tiles)
    halves = blocks.halves
    reductions = Reductions(
        online=streamed,
        lane_states=not multiplied and (not (streamed and _cascaded(form)) or one_each(form, shape.inner)),
        lane_states_of=blocks.spread,
        max_chain=GPU_BLOCKS.max_chain if not multiplied else 0 if halves else SUM_LEVELS.max_chain,
        blockwise=streamed and multiplied and not halves,
    )
    math = Math(
        exp2=halves,
        accurate=not halves if multiplied else not _rounds_results(form),
        contracted=multiplied,
        merged_selects=not form.folds,
    )
    launch = LaunchConfig(last_power_of_two(blocks.warps), blocks.stages if streamed else 1)
    tiling = Tiling(tuple(plans), shape.lane, peel=False, tail_block=apart)
    return Schedule(tiling, reductions, math=math, launch=launch)


def _rounds_results(form: Form) -> bool:
    """Whether all results that are numbers are rounded to half types, which hides an error of an exponential."""
    kinds = {form.params[o.param].dtype for o in form.outputs}
    return any(d.is_half for d in kinds) and all(d.is_half or not d.is_float for d in kinds)


def _open(form: Form, tiles: Mapping[Axis, int]) -> bool:
    """Whether blocks may reach past an extent, and the compiler of a kernel cannot tell which of their elements do."""
    unknown = any(t > 1 and dims.static(a.extent) is None for a, t in tiles.items())
    return unknown or len(form.classes()) == 1


def _kind(
    form: Form, shape: Shape, inner: Mapping[Axis, int], most: Mapping[Axis, int], hints: SizeHints
) -> tuple[str, int, int]:
    """Kind, bytes of an element and length of a row, as `Tuning.find` takes them."""
    lane = hints.likely(shape.lane.extent) if shape.lane is not None else None
    if not shape.inner:
        return (
            "square" if shape.across is not None else "flat",
            shape.element,
            lane or GPU_ROWS.assumed_length,
        )
    if shape.lane not in shape.inner:
        return "columns", shape.element, lane or GPU_ROWS.assumed_length
    stored = any(shape.lane in o.axes for o in form.outputs)
    if all(a in most and t >= most[a] for a, t in inner.items()):
        return "rows" if stored else "row_totals", shape.element, _product(inner.values())
    return "streams" if stored else "stream_totals", shape.element, lane or GPU_ROWS.assumed_streamed_length


def _product(values: Iterable[int]) -> int:
    result = 1
    for v in values:
        result *= v
    return result


def buckets(
    form: Form, target: Target, hints: SizeHints, tuning: Tuning = NOTHING
) -> list[tuple[Expr, Schedule]]:
    """Schedules for rows of unknown extent that fit the registers, each with the condition under which it serves; the
    first one that serves is the best. None where a limit changes nothing."""
    shape = shape_of(form, hints)
    open_ = [a for a in shape.inner if dims.static(a.extent) is None]
    if shape.lane not in open_ or shape.scan not in (None, shape.lane):
        return []
    assert shape.lane is not None
    # What else a row goes over is no longer than it was when the program was traced, or about so.
    most = {a: next_power_of_two(max(1, hints.estimate(a.extent))) for a in open_ if a != shape.lane}
    found: list[tuple[Expr, Schedule]] = []
    open_ended = block_schedule(form, target, hints, None, tuning)
    seen = max(
        target.lanes, next_power_of_two(hints.likely(shape.lane.extent) or GPU_ROWS.max_resident_elements)
    )
    for b in (
        (seen, *GPU_ROWS.bucket_lengths)
        if GPU_ROWS.min_times_shorter * seen <= GPU_ROWS.bucket_lengths[0]
        else GPU_ROWS.bucket_lengths
    ):
        limits = most | {shape.lane: b}
        if _product(limits.values()) <= GPU_ROWS.max_resident_elements:
            conditions = [call("le", a.extent, dims.integer(n)) for a, n in limits.items()]
            fits = functools.reduce(lambda p, q: call("and", p, q), conditions)
            even, odd = (block_schedule(form, target, hints, limits, tuning, odd) for odd in (False, True))
            if even == open_ended:  # as where products of blocks decide
                continue
            differs = misalignment(form, target, hints) if odd != even else None
            found += [] if differs is None else [(call("and", fits, differs), odd)]
            found.append((fits, even))
    return found


def row_buckets(
    form: Form, target: Target, hints: SizeHints, tuning: Tuning = NOTHING
) -> list[tuple[Expr, Form, Schedule]]:
    """Schedules for few rows of products, where their number is not known, each with the condition under which it
    serves and the form that it is of; the first one that serves is the best."""
    shape = shape_of(form, hints)
    rows = open_rows(form, shape.grid, shape.inner)
    if rows is None:
        return []
    (a, beside), low = rows, dims.int_range(rows[0].extent)[0] or 0
    on_grid = a in shape.grid
    few = {1, SKINNY_MATMUL.max_rows // beside} | (
        {CONTRACTION.min_block_side // beside, CONTRACTION.min_block_side} if on_grid else set()
    )
    found: list[tuple[int, Form, Schedule]] = []
    for n in sorted(n for n in few if n >= max(1, low)):
        small = take("pack_rows", form, target, hints, {a: n}) if on_grid else form
        limits = {c: n * beside for c in small.classes() if c not in form.classes()} | {a: n}
        made = block_schedule(small, target, hints.also({repr(a.extent): n}), limits, tuning)
        if not on_grid and made.plan(a).tile >= CONTRACTION.min_block_side:
            continue
        if found and _height(found[-1][2]) == _height(made) and (small is not form or found[-1][1] is form):
            found.pop()  # more rows at the same cost
        found.append((n, small, made))
    usual = block_schedule(form, target, hints, None, tuning)
    least = 0 if on_grid else 1 - low  # a row that a program takes for there has no mask
    return [(_so_many(a, n, least), small, made) for n, small, made in found if made != usual]


def _height(schedule: Schedule) -> int:
    """Elements of a block along what is on the grid."""
    return _product(c.tile for c in schedule.tiling.classes if c.role is Role.GRID)


def _so_many(a: Axis, n: int, least: int) -> Expr:
    """Whether there are at most `n` elements, and `least`."""
    fits = call("le", a.extent, dims.integer(n))
    return call("and", call("ge", a.extent, dims.integer(least)), fits) if least > 0 else fits


def fit_tile(a: Axis, most: int, hints: SizeHints) -> int:
    """The largest tile of `a`, up to `most`, that wastes little past the extent; a much larger one may waste more."""
    extent = hints.likely(a.extent)
    if extent is None:
        return most
    tiles = [1 << k for k in range(min(most, next_power_of_two(extent)).bit_length())][::-1]
    waste = {t: -(-extent // t) * t / max(1, extent) - 1 for t in tiles}
    close = next(t for t in tiles if waste[t] <= 1 / 8)
    rough = next(t for t in tiles if waste[t] <= 1 / 2)
    return close if close >= min(rough, GPU_BLOCKS.enough_contiguous_elements) else rough


def _inner_tiles(
    form: Form, shape: Shape, budget: int, most: Mapping[Axis, int], hints: SizeHints
) -> dict[Axis, int]:
    """Tiles of the classes that are not on the grid."""
    tiles = dict.fromkeys(shape.inner, 1)
    if not shape.inner:
        return tiles
    if shape.lane not in shape.inner:
        near = max(shape.inner, key=lambda a: hints.estimate(a.extent)) if shape.scan is None else shape.scan
        if not is_narrow(near):
            tiles[near] = _rows(form, near, most) or GPU_COLUMNS.step_rows
        return tiles
    again = _cascaded(form) or any(shape.lane in o.axes for o in form.outputs)
    limit = GPU_ROWS.max_resident_elements if again else 4 * budget
    held = 1
    for a in reversed(shape.inner):
        extent = most.get(a)
        if extent is not None and held * next_power_of_two(extent) <= limit:
            tiles[a] = next_power_of_two(extent)
        elif a != shape.scan or a == shape.lane:
            tiles[a] = min(
                max(1, 2 * budget // held),
                _longest(a, hints) if a == shape.lane else next_power_of_two(hints.estimate(a.extent)),
            )
        held *= tiles[a]
    return tiles


def _chunk_blocks(
    shape: Shape, most: Mapping[Axis, int], cells: int, target: Target, hints: SizeHints
) -> tuple[dict[Axis, int], FastestBlock]:
    """Tiles of inner classes where each thread takes chunks of `cells` columns, side by side in a line."""
    wide = _side_by_side(shape, target, hints)
    near = max(shape.inner, key=lambda a: hints.estimate(a.extent))
    lanes = max(1, GPU_BLOCKS.usual_warps * target.lanes * cells // wide)
    lanes = min(lanes, next_power_of_two(most.get(near, lanes)))
    warps = max(1, wide * lanes // (cells * target.lanes))
    inner = {a: lanes if a == near else 1 for a in shape.inner}
    return inner, FastestBlock("columns", shape.element, 0, wide * lanes, wide, warps)


def _underfills(form: Form, shape: Shape, found: FastestBlock, target: Target, hints: SizeHints) -> bool:
    """Whether sums over a few rows, as is known, would keep few cores busy with the blocks of the table."""
    plain = not _cascaded(form) and all(len(i.reduction.state) == 1 for i in form.items if i.reduction)
    blocks = _product(
        -(-hints.estimate(a.extent) // (found.lane if a == shape.lane else 1)) for a in shape.grid
    )
    rows = dims.static(shape.inner[0].extent) or 0 if len(shape.inner) == 1 else 0
    return (
        plain
        and blocks < target.cores
        and GPU_COLUMNS.max_resident_rows < rows <= GPU_COLUMNS.max_deep_steps * GPU_COLUMNS.deep_step_rows
    )


def _deep_blocks(
    shape: Shape, most: Mapping[Axis, int], access: int, target: Target, hints: SizeHints
) -> tuple[dict[Axis, int], FastestBlock]:
    """Tiles for such rows: a block for each core, with many of them under way."""
    (rows,) = shape.inner
    wide, deep = (
        _side_by_side(shape, target, hints),
        min(GPU_COLUMNS.deep_step_rows, next_power_of_two(most.get(rows, GPU_COLUMNS.deep_step_rows))),
    )
    warps = max(1, wide * deep // (GPU_COLUMNS.max_deep_steps * access * target.lanes))
    return {rows: deep}, FastestBlock("columns", shape.element, 0, wide * deep, wide, warps)


def _side_by_side(shape: Shape, target: Target, hints: SizeHints) -> int:
    """Columns of a block that are a line in memory, or half of one where few cores would have a block."""
    share = _product(hints.estimate(a.extent) for a in shape.grid) // target.cores
    return min(
        GPU_COLUMNS.min_row_bytes // shape.element,
        max(GPU_COLUMNS.min_row_bytes // 2 // shape.element, next_power_of_two(share + 1) // 2),
    )


def _rows(form: Form, near: Axis, most: Mapping[Axis, int]) -> int:
    """The tile of all rows of a column, where folds read others over them and the block is not too large; else 0."""
    rows = next_power_of_two(most[near]) if near in most and _cascaded(form) else 0
    return rows if rows * GPU_BLOCKS.enough_contiguous_elements <= GPU_ROWS.max_resident_elements else 0


def _beside(shape: Shape, target: Target, hints: SizeHints) -> int:
    """Columns of a block that holds all rows or merges states: fewer where few cores would have a block, but a line."""
    share = _product(hints.estimate(a.extent) for a in shape.grid) // target.cores
    return min(
        GPU_BLOCKS.enough_contiguous_elements,
        max(GPU_COLUMNS.min_row_bytes // shape.element, next_power_of_two(share + 1) // 2),
    )


def _longest(a: Axis, hints: SizeHints) -> int:
    """The longest tile that a class may want."""
    extent = hints.likely(a.extent)
    return GPU_ROWS.max_resident_elements if extent is None else next_power_of_two(extent)


def _cascaded(form: Form) -> bool:
    """Whether a fold reads another one."""
    return any(folds_read(i.roots) for i in form.folds.values())


def _grid_tiles(
    form: Form, shape: Shape, inner: dict[Axis, int], entry: FastestBlock, target: Target, hints: SizeHints
) -> dict[Axis, int]:
    """Tiles of the grid's classes: the contiguous ones first, then whatever fills the block."""
    tiles = dict.fromkeys(shape.grid, 1)
    held, budget = _product(inner.values()), entry.elements
    if shape.across is not None and shape.lane is not None:
        side = entry.lane or GPU_BLOCKS.square_side
        tiles[shape.lane] = fit_tile(shape.lane, side, hints)
        tiles[shape.across] = fit_tile(
            shape.across, max(1, budget // side) if entry.lane else GPU_BLOCKS.square_side, hints
        )
        held *= tiles[shape.lane] * tiles[shape.across]
    elif shape.lane in tiles:
        assert shape.lane is not None
        wide = entry.lane or (
            max(target.lanes, GPU_COLUMNS.row_bytes // shape.element) if shape.inner else budget
        )
        tiles[shape.lane] = fit_tile(shape.lane, wide, hints)
        held *= tiles[shape.lane]
    spare = _spare_elements(form, target)
    for a in reversed(shape.grid):
        room = min(budget // held, spare // max(1, held)) if spare else budget // held
        if tiles[a] == 1 and room > 1:
            tiles[a] = fit_tile(a, last_power_of_two(room), hints)
            held *= tiles[a]
    return tiles


def _spare_elements(form: Form, target: Target) -> int:
    """Elements that a block may have if every core is to get some blocks; 0 if sizes are unknown (no limit)."""
    sizes = [dims.static(dims.prod(a.extent for a in i.axes)) for i in form.items]
    if any(s is None for s in sizes):
        return 0
    largest = max((s for s in sizes if s is not None), default=0)
    return max(target.lanes, largest // (2 * target.cores))


def _grid_plan(a: Axis, tiles: dict[Axis, int], descending: bool = False) -> ClassPlan:
    tile = tiles[a]
    return ClassPlan(a, Role.GRID, tile, tile if tile > 1 else 0, descending and tile > 1)


def _inner_plan(a: Axis, shape: Shape, tiles: dict[Axis, int], most: Mapping[Axis, int]) -> ClassPlan:
    untiled = a in most and tiles[a] >= most[a]
    return ClassPlan(
        a, Role.RESIDENT if untiled else Role.SCAN if a == shape.scan else Role.STREAMED, tiles[a]
    )
