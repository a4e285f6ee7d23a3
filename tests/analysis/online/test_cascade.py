"""Cascades as reductions over states of parts: any split in any bracketing gives what the whole row gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from tests.support.attention.cascades import graph_of, online_class
from tests.support.one_kernel import one_kernel

from tilewright.analysis.online.cascade import Link, cascade, part_body
from tilewright.form.classes import make_form
from tilewright.form.companions import links_of, with_companions
from tilewright.interp import EXACT, FLOATS, Algebra, equal, exact_random
from tilewright.interp.evaluate import Evaluator, merge_last
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, make, slot, substitute
from tilewright.ir.form import Item, folds_read

ROWS = (
    "logsumexp",
    "softmax",
    "entropy",
    "relative entropy",
    "variance",
    "skewness",
    "minimum",
    "layer norm",
)
N = 13


@dataclass
class Row:
    """The folds of a case over its row, on one row of data."""

    items: tuple[Item, ...]
    links: tuple[Link, ...]
    operands: list[np.ndarray]
    algebra: Algebra

    def state(self, places: Sequence[int], whole: bool = False) -> list[np.ndarray]:
        """States of the part at `places`; with `whole`, results as the program means them."""
        own: dict[Expr, np.ndarray] = {}
        names = {x.leaf: make("var", (), x.leaf.dtype, k) for k, x in enumerate(self.links)}
        (c,) = self.items[0].reduce
        axes: dict[Axis, np.ndarray] = {a: np.asarray(0) for i in self.items for a in i.kept}
        for item, link in zip(self.items, self.links, strict=True):
            body = item.body[0] if whole else part_body(link, self.links, item.body[0], {n: n for n in names})
            at = Evaluator(self.algebra, self.operands, axes={**axes, c: np.asarray(places)}, slots=own)
            x = np.broadcast_to(at.value(substitute(body, names)), (len(places),))
            (own[names[link.leaf]],) = merge_last(self.algebra, link.reduction, [x])
        return list(own.values())

    def finished(self, state: Sequence[np.ndarray]) -> list[np.ndarray]:
        made = cascade(self.links)
        slots = {slot("a", k, t): s for k, (t, s) in enumerate(zip(made.state, state, strict=True))}
        return [Evaluator(self.algebra, slots=slots).value(f) for f in made.finish]

    def merged(self, a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> list[np.ndarray]:
        made = cascade(self.links)
        slots = {
            slot(s, k, t): x
            for s, of in (("a", a), ("b", b))
            for k, (t, x) in enumerate(zip(made.state, of, strict=True))
        }
        return [Evaluator(self.algebra, slots=slots).value(m) for m in made.merge]


def row(name: str, algebra: Algebra = EXACT, data: np.ndarray | None = None) -> Row:
    graph = graph_of(name)
    form = with_companions(make_form(one_kernel(graph), graph.layouts))
    c = online_class(form)
    items = [i for i in form.folds.values() if i.reduce == (c,)]
    inside = {i.id for i in items}
    items.sort(key=lambda i: bool(inside & set(folds_read(i.body))))
    links = links_of(items)
    assert links is not None
    sizes = [int(s.value or 0) for s in form.sizes if isinstance(s.value, int)]
    operands = [
        exact_random((n,), 5 + k) if data is None else np.resize(data, n) for k, n in enumerate(sizes)
    ]
    return Row(tuple(items), links, operands, algebra)


@pytest.mark.parametrize("name", ROWS)
def test_parts_merge_to_the_whole(name: str) -> None:
    of = row(name)
    whole = of.state(range(N), whole=True)
    rng = np.random.default_rng(0)
    for _ in range(3):
        order = rng.permutation(N)
        cuts = sorted(rng.choice(np.arange(1, N), 3, replace=False))
        parts = [of.state(p.tolist()) for p in np.split(order, cuts)]
        while len(parts) > 1:
            k = int(rng.integers(len(parts) - 1))
            parts[k : k + 2] = [of.merged(parts[k], parts[k + 1])]
        assert all(
            equal(np.asarray(m), np.asarray(w)) for m, w in zip(of.finished(parts[0]), whole, strict=True)
        )


@pytest.mark.parametrize("name", ["logsumexp", "entropy", "variance", "minimum"])
def test_states_without_repair_do_not_merge(name: str) -> None:
    of = row(name)
    whole = of.state(range(N), whole=True)
    a, b = of.state(range(6)), of.state(range(6, N))
    added = [EXACT.apply("add", [x, y], f32, f32) for x, y in zip(a, b, strict=True)]
    follow = [k for k, link in enumerate(of.links) if link.law is not None]
    assert follow and not all(equal(added[k], np.asarray(whole[k])) for k in follow)


def test_gauges_that_read_the_row_make_no_reduction() -> None:
    graph = graph_of("sink")
    form = with_companions(make_form(one_kernel(graph), graph.layouts))
    assert links_of(list(form.folds.values())) is None


@pytest.mark.parametrize("name", ROWS)
def test_the_identity_changes_nothing(name: str) -> None:
    of = row(name)
    state = of.state(range(4))
    nothing = [Evaluator(EXACT).value(e) for e in cascade(of.links).identity]
    for pair in ((state, nothing), (nothing, state)):
        assert all(equal(np.asarray(m), np.asarray(s)) for m, s in zip(of.merged(*pair), state, strict=True))


@pytest.mark.parametrize("name", ["logsumexp", "entropy", "softmax"])
@pytest.mark.parametrize("hidden", [range(N), range(6), range(7, N)])
def test_parts_of_nothing(name: str, hidden: range) -> None:
    x = np.random.default_rng(1).normal(size=N).astype(np.float32) * 1e4
    x[list(hidden)] = -math.inf
    of = row(name, FLOATS, x)
    parts = [of.state(p) for p in (range(3), range(3, 7), range(7, N))]
    made = of.finished(of.merged(of.merged(parts[0], parts[1]), parts[2]))
    for got, want in zip(made, of.state(range(N), whole=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
