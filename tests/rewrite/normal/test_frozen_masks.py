"""Frozen masks: recognised exactly, refused if one element differs, and gone from the graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.normal_graph import capture, results
from torch import Tensor

from tilewright.analysis.dependence.properties import properties
from tilewright.interp import FLOATS
from tilewright.interp.evaluate import Evaluator
from tilewright.interp.graph import run_graph
from tilewright.ir.dtype import DTYPES, DType, bf16, bool_, f16, f32
from tilewright.ir.expr import Expr, integer
from tilewright.ir.graph import Graph
from tilewright.ir.tensor import output_axes
from tilewright.rewrite.normal import frozen_masks
from tilewright.rewrite.normal.frozen_masks import recognise, recognise_masks

INF = math.inf
SHAPES = [(64, 64), (32, 64), (48, 31), (1, 64), (65, 200)]


def places(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None], torch.arange(columns)[None, :]


MASKS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "causal": lambda i, j, d: j <= i,
    "bottom right": lambda i, j, d: j <= i + d,
    "strictly later": lambda i, j, d: j > i,
    "window": lambda i, j, d: (j <= i + d) & (j > i + d - 9),
    "both sides": lambda i, j, d: (i - j).abs() <= 5,
    "no later than a window ago": lambda i, j, d: j >= i - 7,
    "sinks": lambda i, j, d: (j <= i) & ((j > i - 6) | (j < 4)),
    "sinks, nothing cut off": lambda i, j, d: (j > i - 6) | (j < 3),
    "prefix": lambda i, j, d: (j <= i) | (j < 10),
    "prefix, window": lambda i, j, d: ((j <= i) & (j > i - 6)) | (j < 10),
    "blocks": lambda i, j, d: i // 8 == j // 8,
    "causal blocks": lambda i, j, d: (i // 8 == j // 8) & (j <= i),
    "block causal": lambda i, j, d: j // 8 <= i // 8,
    "padding": lambda i, j, d: (j < 20) & (i >= 0),
    "rows": lambda i, j, d: (i >= 5) & (j >= 0),
}


def element(e: Expr, t: Tensor) -> np.ndarray:
    axes = output_axes(tuple(integer(n) for n in t.shape))
    grid = dict(zip(axes, np.indices(t.shape, sparse=True), strict=True))
    return np.broadcast_to(Evaluator(FLOATS, axes=grid).value(e), t.shape)


def is_exact(e: Expr | None, t: Tensor) -> bool:
    return e is not None and np.array_equal(element(e, t), FLOATS.load(t, e.dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognised(name: str, shape: tuple[int, int]):
    """In every encoding: bools both ways round, numbers, -inf, the lowest number of a type."""
    i, j = places(*shape)
    keep = MASKS[name](i, j, shape[1] - shape[0])
    if name in ("blocks", "causal blocks", "block causal") and min(shape) < 8:
        pytest.skip("less than a block")
    for t, dtype in encodings(keep):
        assert is_exact(recognise(t, dtype), t), (t.dtype, keep.int())


def encodings(keep: Tensor) -> list[tuple[Tensor, DType]]:
    low = torch.finfo(torch.bfloat16).min
    return [
        (keep, bool_),
        (~keep, bool_),
        (keep.float(), f32),
        (torch.zeros(keep.shape).masked_fill(~keep, -INF), f32),
        (torch.zeros(keep.shape, dtype=torch.half).masked_fill(~keep, -INF), f16),
        (torch.zeros(keep.shape, dtype=torch.bfloat16).masked_fill(~keep, low), bf16),
        (keep[None, None], bool_),
        (keep.expand(2, 3, *keep.shape), bool_),
        (keep.repeat(3, 1, 1).int(), DTYPES["i32"]),
    ]


@given(st.sampled_from(sorted(MASKS)), st.integers(0, 63), st.integers(0, 63))
@settings(max_examples=60, deadline=None)
def test_one_other_element_and_it_is_no_mask(name: str, row: int, column: int):
    i, j = places(64, 64)
    keep = MASKS[name](i, j, 0).clone()
    keep[row, column] = not keep[row, column]
    found = recognise(keep, bool_)
    assert found is None or is_exact(found, keep)
    if 8 < row < 60 and 20 < column < 60 and abs(row - column) > 12:
        assert found is None


@pytest.mark.parametrize("t", [
    torch.rand(64, 64) > 0.5,
    torch.rand(64, 64),
    torch.tril(torch.ones(64, 64)) * torch.rand(64, 1),
    torch.tril(torch.ones(64, 64)) + torch.eye(64),
    torch.stack([torch.tril(torch.ones(32, 32)), torch.ones(32, 32)]),
    torch.full((64, 64), math.nan),
    torch.zeros(0, 64),
])  # fmt: skip
def test_other_tensors_are_refused(t: Tensor):
    assert recognise(t, DTYPES[{"bool": "bool", "float32": "f32"}[str(t.dtype)[6:]]]) is None


def test_large_tensors_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    keep = torch.ones(64, 64).tril()
    assert recognise(keep, f32) is not None
    monkeypatch.setattr(frozen_masks, "MODELS", replace(frozen_masks.MODELS, max_mask_elements=4095))
    assert recognise(keep, f32) is None


@pytest.mark.parametrize("value", [0.0, -INF, 2.5])
def test_tensors_of_one_number(value: float):
    for t in (torch.full((), value), torch.full((4, 8, 16), value), torch.full((7,), value)):
        assert is_exact(recognise(t, f32), t)


# --- in a graph


class Masked(torch.nn.Module):
    """Attention weights with a registered buffer, as model code keeps it: one size larger than what is used."""

    def __init__(self, buffer: Tensor, additive: bool) -> None:
        super().__init__()
        self.register_buffer("bias", buffer)
        self.additive = additive

    def forward(self, s: Tensor) -> Tensor:
        m = self.bias[:, :, : s.shape[-2], : s.shape[-1]]
        return torch.softmax(s + m if self.additive else s.masked_fill(~m, -INF), -1)


def frozen(model: torch.nn.Module, *inputs: Tensor, **options: object) -> Graph:
    return capture(model, inputs, frozen=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_buffer_becomes_its_predicate(additive: bool, dynamic: bool):
    keep = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
    buffer = torch.zeros(keep.shape).masked_fill(~keep, -INF) if additive else keep
    scores = torch.randn(2, 3, 20, 20)
    graph = frozen(Masked(buffer, additive), scores, dynamic=[{2: "n", 3: "n"}] if dynamic else ())
    assert graph.constants
    found = recognise_masks(graph)
    found.verify()
    assert not found.constants and len(found.ops) <= len(graph.ops)
    for got, want in zip(run_graph(found, [scores]), run_graph(graph, [scores]), strict=True):
        assert np.array_equal(got, want)
    (region,) = properties(found.ops).regions[results(found)[0]]
    assert region.constant.value == 0


def test_a_buffer_that_is_no_mask_stays():
    graph = frozen(Masked(torch.rand(1, 1, 32, 32) > 0.5, False), torch.randn(2, 3, 32, 32))
    assert recognise_masks(graph) is graph


def test_a_buffer_read_at_positions_from_data_stays():
    """An index out of bounds must raise."""

    class At(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keep", torch.ones(32, 32, dtype=torch.bool).tril())

        def forward(self, s: Tensor, at: Tensor) -> Tensor:
            return s.masked_fill(~self.keep[at], -INF)

    graph = frozen(At(), torch.randn(3, 32), torch.tensor([4, 5, 6]))
    assert recognise_masks(graph).constants
