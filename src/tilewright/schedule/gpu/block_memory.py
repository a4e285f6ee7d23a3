"""What a block of products holds: accumulators and scores in registers, operands of all stages in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from typing import Any, Protocol, TypeAlias

import numpy as np

from tilewright.analysis.contraction import Contraction, contraction, factors, stored_half
from tilewright.analysis.runs import words_of
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axes_of, axis, substitute, walk
from tilewright.ir.form import Form, Item, reached_folds
from tilewright.ir.graph import Value
from tilewright.ir.selection import Precision
from tilewright.target import Target
from tilewright.tuning.thresholds import CONTRACTION, GPU_MATMUL


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


Count: TypeAlias = Any
"""A whole number, or an array of such for many blocks at once."""


class SomeBlocks(Protocol):
    """One candidate, or many: then tiles, warps and stages are arrays that are broadcast against each other."""

    @property
    def tiles(self) -> Mapping[Axis, Count]: ...
    @property
    def warps(self) -> Count: ...
    @property
    def stages(self) -> Count: ...
    @property
    def spread(self) -> tuple[int, ...]: ...
    @property
    def halves(self) -> bool: ...


def where(condition: Count, one: Count, other: Count) -> Count:
    """`one` where the condition holds, else the `other`."""
    return (one if condition else other) if isinstance(condition, bool) else np.where(condition, one, other)


def largest(one: Count, other: Count) -> Count:
    """The larger of two."""
    return max(one, other) if isinstance(one, int) and isinstance(other, int) else np.maximum(one, other)


def registers(known: BlockProducts, c: SomeBlocks, target: Target, *, packed: bool = False) -> Count:
    """Registers of a thread (an estimate): accumulators, scores of a step with their copy for the next product, states
    per element, and the rest. `packed`: what is read beside loops counts by its bytes, as it does where it goes into
    the result at once."""
    tiles = c.tiles
    elements: Count = 0.0
    units = {u.operand for u in target.matrix_units}
    threads = c.warps * target.lanes
    for s in made_products(known, tiles):
        product = s.product
        size = 0 if s.joins else tiles[product.m] * tiles[product.n]
        elements = elements + size
        if product.operand.name not in units:
            # Without matrix units, a thread holds the rows and columns that it multiplies.
            elements = elements + tiles[product.k] * (size * threads) ** 0.5
        alike = largest(1, c.warps * CONTRACTION.min_block_side // tiles[product.m])
        """Warps that hold the same rows of its left side."""
        if s.streams:
            elements = elements + (0 if c.halves else size)  # a step's own sums
        elif s.feeds:
            held = GPU_MATMUL.split_register_bytes if s.split else product.operand.bytes
            elements = elements + size * alike * held / 4
        if s.split and s.left_streams:
            elements = elements + tiles[product.m] * tiles[product.k] * alike * GPU_MATMUL.piece_bytes / 4
    for f in c.spread:
        elements = elements + _volume(tiles, known.form.items[f].axes)
    for item in known.form.folds.values():
        if item.scan in known.streamed:  # what is run over, and the results, which lie otherwise in threads
            elements = elements + 2 * _volume(tiles, item.kept)
    for read, axes in _beside(known.form, known.sums):
        size = _volume(tiles, axes)
        narrowed = packed and not set(axes) & set(known.streamed)
        stored = known.form.params[read.value].dtype if isinstance(read.value, int) else read.dtype
        held = size * stored.bytes / f32.bytes if narrowed else size
        elements = elements + where(size >= CONTRACTION.min_block_side**2, held, 0)
    share = elements / threads
    return (int(share) if isinstance(share, float) else share.astype(np.int64)) + GPU_MATMUL.other_registers


def shared_bytes(known: BlockProducts, c: SomeBlocks, *, ahead: bool = True) -> Count:
    """Shared memory of a block (an estimate from above): operands from memory, those of a loop once per stage; what
    else a loop reads, which is fetched `ahead`, as many steps as there are further stages."""
    tiles, stages = c.tiles, c.stages
    total: Count = GPU_MATMUL.merge_bytes
    for r, axes in _beside(known.form, known.sums) if ahead else ():
        if isinstance(r.value, int):
            walks = any_of(tiles[a] > 1 for a in axes if a in known.streamed)
            size = _volume(tiles, axes) * known.form.params[r.value].dtype.bytes
            total = total + where(walks, size * (stages - 1), 0)
    pieces: Count = 0
    seen: list[ProductSide] = []
    for s in made_products(known, tiles):
        product = s.product
        for side in s.sides:
            if not side.reads:
                continue
            fresh = negated(any_of(side.is_same_block(other, tiles) for other in seen))
            seen.append(side)
            if fresh is False:
                continue
            size = tiles[side.own] * tiles[product.k]
            single = size * product.operand.bytes
            if s.split and not side.looped:
                total = total + where(fresh, size * GPU_MATMUL.piece_bytes, 0)
            elif s.split:  # pieces of left sides stay in registers, with few rows all pieces
                total = total + where(fresh, single * (stages - 1) if side.plain else 0, 0)
                right = False if side.own == product.m else tiles[product.m] >= GPU_MATMUL.warp_group_rows
                held = where(right, size * GPU_MATMUL.piece_bytes, where(stages == 1, single, 0))
                pieces = largest(pieces, where(fresh, held, 0))
            else:
                held = single * (stages if side.plain and side.looped else 1)
                total = total + where(fresh, held + _loaded_ahead(side, size, stages), 0)
    return total + pieces


def _loaded_ahead(side: ProductSide, size: Count, stages: Count) -> Count:
    """Bytes of packed words that wait to be made an operand, of all stages."""
    if not side.words:
        return 0
    bytes_: Count = 0.0
    for count, width in side.words:
        bytes_ = bytes_ + size / count * width
    whole = int(bytes_) if isinstance(bytes_, float) else bytes_.astype(np.int64)
    return where(stages == 1, 0, whole * stages)


def any_of(conditions: Iterable[Count]) -> Count:
    """Whether one of some conditions holds."""
    found: Count = False
    for condition in conditions:
        if condition is True:
            return True
        found = condition if found is False else found if condition is False else found | condition
    return found


def negated(condition: Count) -> Count:
    """Whether a condition does not hold."""
    return not condition if isinstance(condition, bool) else ~condition


def _words(side: Expr, axes: tuple[Axis, Axis], params: Sequence[Value]) -> Iterator[tuple[int, int]]:
    """Of the packed words that wait to be made an operand: how many elements one has, and its bytes."""
    for x in walk(side):
        if x.op != "read" or not isinstance(x.value, int) or params[x.value].dtype.is_float:
            continue
        words = words_of(x.args[0], axes, CONTRACTION.min_block_side)
        if words.is_whole:
            yield math.prod(words.counts.values()), params[x.value].dtype.bytes


@dataclass(frozen=True, slots=True, eq=False)
class ProductSide:
    """A side of a product of blocks, whose rows or columns are `own`: whether it `reads` memory, does nothing else
    (`plain`), and is there in each step of a loop; the elements of the packed `words` that such a step loads, and their
    bytes."""

    side: Expr
    own: Axis
    reads: bool
    plain: bool
    looped: bool
    words: tuple[tuple[int, int], ...]

    def is_same_block(self, other: ProductSide, tiles: Mapping[Axis, Count]) -> Count:
        """Whether two sides are the same block of memory, whatever the classes are called that walk it: values that are
        the first part of keys are loaded once."""
        if self.side is other.side:
            return True
        ways = _renamings(self.side, other.side)
        return any_of(
            negated(
                any_of(
                    (
                        *(tiles.get(a, 1) != tiles.get(b, 1) for a, b in way),
                        # classes of one extent and tile are not told apart
                        *(tiles.get(a, 1) == tiles.get(b, 1) for a, b in _of_one_extent(self.side)),
                    )
                )
            )
            for way in ways
        )


@lru_cache(1 << 10)
def _renamings(side: Expr, other: Expr) -> tuple[tuple[tuple[Axis, Axis], ...], ...]:
    """Which classes of a read become which of another one, of the same extent, so that they are equal."""
    one, two = (sorted(classes_of(e), key=lambda a: (repr(a.extent), a.name)) for e in (side, other))
    if side.op != "read" or other.op != "read" or [a.extent for a in one] != [a.extent for a in two]:
        return ()
    found: list[tuple[tuple[Axis, Axis], ...]] = []
    for order in permutations(two):
        way = tuple(zip(one, order, strict=True))
        if all(a.extent is b.extent for a, b in way):
            table = {axis(a): axis(b) for a, b in way}
            if substitute(side, table) is other:
                found.append(way)
    return tuple(found)


@lru_cache(1 << 10)
def _of_one_extent(side: Expr) -> tuple[tuple[Axis, Axis], ...]:
    return tuple((a, b) for a, b in combinations(classes_of(side), 2) if a.extent is b.extent)


def classes_of(e: Expr) -> set[Axis]:
    """The classes that an expression depends on."""
    return {a.value for a in axes_of(e) if isinstance(a.value, Axis)}


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


@dataclass(frozen=True, slots=True, eq=False)
class BlockSum:
    """A fold that is a product of blocks: whether it is only added to another one (`joins`), is added up over steps
    (`streams`), `feeds` another product, is multiplied in pieces, and has a left side of each step."""

    item: Item
    product: Contraction
    sides: tuple[ProductSide, ProductSide]
    joins: bool
    streams: bool
    feeds: bool
    split: bool
    left_streams: bool


def made_products(known: BlockProducts, tiles: Mapping[Axis, Count]) -> tuple[BlockSum, ...]:
    """The folds that are products of blocks, which all sums are with these tiles."""
    found = products_of(known, tiles)
    assert found is not None
    return found


def products_of(known: BlockProducts, tiles: Mapping[Axis, Count]) -> tuple[BlockSum, ...] | None:
    """The same; None if one of the sums is no product of blocks with these tiles. Of many tiles of a class, all are
    sides of blocks, or none is."""
    side = CONTRACTION.min_block_side
    least = ((a, t if isinstance(t, int) else int(t.min())) for a, t in tiles.items())
    # Which product a fold is depends on no more of a tile: tiles of one kind share what is found.
    kinds = tuple((a, 1 if t <= 1 else 2 if t < side else side) for a, t in least)
    return _products_of(known.form, known.sums, known.streamed, known.singles, kinds)


@lru_cache(1 << 6)
def _products_of(
    form: Form, sums: tuple[int, ...], streamed: tuple[Axis, ...], singles: Precision,
    kinds: tuple[tuple[Axis, int], ...],
) -> tuple[BlockSum, ...] | None:  # fmt: skip
    tile = dict(kinds).__getitem__
    made = [contraction(form.items[i], form.params, tile) for i in sums]
    found = [m for m in made if m is not None]
    if len(found) < len(made):
        return None
    joining, walked = _added(form, sums), set(streamed)

    def side_of(item: Item, product: Contraction, side: Expr, own: Axis) -> ProductSide:
        reads = any(x.op == "read" for x in walk(side))
        plain = stored_half(side, form.params) is not None or side.op == "read"
        looped = bool(walked & set(item.axes) & {own, product.k})
        ahead = _words(side, (own, product.k), form.params) if looped and not plain else ()
        return ProductSide(side, own, reads, plain, looped, tuple(ahead))

    return tuple(
        BlockSum(
            item,
            m,
            (side_of(item, m, m.left, m.m), side_of(item, m, m.right, m.n)),
            item.id in joining,
            bool(walked & set(item.reduce)),
            any(item.id in reached_folds(form, form.items[i]) for i in sums if i != item.id),
            m.operand is f32 and singles == "bf16x6",
            bool(walked & classes_of(m.left)),
        )
        for item, m in zip((form.items[i] for i in sums), found, strict=True)
    )


def _volume(tiles: Mapping[Axis, Count], axes: Sequence[Axis]) -> Count:
    size: Count = 1
    for a in axes:
        size = size * tiles[a]
    return size
