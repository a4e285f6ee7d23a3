"""The bytes that move at each level of memory.

    DEVICE             =   each stored value once, and of each value that a step reads what it asks for, once
    HOST               =   each value there once: it is brought to the device, where steps read it
    SHARED, REGISTER   =   each value once for the op that makes it, and once for each op that reads it

A step that reads a value again finds it in its caches. Views move nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.dependence.properties import size
from tilewright.analysis.reads import bytes_read
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims, host
from tilewright.target import MemoryKind

from .edge import TileGraph


def traffic(tilegraph: TileGraph, sizes: Mapping[str, int]) -> dict[MemoryKind, int]:
    """Bytes at each level that edges are at, where symbols have these `sizes`. Raises KeyError for a symbol without
    one.

    At DEVICE it is the sum of `bytes_moved` over the reports of all kernels and calls of the cover."""
    return {level: host.size(moved, sizes) for level, moved in moved_bytes(tilegraph).items()}


def moved_bytes(tilegraph: TileGraph) -> dict[MemoryKind, Expr]:
    """The same as expressions over size symbols, lowest level first."""
    accesses: dict[MemoryKind, dict[tuple[Value, object, bool], None]] = {}
    for e in tilegraph.edges:
        here = accesses.setdefault(e.level, {})
        if e.level is MemoryKind.HOST:
            here[e.value, None, False] = None
            here = accesses.setdefault(MemoryKind.DEVICE, {})
        if e.producer is not None and not e.producer.is_view:
            here[e.value, e.producer, True] = None
        if e.consumer is not None and not e.consumer.is_view:
            here[e.value, e.consumer if e.on_chip else e.consumer.step, False] = None
    return {
        level: dims.add(*(_bytes(*access) for access in found)) if found else dims.ZERO
        for level, found in sorted(accesses.items())
    }


def _bytes(value: Value, by: object, made: bool) -> Expr:
    """Bytes of one access; of a step that reads, those that are asked for."""
    return bytes_read(by.ops, [value]) if isinstance(by, Kernel) and not made else size(value).bytes
