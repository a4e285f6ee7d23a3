"""Layers: norms, convolutions, pools, attention, recurrent cells, embeddings."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gradients.program import Program, function, module

IMAGE = "B,6,10,8"


class Residual(nn.Module):
    """A layer beside its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """x + layer(x)."""
        return x + self.layer(x)


class Squeeze(nn.Module):
    """Channels scaled by what their means say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x scaled."""
        return x * self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


class Attention(nn.Module):
    """Self-attention of 2 heads: torch's op, or written out."""

    def __init__(self, *, causal: bool = False, written: bool = False, groups: int = 2) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 16 * groups), nn.Linear(16, 16)
        self.causal, self.written, self.groups = causal, written, groups

    def forward(self, x: Tensor) -> Tensor:
        """x is [batch, places, 16]."""
        b, n, _ = x.shape
        q = self.q(x).view(b, n, 2, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, n, 2, self.groups, 8).transpose(1, 3).unbind(2)
        if self.groups == 1:
            k, v = k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)
        if not self.written:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            s = q @ k.transpose(-1, -2) / 8**0.5
            if self.causal:
                s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
            y = s.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, 16))


class Steps(nn.Module):
    """A recurrent cell over a few steps."""

    def __init__(self, cell: nn.Module, *, long: bool = False) -> None:
        super().__init__()
        self.cell, self.long = cell, long

    def forward(self, x: Tensor) -> Tensor:
        """x is [batch, steps, 6]."""
        h = x.new_zeros(x.shape[0], 8)
        c = h
        out: list[Tensor] = []
        for t in range(x.shape[1]):
            if self.long:
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
            out.append(h)
        return torch.stack(out, 1)


class First(nn.Module):
    """The first of a module's results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        """Of the same arguments."""
        return self.inner(*args)[0]


def _rotated(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1], device=x.device)[:, None] / 10.0 ** torch.arange(4, device=x.device)
    a, b = x.chunk(2, -1)
    return torch.cat([a * places.cos() - b * places.sin(), b * places.cos() + a * places.sin()], -1)


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


CONVOLUTIONS = {
    "1x1": partial(nn.Conv2d, 6, 8, 1),
    "3x3": partial(nn.Conv2d, 6, 8, 3, padding=1),
    "no bias": partial(nn.Conv2d, 6, 8, 3, bias=False),
    "stride": partial(nn.Conv2d, 6, 8, 3, stride=2, padding=1),
    "dilated": partial(nn.Conv2d, 6, 8, 3, dilation=2, padding=2),
    "grouped": partial(nn.Conv2d, 6, 12, 3, groups=3, padding=1),
    "depthwise": partial(nn.Conv2d, 6, 6, 3, groups=6, padding=1),
    "multiplied": partial(nn.Conv2d, 6, 18, 3, groups=6, padding=1),
    "same": partial(nn.Conv2d, 6, 8, 4, padding="same"),
    "reflect": partial(nn.Conv2d, 6, 8, 3, padding=1, padding_mode="reflect"),
    "circular": partial(nn.Conv2d, 6, 8, 3, padding=1, padding_mode="circular"),
    "transposed": partial(nn.ConvTranspose2d, 6, 8, 3),
    "transposed stride": partial(nn.ConvTranspose2d, 6, 8, 4, stride=2, padding=1),
    "transposed grouped": partial(
        nn.ConvTranspose2d, 6, 8, 3, groups=2, stride=2, output_padding=1, padding=1
    ),
    "oblong": partial(nn.Conv2d, 6, 8, (1, 5), stride=(2, 1), padding=(0, 2)),
}
NORMS = {
    "batch norm": partial(nn.BatchNorm2d, 6),
    "batch norm without weights": partial(nn.BatchNorm2d, 6, affine=False),
    "batch norm untracked": partial(nn.BatchNorm2d, 6, track_running_stats=False),
    "batch norm cumulative": partial(nn.BatchNorm2d, 6, momentum=None),
    "instance norm": partial(nn.InstanceNorm2d, 6, affine=True),
    "group norm": partial(nn.GroupNorm, 3, 6),
    "one group": partial(nn.GroupNorm, 1, 6),
    "layer norm of three dims": partial(nn.LayerNorm, [6, 10, 8]),
    "layer norm of the last": partial(nn.LayerNorm, 8),
    "layer norm without weights": partial(nn.LayerNorm, 8, elementwise_affine=False),
    "rms norm": partial(nn.RMSNorm, 8),
    "local response": partial(nn.LocalResponseNorm, 3),
}
POOLS = {
    "max": partial(nn.MaxPool2d, 2),
    "max overlapping": partial(nn.MaxPool2d, 3, stride=2, padding=1),
    "max dilated": partial(nn.MaxPool2d, 2, dilation=2),
    "max rounded up": partial(nn.MaxPool2d, 3, stride=2, ceil_mode=True),
    "avg": partial(nn.AvgPool2d, 2),
    "avg padded": partial(nn.AvgPool2d, 3, stride=2, padding=1, count_include_pad=False),
    "avg rounded up": partial(nn.AvgPool2d, 3, stride=2, ceil_mode=True),
    "adaptive avg 1": partial(nn.AdaptiveAvgPool2d, 1),
    "adaptive avg": partial(nn.AdaptiveAvgPool2d, (3, 5)),
    "adaptive max": partial(nn.AdaptiveMaxPool2d, (3, 4)),
    "power": partial(nn.LPPool2d, 2, 3),
    "fractional": partial(nn.Upsample, scale_factor=0.5, mode="area"),
}
ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.ELU, nn.SELU, nn.CELU, nn.Hardswish, nn.Hardsigmoid, nn.Tanh,
    nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.PReLU, nn.LeakyReLU, nn.ReLU6,
)  # fmt: skip

PROGRAMS: tuple[Program, ...] = (
    *(module(f"conv {n}", c, IMAGE) for n, c in CONVOLUTIONS.items()),
    module("conv 1d", lambda: nn.Conv1d(6, 8, 3, padding=1), "B,6,20"),
    module("conv 1d transposed", lambda: nn.ConvTranspose1d(6, 8, 4, stride=2), "B,6,20"),
    module("conv 3d", lambda: nn.Conv3d(4, 6, 3, padding=1), "B,4,5,6,4"),
    module("conv 3d transposed", lambda: nn.ConvTranspose3d(4, 6, 2, stride=2), "B,4,3,4,3"),
    *(module(n, c, IMAGE) for n, c in NORMS.items()),
    module("batch norm 1d", lambda: nn.BatchNorm1d(12), "B8,12"),
    module("batch norm 3d", lambda: nn.BatchNorm3d(4), "B,4,3,4,5"),
    module("batch norm in evaluation", lambda: nn.BatchNorm2d(6).eval(), IMAGE),
    function("rms norm by hand", _rms, "B,7,16", weights=((16,),)),
    *(module(f"pool {n}", c, IMAGE) for n, c in POOLS.items()),
    module("pool max 1d", lambda: nn.MaxPool1d(3, 2), "B,6,21"),
    module("pool max 3d", lambda: nn.MaxPool3d(2), "B,3,4,6,4"),
    module("pool avg 1d", lambda: nn.AvgPool1d(3, 2), "B,6,21"),
    module("pool avg 3d", lambda: nn.AvgPool3d(2), "B,3,4,6,4"),
    function("unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), IMAGE),
    function("activations", lambda x, *w: tuple(a(x) for a in _activations[:10]), "B,40"),
    function("more activations", lambda x, *w: tuple(a(x) for a in _activations[10:16]), "B,40"),
    module("prelu by channel", lambda: nn.PReLU(6), IMAGE),
    function("glu", lambda x: F.glu(x, 1), "B,12,5"),
    function("gelu of tanh", lambda x: F.gelu(x, approximate="tanh"), "B,40"),
    module(
        "conv norm relu",
        lambda: nn.Sequential(
            nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1)
        ),
        IMAGE,
    ),
    module(
        "residual block",
        lambda: nn.Sequential(
            Residual(
                nn.Sequential(
                    nn.Conv2d(6, 6, 3, padding=1),
                    nn.BatchNorm2d(6),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(6, 6, 3, padding=1),
                    nn.BatchNorm2d(6),
                )
            ),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 10),
        ),
        IMAGE,
    ),
    module(
        "inverted residual",
        lambda: Residual(
            nn.Sequential(
                nn.Conv2d(6, 24, 1),
                nn.BatchNorm2d(24),
                nn.ReLU6(),
                nn.Conv2d(24, 24, 3, padding=1, groups=24),
                nn.BatchNorm2d(24),
                nn.Hardswish(),
                Squeeze(24),
                nn.Conv2d(24, 6, 1),
            )
        ),
        IMAGE,
    ),
    module("squeeze and excite", lambda: Squeeze(6), IMAGE),
    module("attention", Attention, "B,9,16"),
    module("attention causal", lambda: Attention(causal=True), "B,9,16"),
    module("attention written", lambda: Attention(written=True), "B,9,16"),
    module("attention written causal", lambda: Attention(written=True, causal=True), "B,9,16"),
    module("attention grouped", lambda: Attention(written=True, groups=1), "B,9,16"),
    module(
        "multi-head attention",
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        "B,9,16",
    ),
    module(
        "decoder layer",
        lambda: nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True),
        "B,5,16",
        "B,9,16",
    ),
    function(
        "attention with a bias",
        lambda q, k, v, b: ((q @ k.mT) / 3 + b).softmax(-1) @ v,
        "B,2,7,9",
        "B,2,8,9",
        "B,2,8,5",
        weights=((2, 7, 8),),
    ),
    function(
        "attention masked by data",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m.float()),
        "B,2,7,8",
        "B,2,7,8",
        "B,2,7,8",
        "B,1,7,7:b",
    ),
    function(
        "attention with soft cap",
        lambda q, k, v: (((q @ k.mT) / 9).tanh() * 9).softmax(-1) @ v,
        "B,2,7,8",
        "B,2,7,8",
        "B,2,7,8",
    ),
    function(
        "linear attention",
        lambda q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v),
        "B,9,8",
        "B,9,8",
        "B,9,8",
    ),
    function("rotary", _rotated, "B,7,8"),
    module("rnn cell", lambda: Steps(nn.RNNCell(6, 8)), "B,4,6"),
    module("gru cell", lambda: Steps(nn.GRUCell(6, 8)), "B,4,6"),
    module("lstm cell", lambda: Steps(nn.LSTMCell(6, 8), long=True), "B,4,6"),
    module("gru", lambda: First(nn.GRU(6, 8, batch_first=True)), "B,5,6"),
    module("lstm of two layers", lambda: First(nn.LSTM(6, 8, 2, batch_first=True)), "B,5,6"),
    module(
        "lstm of both directions", lambda: First(nn.LSTM(6, 8, batch_first=True, bidirectional=True)), "B,5,6"
    ),
    module("mlp", lambda: nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 7)), "B,12"),
    module(
        "mlp of three dims", lambda: nn.Sequential(nn.Linear(12, 20), nn.SiLU(), nn.Linear(20, 7)), "B,5,12"
    ),
    module("bilinear layer", lambda: nn.Bilinear(5, 6, 7), "B,5", "B,6"),
    module("embedding", lambda: nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8)), "B,7:i11"),
    module("embedding with padding", lambda: nn.Embedding(11, 8, padding_idx=0), "B,7:i11"),
    module("embedding scaled", lambda: nn.Embedding(11, 8, scale_grad_by_freq=True), "B,7:i11"),
    module("embedding bag", lambda: nn.EmbeddingBag(11, 8, mode="mean"), "B,7:i11"),
    module("embedding bag of maxima", lambda: nn.EmbeddingBag(11, 8, mode="max"), "B,7:i11", plain=True),
)

_activations = tuple(a() for a in ACTIVATIONS if a is not nn.PReLU)
