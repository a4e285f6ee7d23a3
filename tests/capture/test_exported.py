"""An exported program runs at every size that its author has allowed, those too that a trace takes for others."""

# Torch has no public name for a check of sizes.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fp64_rule import wrong
from torch import Tensor
from torch.export import Dim

import tilewright
from tilewright.errors import InputError


class Module(torch.nn.Module):
    def __init__(self, run: Callable[..., object]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Tensor) -> object:
        return self.run(*args)


def compiled(
    run: Callable[..., object], given: Sequence[Tensor], dims: Sequence[object]
) -> Callable[..., object]:
    program = torch.export.export(Module(run), tuple(given), dynamic_shapes=(tuple(dims),), strict=False)
    return tilewright.compile(program, options={"contractions": "inside", "measure": False})


def causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with the sums of its columns; queries stand at the end."""
    far = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1]) - torch.arange(k.shape[1])
    p = torch.softmax((q @ k.transpose(-1, -2)).masked_fill(far < 0, -torch.inf), -1)
    return p @ v, p.sum(1)


BATCH, QUERIES, KEYS = Dim("batch", min=1, max=64), Dim("queries", min=1), Dim("keys", min=1)


def test_one_of_everything() -> None:
    def draw(b: int, s: int, t: int) -> tuple[Tensor, ...]:
        return torch.randn(b, s, 16), torch.randn(b, t, 16), torch.randn(b, t, 24)

    ready = compiled(causal, draw(2, 9, 13), [{0: BATCH, 1: QUERIES}, *[{0: BATCH, 1: KEYS}] * 2])
    draws = [draw(*sizes) for sizes in ((2, 9, 13), (1, 1, 1), (1, 2, 17), (3, 1, 130))]
    found = wrong(causal, ready, draws)
    assert not found, found
    with pytest.raises(InputError, match=r"a size is 65, outside its range 1 \.\. 64"):
        ready(*draw(65, 1, 1))


def test_one_of_a_program_from_a_file(tmp_path: Path) -> None:
    """Torch reads a size with its author's range, asks while it traces whether it is 1, and guards that."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
    program = torch.export.export(model, (torch.randn(4, 6),), dynamic_shapes=({0: BATCH},))
    torch.export.save(program, path := tmp_path / "model.pt2")
    ready = tilewright.compile(str(path))
    for rows in (1, 4, 64):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(ready(x), model(x))
    with pytest.raises(InputError, match=r"65, outside its range 1 \.\. 64"):
        ready(torch.randn(65, 6))


SQUEEZED: dict[str, Callable[[Tensor], Tensor]] = {
    "a dim": lambda x: x.squeeze(0) * 2,
    "dims": lambda x: x.squeeze((0, 1)) * 2,
    "all": lambda x: x.squeeze() * 2,
    "in the middle": lambda x: x.transpose(0, 1).squeeze(1).sum(0),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_one_of_what_is_squeezed(name: str, tmp_path: Path) -> None:
    """With 1 the dim would go: results would have other shapes than those of the graph."""
    run = SQUEEZED[name]
    program = torch.export.export(Module(run), (torch.randn(4, 3, 5),), dynamic_shapes=(({0: BATCH},),))
    torch.export.save(program, path := tmp_path / "model.pt2")
    for ready in (tilewright.compile(program), tilewright.compile(str(path))):
        x = torch.randn(3, 3, 5)
        torch.testing.assert_close(ready(x), run(x))
        with pytest.raises(InputError, match="the sizes do not fulfil"):
            ready(x[:1])


def test_a_squeeze_of_what_is_never_one() -> None:
    ready = compiled(lambda x: x.squeeze(1).squeeze(0), [torch.randn(4, 1, 5)], [{0: Dim("rows", min=2)}])
    for rows in (2, 5):
        x = torch.randn(rows, 1, 5)
        torch.testing.assert_close(ready(x), x[:, 0])


def test_none_at_all() -> None:
    def norm(x: Tensor) -> tuple[Tensor, Tensor]:
        return x / (x.square().sum(-1, keepdim=True) + 1), x.sum(0)

    ready = compiled(norm, (torch.randn(4, 6),), [{0: Dim("rows")}])
    for rows in (0, 1, 5):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(ready(x), norm(x))


def two(x: Tensor, n: Tensor) -> Tensor:
    """Holds that a number of data is 2."""
    rows: Any = n.item()
    torch._check(rows == 2)
    return x.view(rows, 8) * 2


def half(x: Tensor, n: Tensor) -> Tensor:
    """Holds that a number of data is half of a size."""
    rows: Any = n.item()
    torch._check(rows * 2 == x.shape[0])
    return x.view(rows, 2, 4) * 2


@pytest.mark.parametrize("program", [two, half])
def test_what_a_program_holds_of_a_number_is_checked(program: Callable[..., Tensor]) -> None:
    """Torch goes on with what the number is held to be, and its own check of that compares it with itself."""
    x, good = torch.randn(4, 4), torch.tensor(2)
    ready = compiled(program, (x, good), [None, None])
    torch.testing.assert_close(ready(x, good), program(x, good))
    for other in (0, 3, -2):
        with pytest.raises(RuntimeError, match="a number is 2 in this program"):
            ready(x, torch.tensor(other))
