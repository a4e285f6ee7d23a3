"""A kernel of steps that are written out, each of which reads one tensor at another place: what is looked at grows as
the steps do, or as what each folds."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import Case
from tests.support.one_kernel import capture, one_kernel

from tilewright.form.classes import _boundary_splits, _input_meetings, make_form
from tilewright.form.compose import _Composer, _halves_read, compose
from tilewright.ir import expr
from tilewright.ir.dtype import f16, f32
from tilewright.ir.expr import Axis, Expr
from tilewright.ir.form import Form
from tilewright.ir.graph import Layout, Op, TensorExpr, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.reduction import sum_
from tilewright.ir.sizes import dims


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


def test_a_kernel_that_grew_by_an_op_writes_that_op_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels grow op by op, and each is composed to be priced."""

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        centred = x - x.mean(-1, keepdim=True)
        return centred, (centred * y).exp(), (centred + 1.25).sum(-1)

    graph = capture(Case("grows", run, ((8, 64), (8, 64))), False)
    whole = one_kernel(graph)
    smaller = Kernel(whole.ops[:-1], tuple(v for op in whole.ops[:-1] for v in op.outputs))
    grown = Kernel(whole.ops, smaller.outputs + whole.ops[-1].outputs)
    written, real = list[Op](), _Composer.inline

    def inline(self: _Composer, body: Expr, op: Op) -> Expr:
        written.append(op)
        return real(self, body, op)

    monkeypatch.setattr(_Composer, "inline", inline)
    compose(smaller, graph.layouts)
    assert written == list(smaller.ops)
    written.clear()
    again = compose(grown, graph.layouts)
    assert written == [whole.ops[-1]]
    monkeypatch.setattr("tilewright.form.compose._WRITTEN", {})
    anew = compose(grown, graph.layouts)
    assert written[1:] == list(grown.ops)
    assert again.show() == anew.show()


def test_an_op_is_written_anew_where_what_it_reads_lies_or_is_rounded_otherwise() -> None:
    """What is remembered of an op holds for the same operands only."""
    case = Case(
        "reads", lambda x, y: (x.half() * y.half()).sum(-1) + y.half().sin()[:, 0], ((8, 64), (8, 64))
    )
    graph = capture(case, False)
    kernel = one_kernel(graph)
    turned = {v: Layout((dims.integer(1), dims.integer(8))) for v in kernel.inputs if len(v.shape) == 2}
    made = [
        compose(kernel, layouts, rounds).show() for layouts in ({}, turned, {}) for rounds in (False, True)
    ]
    assert made[:2] == made[4:]
    assert len(set(made)) == 4


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
    monkeypatch.setattr("tilewright.form.compose._WRITTEN", {})
    compose(kernel, layouts)
    to_compose, rebuilt = rebuilt, 0
    make_form(kernel, layouts)
    assert rebuilt <= 3 * to_compose


def test_a_factor_of_singles_is_not_taken_for_a_half_beside_one() -> None:
    """What splits a sum puts casts into it: weights of a program that widened its values stay singles."""
    four = dims.integer(4)
    values = (Value(0, (four,), f32), Value(1, (four,), f16))
    place = expr.axis(Axis("r", four))
    weights, value = expr.read(0, (place,), f32), expr.cast(expr.read(1, (place,), f16), f32)
    for factor, found in ((weights, None), (expr.cast(expr.cast(weights, f16), f32), f16)):
        body = expr.call("mul", factor, value)
        summed = TensorExpr((), (body,), (Axis("r", four),), sum_(f32))
        op = Op("matmul", values, (Value(2, (), f32),), summed)
        assert _halves_read(op) is found
