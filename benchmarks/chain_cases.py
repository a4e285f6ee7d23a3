"""Chains around products, attention and convolutions, as real models have them: layers in a function of them and x."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Body = Callable[[nn.ModuleDict, Tensor], Tensor]


class Net(nn.Module):
    """Layers by name, and what is computed with them."""

    def __init__(self, layers: Mapping[str, nn.Module], body: Body) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(dict(layers))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """`x` is the main input."""
        return self.body(self.layers, x)


@dataclass(frozen=True)
class Chain:
    """Layers, made anew each time, a function of them, and the sizes of the input."""

    layers: Callable[[], Mapping[str, nn.Module]]
    body: Body
    shape: Sequence[int]

    @property
    def of_images(self) -> bool:
        """Whether its input has a memory format."""
        return len(self.shape) == 4

    def make(self, device: torch.device, dtype: torch.dtype) -> tuple[Net, Tensor]:
        """The net in eval mode, and a random input."""
        torch.manual_seed(0)
        net = Net(self.layers(), self.body).eval().requires_grad_(False)
        return net.to(device, dtype), torch.randn(*self.shape, device=device, dtype=dtype)


def _linear(k: int, n: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(k, n, bias=bias)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _attention(m: nn.ModuleDict, x: Tensor, heads: int, **options: object) -> Tensor:
    q, k, v = (_heads(m[name](x), heads) for name in "qkv")
    return m["o"](_joined(F.scaled_dot_product_attention(q, k, v, **options))) + x  # type: ignore[arg-type]


def _attention_layers(width: int) -> dict[str, nn.Module]:
    return {name: _linear(width, width) for name in "qkvo"}


def _normalised(m: nn.ModuleDict, x: Tensor, heads: int) -> Tensor:
    q, k, v = (_heads(m[name](x), heads) for name in "qkv")
    q, k = (F.normalize(t.float(), dim=-1).to(x.dtype) for t in (q, k))
    return m["o"](_joined(F.scaled_dot_product_attention(q, k, v, scale=10.0))) + x


def _rotary(m: nn.ModuleDict, x: Tensor, heads: int) -> Tensor:
    q, k, v = (_heads(m[name](x), heads) for name in "qkv")
    half = q.shape[-1] // 2
    places = torch.arange(x.shape[1], device=x.device)[:, None]
    angles = places * torch.exp(torch.arange(half, device=x.device) * (-math.log(10000.0) / half))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def turned(t: Tensor) -> Tensor:
        a, b = t[..., :half], t[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    made = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    return m["o"](_joined(made)) + x


def _channels(m: nn.ModuleDict, x: Tensor) -> Tensor:
    q, k, v = (m[name](x).flatten(2).unflatten(1, (8, -1)) for name in "qkv")
    q, k = (F.normalize(t.float(), dim=-1).to(x.dtype) for t in (q, k))
    scores = (q @ k.transpose(-1, -2)).float().softmax(-1).to(x.dtype)
    return m["o"]((scores @ v).flatten(1, 2).view_as(x)) + x


def _conv(i: int, o: int, kernel: int = 3, **options: object) -> nn.Conv2d:
    padding = options.pop("padding", kernel // 2)
    return nn.Conv2d(i, o, kernel, padding=padding, **options)  # type: ignore[arg-type]


def _normed(i: int, o: int, kernel: int = 3, **options: object) -> nn.Sequential:
    return nn.Sequential(_conv(i, o, kernel, bias=False, **options), nn.BatchNorm2d(o))


def _convnext(m: nn.ModuleDict, x: Tensor) -> Tensor:
    made = m["norm"](m["deep"](x).permute(0, 2, 3, 1))
    return x + m["down"](F.gelu(m["up"](made))).permute(0, 3, 1, 2)


def _squeezed(m: nn.ModuleDict, x: Tensor) -> Tensor:
    made = F.silu(m["conv"](x))
    scale = torch.sigmoid(m["up"](F.silu(m["down"](made.mean((2, 3), keepdim=True)))))
    return made * scale + x


def _lora(m: nn.ModuleDict, x: Tensor) -> Tensor:
    return m["full"](x) + 0.5 * m["up"](m["down"](x))


def _modulated(m: nn.ModuleDict, x: Tensor) -> Tensor:
    shift, scale = m["of"](x.mean(1, keepdim=True)).chunk(2, -1)
    return m["out"](F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)


def _mixed(m: nn.ModuleDict, x: Tensor) -> Tensor:
    tokens = m["tokens"](m["norm"](x).transpose(1, 2)).transpose(1, 2)
    return x + tokens


PRODUCTS = {
    f"linear gelu {rows}": Chain(
        lambda: {"a": _linear(1024, 4096)}, lambda m, x: F.gelu(m["a"](x)), (rows, 1024)
    )
    for rows in (16, 256, 4096)
} | {
    f"gated mlp {rows}": Chain(
        lambda: {n: _linear(2048, 5632, False) for n in ("gate", "up")} | {"down": _linear(5632, 2048, False)},
        lambda m, x: m["down"](F.silu(m["gate"](x)) * m["up"](x)) + x,
        (rows, 2048),
    )
    for rows in (16, 256, 2048)
} | {
    "linear relu residual": Chain(
        lambda: {"a": _linear(768, 768)}, lambda m, x: torch.relu(m["a"](x)) + x, (512, 768)
    ),
    "mlp residual norm": Chain(
        lambda: {"a": _linear(768, 3072), "b": _linear(3072, 768), "n": nn.LayerNorm(768)},
        lambda m, x: m["n"](m["b"](F.gelu(m["a"](x))) + x), (2048, 768),
    ),
    "rms norm linear": Chain(
        lambda: {"n": nn.RMSNorm(2048), "a": _linear(2048, 2048, False)}, lambda m, x: m["a"](m["n"](x)), (1024, 2048)
    ),
    "layer norm linear gelu": Chain(
        lambda: {"n": nn.LayerNorm(768), "a": _linear(768, 3072)}, lambda m, x: F.gelu(m["a"](m["n"](x))), (1568, 768)
    ),
    "low rank beside": Chain(
        lambda: {"full": _linear(2048, 2048, False), "down": _linear(2048, 16, False), "up": _linear(16, 2048, False)},
        _lora, (512, 2048),
    ),
    "modulated norm": Chain(
        lambda: {"of": _linear(1152, 2304), "out": _linear(1152, 1152)}, _modulated, (4, 256, 1152)
    ),
    "token mixing": Chain(
        lambda: {"norm": nn.LayerNorm(512), "tokens": nn.Sequential(_linear(196, 256), nn.GELU(), _linear(256, 196))},
        _mixed, (16, 196, 512),
    ),
    "router": Chain(
        lambda: {"a": _linear(2048, 64, False)}, lambda m, x: m["a"](x).float().softmax(-1), (4096, 2048)
    ),
    "small layers": Chain(
        lambda: {f"{n}": _linear(64, 64) for n in range(6)},
        lambda m, x: m["5"](F.relu(m["4"](F.relu(m["3"](F.relu(m["2"](F.relu(m["1"](F.relu(m["0"](x))))))))))),
        (65536, 64),
    ),
    "logits scaled": Chain(
        lambda: {"a": _linear(1024, 32000, False)}, lambda m, x: 30.0 * torch.tanh(m["a"](x) / 30.0), (64, 1024)
    ),
    "sum of two": Chain(
        lambda: {n: _linear(1024, 1024) for n in "ab"}, lambda m, x: torch.tanh(m["a"](x) + m["b"](x.flip(0))),
        (1024, 1024),
    ),
}  # fmt: skip

ATTENTION = {
    f"attention {tokens}": Chain(
        lambda: _attention_layers(768), lambda m, x: _attention(m, x, 12), (batch, tokens, 768)
    )
    for tokens, batch in ((50, 8), (128, 8), (197, 16), (1024, 2))
} | {
    "attention causal": Chain(
        lambda: _attention_layers(1024), lambda m, x: _attention(m, x, 16, is_causal=True), (2, 512, 1024)
    ),
    "attention rotary": Chain(lambda: _attention_layers(1024), lambda m, x: _rotary(m, x, 8), (2, 512, 1024)),
    "attention of unit vectors": Chain(
        lambda: _attention_layers(768), lambda m, x: _normalised(m, x, 12), (8, 197, 768)
    ),
    "channel attention": Chain(
        lambda: {name: _conv(384, 384, 1, bias=False) for name in "qkvo"}, _channels, (4, 384, 32, 32)
    ),
    "window attention": Chain(
        lambda: _attention_layers(96), lambda m, x: _attention(m, x, 3), (1024, 49, 96)
    ),
}

CONVOLUTIONS = {
    "3x3 norm relu": Chain(lambda: {"a": _normed(64, 64)}, lambda m, x: torch.relu(m["a"](x)), (16, 64, 56, 56)),
    "two 3x3": Chain(
        lambda: {"a": _conv(64, 64), "b": _conv(64, 64)}, lambda m, x: torch.relu(m["b"](torch.relu(m["a"](x)))),
        (16, 64, 56, 56),
    ),
    "basic block": Chain(
        lambda: {"a": _normed(128, 128), "b": _normed(128, 128)},
        lambda m, x: torch.relu(m["b"](torch.relu(m["a"](x))) + x), (16, 128, 28, 28),
    ),
    "bottleneck": Chain(
        lambda: {"a": _normed(256, 64, 1), "b": _normed(64, 64), "c": _normed(64, 256, 1)},
        lambda m, x: torch.relu(m["c"](torch.relu(m["b"](torch.relu(m["a"](x))))) + x), (16, 256, 56, 56),
    ),
    "inverted residual": Chain(
        lambda: {"a": _normed(32, 192, 1), "b": _normed(192, 192, groups=192), "c": _normed(192, 32, 1)},
        lambda m, x: m["c"](F.relu6(m["b"](F.relu6(m["a"](x))))) + x, (16, 32, 56, 56),
    ),
    "inverted residual, stride 2": Chain(
        lambda: {"a": _normed(24, 144, 1), "b": _normed(144, 144, groups=144, stride=2), "c": _normed(144, 32, 1)},
        lambda m, x: m["c"](F.relu6(m["b"](F.relu6(m["a"](x))))), (16, 24, 56, 56),
    ),
    "7x7 by channel, norm, mlp": Chain(
        lambda: {
            "deep": _conv(96, 96, 7, groups=96), "norm": nn.LayerNorm(96),
            "up": _linear(96, 384), "down": _linear(384, 96),
        },
        _convnext, (16, 96, 56, 56),
    ),
    "gated by channel": Chain(
        lambda: {"up": _conv(64, 128, 1), "deep": _conv(128, 128, groups=128), "down": _conv(64, 64, 1)},
        lambda m, x: m["down"](F.gelu((h := m["deep"](m["up"](x)))[:, :64]) * h[:, 64:]) + x, (8, 64, 64, 64),
    ),
    "stem": Chain(
        lambda: {"a": _normed(3, 64, 7, stride=2)}, lambda m, x: F.max_pool2d(torch.relu(m["a"](x)), 3, 2, 1),
        (16, 3, 224, 224),
    ),
    "patches": Chain(
        lambda: {"a": _conv(3, 768, 16, stride=16, padding=0), "n": nn.LayerNorm(768)},
        lambda m, x: m["n"](m["a"](x).flatten(2).transpose(1, 2)), (16, 3, 224, 224),
    ),
    "average pool behind": Chain(
        lambda: {"a": _normed(128, 256, stride=2)}, lambda m, x: torch.relu(m["a"](x)).mean((2, 3)), (16, 128, 28, 28)
    ),
    "max pool behind": Chain(
        lambda: {"a": _conv(64, 128)}, lambda m, x: F.max_pool2d(torch.relu(m["a"](x)), 2), (16, 64, 56, 56)
    ),
    "transposed, concat": Chain(
        lambda: {"up": nn.ConvTranspose2d(64, 64, 2, 2), "a": _conv(128, 64)},
        lambda m, x: torch.relu(m["a"](torch.cat([m["up"](x), F.interpolate(x, scale_factor=2)], 1))), (8, 64, 32, 32),
    ),
    "dilated": Chain(
        lambda: {"a": _normed(128, 128, dilation=2, padding=2)}, lambda m, x: torch.relu(m["a"](x)) + x,
        (16, 128, 28, 28),
    ),
    "squeeze and excite": Chain(
        lambda: {"conv": _normed(128, 128), "down": _conv(128, 32, 1), "up": _conv(32, 128, 1)}, _squeezed,
        (16, 128, 28, 28),
    ),
    "branches": Chain(
        lambda: {"a": _normed(256, 64, 1), "b": _normed(256, 64), "c": _normed(256, 64, 5)},
        lambda m, x: torch.relu(torch.cat([m[n](x) for n in "abc"], 1)), (16, 256, 14, 14),
    ),
    "groups": Chain(
        lambda: {"a": _normed(256, 256, groups=8)}, lambda m, x: torch.relu(m["a"](x)) + x, (16, 256, 14, 14)
    ),
    "pixel shuffle": Chain(
        lambda: {"a": _conv(64, 256)}, lambda m, x: F.leaky_relu(F.pixel_shuffle(m["a"](x), 2), 0.1), (4, 64, 64, 64)
    ),
    "silu group norm": Chain(
        lambda: {"n": nn.GroupNorm(32, 128), "a": _conv(128, 128)}, lambda m, x: m["a"](F.silu(m["n"](x))) + x,
        (4, 128, 32, 32),
    ),
    "1x1 silu": Chain(lambda: {"a": _normed(64, 256, 1)}, lambda m, x: F.silu(m["a"](x)), (16, 64, 40, 40)),
    "lateral sum": Chain(
        lambda: {"a": _conv(256, 256, 1)}, lambda m, x: m["a"](x) + F.interpolate(x[:, :, ::2, ::2], scale_factor=2),
        (8, 256, 32, 32),
    ),
}  # fmt: skip

CHAINS: Mapping[str, Chain] = MappingProxyType(PRODUCTS | ATTENTION | CONVOLUTIONS)
