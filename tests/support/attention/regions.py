"""Regions around contractions, what kernels of them cost, and a cache of decisions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture
from torch import Tensor

from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims

SHAPES = ((2, 64, 8), (2, 64, 8), (2, 64, 8))


def weights(q: Tensor, k: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return torch.softmax(s + torch.triu(torch.full(s.shape[-2:], float("-inf")), 1), -1)


def with_columns(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = weights(q, k)
    return p @ v, p.sum(1)


def graph_of(
    run: Callable[..., Tensor | tuple[Tensor, ...]], dynamic: bool = False, length: int = 64
) -> Graph:
    names = ({1: "s"}, {1: "s"}, {1: "s"}) if dynamic else ()
    shapes = tuple((batch, length, width) for batch, _, width in SHAPES)
    return capture(Case("case", run, shapes, names), dynamic)


def work(kernel: Kernel, layouts: object = None) -> float:
    """Points of all reductions: a price on which tests can count."""
    reductions = (op.expr for op in kernel.ops if op.expr is not None and op.expr.reduction is not None)
    return float(sum(dims.static(e.points()) or 1 for e in reductions))


class DictCache:
    """Decisions of this process."""

    def __init__(self) -> None:
        self.known: dict[str, object] = {}

    def get(self, task: str) -> object | None:
        return self.known.get(task)

    def put(self, task: str, decision: object) -> None:
        self.known[task] = decision
