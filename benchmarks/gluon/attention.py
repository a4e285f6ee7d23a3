"""softmax(Q K^T * scale) V in Gluon for Hopper: fp16 with sums in fp32, 128 elements a head, written once.

One warp loads. Four warps, or twice four, each keep the scores of their rows in registers: while a block's scores
become probabilities, the product of the block before with V is under way, and so are the other four warps' products.

Q, K, V and the result are [heads * length, 128], row-major; a head's rows lie together; length is a multiple of 128.
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
def place(tile, blocks, GROUP: gl.constexpr):
    """Head and block of queries of a tile. GROUP heads are worked on at once, as the L2 cache holds their keys and
    values; in a group the last blocks, which see most keys, come first."""
    group = GROUP * blocks
    inside = tile % group
    return tile // group * GROUP + inside % GROUP, blocks - 1 - inside // GROUP


@gluon.jit
def load_partition(descs, rings, bars, tiles, blocks, GROUP: gl.constexpr, CAUSAL: gl.constexpr):
    """One warp that keeps the rings of queries, keys and values full; the last keys come first."""
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring, o_ring = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = bars
    STRIPS: gl.constexpr = q_ring.shape[0]
    ROWS: gl.constexpr = q_ring.shape[1]
    SLOTS: gl.constexpr = k_ring.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    DEPTH: gl.constexpr = k_ring.shape[2]
    q_phase = gl.to_tensor(1)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the phase before the first counts as complete
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        head, block = place(tile, blocks, GROUP)
        for i in gl.static_range(STRIPS):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), ROWS * DEPTH * 2)
            row = (head * blocks + block) * STRIPS * ROWS + i * ROWS
            load_block(q_desc, [row, 0], q_full.index(i), q_ring.index(i))
        q_phase = q_phase ^ 1
        seen = block + 1 if CAUSAL else blocks
        for j in range(seen):
            key = (head * blocks + seen - 1 - j) * KEYS
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), KEYS * DEPTH * 2)
            load_block(k_desc, [key, 0], k_full.index(slot), k_ring.index(slot))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), KEYS * DEPTH * 2)
            load_block(v_desc, [key, 0], v_full.index(slot), v_ring.index(slot))
            slot, phase = advanced(slot, phase, SLOTS)


@gluon.jit
def hidden(s, first, layout: gl.constexpr):
    """Scores of the block on the diagonal without keys behind the query; `first` is the strip's first row in it."""
    row = first + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
    key = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    return gl.where(key[None, :] <= row[:, None], s, float("-inf"))


HELD: gl.constexpr = gl.constexpr(
    "{ .reg .pred ahead; .reg .b32 lanes; setp.gtu.f32 ahead, $1, 0fBF800000; "
    "vote.sync.ballot.b32 lanes, ahead, 0xffffffff; bar.warp.sync lanes; mov.f32 $0, $1; }"
)
"""Of sums of probabilities, which are never below 0: a barrier of the warp that cannot be had before them."""


@gluon.jit
def held_here(total):
    """The same, computed before the next wait for products: else ptxas moves the wait in front of the softmax."""
    return gl.inline_asm_elementwise(HELD, "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def attend_partition(
    o_desc,
    rings,
    bars,
    sizes,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    STRIP: gl.constexpr,
    TURNS: gl.constexpr,
    HOLD: gl.constexpr,
):
    """The warps of one strip of rows. With TURNS, two strips start their products in turn, so that one's softmax runs
    under the other's products; with HOLD, also under the strip's own."""
    scale, tiles, blocks = sizes
    q_ring, k_ring, v_ring, o_ring = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = bars
    STRIPS: gl.constexpr = q_ring.shape[0]
    ROWS: gl.constexpr = q_ring.shape[1]
    SLOTS: gl.constexpr = k_ring.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    DEPTH: gl.constexpr = k_ring.shape[2]
    dtype: gl.constexpr = o_desc.dtype
    # Scores and results are as wide, so that one layout serves both and rows need no conversion.
    gl.static_assert(KEYS == DEPTH)
    layout: gl.constexpr = product_layout(gl.num_warps(), DEPTH)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout)
    q = q_ring.index(STRIP)
    q_phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(1 if STRIP == 0 else 0)  # the first strip begins
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        head, block = place(tile, blocks, GROUP)
        seen = block + 1 if CAUSAL else blocks
        mbarrier.wait(q_full.index(STRIP), q_phase)
        q_phase = q_phase ^ 1
        mbarrier.wait(k_full.index(slot), phase)
        if TURNS:
            mbarrier.wait(turns.index(STRIP), turn)
            turn = turn ^ 1
        s = warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - STRIP), count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        if CAUSAL:
            s = hidden(s, STRIP * ROWS, layout)
        top = gl.max(s, 1)
        p = gl.exp2(s * scale - (top * scale)[:, None])
        total = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), left)
        o = gl.zeros([ROWS, DEPTH], gl.float32, layout)
        for _ in range(1, seen):
            before, before_phase = slot, phase
            slot, phase = advanced(slot, phase, SLOTS)
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.wait(v_full.index(before), before_phase)
            if TURNS:
                mbarrier.wait(turns.index(STRIP), turn)
                turn = turn ^ 1
            s = warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            o = warpgroup_mma(weights, v_ring.index(before), o, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index(1 - STRIP), count=1)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            higher = gl.maximum(top, gl.max(s, 1))
            shrink = gl.exp2((top - higher) * scale)
            top = higher
            p = gl.exp2(s * scale - (top * scale)[:, None])
            total = total * shrink + gl.sum(p, 1)
            if HOLD:
                total = held_here(total)
            o, _ = warpgroup_mma_wait(0, deps=(o, weights))
            mbarrier.arrive(v_empty.index(before), count=1)
            o = o * shrink[:, None]
            weights = gl.convert_layout(p.to(dtype), left)
        mbarrier.arrive(q_empty.index(STRIP), count=1)
        mbarrier.wait(v_full.index(slot), phase)
        o = warpgroup_mma(weights, v_ring.index(slot), o, is_async=True)
        o, _ = warpgroup_mma_wait(0, deps=(o, weights))
        mbarrier.arrive(v_empty.index(slot), count=1)
        slot, phase = advanced(slot, phase, SLOTS)
        o = o * (1.0 / total)[:, None]
        tma.store_wait(0)  # the copy before has read the buffer
        o_ring.index(STRIP).store(o.to(dtype))
        fence_async_shared()
        row = (head * blocks + block) * STRIPS * ROWS + STRIP * ROWS
        store_block(o_desc, [row, 0], o_ring.index(STRIP))
    tma.store_wait(0)


@gluon.jit
def attention(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    scale,
    tiles,
    blocks,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    SLOTS: gl.constexpr,
    STRIPS: gl.constexpr,
    TURNS: gl.constexpr,
    HOLD: gl.constexpr,
):
    """All tiles of 128 queries. `scale` is that of scores times log2(e), `blocks` is how many tiles a head has; STRIPS
    (1 or 2) says between how many sets of warps a tile's rows are shared."""
    ROWS: gl.constexpr = q_desc.block_type.shape[0]
    KEYS: gl.constexpr = k_desc.block_type.shape[0]
    DEPTH: gl.constexpr = k_desc.block_type.shape[1]
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STRIPS, ROWS, DEPTH], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, KEYS, DEPTH], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [SLOTS, KEYS, DEPTH], v_desc.layout)
    o_ring = gl.allocate_shared_memory(o_desc.dtype, [STRIPS, ROWS, DEPTH], o_desc.layout)
    rings = (q_ring, k_ring, v_ring, o_ring)
    bars = (
        barriers(STRIPS, 1),
        barriers(STRIPS, 1),
        barriers(SLOTS, 1),
        barriers(SLOTS, STRIPS),
        barriers(SLOTS, 1),
        barriers(SLOTS, STRIPS),
        barriers(STRIPS, 1),
    )
    descs = (q_desc, k_desc, v_desc)
    sizes = (scale, tiles, blocks)
    if STRIPS == 1:
        gl.warp_specialize(
            [
                (attend_partition, (o_desc, rings, bars, sizes, GROUP, CAUSAL, 0, TURNS, HOLD)),
                (load_partition, (descs, rings, bars, tiles, blocks, GROUP, CAUSAL)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (attend_partition, (o_desc, rings, bars, sizes, GROUP, CAUSAL, 0, TURNS, HOLD)),
                (attend_partition, (o_desc, rings, bars, sizes, GROUP, CAUSAL, 1, TURNS, HOLD)),
                (load_partition, (descs, rings, bars, tiles, blocks, GROUP, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )
