"""What the hand-written kernels share: words of Gluon that differ between Triton 3.6 and 3.9, rings of buffers."""

# Triton has no types, and its decorators take functions of its own language.
# pyright: basic
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Start a copy (descriptor, first element, barrier, buffer) of global memory that signals the barrier."""
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Start a copy (descriptor, first element, buffer) to global memory."""


@gluon.constexpr_function
def product_layout(warps, columns):
    """How the accumulator of 16 rows a warp and fp16 operands lies in registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each complete after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def advanced(slot, phase, SLOTS: gl.constexpr):
    """The next slot of a ring, and the phase of its barrier: 0 in the first round, 1 in the second, and so on."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
