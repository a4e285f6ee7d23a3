"""Schedules that are proposed for a plain product of matrices, for a clock to decide between them. A convolution is one
once all classes of a side are merged.

All tiles, warps, stages and orders of blocks are enumerated (`PROPOSALS`), those that registers or shared memory cannot
hold are dropped, and the model of `matmul_cost` ranks the others. Of the fastest a few of each tile are kept: the model
knows more of tiles than of warps and stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product as choices

from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import IllegalSchedule
from tilewright.form.steps import take
from tilewright.ir.expr import Axis
from tilewright.ir.form import Form
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.legality import check_roles
from tilewright.schedule.gpu.block_memory import ProductBlocks
from tilewright.schedule.gpu.block_shape import shape_of
from tilewright.schedule.gpu.blocks import schedule_of_blocks
from tilewright.schedule.gpu.capacity import plain_excess, product_excess
from tilewright.schedule.gpu.matmul import ladder
from tilewright.schedule.gpu.matmul_cost import (
    PlainProduct,
    Tiles,
    bytes_once,
    matmul_seconds,
    persistent_pays,
    plain_product,
)
from tilewright.schedule.product_table import MeasuredBlocks, blocks_of
from tilewright.schedule.scheduler import Comparison, Solution
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import PROPOSALS
from tilewright.tuning.thresholds import GPU_MATMUL


def proposals(found: Solution, by: Comparison, blocks: MeasuredBlocks | None = None) -> Sequence[Solution]:
    """Other schedules of a form, the fastest by the model first; none if it is no plain product of matrices. With
    `blocks`, those that have them, or them with other stages if they do not fit with theirs."""
    merged = by.take("merge_sides", found.form)
    product = plain_product(merged)
    if product is None:
        return ()
    target, hints = by.target, by.hints
    made: list[Solution] = []
    for tiles in _kept(product, target, hints, blocks):
        walked, own = _walked(product, tiles, target, hints)
        form, schedule = by.completed(walked.form, schedule_of_tiles(walked, own, hints))
        try:
            check_roles(form, schedule)
        except IllegalSchedule:
            continue
        if blocks is None or blocks_of(schedule).are_like(blocks):
            made.append(Solution(schedule, form, matmul_seconds(product, tiles, target, hints), found.rows))
    return sorted(made, key=lambda s: s.seconds)[: PROPOSALS.max_kept]


def schedule_of_tiles(product: PlainProduct, tiles: Tiles, hints: SizeHints) -> Schedule:
    """The schedule that walks a product in these tiles, rows outside columns."""
    shape = shape_of(product.form, hints)
    most = {a: n for a in shape.inner if (n := dims.static(a.extent)) is not None}
    made = schedule_of_blocks(product.form, shape, tiles.blocks, most, multiplied=True)
    steps = () if product.walked is None else (product.walked,)
    place = {a: n for n, a in enumerate((*product.batch, tiles.rows, tiles.columns, *steps, product.k))}
    classes = sorted(made.tiling.classes, key=lambda c: place[c.axis])
    return made.changed(
        classes=tuple(classes),
        order=tiles.order,
        persistent=tiles.persistent,
        stored_pieces=tiles.stored_pieces,
        descriptors=tiles.blocks.descriptors,
    )


def _walked(
    product: PlainProduct, tiles: Tiles, target: Target, hints: SizeHints
) -> tuple[PlainProduct, Tiles]:
    """The same with a class for the steps of sums, where each is in one tap."""
    depth = tiles.blocks.tiles[product.k]
    form = _in_steps(product, depth, target, hints)
    if form is product.form:
        return product, tiles
    steps, within = (a for a in form.classes() if a not in product.form.classes())
    made = plain_product(form, steps)
    assert made is not None
    own = {a: n for a, n in tiles.blocks.tiles.items() if a != product.k} | {steps: 1, within: depth}
    return made, replace(tiles, blocks=replace(tiles.blocks, tiles=own))


def _kept(
    product: PlainProduct, target: Target, hints: SizeHints, blocks: MeasuredBlocks | None
) -> list[Tiles]:
    """The fastest of all tiles, or of those of some blocks, of which a few may be the same tile of the result, in all
    ways to load operands."""
    found = _candidates(product, target, hints)
    if blocks is not None:
        found = (t for t in found if _has_tiles(product, t, blocks))
    legal = [t for t in found if not product_excess(product, t.blocks, target)]
    if blocks is not None:
        legal = [t for t in legal if t.blocks.stages == blocks.stages] or legal
    price = _price_of_tiles(product, target, hints)

    def best(tiles: Tiles) -> float:
        return min(map(price, _loaded(product, tiles, target)))

    alike: Counter[tuple[Axis, int, int, int]] = Counter()
    tried: list[Tiles] = []
    for tiles in sorted(legal, key=best):
        tile = tiles.rows, tiles.height, tiles.width, tiles.blocks.tiles[product.k]
        if alike[tile] < PROPOSALS.max_alike and len(tried) < PROPOSALS.max_kept:
            alike[tile] += 1
            tried += _variants(product, tiles, target, hints, both=not tried)
    return tried


def _has_tiles(product: PlainProduct, tiles: Tiles, blocks: MeasuredBlocks) -> bool:
    """Whether the tile of a result, what is summed in a step, and the warps are those of some blocks."""
    sides = tuple(sorted(n for n in (tiles.height, tiles.width) if n > 1))
    return (sides, tiles.blocks.tiles[product.k], tiles.blocks.warps) == (
        blocks.tiles,
        blocks.step,
        blocks.warps,
    )


def _price_of_tiles(product: PlainProduct, target: Target, hints: SizeHints) -> Callable[[Tiles], float]:
    """Modelled seconds under tiles; what is moved at least is counted once for all of them."""
    moved = bytes_once(product.form, hints)
    return lambda tiles: matmul_seconds(product, tiles, target, hints, moved)


def _candidates(product: PlainProduct, target: Target, hints: SizeHints) -> Iterator[Tiles]:
    """All tiles of a product, whether they fit or not."""
    batch = dict.fromkeys(product.batch, 1)
    depths = _depths(product, target, hints)
    for rows, columns in _sides(product, target, hints):
        tall, wide = (ladder(a, PROPOSALS.sides, hints) for a in (rows, columns))
        for height, width, depth, warps in choices(tall, wide, depths, PROPOSALS.warps):
            if height * width < warps * GPU_MATMUL.warp_elements:
                continue
            tiles = batch | {rows: height, columns: width, product.k: depth}
            for stages in (1,) if product.is_one_step(depth) or product.gathered else PROPOSALS.stages:
                yield Tiles(ProductBlocks(tiles, warps, stages, halves=True), rows, columns)


def _depths(product: PlainProduct, target: Target, hints: SizeHints) -> list[int]:
    """Tiles of what is summed: those that stay in one tap, if they are no less than threads copy at once."""
    found = ladder(product.k, PROPOSALS.depths, hints)
    walked = [d for d in found if _in_steps(product, d, target, hints) is not product.form]
    return walked if max(walked, default=0) >= PROPOSALS.min_walked_depth else found


def _in_steps(product: PlainProduct, depth: int, target: Target, hints: SizeHints) -> Form:
    """The form with a class for the steps of sums, if each of them is in one tap; else as it is."""
    return take("walk_sums", product.form, target, hints, {product.k: depth})


def _variants(
    product: PlainProduct, tiles: Tiles, target: Target, hints: SizeHints, *, both: bool
) -> list[Tiles]:
    """Points in the best order, and row by row too if `both` are asked for; operands loaded by descriptor and by
    address; a block for each point, and blocks that stay."""
    price = _price_of_tiles(product, target, hints)
    orders = PROPOSALS.orders if _exceeds_cache(product, target, hints) else (0,)
    best = min((replace(tiles, order=o) for o in orders), key=price)
    made = [best, tiles] if both and best != tiles else [best]
    single = [t for m in made for t in _loaded(product, m, target)]
    staying = [t for t in single if persistent_pays(product, t, target, hints)]
    return [*single, *(p for t in staying for p in _persistent_variants(product, t, target))]


def _persistent_variants(product: PlainProduct, tiles: Tiles, target: Target) -> list[Tiles]:
    """The same with blocks that go through grid points, and store by descriptor where shared memory has room for a
    piece of the results beside operands; none where it has no room for what results are made of."""
    made = replace(tiles, persistent=True)
    both = replace(made, stored_pieces=PROPOSALS.stored_pieces), made
    return [t for t in both if not plain_excess(product, t, target)][:1]


def _loaded(product: PlainProduct, tiles: Tiles, target: Target) -> list[Tiles]:
    """The ways to load operands: by descriptor where one reaches any, and by address."""
    by_address = [tiles]
    if not target.descriptors or not product.described:
        return by_address
    return [replace(tiles, blocks=replace(tiles.blocks, descriptors=True)), *by_address]


def _sides(product: PlainProduct, target: Target, hints: SizeHints) -> list[tuple[Axis, Axis]]:
    """Which class lies along the rows of matrix units: that of the product's own rows, or, where these are too few for
    a unit, the other one too."""
    tall = max((u.shape[0] for u in target.matrix_units if u.operand == product.operand.name), default=0)
    straight = [(product.m, product.n)]
    short = (hints.likely(product.m.extent) or tall) < tall
    return [*straight, (product.n, product.m)] if short else straight


def _exceeds_cache(product: PlainProduct, target: Target, hints: SizeHints) -> bool:
    """Whether the last cache has no room for what the product reads and writes."""
    cache = target.level(MemoryKind.L2)
    return cache is not None and bytes_once(product.form, hints) > cache.lasting_bytes
