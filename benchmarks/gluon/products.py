"""C = A B^T in Gluon for Hopper: fp16 with sums in fp32, a block of the grid for each multiprocessor.

A [m, k], B [n, k], C [m, n], all row-major and fp16; m, n, k are multiples of the tile's.
"""

# pyright: basic
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from benchmarks.gluon.language import advanced, barriers, load_block, product_layout, store_block


@gluon.jit
def place(tile, rows, columns, ORDER: gl.constexpr):
    """Row and column of a tile: down ORDER rows, then the next column, so that few lines of A and B are in use."""
    group = ORDER * columns
    first = tile // group * ORDER
    height = gl.minimum(rows - first, ORDER)
    inside = tile % group
    return first + inside % height, inside // height


@gluon.jit
def stored(acc, c_desc, c_block, row, column, PARTS: gl.constexpr):
    """Write a tile in PARTS (1 or 2) strips of columns; the last copy is still under way on return."""
    if PARTS == 1:
        tma.store_wait(0)  # the copy before has read the buffer
        c_block.store(acc.to(c_desc.dtype))
        fence_async_shared()
        store_block(c_desc, [row, column], c_block)
    else:
        half: gl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape([acc.shape[0], 2, half]).permute(0, 2, 1).split()
        tma.store_wait(0)
        c_block.store(left.to(c_desc.dtype))
        fence_async_shared()
        store_block(c_desc, [row, column], c_block)
        tma.store_wait(0)
        c_block.store(right.to(c_desc.dtype))
        fence_async_shared()
        store_block(c_desc, [row, column + half], c_block)


@gluon.jit
def load_partition(descs, rings, bars, sizes, ORDER: gl.constexpr):
    """One warp that keeps the ring of operands full."""
    a_desc, b_desc = descs
    a_ring, b_ring, c_ring = rings
    rows, columns, depth = sizes
    full, empty = bars
    SLOTS: gl.constexpr = b_ring.shape[0]
    STRIPS: gl.constexpr = a_ring.shape[0] // SLOTS
    BM: gl.constexpr = a_ring.shape[1]
    BN: gl.constexpr = b_ring.shape[1]
    BK: gl.constexpr = a_ring.shape[2]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the phase before the first counts as complete
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = place(tile, rows, columns, ORDER)
        for k in range(0, depth, BK):
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(bar, (STRIPS * BM + BN) * BK * 2)
            for i in gl.static_range(STRIPS):
                load_block(a_desc, [(row * STRIPS + i) * BM, k], bar, a_ring.index(slot * STRIPS + i))
            load_block(b_desc, [column * BN, k], bar, b_ring.index(slot))
            slot, phase = advanced(slot, phase, SLOTS)


@gluon.jit
def product_partition(
    c_desc, rings, bars, sizes, ORDER: gl.constexpr, PARTS: gl.constexpr, STRIP: gl.constexpr
):
    """The warps that multiply a strip of the tile's rows: one product is under way while the next is started."""
    a_ring, b_ring, c_ring = rings
    full, empty = bars
    rows, columns, depth = sizes
    SLOTS: gl.constexpr = b_ring.shape[0]
    STRIPS: gl.constexpr = a_ring.shape[0] // SLOTS
    BM: gl.constexpr = a_ring.shape[1]
    BN: gl.constexpr = b_ring.shape[1]
    BK: gl.constexpr = a_ring.shape[2]
    layout: gl.constexpr = product_layout(gl.num_warps(), BN)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = place(tile, rows, columns, ORDER)
        acc = gl.zeros([BM, BN], gl.float32, layout)
        before = slot
        for k in range(0, depth, BK):
            mbarrier.wait(full.index(slot), phase)
            left = a_ring.index(slot * STRIPS + STRIP)
            right = b_ring.index(slot).permute((1, 0))
            acc = warpgroup_mma(left, right, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)  # its product is done
            before = slot
            slot, phase = advanced(slot, phase, SLOTS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        stored(acc, c_desc, c_ring.index(STRIP), (row * STRIPS + STRIP) * BM, column * BN, PARTS)
    tma.store_wait(0)


@gluon.jit
def specialised(
    a_desc,
    b_desc,
    c_desc,
    rows,
    columns,
    depth,
    SLOTS: gl.constexpr,
    ORDER: gl.constexpr,
    PARTS: gl.constexpr,
    STRIPS: gl.constexpr,
):
    """A warp loads, the others multiply: all together, or four for each of 2 STRIPS of rows. `rows` and `columns`
    count tiles, `depth` is k."""
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BN: gl.constexpr = b_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [SLOTS * STRIPS, BM, BK], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [SLOTS, BN, BK], b_desc.layout)
    c_ring = gl.allocate_shared_memory(c_desc.dtype, [STRIPS, BM, BN // PARTS], c_desc.layout)
    rings = (a_ring, b_ring, c_ring)
    bars = (barriers(SLOTS, 1), barriers(SLOTS, STRIPS))
    descs = (a_desc, b_desc)
    sizes = (rows, columns, depth)
    if STRIPS == 1:
        gl.warp_specialize(
            [
                (product_partition, (c_desc, rings, bars, sizes, ORDER, PARTS, 0)),
                (load_partition, (descs, rings, bars, sizes, ORDER)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (product_partition, (c_desc, rings, bars, sizes, ORDER, PARTS, 0)),
                (product_partition, (c_desc, rings, bars, sizes, ORDER, PARTS, 1)),
                (load_partition, (descs, rings, bars, sizes, ORDER)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def start(descs, rings, full, row, column, k, slot, wanted):
    """Start the copies of one step, if they are wanted."""
    a_desc, b_desc = descs
    a_ring, b_ring = rings
    BM: gl.constexpr = a_ring.shape[1]
    BN: gl.constexpr = b_ring.shape[1]
    BK: gl.constexpr = a_ring.shape[2]
    bar = full.index(slot)
    mbarrier.expect(bar, (BM + BN) * BK * 2, pred=wanted)
    load_block(a_desc, [row * BM, k], bar, a_ring.index(slot), wanted)
    load_block(b_desc, [column * BN, k], bar, b_ring.index(slot), wanted)


@gluon.jit
def alike(
    a_desc,
    b_desc,
    c_desc,
    rows,
    columns,
    depth,
    SLOTS: gl.constexpr,
    ORDER: gl.constexpr,
    PARTS: gl.constexpr,
):
    """All warps do the same: they start the copies of a later step, also of the next tile, while they multiply."""
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BN: gl.constexpr = b_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    layout: gl.constexpr = product_layout(gl.num_warps(), BN)
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [SLOTS, BM, BK], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [SLOTS, BN, BK], b_desc.layout)
    c_block = gl.allocate_shared_memory(c_desc.dtype, [BM, BN // PARTS], c_desc.layout)
    full = barriers(SLOTS, 1)
    fence_async_shared()  # the copies see barriers that are made
    descs = (a_desc, b_desc)
    rings = (a_ring, b_ring)
    tiles = rows * columns
    ahead = gl.program_id(0)
    k_ahead = gl.to_tensor(0)
    free = gl.to_tensor(0)
    for _ in gl.static_range(SLOTS - 1):
        row, column = place(ahead, rows, columns, ORDER)
        start(descs, rings, full, row, column, k_ahead, free, ahead < tiles)
        free = (free + 1) % SLOTS
        k_ahead += BK
        ahead = gl.where(k_ahead < depth, ahead, ahead + gl.num_programs(0))
        k_ahead = gl.where(k_ahead < depth, k_ahead, 0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros([BM, BN], gl.float32, layout)
        for k in range(0, depth, BK):
            mbarrier.wait(full.index(slot), phase)
            right = b_ring.index(slot).permute((1, 0))
            acc = warpgroup_mma(a_ring.index(slot), right, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            slot, phase = advanced(slot, phase, SLOTS)
            # The step before has ended, so its slot is free.
            row, column = place(ahead, rows, columns, ORDER)
            start(descs, rings, full, row, column, k_ahead, free, ahead < tiles)
            free = (free + 1) % SLOTS
            k_ahead += BK
            ahead = gl.where(k_ahead < depth, ahead, ahead + gl.num_programs(0))
            k_ahead = gl.where(k_ahead < depth, k_ahead, 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        row, column = place(tile, rows, columns, ORDER)
        stored(acc, c_desc, c_block, row * BM, column * BN, PARTS)
    tma.store_wait(0)
