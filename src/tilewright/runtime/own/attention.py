"""Attention in code of our own (`native/attention.cpp`), as a library call.

Faster than torch's on the processors where that runs on slow matrix products, from about a hundred keys on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewright.errors import TilewrightError
from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand, Routine
from tilewright.ir.sizes import dims
from tilewright.ir.task import Attention
from tilewright.library.offers.offer import FrozenAttention
from tilewright.tuning.runtime_thresholds import OWN_KERNELS


class AttentionOwner(Protocol):
    """What of the built library is needed here."""

    @property
    def floats(self) -> Callable[[int, int], int]: ...
    @property
    def run_attention(self) -> Callable[[int, int, int], int]: ...
    @property
    def scratch(self) -> int: ...
    @property
    def trim(self) -> bool: ...
    @property
    def threads(self) -> Callable[[], int]: ...


class _Task(ctypes.Structure):
    """As the native side reads it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "out", "packed_k", "packed_v")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "depth")),
        *((f"{x}_{d}", ctypes.c_int64) for x in "qkv" for d in ("batch", "head", "place")),
        *((f"{x}_{d}", ctypes.c_int64) for x in ("mask", "out") for d in ("batch", "head", "place")),
        *((name, ctypes.c_int64) for name in ("causal", "trim")),
        ("scale", ctypes.c_float),
        ("scratch", ctypes.c_void_p),
        ("failed", ctypes.c_int64),
    )


def attention_call(owner: AttentionOwner, given: FrozenAttention) -> LibraryCall | None:
    """The call for attention on q, k, v (and an open mask); None where torch's is the better choice."""
    task = given.task
    keys, depth = dims.static(task.k[2]), dims.static(task.q[3])
    if depth is None or depth < OWN_KERNELS.min_depth or (keys is not None and keys < OWN_KERNELS.min_keys):
        return None
    mask = given.mask
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype is torch.float32):
        return None
    batch, heads, queries, _ = task.q
    inner = dims.dense_strides((batch, queries, heads, task.q[3]))
    strides: tuple[Expr, ...] = (inner[0], inner[2], inner[1], inner[3])
    operands = tuple(Operand(k) for k in range(4 if given.masked else 3))
    return LibraryCall(
        "attention", OwnAttention(owner, task, mask), operands, strides=(strides,), reason="attention", reuses=-1,
        own=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class OwnAttention(Routine):
    """Attention of a task, with a mask that is frozen if there is one."""

    owner: AttentionOwner
    task: Attention
    mask: Tensor | None

    def bind(self) -> Callable[..., Tensor]:
        """What runs."""
        return _function(self.owner, self.task, self.mask)


def _function(owner: AttentionOwner, task: Attention, fixed: Tensor | None) -> Callable[..., Tensor]:
    run, scratch, threads, causal = owner.run_attention, owner.scratch, owner.threads, task.causal
    shared = not dims.equal(task.q[1], task.k[1])

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = fixed) -> Tensor:
        batch, heads, queries, depth = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        scale = task.scale if task.scale is not None else depth**-0.5
        if not batch * queries * keys:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=shared
            )
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        out = torch.empty((batch, queries, heads, depth)).transpose(1, 2)
        packed = torch.empty((2, owner.floats(keys, depth) * batch * kv_heads))
        at = 0, (0, 0, 0)
        if mask is not None:
            wide = mask.expand(batch, heads, queries, keys)
            wide = wide if wide.stride(3) == 1 else wide.contiguous()
            at = wide.data_ptr(), wide.stride()[:3]
        native = _Task(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), at[0] or None, out.data_ptr(), packed[0].data_ptr(),
            packed[1].data_ptr(), batch, heads, kv_heads, queries, keys, depth, *q.stride()[:3], *k.stride()[:3],
            *v.stride()[:3], *at[1], *out.stride()[:3], causal, owner.trim, scale,
        )  # fmt: skip
        if run(ctypes.addressof(native), scratch, threads()):
            raise TilewrightError("memory ran out", phase="run", op="attention")
        return out

    return attention
