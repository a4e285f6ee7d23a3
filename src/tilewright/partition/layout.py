"""How values that kernels store lie in memory: dense, or with the channel innermost where their neighbours do so."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping

from tilewright.ir.expr import Expr, axes_of, axis, substitute
from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.ir.ops.strided import Lying
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.library.offers.offer import channels_last


def choose_layouts(graph: Graph) -> dict[Value, Layout]:
    """The layouts of all values that are not dense, or that something outside the kernels decides: graph inputs and
    outputs, results of library calls, and what `kernel_layouts` chooses."""
    known = dict(graph.layouts)
    for op in graph.ops:
        if op.call is not None:
            known |= {v: Layout(strides) for v, strides in zip(op.outputs, op.call.strides, strict=False)}
    return known | kernel_layouts(graph, known)


def kernel_layouts(graph: Graph, known: Mapping[Value, Layout]) -> dict[Value, Layout]:
    """Layouts of kernel results that are not to be dense. `known` are those that are fixed already (graph inputs and
    outputs, results of library calls).

    A result that a library call reads lies as that call relies on, and one that it reads through a view that would be a
    copy lies so that it is none. What such a call sees of other memory, where
    strides cannot say it and a kernel has to copy it, lies as it does in the program. A result of rank 4 or 5 has its
    channel (dim 1) innermost if a library call that reads it wants that, or if it reads a tensor of its batch and
    channel sizes that lies so (its layout follows the larger part of what it reads). One that is made of smaller
    tensors alone, each element of which stands for many, has no say: it lies as the first of its readers that does."""
    wanted, relied, seen = _wanted(graph), _relied_on(graph), _seen(graph)
    behind = _behind_copies(graph, seen)
    found: dict[Value, Layout] = {}
    free: set[Value] = set()
    shows: set[Value] = set()  # views lie as their sources do, whoever reads them
    fixed = ChainMap(found, dict(known))
    for op in graph.ops:
        if op.expr is None:
            continue
        if op.expr.is_view():
            strides = wanted.get(op.output) or seen.get(op.output)
            if strides is not None and op.output not in known and view_layout(op, fixed) is None:
                found[op.output] = Layout(strides)
            elif op.output not in known and len(op.output.shape) in (4, 5):
                free |= {op.output} if not any(_votes(op, op.output, known, found, free)) else set()
            shows.add(op.output)
            continue
        for v in op.outputs:
            if v in known:
                continue
            asked = relied.get(v) or behind.get(v)
            if asked is not None and v not in wanted:
                found[v] = Layout(asked)
                continue
            if len(v.shape) not in (4, 5):
                continue
            strides = channels_last(v.shape)
            if v in wanted:
                if wanted[v] == strides:
                    found[v] = Layout(strides)
                continue
            last, dense = _votes(op, v, known, found, free)
            if last > dense:
                alike = [x for x in op.inputs if x in free - shows and x.shape == v.shape]
                found |= {x: Layout(channels_last(x.shape)) for x in (v, *alike)}
                free -= set(alike)
            elif not last + dense:
                free.add(v)
    return found


def returned_layouts(
    graph: Graph, known: Mapping[Value, Layout], storages: Mapping[Value, int]
) -> dict[Value, Layout]:
    """Layouts of kernel results of which the program returns several views in one of its `storages`, read off the first
    view whose strides fill the whole of it; none if no view does, and then each is copied. A dense result could not
    show them at the strides that the program promises."""
    made = {v for op in graph.ops if op.expr is not None and not op.expr.is_view() for v in op.outputs}
    views: dict[tuple[Value, int], list[Op]] = {}
    for op in graph.ops:
        if op.expr is not None and op.kernel < 0 and op.expr.is_view() and len(op.inputs) == 1:
            if op.output in storages and op.inputs[0] in made and op.inputs[0] not in known:
                views.setdefault((op.inputs[0], storages[op.output]), []).append(op)
    found: dict[Value, Layout] = {}
    for (source, _), ops in views.items():
        if source in found or len(ops) == 1:
            continue
        for op in ops:
            promised = known.get(op.output) or Layout(dims.dense_strides(op.output.shape))
            strides = _behind(op.expr, source, promised.strides) if op.expr is not None else None
            if strides is not None and Lying(strides, dims.ZERO, source.numel).fills(source.shape):
                found[source] = Layout(strides)
                break
    return found


def _wanted(graph: Graph) -> dict[Value, tuple[Expr, ...]]:
    """The strides that the first library reader with a wish would like each value to have."""
    found: dict[Value, tuple[Expr, ...]] = {}
    for op in graph.ops:
        for v, strides in zip(op.inputs, op.call.wants if op.call is not None else (), strict=False):
            if strides is not None:
                found.setdefault(v, strides)
    return found


def _relied_on(graph: Graph) -> dict[Value, tuple[Expr, ...]]:
    """The strides that the first library reader relies on, of the value or of a view of it, where a tensor without
    gaps can have them."""
    found: dict[Value, tuple[Expr, ...]] = {}
    for op in reversed(graph.ops):
        pairs = zip(op.inputs, op.call.lies if op.call is not None else (), strict=False)
        seen = [(v, strides) for v, strides in pairs if strides is not None]
        if op.expr is not None and op.expr.is_view() and op.output in found and len(op.inputs) == 1:
            seen = [(op.inputs[0], _behind(op.expr, op.inputs[0], found[op.output]))]
        for v, strides in reversed(seen):
            if strides is not None and Lying(strides, dims.ZERO, v.numel).fills(v.shape):
                found[v] = strides
    return found


def _seen(graph: Graph) -> dict[Value, tuple[Expr, ...]]:
    """The strides in the program of what library calls read that take any, where a tensor without gaps can have
    them."""
    found: dict[Value, tuple[Expr, ...]] = {}
    for op in graph.ops:
        for v, strides in zip(op.inputs, op.call.seen if op.call is not None else (), strict=False):
            if strides is not None and Lying(strides, dims.ZERO, v.numel).fills(v.shape):
                found.setdefault(v, strides)
    return found


def _behind_copies(graph: Graph, seen: Mapping[Value, tuple[Expr, ...]]) -> dict[Value, tuple[Expr, ...]]:
    """The strides of values of which a library call reads a view, such that this is their memory; of those whose view
    would be a copy if they were dense."""
    found: dict[Value, tuple[Expr, ...]] = {}
    for op in graph.ops:
        strides = seen.get(op.output) if op.expr is not None and op.expr.is_view() else None
        if strides is None or op.expr is None or len(op.inputs) != 1 or view_layout(op, {}) is not None:
            continue
        source = op.inputs[0]
        lies = _behind(op.expr, source, strides)
        if lies is not None and Lying(lies, dims.ZERO, source.numel).fills(source.shape):
            found.setdefault(source, lies)
    return found


def view_layout(op: Op, layouts: Mapping[Value, Layout]) -> tuple[Layout, Expr] | None:
    """The strides and the offset by which a view is its source's memory; None if there are none."""
    expr = op.expr
    assert expr is not None
    if len(op.inputs) != 1 or op.inputs[0].dtype != op.output.dtype:
        return None
    source = op.inputs[0]
    layout = layouts.get(source) or Layout(dims.dense_strides(source.shape))
    offset = dims.add(*(dims.mul(i, s) for i, s in zip(expr.body[0].args, layout.strides, strict=True)))
    strides = [dims.coefficient(offset, axis(a)) for a in expr.axes]
    base = substitute(offset, {axis(a): dims.ZERO for a in expr.axes})
    known = [s for s in strides if s is not None and dims.at_least(s, 0)]
    if len(known) != len(strides) or axes_of(base):
        return None
    place = dims.add(base, *(dims.mul(axis(a), s) for a, s in zip(expr.axes, known, strict=True)))
    return (Layout(tuple(known)), base) if place is offset else None


def _behind(expr: TensorExpr, source: Value, strides: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
    """The strides of the source of a view that has `strides` itself; None unless each dim of the source is a dim of the
    view, or some digits of one: the place a // n % m of a dim with stride s is a dim with stride n * s."""
    steps = {axis(a): s for a, s in zip(expr.axes, strides, strict=True)}
    found = [
        dims.ONE if n is dims.ONE else _step(i, steps)
        for n, i in zip(source.shape, expr.body[0].args, strict=True)
    ]
    known = tuple(s for s in found if s is not None)
    return known if len(known) == len(found) else None


def _step(place: Expr, steps: Mapping[Expr, Expr]) -> Expr | None:
    """How far apart neighbours of a `place` lie; None where it is not made of one dim's digits."""
    if place.op == "mod":
        return _step(place.args[0], steps)
    if place.op == "floordiv":
        inner = _step(place.args[0], steps)
        return None if inner is None else dims.mul(inner, place.args[1])
    return steps.get(place)


def _votes(
    op: Op, v: Value, known: Mapping[Value, Layout], found: Mapping[Value, Layout], free: Collection[Value]
) -> tuple[int, int]:
    """The bytes of what `op` reads along channel and row that lies one element apart along the channel, and of what
    lies otherwise; what is `free` is neither."""
    expr = op.expr
    assert expr is not None
    votes = {True: 0, False: 0}
    for r in expr.reads():
        assert isinstance(r.value, int)
        source = op.inputs[r.value]
        if source in free:
            continue
        layout = found.get(source) or known.get(source) or Layout(dims.dense_strides(source.shape))
        address = dims.add(dims.ZERO, *(dims.mul(i, s) for i, s in zip(r.args, layout.strides, strict=True)))
        used = [k for k, a in enumerate(expr.axes) if axis(a) in axes_of(r)]
        if not {1, len(v.shape) - 1} <= set(used):
            continue
        step = dims.coefficient(address, axis(expr.axes[1]))
        votes[step is dims.ONE and v.shape[1] is not dims.ONE] += _bytes(source)
    return votes[True], votes[False]


def _bytes(v: Value) -> int:
    size = dims.static(v.numel)
    return (size if size is not None else 1 << 20) * v.dtype.bytes
