"""Which kernels of a region are priced: what a refusal tells of others, and how much work there is at most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.support.attention.regions import graph_of, weights, with_columns, work
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target
from tests.support.one_kernel import capture
from torch import Tensor

from tilewright.analysis.dependence.dependency import DimClasses
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.errors import IllegalSchedule
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.options import Options
from tilewright.partition.candidates import candidates
from tilewright.partition.covering import rounds
from tilewright.partition.covering.cheapest_sets import choices, least_seconds
from tilewright.schedule.solver import Solver
from tilewright.tuning.search_limits import CANDIDATES


def many_results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    p = weights(q, k) - weights(k, q) / 2
    rows = [(p * v[..., n : n + 1].transpose(-1, -2)).sum(-1) for n in range(3)]
    columns = [(p * v[..., n : n + 1]).sum(1) for n in range(3)]
    return p @ v, *rows, *columns


def recurrent(x: Tensor, u: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Steps of which each mixes all of the one before."""
    h = torch.tanh(x[0] @ u)
    made: list[Tensor] = []
    for n in range(4):
        h = torch.tanh(x[n] @ u + h @ w)
        made.append(h.sum(n % 2))
    return tuple(made)


def _more(a: Kernel, b: Kernel) -> bool:
    """Whether a kernel does all that another one does."""
    return set(a.ops) >= set(b.ops) and set(a.outputs) >= set(b.outputs)


def _recurrent() -> Graph:
    return capture(Case("case", recurrent, ((4, 6, 7), (7, 7), (7, 7))), False)


def test_what_does_more_than_a_kernel_without_a_form_has_none() -> None:
    """The law that spares solutions: it holds of all kernels that are priced without it."""
    graph, solver = _recurrent(), Solver(host_target(), Options.make({}))
    refused: list[Kernel] = []
    legal: list[Kernel] = []

    def price(kernel: Kernel, layouts: object = None) -> float:
        try:
            seconds = solver.price(kernel, {})
        except IllegalSchedule as problem:
            if problem.lasts:
                refused.append(kernel)
            raise IllegalSchedule("no form", law="none") from None
        legal.append(kernel)
        return seconds

    candidates(graph, price, 1, NO_HINTS)
    assert len(refused) > 1
    assert not any(_more(a, b) for a in legal for b in refused)


def test_nothing_larger_is_priced_than_what_has_no_form() -> None:
    graph, solver = _recurrent(), Solver(host_target(), Options.make({}))
    refused: list[Kernel] = []

    def price(kernel: Kernel, layouts: object = None) -> float:
        assert not any(_more(kernel, other) for other in refused)
        try:
            return solver.price(kernel, {})
        except IllegalSchedule as problem:
            if problem.lasts:
                refused.append(kernel)
            raise

    found = candidates(graph, price, 1, NO_HINTS)
    assert refused and choices(graph, found.kept)
    assert any("is read through a map" in why for why in found.refused)


def test_only_what_may_be_priced_is_asked_how_wide_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the classes of the same ops are found once, whatever of them is stored."""
    graph = graph_of(many_results, length=256)
    asked: list[object] = []
    found: list[object] = []
    measured, classes = rounds.parallelism, rounds.classes_of

    def counted(ops: Sequence[Op], outputs: Sequence[Value], found: DimClasses) -> Expr:
        asked.append(ops)
        return measured(ops, outputs, found=found)

    def counted_classes(ops: Sequence[Op]) -> DimClasses:
        found.append(ops)
        return classes(ops)

    monkeypatch.setattr(rounds, "parallelism", counted)
    monkeypatch.setattr(rounds, "classes_of", counted_classes)
    whole = candidates(graph, work, 1, NO_HINTS)
    everything = len(asked)
    assert len(set(found)) == len(found) < everything
    asked.clear()
    guessed = candidates(graph, work, 1, NO_HINTS, guess=lambda kernel: work(kernel) / 3)
    assert 2 * len(asked) < everything
    assert choices(graph, guessed.kept)[0].seconds == choices(graph, whole.kept)[0].seconds


def test_of_larger_regions_fewer_kernels_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(many_results, length=256)
    priced: list[Kernel] = []

    def price(kernel: Kernel, layouts: object = None) -> float:
        priced.append(kernel)
        return work(kernel)

    def ops(most: int) -> int:
        monkeypatch.setattr(rounds, "CANDIDATES", replace(CANDIDATES, max_priced_ops=most))
        priced.clear()
        found = candidates(graph, price, 1, NO_HINTS, guess=lambda kernel: 1.0)
        assert choices(graph, found.kept)
        return sum(len(k.ops) for k in priced)

    least = ops(0)  # until a set makes all results
    assert 0 < least < ops(CANDIDATES.max_priced_ops) / 2


def test_a_region_whose_kernels_are_all_refused_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(many_results, length=256)
    asked = 0

    def price(kernel: Kernel, layouts: object = None) -> float:
        nonlocal asked
        asked += len(kernel.ops)
        raise IllegalSchedule("no form", law="none")

    monkeypatch.setattr(rounds, "CANDIDATES", replace(CANDIDATES, max_refused_ops=300))
    found = candidates(graph, price, 1, NO_HINTS, guess=work)
    assert 300 < asked <= 300 + CANDIDATES.priced_per_round * len(graph.ops)
    assert not choices(graph, found.kept)


def test_the_least_seconds_of_each_kernel_are_those_of_trying_all_sets() -> None:
    graph = graph_of(with_columns)
    found = candidates(graph, work, 1, NO_HINTS).fit
    required = {v for v in graph.outputs if isinstance(v, Value)}
    tried = [math.inf] * len(found)
    for n in range(1, 4):
        for some in itertools.permutations(range(len(found)), n):
            made: set[Value] = set()
            for k in some:
                if not found[k].cuts <= made or found[k].stores <= made:
                    break
                made |= found[k].stores
            else:
                for k in some if required <= made else ():
                    tried[k] = min(tried[k], sum(found[m].seconds for m in some))
    assert 3 < len(found) < 40
    best = min(tried)
    pairs = zip(least_seconds(graph, found), tried, strict=True)
    assert all(a == b or min(a, b) > best for a, b in pairs)  # slow sets may have more kernels
    assert min(least_seconds(graph, found)) == best
