"""Whether a level of the machine holds what a block needs of it: accumulators in registers, operands in shared memory.

Schedules that are chosen by themselves fit, since only such are looked at (`matmul`, `shared_memory`). One that is
given is refused here, with the level, the need and the capacity.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.errors import IllegalSchedule
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
    """The same as `excess`, of a plain product in tiles: a block that stays loads for the next point while a piece of
    its results is stored."""
    stored = _stored_bytes(product.form, tiles.blocks) // max(1, tiles.stored_pieces)
    return product_excess(product, tiles.blocks, target, stored if _stores_beside(tiles) else 0)


def _stores_beside(tiles: Tiles) -> bool:
    """Whether results lie in shared memory together with operands."""
    return tiles.persistent and tiles.stored_pieces > 0


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
