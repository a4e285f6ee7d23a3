"""One process of a group for test_recipes.py: trains a small model by a recipe of docs/distributed.md, and alone."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilewright

RECIPES = Path(__file__).parents[2] / "docs" / "distributed.md"
WIDTH, STEPS, ROWS = 32, 3, 8


class Layer(nn.Module):
    """A product up, a product down, added to what came."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def recipe(name: str) -> Callable[..., nn.Module]:
    """A function of the document."""
    blocks = re.findall(r"```python\n(.*?)```", RECIPES.read_text(encoding="utf-8"), re.S)
    (text,) = [b for b in blocks if f"def {name}(" in b]
    names: dict[str, Callable[..., nn.Module]] = {}
    exec(compile(text, str(RECIPES), "exec"), names)
    return names[name]


def made(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def rows(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64).to(dtype)


def whole(t: Tensor) -> Tensor:
    full = getattr(t, "full_tensor", None)
    return (t if full is None else full()).detach()


def train(model: nn.Module, inner: nn.Module, given: Callable[[int], Tensor]) -> list[Tensor]:
    """Losses of some steps, then the weights."""
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
    found: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(given(step)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(whole(p) for p in inner.parameters())]


def alone(shared: bool, dtype: torch.dtype) -> list[Tensor]:
    """What one process computes of the rows of all, in eager."""
    size = dist.get_world_size()
    model = made(dtype)

    def given(step: int) -> Tensor:
        return torch.cat([rows(step, rank, dtype) for rank in range(size if shared else 1)])

    return train(model, model, given)


def main(name: str, folder: str) -> None:
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank = dist.get_rank()
    parts = name != "tensor_parallel"
    inner = made()
    model = recipe(name)(inner)
    found = train(model, inner, lambda step: rows(step, rank if parts else 0, torch.float32))
    graphs = tilewright.compilations()
    facts = {
        "graphs": len(graphs),
        "kinds": sorted({g.kind for g in graphs}),
        "generated": sum(g.coverage.generated for g in graphs),
        "collectives": sum("c10d" in c.name for g in graphs for c in g.calls),
    }
    torch.save(
        {
            "found": found,
            "eager": alone(parts, torch.float32),
            "exact": alone(parts, torch.float64),
        },
        Path(folder) / f"{rank}.pt",
    )
    (Path(folder) / f"{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
