"""Statistics of rows that reductions along columns divide by, as one logarithm a row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture
from torch import Tensor

from tilewright.interp import EXACT, FLOATS, equal, exact_random, run_graph
from tilewright.ir.graph import Graph
from tilewright.rewrite.algebra.logsumexp import take_logsumexp

SHAPE = (2, 5, 6)
Run = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


def softmax(s: Tensor) -> Tensor:
    return torch.softmax(s, -1)


def _scaled(s: Tensor) -> Tensor:
    e = torch.exp((s - s.amax(-1, keepdim=True)) * 0.3)
    return e / e.sum(-1, keepdim=True)


COLUMNS: dict[str, Run] = {
    "sums": lambda s: softmax(s).sum(1),
    "sums of squares": lambda s: (softmax(s) ** 2).sum(1),
    "any": lambda s: (softmax(s) >= 0.2).any(1),
    "two": lambda s: (softmax(s).sum(1), softmax(s).amax(1)),
    "transposed": lambda s: softmax(s).transpose(1, 2).sum(-1),
    "scaled": lambda s: _scaled(s).sum(1),
    "no shift": lambda s: (torch.exp(s) / torch.exp(s).sum(-1, keepdim=True)).sum(1),
}
OTHERS: dict[str, Run] = {
    "rows": lambda s: softmax(s).sum(-1),
    "returned": softmax,
    "rows and columns": lambda s: (softmax(s).sum(1), softmax(s).cumsum(-1)),
    "sign unknown": lambda s: (torch.exp(s) / s.sum(-1, keepdim=True)).sum(1),
    "reshaped": lambda s: softmax(s).reshape(2, 3, 10).sum(1),
    "no exponential": lambda s: (s.abs() / s.abs().sum(-1, keepdim=True)).sum(1),
}


class Halves(Case):
    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        return [t.half() for t in super().inputs(scale, seed)]


def case_of(run: Run, half: bool) -> Case:
    return Halves("case", lambda s: run(s.float()), (SHAPE,)) if half else Case("case", run, (SHAPE,))


def graph_of(run: Run, half: bool = False) -> Graph:
    return capture(case_of(run, half), False)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_the_meaning_stays_and_no_element_is_divided(name: str, half: bool) -> None:
    before = graph_of(COLUMNS[name], half)
    after, count = take_logsumexp(before)
    after.verify()
    assert count == 1
    assert not any(
        "/" in op_text for op_text in after.show().splitlines() if "5, 6]" in op_text.split("=")[0]
    )
    assert any(op.name == "inverse" for op in after.ops), "halves that are widened first are singles"
    inputs = [t.numpy() for t in case_of(COLUMNS[name], half).inputs()]
    for a, b in zip(run_graph(before, inputs, FLOATS), run_graph(after, inputs, FLOATS), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6)


def test_beside_reductions_of_halves_the_logarithm_of_a_sum_is_close_enough() -> None:
    run: Run = lambda s: softmax(s.float() + s.sum(1, keepdim=True)).sum(1)  # noqa: E731
    before = capture(Halves("case", run, (SHAPE,)), False)
    after, count = take_logsumexp(before)
    after.verify()
    assert count == 1 and any(op.name == "logsumexp" for op in after.ops)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["sums", "sums of squares", "scaled", "no shift"])
def test_it_is_exact(name: str, half: bool) -> None:
    before = graph_of(COLUMNS[name], half)
    after, _ = take_logsumexp(before)
    inputs = [exact_random(SHAPE, 0)]
    for a, b in zip(run_graph(before, inputs, EXACT), run_graph(after, inputs, EXACT), strict=True):
        assert equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone_where_rows_are_kept_or_nothing_proves_it(name: str) -> None:
    graph = graph_of(OTHERS[name])
    assert take_logsumexp(graph) == (graph, 0)


def test_rows_that_admit_nothing_stay_nan() -> None:
    graph = graph_of(COLUMNS["sums"])
    after, _ = take_logsumexp(graph)
    s = torch.randn(SHAPE, dtype=torch.float32)
    s[0, 1] = -torch.inf
    want, got = (np.asarray(run_graph(g, [s.numpy()], FLOATS)[0]) for g in (graph, after))
    assert np.array_equal(np.isnan(want), np.isnan(got))
    assert np.isnan(want[0]).all()
