"""Convolutions whose windows neither overlap nor leave anything out, as one product of matrices: each window is a row.

    y[n, o, h, w] = sum of x[n, c, h * kh + i, w * kw + j] * weight[o, c, i, j] over c, i, j

What is left over at the end of an image is in no window. Libraries have few blocks for such convolutions, where the
windows are large and few: the first layer of a vision transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.ir.graph import Graph, LibraryCall, Op, Operand, Routine, Value
from tilewright.ir.sizes import dims
from tilewright.ir.task import Convolution
from tilewright.tuning.timing_limits import COMPARISON

from .convolution_layout import CallTimer, Strides
from .offers.offer import channels_last


@dataclass(frozen=True)
class PatchConvolution(Routine):
    """The product of windows and weights; the channels of the result lie innermost."""

    def bind(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """What runs."""
        return _convolved


def _convolved(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    images, channels, *_ = x.shape
    made, _, kh, kw = w.shape
    high, wide = x.shape[2] // kh, x.shape[3] // kw
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    cut = x[:, :, : high * kh, : wide * kw]
    windows = cut.unflatten(2, (high, kh)).unflatten(4, (wide, kw))  # n, c, h, kh, w, kw
    order = (0, 2, 4, 3, 5, 1) if last else (0, 2, 4, 1, 3, 5)
    rows = windows.permute(order).reshape(images * high * wide, channels * kh * kw)
    columns = (w.permute(0, 2, 3, 1) if last else w).reshape(made, channels * kh * kw).t()
    flat = torch.mm(rows, columns) if b is None else torch.addmm(b, rows, columns)
    return flat.view(images, high, wide, made).permute(0, 3, 1, 2)


def multiply_patches(graph: Graph, timer: CallTimer) -> Graph:
    """The graph with such convolutions of halves as products, where `timer` measures these as faster."""
    ops = [_faster(op, graph, timer) for op in graph.ops]
    return graph.with_ops(ops) if any(a is not b for a, b in zip(ops, graph.ops, strict=True)) else graph


def _faster(op: Op, graph: Graph, timer: CallTimer) -> Op:
    call = op.call
    task = call.task if call is not None else None
    if call is None or not isinstance(task, Convolution) or not _cuts_into_patches(op, call, task):
        return op
    last = (channels_last(task.shape),)
    made = replace(
        call, name="patch_convolution", function=PatchConvolution(), args=call.args[:3], kwargs=(), strides=last,
        task=None, bias=None, lies=(), seen=(), reuses=-1, spare=None,
    )  # fmt: skip
    laid = _laid(op.inputs, graph, last=call.strides == last)
    plain, product = (timer.seconds(c, op.inputs, laid) for c in (call, made))
    taken = plain is not None and product is not None and product < COMPARISON.max_preferred_ratio * plain
    return replace(op, call=made) if taken else op


def _cuts_into_patches(op: Op, call: LibraryCall, task: Convolution) -> bool:
    """Whether windows part the image, but for its end."""
    window = op.inputs[1].shape[2:]
    return (
        task.dtype.is_half
        and len(task.shape) == 4
        and not task.transposed
        and task.groups == 1
        and not any(task.padding)
        and set(task.dilation) == {1}
        and max(task.stride) > 1
        and all(dims.static(k) == s for k, s in zip(window, task.stride, strict=True))
        and len(call.strides) == 1
        and (call.args[0], call.args[1]) == (Operand(0), Operand(1))
    )


def _laid(inputs: Sequence[Value], graph: Graph, *, last: bool) -> list[Strides | None]:
    """How the operands lie when they are timed: as they are known to, or as the call would have its image."""
    known = [graph.layouts[v].strides if v in graph.layouts else None for v in inputs]
    made = {v for op in graph.ops for v in op.outputs}
    return [channels_last(inputs[0].shape) if last and inputs[0] in made else known[0], *known[1:]]
