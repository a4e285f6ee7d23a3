"""Losses, and what training does besides: weights tied and frozen, hooks, checkpoints, accumulation, mutation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.gradients.program import Program, function, module


class Tied(nn.Module):
    """An embedding whose table is the last layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        return self.head(torch.tanh(self.inner(self.table(ids))))


class Frozen(nn.Module):
    """Layers of which the middle one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 9), nn.LayerNorm(9), nn.Linear(9, 10), nn.GELU(), nn.Linear(10, 4)
        )
        for p in (*self.layers[1].parameters(), *self.layers[2].parameters()):
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """x is [batch, 8]."""
        return self.layers(x)


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        """x is [batch, 8]."""
        for block in self.blocks:
            x = x + checkpoint(block, self.norm(x), use_reentrant=False)
        return x


class Hooked(nn.Module):
    """A gradient hook on what lies between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x is [batch, 8]."""
        h = self.a(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.5)
        return self.b(h)


class Counting(nn.Module):
    """Buffers that are written: a running mean and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x is [batch, 8]."""
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls += 1
        return self.layer(x - self.mean)


class Scaled(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """3 sin x."""
        ctx.save_for_backward(x)
        return x.sin() * 3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
        """Not quite its derivative."""
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return g * x.cos() * 4


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 5))


def _derivative(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda z: (z @ w).tanh().sum())(x) * x


def _mapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: (row * w).softmax(0).cumsum(0))(x)


def _per_sample(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda v, row: (v @ row).sin().sum()), (None, 0))(w, x)


def _mutating(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z.add_(y).relu_()
    z[:, ::2].mul_(y[:, ::2])
    return z.t_().contiguous() * 3


def _detached(x: Tensor) -> Tensor:
    return x.detach() * x + (x - x.detach()).exp()


def _stacked_loss(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t) + F.nll_loss(x.log_softmax(1), t) * 2


LOSSES: tuple[Program, ...] = (
    function("cross entropy", _stacked_loss, "B,9", "B:i9"),
    function(
        "cross entropy smoothed", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), "B,9", "B:i9"
    ),
    function(
        "cross entropy ignoring",
        lambda x, t: F.cross_entropy(x, t, ignore_index=2, reduction="sum"),
        "B,9",
        "B:i9",
    ),
    function("cross entropy of maps", lambda x, t: F.cross_entropy(x, t), "B,5,4,3", "B,4,3:i5"),
    function("cross entropy of shares", lambda x, t: F.cross_entropy(x, t.softmax(1)), "B,9", "B,9"),
    function(
        "cross entropy weighted",
        lambda x, t, w: F.cross_entropy(x, t, weight=w.exp().detach()),
        "B,9",
        "B:i9",
        weights=((9,),),
    ),
    function("mse", lambda x, y: F.mse_loss(x, y), "B,9", "B,9"),
    function(
        "l1",
        lambda x, y: (F.l1_loss(x, y), F.smooth_l1_loss(x, y, beta=0.5), F.huber_loss(x, y)),
        "B,9",
        "B,9",
    ),
    function("bce", lambda x, y: F.binary_cross_entropy(x, y), "B,9:u", "B,9:u", plain=True),
    function(
        "bce of logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y.detach() + 1),
        "B,9",
        "B,9:u",
    ),
    function(
        "kl", lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), "B,9", "B,9"
    ),
    function(
        "margins",
        lambda x, y: (F.soft_margin_loss(x, y.sign()), F.hinge_embedding_loss(x, y.sign())),
        "B,9",
        "B,9",
    ),
    function("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n), "B,9", "B,9", "B,9"),
    function("multi margin", lambda x, t: F.multi_margin_loss(x, t), "B,9", "B:i9"),
    function(
        "poisson",
        lambda x, y: F.poisson_nll_loss(x, y) + F.gaussian_nll_loss(x, y, y.detach()),
        "B,9",
        "B,9:p",
    ),
    function(
        "contrastive",
        lambda x, y: F.cross_entropy(
            F.normalize(x, dim=1) @ F.normalize(y, dim=1).T / 0.1, torch.arange(x.shape[0], device=x.device)
        ),
        "B,9",
        "B,9",
    ),
    function(
        "focal",
        lambda x, y: (
            F.binary_cross_entropy_with_logits(x, y, reduction="none") * (1 - x.sigmoid()) ** 2
        ).mean(),
        "B,9",
        "B,9:u",
    ),
    function(
        "dice", lambda x, y: 1 - 2 * (x.sigmoid() * y).sum(1) / (x.sigmoid() + y).sum(1), "B,9", "B,9:u"
    ),
    function(
        "ctc",
        lambda x, t: F.ctc_loss(x.log_softmax(2), t + 1, [12] * 4, [3] * 4),
        "12,4,6",
        "4,3:i5",
        fixed=True,
        plain=True,
    ),
)

HABITS: tuple[Program, ...] = (
    module("tied weights", Tied, "B,7:i11"),
    module("frozen weights", Frozen, "B,8"),
    module("checkpointed", Checkpointed, "B,8"),
    module("hooked", Hooked, "B,8"),
    module("buffers", Counting, "B,8"),
    module("accumulated", _mlp, "B,8", drive="accumulate"),
    module("retained", _mlp, "B,8", drive="retain"),
    module("flat gradients", _mlp, "B,8", drive="flat"),
    module("flat gradients of tied weights", Tied, "B,7:i11", drive="flat"),
    module(
        "accumulated convolution",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        "B,3,6,5",
        drive="accumulate",
    ),
    function("torch.func.grad", _derivative, "B,8", weights=((8, 5),)),
    function("torch.func.vmap", _mapped, "B,8", weights=((8,),)),
    function("gradients per sample", _per_sample, "B,8", weights=((5, 8),)),
    function("in place", _mutating, "B,8", "B,8"),
    function("detached", _detached, "B,8"),
    function("a function of one's own", lambda x: Scaled.apply(x) * 2, "B,8"),
    function("a weight used twice", lambda x, w: torch.tanh(torch.tanh(x @ w) @ w), "B,8", weights=((8, 8),)),
    function("results that need none", lambda x: (x * 2, x.argmax(1), x.detach() + 1, x.shape[0]), "B,8"),
    function("a weight that is not used", lambda x, v, w: x @ w, "B,8", weights=((3,), (8, 4))),
    function(
        "weights normed",
        lambda x, v, g: F.linear(x, v * (g / v.norm(dim=1, keepdim=True))),
        "B,8",
        weights=((5, 8), (5, 1)),
    ),
    function(
        "a weight standardised",
        lambda x, w: F.conv2d(
            x, (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        ),
        "B,3,6,5",
        weights=((4, 3, 3, 3),),
    ),
    function("straight through", lambda x: x + (x.round() - x).detach(), "B,8"),
    function(
        "a loss of gradients' sizes",
        lambda x, w: ((x @ w).relu() ** 2).mean() + 0.1 * w.pow(2).sum(),
        "B,8",
        weights=((8, 6),),
    ),
)

PROGRAMS = (*LOSSES, *HABITS)
