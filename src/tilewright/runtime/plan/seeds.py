"""Attention with dropout on a GPU: where its gradient looks for the state of the generator.

A forward pass leaves two numbers, in the host's memory, or on the device while a graph is captured, and the gradient
looks for them where its own pass would have left them: in the host's memory it reads an address of the device, and the
process ends. Both need not be captured alike, and a loop stacks what its steps leave on the device."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

LOOK_FOR_SEEDS = frozenset(
    {"_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"}
)
"""Names of ops that read their arguments `philox_seed` and `philox_offset` so, unless `dropout_p` is 0."""
SEEDS = ("philox_seed", "philox_offset")


def finding_seeds(op: OpOverload) -> Callable[..., object]:
    """`op`, one of `LOOK_FOR_SEEDS`, given the numbers where it looks for them. Waits for the device where they lie
    there and no graph is captured."""
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]

    def call(*args: object, **kwargs: object) -> object:
        given = dict(zip(names, args, strict=False)) | kwargs
        if not given["dropout_p"] or torch.cuda.is_current_stream_capturing():
            return op._op(*args, **kwargs)
        return op._op(**given | {n: x.cpu() for n in SEEDS if isinstance(x := given[n], Tensor)})

    return call
