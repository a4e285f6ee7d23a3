"""The interpreter of graphs against numpy and torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tilewright.errors import IndexOutOfRange, InputError
from tilewright.interp import evaluate as evaluate_module
from tilewright.interp import run_graph
from tilewright.ir import reduction
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import bf16, bool_, f16, f32, f64, i32, i64, u8
from tilewright.ir.expr import Axis, axis, call, cast, const, integer, read, symbol, where
from tilewright.ir.graph import Graph, Layout, LibraryCall, Operand, Value
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

RNG = np.random.default_rng(0)


def sizes(*values: int):
    return tuple(integer(v) for v in values)


def reduce_last(kind: Reduction, x: Value, b: Builder) -> tuple[Value, ...]:
    """Reduce the last dim of `x`; index elements are the reduce axis."""
    axes, r = output_axes(x.shape[:-1]), Axis("r", x.shape[-1])
    element = read(0, (*map(axis, axes), axis(r)), x.dtype)
    body = (element, axis(r)) if len(kind.elements) == 2 else (element,)
    return b.emit(kind.name, [x], TensorExpr(axes, body, (r,), kind))


def one_reduction(kind: Reduction, data: np.ndarray, dtype=f32) -> list[np.ndarray]:
    b = Builder()
    x = b.value(sizes(*data.shape), dtype)
    outs = reduce_last(kind, x, b)
    return run_graph(b.finish([x], outs), [data])


def test_pointwise_broadcasts_and_symbols_bind_from_shapes():
    b = Builder()
    n = symbol("n")
    x, y = b.value((n, integer(3)), f32), b.value((integer(3),), f32)
    z = b.pointwise("add", lambda p, q: call("add", p, q), x, y)
    g = b.finish([x, y], [z, n])
    for rows in (0, 1, 5):
        p, q = RNG.random((rows, 3), np.float32), RNG.random(3, np.float32)
        out, size = run_graph(g, [p, q])
        assert np.array_equal(out, p + q) and size == rows
    with pytest.raises(InputError):
        run_graph(g, [p, np.zeros(4, np.float32)])


def test_symbol_of_an_affine_size_is_solved():
    b = Builder()
    n = symbol("n")
    x = b.value((dims.add(dims.mul(n, integer(2)), integer(1)),), f32)
    assert run_graph(b.finish([x], [n]), [np.zeros(9, np.float32)]) == [4]
    with pytest.raises(InputError):
        run_graph(b.finish([x], [n]), [np.zeros(8, np.float32)])


@pytest.mark.parametrize("shape", [(4, 7), (3, 1), (2, 0)])
def test_simple_reductions(shape: tuple[int, int]):
    x = RNG.standard_normal(shape).astype(np.float32)
    (total,) = one_reduction(reduction.sum_(f32), x)
    assert np.allclose(total, x.sum(1), rtol=1e-6) and total.dtype == np.float32
    (top,) = one_reduction(reduction.maximum(f32), x)
    assert np.array_equal(top, x.max(1, initial=-np.inf))
    (every,) = one_reduction(reduction.all_(), x > 0, bool_)
    assert np.array_equal(every, (x > 0).all(1))


def test_maximum_propagates_nan_and_argmax_takes_the_first_nan():
    x = np.array([[1, np.nan, 3, np.nan], [5, 5, 1, 5]], np.float32)
    (top,) = one_reduction(reduction.maximum(f32), x)
    assert np.isnan(top[0]) and top[1] == 5
    value, where_ = one_reduction(reduction.argmax(f32), x)
    assert np.isnan(value[0]) and where_.tolist() == [1, 0]
    t = torch.from_numpy(x).argmax(1)
    assert where_.tolist() == t.tolist()


@pytest.mark.parametrize("n", [1, 2, 5, 8, 13])
def test_tuple_states(n: int):
    x = RNG.standard_normal((3, n))
    count, mean, spread = one_reduction(reduction.moments(f64), x, f64)
    assert np.allclose(count, n) and np.allclose(mean, x.mean(1)) and np.allclose(spread / n, x.var(1))
    (lse,) = one_reduction(reduction.logsumexp(f64), x, f64)
    assert np.allclose(lse, np.log(np.exp(x).sum(1)))
    _, low = one_reduction(reduction.argmin(f64), x, f64)
    assert np.array_equal(low, x.argmin(1))


def test_scan_gives_every_prefix():
    b = Builder()
    x = b.value(sizes(2, 6), f32)
    axes = output_axes(x.shape)
    (y,) = b.emit(
        "cumsum", [x], TensorExpr(axes, (read(0, map(axis, axes), f32),), (), reduction.sum_(f32), axes[1])
    )
    data = RNG.random((2, 6), np.float32)
    assert np.allclose(run_graph(b.finish([x], [y]), [data])[0], data.cumsum(1))


def matmul_graph(m: int, k: int, n: int) -> Graph:
    b = Builder()
    x, y = b.value(sizes(m, k), f32), b.value(sizes(k, n), f32)
    (i, j), r = output_axes(sizes(m, n)), Axis("r", integer(k))
    body = call("mul", read(0, (axis(i), axis(r)), f32), read(1, (axis(r), axis(j)), f32))
    (z,) = b.emit("matmul", [x, y], TensorExpr((i, j), (body,), (r,), reduction.sum_(f32)))
    return b.finish([x, y], [z])


@pytest.mark.parametrize("limit", [1 << 22, 40])
def test_contractions_whole_and_in_blocks(limit: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluate_module, "PIECES", replace(evaluate_module.PIECES, evaluated_points=limit))
    x, y = RNG.random((9, 11), np.float32), RNG.random((11, 6), np.float32)
    assert np.allclose(run_graph(matmul_graph(9, 11, 6), [x, y])[0], x @ y, rtol=1e-5)
    count, mean, _ = one_reduction(reduction.moments(f64), x.astype(np.float64), f64)
    assert np.allclose(count, 11) and np.allclose(mean, x.mean(1, dtype=np.float64))


def test_convolution_with_padding_reads_lazily():
    b = Builder()
    x, w = b.value(sizes(1, 2, 5, 4), f32), b.value(sizes(3, 2, 3, 3), f32)
    n, c, h, v = output_axes(sizes(1, 3, 5, 4))
    ic, fh, fw = Axis("ic", integer(2)), Axis("fh", integer(3)), Axis("fw", integer(3))
    at = [dims.sub(dims.add(axis(a), axis(f)), dims.ONE) for a, f in ((h, fh), (v, fw))]
    inside = None
    for e, size in zip(at, (5, 4), strict=True):
        this = call("and", call("ge", e, integer(0)), call("lt", e, integer(size)))
        inside = this if inside is None else call("and", inside, this)
    padded = where(inside, read(0, (axis(n), axis(ic), *at), f32), const(0, f32))
    body = call("mul", padded, read(1, (axis(c), axis(ic), axis(fh), axis(fw)), f32))
    (y,) = b.emit("conv", [x, w], TensorExpr((n, c, h, v), (body,), (ic, fh, fw), reduction.sum_(f32)))
    p, q = RNG.random((1, 2, 5, 4), np.float32), RNG.random((3, 2, 3, 3), np.float32)
    want = torch.nn.functional.conv2d(torch.from_numpy(p), torch.from_numpy(q), padding=1)
    assert np.allclose(run_graph(b.finish([x, w], [y]), [p, q])[0], want, atol=1e-5)


def gather_graph(guarded: bool) -> Graph:
    b = Builder()
    table, ids = b.value(sizes(4, 2), f32), b.value(sizes(3), i64)
    i, j = output_axes(sizes(3, 2))
    at = read(1, (axis(i),), i64)
    row = read(0, (at, axis(j)), f32)
    ok = call("and", call("ge", at, integer(0)), call("lt", at, integer(4)))
    (y,) = b.emit(
        "gather", [table, ids], TensorExpr((i, j), (where(ok, row, const(-1, f32)) if guarded else row,))
    )
    return b.finish([table, ids], [y])


def test_reads_from_data_are_checked_where_they_are_performed():
    table = RNG.random((4, 2), np.float32)
    good, bad = np.array([3, 0, 1]), np.array([3, -1, 4])
    assert np.array_equal(run_graph(gather_graph(False), [table, good])[0], table[good])
    with pytest.raises(IndexOutOfRange):
        run_graph(gather_graph(False), [table, bad])
    guarded = run_graph(gather_graph(True), [table, bad])[0]
    assert np.array_equal(guarded[0], table[3]) and (guarded[1:] == -1).all()


INTS = np.array([-7, -4, -1, 0, 1, 3, 6, 100])
DIVISORS = np.array([2, -3, 5, -1, 7, 4, -4, 9])


@pytest.mark.parametrize(("op", "reference"), [
    ("floordiv", lambda a, b: torch.div(a, b, rounding_mode="floor")),
    ("truncdiv", lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    ("mod", torch.remainder), ("fmod", torch.fmod), ("pow", torch.pow), ("shl", torch.bitwise_left_shift),
    ("shr", torch.bitwise_right_shift), ("maximum", torch.maximum), ("minimum", torch.minimum),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [i32, f32])
def test_binary_scalars_are_torchs(op: str, reference, dtype):
    if dtype is f32 and op in ("shl", "shr"):
        pytest.skip("integers only")
    kind = torch.int32 if dtype is i32 else torch.float32
    p, q = torch.tensor(INTS, dtype=kind), torch.tensor(DIVISORS, dtype=kind)
    if dtype is f32:
        p, q = p / 3, torch.cat([q[:-2], torch.tensor([float("nan"), 0.0])])
    b = Builder()
    x, y = b.value(sizes(8), dtype), b.value(sizes(8), dtype)
    g = b.finish([x, y], [b.pointwise(op, lambda a, c: call(op, a, c), x, y)])
    got = torch.from_numpy(run_graph(g, [p, q])[0])
    assert torch.allclose(got, reference(p, q), rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("op", "reference"), [
    ("round", torch.round), ("sign", torch.sign), ("trunc", torch.trunc), ("sigmoid", torch.sigmoid),
    ("erf", torch.erf),
    ("tanh", torch.tanh), ("rsqrt", torch.rsqrt), ("log1p", torch.log1p), ("isnan", torch.isnan),
    ("erfc", torch.erfc),
    ("expm1", torch.expm1), ("reciprocal", torch.reciprocal),
])  # fmt: skip
def test_unary_scalars_are_torchs(op: str, reference):
    p = torch.tensor([-2.5, -1.5, -0.0, 0.5, 1.5, 2.5, 40.0, float("nan"), float("inf"), -float("inf")])
    b = Builder()
    x = b.value(sizes(10), f32)
    g = b.finish([x], [b.pointwise(op, lambda a: call(op, a), x)])
    got = torch.from_numpy(run_graph(g, [p])[0])
    assert torch.allclose(got.double(), reference(p).double(), rtol=2e-6, equal_nan=True)


def test_integers_wrap_and_division_by_zero_raises_where_performed():
    b = Builder()
    x, y = b.value(sizes(2), u8), b.value(sizes(2), u8)
    total = b.pointwise("add", lambda p, q: call("add", p, q), x, y)
    ratio = b.pointwise(
        "div", lambda p, q: where(call("ne", q, const(0, u8)), call("floordiv", p, q), p), x, y
    )
    raw = b.pointwise("div", lambda p, q: call("floordiv", p, q), x, y)
    data = [np.array([200, 9], np.uint8), np.array([100, 0], np.uint8)]
    assert run_graph(Graph((x, y), tuple(b.ops[:2]), (total, ratio)), data)[0].tolist() == [44, 9]
    with pytest.raises(ZeroDivisionError):
        run_graph(b.finish([x, y], [raw]), data)


@pytest.mark.parametrize("half", [f16, bf16])
def test_half_types_round_and_casts_truncate(half):
    kind = torch.float16 if half is f16 else torch.bfloat16
    p, q = torch.randn(50, dtype=kind), torch.randn(50, dtype=kind)
    b = Builder()
    x, y = b.value(sizes(50), half), b.value(sizes(50), half)
    z = b.pointwise("mul", lambda s, t: call("mul", s, t), x, y)
    k = b.pointwise("cast", lambda s: cast(s, i32), z)
    product, whole = run_graph(b.finish([x, y], [z, k]), [p, q])
    assert np.array_equal(product.astype(np.float32), (p * q).float().numpy())
    assert np.array_equal(whole, (p * q).to(torch.int32).numpy())


def test_library_calls_take_operands_and_host_scalars_and_bind_symbols():
    b = Builder()
    n, u = symbol("n"), symbol("u")
    x = b.value((n,), f32)
    top = LibraryCall("topk", torch.topk, (Operand(0), call("sub", n, integer(1))), (("sorted", True),))
    values, index = b.library(top, [x], [((dims.sub(n, dims.ONE),), f32), ((dims.sub(n, dims.ONE),), i64)])
    (places,) = b.library(
        LibraryCall("nonzero", torch.nonzero, (Operand(0),)), [values], [((u, dims.ONE), i64)]
    )
    g = b.finish([x], [values, index, places, u])
    top_values, top_index, found, count = run_graph(g, [np.array([0, 3, 2, 0], np.float32)])
    assert top_values.tolist() == [3, 2, 0] and top_index[:2].tolist() == [1, 2]
    assert found.tolist() == [[0], [1]] and count == 2


def test_layouts_that_do_not_fit_are_refused() -> None:
    b = Builder()
    x = b.value(sizes(2, 3), f32)
    graph = b.finish([x], [x])
    graph.verify()
    flat = Layout(sizes(1))
    for wrong in (
        replace(graph, layouts={x: flat}), replace(graph, returned=(flat,)), replace(graph, returned=(None, None))
    ):  # fmt: skip
        with pytest.raises(ValueError, match="layout"):
            wrong.verify()
