"""How values that kernels store lie in memory: dense, or with the channel innermost where their neighbours do so."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import dims
from ..ir.expr import Expr, axes_of, axis
from ..ir.graph import Graph, Layout, Op, Value


def kernel_layouts(graph: Graph, known: Mapping[Value, Layout]) -> dict[Value, Layout]:
    """Layouts of kernel results that are not to be dense. `known` are those that are settled already (graph inputs and
    outputs, results of library calls).

    A result of rank 4 or 5 has its channel (dim 1) innermost if a library call that reads it wants that, or if it reads
    a tensor of its batch and channel sizes that lies so (its layout follows the larger part of what it reads)."""
    wanted = _wanted(graph)
    found: dict[Value, Layout] = {}
    for op in graph.ops:
        if op.expr is None or op.expr.is_view():
            continue
        for v in op.outputs:
            if v in known or len(v.shape) not in (4, 5):
                continue
            strides = channels_last(v.shape)
            if v in wanted:
                if wanted[v] == strides:
                    found[v] = Layout(strides)
            elif _follows(op, v, known, found):
                found[v] = Layout(strides)
    return found


def channels_last(shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The strides of [batch, channel, space...] with the channel innermost."""
    inner = dims.dense_strides((shape[0], *shape[2:], shape[1]))
    return (inner[0], inner[-1], *inner[1:-1])


def _wanted(graph: Graph) -> dict[Value, tuple[Expr, ...]]:
    """The strides that the first library reader with a wish would like each value to have."""
    found: dict[Value, tuple[Expr, ...]] = {}
    for op in graph.ops:
        for v, strides in zip(op.inputs, op.call.wants if op.call is not None else (), strict=False):
            if strides is not None:
                found.setdefault(v, strides)
    return found


def _follows(op: Op, v: Value, known: Mapping[Value, Layout], found: Mapping[Value, Layout]) -> bool:
    """Whether what `op` reads along the channel lies one element apart there, and further apart elsewhere."""
    expr = op.expr
    assert expr is not None
    votes = {True: 0, False: 0}
    for r in expr.reads():
        assert isinstance(r.value, int)
        source = op.inputs[r.value]
        layout = found.get(source) or known.get(source) or Layout(dims.dense_strides(source.shape))
        address = dims.add(dims.ZERO, *(dims.mul(i, s) for i, s in zip(r.args, layout.strides, strict=True)))
        used = [k for k, a in enumerate(expr.axes) if axis(a) in axes_of(r)]
        if not {1, len(v.shape) - 1} <= set(used):
            continue
        step = dims.coefficient(address, axis(expr.axes[1]))
        votes[step is dims.ONE and v.shape[1] is not dims.ONE] += _bytes(source)
    return votes[True] > votes[False]


def _bytes(v: Value) -> int:
    size = dims.static(v.numel)
    return (size if size is not None else 1 << 20) * v.dtype.bytes
