"""Programs that the lowering must carry as one kernel: each a torch function with its inputs, static and symbolic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Dims = dict[int, str]


@dataclass(frozen=True)
class Case:
    """A function, input shapes, which dims are dynamic (per input), the dtype, and a maker for integer inputs."""

    name: str
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    dynamic: tuple[Dims, ...] = ()
    high: tuple[int, ...] = ()

    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        """Random inputs; dynamic dims are `scale` times as large. Inputs with a `high` are indices below it."""
        torch.manual_seed(seed)
        made: list[Tensor] = []
        for k, shape in enumerate(self.shapes):
            dims = self.dynamic[k] if k < len(self.dynamic) else {}
            sizes = [s * scale if d in dims else s for d, s in enumerate(shape)]
            high = self.high[k] if k < len(self.high) else 0
            made.append(torch.randint(0, high, sizes) if high else torch.randn(sizes))
        return made


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def group_norm_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 4, w, b))


def cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    return torch.logsumexp(x, -1) - x.gather(1, t[:, None])[:, 0]


def entropy(s: Tensor) -> Tensor:
    p = torch.softmax(s, -1)
    return -(p * torch.log_softmax(s, -1)).sum(-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q[:, :, None, :] * k[:, None, :, :]).sum(-1)
    return (torch.softmax(s, -1)[:, :, :, None] * v[:, None, :, :]).sum(2)


def causal_softmax(x: Tensor) -> Tensor:
    """Probabilities that are stored, also where they are 0."""
    mask = torch.full(x.shape[1:], float("-inf")).triu(x.shape[2] - x.shape[1] + 1)
    return torch.softmax(x / 3 + mask, -1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q[:, :, None, :] * k[:, None, :, :]).sum(-1)
    n = s.shape[-1]
    place = torch.arange(n, device=s.device)
    mask = place[:, None] >= place[None, :]
    s = torch.where(mask, s, float("-inf"))
    return (torch.softmax(s, -1)[:, :, :, None] * v[:, None, :, :]).sum(2)


def gram(x: Tensor) -> Tensor:
    z = x / x.norm(dim=-1, keepdim=True)
    return (z[:, None, :] * z[None, :, :]).sum(-1)


def softmax_plus_transpose(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) + torch.softmax(x, -1).T


def cumsum_plus(x: Tensor) -> Tensor:
    z = torch.sigmoid(x)
    return torch.cumsum(z, -1) + z


def qkv_heads(qkv: Tensor) -> Tensor:
    b, s, n = qkv.shape
    q, k, v = qkv.reshape(b, s, 3, 2, n // 6).permute(2, 0, 3, 1, 4)
    p = torch.softmax((q[..., :, None, :] * k[..., None, :, :]).sum(-1), -1)
    return (p[..., None] * v[..., None, :, :]).sum(-2).transpose(1, 2).reshape(b, s, n // 3)


def window_partition(x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    y = x.reshape(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)
    return F.layer_norm(y, (c,))


def rope(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s


CASES = (
    Case("add_bias_gelu", lambda x, b: F.gelu(x + b), ((37, 130), (130,)), ({0: "n"},)),
    Case(
        "chain", lambda x, y: torch.tanh(x * y + 1).relu() - x.abs(), ((1000,), (1000,)), ({0: "n"}, {0: "n"})
    ),
    Case("softmax", lambda x: torch.softmax(x, -1), ((33, 200),), ({0: "n", 1: "m"},)),
    Case("softmax_small", lambda x: torch.softmax(x, -1), ((5, 7),)),
    Case("log_softmax", lambda x: torch.log_softmax(x, -1), ((33, 129),), ({1: "m"},)),
    Case("softmax_middle", lambda x: torch.softmax(x, 1), ((4, 20, 70),), ({1: "n"},)),
    Case("flatten_softmax", lambda x: torch.softmax(x.flatten(0, 1), -1), ((3, 5, 65),), ({0: "b", 2: "n"},)),
    Case("rms_norm", rms, ((20, 192), (192,)), ({0: "n"},)),
    Case("layer_norm", layer_norm, ((20, 193), (193,), (193,)), ({0: "n"},)),
    Case("group_norm_silu", group_norm_silu, ((2, 8, 6, 5), (8,), (8,)), ({0: "n", 2: "h", 3: "w"},)),
    Case("batch_statistics", lambda x: torch.var_mean(x, (0, 2, 3)), ((3, 6, 5, 4),), ({0: "n", 2: "h"},)),
    Case("column_sum", lambda x: x.sum(0), ((100, 200),), ({0: "n", 1: "m"},)),
    Case("column_max_and_sum", lambda x: (x.amax(0), x.exp().sum(0)), ((50, 90),), ({0: "n"},)),
    Case("row_argmax", lambda x: x.argmax(-1), ((31, 77),), ({0: "n", 1: "m"},)),
    Case("column_argmin", lambda x: x.argmin(0), ((31, 77),)),
    Case("any_all", lambda x: ((x > 1).any(-1), (x > -3).all(-1)), ((31, 77),), ({1: "m"},)),
    Case("cumsum_rows", lambda x: torch.cumsum(x, -1), ((9, 40),), ({1: "m"},)),
    Case("cumsum_columns", lambda x: torch.cumsum(x, 0), ((40, 90),), ({0: "n"},)),
    Case("cumsum_plus", cumsum_plus, ((9, 40),)),
    Case("transpose", lambda x: x.T.contiguous() * 2, ((70, 45),), ({0: "n", 1: "m"},)),
    Case("transpose_add", lambda x, y: x.T + y, ((70, 45), (45, 70))),
    Case("concat", lambda x, y: torch.cat((x, y * 2), 1), ((6, 30), (6, 45)), ({0: "n"}, {0: "n"})),
    Case("concat_rows", lambda x, y: torch.cat((x, y), 0) + 1, ((6, 30), (7, 30))),
    Case("pad", lambda x: F.pad(x, (3, 2, 1, 4)) * 2, ((6, 30),), ({0: "n"},)),
    Case("slice_flip_roll", lambda x: torch.roll(x[:, 2:30:2].flip(1), 3, 1), ((6, 40),), ({0: "n"},)),
    Case("embedding", lambda i, t: F.embedding(i, t) * 3, ((5, 8), (50, 24)), ({1: "s"},), (50,)),
    Case("gather", lambda x, i: x.gather(1, i), ((6, 30), (6, 9)), (), (0, 30)),
    Case("cross_entropy", cross_entropy, ((12, 150), (12,)), ({0: "n"}, {0: "n"}), (0, 150)),
    Case("entropy", entropy, ((9, 77),), ({1: "m"},)),
    Case("max_pool", lambda x: F.max_pool2d(x.relu(), 3, 2, 1), ((2, 3, 13, 15),), ({0: "n"},)),
    Case("avg_pool", lambda x: F.avg_pool2d(x, 2), ((2, 3, 12, 16),), ({0: "n"},)),
    Case("mean_hw", lambda x: x.mean((2, 3)), ((2, 5, 7, 7),), ({0: "n"},)),
    Case(
        "upsample",
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest") + 1,
        ((2, 3, 5, 6),),
        ({0: "n"},),
    ),
    Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2) * 2, ((2, 8, 5, 6),), ({0: "n", 2: "h", 3: "w"},)),
    Case("window_partition", window_partition, ((2, 14, 21, 24),), ({0: "n"},)),
    Case(
        "matmul_bias",
        lambda x, w, b: F.relu((x[:, :, None] * w[None]).sum(1) + b),
        ((9, 20), (20, 33), (33,)),
        ({0: "n"},),
    ),
    Case("gemv", lambda x, w: (x[None, :] * w).sum(-1), ((100,), (30, 100))),
    Case(
        "attention",
        attention,
        ((2, 9, 8), (2, 11, 8), (2, 11, 8)),
        ({0: "b", 1: "s"}, {0: "b", 1: "t"}, {0: "b", 1: "t"}),
    ),
    Case("causal_attention", causal, ((2, 19, 8), (2, 19, 8), (2, 19, 8))),
    Case("causal_softmax", causal_softmax, ((2, 19, 45),), ({1: "s", 2: "t"},)),
    Case("qkv_heads", qkv_heads, ((2, 10, 48),), ({0: "b", 1: "s"},)),
    Case("gram", gram, ((9, 20),)),
    Case("softmax_plus_transpose", softmax_plus_transpose, ((20, 20),)),
    Case("rope", rope, ((3, 4, 16), (4, 16), (4, 16)), ({0: "b"},)),
    Case("two_outputs", lambda x: (x.exp(), x.exp().sum(-1)), ((13, 40),), ({0: "n"},)),
    Case(
        "convolution",
        lambda x, w: F.conv2d(x, w, padding=1).relu(),
        ((2, 3, 8, 9), (5, 3, 3, 3)),
        ({0: "n"},),
    ),
    Case("scalar_output", lambda x: (x * x).sum(), ((40, 50),), ({0: "n"},)),
    Case("zero_dim", lambda x, y: x * y + 1, ((), ())),
)


def columns(rows: int, width: int) -> Case:
    return Case("columns", lambda x: x.sum(0), ((rows, width),))
