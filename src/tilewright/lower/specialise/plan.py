"""What the warps of a specialised program do, decided once: printers follow it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.ir.expr import Axis
from tilewright.ir.program import Descriptor, Dot, Load, Loop, Stmt, Store
from tilewright.tuning.thresholds import GPU_MATMUL

WARPS_PER_STRIP = GPU_MATMUL.warp_group_warps
STRIP_ROWS = GPU_MATMUL.warp_group_rows
"""A strip is what a warp group multiplies at once."""

HALF_BYTES, BARRIER_BYTES = 2, 16
"""Bytes of an element of an operand, and of a barrier with what aligns it."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Buffers in shared memory, `slots` of them (for queries: one for each strip). A block lies there as in memory, its
    two extents are `block`; with `turned`, the product takes it transposed."""

    slots: int
    block: tuple[int, int]
    turned: bool


@dataclass(frozen=True, slots=True)
class KeyLoop:
    """A loop over keys: `scores` is the product of the query and `keys`, `between` is computed of it, and `results` the
    product of that and `values` (None: the loop only looks at scores), to whose sums `rescale` is done before.

    The statements stand so in each step: keys, scores, between, rescale, values, results. The product `results` of a
    step may be under way until the next step's `rescale`: nothing of `between` reads or changes its sums. A loop that
    is `sure` has at least one step; `single` says that it has one."""

    loop: Loop
    keys: Load
    scores: Dot
    between: tuple[Stmt, ...]
    rescale: tuple[Stmt, ...] = ()
    values: Load | None = None
    results: Dot | None = None
    sure: bool = False
    single: bool = False


@dataclass(frozen=True, slots=True)
class CopiedStore:
    """A store whose block goes through a buffer in shared memory, from where the block of a descriptor is copied while
    the next grid point begins; `block` is that block as a load would take it."""

    store: Store
    block: Load
    ring: Ring


@dataclass(frozen=True, slots=True)
class WarpPlan:
    """`strips` warp groups have a part of the block's `rows` each, another warp loads for all of them: `query` once,
    the keys and values of `loops` through rings. The loops of a chain follow each other, and one of them is sure to
    have a step: the last product of one is under way while the first scores of the next are made.

    Each block is one of a descriptor, that of the query with the rows of a strip. `tiles` are the block axes with their
    tiles, of `rows` those of a strip. Results are written as `copied` says (None: by the threads that hold them)."""

    strips: int
    rows: Axis
    keys: Axis
    columns: Axis
    tiles: tuple[tuple[Axis, int], ...]
    query: Load
    loops: tuple[KeyLoop, ...]
    chains: tuple[tuple[KeyLoop, ...], ...]
    query_ring: Ring
    key_ring: Ring
    value_ring: Ring
    copied: CopiedStore | None = None

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: all buffers, whose elements are halves, and a barrier for each end of each."""
        rings = [self.query_ring, self.key_ring, self.value_ring]
        rings += [] if self.copied is None else [self.copied.ring]
        return sum(r.slots * (math.prod(r.block) * HALF_BYTES + 2 * BARRIER_BYTES) for r in rings)

    @property
    def tile(self) -> dict[Axis, int]:
        """The tile of each block axis."""
        return dict(self.tiles)

    def box(self, load: Load) -> Descriptor:
        """The descriptor of one of the loads, with the block that is copied at once."""
        d = load.descriptor
        assert d is not None
        if self.rows not in load.var.axes:
            return d
        own = [p.value for p in load.at]
        tile = tuple(STRIP_ROWS if a == self.rows else n for a, n in zip(own, d.tile, strict=True))
        return Descriptor(d.start, d.extents, d.strides, tile)

    def loop_of(self, loop: Stmt) -> KeyLoop | None:
        """What is decided for a loop of the program; None for any other statement."""
        return next((k for k in self.loops if k.loop is loop), None)

    def chain_of(self, loop: Stmt) -> tuple[KeyLoop, ...]:
        """The chain that begins with a loop; nothing if none does."""
        return next((c for c in self.chains if c[0].loop is loop), ())
