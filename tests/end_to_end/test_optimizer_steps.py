"""Steps of optimizers: as eager, with parameters and moments where they lie, in kernels and no calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from tilewright.pipeline.phases import check_phases
from tilewright.plan import Launches, Plan
from tilewright.runtime.plan.layouts import copied_bytes

SHAPES = ((17, 9), (9,), (33, 12), (1,))
Make = Callable[[list[Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "SGD, lr as a tensor": lambda p: SGD(p, lr=torch.tensor(0.1), foreach=True),
    "AdamW": lambda p: AdamW(p, lr=0.01, foreach=True),
    "Adam with maxima": lambda p: Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "RMSprop": lambda p: RMSprop(p, lr=0.01, foreach=True),
}

QUICK = ("SGD, lr as a tensor", "AdamW")


def tensors_of(optimizer: Optimizer, parameters: list[Parameter]) -> list[Tensor]:
    """Parameters and what the optimizer keeps of them."""
    kept = [t for p in parameters for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    return [*(p.detach() for p in parameters), *kept]


def no_further(ours: list[Tensor], captured: list[Tensor], eager: list[Tensor]) -> None:
    """Captured, torch counts steps in fp32, and so is all that hangs on them: we are as it is then, or nearer by far to
    eager mode, which computes with Python's numbers."""
    for a, b, c in zip(ours, captured, eager, strict=True):
        if not torch.allclose(a, b, rtol=1e-12, atol=1e-14):
            assert float((a - c).abs().max()) <= float((b - c).abs().max()) / 20


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS]
)
@pytest.mark.filterwarnings("ignore:Profiler")
def test_a_step_copies_nothing(name: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    first = [torch.randn(s, dtype=torch.float64) for s in SHAPES]
    ours, theirs, exact = ([Parameter(t.clone()) for t in first] for _ in range(3))
    mine, captured, eager = (OPTIMIZERS[name](p) for p in (ours, theirs, exact))
    plans: list[Plan | None] = []
    step = torch.compile(lambda: mine.step(), backend="tilewright")
    plain = torch.compile(lambda: captured.step(), backend="eager")
    with check_phases(lambda phase, state: plans.append(state.plan) if phase == "plan" else None):
        for k in range(3):
            for p, q, r in zip(ours, theirs, exact, strict=True):
                p.grad = torch.randn_like(p)
                q.grad, r.grad = p.grad.clone(), p.grad.clone()
            if k == 2:
                for optimizer in (mine, captured, eager):
                    for group in optimizer.param_groups:
                        group["lr"] = group["lr"] * 0.5
            step()
            plain()
            eager.step()
    no_further(*(tensors_of(*pair) for pair in ((mine, ours), (captured, theirs), (eager, exact))))
    for plan in plans:
        assert plan is not None and len(plan.writes) >= len(SHAPES)
        assert not any(why for _, why in plan.writes)
        assert all(isinstance(s, Launches) for segment in plan.segments for s in segment.steps)
        assert not plan.symbols and copied_bytes(plan, {}) == 0 or plan.symbols


NEW_RATE: dict[str, Make] = {
    "SGD": OPTIMIZERS["SGD"],
    "AdamW": OPTIMIZERS["AdamW"],
    "RMSprop": OPTIMIZERS["RMSprop"],
    "Adagrad": lambda p: Adagrad(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize(
    "name", [n if n == "SGD" else pytest.param(n, marks=pytest.mark.slow) for n in NEW_RATE]
)
@pytest.mark.filterwarnings("ignore:Profiler")
def test_a_learning_rate_that_changes_becomes_an_argument(name: str) -> None:
    torch.compiler.reset()
    first = [torch.randn(s, dtype=torch.float64) for s in SHAPES]
    ours, theirs, exact = ([Parameter(t.clone()) for t in first] for _ in range(3))
    mine, captured, eager = (NEW_RATE[name](p) for p in (ours, theirs, exact))
    step, plans = torch.compile(lambda: mine.step(), backend="tilewright"), list[Plan | None]()
    plain = torch.compile(lambda: captured.step(), backend="eager")
    with check_phases(lambda phase, state: plans.append(state.plan) if phase == "plan" else None):
        for rate in (0.01, 0.02, 0.005, 0.04, 0.03):
            for optimizer in (mine, captured, eager):
                for group in optimizer.param_groups:
                    group["lr"] = rate
            for p, q, r in zip(ours, theirs, exact, strict=True):
                p.grad = torch.randn_like(p)
                q.grad, r.grad = p.grad.clone(), p.grad.clone()
            step()
            plain()
            eager.step()
    no_further(*(tensors_of(*pair) for pair in ((mine, ours), (captured, theirs), (eager, exact))))
    assert len(plans) == 2, (
        "the second rate compiles once more, as torch then knows that it changes; no other does"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Profiler")
def test_a_clipped_step_over_many_tensors_is_a_few_launches() -> None:
    torch.compiler.reset()
    shapes = [(300, 40), (40,), (300, 41)]
    first = [torch.randn(shapes[k % 3], dtype=torch.float64) for k in range(24)]
    ours, theirs, exact = ([Parameter(t.clone()) for t in first] for _ in range(3))
    mine, captured, eager = (OPTIMIZERS["AdamW"](p) for p in (ours, theirs, exact))

    def step() -> Tensor:
        norm = clip_grad_norm_(ours, 1.0, foreach=True)
        mine.step()
        return norm

    plans: list[Plan | None] = []
    compiled = torch.compile(step, backend="tilewright")
    plain = torch.compile(lambda: captured.step(), backend="eager")
    with check_phases(lambda phase, state: plans.append(state.plan) if phase == "plan" else None):
        for _ in range(3):
            for p, q, r in zip(ours, theirs, exact, strict=True):
                p.grad = torch.randn_like(p)
                q.grad, r.grad = p.grad.clone(), p.grad.clone()
            norm = compiled()
            for others in (theirs, exact):
                torch.testing.assert_close(norm, clip_grad_norm_(others, 1.0))
            plain()
            eager.step()
    no_further(*(tensors_of(*pair) for pair in ((mine, ours), (captured, theirs), (eager, exact))))
    steps = [s for p in plans if p is not None for segment in p.segments for s in segment.steps]
    together = [len(x) for s in steps if isinstance(s, Launches) for x in s.together()]
    assert len(together) <= 16 < sum(together), together
