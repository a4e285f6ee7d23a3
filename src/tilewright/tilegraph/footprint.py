"""The bytes that tiles of a kernel's results take at each level of memory."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.allocate import Block, pack
from tilewright.errors import VerifyError
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes.host import size
from tilewright.target import MemoryKind

from .edge import Edge, TileGraph
from .propagate import Tile, elements, join, propagate


def footprint(
    tilegraph: TileGraph, kernel: Kernel, tiles: Mapping[Value, Tile], sizes: Mapping[str, int]
) -> dict[MemoryKind, int]:
    """Bytes at each level while a kernel makes these tiles of its results, where symbols have these `sizes`.

        DEVICE (and HOST)   =   the sum over inputs and results of the bytes of their box
        SHARED, REGISTER    =   the boxes of values inside, packed by their lifetimes: from the op that makes one to the
                                last op that reads it

    Each op is taken to finish its box before the next one begins. A loop that streams a reduced axis needs less, since
    only a step of it is there at a time. Raises VerifyError unless there is a tile for each result, and for a kernel
    that the tile-graph does not have."""
    if all(node.step is not kernel for node in tilegraph.ops):
        raise VerifyError("the tile-graph has no such kernel", phase="tilegraph")
    boxes = required(kernel, tiles)
    stored = {**boxes, **tiles}
    order = {op: n for n, op in enumerate(kernel.ops)}
    lifetimes: dict[MemoryKind, dict[Value, tuple[int, int]]] = {}
    for e in tilegraph.edges:
        step = _time(e, kernel, order)
        if step is None:
            continue
        start, end = step if e.on_chip else (0, len(order))
        first, last = lifetimes.setdefault(e.level, {}).get(e.value, (start, end))
        lifetimes[e.level][e.value] = min(first, start), max(last, end)
    found: dict[MemoryKind, int] = {}
    for level, alive in sorted(lifetimes.items()):
        boxes_at = boxes if level.core else stored
        blocks = [
            Block(size(elements(boxes_at[v]), sizes) * v.dtype.bytes, start, end)
            for v, (start, end) in alive.items()
            if v in boxes_at  # a value that no result needs is not made
        ]
        found[level] = pack(blocks, align=1)[1]
    return found


def required(kernel: Kernel, tiles: Mapping[Value, Tile]) -> dict[Value, Tile]:
    """The box of each value of a kernel that `tiles` of its results need. What several readers need is joined. Raises
    VerifyError unless there is a tile for each result."""
    missing = [v for v in kernel.outputs if v not in tiles]
    if missing:
        raise VerifyError(f"no tile is given for {missing}", phase="tilegraph")
    found = dict(tiles)
    for op in reversed(kernel.ops):
        asked = [found[v] for v in op.outputs if v in found]
        tile = None
        for one in asked:
            tile = join(tile, one)
        if tile is None:
            continue
        found.update(dict.fromkeys(op.outputs, tile))
        for v, box in propagate(op, tile).items():
            found[v] = join(found.get(v), box)
    return found


def _time(e: Edge, kernel: Kernel, order: Mapping[Op, int]) -> tuple[int, int] | None:
    """From which op of `kernel` to behind which one it uses an edge; None if it does not."""
    made = e.producer is not None and e.producer.step is kernel
    read = e.consumer is not None and e.consumer.step is kernel
    if not (made or read):
        return None
    start = order[e.producer.op] if made and e.producer is not None else 0
    return start, order[e.consumer.op] + 1 if read and e.consumer is not None else len(order)
