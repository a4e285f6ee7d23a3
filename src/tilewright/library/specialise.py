"""Library calls in their fastest form: packed frozen weights, no flattening around them, pointwise readers absorbed.

Providers know the forms (`offers`); here it is decided where they apply.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.ir.expr import Expr, axis, read, substitute
from tilewright.ir.graph import Graph, Op, Operand, Routine, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.rewrite.normal.normalise import compose_views, substitute_values
from tilewright.target import Target

from .choose import Offers, OfferTimer, choose, refuse
from .epilogue import absorb
from .frozen_operands import Frozen
from .offers.offer import Fusible, Maker, Offer
from .offers.registry import find_faster, is_offered
from .padded_convolutions import take_zeros
from .select import drop_unread
from .spare import offered, one_behind_another

LOG = logging.getLogger("tilewright")


def specialise(
    graph: Graph,
    target: Target,
    maker: Maker | None = None,
    timer: OfferTimer | None = None,
    *,
    exact: bool = True,
) -> Graph:
    """The graph with every library call in the fastest form that its frozen operands and its readers allow on the
    machine `target`; `maker` may have code of its own for products with frozen weights, and `timer` measures which of
    several forms is the fastest.

    Runs after library selection on a normalised graph. With `exact`, no epilogue is taken that turns NaN into a
    number where the op itself does not."""
    packed, offers = pack(take_zeros(graph), target, maker)
    chosen = choose(unflatten(packed), offers, timer, exact=exact)
    return join_calls(drop_unread(absorb(drop_unread(chosen), exact=exact)))


# --- frozen operands -----------------------------------------------------------------------------


def pack(graph: Graph, target: Target, maker: Maker | None = None) -> tuple[Graph, Offers]:
    """Calls replaced by what they become when they know their frozen operands (constants, or views of them): a faster
    one, or one that stands for offers, which are given by its number."""
    frozen, offers = Frozen(graph), dict[int, Sequence[Offer]]()
    return graph.with_ops([_packed(op, frozen, target, maker, offers) for op in graph.ops]), offers


def _packed(
    op: Op, frozen: Frozen, target: Target, maker: Maker | None, offers: dict[int, Sequence[Offer]]
) -> Op:
    call, number = op.call, len(offers)
    if call is None or not is_offered(call):
        return op
    known = {k: t for k, v in enumerate(op.inputs) if (t := frozen.tensor(v)) is not None}
    try:
        faster = find_faster(call, known, target, maker, number)
    except Exception as error:
        LOG.info("no faster form of %s", op.name, exc_info=True)
        return replace(op, call=refuse(call, call.name, error))
    if faster is None:
        return op
    if faster.offers:
        offers[number] = faster.offers
    left = tuple(v for k, v in enumerate(op.inputs) if k not in known)
    return replace(op, call=offered(faster.call, call, known), inputs=left)


# --- leading dims --------------------------------------------------------------------------------


def unflatten(graph: Graph) -> Graph:
    """Calls that take any leading dims read their operand as it was before it was flattened.

    What they make then has the same leading dims; a view gives the other readers the flat one."""
    producer = graph.producer()
    next_id = graph.fresh_id()
    ops: list[Op] = []
    for op in graph.ops:
        source = _unflat(op, producer)
        if source is None:
            ops.append(op)
            continue
        call = op.call
        assert call is not None and call.rows is not None
        flat = op.output
        wide = Value(next_id, (*source.shape[:-1], flat.shape[-1]), flat.dtype)
        next_id += 1
        inputs = tuple(source if k == call.rows else v for k, v in enumerate(op.inputs))
        ops.append(
            replace(
                op,
                inputs=inputs,
                outputs=(wide,),
                call=replace(call, strides=(dims.dense_strides(wide.shape),)),
            )
        )
        ops.append(_flatten(wide, flat, op.origin))
        producer[flat] = ops[-1]
    return _without_identities(compose_views(graph.with_ops(ops)))


def _without_identities(graph: Graph) -> Graph:
    """Values that are a library result seen unchanged take its place."""
    producer, required = graph.producer(), graph.kept()
    same: dict[Value, Value] = {}
    gone: set[Op] = set()
    for op in graph.ops:
        if op.expr is None or not op.expr.is_view() or len(op.inputs) != 1:
            continue
        source, shown = op.inputs[0], op.output
        here = [_place(a.extent, axis(a)) for a in op.expr.axes]
        unchanged = (
            source.shape == shown.shape and list(op.expr.body[0].args) == here and source.dtype == shown.dtype
        )
        maker = producer.get(source)
        if (
            unchanged
            and maker is not None
            and maker.call is not None
            and source not in required
            and source not in same
        ):
            same[source] = shown
            gone.add(op)
    ops = [
        replace(op, outputs=tuple(same.get(v, v) for v in op.outputs)) for op in graph.ops if op not in gone
    ]
    return substitute_values(graph.with_ops(ops), same)


def _unflat(op: Op, producer: Mapping[Value, Op]) -> Value | None:
    """The tensor whose leading dims an operand of `op` has flattened, if the call takes it as it is."""
    call = op.call
    if call is None or call.rows is None or len(op.outputs) != 1 or len(op.output.shape) != 2:
        return None
    v = op.inputs[call.rows]
    if op.inputs.count(v) > 1:
        return None
    view = producer.get(v)
    if view is None or view.expr is None or not view.expr.is_view() or len(view.inputs) != 1:
        return None
    source = view.inputs[0]
    if len(source.shape) < 3 or source.dtype != v.dtype or len(v.shape) != 2:
        return None
    rows, last = output_axes(v.shape)
    expected = (
        *_unravel(_place(rows.extent, axis(rows)), source.shape[:-1]),
        _place(last.extent, axis(last)),
    )
    body = substitute(
        view.expr.body[0], {axis(a): axis(b) for a, b in zip(view.expr.axes, (rows, last), strict=True)}
    )
    same = len(body.args) == len(expected) and all(
        dims.equal(a, b) for a, b in zip(body.args, expected, strict=True)
    )
    return source if same else None


def _place(extent: Expr, index: Expr) -> Expr:
    return dims.ZERO if extent is dims.ONE else index


def _unravel(index: Expr, sizes: Sequence[Expr]) -> list[Expr]:
    """The place in dims of `sizes` of element number `index` in row-major order."""
    found: list[Expr] = []
    for k, size in enumerate(sizes):
        quotient = dims.floordiv(index, dims.prod(sizes[k + 1 :]))
        found.append(quotient if k == 0 else dims.mod(quotient, size))
    return [_place(size, i) for i, size in zip(found, sizes, strict=True)]


def _flatten(wide: Value, flat: Value, origin: int) -> Op:
    axes = output_axes(flat.shape)
    rows, last = (_place(a.extent, axis(a)) for a in axes)
    body = read(0, (*_unravel(rows, wide.shape[:-1]), last), wide.dtype)
    return Op("view", (wide,), (flat,), expr=TensorExpr(axes, (body,)), origin=origin)


# --- calls that are done together -----------------------------------------------------------------


def join_calls(graph: Graph) -> Graph:
    """The graph with two calls as one, at the place of the second, where that alone reads what the first makes and a
    routine does both at once (`Fusible.behind`): what lies between them then never goes through memory as a whole.
    Chains of more than two, too."""
    while (joined := _join_once(graph)) is not graph:
        graph = joined
    return graph


def _join_once(graph: Graph) -> Graph:
    producer, consumers, kept = graph.producer(), graph.consumers(), graph.kept()
    joined: dict[Op, Op] = {}
    gone: set[Op] = set()
    for op in graph.ops:
        first = _only_maker(op, producer)
        if (
            first is None
            or first in gone
            or first in joined
            or first.output in kept
            or len(consumers[first.output]) > 1
        ):
            continue
        made = _joined(first, op)
        if made is not None:
            joined[op] = made
            gone.add(first)
    return graph.with_ops([joined.get(op, op) for op in graph.ops if op not in gone]) if joined else graph


def _only_maker(op: Op, producer: Mapping[Value, Op]) -> Op | None:
    """The call on one operand that makes the first operand of the call of `op`."""
    if op.call is None or op.call.args != tuple(map(Operand, range(len(op.inputs)))) or not op.inputs:
        return None
    maker = producer.get(op.inputs[0])
    if maker is None or maker.call is None or op.inputs.count(op.inputs[0]) > 1:
        return None
    return (
        maker if maker.call.args == (Operand(0),) and len(maker.inputs) == len(maker.outputs) == 1 else None
    )


def _joined(first: Op, second: Op) -> Op | None:
    one, other = first.call, second.call
    assert one is not None and other is not None
    if not isinstance(other.function, Fusible) or not isinstance(one.function, Routine):
        return None
    made = other.function.behind(one.function)
    if made is None:
        return None
    spare = one_behind_another(one.spare, other.spare)
    call = replace(made, strides=other.strides, spare=spare, refused=(*one.refused, *other.refused))
    origins = [o for o in (first.origin, *first.absorbed) if o >= 0 and o != second.origin]
    absorbed = tuple(dict.fromkeys((*origins, *second.absorbed)))
    return replace(second, call=call, inputs=(*first.inputs, *second.inputs[1:]), absorbed=absorbed)
