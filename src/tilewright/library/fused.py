"""Fused routines of the library, as calls for what a region computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand, Routine
from tilewright.ir.sizes import dims
from tilewright.ir.task import Attention

FASTEST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
"""Torch's ways to do attention, the first that can serve is taken. The file
benchmarks/results/h200/attention_4096.json has the first two side by side."""


def fused_call(task: Attention, shape: Sequence[Expr], order: Sequence[int]) -> LibraryCall:
    """Torch's fused attention as a dense result of `shape`: `order` says which of its dims are batch, heads, queries
    and depth (-1: it has no such dim)."""
    ranked = sorted(range(len(order)), key=lambda k: order[k])
    sizes = [n for s in shape if (n := dims.static(s)) is not None]
    assert len(sizes) == len(shape), "sizes are numbers"

    routine = FusedAttention(task.causal, task.scale, tuple(ranked), tuple(sizes))
    operands, strides = tuple(Operand(k) for k in range(3)), dims.dense_strides(tuple(shape))
    return LibraryCall(
        "scaled_dot_product_attention", routine, operands, strides=(strides,), reason="attention", reuses=-1
    )


@dataclass(frozen=True, slots=True)
class FusedAttention(Routine):
    """Torch's fused attention, its result with dims in this `order` and then of these `sizes`."""

    causal: bool
    scale: float | None
    order: tuple[int, ...]
    sizes: tuple[int, ...]

    def bind(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """What runs."""
        order, sizes = list(self.order), list(self.sizes)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(FASTEST, set_priority=True):
                made = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=self.causal, scale=self.scale
                )
            return made.permute(order).reshape(sizes).contiguous()

        return attention
