"""Programs whose callers are not asked how tensors lie: they take their inputs to lie so that each element has a place
of its own. An example that repeats elements (`expand`) says nothing about the tensors of later calls."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from tilewright.ir.sizes.repeats import repeats


def without_gaps(t: Tensor) -> Tensor:
    """An example for a trace with the sizes of `t`, whose elements lie side by side: `t` itself if its do, else a new
    tensor that holds nothing in particular: a trace looks at no values."""
    if t.layout is not torch.strided:
        return t
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if reach + 1 == t.numel() and not repeats(t.shape, t.stride()):
        return t
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


@contextmanager
def dense_inputs(gm: fx.GraphModule) -> Generator[None]:
    """While active, the placeholders of a graph stand for tensors that repeat no element."""
    before: list[tuple[fx.Node, object]] = []
    for node in gm.graph.nodes:
        val = node.meta.get("val") if node.op == "placeholder" else None
        if (
            isinstance(val, Tensor)
            and val.layout is torch.strided
            and repeats(_known(val.shape), _known(val.stride()))
        ):
            before.append((node, val))
            node.meta["val"] = torch.empty_like(val, memory_format=torch.contiguous_format)
    try:
        yield
    finally:
        for node, val in before:
            node.meta["val"] = val


def _known(sizes: tuple[int, ...]) -> list[int]:
    """The sizes at which a program was traced."""
    return [n if type(n) is int else n.node.hint or 2 for n in sizes]  # pyright: ignore
