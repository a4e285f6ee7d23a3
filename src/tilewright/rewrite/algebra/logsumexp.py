"""Reductions of two directions over one product: those along columns divide by a normaliser along rows.

The column kernel computes the product again and needs the rows' statistics only. Where these are a shift m and a
divisor l of an exponential, one number per row does: exp(s - m) / l = exp(s - (m + log l)), without a division. In fp32
that number would be too coarse, and 1 / l goes beside m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.analysis.value.interval import Interval
from tilewright.analysis.value.sign import of_type, signs_of
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, const, read
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.ops.common import position
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.rewrite.normal.normalise import tidy_operands


@dataclass(frozen=True, slots=True)
class _Quotient:
    """exp((minuend - shift) * factor) / divisor as the body of an op; shift and divisor are reads that use fewer axes,
    the factor is a constant."""

    op: Op
    minuend: Expr
    shift: Expr | None
    factor: Expr | None
    divisor: Expr
    inputs: tuple[Value, ...]


def take_logsumexp(region: Graph) -> tuple[Graph, int]:
    """The region with quotients by a row's statistic, that only reductions across rows read, without a division per
    element; and how many there were.

    Laws: exp(a) / b = exp(a - log b) for b > 0 (exp), if any reduction of the region reads halves; else exp(a) / b =
    exp(a) * (1 / b) (field), since the logarithm of a sum has fewer digits left behind the point than the sum had."""
    signs = _signs(region)
    reductions = [op for op in region.ops if op.expr is not None and op.expr.reduction is not None]
    coarse = any(v.dtype.is_half for op in reductions for v in op.inputs)
    consumers = region.consumers()
    fresh = region.fresh_id()
    producer = region.producer()
    ops: list[Op] = []
    count = 0
    for op in region.ops:
        found = _quotient(op, producer)
        if (
            found is None
            or not _crossed(found, consumers)
            or not _positive(found.divisor, found.inputs, signs)
        ):
            ops.append(op)
            continue
        statistic = Value(fresh, _operand(found.divisor, found.inputs).shape, found.divisor.dtype)
        fresh += 1
        ops += [_statistic(found, statistic, coarse), _changed(found, statistic, coarse)]
        count += 1
    return (region.with_ops(ops), count) if count else (region, 0)


def _signs(region: Graph) -> dict[Value, Interval]:
    known: dict[Value, Interval] = {}
    for op in region.ops:
        assert op.expr is not None
        found = signs_of(op.expr, [known.get(v) or of_type(v.dtype) for v in op.inputs])
        known |= dict(zip(op.outputs, found, strict=True))
    return known


def _positive(divisor: Expr, inputs: Sequence[Value], signs: Mapping[Value, Interval]) -> bool:
    found = signs.get(_operand(divisor, inputs))
    return found is not None and found.bottom >= 0


def _operand(r: Expr, inputs: Sequence[Value]) -> Value:
    assert isinstance(r.value, int)
    return inputs[r.value]


def _quotient(op: Op, producer: Mapping[Value, Op]) -> _Quotient | None:
    """`op` as a quotient of an exponential, looked for through the pointwise op that makes it."""
    if op.expr is None or not op.expr.is_pointwise or op.expr.body[0].op != "div":
        return None
    top, bottom = op.expr.body[0].args
    if bottom.op != "read" or not _fewer(bottom, op.expr.axes):
        return None
    inputs = list(op.inputs)
    if top.op == "read":
        maker = producer.get(_operand(top, inputs))
        if maker is None or maker.expr is None or not maker.expr.is_pointwise:
            return None
        top = maker.expr.map_reads(lambda r: _later(r, len(op.inputs))).at(top.args)
        inputs += maker.inputs
    if top.op != "exp":
        return None
    exponent, factor = top.args[0], None
    if exponent.op == "mul" and exponent.args[1].op == "const" and exponent.args[0].op == "sub":
        exponent, factor = exponent.args
    shift = exponent.args[1] if exponent.op == "sub" else exponent
    if shift.op == "read" and shift.args == bottom.args and exponent is not shift:
        return _Quotient(op, exponent.args[0], shift, factor, bottom, tuple(inputs))
    return _Quotient(op, top.args[0], None, None, bottom, tuple(inputs))


def _later(r: Expr, by: int) -> Expr:
    """A read of the operand that stands `by` places later."""
    assert isinstance(r.value, int)
    return read(r.value + by, r.args, r.dtype)


def _fewer(r: Expr, axes: Sequence[Axis]) -> bool:
    """Whether a read uses some of `axes`, each plainly, and not all."""
    long = [a for a in axes if a.extent is not dims.ONE]
    return len(axes_of(r)) < len(long) and all(a.op == "axis" or not axes_of(a) for a in r.args)


def _crossed(found: _Quotient, consumers: Mapping[Value, Sequence[Op]]) -> bool:
    """Whether every reduction that reads the quotient, through pointwise ops, folds an axis of its divisor."""
    assert found.op.expr is not None
    used = axes_of(found.divisor)
    places = frozenset(k for k, a in enumerate(found.op.expr.axes) if axis(a) in used)
    todo: list[tuple[Value, frozenset[int]]] = [(found.op.output, places)]
    some = False
    while todo:
        v, rows = todo.pop()
        for reader in consumers.get(v, []):
            for where in _row_axes(reader, v, rows):
                assert reader.expr is not None
                if reader.expr.is_pointwise:
                    todo.append((reader.output, where))
                elif where:
                    return False  # rows are kept
                else:
                    some = True
    return some


def _row_axes(reader: Op, v: Value, rows: frozenset[int]) -> list[frozenset[int]]:
    """For each read of `v`: which output axes of `reader` stand at its dims `rows`; none if one of those is folded, and
    -1 if an index there is not plain."""
    assert reader.expr is not None
    order = {axis(a): k for k, a in enumerate(reader.expr.axes)}
    found: list[frozenset[int]] = []
    for r in reader.expr.reads():
        if _operand(r, reader.inputs) is v:
            there = [r.args[d] for d in rows if d >= 0]
            if any(x.op == "axis" and x.value in reader.expr.reduce for x in there):
                found.append(frozenset())
            else:
                found.append(frozenset(order.get(x, -1) for x in there) or frozenset({-1}))
    return found


def _statistic(found: _Quotient, made: Value, coarse: bool) -> Op:
    """shift * factor + log(divisor), or the inverse of the divisor, with its dims."""
    axes = output_axes(made.shape)
    index = tuple(position(a) for a in axes)
    inputs = [_operand(found.divisor, found.inputs)]
    divisor = read(0, index, found.divisor.dtype)
    if not coarse:
        inverse = call("div", const(1, divisor.dtype), divisor)
        return Op(
            "inverse", tuple(inputs), (made,), expr=TensorExpr(axes, (inverse,)), origin=found.op.origin
        )
    body = call("log", divisor)
    if found.shift is not None:
        body = call("add", _scaled(read(1, index, found.shift.dtype), found.factor), body)
        inputs.append(_operand(found.shift, found.inputs))
    return Op("logsumexp", tuple(inputs), (made,), expr=TensorExpr(axes, (body,)), origin=found.op.origin)


def _changed(found: _Quotient, statistic: Value, coarse: bool) -> Op:
    """exp(minuend * factor - statistic), or exp((minuend - shift) * factor) * statistic."""
    assert found.op.expr is not None
    row = read(len(found.inputs), found.divisor.args, statistic.dtype)
    if coarse:
        body = call("exp", call("sub", _scaled(found.minuend, found.factor), row))
    else:
        shifted = found.minuend if found.shift is None else call("sub", found.minuend, found.shift)
        body = call("mul", call("exp", _scaled(shifted, found.factor)), row)
    expr = TensorExpr(found.op.expr.axes, (body,))
    return tidy_operands(replace(found.op, inputs=(*found.inputs, statistic), expr=expr))


def _scaled(e: Expr, factor: Expr | None) -> Expr:
    return e if factor is None else call("mul", e, factor)
