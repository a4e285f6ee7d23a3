"""Programs with reductions that wait for each other, and schedules that compute them in one pass."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from tests.support.corpus import Case, entropy
from tests.support.cpp_harness import host_target
from tests.support.one_kernel import capture
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.expr import Axis
from tilewright.ir.form import Form
from tilewright.ir.graph import Graph
from tilewright.ir.schedule import ClassPlan, Role, Schedule, Tiling
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.schedule.cpu.vectors import vector_schedule

ROWS, N = 2, 13


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q[:, None, :] * k[None, :, :]).sum(-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.softmax(scores(q, k), -1)[:, :, None] * v[None, :, :]).sum(1)


def attention_with_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return attention(q, k, v), torch.logsumexp(s, -1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[0])[:, None] - 1 >= torch.arange(k.shape[0])[None, :]
    s = torch.where(place, scores(q, k), float("-inf"))
    return (torch.softmax(s, -1)[:, :, None] * v[None, :, :]).sum(1)


def causal_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows that see nothing are zero: the first one."""
    place = torch.arange(q.shape[0])[:, None] - 1 >= torch.arange(k.shape[0])[None, :]
    p = torch.softmax(torch.where(place, scores(q, k), float("-inf")), -1)
    p = torch.where(place, p, 0.0)
    return (p[:, :, None] * v[None, :, :]).sum(1)


def sink(x: Tensor, s: Tensor) -> Tensor:
    top = torch.maximum(x.amax(-1), s)
    e = torch.exp(x - top[:, None])
    return (e * x).sum(-1) / (e.sum(-1) + torch.exp(s - top))


def relative_entropy(x: Tensor, y: Tensor) -> Tensor:
    p = torch.log_softmax(x, -1)
    return (p.exp() * (p - y)).sum(-1)


def norm_then_product(x: Tensor, w: Tensor) -> Tensor:
    return (F.layer_norm(x, (x.shape[-1],))[:, :, None] * w[None]).sum(1)


def rms_then_product(x: Tensor, w: Tensor) -> Tensor:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    return (y[:, :, None] * w[None]).sum(1)


def skewness(x: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    return (d * d * d).mean(-1)


def deviation(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).abs().mean(-1)


def softmax_of_small(x: Tensor) -> Tensor:
    e = torch.exp(x.amin(-1, keepdim=True) - x)
    return e.sum(-1)


ROW = ((ROWS, N),)
QKV = ((ROWS, 4), (N, 4), (N, 5))
CASES: dict[str, tuple[Case, int]] = {
    "softmax": (Case("softmax", lambda x: torch.softmax(x, -1), ROW, ({1: "n"},)), 2),
    "logsumexp": (Case("lse", lambda x: torch.logsumexp(x, -1), ROW, ({1: "n"},)), 1),
    "entropy": (Case("entropy", entropy, ROW, ({1: "n"},)), 1),
    "relative entropy": (Case("kl", relative_entropy, ROW * 2, ({1: "n"}, {1: "n"})), 1),
    "attention": (Case("attention", attention, QKV), 1),
    "attention and its sizes": (Case("sizes", attention_with_sizes, QKV), 1),
    "causal": (Case("causal", causal, ((6, 4), (6, 4), (6, 5))), 1),
    "causal, zeros": (Case("zeros", causal_zeros, ((6, 4), (6, 4), (6, 5))), 1),
    "sink": (Case("sink", sink, (*ROW, (ROWS,))), 1),
    "minimum": (Case("least", softmax_of_small, ROW), 1),
    "variance": (Case("variance", lambda x: torch.var(x, -1), ROW, ({1: "n"},)), 1),
    "skewness": (Case("skewness", skewness, ROW), 1),
    "layer norm": (Case("norm", lambda x: F.layer_norm(x, (x.shape[-1],)), ROW, ({1: "n"},)), 2),
    "layer norm, product": (Case("product", norm_then_product, (*ROW, (N, 5))), 1),
    "rms norm, product": (Case("rms", rms_then_product, (*ROW, (N, 5))), 1),
    "log softmax, largest": (Case("largest", lambda x: torch.log_softmax(x, -1).amax(-1), ROW), 1),
    "mean absolute deviation": (Case("mad", deviation, ROW), 2),
}


def roles(form: Form, streamed: Axis, tile: int, **more: object) -> Schedule:
    """All of `streamed` in steps of `tile`, the rest one by one."""
    made = vector_schedule(form, host_target(), NO_HINTS)
    plans = [ClassPlan(c.axis, c.role) for c in made.tiling.classes if c.role is Role.GRID]
    rest = [c.axis for c in made.tiling.classes if c.role is not Role.GRID and c.axis != streamed]
    kept = {a for i in form.items if streamed in i.reduce for a in i.kept}
    plans += [
        ClassPlan(a, Role.RESIDENT, next_power_of_two(NO_HINTS.estimate(a.extent))) for a in rest if a in kept
    ]
    plans += [ClassPlan(streamed, Role.STREAMED, tile)]
    plans += [ClassPlan(a, Role.STREAMED) for a in rest if a not in kept]
    return Schedule(Tiling(tuple(plans), streamed if tile > 1 else None)).changed(online=True, **more)


def online_class(form: Form) -> Axis:
    """The class of the cascade: the one that most folds reduce."""
    classes = [c for f in form.folds.values() for c in f.reduce]
    return max(classes, key=classes.count)


@cache
def graph_of(name: str, dynamic: bool = False) -> Graph:
    return capture(CASES[name][0], dynamic)
