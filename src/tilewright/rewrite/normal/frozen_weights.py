"""Frozen weights absorb what follows them: a per-channel scale and shift moves into the weight and bias of a
contraction.

This is how batch norm vanishes from convolutions. The rule knows no op by name: it looks for a sum of
products with a constant factor, and for expressions that are affine in its result with coefficients that
depend on its channel alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from tilewright.interp import REALS, Array
from tilewright.interp.evaluate import Evaluator
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, cast, const, narrow, read, walk
from tilewright.ir.graph import Graph, LibraryCall, Op, Operand, Origin, Value
from tilewright.ir.pattern import Rule
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.tuning.input_limits import PIECES

from .normalise import Evaluate, drop_dead, fold_constants, interpret, layout_of


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """What follows a contraction until `ops[-1]`: result = scale[c] * sum + shift[c], with c at dim
    `channel`.

    `product` is the contraction, `weight` its frozen operand, whose dim `place` runs over the channel."""

    graph: Graph
    product: Op
    weight: Value
    place: int
    channel: int
    scale: Array
    shift: Array
    ops: tuple[Op, ...] = ()


def freeze(graph: Graph, evaluate: Evaluate = interpret) -> Graph:
    """The graph with constants folded, and with scales and shifts in frozen weights wherever the rule applies.

    It works on contractions as tensor expressions, so it comes before library calls are chosen."""
    if not graph.constants:
        return graph
    graph = fold_constants(graph, evaluate)
    absorbed = FOLD_SCALE.apply(graph)
    return drop_dead(graph if absorbed is None else absorbed)


def find(graph: Graph) -> tuple[Chain, ...] | None:
    """Every contraction with a frozen weight that ops of another origin scale or shift per channel. None if
    none is."""
    consumers = graph.consumers()
    found: list[Chain] = []
    for op in graph.ops:
        chain = _start(graph, op)
        longest = None
        while chain is not None and (chain := _extend(chain, consumers)) is not None:
            if _may_end(chain):
                longest = chain
        if longest is not None and _library_slots(longest) is not None:
            found.append(longest)
    return tuple(found) or None


def _start(graph: Graph, op: Op) -> Chain | None:
    """The empty chain of a sum of products, one factor of which is an element of a frozen tensor."""
    e = op.expr
    if (
        e is None
        or e.reduction is None
        or e.reduction.combiner != "add"
        or e.scan is not None
        or op.origin < 0
    ):
        return None
    if e.reduction.lift[0].op != "slot" or e.reduction.finish[0].op != "slot":
        return None
    for factor in _factors(e.body[0]):
        element = factor.args[0] if factor.op == "cast" else factor
        if element.op != "read" or not isinstance(element.value, int):
            continue
        weight = op.inputs[element.value]
        if not isinstance(graph.constants.get(weight), torch.Tensor) or not weight.dtype.is_float:
            continue
        if sum(r.value == element.value for r in e.reads()) != 1:
            continue
        for channel, a in enumerate(e.axes):
            if axis(a) in element.args and sum(axis(a) in walk(i) for i in element.args) == 1:
                size = dims.static(a.extent)
                if size is not None:
                    one = np.ones(size)
                    return Chain(graph, op, weight, element.args.index(axis(a)), channel, one, 0 * one)
    return None


def _factors(e: Expr) -> list[Expr]:
    return [f for a in e.args for f in _factors(a)] if e.op == "mul" else [e]


def _extend(chain: Chain, consumers: Mapping[Value, list[Op]]) -> Chain | None:
    """The chain with the only reader of its end, if that is affine with coefficients of the channel."""
    end = (chain.ops or (chain.product,))[-1].output
    readers = consumers.get(end, [])
    if len(readers) != 1 or end in chain.graph.kept():
        return None
    (op,) = readers
    if op.expr is None or not op.expr.is_pointwise or len(op.expr.axes) != len(end.shape):
        return None
    if not all(dims.equal(a.extent, s) for a, s in zip(op.expr.axes, end.shape, strict=True)):
        return None  # a slice: the call makes all elements
    others = [v for v in op.inputs if v is not end]
    here = read(op.inputs.index(end), [_place(a) for a in op.expr.axes], end.dtype)
    reads = [r for r in op.expr.reads() if r is not here]
    if not all(v in chain.graph.constants for v in others) or any(
        op.inputs[_operand(r)] is end for r in reads
    ):
        return None
    parts = _affine(op.expr.body[0], here)
    own = op.expr.axes[chain.channel]
    if parts is None or any(axes_of(p) - {axis(own)} for p in parts):
        return None
    slope, offset = (_over_channel(p, op, own, chain) for p in parts)
    scale, shift = slope * chain.scale, slope * chain.shift + offset
    if not (np.isfinite(scale).all() and np.isfinite(shift).all()):
        return None
    return replace(chain, scale=scale, shift=shift, ops=(*chain.ops, op))


def _place(a: Axis) -> Expr:
    return dims.ZERO if a.extent is dims.ONE else axis(a)


def _operand(r: Expr) -> int:
    assert isinstance(r.value, int)
    return r.value


def _affine(e: Expr, x: Expr) -> tuple[Expr, Expr] | None:
    """(a, b) with e = a*x + b where a and b do not contain x, in real arithmetic; None if there is none."""
    one, zero = const(1, e.dtype), const(0, e.dtype)
    if e is x:
        return one, zero
    if x not in walk(e):
        return zero, e
    if not e.dtype.is_float:
        return None
    parts = [_affine(a, x) for a in e.args]
    known = [p for p in parts if p is not None]
    if len(known) < len(parts):
        return None
    free = [x not in walk(a) for a in e.args]
    if e.op in ("cast", "narrow", "neg") and e.args[0].dtype.is_float:
        apply = (lambda p: call("neg", p)) if e.op == "neg" else (lambda p: cast(p, e.dtype))
        return apply(known[0][0]), apply(known[0][1])
    if e.op in ("add", "sub"):
        return call(e.op, known[0][0], known[1][0]), call(e.op, known[0][1], known[1][1])
    if e.op == "mul" and any(free):
        k = 0 if free[0] else 1
        return call("mul", known[1 - k][0], e.args[k]), call("mul", known[1 - k][1], e.args[k])
    if e.op == "div" and free[1]:
        return call("div", known[0][0], e.args[1]), call("div", known[0][1], e.args[1])
    return None


def _over_channel(e: Expr, op: Op, channel: Axis, chain: Chain) -> Array:
    """The values of a coefficient for every channel, in fp64."""
    constants = chain.graph.constants
    operands = [REALS.load(constants[v], v.dtype) if v in constants else np.zeros(()) for v in op.inputs]
    positions = np.arange(len(chain.scale))
    found = Evaluator(REALS, operands, axes={channel: positions}).value(e)
    return np.broadcast_to(np.asarray(found, np.float64), positions.shape)


def _may_end(chain: Chain) -> bool:
    """Whether the end is a result of another captured node, of the type of the weight."""
    last = chain.ops[-1]
    if last.origin in (-1, chain.product.origin) or last.output.dtype != chain.weight.dtype:
        return False
    return last.output in chain.graph.origins[last.origin].outputs


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where the library call takes the weight and the bias: numbers of its inputs (bias None = it has none
    yet)."""

    weight: int
    bias: int | None
    call: LibraryCall


def _library_slots(chain: Chain) -> _Slots | None:
    """None if the call of the contraction's origin has another form than (input, weight, bias or None, ...),
    or if something else reads what it makes."""
    origin = chain.graph.origins[chain.product.origin]
    inner = [op for op in chain.ops if op.origin == chain.product.origin]
    if origin.call is None or len(origin.outputs) != 1 or chain.weight not in origin.inputs:
        return None
    if origin.outputs[0] not in {op.output for op in (chain.product, *chain.ops)}:
        return None
    weight = origin.inputs.index(chain.weight)
    args = origin.call.args
    if origin.call.reason != "convolution" or len(args) < 3 or args[1] != Operand(weight):
        return None
    bias = args[2]
    if bias is None:
        return _Slots(weight, None, origin.call) if not any(_constants(op, chain) for op in inner) else None
    return _Slots(weight, bias.index, origin.call) if isinstance(bias, Operand) else None


def _constants(op: Op, chain: Chain) -> list[Value]:
    return [v for v in op.inputs if v in chain.graph.constants]


def absorb(chains: tuple[Chain, ...]) -> Graph:
    """The graph in which each chain is one contraction with a new weight, and one op that adds a new bias."""
    graph = chains[0].graph
    next_id = 1 + max(v.id for v in _values(graph))
    origins = list(graph.origins)
    made: dict[Value, torch.Tensor] = {}
    instead: dict[Op, list[Op]] = {op: [] for chain in chains for op in chain.ops}
    for k, chain in enumerate(chains):
        weight = replace(chain.weight, id=next_id + 3 * k)
        bias = Value(weight.id + 1, (weight.shape[chain.place],), weight.dtype)
        total = replace(chain.product.output, id=weight.id + 2)
        made[weight], made[bias] = _tensors(chain)
        inputs = tuple(weight if v is chain.weight else v for v in chain.product.inputs)
        product = replace(chain.product, inputs=inputs, outputs=(total,))
        instead[chain.product] = [product, _add_bias(chain, total, bias)]
        origins[chain.product.origin] = _origin(chain, weight, bias)
    return replace(
        graph,
        ops=tuple(new for op in graph.ops for new in instead.get(op, [op])),
        origins=tuple(origins),
        constants={**graph.constants, **made},
        layouts={**graph.layouts, **{v: layout_of(t) for v, t in made.items()}},
    )


def _tensors(chain: Chain) -> tuple[torch.Tensor, torch.Tensor]:
    """The new weight, in the memory format of the old one, and the new bias."""
    old = chain.graph.constants[chain.weight]
    assert isinstance(old, torch.Tensor)
    scale = chain.scale.reshape([-1 if d == chain.place else 1 for d in range(old.dim())])
    bias = torch.from_numpy(chain.shift.copy()).to(device=old.device, dtype=old.dtype)
    factor = torch.from_numpy(scale.copy()).to(old.device)
    weight = torch.empty_like(old, requires_grad=False)
    rows = max(1, PIECES.scaled_weight_elements // max(1, old[:1].numel()))
    for first in range(0, old.shape[0], rows):  # in fp64 block by block: no large temporary
        part = slice(first, first + rows)
        weight[part] = old.detach()[part].double().mul_(factor[part] if chain.place == 0 else factor)
    return weight, bias


def _add_bias(chain: Chain, total: Value, bias: Value) -> Op:
    """The op that makes the end of the chain from the sum and the new bias."""
    end = chain.ops[-1].output
    axes = chain.ops[-1].expr.axes if chain.ops[-1].expr is not None else ()
    sum_ = read(0, [_place(a) for a in axes], total.dtype)
    term = cast(read(1, [_place(axes[chain.channel])], bias.dtype), total.dtype)
    body = narrow(call("add", sum_, term), end.dtype)
    expr = TensorExpr(axes, (body,))
    return Op("bias", (total, bias), (end,), expr=expr, origin=chain.product.origin)


def _origin(chain: Chain, weight: Value, bias: Value) -> Origin:
    """The contraction's origin makes the end of the chain now, from the new weight and bias."""
    old, slots = chain.graph.origins[chain.product.origin], _library_slots(chain)
    assert slots is not None
    inputs, args = list(old.inputs), slots.call.args
    inputs[slots.weight] = weight
    if slots.bias is None:
        args = (*args[:2], Operand(len(inputs)), *args[3:])
        inputs.append(bias)
    else:
        inputs[slots.bias] = bias
    call_ = replace(slots.call, args=args)
    if slots.bias is None:  # a convolution, which may go without it again
        call_ = replace(call_, bias=len(inputs) - 1, channel=1)
    return replace(old, call=call_, inputs=tuple(inputs), outputs=(chain.ops[-1].output,))


def _values(graph: Graph) -> list[Value]:
    inputs = [v for v in graph.inputs if isinstance(v, Value)]
    made = [v for op in graph.ops for v in op.outputs]
    return [*inputs, *graph.constants, *made]


FOLD_SCALE: Rule[Graph, tuple[Chain, ...]] = Rule(
    "fold scale into weight",
    find,
    absorb,
    "scale[c] * sum(x * w[c]) + shift[c] = sum(x * (scale[c] * w[c])) + shift[c], for scale and shift free of the sum",
    "field",
)
"""Rounding differs: the product scale * w is rounded once, in advance."""

__all__ = ["FOLD_SCALE", "Chain", "freeze"]
