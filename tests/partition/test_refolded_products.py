"""A sum is not computed anew beside a value that another kernel folded of it, where the two may add in other orders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.attention.regions import graph_of, with_columns, work
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.graph import Graph, Value
from tilewright.partition.candidates import TWICE, candidates
from tilewright.partition.covering.cheapest_sets import Candidate
from tilewright.partition.regions import is_product


def _anew(graph: Graph, found: tuple[Candidate, ...]) -> list[Candidate]:
    """Kernels that make the scores and are given a value that was folded of them."""
    scores = next(op for op in graph.ops if is_product(op)).output
    folded: set[Value] = set()
    seen = {scores}
    for op in graph.ops:
        if seen & set(op.inputs):
            seen |= set(op.outputs)
            if folded & set(op.inputs) or (op.expr is not None and op.expr.reduction is not None):
                folded |= set(op.outputs)
    return [c for c in found if c.cuts & folded and any(scores in op.outputs for op in c.kernel.ops)]


@pytest.mark.parametrize(("length", "anew"), [(64, False), (256, True)])
def test_small_scores_are_stored_and_large_ones_computed_anew(length: int, anew: bool) -> None:
    graph = graph_of(with_columns, length=length)
    found = candidates(graph, work, 1, NO_HINTS)
    assert bool(_anew(graph, found.fit)) == anew
    scores = next(op for op in graph.ops if is_product(op)).output
    assert any(scores in c.stores for c in found.fit) != anew
    assert any(why.startswith(TWICE) for why in found.refused) != anew


def test_halves_hide_in_what_order_a_sum_was_taken() -> None:
    def halves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax((q @ k.transpose(-1, -2)).half(), -1)
        return p.float() @ v, p.float().sum(1)

    graph = graph_of(halves)
    assert _anew(graph, candidates(graph, work, 1, NO_HINTS).fit)


def squares(x: Tensor, a: Tensor) -> Tensor:
    v = a @ x
    return (v @ v.mT / 4).softmax(-2).mT @ v


def test_what_cancels_in_a_gradient_cancels() -> None:
    """Weights near 1: dS = P (dP - sum(P dP)) is small, and so is its error if both terms see the same dP. Few weights
    make most of the error, so many draws are judged together."""
    torch.manual_seed(0)
    compiled = torch.compile(squares, backend="tilewright", options={"contractions": "inside"})

    def gradient(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, a: Tensor, seed: Tensor) -> Tensor:
        given = x.clone().requires_grad_()
        f(given, a).backward(seed)
        assert given.grad is not None
        return given.grad

    draws = [(torch.randn(17, 16), torch.randn(4, 8, 17), torch.randn(4, 8, 16)) for _ in range(64)]
    exact = torch.stack([gradient(squares, *(t.double() for t in draw)) for draw in draws])
    ours = torch.stack([gradient(compiled, *draw) for draw in draws])
    eager = torch.stack([gradient(squares, *draw) for draw in draws])
    assert _rms(ours - exact) <= 2 * _rms(eager - exact)


def _rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()
