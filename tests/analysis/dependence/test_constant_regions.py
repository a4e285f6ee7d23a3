"""Regions: every spelling of a mask gives the same predicate, and what is claimed holds element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.analysis.dependence.workloads import WORKLOADS, check, elements, inputs
from tests.support.normal_graph import capture, made_by, results
from torch import Tensor
from torch.nn import functional as F

from tilewright.analysis.dependence.properties import ConstantRegion, properties
from tilewright.interp.graph import run_values
from tilewright.ir.expr import walk
from tilewright.ir.graph import Graph, Value

INF = math.inf
Q, K, WINDOW, SINKS, PREFIX, BLOCK = 12, 16, 5, 2, 6, 4
OFFSET = K - Q


def masked(
    run: Callable[..., Tensor], *more: Tensor, dynamic: Sequence[dict[int, str]] = ()
) -> tuple[Graph, Value]:
    """The graph of masked scores and the value that they are."""
    graph = capture(run, [torch.randn(Q, K), *more], dynamic)
    return graph, results(graph)[0]


def minus_infinity(graph: Graph, v: Value) -> list[ConstantRegion]:
    return [r for r in properties(graph.ops).regions[v] if r.constant.value == -INF]


ROWS, COLUMNS = torch.arange(Q)[:, None] + OFFSET, torch.arange(K)[None, :]
ADMITS = {
    "causal": COLUMNS <= ROWS,
    "top left": COLUMNS <= ROWS - OFFSET,
    "window": (COLUMNS <= ROWS) & (ROWS - COLUMNS < WINDOW),
    "both sides": (ROWS - COLUMNS).abs() < WINDOW,
    "sinks": (COLUMNS <= ROWS) & ((ROWS - COLUMNS < WINDOW) | (COLUMNS < SINKS)),
    "prefix": (COLUMNS <= ROWS) | (COLUMNS < PREFIX),
    "blocks": torch.arange(Q)[:, None] // BLOCK == COLUMNS // BLOCK,
    "block causal": COLUMNS // BLOCK <= torch.arange(Q)[:, None] // BLOCK,
}


def place(s: Tensor, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    q, k = s.shape
    return torch.arange(q, dtype=dtype)[:, None] + (k - q), torch.arange(k, dtype=dtype)[None, :]


def ones(s: Tensor) -> Tensor:
    return torch.ones(s.shape)


def near(s: Tensor) -> Tensor:
    return torch.where(place(s)[0] - place(s)[1] < WINDOW, s, -INF)


def biased(s: Tensor, admits: Tensor) -> Tensor:
    return s + torch.zeros(s.shape).masked_fill(~admits, -INF)


def by_where(of: Callable[[Tensor, Tensor], Tensor]) -> list[Callable[[Tensor], Tensor]]:
    """Spellings that any predicate of (query, key) has."""

    def admits(s: Tensor) -> Tensor:
        return of(*place(s))

    return [
        lambda s: torch.where(admits(s), s, -INF),
        lambda s: s.masked_fill(~admits(s), -INF),
        lambda s: biased(s, admits(s)),
        lambda s: s + torch.log(admits(s).float()),
        lambda s: torch.where(admits(s).int() == 0, torch.full((), -INF), s),
        lambda s: torch.where(1 - admits(s).float() > 0.5, -INF, s + 0.0),
        lambda s: torch.where(of(*place(s, torch.int32)), s, -INF),
        lambda s: torch.where(admits(s), torch.where(s > 0, s, s * 2), -INF),
    ]


SPELLINGS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "causal": [
        *by_where(lambda i, j: j <= i),
        lambda s: s + torch.triu(torch.full(s.shape, -INF), diagonal=OFFSET + 1),
        lambda s: s.masked_fill(torch.triu(ones(s), diagonal=OFFSET + 1).bool(), -INF),
        lambda s: s.masked_fill(torch.tril(ones(s), diagonal=OFFSET) == 0, -INF),
        lambda s: torch.where((place(s)[0] - place(s)[1]).float() < 0, -INF, s),
        lambda s: s.masked_fill(torch.logical_not(place(s)[0] >= place(s)[1]), -INF),
        lambda s: torch.where(place(s)[0] < place(s)[1], -INF, s) * 3 - 1,
    ],
    "top left": [
        lambda s: s + torch.triu(torch.full(s.shape, -INF), diagonal=1),
        lambda s: torch.where(torch.tril(ones(s)).bool(), s, -INF),
        lambda s: s.masked_fill(torch.arange(Q)[:, None] < torch.arange(K), -INF),
    ],
    "window": [
        *by_where(lambda i, j: (j <= i) & (i - j < WINDOW)),
        *by_where(lambda i, j: ~((j > i) | (j <= i - WINDOW))),
        lambda s: s.masked_fill(
            (torch.tril(ones(s), OFFSET) * torch.triu(ones(s), OFFSET - WINDOW + 1)) == 0, -INF
        ),
        lambda s: s.masked_fill((torch.tril(ones(s), OFFSET) - torch.tril(ones(s), OFFSET - WINDOW)) != 1, -INF),
        lambda s: s + torch.triu(torch.full(s.shape, -INF), OFFSET + 1) + torch.tril(
            torch.full(s.shape, -INF), OFFSET - WINDOW
        ),
        lambda s: torch.where(place(s)[1] <= place(s)[0], near(s), -INF),
    ],
    "both sides": [
        *by_where(lambda i, j: (i - j).abs() < WINDOW),
        *by_where(lambda i, j: (i - j < WINDOW) & (j - i < WINDOW)),
    ],
    "sinks": [
        *by_where(lambda i, j: (j <= i) & ((i - j < WINDOW) | (j < SINKS))),
        *by_where(lambda i, j: ((j <= i) & (i - j < WINDOW)) | ((j < SINKS) & (j <= i))),
    ],
    "prefix": [
        *by_where(lambda i, j: (j <= i) | (j < PREFIX)),
        *by_where(lambda i, j: ~((j > i) & (j >= PREFIX))),
    ],
    "blocks": by_where(lambda i, j: (i - OFFSET) // BLOCK == j // BLOCK),
    "block causal": by_where(lambda i, j: j // BLOCK <= (i - OFFSET) // BLOCK),
}  # fmt: skip


@pytest.mark.parametrize("mask", SPELLINGS)
def test_every_spelling_gives_the_same_region(mask: str):
    found = set()
    for run in SPELLINGS[mask]:
        graph, v = masked(run)
        (region,) = minus_infinity(graph, v)
        scores = torch.randn(Q, K)
        values, symbols = run_values(graph, [scores])
        assert np.array_equal(elements(region, v, values, symbols), ~ADMITS[mask].numpy())
        assert np.array_equal(values[v] == -INF, ~ADMITS[mask].numpy())
        check(graph, properties(graph.ops), [scores])
        found.add(region.condition)
    assert len(found) == 1, found


def test_symbolic_sizes():
    """Bottom-right alignment for any number of queries and keys."""
    for number in (0, 1, 2, 3, 5, 7):
        run = SPELLINGS["causal"][number]
        graph, v = masked(run, dynamic=[{0: "q", 1: "k"}])
        (region,) = minus_infinity(graph, v)
        scores = torch.randn(7, 10)
        values, symbols = run_values(graph, [scores])
        want = np.arange(10)[None] > np.arange(7)[:, None] + 3
        assert np.array_equal(elements(region, v, values, symbols), want)


def test_documents_are_a_predicate_that_reads_data():
    for run in (
        lambda s, d: torch.where(d[:Q, None] == d[None, :], s, -INF),
        lambda s, d: s.masked_fill(d[None, :] != d[:Q, None], -INF),
        lambda s, d: s + torch.log((d[:Q, None] - d[None, :] == 0).float()),
    ):
        d = torch.randint(0, 3, (K,))
        graph, v = masked(run, d)
        (region,) = minus_infinity(graph, v)
        values, symbols = run_values(graph, [torch.randn(Q, K), d])
        assert np.array_equal(elements(region, v, values, symbols), (d[:Q, None] != d).numpy())
        assert any(x.op == "read" for x in walk(region.condition))


def test_block_lists_are_a_predicate_that_reads_data():
    def run(s: Tensor, keep: Tensor) -> Tensor:
        i, j = torch.arange(Q)[:, None], torch.arange(K)
        return torch.where(keep[i // BLOCK, j // BLOCK] & (j <= i + OFFSET), s, -INF)

    keep = torch.rand(Q // BLOCK, K // BLOCK) > 0.5
    graph, v = masked(run, keep)
    (region,) = minus_infinity(graph, v)
    values, symbols = run_values(graph, [torch.randn(Q, K), keep])
    wide = keep.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert np.array_equal(elements(region, v, values, symbols), ~(wide & ADMITS["causal"]).numpy())


def test_a_key_padding_mask_of_bools():
    pad = torch.rand(K) > 0.3
    graph, v = masked(lambda s, p: s.masked_fill(~p, -INF).masked_fill(place(s)[1] > place(s)[0], -INF), pad)
    (region,) = minus_infinity(graph, v)
    values, symbols = run_values(graph, [torch.randn(Q, K), pad])
    assert np.array_equal(elements(region, v, values, symbols), ~(pad & ADMITS["causal"]).numpy())


# --- what must not be claimed


def test_scores_that_may_be_anything_hide_nothing():
    """inf - inf is NaN: without the assumption that memory is finite, a sum with -inf is not known to be -inf."""
    graph, v = masked(lambda s: s + torch.triu(torch.full(s.shape, -INF), 1))
    assert properties(graph.ops).regions[v] and not properties(graph.ops, finite=False).regions[v]
    chosen, w = masked(lambda s: torch.where(torch.ones(s.shape).tril().bool(), s, -INF))
    assert properties(chosen.ops, finite=False).regions[w] == properties(chosen.ops).regions[w]


@pytest.mark.parametrize("run", [
    lambda s: torch.where(s > 0, s, -INF),
    lambda s: s + torch.triu(torch.full(s.shape, -1e9), 1),
    lambda s: s * torch.tril(torch.ones(s.shape)) + 1 + s,
    lambda s: s.masked_fill(torch.sin(torch.arange(K).float()) > 0, 0.0) + s,
])  # fmt: skip
def test_no_mask_no_region(run: Callable[[Tensor], Tensor]):
    graph, v = masked(run)
    assert not properties(graph.ops).regions[v]


def test_a_negative_factor_turns_the_mask():
    graph, v = masked(lambda s: s * 0 - 2 * torch.triu(torch.full(s.shape, -INF), 1))
    by_value = {r.constant.value: r for r in properties(graph.ops).regions[v]}
    assert set(by_value) == {0.0, INF}


def softmax_regions(
    run: Callable[[Tensor], Tensor], dynamic: Sequence[dict[int, str]] = ()
) -> dict[float, ConstantRegion]:
    graph, v = masked(lambda s: torch.softmax(run(s), -1), dynamic=dynamic)
    check(graph, properties(graph.ops), [torch.randn(Q, K)])
    return {r.constant.value: r for r in properties(graph.ops).regions[v]}  # type: ignore[misc]


@pytest.mark.parametrize("mask", ["causal", "window", "sinks", "prefix", "both sides"])
def test_weights_are_zero_behind_a_mask_that_leaves_something_in_every_row(mask: str):
    assert set(softmax_regions(SPELLINGS[mask][0])) == {0.0}


def test_weights_are_not_known_to_be_zero_where_rows_may_be_empty():
    """NaN, as in eager: rows before the first key, or all of a data-dependent mask."""
    (nothing,) = softmax_regions(lambda s: torch.where(place(s)[1] < place(s)[0] - K, s, -INF))
    assert math.isnan(nothing)
    graph, v = masked(lambda s, p: torch.softmax(s.masked_fill(p, -INF), -1), torch.rand(K) > 2)
    assert not properties(graph.ops).regions[v]
    # more queries than keys: the first rows of a bottom-right aligned mask are empty
    tall = capture(
        lambda s: torch.softmax(torch.where(place(s)[1] <= place(s)[0], s, -INF), -1), [torch.randn(9, 5)]
    )
    assert not properties(tall.ops).regions[results(tall)[0]]


def test_documents_leave_the_diagonal():
    def run(s: Tensor, d: Tensor) -> Tensor:
        same = d[:, None] == d[None, :]
        return torch.softmax(torch.where(same & (place(s)[1] <= place(s)[0]), s, -INF), -1)

    d = torch.randint(0, 3, (K,))
    graph = capture(run, [torch.randn(K, K), d])
    (region,) = properties(graph.ops).regions[results(graph)[0]]
    assert region.constant.value == 0
    check(graph, properties(graph.ops), [torch.randn(K, K), d])


def test_library_attention_decomposed():
    shapes = [torch.randn(1, 2, K, 8)] * 3
    graph = capture(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), shapes)
    known = properties(graph.ops)
    assert {r.constant.value for r in known.regions[made_by(graph, "exp").output]} == {0.0}
    check(graph, known, shapes)


@pytest.mark.parametrize("name", WORKLOADS)
def test_attention_with_statistics(name: str):
    """Weights and their powers are 0 behind the mask, and so is what reductions of row and column kernels fold."""
    ins = inputs(name, 2, Q, K, 8)
    graph = capture(WORKLOADS[name], ins)
    known = properties(graph.ops)
    check(graph, known, ins)
    weights = made_by(graph, "softmax", 0)
    (region,) = known.regions[weights.output]
    assert region.constant.value == 0 and known.sign[weights.output].nonnegative
    readers = [op for op in graph.ops if weights.output in op.inputs]
    elements = [known.element_regions[op] for op in readers if op in known.element_regions]
    assert elements and all({r.constant.value for r in regions} == {0.0} for regions in elements)
    totals = [op for op in graph.ops if op.name == "sum" and op.output.shape[-1].value == 1]
    assert known.sign[totals[0].output].positive


def test_a_column_threshold_needs_its_sign():
    """any(p >= t) over masked queries: the test is false where p is 0 only if t is positive."""

    def run(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(torch.where(place(s)[1] <= place(s)[0], s, -INF), -1)
        return p >= t, p >= 1 / (place(s)[0] + 1).float()

    graph = capture(run, [torch.randn(Q, K), torch.rand(Q, K)])
    any_sign, positive = results(graph)
    known = properties(graph.ops)
    assert not known.regions[any_sign]
    assert [r.constant.value for r in known.regions[positive]] == [False]


def test_a_reduction_of_one_constant_is_that_constant():
    graph = capture(lambda s: torch.where(torch.arange(Q)[:, None] < 3, 0.0, s).sum(-1), [torch.randn(Q, K)])
    (region,) = properties(graph.ops).regions[results(graph)[0]]
    assert region.constant.value == 0
    check(graph, properties(graph.ops), [torch.randn(Q, K)])


# --- random programs


@st.composite
def predicates(draw: st.DrawFn, depth: int = 3) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A bool tensor over (query, key), of positions and of document ids."""
    if depth and draw(st.booleans()):
        a, b = draw(predicates(depth - 1)), draw(predicates(depth - 1))
        kind = draw(st.integers(0, 5))
        return [
            lambda i, j, d: a(i, j, d) & b(i, j, d),
            lambda i, j, d: a(i, j, d) | b(i, j, d),
            lambda i, j, d: a(i, j, d) ^ b(i, j, d),
            lambda i, j, d: ~a(i, j, d),
            lambda i, j, d: torch.where(a(i, j, d), b(i, j, d), ~b(i, j, d)),
            lambda i, j, d: a(i, j, d).float() * b(i, j, d).float() != 0,
        ][kind]
    c, m = draw(st.integers(-4, 12)), draw(st.integers(1, 5))
    return draw(st.sampled_from([
        lambda i, j, d: j <= i + c,
        lambda i, j, d: i - j < c,
        lambda i, j, d: (i - j).abs() > c,
        lambda i, j, d: j < c,
        lambda i, j, d: i // m == j // m,
        lambda i, j, d: (i + j) % m == 0,
        lambda i, j, d: 2 * i - 3 * j >= c,
        lambda i, j, d: (i * 1.0) < (j * 1.0) + c,
        lambda i, j, d: d[i.flatten()][:, None] == d[j.flatten()],
        lambda i, j, d: d[j.flatten()] > 0,
    ]))  # fmt: skip


@given(
    predicates(),
    predicates(),
    st.integers(0, 4),
    st.sampled_from(["exp", "softmax", "relu", "square", "sum", "max"]),
)
@settings(max_examples=40, deadline=None)
def test_random_masks(first: Callable[..., Tensor], second: Callable[..., Tensor], style: int, last: str):
    def run(s: Tensor, d: Tensor) -> Tensor:
        i, j = torch.arange(9)[:, None], torch.arange(11)[None, :]
        p, q = first(i, j, d), second(i, j, d)
        s = [
            lambda: torch.where(p, s, -INF),
            lambda: s + torch.zeros(9, 11).masked_fill(p, -INF) + torch.log(q.float()),
            lambda: s.masked_fill(p, 0.0) * q.float(),
            lambda: torch.where(p, torch.where(q, s, -INF), torch.where(q, 1.0, s)),
            lambda: torch.maximum(s * p.float(), q.float() - 1),
        ][style]()
        finish = {"exp": torch.exp, "relu": torch.relu, "square": torch.square}.get(last)
        if finish is not None:
            return finish(s)
        return s.amax(-1) if last == "max" else s.sum(0) if last == "sum" else torch.softmax(s, -1)

    ins = [torch.randn(9, 11), torch.randint(0, 3, (11,))]
    graph = capture(run, ins)
    for finite in (True, False):
        check(graph, properties(graph.ops, finite), ins)
