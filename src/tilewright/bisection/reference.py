"""Ops as calls of the interpreter, and calls on operands that lie plainly: what runs in the place of a candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.interp.algebra import FLOATS, Array
from tilewright.interp.graph import run_ops, to_torch
from tilewright.ir.expr import Expr, Symbol, walk
from tilewright.ir.graph import Graph, Layout, LibraryCall, Op, Operand, Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Step
from tilewright.ir.sizes import dims


class _Interpreted:
    """Computes ops in the interpreter, from tensors and then the sizes that they use."""

    def __init__(self, graph: Graph, names: Sequence[str]) -> None:
        self.graph = graph
        self.names = tuple(names)

    def __call__(self, *given: object) -> tuple[Tensor, ...]:
        inputs = [v for v in self.graph.inputs if isinstance(v, Value)]
        tensors = [t for t in given if isinstance(t, Tensor)]
        numbers = [x for x in given if isinstance(x, int | float)]
        device = tensors[0].device if tensors else torch.device("cpu")
        values: dict[Value, Array] = {
            v: FLOATS.load(t.detach().cpu(), v.dtype) for v, t in zip(inputs, tensors, strict=True)
        }
        run_ops(self.graph, values, dict(zip(self.names, numbers, strict=True)), FLOATS)
        made = [to_torch(values[v]) for v in self.graph.outputs if isinstance(v, Value)]
        return tuple(t.to(device) for t in made if isinstance(t, Tensor))


def interpreted(
    ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value], layouts: Mapping[Value, Layout]
) -> LibraryStep:
    """The step that computes `ops` in the interpreter; its results lie as `layouts` say, else densely."""
    used = _symbols(ops)
    call = LibraryCall(
        name="interpreted " + " ".join(op.name for op in ops),
        function=_Interpreted(Graph(tuple(inputs), tuple(ops), tuple(outputs)), [_name_of(s) for s in used]),
        args=(*map(Operand, range(len(inputs))), *used),
        strides=tuple(layouts[v].strides if v in layouts else dims.dense_strides(v.shape) for v in outputs),
        reuses=-1,
    )
    op = Op(call.name, tuple(inputs), tuple(outputs), call=call, origin=ops[-1].origin)
    return LibraryStep(op, choice=False)


def _symbols(ops: Sequence[Op]) -> list[Expr]:
    """The sizes and host scalars that ops use."""
    found: dict[Expr, None] = {}
    for op in ops:
        exprs: list[Expr] = [n for v in (*op.inputs, *op.outputs) for n in v.shape]
        if op.expr is not None:
            exprs += [a.extent for a in (*op.expr.axes, *op.expr.reduce)]
            exprs += op.expr.body
            r = op.expr.reduction
            exprs += (*r.identity, *r.lift, *r.merge, *r.finish) if r is not None else ()
        for e in exprs:
            found |= dict.fromkeys(x for x in walk(e) if isinstance(x.value, Symbol))
    return list(found)


def _name_of(symbol: Expr) -> str:
    assert isinstance(symbol.value, Symbol)
    return symbol.value.name


def plain_call(step: LibraryStep) -> LibraryStep:
    """The same call on copies of its operands that lie row-major. Calls that address storage by place, and those that
    other processes make too, stay what they are."""
    call = step.op.call
    if call is None or call.apart or call.is_collective or any(s is not None for s in call.lies):
        return step
    plain = replace(call, function=_on_copies(call.function), spare=None, reuses=-1)
    return replace(step, op=replace(step.op, call=plain))


def _on_copies(function: Callable[..., object]) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
        return function(*tree_map(_copied, args), **tree_map(_copied, kwargs))

    return run


def _copied(x: object) -> object:
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x


def reference_of(step: Step, cover: Cover) -> Step:
    """What runs in the place of a step of `cover`; views stay."""
    match step:
        case Kernel():
            layouts = {**cover.graph.layouts, **cover.layouts}
            return interpreted(step.ops, step.inputs, step.outputs, layouts)
        case LibraryStep():
            return plain_call(step)
        case _:
            return step


def reference_cover(graph: Graph) -> Cover:
    """Every op by itself: calls as they are, the rest in the interpreter."""
    return Cover(graph, tuple(_steps(graph.ops, graph.layouts)))


def _steps(ops: Iterable[Op], layouts: Mapping[Value, Layout]) -> Iterable[Step]:
    for op in ops:
        if op.call is not None:
            yield LibraryStep(op, choice=False)
        else:
            yield interpreted([op], op.inputs, op.outputs, layouts)
