"""Whether a level of the machine holds what a block needs of it: accumulators in registers, operands in shared memory.

Schedules that are chosen by themselves fit, since only such are looked at (`matmul`, `shared_memory`). One that is
given is refused here, with the level, the need and the capacity.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.errors import IllegalSchedule
from tilewright.ir.expr import Axis, axes_of, walk
from tilewright.ir.form import Form
from tilewright.ir.schedule import Schedule
from tilewright.target import MemoryKind, Target
from tilewright.tuning.thresholds import GPU_MATMUL

from .block_memory import BlockProducts, ProductBlocks, registers, shared_bytes
from .matmul import blocks_of
from .matmul_cost import PlainProduct, Tiles, matmul_tiles

_LAW = "a tile fits the level that holds it"


def check_capacity(form: Form, schedule: Schedule, target: Target) -> None:
    """Raise IllegalSchedule, with level, need and capacity, if products of blocks need more registers of a thread, or
    more shared memory of a block, than there is; what has none is not held against anything."""
    plain = matmul_tiles(form, schedule)
    found = blocks_of(form, schedule, target)
    said = ""
    if plain is not None:
        said = plain_excess(*plain, target)
    elif found is not None:
        known, blocks = found
        blocks = replace(blocks, halves=not schedule.reductions.blockwise)
        said = excess(known, blocks, target, rings=schedule.memory.warp_specialised)
    if said:
        raise IllegalSchedule(said, law=_LAW)


def plain_excess(product: PlainProduct, tiles: Tiles, target: Target) -> str:
    """The same as `excess`, of a plain product in tiles: a block that goes through grid points loads operands of the
    next one while it ends, so what that needs of shared memory lies beside them."""
    return product_excess(product, tiles.blocks, target, _ending_bytes(product.form, tiles))


def _ending_bytes(form: Form, tiles: Tiles) -> int:
    """Bytes beside operands in a block that goes through grid points: of what results are made of besides sums, and of
    a piece of a result that a descriptor stores."""
    if not tiles.persistent:
        return 0
    reads = {x for o in form.outputs for b in o.body for x in walk(b) if x.op == "read"}
    needed = _stored_bytes(form, tiles.blocks) // tiles.stored_pieces if tiles.stored_pieces else 0
    for x in reads:
        assert isinstance(x.value, int)
        block = (tiles.blocks.tiles.get(a.value, 1) for a in axes_of(x) if isinstance(a.value, Axis))
        needed += math.prod(block) * form.params[x.value].dtype.bytes
    return needed


def product_excess(product: PlainProduct, blocks: ProductBlocks, target: Target, beside: int = 0) -> str:
    """The same as `excess`, of a plain product whose operands have so many bytes `beside` them."""
    gathered = product.gathered_elements(blocks) * GPU_MATMUL.gathered_registers
    held = product.held(blocks, target, packed=True) + int(gathered / (blocks.warps * target.lanes))
    needed = max(product.near_bytes(blocks) + beside, _stored_bytes(product.form, blocks))
    return _excess(held, needed, target)


def excess(known: BlockProducts, blocks: ProductBlocks, target: Target, *, rings: bool = False) -> str:
    """Which level cannot hold what a block needs of it, its need and its capacity; nothing if all can. With `rings`,
    operands lie in rings of shared memory, which a warp fills, and nothing else does."""
    needed = max(shared_bytes(known, blocks, ahead=not rings), _stored_bytes(known.form, blocks))
    return _excess(registers(known, blocks, target, packed=True), needed, target)


def _excess(held: int, needed: int, target: Target) -> str:
    room, near = target.vector_registers, target.level(MemoryKind.SHARED)
    if held > room:
        return f"registers hold {room} numbers of a thread, and a tile needs {held}"
    if near is not None and needed > near.capacity:
        return f"{near.name} holds {near.capacity} bytes of a block, and a tile needs {needed}"
    return ""


def _stored_bytes(form: Form, blocks: ProductBlocks) -> int:
    """Bytes of the largest block that is stored: threads hold it as products leave it, and change places through shared
    memory to write whole lines."""
    largest = 0
    for o in form.outputs:
        size = form.params[o.param].dtype.bytes
        for a in o.axes:
            size *= blocks.tiles[a]
        largest = max(largest, size)
    return largest
