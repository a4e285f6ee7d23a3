"""What a block of products holds: accumulators and scores in registers, operands of all stages in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

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


def registers(known: BlockProducts, c: ProductBlocks, target: Target, *, packed: bool = False) -> int:
    """Registers of a thread (an estimate): see `registers_of`."""
    return registers_of(known, made_products(known, c.tiles), c, target, packed=packed)


def registers_of(
    known: BlockProducts, made: Sequence[BlockSum], c: ProductBlocks, target: Target, *, packed: bool = False
) -> int:
    """Registers of a thread that holds the products that are `made` (an estimate): accumulators, scores of a step with their copy for the next product, states
    per element, and the rest. `packed`: what is read beside loops counts by its bytes, as it does where it goes into
    the result at once."""
    elements = 0.0
    units = {u.operand for u in target.matrix_units}
    threads = c.warps * target.lanes
    for s in made:
        product = s.product
        size = 0 if s.joins else c.tiles[product.m] * c.tiles[product.n]
        elements += size
        if product.operand.name not in units:
            # Without matrix units, a thread holds the rows and columns that it multiplies.
            elements += c.tiles[product.k] * (size * threads) ** 0.5
        if s.streams:
            elements += 0 if c.halves else size  # a step's own sums
        else:
            held = GPU_MATMUL.split_register_bytes if s.split else product.operand.bytes
            elements += size * _alike(c, product) * held / 4 if s.feeds else 0
        if s.split and s.left_streams:
            elements += (
                c.tiles[product.m] * c.tiles[product.k] * _alike(c, product) * GPU_MATMUL.piece_bytes / 4
            )
    for f in c.spread:
        item = known.form.items[f]
        elements += _volume(c.tiles, item.axes)
    for item in known.form.folds.values():
        if item.scan in known.streamed:  # what is run over, and the results, which lie otherwise in threads
            elements += 2 * _volume(c.tiles, item.kept)
    for read, axes in _beside(known.form, known.sums):
        size = _volume(c.tiles, axes)
        if size >= CONTRACTION.min_block_side**2:
            elements += (
                size * read.dtype.bytes / f32.bytes
                if packed and not set(axes) & set(known.streamed)
                else size
            )
    return int(elements / (c.warps * target.lanes)) + GPU_MATMUL.other_registers


@dataclass(frozen=True, slots=True)
class SharedNeeds:
    """Bytes of shared memory of blocks that have the same tiles, by how their stages count: `fixed`, those of each
    stage, of each stage but the first, of each of several, and of pieces, `single_pieces` being those in one stage."""

    fixed: int
    staged: int
    further: int
    several: int
    pieces: int
    single_pieces: int

    def bytes(self, stages: int) -> int:
        """With so many stages."""
        total = self.fixed + self.staged * stages + self.further * (stages - 1)
        if stages == 1:
            return total + max(self.pieces, self.single_pieces)
        return total + self.several * stages + self.pieces


def shared_bytes(known: BlockProducts, c: ProductBlocks, *, ahead: bool = True) -> int:
    """Shared memory of a block (an estimate from above): operands from memory, those of a loop once per stage; what
    else a loop reads, which is fetched `ahead`, as many steps as there are further stages."""
    return shared_needs(known, made_products(known, c.tiles), c.tiles, ahead=ahead).bytes(c.stages)


def shared_needs(
    known: BlockProducts, made: Sequence[BlockSum], tiles: Mapping[Axis, int], *, ahead: bool = True
) -> SharedNeeds:
    """As `shared_bytes`, for any number of warps and stages."""
    fixed, staged, further, several = GPU_MATMUL.merge_bytes, 0, 0, 0
    for r, axes in _beside(known.form, known.sums) if ahead else ():
        if isinstance(r.value, int) and any(a in known.streamed and tiles[a] > 1 for a in axes):
            further += _volume(tiles, axes) * known.form.params[r.value].dtype.bytes
    held: set[object] = set()
    pieces = single_pieces = 0
    for s in made:
        for side in s.sides:
            block = side.block(tiles)
            if block in held or not side.reads:
                continue
            held.add(block)
            size = tiles[side.own] * tiles[s.product.k]
            single = size * s.product.operand.bytes
            if s.split and not side.looped:
                fixed += size * GPU_MATMUL.piece_bytes
            elif s.split:  # pieces of left sides stay in registers, with few rows all pieces
                further += single if side.plain else 0
                if side.own != s.product.m and tiles[s.product.m] >= GPU_MATMUL.warp_group_rows:
                    pieces = max(pieces, size * GPU_MATMUL.piece_bytes)
                else:
                    single_pieces = max(single_pieces, single)
            elif side.plain and side.looped:
                staged += single
            else:
                fixed += single
                several += int(sum(size / count * width for count, width in side.words)) if side.looped else 0
    return SharedNeeds(fixed, staged, further, several, pieces, single_pieces)


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
    bytes; how it may be a side of another product as well."""

    side: Expr
    own: Axis
    reads: bool
    plain: bool
    looped: bool
    words: tuple[tuple[int, int], ...]
    recurs: Recurrence | None

    def block(self, tiles: Mapping[Axis, int]) -> object:
        """Equal for sides that are the same block of memory, whatever the classes are called that walk it: values that
        are the first part of keys are loaded once."""
        if self.recurs is None:
            return self.side
        if self.recurs.like is None:
            return _renamed(self.side, tuple((a, tiles.get(a, 1)) for a in self.recurs.walked))
        return self.recurs.like, *(tiles.get(a, 1) for a in self.recurs.walked)


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """A side that may be the same block as another one, under some tiles: the classes that walk it, in an order that is
    the same in all sides that are `like` it. None where classes of one extent leave the order open."""

    like: Expr | None
    walked: tuple[Axis, ...]


def _recurring(sides: Iterable[Expr]) -> dict[Expr, Recurrence]:
    """Those of some sides that differ from others in the names of classes alone, or that walk several classes of one
    extent."""
    alike: dict[Expr, list[tuple[Expr, Recurrence]]] = {}
    found: dict[Expr, Recurrence] = {}
    for side in dict.fromkeys(side for side in sides if side.op == "read"):
        walked = sorted(classes_of(side), key=lambda a: repr(a.extent))
        if len({a.extent for a in walked}) < len(walked):
            found[side] = Recurrence(None, tuple(walked))
        else:
            like = _renamed(side, tuple((a, 0) for a in walked))
            alike.setdefault(like, []).append((side, Recurrence(like, tuple(walked))))
    return found | {side: r for group in alike.values() if len(group) > 1 for side, r in group}


@lru_cache(1 << 10)
def _renamed(side: Expr, tiles: tuple[tuple[Axis, int], ...]) -> Expr:
    """A read with its classes called by their extents and tiles, where these tell them apart."""
    table = {axis(a): axis(Axis(f"{a.extent}/{tile}", a.extent)) for a, tile in tiles}
    return substitute(side, table) if len(set(table.values())) == len(table) else side


def classes_of(e: Expr) -> set[Axis]:
    """The classes that an expression depends on."""
    return {a.value for a in axes_of(e) if isinstance(a.value, Axis)}


def _alike(c: ProductBlocks, product: Contraction) -> int:
    """How many warps hold the same rows of a product's left side."""
    return max(1, c.warps * CONTRACTION.min_block_side // c.tiles[product.m])


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


def made_products(known: BlockProducts, tiles: Mapping[Axis, int]) -> tuple[BlockSum, ...]:
    """The folds that are products of blocks, which all sums are with these tiles."""
    found = products_of(known, tiles)
    assert found is not None
    return found


def products_of(known: BlockProducts, tiles: Mapping[Axis, int]) -> tuple[BlockSum, ...] | None:
    """The same; None if one of the sums is no product of blocks with these tiles."""
    side = CONTRACTION.min_block_side
    # Which product a fold is depends on no more of a tile: tiles of one kind share what is found.
    kinds = tuple((a, 1 if t <= 1 else 2 if t < side else side) for a, t in tiles.items())
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
    again = _recurring(e for m in found for e in (m.left, m.right))
    joining, walked = _added(form, sums), set(streamed)

    def side_of(item: Item, product: Contraction, side: Expr, own: Axis) -> ProductSide:
        reads = any(x.op == "read" for x in walk(side))
        plain = stored_half(side, form.params) is not None or side.op == "read"
        looped = bool(walked & set(item.axes) & {own, product.k})
        ahead = _words(side, (own, product.k), form.params) if looped and not plain else ()
        return ProductSide(side, own, reads, plain, looped, tuple(ahead), again.get(side))

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


def _volume(tiles: Mapping[Axis, int], axes: Sequence[Axis]) -> int:
    size = 1
    for a in axes:
        size *= tiles[a]
    return size
