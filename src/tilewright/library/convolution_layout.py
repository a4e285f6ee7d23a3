"""Convolutions of images whose columns lie innermost, done on images whose channels do: matrix units read channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tilewright.ir.expr import Axis, Expr, axis, read
from tilewright.ir.graph import Graph, Layout, LibraryCall, Op, Operand, Routine, Value
from tilewright.ir.sizes import dims
from tilewright.ir.task import Convolution
from tilewright.ir.tensor import TensorExpr
from tilewright.tuning.thresholds import LIBRARY, PARTITION

from .offers.offer import channels_last, has_channels_innermost
from .select import select

Strides = tuple[Expr, ...]


class CallTimer(Protocol):
    """Measures calls, on the machine."""

    def seconds(
        self, call: LibraryCall, inputs: Sequence[Value], laid: Sequence[Strides | None]
    ) -> float | None:
        """Seconds of one run on operands with these strides (None: dense); None where it cannot be run."""
        ...

    def pass_seconds(self, moved: Sequence[Value]) -> float:
        """Modelled seconds of a kernel that reads or writes each of these once."""
        ...


@dataclass(frozen=True)
class ConvolutionOfChannels(Routine):
    """A convolution whose operands and result have their channels innermost; those that lie otherwise are copied."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    def bind(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """What runs."""
        convolution, last = torch.convolution, torch.channels_last
        window = (self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups)

        def run(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            made = convolution(x.contiguous(memory_format=last), w.contiguous(memory_format=last), b, *window)
            return made.contiguous(memory_format=last)  # of one channel in, torch may take either format

        return run


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """A convolution as it is, and one of channels, each with the strides of its operands."""

    op: Op
    made: LibraryCall
    rows: Sequence[Strides | None]
    channels: Sequence[Strides | None]


def lay_channels_innermost(graph: Graph, timer: CallTimer) -> Graph:
    """The graph with all its convolutions done on images whose channels lie innermost, if this is faster in the sum:
    what `timer` measures of the convolutions, and copies of what comes from outside and of each result that leaves the
    graph. Captured nodes keep their expressions, so that kernels may still take them."""
    selected = select(graph)
    outside = {v for v in graph.inputs if isinstance(v, Value)}
    choices = [c for op in selected.ops if (c := _choice(op, selected, outside)) is not None]
    if not choices:
        return graph
    rows = _total(timer.seconds(c.op.call, c.op.inputs, c.rows) for c in choices if c.op.call is not None)
    channels = _total(timer.seconds(c.made, c.op.inputs, c.channels) for c in choices)
    constants, layouts = _with_channels_innermost(graph, {c.op.inputs[1] for c in choices})
    laid, required = replace(graph, constants=constants, layouts=layouts), graph.kept()
    copies = _copies(laid, choices, outside)
    copied = [*copies, *(c.op.output for c in choices if c.op.output in required)]
    passes = sum(timer.pass_seconds([v, v]) for v in copied)
    if rows is None or channels is None or channels + passes >= rows:
        return graph
    return _with_calls(laid, choices, copies)


def _total(times: Iterable[float | None]) -> float | None:
    """The sum; None if one is not known."""
    found = list(times)
    known = [t for t in found if t is not None]
    return sum(known) if len(known) == len(found) else None


def _choice(op: Op, graph: Graph, outside: AbstractSet[Value]) -> _Choice | None:
    """Both ways of a convolution of half types whose result has its columns innermost; None for anything else."""
    call = op.call
    task = call.task if call is not None else None
    if call is None or not isinstance(task, Convolution) or not task.dtype.is_half or len(task.shape) != 4:
        return None
    x, weight = op.inputs[0], op.inputs[1]
    dense = dims.dense_strides(task.shape)
    if (
        not call.strides
        or call.strides[0] != dense
        or (call.args[0], call.args[1]) != (Operand(0), Operand(1))
    ):
        return None
    routine = ConvolutionOfChannels(
        task.stride, task.padding, task.dilation, task.output_padding, task.groups, task.transposed
    )
    rest = (None,) * (len(op.inputs) - 2)
    wants = (channels_last(x.shape), channels_last(weight.shape), *rest)
    made = replace(
        call, function=routine, args=call.args[:3], kwargs=(), strides=(channels_last(task.shape),), wants=wants,
        lies=(), seen=(), reuses=-1,
    )  # fmt: skip
    given = tuple(graph.layouts[v].strides if v in graph.layouts else None for v in (x, weight))
    as_it_lies = x in outside and has_few_channels(x) and weight not in graph.constants
    return _Choice(op, made, (*given, *rest), (*given, *rest) if as_it_lies else wants)


def has_few_channels(image: Value) -> bool:
    """Whether one load of a vector would reach over all channels of an image: then it is read as it lies."""
    channels = dims.static(image.shape[1])
    return channels is not None and channels < LIBRARY.min_vector_channels


def _copies(graph: Graph, choices: Sequence[_Choice], outside: AbstractSet[Value]) -> dict[Value, Op]:
    """What copies values from outside that lie otherwise; those of equal shapes share a kernel. Images of few channels
    are read as they lie, and so are their weights."""
    read_otherwise = dict.fromkeys(
        v
        for c in choices
        for v in c.op.inputs[:2]
        if v in outside and not has_few_channels(c.op.inputs[0]) and not _lies_right(v, graph)
    )
    fresh, kernels = graph.fresh_id(), 1 + max((op.kernel for op in graph.ops), default=-1)
    alike: dict[object, list[Value]] = {}
    for v in read_otherwise:
        alike.setdefault((v.shape, graph.layouts.get(v)), []).append(v)
    most = PARTITION.max_kernel_ops
    groups = [same[n : n + most] for same in alike.values() for n in range(0, len(same), most)]
    numbered = [(v, kernels + n) for n, group in enumerate(groups) for v in group]
    return {v: _copy(v, fresh + n, kernel) for n, (v, kernel) in enumerate(numbered)}


def _lies_right(v: Value, graph: Graph) -> bool:
    strides = graph.layouts[v].strides if v in graph.layouts else dims.dense_strides(v.shape)
    return has_channels_innermost(v.shape, strides)


def _copy(v: Value, number: int, kernel: int) -> Op:
    """The op that copies a value, in its own kernel: no reader looks through it, as through a view."""
    axes = tuple(Axis(f"a{d}", size) for d, size in enumerate(v.shape))
    expr = TensorExpr(axes, (read(0, list(map(axis, axes)), v.dtype),))
    return Op("channels_last", (v,), (replace(v, id=number),), expr=expr, kernel=kernel)


def _with_calls(graph: Graph, choices: Sequence[_Choice], copies: Mapping[Value, Op]) -> Graph:
    """The graph with the calls that were chosen, on copies of what comes from outside."""
    made = {c.op.output: c.made for c in choices}
    origins = tuple(
        replace(o, call=made[o.outputs[0]], inputs=_instead(o.inputs, copies))
        if len(o.outputs) == 1 and o.outputs[0] in made
        else o
        for o in graph.origins
    )
    nodes = {o.id for o in origins if len(o.outputs) == 1 and o.outputs[0] in made}
    ops = [
        replace(op, call=made[op.output], inputs=_instead(op.inputs, copies))
        if op.call is not None and len(op.outputs) == 1 and op.output in made
        else replace(op, inputs=_instead(op.inputs, copies))
        if op.origin in nodes
        else op
        for op in graph.ops
    ]
    layouts = {op.output: Layout(channels_last(op.output.shape)) for op in copies.values()}
    return replace(
        graph,
        ops=(*copies.values(), *ops),
        origins=origins,
        layouts={**graph.layouts, **layouts},
    )


def _instead(inputs: Sequence[Value], copies: Mapping[Value, Op]) -> tuple[Value, ...]:
    return tuple(copies[v].output if v in copies else v for v in inputs)


def _with_channels_innermost(
    graph: Graph, weights: AbstractSet[Value]
) -> tuple[Mapping[Value, object], Mapping[Value, Layout]]:
    """Constants and layouts of the graph, with those of frozen weights as such convolutions read them."""
    constants, layouts = dict(graph.constants), dict(graph.layouts)
    for v in weights & constants.keys():
        held = constants[v]
        if isinstance(held, Tensor):
            constants[v] = held.detach().contiguous(memory_format=torch.channels_last)
            layouts[v] = Layout(channels_last(v.shape))
    return constants, layouts
