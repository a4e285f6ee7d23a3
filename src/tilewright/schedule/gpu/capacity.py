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

from .matmul import Blocks, Products, blocks_of, registers, shared_bytes
from .matmul_cost import PlainProduct, matmul_tiles

_LAW = "a tile fits the level that holds it"


def check_capacity(form: Form, schedule: Schedule, target: Target) -> None:
    """Raise IllegalSchedule, with level, need and capacity, if products of blocks need more registers of a thread, or
    more shared memory of a block, than there is; what has none is not held against anything."""
    plain = matmul_tiles(form, schedule)
    found = blocks_of(form, schedule, target)
    said = ""
    if plain is not None:
        said = product_excess(plain[0], plain[1].blocks, target)
    elif found is not None:
        known, blocks = found
        said = excess(known, replace(blocks, halves=not schedule.reductions.blockwise), target)
    if said:
        raise IllegalSchedule(said, law=_LAW)


def product_excess(product: PlainProduct, blocks: Blocks, target: Target) -> str:
    """The same as `excess`, of a plain product."""
    known = product.known(blocks.tiles[product.k])
    return excess(known, blocks, target, product.gathered_elements(blocks))


def excess(known: Products, blocks: Blocks, target: Target, gathered: int = 0) -> str:
    """Which level cannot hold what a block needs of it, its need and its capacity; nothing if all can. So many elements
    of operands are `gathered` by threads."""
    held, room = registers(known, blocks, target, packed=True), target.vector_registers
    held += int(gathered * GPU_MATMUL.gathered_registers / (blocks.warps * target.lanes))
    if held > room:
        return f"registers hold {room} numbers of a thread, and a tile needs {held}"
    near = target.level(MemoryKind.SHARED)
    needed = max(shared_bytes(known, blocks), _stored_bytes(known, blocks))
    if near is not None and needed > near.capacity:
        return f"{near.name} holds {near.capacity} bytes of a block, and a tile needs {needed}"
    return ""


def _stored_bytes(known: Products, blocks: Blocks) -> int:
    """Bytes of the largest block that is stored: threads hold it as products leave it, and change places through shared
    memory to write whole lines."""
    largest = 0
    for o in known.form.outputs:
        size = known.form.params[o.param].dtype.bytes
        for a in o.axes:
            size *= blocks.tiles[a]
        largest = max(largest, size)
    return largest
