"""Scaled dot product attention, decomposed: scores, mask, softmax, product."""

from __future__ import annotations

import math

from tilewright.ir import reduction
from tilewright.ir.builder import Builder, broadcast, element
from tilewright.ir.expr import Axis, Expr, call, cast, const, narrow, read, where
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import Scalar, number, pointwise, position, wide
from .reduce import accumulated, amax


def _scores(b: Builder, q: Value, k: Value, scale: Scalar) -> Value:
    """scale * q k^T in the accumulation type; heads of k may be shared by several heads of q."""
    acc = q.dtype.compute
    shape = (*broadcast(q.shape[:-3], k.shape[:-3]), *q.shape[-3:-1], k.shape[-2])
    axes, r = output_axes(shape), Axis("r0", q.shape[-1])
    i = [position(a) for a in axes]
    left = read(0, [*_lead(q, i), i[-2], position(r)], q.dtype)
    right = read(1, [*_lead(k, i, q), i[-1], position(r)], k.dtype)
    body = call("mul", cast(left, acc), cast(right, acc))
    (dot,) = b.emit("scores", (q, k), TensorExpr(axes, (body,), (r,), reduction.sum_(acc)))
    return pointwise(b, "scale", lambda e, s: call("mul", e, s), dot, scale)


def _lead(v: Value, i: list[Expr], like: Value | None = None) -> list[Expr]:
    """Index of the leading dims (batch and heads) of an operand; grouped heads are shared."""
    rank = len(v.shape) - 2
    out = [dims.ZERO if s is dims.ONE else i[len(i) - 2 - rank + d] for d, s in enumerate(v.shape[:-2])]
    if (
        like is not None
        and rank
        and not dims.equal(v.shape[-3], like.shape[-3])
        and v.shape[-3] is not dims.ONE
    ):
        out[-1] = dims.floordiv(i[-3], dims.floordiv(like.shape[-3], v.shape[-3]))
    return out


def _masked(b: Builder, scores: Value, mask: Value | None, causal: bool) -> Value:
    """Scores with the mask added (a bool mask admits where true), and the future cut off if `causal`."""
    if mask is not None:
        scores = pointwise(b, "mask", _admit, scores, mask)
    if not causal:
        return scores
    axes = output_axes(scores.shape)
    e = element(0, scores, axes)
    past = call("le", position(axes[-1]), position(axes[-2]))
    (out,) = b.emit("causal", (scores,), TensorExpr(axes, (where(past, e, number(-math.inf, e)),)))
    return out


def _admit(s: Expr, m: Expr) -> Expr:
    if not m.dtype.is_float:
        return where(m, s, number(-math.inf, s))
    return call("add", s, cast(m, s.dtype))


def _product(b: Builder, weights: Value, v: Value, q: Value) -> Value:
    """Weights times v, over the keys, in the accumulation type."""
    acc = q.dtype.compute
    axes, r = output_axes((*weights.shape[:-1], v.shape[-1])), Axis("r0", weights.shape[-1])
    i = [position(a) for a in axes]
    left = cast(read(0, [*i[:-1], position(r)], weights.dtype), acc)
    right = cast(read(1, [*_lead(v, i, q), position(r), i[-1]], v.dtype), acc)
    (out,) = b.emit(
        "attend", (weights, v), TensorExpr(axes, (call("mul", left, right),), (r,), reduction.sum_(acc))
    )
    return out


def attention(
    b: Builder, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: Scalar | None
) -> tuple[Value, Value]:
    """(softmax(scale * q k^T + mask) v, log of the softmax's denominator plus its maximum). q is [.., L, E], k and v
    are [.., S, E]; `scale` (of the accumulation type) defaults to 1 / sqrt(E). A row that admits nothing gives 0."""
    acc = q.dtype.compute
    if scale is None:
        depth = dims.static(q.shape[-1])
        scale = const(1 / math.sqrt(depth), acc) if depth else call("rsqrt", cast(q.shape[-1], acc))
    scores = _masked(b, _scores(b, q, k, scale), mask, causal)
    empty = mask is not None or not dims.at_least(k.shape[-2], 1)
    powers, top, total, divisor = _powers(b, scores, -1, may_be_empty=empty)
    # The fused kernels of torch multiply powers of the type of the operands, and divide behind the product.
    weights = pointwise(b, "narrow", lambda e: narrow(e, q.dtype), powers)
    out = pointwise(b, "softmax", lambda e, s: call("div", e, s), _product(b, weights, v, q), divisor)
    log_total = pointwise(b, "logsumexp", lambda s, m: call("add", call("log", s), m), total, top)
    return pointwise(b, "narrow", lambda e: narrow(e, q.dtype), out), log_total


def _powers(b: Builder, scores: Value, dim: int, may_be_empty: bool) -> tuple[Value, Value, Value, Value]:
    """(exp(score - maximum), maximum, their sum along `dim`, what makes a softmax of them), in the accumulation type.
    A row of -inf, if there may be one, has powers 0: its maximum is taken as 0 and its sum is divided by as 1, so that
    elements need no condition."""
    top = amax(b, scores, [dim], True)
    shift = pointwise(b, "shift", _finite, top) if may_be_empty else top
    powers = pointwise(b, "exp", lambda s, m: call("exp", call("sub", wide(s), wide(m))), scores, shift)
    total = accumulated(b, powers, [dim], True)
    divisor = pointwise(b, "divisor", _positive, total) if may_be_empty else total
    return powers, top, total, divisor


def _finite(m: Expr) -> Expr:
    return where(call("eq", m, number(-math.inf, m)), number(0, m), m)


def _positive(s: Expr) -> Expr:
    return where(call("eq", s, number(0, s)), number(1, s), s)


def safe_softmax(b: Builder, x: Value, dim: int) -> Value:
    """Softmax along `dim` whose rows of -inf give 0."""
    powers, _, _, divisor = _powers(b, x, dim, may_be_empty=True)
    weights = pointwise(b, "softmax", lambda e, s: call("div", e, s), powers, divisor)
    return pointwise(b, "narrow", lambda e: narrow(e, x.dtype), weights)
