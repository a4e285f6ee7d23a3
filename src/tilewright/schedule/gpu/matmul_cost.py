"""Modelled time of a plain product of matrices under its tiles: what they move between levels, and waves of blocks.

    seconds = launch + waiting + storing + max(terms) + loss * (sum(terms) - max(terms))
    terms   = multiply, shared, L2, device, arrival, gathering, addressing, unpacking

    multiply = rounds * flops of a block / (rate / cores)        rounds = ceil(blocks / cores)
    shared   = rounds * bytes that matrix units read and copies write / (bandwidth / cores)
    L2       = blocks * (rows + columns) * depth * bytes / bandwidth
    device   = what waves of blocks read that share rows and columns of operands, / bandwidth
    arrival  = rounds * steps * latency / steps that are loaded ahead, shared among the blocks of a core
    gathering = rounds * elements that no copy takes * operations for each / (rate of threads / cores)
    addressing = rounds * copies that no descriptor does * operations for each / (rate of threads / cores)
    unpacking = rounds * elements that are made of others * operations for each / (rate of threads / cores)

A core that has few blocks, or few bytes under way, does not reach the bandwidth of a memory (Little's law).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewright.analysis.contraction import contraction, product_sides
from tilewright.analysis.size_hints import SizeHints
from tilewright.form.implied import listed_tiles
from tilewright.ir.dtype import DType, f32
from tilewright.ir.expr import Axis, axes_of, axis
from tilewright.ir.form import Form, Item
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.target import MatrixUnit, MemoryKind, Target
from tilewright.tuning.thresholds import CONTRACTION, GPU_MATMUL

from .block_memory import BlockProducts, ProductBlocks, registers, shared_bytes
from .operand_work import operand_work


@dataclass(frozen=True, slots=True)
class PlainProduct:
    """A form that is one product of matrices with pointwise ops behind it: classes of its rows, of its columns and of
    its sums; classes of a batch; what it sums (several products may share all classes, and operands too); how many
    operands there are of rows, and of columns."""

    form: Form
    m: Axis
    n: Axis
    k: Axis
    batch: tuple[Axis, ...]
    sums: tuple[int, ...]
    operand: DType
    operands: Mapping[Axis, int]
    loaded_bytes: Mapping[Axis, float]
    """Of an element of each side: a packed one has less than the half that is made of it."""
    copies: Mapping[Axis, float]
    """Which load an element of each side."""
    operations: Mapping[Axis, float]
    """Which make an element of each side of what is loaded."""
    gathered: frozenset[Axis]
    """The sides of which threads load single elements, since none lie side by side that could be copied at once."""
    described: frozenset[Axis]
    """The sides of which descriptors reach all operands."""
    walked: Axis | None = None
    """The class of steps, each of which sums all of k: then k is a part of what is summed."""
    counted: dict[tuple[int, ...], int] = field(
        init=False, default_factory=dict[tuple[int, ...], int], repr=False, compare=False
    )
    """Registers and bytes that were counted before: the same tiles are looked at from several sides."""

    def is_one_step(self, depth: int) -> bool:
        """Whether steps of `depth` are a single one, whatever the sizes."""
        extent = dims.static(self.k.extent)
        return self.walked is None and extent is not None and extent <= depth

    def depth(self, hints: SizeHints) -> int:
        """Products that are summed."""
        whole = self.k.extent if self.walked is None else dims.mul(self.walked.extent, self.k.extent)
        return max(1, hints.estimate(whole))

    def steps(self, depth: int, hints: SizeHints) -> int:
        """Steps of a sum that takes `depth` products in each."""
        return -(-self.depth(hints) // depth)

    def gathered_elements(self, blocks: ProductBlocks) -> int:
        """Elements of a step's operands that threads load one by one."""
        return blocks.tiles[self.k] * sum(blocks.tiles[a] for a in self.gathered)

    def held(self, blocks: ProductBlocks, target: Target, *, packed: bool = False) -> int:
        """Registers of a thread: see `matmul.registers`."""
        key = (packed, target.lanes, *self._key(blocks))
        if key not in self.counted:
            known = self.known(blocks.tiles[self.k])
            self.counted[key] = registers(known, blocks, target, packed=packed)
        return self.counted[key]

    def near_bytes(self, blocks: ProductBlocks) -> int:
        """Bytes of a block in shared memory: see `block_memory.shared_bytes`."""
        key = self._key(blocks)
        if key not in self.counted:
            self.counted[key] = shared_bytes(self.known(blocks.tiles[self.k]), blocks)
        return self.counted[key]

    def _key(self, blocks: ProductBlocks) -> tuple[int, ...]:
        sides = (blocks.tiles[a] for a in (self.m, self.n, self.k))
        return (blocks.warps, blocks.stages, blocks.halves, *sides)

    def known(self, depth: int) -> BlockProducts:
        """What `matmul` counts registers and shared memory of, where sums go in steps of `depth`."""
        streamed = () if self.is_one_step(depth) else (self.k,)
        tiled = (self.m, self.n, self.k)
        return BlockProducts(self.form, (*self.batch, self.m, self.n), tiled, streamed, {}, self.sums)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Blocks of a plain product: `rows` is the class that lies along the rows of matrix units, `columns` the other one;
    `order` and `persistent` as in `LaunchConfig`, `stored_pieces` as in `Memory`."""

    blocks: ProductBlocks
    rows: Axis
    columns: Axis
    order: int = 0
    persistent: bool = False
    stored_pieces: int = 0

    @property
    def height(self) -> int:
        """Rows of a block."""
        return self.blocks.tiles[self.rows]

    @property
    def width(self) -> int:
        """Columns of a block."""
        return self.blocks.tiles[self.columns]


def plain_product(form: Form, walked: Axis | None = None) -> PlainProduct | None:
    """The product of halves that a form is: one class a side, besides that of steps that are `walked`, any number of
    batch classes and pointwise ops behind it; None for another form."""
    sides = {i.id: _sides(i, walked) for i in form.folds.values()}
    found = [s for s in sides.values() if s is not None and all(len(side) == 1 for side in s)]
    if not found or len(found) < len(sides) or listed_tiles(form):
        return None
    (m,), (n,), (k,) = found[0]
    if any({*left, *right} != {m, n} or folded != [k] for left, right, folded in found):
        return None
    batch = tuple(a for a in form.classes() if a not in (m, n, k, walked))
    kept = {*batch, m, n}
    if any(set(i.axes) - {k, walked} != kept or i.scan is not None for i in form.items):
        return None
    ones = [*batch] if walked is None else [*batch, walked]
    tiles = dict.fromkeys(ones, 1) | dict.fromkeys((m, n, k), CONTRACTION.min_block_side)
    made = [
        c for i in form.folds.values() if (c := contraction(i, form.params, tiles.__getitem__)) is not None
    ]
    types = {c.operand for c in made}
    if len(made) < len(sides) or len(types) != 1 or not made[0].operand.is_half:
        return None
    read = {(a, e) for c in made for a, e in ((c.m, c.left), (c.n, c.right))}
    operands = Counter(a for a, _ in read)
    works = [(a, operand_work(e, (a, k), form.params, made[0].operand)) for a, e in read]
    gathered = frozenset(a for a, work in works if work.gathered)
    loaded = {side: sum(w.loaded_bytes for a, w in works if a is side) for side in (m, n)}
    copies = {side: sum(w.copies for a, w in works if a is side) for side in (m, n)}
    operations = {side: sum(w.operations for a, w in works if a is side) for side in (m, n)}
    described = frozenset((m, n)) - {a for a, work in works if not work.described}
    return PlainProduct(
        form, m, n, k, batch, tuple(sides), made[0].operand, operands, loaded, copies, operations, gathered, described,
        walked,
    )  # fmt: skip


def _sides(item: Item, walked: Axis | None) -> tuple[list[Axis], list[Axis], list[Axis]] | None:
    """The sides of a sum of products; its steps are none of the summed ones."""
    found = product_sides(item)
    if found is None or walked is None:
        return found
    left, right, folded = found
    return (left, right, [a for a in folded if a != walked]) if walked in folded else None


def matmul_tiles(form: Form, schedule: Schedule) -> tuple[PlainProduct, Tiles] | None:
    """The plain product that a form is and its tiles under a schedule; None if it is none, or has other roles."""
    plans = {c.axis: c for c in schedule.tiling.classes}
    walked = [a for a, c in plans.items() if c.role is Role.STREAMED and c.tile == 1]
    product = plain_product(form, *walked) if len(walked) < 2 else None
    if product is None or any(plans[a].role is not Role.GRID for a in (*product.batch, product.m, product.n)):
        return None
    rows, columns = (a for a in plans if a in (product.m, product.n))
    launch = schedule.launch
    tiles = {a: c.tile for a, c in plans.items()}
    sides = (tiles[a] for a in (product.m, product.n, product.k))
    if min(sides) < CONTRACTION.min_block_side or any(tiles[a] > 1 for a in product.batch):
        return None
    blocks = ProductBlocks(
        tiles, launch.warps, launch.stages, halves=True, descriptors=schedule.memory.descriptors
    )
    return product, Tiles(
        blocks, rows, columns, launch.order, launch.persistent, schedule.memory.stored_pieces
    )


def persistent_pays(product: PlainProduct, tiles: Tiles, target: Target, hints: SizeHints) -> bool:
    """Whether a block that goes through grid points may be worth it: there are more of these than cores, each of which
    has room for one block, and descriptors load operands, as they are, ahead of sums."""
    model = _Model(product, tiles, target, hints, 0)
    loads = tiles.blocks.descriptors and model.stages > 1 and not any(product.operations.values())
    return loads and model.rounds > 1 and model.blocks_of_a_core() == 1


def matmul_seconds(
    product: PlainProduct, tiles: Tiles, target: Target, hints: SizeHints, moved: int | None = None
) -> float:
    """Modelled seconds of one launch, which reads and writes `moved` bytes once, if somebody has counted them."""
    model = _Model(product, tiles, target, hints, bytes_once(product.form, hints) if moved is None else moved)
    terms = (
        model.multiply(), model.shared(), model.last_cache(), model.device(), model.arrival(), model.gathering(),
        model.addressing(), model.unpacking(),
    )  # fmt: skip
    loss = GPU_MATMUL.overlap_loss_ratio * (sum(terms) - max(terms))
    return target.launch_seconds + model.waiting() + model.storing() + max(terms) + loss


class _Model:
    """The terms of the sum, for one product under its tiles."""

    def __init__(
        self, product: PlainProduct, tiles: Tiles, target: Target, hints: SizeHints, moved: int
    ) -> None:
        self.moved = moved
        self.product, self.tiles, self.target, self.hints = product, tiles, target, hints
        blocks = tiles.blocks
        rows, columns = self.turns(tiles.rows), self.turns(tiles.columns)
        batch = math.prod(max(1, hints.estimate(a.extent)) for a in product.batch)
        self.grid, self.count = (rows, columns), batch * rows * columns
        self.depth = blocks.tiles[product.k]
        self.steps = product.steps(self.depth, hints)
        self.stages = 1 if product.gathered else blocks.stages
        self.rounds = -(-self.count // target.cores)
        self.reached = min(1.0, target.alone * self.count / target.cores)
        self.together = self.blocks_of_a_core()
        size = product.operand.bytes
        self.row_bytes = tiles.height * product.operands[tiles.rows] * size
        self.column_bytes = tiles.width * product.operands[tiles.columns] * size
        """Bytes of a block's rows, and of its columns, for each product of a sum, as units take them."""
        self.loaded_rows = tiles.height * product.loaded_bytes[tiles.rows]
        self.loaded_columns = tiles.width * product.loaded_bytes[tiles.columns]
        """The same, as they are loaded."""

    def turns(self, a: Axis) -> int:
        return -(-max(1, self.hints.estimate(a.extent)) // self.tiles.blocks.tiles[a])

    def blocks_of_a_core(self) -> int:
        """Blocks that registers, shared memory and threads let a core have at once."""
        target, blocks = self.target, self.tiles.blocks
        threads = blocks.warps * target.lanes
        room, near = target.level(MemoryKind.REGISTER), target.level(MemoryKind.SHARED)
        found = [target.threads // threads]
        if room is not None:
            found.append(room.capacity // (f32.bytes * threads * self.product.held(blocks, target)))
        if near is not None:
            found.append(near.capacity // max(1, self.product.near_bytes(blocks)))
        return max(1, min(found))

    def multiply(self) -> float:
        """A unit whose rows a block does not fill leaves the work to an older, slower instruction."""
        unit = _unit(self.product, self.target)
        block = 2 * self.tiles.height * self.tiles.width * self.steps * self.depth * len(self.product.sums)
        rate = unit.flops if unit is not None else self.target.flops * GPU_MATMUL.reached_without_units_ratio
        if unit is not None and self.tiles.height < unit.shape[0]:
            rate *= GPU_MATMUL.short_rows_rate_ratio
        return self.rounds * block / (rate / self.target.cores)

    def shared(self) -> float:
        """Groups of warps as tall as a unit stand above each other as far as the block is high, then side by side: rows
        are read once by each group beside, columns by each above."""
        near, unit = self.target.level(MemoryKind.SHARED), _unit(self.product, self.target)
        if near is None or unit is None:
            return 0.0
        tall = unit.shape[0]
        groups = max(1, self.tiles.blocks.warps * GPU_MATMUL.warp_rows // tall)
        above = max(1, min(groups, self.tiles.height // tall))
        passes = max(1, self.tiles.height // tall)
        beside = max(1, groups // above)
        moved = self.steps * self.depth * ((1 + beside) * self.row_bytes + (1 + passes) * self.column_bytes)
        return self.rounds * moved / (near.bandwidth / self.target.cores)

    def last_cache(self) -> float:
        """What all blocks copy of their operands."""
        cache = self.target.level(MemoryKind.L2)
        moved = self.count * self.steps * self.depth * (self.loaded_rows + self.loaded_columns)
        if cache is None:
            return 0.0
        return moved / (cache.bandwidth * GPU_MATMUL.operand_read_ratio * self.reached)

    def device(self) -> float:
        """What comes from memory, or from the last cache if all of it may lie there."""
        moved, cache = self.moved, self.target.level(MemoryKind.L2)
        near = cache is not None and moved < cache.lasting_bytes
        level = cache if near and cache is not None else self.target.device
        under_way = min(self.count, self.target.cores * self.together) * self._copied_ahead()
        needed = self.target.device.bandwidth * self.target.latency
        share = min(self.reached, under_way / needed) if needed else self.reached
        again = 0 if cache is None or near else self._read_again(cache.lasting_bytes)
        return (moved + again) / (level.bandwidth * share)

    def arrival(self) -> float:
        """A step's operands take as long as memory answers, whatever their size."""
        return self.rounds * self.steps * self.target.latency / (self._steps_ahead() * self._side_by_side())

    def gathering(self) -> float:
        """What threads compute to load single elements."""
        elements = self.product.gathered_elements(self.tiles.blocks)
        operations = self.rounds * self.steps * elements * GPU_MATMUL.gathered_operations
        return 2 * operations * self.target.cores / self.target.flops

    def addressing(self) -> float:
        """What threads compute to copy operands: addresses, and masks at borders."""
        apart, tiles = self.product.gathered | self._described(), self.tiles.blocks.tiles
        each = sum(tiles[a] * n for a, n in self.product.copies.items() if a not in apart)
        operations = self.depth * each * GPU_MATMUL.copy_operations
        return 2 * self.rounds * self.steps * operations * self.target.cores / self.target.flops

    def _described(self) -> frozenset[Axis]:
        return self.product.described if self.tiles.blocks.descriptors else frozenset()

    def unpacking(self) -> float:
        """What threads compute to make operands of what they load."""
        of = self.product.operations
        each = self.tiles.height * of[self.tiles.rows] + self.tiles.width * of[self.tiles.columns]
        return 2 * self.rounds * self.steps * self.depth * each * self.target.cores / self.target.flops

    def waiting(self) -> float:
        """A block begins and ends alone, with its first operands and its results under way, unless it goes through many
        points; descriptors are fetched before anything is copied by them; without loads ahead each step waits for its
        own, unless threads load single elements, many at once."""
        alone = 2 + (GPU_MATMUL.descriptor_latencies if self._described() else 0)
        alone *= 1 if self.tiles.persistent else self.rounds
        alone += self.steps * self.rounds if self.stages == 1 and not self.product.gathered else 0
        return alone * self.target.latency / self._side_by_side()

    def storing(self) -> float:
        """Results leave behind the last product, with nothing beside them, unless a descriptor stores them while the
        next grid point begins."""
        cache = self.target.level(MemoryKind.L2)
        form = self.product.form
        size = sum(form.params[i.param].dtype.bytes for i in form.outputs)
        alone = 1 / self.rounds if self.tiles.persistent and self.tiles.stored_pieces else 1
        made = alone * self.count * self.tiles.height * self.tiles.width * size
        return 0.0 if cache is None else made / (cache.bandwidth * self.reached)

    def _side_by_side(self) -> int:
        return min(self.together, self.rounds)

    def _steps_ahead(self) -> int:
        return max(1, min(self.steps, self.stages - 1))

    def _copied_ahead(self) -> float:
        """Bytes that a block has under way."""
        return self.depth * (self.loaded_rows + self.loaded_columns) * self._steps_ahead()

    def _read_again(self, room: int) -> float:
        """Bytes that are read more than once, since the last cache has no room for all operands: blocks of a wave share
        rows and columns, those of different waves share nothing."""
        rows, columns = self.grid
        depth = self.product.depth(self.hints)
        once = (rows * self.loaded_rows + columns * self.loaded_columns) * depth
        if once <= room:
            return 0
        wave = min(rows * columns, self.target.cores * self.together)
        high = min(rows, self.tiles.order or 1)
        wide = min(columns, -(-wave // high))
        high = min(rows, max(high, -(-wave // wide)))
        waves = -(-rows * columns // wave)
        batch = max(1, self.count // (rows * columns))
        all_waves = waves * (high * self.loaded_rows + wide * self.loaded_columns) * depth
        return batch * max(0, all_waves - once)


def bytes_once(form: Form, hints: SizeHints) -> int:
    """Bytes that are read and written at least: windows overlap, and what they share is read from memory once."""
    touched: Counter[int] = Counter()
    for item in form.items:
        for param, offset in dict.fromkeys(item.accesses()):
            used = axes_of(offset)
            own = dims.prod(a.extent for a in item.axes if axis(a) in used)
            touched[param] += hints.estimate(own)
    values = {param: form.params[param] for param in touched}
    return sum(
        min(n, max(1, hints.estimate(values[param].numel))) * values[param].dtype.bytes
        for param, n in touched.items()
    )


def _unit(product: PlainProduct, target: Target) -> MatrixUnit | None:
    """The matrix unit that takes the operands."""
    found = [u for u in target.matrix_units if u.operand == product.operand.name]
    return max(found, key=lambda u: u.flops, default=None)
