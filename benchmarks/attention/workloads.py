"""Seven attention cores as a user writes them in plain PyTorch, their inputs, and their ONNX files.

All compute softmax(q k^T / sqrt(D) + causal mask) v, the mask aligned to the last query and key; five of them
also keep statistics over the queries, one number per key, by which the caller drops keys from its cache (the
choice itself, a top-k and a gather, is the caller's). Scores have the inputs' type, probabilities and
statistics are fp32.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layout = Literal["bshd", "bhsd"]
Tensors = tuple[Tensor, ...]


class Attention(nn.Module):
    """Causal attention. q, k, v and the result are [B, S, H, D] or [B, H, S, D]; k and v may have fewer heads."""

    def __init__(self, layout: Layout = "bshd") -> None:
        super().__init__()
        self.layout = layout

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, H, S_q, S_kv], not yet masked."""
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def statistics(self, z: Tensor, p: Tensor, noise: Tensor | None) -> Tensors:
        """What is kept besides the result, each [B, H, S_kv], from masked scores and probabilities."""
        return ()

    def probabilities(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Masked scores, probabilities, and the values of each head."""
        if self.layout == "bshd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        z = self.logits(q, k) + causal_mask(q, k)
        return z, torch.softmax(z.float(), dim=-1), v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, noise: Tensor | None = None) -> Tensor | Tensors:
        """The result, and the statistics where there are some."""
        z, p, v = self.probabilities(q, k, v)
        out = p.to(v.dtype) @ v
        if self.layout == "bshd":
            out = out.transpose(1, 2).contiguous()
        kept = self.statistics(z, p, noise)
        return (out, *kept) if kept else out


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, H_kv, S, D] with each head shared by heads / H_kv queries' heads."""
    batch, kv_heads, places, depth = x.shape
    if kv_heads == heads:
        return x
    shared = x[:, :, None].expand(batch, kv_heads, heads // kv_heads, places, depth)
    return shared.reshape(batch, heads, places, depth)


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """[S_q, S_kv]: 0 where a query may see a key, else -inf; the last query sees all keys."""
    queries, keys = q.shape[-2], k.shape[-2]
    hidden = torch.full((queries, keys), float("-inf"), dtype=q.dtype, device=q.device)
    return torch.triu(hidden, diagonal=keys - queries + 1)


class SoftCap(Attention):
    """Gemma 2: scores are capped smoothly before the mask."""

    cap = 50.0

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Capped at +-50."""
        return self.cap * torch.tanh(super().logits(q, k) / self.cap)


class HeavyHitter(Attention):
    """H2O: the attention that each key receives."""

    def statistics(self, z: Tensor, p: Tensor, noise: Tensor | None) -> Tensors:
        """Sums over the queries."""
        return (p.sum(dim=2),)


class RoCo(Attention):
    """RoCo: first and second moment of the attention that each key receives."""

    def statistics(self, z: Tensor, p: Tensor, noise: Tensor | None) -> Tensors:
        """Sums and sums of squares over the queries."""
        return p.sum(dim=2), p.pow(2).sum(dim=2)


class Keyformer(Attention):
    """Keyformer: keys are scored by a second softmax, tempered and perturbed by -log(noise)."""

    temperature = 1.5

    def statistics(self, z: Tensor, p: Tensor, noise: Tensor | None) -> Tensors:
        """Sums of the second softmax; `noise` is positive, fp32, [B, H, S_q, S_kv]."""
        assert noise is not None
        noisy = (z.float() - torch.log(noise)) / self.temperature
        return (torch.softmax(noisy, dim=-1).sum(dim=2),)


class SnapKV(Attention):
    """SnapKV: sums over the queries, averaged over neighbouring keys."""

    pool = 5

    def statistics(self, z: Tensor, p: Tensor, noise: Tensor | None) -> Tensors:
        """The pooled sums."""
        return (F.avg_pool1d(p.sum(dim=2), self.pool, stride=1, padding=self.pool // 2),)


class Corm(Attention):
    """Corm: keys that some query attends to at least as much as to its average key."""

    def averages(self, p: Tensor) -> Tensor:
        """[S_q, 1]: one over the number of keys that a query sees."""
        queries, keys = p.shape[-2:]
        visible = torch.arange(keys - queries + 1, keys + 1, device=p.device)
        return 1 / visible[:, None].float()

    def statistics(self, z: Tensor, p: Tensor, noise: Tensor | None) -> Tensors:
        """Which keys to keep, as bools."""
        return ((p >= self.averages(p)).any(dim=2),)

    def margins(self, p: Tensor) -> Tensor:
        """[B, H, S_kv]: how far some query is above its average; the sign decides."""
        return (p - self.averages(p)).amax(dim=2)

    def deciding(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The margins of one core."""
        return self.margins(self.probabilities(q, k, v)[1])


class Margins(Corm):
    """Corm with the floats behind its bools in their place."""

    def statistics(self, z: Tensor, p: Tensor, noise: Tensor | None) -> Tensors:
        """The margins."""
        return (self.margins(p),)


WORKLOADS: Mapping[str, type[Attention]] = MappingProxyType(
    {
        "vanilla": Attention,
        "gemma2": SoftCap,
        "h2o": HeavyHitter,
        "roco": RoCo,
        "keyformer": Keyformer,
        "snapkv": SnapKV,
        "corm": Corm,
    }
)
STATISTICS = ("h2o", "roco", "keyformer", "snapkv", "corm")


@dataclass(frozen=True)
class Sizes:
    """Sizes of one core; `kv_heads`, `keys` and `value_depth` are like their counterparts where they are 0."""

    queries: int
    heads: int = 32
    depth: int = 128
    batch: int = 1
    keys: int = 0
    kv_heads: int = 0
    value_depth: int = 0

    def inputs(
        self,
        name: str,
        *,
        layout: Layout = "bshd",
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        scale: float = 1.0,
    ) -> Tensors:
        """Random q, k, v and what else the core reads; logits have about the standard deviation `scale`."""
        keys, kv_heads = self.keys or self.queries, self.kv_heads or self.heads

        def normal(places: int, heads: int, depth: int, factor: float) -> Tensor:
            middle = (places, heads) if layout == "bshd" else (heads, places)
            made = torch.randn(self.batch, *middle, depth, device=device)
            return made.mul_(factor).to(dtype)

        root = math.sqrt(scale)
        made = (
            normal(self.queries, self.heads, self.depth, root),
            normal(keys, kv_heads, self.depth, root),
            normal(keys, kv_heads, self.value_depth or self.depth, 1.0),
        )
        if name != "keyformer":
            return made
        return *made, torch.randn(self.batch, self.heads, self.queries, keys, device=device).abs_().add_(1)


def export(module: Attention, inputs: Tensors, folder: Path, stem: str, *, dynamic: bool = False) -> Path:
    """Write `folder/stem.onnx` by rename and return its path. `dynamic`: batch and lengths are free."""
    folder.mkdir(parents=True, exist_ok=True)
    axes = None
    if dynamic:
        place = 1 if module.layout == "bshd" else 2
        axes = {"q": {0: "batch", place: "queries"}} | {n: {0: "batch", place: "keys"} for n in "kv"}
        if len(inputs) > 3:
            axes["noise"] = {0: "batch", 2: "queries", 3: "keys"}
    with tempfile.TemporaryDirectory(dir=folder) as made:
        part = Path(made) / "core.onnx"
        # The exporter that needs no further package; it warns of itself, and of sizes that become constants.
        with open(os.devnull, "w") as sink, contextlib.redirect_stderr(sink), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                copy.deepcopy(module), inputs, str(part), input_names=["q", "k", "v", "noise"][: len(inputs)],
                dynamic_axes=axes, dynamo=False, opset_version=18,
            )  # fmt: skip
        return part.replace(folder / f"{stem}.onnx")
