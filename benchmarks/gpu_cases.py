"""The memory-bound kernels: each as composed ops, as torch's fused op where there is one, and its inputs.

Half types are computed in fp32 and rounded at the end, as models write them. `size` is the bytes of the
largest tensor; `odd` makes rows and columns odd, so that nothing is aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensor | Tensors]
EPSILON = 1e-6
COLUMNS = 4096


@dataclass(frozen=True)
class Shape:
    """What the inputs of a case are made from."""

    size: int
    odd: bool
    dtype: torch.dtype
    device: torch.device

    def rows(self, rest: int) -> int:
        """How many rows of `rest` elements make up the size; at least 2, odd where asked for."""
        count = max(2, self.size // self.dtype.itemsize // rest)
        return count - 1 + count % 2 if self.odd and count > 2 else count

    def less(self, extent: int, by: int = 1) -> int:
        """The extent, smaller by `by` where odd sizes are asked for."""
        return extent - by if self.odd else extent

    def random(self, *extents: int) -> Tensor:
        """Normal random numbers."""
        return torch.randn(extents, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Case:
    """A kernel as composed ops, torch's fused op for it, and its inputs."""

    composed: Function
    inputs: Callable[[Shape], Tensors]
    fused: Function | None = None


# --- inputs ----------------------------------------------------------------------


def _matrix(s: Shape) -> Tensors:
    return (s.random(s.rows(COLUMNS), s.less(COLUMNS)),)


def _weighted(s: Shape) -> Tensors:
    return (*_matrix(s), s.random(s.less(COLUMNS)))


def _affine(s: Shape) -> Tensors:
    return (*_weighted(s), s.random(s.less(COLUMNS)))


def _two(s: Shape) -> Tensors:
    (x,) = _matrix(s)
    return x, torch.randn_like(x), s.random(s.less(COLUMNS))


def _logits(classes: int) -> Callable[[Shape], Tensors]:
    def make(s: Shape) -> Tensors:
        x = s.random(s.rows(classes), s.less(classes))
        return x, torch.randint(0, x.shape[1], x.shape[:1], device=s.device)

    return make


def _gate(s: Shape) -> Tensors:
    return (s.random(s.rows(2 * COLUMNS), s.less(2 * COLUMNS, 2)),)


def _images(channels: int, side: int) -> Callable[[Shape], Tensors]:
    def make(s: Shape) -> Tensors:
        side_ = s.less(side)
        x = s.random(s.rows(channels * side * side), channels, side_, side_)
        return x, s.random(channels), s.random(channels)

    return make


def _biased_images(s: Shape) -> Tensors:
    """Channels with a mean of their own: of one near 0 only noise could be compared."""
    x, means, _ = _images(64, 32)(s)
    return (x.add_(means[:, None, None]),)


def _biased_matrix(s: Shape) -> Tensors:
    """Columns with a mean of their own."""
    (x,) = _matrix(s)
    return (x.add_(s.random(x.shape[1])),)


def _pair(s: Shape) -> Tensors:
    (x,) = _matrix(s)
    return x, torch.randn_like(x)


def _heads(s: Shape) -> Tensors:
    return (s.random(s.rows(32 * 128), s.less(32), s.less(128, 2)),)


def _angles(s: Shape) -> Tensors:
    (x,) = _heads(s)
    angle = torch.rand(x.shape[0], x.shape[2] // 2, device=s.device) * 6.28
    return x, angle.cos().to(s.dtype), angle.sin().to(s.dtype)


def _table(s: Shape) -> Tensors:
    """Every row of the table is asked for once."""
    table, weight = _weighted(s)
    return torch.randperm(table.shape[0], device=s.device), table, weight


# --- kernels ---------------------------------------------------------------------


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPSILON)
    return h.to(x.dtype) * w


def _fused_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, EPSILON)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPSILON)
    return (h * w.float() + b.float()).to(x.dtype)


def _fused_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, EPSILON)


def _softmax(x: Tensor) -> Tensor:
    h = x.float()
    e = torch.exp(h - h.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def _cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    h = x.float()
    shifted = h - h.amax(-1, keepdim=True)
    log_softmax = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return -log_softmax.gather(1, target[:, None]).squeeze(1).to(x.dtype)


def _fused_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


def _gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def _residual(x: Tensor, y: Tensor, w: Tensor) -> Tensors:
    z = x + y
    return z, _rms_norm(z, w)


def _fused_residual(x: Tensor, y: Tensor, w: Tensor) -> Tensors:
    z = x + y
    return z, _fused_rms_norm(z, w)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x.float().reshape(x.shape[0], 32, -1)
    h = h - h.mean(-1, keepdim=True)
    h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPSILON)).reshape(x.shape)
    return F.silu(h * w.float()[:, None, None] + b.float()[:, None, None]).to(x.dtype)


def _fused_group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, w, b, EPSILON))


def _statistics(x: Tensor) -> Tensors:
    h = x.float()
    mean = h.mean((0, 2, 3))
    variance = (h - mean[:, None, None]).square().mean((0, 2, 3))
    return mean, torch.rsqrt(variance + EPSILON)


def _fused_statistics(x: Tensor) -> Tensors:
    return torch.batch_norm_stats(x, EPSILON)


def _column_statistics(x: Tensor) -> Tensors:
    h = x.float()
    mean = h.mean(0)
    return mean, torch.rsqrt((h - mean).square().mean(0) + EPSILON)


def _fused_column_statistics(x: Tensor) -> Tensors:
    variance, mean = torch.var_mean(x.float(), 0, correction=0)
    return mean, torch.rsqrt(variance + EPSILON)


def _add(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x + y)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def _embedding(ids: Tensor, table: Tensor, w: Tensor) -> Tensor:
    return _rms_norm(F.embedding(ids, table), w)


def _fused_embedding(ids: Tensor, table: Tensor, w: Tensor) -> Tensor:
    return _fused_rms_norm(F.embedding(ids, table), w)


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(-1)


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0)


def _cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def _argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def _transpose(x: Tensor) -> Tensor:
    return x.t().contiguous()


def _swap(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def _fused_softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


RMS_NORM = "rms norm"

CASES: Mapping[str, Case] = MappingProxyType(
    {
        RMS_NORM: Case(_rms_norm, _weighted, _fused_rms_norm),
        "layer norm": Case(_layer_norm, _affine, _fused_layer_norm),
        "softmax": Case(_softmax, _matrix, _fused_softmax),
        "cross-entropy 32k": Case(_cross_entropy, _logits(32000), _fused_cross_entropy),
        "cross-entropy 128k": Case(_cross_entropy, _logits(128256), _fused_cross_entropy),
        "bias + gelu": Case(_gelu, _weighted),
        "residual + rms norm": Case(_residual, _two, _fused_residual),
        "swiglu gate": Case(_swiglu, _gate),
        "group norm + silu": Case(_group_norm, _images(128, 32), _fused_group_norm),
        "batch-norm statistics": Case(_statistics, _biased_images, _fused_statistics),
        "column statistics": Case(_column_statistics, _biased_matrix, _fused_column_statistics),
        "add + relu": Case(_add, _pair),
        "rotary embedding": Case(_rotary, _angles),
        "row sums": Case(_row_sums, _matrix),
        "column sums": Case(_column_sums, _matrix),
        "cumsum": Case(_cumsum, _matrix),
        "argmax": Case(_argmax, _matrix),
        "transpose": Case(_transpose, _matrix),
        "swap of heads": Case(_swap, _heads),
        "embedding + rms norm": Case(_embedding, _table, _fused_embedding),
    }
)


def compulsory(inputs: Tensors, outputs: Tensors) -> int:
    """Bytes that every version must move: each input read once, each output written once."""
    return sum(t.nbytes for t in (*inputs, *outputs))
