"""Every step of the normal form keeps the meaning of the graph, and does what it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
from tilewright.interp import run_graph
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import Axis, Expr, axis, call, const, integer, read, symbol
from tilewright.ir.graph import Graph, LibraryCall, Operand, Value, Write
from tilewright.ir.ops import contract, norm, pointwise, reduce, view
from tilewright.ir.reduction import sum_
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.rewrite import interpret
from tilewright.rewrite.normal.normalise import (
    compose_views,
    drop_dead,
    fold_constants,
    normalise,
    share,
    simplify,
)

STEPS: list[Callable[[Graph], Graph]] = [
    simplify,
    compose_views,
    share,
    drop_dead,
    lambda g: fold_constants(g, interpret),
]
RNG = np.random.default_rng(1)


def sizes(*values: int) -> tuple[Expr, ...]:
    return tuple(integer(v) for v in values)


def same_meaning(g: Graph, new: Graph, inputs: Sequence[object]) -> None:
    new.verify()
    for a, b in zip(run_graph(g, inputs), run_graph(new, inputs), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


def check(g: Graph, *inputs: object) -> Graph:
    """All steps alone and together keep the meaning; returns the normal form."""
    for step in STEPS:
        same_meaning(g, step(g), inputs)
    new = normalise(g, interpret)
    same_meaning(g, new, inputs)
    assert normalise(new, interpret).digest() == new.digest()
    return new


def test_views_vanish_into_access_maps():
    """Split into heads, transpose, merge, and a slice: one op is left."""
    b = Builder()
    x = b.value(sizes(2, 5, 12), f32)
    y = view.permute(b, view.reshape(b, x, sizes(2, 5, 3, 4)), (0, 2, 1, 3))
    y = view.slice_(b, view.reshape(b, y, sizes(6, 20)), 1, integer(3), integer(17))
    out = pointwise.relu(b, y)
    g = check(b.finish([x], [out]), RNG.standard_normal((2, 5, 12)).astype(np.float32))
    assert len(g.ops) == 1 and g.ops[0].inputs == (x,)


def test_views_of_symbolic_sizes_and_round_trips():
    b = Builder()
    n = symbol("n", 0)
    x = b.value((n, integer(6)), f32)
    there = view.reshape(b, x, (n, integer(2), integer(3)))
    back = view.reshape(b, there, (n, integer(6)))
    out = pointwise.exp(b, back)
    g = check(b.finish([x], [out]), RNG.standard_normal((4, 6)).astype(np.float32))
    (r,) = g.ops[0].expr.reads()
    assert r.args == tuple(axis(a) for a in g.ops[0].expr.axes)
    same_meaning(g, g, [np.zeros((0, 6), np.float32)])


def test_outputs_and_library_calls_keep_their_views():
    b = Builder()
    x = b.value(sizes(3, 4), f32)
    t = view.transpose(b, x, 0, 1)
    (s, _) = b.library(LibraryCall("sort", torch.sort, (Operand(0),)), [t], [(t.shape, f32), (t.shape, i64)])
    u = view.transpose(b, x, 0, 1)
    g = check(b.finish([x], [s, u]), RNG.random((3, 4), np.float32))
    assert [op.name for op in g.ops].count("sort") == 1 and sum(o.expr is not None for o in g.ops) == 2


def test_gather_through_a_view_of_the_table_and_of_the_ids():
    b = Builder()
    table, ids = b.value(sizes(4, 3), f32), b.value(sizes(2, 3), i64)
    turned, flat = view.transpose(b, table, 0, 1), view.reshape(b, ids, sizes(6))
    i, j = output_axes(sizes(6, 4))
    body = read(0, (read(1, (axis(i),), i64), axis(j)), f32)
    (out,) = b.emit("rows", [turned, flat], TensorExpr((i, j), (body,)))
    g = check(b.finish([table, ids], [out]), RNG.random((4, 3), np.float32), np.array([[0, 1, 2], [2, 1, 0]]))
    assert len(g.ops) == 1 and set(g.ops[0].inputs) == {table, ids}


def test_equal_ops_are_computed_once():
    b = Builder()
    x = b.value(sizes(3, 4), f32)
    left = pointwise.exp(b, x)
    a, c = Axis("p", integer(3)), Axis("q", integer(4))
    (right,) = b.emit("exp again", [x], TensorExpr((a, c), (call("exp", read(0, (axis(a), axis(c)), f32)),)))
    sort = LibraryCall("sort", torch.sort, (Operand(0), -1))
    tops = [b.library(sort, [x], [(x.shape, f32), (x.shape, i64)])[0] for _ in range(2)]
    out = pointwise.mul(b, pointwise.add(b, left, right), pointwise.add(b, *tops))
    g = check(b.finish([x], [out]), RNG.random((3, 4), np.float32))
    assert len(g.ops) == 5
    assert g.ops[-1].name == "mul"


def test_outputs_are_never_shared():
    b = Builder()
    x = b.value(sizes(3), f32)
    first, second, third = (pointwise.exp(b, x) for _ in range(3))
    out = pointwise.neg(b, third)
    g = check(b.finish([x], [first, second, out]), RNG.random(3, np.float32))
    assert g.outputs[0] is not g.outputs[1] and len(g.ops) == 3


def test_calls_with_effects_and_calls_that_bind_sizes_stay():
    b = Builder()
    x, u = b.value(sizes(4), f32), symbol("u")
    noise = LibraryCall("noise", torch.zeros_like, (Operand(0),), reason="random", pure=False)
    for _ in range(2):
        b.library(noise, [x], [(x.shape, f32)])
    found = LibraryCall("nonzero", torch.nonzero, (Operand(0),))
    b.library(found, [x], [((u, dims.ONE), i64)])
    pointwise.exp(b, x)
    g = check(b.finish([x], [u]), np.array([0, 1, 0, 2], np.float32))
    assert [op.name for op in g.ops] == ["noise", "noise", "nonzero"]


def test_host_scalars_read_from_tensors_stay():
    b = Builder()
    x, u = b.value(sizes(4), f32), symbol("u")
    for _ in range(2):
        b.library(LibraryCall("item", lambda t: int(t.sum()), (Operand(0),)), [x], (), binds=(u,))
    g = check(b.finish([x], [u]), np.array([1, 1, 0, 2], np.float32))
    assert len(g.ops) == 2


def test_views_that_only_a_pointwise_call_would_read_are_dropped():
    b = Builder()
    x = b.value(sizes(4, 5), f32)
    t = view.transpose(b, x, 0, 1)
    with b.origin("exp") as o:
        y = pointwise.exp(b, t)
    b.close_origin(o, LibraryCall("exp", torch.exp, (Operand(0),)), [t], [y])
    g = check(b.finish([x], [y]), RNG.random((4, 5), np.float32))
    assert len(g.ops) == 1


def test_constants_fold_when_small_and_views_of_them_do_not():
    b = Builder()
    x = b.value(sizes(2, 3), f32)
    w = b.constant(torch.rand(3, 2), sizes(3, 2), f32)
    scale = b.constant(torch.rand(3), sizes(3), f32)
    turned = view.transpose(b, w, 0, 1)
    factor = pointwise.rsqrt(b, pointwise.add(b, scale, const(1e-5, f32)))
    big = view.expand(b, pointwise.exp(b, scale), sizes(2, 3))
    out = pointwise.mul(b, pointwise.mul(b, pointwise.add(b, x, turned), factor), big)
    g = check(b.finish([x], [out]), RNG.random((2, 3), np.float32))
    assert all(op.expr is not None for op in g.ops) and len(g.ops) == 3
    assert set(g.constants) == {v for op in g.ops for v in op.inputs} - {
        x,
        *(v for o in g.ops for v in o.outputs),
    }
    outer = Builder()
    r = outer.constant(torch.rand(400), sizes(400), f32)
    wide = outer.pointwise("outer", lambda p: call("exp", p), view.expand(outer, r, sizes(400, 400)))
    kept = fold_constants(outer.finish([], [wide]), interpret)
    assert len(kept.ops) == 2


def test_a_constant_beside_a_size_that_calls_tell_stays():
    x = torch.randn(3, 4)
    program = lambda x: x * (torch.tensor([0.25, 0.5]) * (x.shape[0] - 1)).sum()  # noqa: E731
    made = torch.compile(program, backend=tilewright.backend, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(made(x), program(x))
    quantiles = torch.compile(
        lambda x: x.quantile(torch.tensor([0.1, 0.5]), dim=1), backend=tilewright.backend, dynamic=True
    )
    torch.testing.assert_close(quantiles(x), x.quantile(torch.tensor([0.1, 0.5]), dim=1))


def test_origins_follow_and_keep_the_views_of_their_library_call():
    b = Builder()
    x, w = b.value(sizes(4, 5), f32), b.constant(torch.rand(6, 5), sizes(6, 5), f32)
    t = view.transpose(b, w, 0, 1)
    again = view.transpose(b, w, 0, 1)
    with b.origin("mm") as o:
        y = contract.matmul(b, x, again)
    b.close_origin(
        o, LibraryCall("mm", torch.mm, (Operand(0), Operand(1)), reason="contraction"), [x, again], [y]
    )
    out = pointwise.add(b, y, contract.matmul(b, x, t))
    g = check(b.finish([x], [out]), RNG.random((4, 5), np.float32))
    (origin,) = g.origins
    assert origin.inputs[1] in {v for op in g.ops for v in op.outputs}
    matmul = next(op for op in g.ops if op.expr is not None and op.expr.reduction is not None)
    assert set(matmul.inputs) == {x, w}


def test_writes_are_kept():
    b = Builder()
    x = b.value(sizes(3), f32)
    y = pointwise.exp(b, x)
    out = pointwise.neg(b, x)
    g = normalise(b.finish([x], [out], writes=(Write(0, y),)))
    assert len(g.ops) == 2 and g.writes[0].value is y


def test_a_whole_block_keeps_its_meaning():
    b = Builder()
    x = b.value(sizes(2, 6, 8), f32)
    w = b.constant(torch.randn(24, 8), sizes(24, 8), f32)
    gain, shift = (b.constant(torch.randn(8), sizes(8), f32) for _ in range(2))
    y = norm.layer_norm(b, x, 1, gain, shift, 1e-5)[0]
    qkv = view.reshape(b, contract.linear(b, y, w, None), sizes(2, 6, 3, 2, 4))
    q, k, v = (view.permute(b, view.select(b, qkv, 2, integer(s)), (0, 2, 1, 3)) for s in range(3))
    p = norm.softmax(b, contract.matmul(b, q, view.transpose(b, k, 2, 3)), -1)
    o = view.reshape(b, view.permute(b, contract.matmul(b, p, v), (0, 2, 1, 3)), sizes(2, 6, 8))
    out = reduce.sum_(b, pointwise.add(b, x, o), (1,))
    g = b.finish([x], [out])
    new = check(g, RNG.standard_normal((2, 6, 8)).astype(np.float32))
    assert not any(op.expr is not None and op.expr.is_view() for op in new.ops)
    assert len(new.ops) < len(g.ops)


@settings(max_examples=150)
@given(st.data())
def test_random_chains_of_views(data: st.DataObject):
    """Permutes, reshapes, slices, flips, expands and rolls around pointwise ops, with a symbolic leading size."""
    b = Builder()
    n = symbol("n", 0)
    rows = data.draw(st.integers(0, 3))
    x = b.value((n, integer(4), integer(6)), f32)
    y: Value = x
    for _ in range(data.draw(st.integers(1, 7))):
        y = step(data, b, y, n)
    total = sum_(f32)
    (i,), r = output_axes(y.shape[:1]), [Axis(f"r{k}", s) for k, s in enumerate(y.shape[1:])]
    (s,) = b.emit("sum", [y], TensorExpr((i,), (read(0, (axis(i), *map(axis, r)), f32),), tuple(r), total))
    g = b.finish([x], [s, pointwise.exp(b, y)])
    inputs = [RNG.standard_normal((rows, 4, 6)).astype(np.float32)]
    new = normalise(g, interpret)
    new.verify()
    for a, c in zip(run_graph(g, inputs), run_graph(new, inputs), strict=True):
        assert np.allclose(np.asarray(a), np.asarray(c), rtol=1e-5, equal_nan=True)
    assert not any(op.expr is not None and op.expr.is_view() for op in new.ops)


def step(data: st.DataObject, b: Builder, y: Value, n: Expr) -> Value:
    kind = data.draw(
        st.sampled_from(["permute", "reshape", "slice", "flip", "unsqueeze", "relu", "roll", "select"])
    )
    rank = len(y.shape)
    fixed = [k for k in range(rank) if dims.static(y.shape[k]) is not None]
    if kind == "permute":
        return view.permute(b, y, data.draw(st.permutations(range(rank))))
    if kind == "relu":
        return pointwise.relu(b, y)
    if kind == "unsqueeze" and rank < 5:
        return view.unsqueeze(b, y, data.draw(st.integers(0, rank)))
    if kind == "reshape":
        return reshape(data, b, y)
    if not fixed or kind == "unsqueeze":
        return y
    k = data.draw(st.sampled_from(fixed))
    size = dims.static(y.shape[k]) or 0
    if kind == "slice" and size > 1:
        low = data.draw(st.integers(0, size - 1))
        return view.slice_(b, y, k, integer(low), integer(size), data.draw(st.integers(1, 2)))
    if kind == "flip":
        return view.flip(b, y, (k,))
    if kind == "roll":
        return view.roll(b, y, (integer(data.draw(st.integers(-3, 5))),), (k,))
    if kind == "select" and rank > 2 and size > 0:
        return view.select(b, y, k, integer(data.draw(st.integers(0, size - 1))))
    return y


def reshape(data: st.DataObject, b: Builder, y: Value) -> Value:
    """Merge two neighbours, or split a static dim."""
    k = data.draw(st.integers(0, len(y.shape) - 1))
    size = dims.static(y.shape[k])
    factors = [f for f in (2, 3) if size is not None and size and size % f == 0]
    if factors and data.draw(st.booleans()):
        f = data.draw(st.sampled_from(factors))
        return view.reshape(b, y, (*y.shape[:k], integer(f), integer(size // f), *y.shape[k + 1 :]))
    if k + 1 < len(y.shape) and len(y.shape) > 2:
        return view.reshape(b, y, (*y.shape[:k], dims.mul(y.shape[k], y.shape[k + 1]), *y.shape[k + 2 :]))
    return y


@pytest.mark.parametrize("step", STEPS)
def test_steps_leave_an_empty_graph_alone(step: Callable[[Graph], Graph]):
    b = Builder()
    x = b.value(sizes(2), f32)
    g = b.finish([x], [x, None, integer(3)])
    assert step(g).outputs == g.outputs and not step(g).ops


def test_a_choice_between_equal_views_reads_what_they_show() -> None:
    """Its body becomes one read, of the operand behind the condition."""

    def program(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.where(c, x.flip(0), x.flip(0)).mT * 2

    x = torch.randn(3, 4)
    torch.testing.assert_close(tilewright.compile(program, (x, x > 0))(x, x > 0), program(x, x > 0))
