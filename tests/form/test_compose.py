"""A kernel of steps that are written out, each of which reads one tensor at another place: what is looked at grows as
the steps do, or as what each folds."""

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel

from tilewright.form.classes import _boundary_splits, _input_meetings, make_form
from tilewright.form.compose import compose
from tilewright.ir import expr
from tilewright.ir.expr import Expr
from tilewright.ir.form import Form


def scan(steps: int) -> Case:
    """A state that is multiplied and added to at each step, and a sum of each state."""

    def run(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, sums = b[:, 0], list[torch.Tensor]()
        for t in range(1, steps + 1):
            h = a[:, t] * h + b[:, t]
            sums.append(h.sum(-1))
        return tuple(sums)

    return Case("scan", run, ((8, steps + 1, 64), (8, steps + 1, 64)))


def composed(steps: int) -> Form:
    graph = capture(scan(steps), False)
    return compose(one_kernel(graph), graph.layouts)


def test_places_in_one_tensor_that_differ_in_nothing_else_are_looked_at_once() -> None:
    """Each of n folds reads up to n places: compared with each other, these are n ** 4 pairs."""
    few, many = composed(3), composed(12)
    assert len(list(_input_meetings(many))) <= 25 * len(list(_input_meetings(few)))
    assert len(list(_boundary_splits(many))) <= 5 * len(list(_boundary_splits(few)))


def test_parts_of_expressions_that_folds_share_are_rewritten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a step is part of that of each later one: n folds hold n ** 2 nodes, of which 5 n are different."""
    graph = capture(scan(12), False)
    kernel, layouts = one_kernel(graph), graph.layouts
    rebuilt, real = 0, expr.rebuild

    def rebuild(e: Expr, args: tuple[Expr, ...]) -> Expr:
        nonlocal rebuilt
        rebuilt += 1
        return real(e, args)

    monkeypatch.setattr(expr, "rebuild", rebuild)
    compose(kernel, layouts)
    to_compose, rebuilt = rebuilt, 0
    make_form(kernel, layouts)
    assert rebuilt <= 3 * to_compose
