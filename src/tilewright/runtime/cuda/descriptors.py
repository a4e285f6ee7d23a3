"""Tensor descriptors of a launch: their extents and strides for exact sizes, and records from which they are made.

The native side makes one when it sees its pointer for the first time, and again when the pointer has moved.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.emit.triton.kernel import TritonSource
from tilewright.ir.sizes.host import Number, size
from tilewright.lower.variants import ALIGNMENT

from .job import Box

DESCRIPTOR_BYTES, DESCRIPTOR_ALIGNMENT = 128, 64
"""Of a descriptor in memory, in bytes."""
MAX_EXTENT, MAX_STRIDE_BYTES = (1 << 31) - 1, 1 << 40
"""Limits of an extent and of a stride."""


class Map(ctypes.Structure):
    """A descriptor as the native side makes it; of the dims, the contiguous one first."""

    _fields_ = (
        ("place", ctypes.c_void_p),
        ("pointer", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("made", ctypes.c_uint64),
        ("type", ctypes.c_int64),
        ("swizzle", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("extents", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 6),
    )


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter (by number) as a descriptor shows it for exact sizes, from byte `start` on: extents, strides in
    elements, and how the kernel takes its blocks."""

    param: int
    start: int
    element: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: Box


def tensors(
    source: TritonSource, boxes: Sequence[Box], elements: Sequence[int], sizes: Mapping[str, Number]
) -> tuple[Tensor, ...] | None:
    """What the descriptors of a kernel show; None if the driver makes none of some (it makes none of empty tensors).
    `elements`: bytes of an element of each parameter."""
    found: list[Tensor] = []
    wanted = [(a.index, a.descriptor) for a in source.arguments if a.descriptor is not None]
    for (param, d), box in zip(wanted, boxes, strict=True):
        element = elements[param]
        extents = tuple(size(e, sizes) for e in d.extents)
        strides = tuple(size(e, sizes) for e in d.strides)
        start = size(d.start, sizes) * element
        steps = [s * element for s in strides[:-1]]
        if not all(1 <= e <= MAX_EXTENT for e in extents) or not all(0 < s < MAX_STRIDE_BYTES for s in steps):
            return None
        if any(s % ALIGNMENT for s in (start, *steps)):
            return None
        found.append(Tensor(param, start, element, extents, strides, box))
    return tuple(found)


def maps(
    shown: Sequence[Tensor], pointers: Mapping[int, int]
) -> tuple[ctypes.Array[Map], list[int], list[object]]:
    """Records for the native side, where each argument stands that the descriptors are to a kernel, and what must be
    kept. `pointers`: number of a parameter -> its number among the pointers of the launch."""
    memory = ctypes.create_string_buffer(DESCRIPTOR_BYTES * len(shown) + DESCRIPTOR_ALIGNMENT)
    first = -(-ctypes.addressof(memory) // DESCRIPTOR_ALIGNMENT) * DESCRIPTOR_ALIGNMENT
    records = (Map * max(1, len(shown)))()
    values = array("q", [n for t in shown for n in (*t.extents, *t.strides)])
    places: list[int] = []
    done = values.buffer_info()[0]
    for k, (record, t) in enumerate(zip(records, shown, strict=False)):
        rank = len(t.extents)
        record.place, record.pointer, record.start = first + DESCRIPTOR_BYTES * k, pointers[t.param], t.start
        record.type, record.swizzle, record.rank = t.box.type, t.box.swizzle, rank
        record.extents[:rank] = t.extents[::-1]
        record.strides[:rank] = [s * t.element for s in t.strides[::-1]]
        record.box[:rank] = t.box.shape[::-1]
        places += [first + DESCRIPTOR_BYTES * k, *range(done, done + 16 * rank, 8)]
        done += 16 * rank
    return records, places, [memory, records, values]
