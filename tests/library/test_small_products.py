"""Products that are done before a library's call has found its way are kernels, unless they would gather its weight."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import pytest
import torch
from tests.support.library_calls import calls, captured
from torch import Tensor, nn

import tilewright
from tilewright.accuracy import compare
from tilewright.library.select import select
from tilewright.target import PRESETS
from tilewright.tuning.thresholds import LIBRARY

SMALL = 2.0 * 24 * 64 * 32


class Product(nn.Module):
    """Of its operand and of a weight, with a bias."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inside, outside))
        self.bias = nn.Parameter(torch.randn(outside))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_small_products_of_what_is_not_frozen_are_generated() -> None:
    fits, larger, x = Product(64, 32), Product(64, 33), torch.randn(24, 64)
    assert calls(select(captured(fits, [x], frozen=False), small=SMALL)) == []
    assert calls(select(captured(larger, [x], frozen=False), small=SMALL)) == ["aten.addmm"]
    assert calls(select(captured(fits, [x], frozen=False))) == ["aten.addmm"]


def test_small_products_of_frozen_weights_are_generated_and_larger_ones_are_calls() -> None:
    x = torch.randn(24, 64)
    assert calls(select(captured(Product(64, 32), [x], frozen=True), small=SMALL)) == []
    assert calls(select(captured(Product(64, 33), [x], frozen=True), small=SMALL)) == ["aten.addmm"]


@pytest.mark.parametrize(("rows", "called"), [(LIBRARY.max_gathering_rows, False), (33, True)])
def test_many_rows_do_not_gather_columns_that_lie_apart(rows: int, called: bool) -> None:
    graph = captured(nn.Linear(8, 16), [torch.randn(rows, 8)], frozen=True)
    assert calls(select(graph, small=1e9)) == ["aten.addmm"] * called
    graph = captured(Product(8, 16), [torch.randn(rows, 8)], frozen=True)
    assert calls(select(graph, small=1e9)) == []


def test_products_of_unknown_size_are_calls() -> None:
    graph = captured(Product(2, 2), [torch.randn(6, 2)], frozen=False, dynamic=[[True, False]])
    assert calls(select(graph, small=1e9)) == ["aten.addmm"]


def test_convolutions_are_calls() -> None:
    graph = captured(nn.Conv2d(2, 2, 1), [torch.randn(1, 2, 3, 3)], frozen=False)
    assert calls(select(graph, small=1e9)) == ["aten.convolution"]


def test_processors_say_how_small_and_gpus_say_none() -> None:
    limits = {name: target.small_product for name, target in PRESETS.items()}
    assert limits["x86-64-v4"] > limits["x86-64"] > 0 and limits["sm_90"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_of_small_layers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    tilewright.reset()
    model = nn.Sequential(nn.Linear(32, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 16)).to(dtype)
    x = torch.randn(12, 32, dtype=dtype)

    def gradients(call: object, on: nn.Module, given: Tensor) -> list[Tensor]:
        on.zero_grad(set_to_none=True)
        call(given).square().sum().backward()  # type: ignore[operator]
        return [p.grad for p in on.parameters() if p.grad is not None]

    wide = nn.Sequential(nn.Linear(32, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 16)).double()
    wide.load_state_dict({n: t.double() for n, t in model.state_dict().items()})
    ours = gradients(torch.compile(model, backend=tilewright.backend), model, x)
    ours = [g.clone() for g in ours]
    eager, exact = gradients(model, model, x), gradients(wide, wide, x.double())
    for trio in zip(ours, eager, exact, strict=True):
        verdict = compare(*trio)
        assert verdict.passed, str(verdict)
    assert all(c.coverage.ops == c.coverage.generated for c in tilewright.compilations())
