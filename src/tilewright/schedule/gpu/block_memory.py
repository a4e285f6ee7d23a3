"""What a block of products holds: accumulators and scores in registers, operands of all stages in shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilewright.analysis.contraction import Contraction, contraction, factors, stored_half
from tilewright.analysis.runs import words_of
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axes_of, axis, substitute, walk
from tilewright.ir.form import Form, Item, reached_folds
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
    """Registers of a thread (an estimate): accumulators, scores of a step with their copy for the next product, states
    per element, and the rest. `packed`: what is read beside loops counts by its bytes, as it does where it goes into
    the result at once."""
    elements = 0.0
    added = _added(known.form, known.sums)
    for item, product in made_products(known, c):
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
                item.id in reached_folds(known.form, known.form.items[i]) for i in known.sums if i != item.id
            )
            held = GPU_MATMUL.split_register_bytes if is_split(known, product) else product.operand.bytes
            elements += size * _alike(c, product) * held / 4 if fed else 0
        if is_split(known, product) and set(known.streamed) & classes_of(product.left):
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


def shared_bytes(known: BlockProducts, c: ProductBlocks, *, ahead: bool = True) -> int:
    """Shared memory of a block (an estimate from above): operands from memory, those of a loop once per stage; what
    else a loop reads, which is fetched `ahead`, as many steps as there are further stages."""
    total = GPU_MATMUL.merge_bytes
    for r, axes in _beside(known.form, known.sums) if ahead else ():
        if isinstance(r.value, int) and any(a in known.streamed and c.tiles[a] > 1 for a in axes):
            total += _volume(c, axes) * known.form.params[r.value].dtype.bytes * (c.stages - 1)
    held: set[Expr] = set()
    pieces = 0
    for item, product in made_products(known, c):
        loops = set(known.streamed) & set(item.axes)
        for side, own in ((product.left, product.m), (product.right, product.n)):
            block = block_of(side, c)
            if block in held or not any(x.op == "read" for x in walk(side)):
                continue
            held.add(block)
            size = c.tiles[own] * c.tiles[product.k]
            plain = stored_half(side, known.form.params) is not None or side.op == "read"
            looped = bool(loops & {own, product.k})
            if is_split(known, product) and not looped:
                total += size * GPU_MATMUL.piece_bytes
            elif is_split(known, product):  # pieces of left sides stay in registers, with few rows all pieces
                single = size * product.operand.bytes
                total += single * (c.stages - 1) if plain else 0
                right = own != product.m and c.tiles[product.m] >= GPU_MATMUL.warp_group_rows
                pieces = max(
                    pieces, size * GPU_MATMUL.piece_bytes if right else single if c.stages == 1 else 0
                )
            else:
                total += size * product.operand.bytes * (c.stages if plain and looped else 1)
                total += 0 if plain or not looped else _loaded_ahead(side, (own, product.k), known, c)
    return total + pieces


def _loaded_ahead(side: Expr, axes: tuple[Axis, Axis], known: BlockProducts, c: ProductBlocks) -> int:
    """Bytes of packed words that wait to be made an operand, of all stages."""
    if c.stages == 1:
        return 0
    total = 0.0
    for x in walk(side):
        if x.op != "read" or not isinstance(x.value, int) or known.form.params[x.value].dtype.is_float:
            continue
        words = words_of(x.args[0], axes, CONTRACTION.min_block_side)
        if words.is_whole:
            elements = math.prod(c.tiles[a] for a in axes) / math.prod(words.counts.values())
            total += elements * known.form.params[x.value].dtype.bytes
    return int(total) * c.stages


def block_of(side: Expr, c: ProductBlocks) -> Expr:
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


def is_split(known: BlockProducts, product: Contraction) -> bool:
    """Whether matrix units take pieces of the operands."""
    return product.operand is f32 and known.singles == "bf16x6"


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


def made_products(known: BlockProducts, c: ProductBlocks) -> list[tuple[Item, Contraction]]:
    """The folds that are products of blocks, and these products."""
    made = contractions_of(known.form, known.sums, tuple(c.tiles.items()))
    assert made is not None
    return [(known.form.items[i], m) for i, m in zip(known.sums, made, strict=True)]


@lru_cache(1 << 6)
def contractions_of(
    form: Form, sums: tuple[int, ...], tiles: tuple[tuple[Axis, int], ...]
) -> tuple[Contraction, ...] | None:
    """The sums as products of blocks with these tiles; None if one is none."""
    tile = dict(tiles).__getitem__
    made = [contraction(form.items[i], form.params, tile) for i in sums]
    return None if any(m is None for m in made) else tuple(m for m in made if m is not None)


def _volume(c: ProductBlocks, axes: Sequence[Axis]) -> int:
    size = 1
    for a in axes:
        size *= c.tiles[a]
    return size
