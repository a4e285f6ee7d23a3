"""Packing of lifetimes into one allocation: for buffers of a plan and for the on-chip memory of a kernel."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """`size` bytes that are needed from step `start` up to, and not including, step `end`."""

    size: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.size < 0 or self.end < self.start:
            raise ValueError(f"not a lifetime: {self}")

    def meets(self, other: Block) -> bool:
        """Whether both are alive at one step."""
        return max(self.start, other.start) < min(self.end, other.end)


def pack(blocks: Sequence[Block], align: int = 64) -> tuple[tuple[int, ...], int]:
    """Offsets in bytes, one per block in the order given, and the total size.

    Blocks alive at one step never overlap; every offset and the total are multiples of `align`. The result is
    deterministic. Best fit: blocks go largest first, each into the smallest gap that holds it. Empty blocks
    (no bytes or no steps) stand at 0. Raises `ValueError` for an `align` below 1.
    """
    if align < 1:
        raise ValueError(f"align must be at least 1, not {align}")
    order = sorted(range(len(blocks)), key=lambda i: (-blocks[i].size, blocks[i].start, i))
    offsets = [0] * len(blocks)
    placed: list[
        tuple[int, int, int, int]
    ] = []  # offset, end offset, first and end step; lowest offset first
    total = 0
    for i in order:
        block = blocks[i]
        start, end = block.start, block.end
        if not block.size or start == end:
            continue
        size = -(-block.size // align) * align
        at = _best_gap([(low, high) for low, high, s, e in placed if s < end and start < e], size)
        offsets[i] = at
        total = max(total, at + size)
        insort(placed, (at, at + size, start, end))
    return tuple(offsets), total


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Offset of the smallest gap of at least `size` between `taken` intervals (sorted), else their end."""
    best: tuple[int, int] | None = None
    free = 0
    for low, high in taken:
        gap = low - free
        if gap >= size and (best is None or gap < best[0]):
            best = gap, free
        free = max(free, high)
    return free if best is None else best[1]


def peak(blocks: Sequence[Block]) -> int:
    """The largest number of bytes alive at one step: a lower bound of `pack`'s total."""
    steps = {block.start for block in blocks}
    return max((sum(b.size for b in blocks if b.start <= step < b.end) for step in steps), default=0)
