"""Small models that defects are planted in: dense, normalised, convolved, attending, with integers and gathers. Their
products are just large enough to be calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dense(nn.Module):
    """Two products around a norm, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(24, 96), nn.LayerNorm(96), nn.Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 24] to [rows, 24]."""
        return F.softmax(self.second(F.gelu(self.norm(self.first(x)))), -1)


class Convolved(nn.Module):
    """Two convolutions, a batch norm, a mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, 12, 12] to [n, 5]."""
        x = F.silu(self.second(F.relu(self.norm(self.first(x)))))
        return self.head(x.mean((2, 3)))


class Attending(nn.Module):
    """An embedding, attention in plain ops, running sums, the largest three."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.into, self.out = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """[4, 64] to [4, 64, 3]."""
        x = self.table(ids)
        q, k, v = self.into(x).view(4, 64, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(4, 64, 32)
        return (x + self.out(mixed)).cumsum(1).topk(3, -1).values


class Folded(nn.Module):
    """Folds of several kinds over rows and columns, without a product. In training there is no extremum among them: see
    the limit in `tilewright.bisection`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 33))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[40, 33] to [33], [40] and [40, 33]."""
        y = torch.exp(-x.abs() * self.scale) + 0.5
        z = x * y
        largest = z.logsumexp(1) if self.training else z.amax(1)
        return y.sum(0), largest, (y - y.mean(1, keepdim=True)).tanh()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dense": (Dense, lambda: torch.randn(128, 24)),
    "convolved": (Convolved, lambda: torch.randn(2, 3, 12, 12)),
    "attending": (Attending, lambda: torch.randint(0, 50, (4, 64))),
    "folded": (Folded, lambda: torch.randn(40, 33)),
}


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model with its inputs, the same in every process."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]
    return module(), (inputs(),)
