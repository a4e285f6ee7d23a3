"""Convolutions whose bias the library would add in a pass of its own over the result: the reader adds it instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.ir.expr import axis, call, read
from tilewright.ir.graph import Graph, LibraryCall, Op, Operand, Value
from tilewright.ir.tensor import TensorExpr, output_axes


def split_biases(graph: Graph) -> Graph:
    """The graph with each library call that names its `bias` replaced by one without, and an addition, which a kernel
    takes in."""
    fresh = graph.fresh_id()
    ops: list[Op] = []
    for op in graph.ops:
        if op.call is None or op.call.bias is None:
            ops.append(op)
            continue
        ops += _parted(op, op.call, op.call.bias, fresh)
        fresh += 1
    return graph.with_ops(ops)


def _parted(op: Op, library: LibraryCall, bias: int, fresh: int) -> Iterator[Op]:
    (out,) = op.outputs
    bare = Value(fresh, out.shape, out.dtype)
    args = tuple(_without(a, bias) for a in library.args)
    kwargs = tuple((k, _without(a, bias)) for k, a in library.kwargs)
    inputs = tuple(v for k, v in enumerate(op.inputs) if k != bias)
    yield replace(
        op, inputs=inputs, outputs=(bare,), call=replace(library, args=args, kwargs=kwargs, bias=None)
    )
    axes = output_axes(out.shape)
    place = [axis(a) for a in axes]
    wide, vector = out.dtype.compute, op.inputs[bias]
    terms = (read(0, place, out.dtype), read(1, [place[library.channel]], vector.dtype))
    total = call("add", *(call("cast", t, dtype=wide) for t in terms))
    expr = TensorExpr(axes, (call("narrow", total, dtype=out.dtype),))
    yield Op("bias", (bare, vector), op.outputs, expr=expr, origin=op.origin)


def _without(arg: object, bias: int) -> object:
    """An argument with operand `bias` gone and those behind it one down."""
    if isinstance(arg, Operand):
        return None if arg.index == bias else Operand(arg.index - (arg.index > bias))
    if isinstance(arg, (list, tuple)):
        items = [_without(a, bias) for a in arg]
        return tuple(items) if isinstance(arg, tuple) else items
    return arg
