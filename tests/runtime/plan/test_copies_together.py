"""Copies that follow each other: which may run together, and that they then do what they did one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ir.dtype import f32
from tilewright.plan import Home, Spec
from tilewright.plan.data import Buffer
from tilewright.runtime.plan import steps
from tilewright.runtime.plan.steps import independent

OWN = Buffer(Spec(f32, (), ()), Home.OUTPUT)
VIEW_OF_0 = Buffer(Spec(f32, (), ()), Home.VIEW, source=0)


def test_what_is_saved_before_a_write_stays_before_it() -> None:
    buffers = [OWN] * 4
    assert independent([(1, 0), (0, 2), (3, 2)], buffers) == [[(1, 0)], [(0, 2), (3, 2)]]
    assert independent([(0, 2), (1, 0)], buffers) == [[(0, 2)], [(1, 0)]]
    assert independent([(0, 2), (0, 3)], buffers) == [[(0, 2)], [(0, 3)]]
    assert independent([(0, 2), (1, 3)], buffers) == [[(0, 2), (1, 3)]]


def test_a_view_is_the_memory_that_it_shows() -> None:
    assert independent([(1, 3), (0, 2)], [OWN, OWN, OWN, VIEW_OF_0]) == [[(1, 3)], [(0, 2)]]


def test_layouts_and_types_that_differ() -> None:
    base = torch.arange(12.0).view(3, 4)
    sources = [base, base.t().contiguous().t(), base.double(), base[:1].expand(3, 4), torch.tensor(5)]
    targets = [
        torch.zeros(3, 4),
        torch.zeros(3, 4),
        torch.zeros(3, 4),
        torch.zeros(3, 4),
        torch.zeros((), dtype=torch.int64),
    ]
    tensors: list[Tensor | None] = [*targets, *sources]
    steps.copying_all([(k, k + 5) for k in range(5)])(tensors)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))
