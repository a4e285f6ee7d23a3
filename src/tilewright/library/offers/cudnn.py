"""Convolutions of cuDNN that add a bias, a second tensor, and take the positive part, while they write their result.

y = max(x * w + b + z, 0) in one pass, summed in fp32: of a convolution and a pass over its result, only the first stays
(benchmarks/results/h200/cudnn_fused.json).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Expr, slot, substitute
from tilewright.ir.graph import LibraryCall, Operand, Routine, bind
from tilewright.ir.ops import pointwise
from tilewright.ir.ops.epilogue import template
from tilewright.ir.sizes import dims
from tilewright.ir.task import Convolution

from .offer import Epilogue, Fusible, channels_last


@dataclass(frozen=True)
class RectifiedConvolution(Routine):
    """max(x * w + b, 0), or max(x * w + b + z, 0) if something is `added`, for operands x, w, b (may be None), z; the
    result has its channels innermost."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    added: bool = False

    def bind(self) -> Callable[..., Tensor]:
        """What runs."""
        window = (self.stride, self.padding, self.dilation, self.groups)
        if self.added:
            with_sum = torch.cudnn_convolution_add_relu
            return lambda x, w, b, z: _laid(with_sum(_laid(x), w, _laid(z), 1.0, b, *window))
        alone = torch.cudnn_convolution_relu
        return lambda x, w, b: _laid(alone(_laid(x), w, b, *window))


def _laid(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, eq=False)
class FusibleConvolution(Fusible):
    """A convolution as the program asks for it, of `operands` tensors, which may take a sum and a ReLU."""

    plain: LibraryCall
    task: Convolution
    operands: int

    def bind(self) -> Callable[..., object]:
        """What runs: the convolution alone."""
        return bind(self.plain.function)

    def epilogues(self) -> Sequence[Epilogue]:
        """See `Fusible`."""
        positive, both = _templates(self.task.dtype)
        return (
            Epilogue(positive, lambda _, __: self._rectified(added=False)),
            Epilogue(both, lambda _, __: self._rectified(added=True), "equal"),
        )

    def _rectified(self, *, added: bool) -> LibraryCall:
        plain, t = self.plain, self.task
        routine = RectifiedConvolution(t.stride, t.padding, t.dilation, t.groups, added)
        further = (Operand(self.operands),) if added else ()
        lacking = (None,) * (self.operands - len(plain.wants))
        wants = (*plain.wants, *lacking, plain.strides[0]) if added else plain.wants
        return replace(
            plain, name="cudnn.convolution_relu", function=routine, args=(*plain.args[:3], *further), kwargs=(),
            wants=wants, task=None, bias=None, reuses=-1, spare=None,
        )  # fmt: skip


@functools.cache
def _templates(dtype: DType) -> tuple[Expr, Expr]:
    """max(e0, 0) and max(e0 + e1, 0)."""
    positive = template(pointwise.relu, dtype=dtype)
    total = template(pointwise.add, tensors=2, dtype=dtype)
    return positive, substitute(positive, {slot("e", 0, dtype): total})


def fusible(call: LibraryCall, operands: int) -> LibraryCall | None:
    """The call as one that may take an epilogue; None for one of which cuDNN has no such form: it has one for images of
    half types whose channels lie innermost. Which kernel it takes, and so whether NaN stays NaN, hangs on the sizes:
    these must be known."""
    task = call.task
    if not isinstance(task, Convolution) or task.transposed or not task.dtype.is_half or len(task.shape) != 4:
        return None
    if any(dims.static(n) is None for n in (*task.x_shape, *task.shape)):
        return None
    laid = channels_last(task.shape)
    sized = zip(call.strides[0], laid, task.shape, strict=True) if call.strides else ()
    if not call.strides or not all(n is dims.ONE or dims.equal(a, b) for a, b, n in sized):
        return None
    return replace(call, function=FusibleConvolution(call, task, operands))
