"""Kernels of every family, by the function that they compute and what it is given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tests.support.corpus import Case
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.corpus import entry
from torch import Tensor

from tilewright.ir.program import TileProgram

Function = Callable[..., object]
Making = tuple[Function, tuple[Tensor, ...]]


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def halves(*shape: int) -> Tensor:
    return floats(*shape, dtype=torch.float16)


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def logits(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).float() / q.shape[-1] ** 0.5


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """Softmax of scores; `seen` tells of a query and a key, which are counted from the end, whether it is seen."""
    s = logits(q, k)
    i = torch.arange(s.shape[-2])[:, None] + (s.shape[-1] - s.shape[-2])
    j = torch.arange(s.shape[-1])[None]
    s = s if seen is None else torch.where(seen(i, j), s, float("-inf"))
    return torch.softmax(s, -1).to(v.dtype) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, lambda i, j: j <= i)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, lambda i, j: (j <= i) & (i - j < 64))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four heads share each head of keys."""
    return attention(q, *(x.repeat_interleave(4, 1) for x in (k, v)))


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(logits(q, k) + bias, -1).to(v.dtype) @ v


def by_document(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    s = torch.where(ids[:, None] == ids[None, :], logits(q, k), float("-inf"))
    return torch.softmax(s, -1).to(v.dtype) @ v


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def masked_softmax(x: Tensor) -> Tensor:
    mask = torch.arange(x.shape[-1])[None] <= torch.arange(x.shape[-2])[:, None]
    return torch.softmax(torch.where(mask, x, float("-inf")), -1)


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)


HEADS = (halves(1, 2, 256, 64),) * 3
ROWS = floats(64, 1000)

KERNELS: dict[str, Making] = {
    "pointwise": (lambda x: F.silu(x) * 2 + 1, (halves(64, 256),)),
    "broadcast": (lambda x, b, c: torch.tanh(x + b) * c, (ROWS, floats(1000), floats(64, 1))),
    "row_sum": (lambda x: x.sum(-1), (ROWS,)),
    "column_sum": (lambda x: x.sum(0), (floats(256, 128),)),
    "split_sum": (lambda x: x.sum(), (floats(1 << 21),)),
    "split_moments": (lambda x: torch.var_mean(x, (1, 2)), (floats(2, 1024, 1024),)),
    "variance": (lambda x: torch.var_mean(x, -1), (ROWS,)),
    "softmax": (lambda x: torch.softmax(x, -1), (ROWS,)),
    "masked_softmax": (masked_softmax, (floats(2, 128, 128),)),
    "log_sum_exp": (lambda x: torch.logsumexp(x, -1), (ROWS,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (1024,), w, b), (halves(64, 1024), halves(1024), halves(1024))),
    "rms_norm": (rms_norm, (ROWS, floats(1000))),
    "running_sum": (lambda x: torch.cumsum(x, -1), (ROWS,)),
    "argmax": (lambda x: x.argmax(-1), (ROWS,)),
    "gather": (lambda x, i: x.gather(1, i), (ROWS, indices(64, 8))),
    "embedding": (lambda w, i: F.embedding(i, w) * 8, (floats(100, 64), indices(4, 32))),
    "concat": (lambda x, y: torch.cat((x, y + 1), 1), (floats(64, 48), floats(64, 80))),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 0)), (floats(8, 30, 30),)),
    "transpose": (lambda x: x.transpose(0, 1).contiguous(), (floats(256, 128),)),
    "average_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), (floats(2, 8, 32, 32),)),
    "resample": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False),
        (floats(1, 4, 16, 16),),
    ),
    "quantise": (quantised, (ROWS, floats(64, 1))),
    "dequantise": (lambda x, s: x.to(torch.float16) * s, (floats(64, 256, dtype=torch.int8), halves(64, 1))),
    "matmul_skinny": (lambda x, w: x @ w + 1, (halves(1, 512), halves(512, 256))),
    "attention": (attention, HEADS),
    "attention_causal": (causal, HEADS),
    "attention_window": (window, HEADS),
    "attention_grouped": (grouped, (halves(1, 8, 128, 64), halves(1, 2, 128, 64), halves(1, 2, 128, 64))),
    "attention_decode": (attention, (halves(1, 2, 1, 64), halves(1, 2, 2048, 64), halves(1, 2, 2048, 64))),
    "attention_bias": (biased, (*HEADS, floats(256, 256))),
    "attention_documents": (by_document, (*HEADS, indices(256))),
}  # fmt: skip


# What a library would do, as one kernel all the same.
PRODUCTS: dict[str, Making] = {
    "matmul_epilogue": (
        lambda x, w, b: F.gelu(x @ w + b, approximate="tanh"),
        (halves(128, 256), halves(256, 128), halves(128)),
    ),
    "matmul_fp32": (lambda x, w: torch.relu(x @ w), (floats(128, 64), floats(64, 128))),
}


@dataclass(frozen=True)
class Given(Case):
    """A case of inputs that are at hand."""

    tensors: tuple[Tensor, ...] = ()

    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        return list(self.tensors)


def programs_for(machine: str, name: str) -> tuple[list[TileProgram], tuple[str, ...]]:
    """The tile programs of a function on a machine, and its sizes."""
    if name in PRODUCTS:
        function, inputs = PRODUCTS[name]
        made = entry(Given(name, function, (), (), (), inputs), False, machine)  # type: ignore[arg-type]
        return [made.scheduled.program], made.symbols
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = compiled(*KERNELS[name], machine=machine)
    return [k.program for k in device.kernels], device.symbols
