"""Zeros around an image become part of the convolution that reads it, which then reads the image as it is.

Programs write them as a pass of their own where they are not alike on both sides (a stride of 2 on an even side),
or where they come from another framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from tilewright.ir.expr import axis, call, conjuncts, is_const
from tilewright.ir.graph import Graph, LibraryCall, Op, Operand, Routine, Value, bind
from tilewright.ir.sizes import dims
from tilewright.ir.task import Convolution

from .frozen_operands import Frozen


@dataclass(frozen=True)
class PaddedConvolution(Routine):
    """A convolution behind zeros around its image: `around` as torch's `pad` takes them."""

    of: Callable[..., object]
    around: tuple[int, ...]

    def bind(self) -> Callable[..., object]:
        """What runs."""
        convolution, around = bind(self.of), list(self.around)

        def padded(x: Tensor, *rest: object) -> object:
            return convolution(pad(x, around), *rest)

        return padded


def take_zeros(graph: Graph) -> Graph:
    """The graph with zeros around images inside the convolutions of frozen weights that read them."""
    producer, frozen = graph.producer(), Frozen(graph)
    ops = [_taken(op, producer.get(op.inputs[0]), frozen) if op.inputs else op for op in graph.ops]
    return graph.with_ops(ops) if any(a is not b for a, b in zip(ops, graph.ops, strict=True)) else graph


def _taken(op: Op, maker: Op | None, frozen: Frozen) -> Op:
    given = op.call
    task = given.task if given is not None else None
    if given is None or maker is None or not isinstance(task, Convolution) or task.transposed or task.uneven:
        return op
    around = zeros_around(maker)
    if around is None or any(map(any, around[:2])) or given.args[task.x] != Operand(0):
        return op
    if frozen.tensor(op.inputs[task.weight]) is None or op.inputs.count(op.inputs[0]) > 1:
        return op
    return replace(
        op, call=_padded(given, task, maker.inputs[0], around[2:]), inputs=(maker.inputs[0], *op.inputs[1:])
    )


def _padded(
    given: LibraryCall, task: Convolution, image: Value, around: Sequence[tuple[int, int]]
) -> LibraryCall:
    both = tuple(map(min, around))
    padding = tuple(p + n for p, n in zip(task.padding, both, strict=True))
    rest = tuple((before - n, after - n) for (before, after), n in zip(around, both, strict=True))
    uneven = rest if any(map(any, rest)) else ()
    x, weight, bias, stride, _, *others = given.args
    args = (x, weight, bias, stride, list(padding), *others)
    function = given.function
    if uneven:
        function = PaddedConvolution(function, tuple(n for pair in reversed(uneven) for n in pair))
    task = replace(task, x_shape=image.shape, padding=padding, uneven=uneven)
    return replace(given, function=function, args=args, task=task, lies=(), seen=())


def zeros_around(op: Op) -> tuple[tuple[int, int], ...] | None:
    """How many zeros an op puts in front of and behind each dim of its operand, if it does just that."""
    e = op.expr
    if e is None or not e.is_pointwise or len(op.inputs) != 1 or e.body[0].op != "where":
        return None
    condition, image, zero = e.body[0].args
    if image.op != "read" or not is_const(zero, 0.0) or op.inputs[0].dtype is not op.output.dtype:
        return None
    wanted = set(conjuncts(condition))
    found: list[tuple[int, int]] = []
    for place, index, size in zip(e.axes, image.args, op.inputs[0].shape, strict=True):
        here = dims.ZERO if place.extent is dims.ONE else axis(place)
        shift, behind = dims.static(dims.sub(here, index)), dims.static(dims.sub(place.extent, size))
        if shift is None or behind is None or not 0 <= shift <= behind:
            return None
        low, high = call("ge", index, dims.ZERO), call("lt", index, size)
        if (shift and low not in wanted) or (behind > shift and high not in wanted):
            return None
        wanted -= {low, high}
        found.append((shift, behind - shift))
    return None if wanted else tuple(found)
