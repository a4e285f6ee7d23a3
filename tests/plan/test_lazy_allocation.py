"""Memory of training passes: made in front of its first use, given back behind its last."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.pipeline import compiler
from tilewright.pipeline.compiler import Compiled, compile_fx
from tilewright.plan import Home, Plan
from tilewright.tuning.thresholds import MEMORY

SIDE = 1024


def chain(x: Tensor, w: Tensor) -> list[Tensor]:
    """Products with pointwise kernels between them, and one result that is done long before the others."""
    early = torch.relu(x) + 1
    y = torch.relu(x @ w) * 2
    z = torch.tanh(y @ w) + y
    return [early, torch.sin(z @ w) * z]


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    placed = compiler.place_of
    monkeypatch.setattr(compiler, "place_of", lambda *a: replace(placed(*a), lazy_memory=True))
    gm = make_fx(chain, tracing_mode="fake")(*inputs())
    return compile_fx(gm, Options(), trusted=True, kind="forward")


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(SIDE, SIDE, generator=generator),
        torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5,
    ]


def plan_of(made: Compiled) -> Plan:
    plan = made.executable.plan
    assert isinstance(plan, Plan)
    return plan


def test_results_are_the_same(lazy: Compiled) -> None:
    """As those of the plan with an arena, bit by bit."""
    x, w = inputs()
    plain = compile_fx(make_fx(chain, tracing_mode="fake")(x, w), Options(), trusted=True)
    for _ in range(2):
        for got, want in zip(lazy.executable([x, w]), plain.executable([x, w]), strict=True):
            assert isinstance(got, Tensor) and isinstance(want, Tensor) and torch.equal(got, want)


def test_large_buffers_are_made_once_before_their_first_use_and_freed(lazy: Compiled) -> None:
    plan = plan_of(lazy)
    (segment,) = plan.segments
    own = [k for k, b in enumerate(plan.buffers) if b.home is Home.OUTPUT]
    assert own and not any(b.home is Home.ARENA for b in plan.buffers), "all of it is large"
    assert sorted(k for made in segment.makes for k in made) == own
    made = {k: i for i, now in enumerate(segment.makes) for k in now}
    freed = {k: i for i, now in enumerate(segment.frees) for k in now}
    for k in own:
        assert k in plan.outputs or made[k] <= freed[k]
        assert k not in plan.outputs or k not in freed
    assert max(made.values()) > 0, "not all at the start"


def test_small_ones_stay_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = compiler.place_of
    monkeypatch.setattr(compiler, "place_of", lambda *a: replace(placed(*a), lazy_memory=True))
    x, w = (t[:64, :64].contiguous() for t in inputs())
    made = compile_fx(make_fx(chain, tracing_mode="fake")(x, w), Options(), trusted=True, kind="forward")
    homes = [b.home for b in plan_of(made).buffers if b.home is not Home.INPUT]
    assert Home.ARENA in homes and 64 * 64 * 4 < MEMORY.min_lazy_buffer_bytes
    for got, want in zip(made.executable([x, w]), chain(x, w), strict=True):
        assert isinstance(got, Tensor)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_inference_has_one_arena() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = compile_fx(make_fx(chain, tracing_mode="fake")(*inputs()), Options(), trusted=True)
    assert not plan_of(made).segments[0].makes


def test_kernels_alone_keep_no_large_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they run as if all their memory were there at the start."""
    placed = compiler.place_of
    monkeypatch.setattr(compiler, "place_of", lambda *a: replace(placed(*a), lazy_memory=True))

    def columns(x: Tensor) -> list[Tensor]:
        wide = torch.softmax(x, -1)
        return [wide.cumsum(0).sum(1), wide.t().contiguous().cumsum(0)]

    (x, _) = inputs()
    made = compile_fx(make_fx(columns, tracing_mode="fake")(x), Options(), trusted=True, kind="forward")
    plan = plan_of(made)
    in_arena = [dims.static(dims.prod(b.spec.shape)) for b in plan.buffers if b.home is Home.ARENA]
    assert any(plan.segments[0].makes) and all(n is not None and n < SIDE * SIDE for n in in_arena)
    for _ in range(2):
        for got, want in zip(made.executable([x]), columns(x), strict=True):
            assert isinstance(got, Tensor)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
