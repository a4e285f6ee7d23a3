"""Keys wider than values, and scores that are a sum of two products, in one kernel for a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.end_to_end.attention.split_keys import right
from tests.support.triton.absent_gpu import Device, compiled
from tests.support.triton.harness import Built, build, print_triton
from torch import Tensor

from tilewright.ir.schedule import Role, Schedule
from tilewright.lower.variants import variants
from tilewright.target import MemoryKind, preset

Function = Callable[..., Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    return torch.softmax(torch.where(j <= i, s, float("-inf")), -1).to(v.dtype) @ v


def latent(q: Tensor, k: Tensor) -> Tensor:
    """Values are the first part of keys, which all heads share."""
    return attention(q, k, k[..., : k.shape[-1] * 8 // 9])


def in_two(q: Tensor, k: Tensor, turned_q: Tensor, turned_k: Tensor, v: Tensor) -> Tensor:
    """A part of keys has no heads."""
    s = q @ k.transpose(-1, -2) + turned_q @ turned_k.transpose(-1, -2)
    return torch.softmax(s.float(), -1).to(v.dtype) @ v


def halves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape).mul_(0.5).half() for shape in shapes]


def wide(depth: int, values: int, places: int = 80) -> list[Tensor]:
    return halves((1, 2, places, depth), (1, 2, places, depth), (1, 2, places, values))


CASES: dict[str, tuple[Function, list[Tensor]]] = {
    "192/128": (attention, wide(192, 128, 40)),
    "96/64": (attention, wide(96, 64)),
    "80/16": (attention, wide(80, 16)),
    "72/32": (attention, wide(72, 32)),
    "latent": (latent, halves((1, 2, 80, 288), (1, 1, 80, 288))),
    "two": (in_two, halves((1, 2, 80, 32), (1, 2, 80, 32), (1, 2, 80, 16), (1, 1, 80, 16), (1, 2, 80, 32))),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_of_wide_keys_stay_on_chip(name: str, tmp_path: Path) -> None:
    function, given = CASES[name]
    made = compiled(function, given)
    assert len(made.kernels) == 1
    right(made, function, given, tmp_path)


def built(made: Device, folder: Path) -> Built:
    (kernel,) = made.kernels
    source = print_triton(kernel.program, made.symbols, preset("sm_90"), variants(kernel.program)[0], "k0")
    return build(folder, source, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("values_of_keys", [False, True])
def test_latent_attention_is_built_for_matrix_units(values_of_keys: bool, tmp_path: Path) -> None:
    shape = (1, 16, 4096, 576)
    apart = [torch.empty(shape).half(), torch.empty(shape).half(), torch.empty(1, 16, 4096, 512).half()]
    shared = [torch.empty(shape).half(), torch.empty(1, 1, 4096, 576).half()]
    made = compiled(latent, shared) if values_of_keys else compiled(attention, apart)
    code = built(made, tmp_path)
    level = preset("sm_90").level(MemoryKind.SHARED)
    assert level is not None and code.facts.shared <= level.capacity
    assert "wgmma" in code.text and not re.search(r"\bmma\.sync", code.text)
    assert not values_of_keys or code.facts.spills == 0, "the step on the diagonal stays a loop"
    (kernel,) = made.kernels
    assert isinstance(kernel.schedule, Schedule)
    keys = max(c.tile for c in kernel.schedule.tiling.classes if c.role is Role.STREAMED)
    assert keys == (64 if values_of_keys else 32), (
        "values that are a part of keys take no memory of their own"
    )
