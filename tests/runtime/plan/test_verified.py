"""The net for wrong results: what is planted is named, what is right passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from tilewright import accuracy
from tilewright.emit.cpp import unit
from tilewright.errors import BrokenPromise, WrongResult
from tilewright.pipeline.backends import executables
from tilewright.plan.data import Launch
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.loops.native import NativeLoop
from tilewright.runtime.plan import steps
from tilewright.runtime.plan.call_results import Act, Tensors
from tilewright.runtime.plan.verified import UNWRITTEN, Checks, Look, Sizes, checks_of

VERIFY = {"verify": True}
EMIT = unit.emit_units
STEPS = 80


def wrong_units(*given: object) -> Sequence[object]:
    """Sources in which 1.5 became 1.6."""
    made = EMIT(*given)  # type: ignore[arg-type]
    return [replace(s, text=s.text.replace("1.5f", "1.6f")) for s in made]


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 32)

    def run(x: Tensor) -> Tensor:
        return torch.tanh(x * 1.5).sum(-1)

    assert torch.allclose(tilewright.compile(run, (x,), options=VERIFY)(x), run(x), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("tilewright.pipeline.backends.cpu.emit_units", wrong_units)
    fast = tilewright.compile(run, (x,), options=VERIFY | {"cache": False})
    with pytest.raises(WrongResult, match="sum gave another result in the inference graph.*kernel 0") as told:
        fast(x)
    assert "test_verified.py:" in told.value.place


def test_a_wrong_kernel_of_the_backward_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> Tensor:
        return torch.tanh(x * 1.5).sum()

    given = torch.randn(64, 32, requires_grad=True)
    fast = torch.compile(run, backend=tilewright.backend, options=VERIFY)
    compare = accuracy.compare

    def failing(*given: Tensor, **more: object) -> accuracy.Verdict:
        made, eager, exact = given
        return compare(made + 1, eager, exact, **more)  # type: ignore[arg-type]

    loss = fast(given)
    monkeypatch.setattr(accuracy, "compare", failing)
    monkeypatch.setattr("tilewright.runtime.plan.verified._in_ulps", lambda *_: float("inf"))
    with pytest.raises(WrongResult, match="gave another result in the backward graph") as told:
        loss.backward()
    assert "test_verified.py:" in told.value.place


@pytest.mark.parametrize("level", [True, UNWRITTEN])
def test_what_a_kernel_leaves_unwritten_is_not_right_by_chance(
    level: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory between kernels still holds what the call before has written there, of the same inputs."""
    around, x = Checks.around_launch, torch.randn(64, 32)
    runs: list[int] = []

    def once(self: Checks, launch: Launch, act: Act, look: Look, sizes: Sizes) -> list[Act]:
        def lazy(tensors: Tensors) -> None:
            if launch.kernel not in runs:
                act(tensors)
            runs.append(launch.kernel)

        return around(self, launch, lazy, look, sizes)

    monkeypatch.setattr(Checks, "around_launch", once)
    levels = partial(checks_of, level=level)
    monkeypatch.setattr(executables, "checks_of", lambda cover, plan, _, kind: levels(cover, plan, kind=kind))
    fast = tilewright.compile(lambda x: (x * 1.5).tanh().exp(), (x,), options={"fusion": "none"})
    assert bool(fast(x).isfinite().all())
    if level is True:
        with pytest.raises(WrongResult, match="kernel 0"):
            fast(x)
    else:
        assert bool(fast(x).isnan().all())


def test_a_wrong_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(64, 96), torch.randn(96, 300)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return torch.cumsum(torch.relu(x @ w), 0).sort(-1).values

    plain = steps.unwrapped
    with monkeypatch.context() as patch:
        patch.setattr(
            steps, "unwrapped", lambda f: _off(plain(f)) if "sort" in str(f) and _first() else plain(f)
        )
        taken: list[int] = []

        def _first() -> bool:
            taken.append(1)
            return len(taken) == 1

        with pytest.raises(WrongResult, match="sort gave another result"):
            tilewright.compile(run, (x, w), options=VERIFY)(x, w)
    tilewright.compile(run, (x, w), options=VERIFY)(x, w)


def _off(function: Callable[..., object]) -> Callable[..., object]:
    def off(*given: object, **named: object) -> object:
        made = function(*given, **named)
        return tuple(t + 1 for t in made)  # type: ignore[attr-defined]

    return off


@pytest.mark.parametrize("level", [True, "results"])
def test_a_result_that_is_its_operands_memory_is_named(
    level: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(8, 16)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y.sort(-1).values, y

    def same(a: Tensor, *more: object, **named: object) -> tuple[Tensor, Tensor]:
        return a, torch.sort(a, -1).indices

    plain = steps.unwrapped
    monkeypatch.setattr(steps, "unwrapped", lambda f: same if "sort" in str(f) else plain(f))
    with pytest.raises(BrokenPromise, match="is memory of an operand"):
        tilewright.compile(run, (x,), options={"verify": level})(x)


@pytest.mark.gpu
def test_on_a_gpu_a_wrong_call_is_named_and_right_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(64, 96, device="cuda"), torch.randn(96, 300, device="cuda", requires_grad=True)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(torch.softmax(x @ w, -1), 0.3).sort(-1).values.cumsum(0)

    fast = torch.compile(run, backend=tilewright.backend, options=VERIFY | {"cuda_graphs": True})
    torch.manual_seed(3)
    fast(x, w).square().sum().backward()
    assert w.grad is not None and bool(w.grad.isfinite().all())
    compare = accuracy.compare

    def failing(*given: Tensor, **more: object) -> accuracy.Verdict:
        made, eager, exact = given
        return compare(made + 1, eager, exact, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(accuracy, "compare", failing)
    monkeypatch.setattr("tilewright.runtime.plan.verified._in_ulps", lambda *_: float("inf"))
    with pytest.raises(WrongResult, match="gave another result in the forward graph"):
        fast(x, w)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.out = torch.nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.norm(self.conv(x))), 0.3, self.training)
        return torch.log_softmax(self.out(x.mean((2, 3))), -1).topk(3).values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_random_numbers_buffers_and_halves_passes(dtype: torch.dtype) -> None:
    model = _Model().to(dtype)
    fast = torch.compile(model, backend=tilewright.backend, options=VERIFY)
    x = torch.randn(4, 3, 8, 8, dtype=dtype)
    torch.manual_seed(3)
    loss = fast(x).sum()
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    model.eval()
    assert torch.allclose(fast(x), model(x), rtol=0.05, atol=0.05)


def test_inputs_that_are_written_and_free_sizes_pass() -> None:
    def run(x: Tensor, i: Tensor) -> Tensor:
        x.mul_(2)
        x[0].add_(1)
        return x.index_select(0, i).cumsum(0).sort(0).values

    fast = torch.compile(run, backend=tilewright.backend, dynamic=True, options=VERIFY)
    for n in (5, 9):
        x, i = torch.randn(n, 6), torch.tensor([1, 0, 1])
        y = x.clone()
        assert torch.allclose(fast(x, i), run(y, i)) and torch.equal(x, y)


def walk(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """A state that goes through all rows, and what it was at each."""
    states: list[Tensor] = []
    for row in x:
        h = torch.tanh(h * 1.5 + row)
        states.append(h)
    return h, torch.stack(states)


def walked(**more: object) -> tuple[Tensor, Tensor]:
    """What the compiled loop gives under `verify`."""
    given = torch.randn(STEPS, 3, 8), torch.randn(3, 8)
    fast = tilewright.compile(walk, given, options=VERIFY | more)
    assert "tilewright_loop" in str(fast.coverage)
    made = fast(*given)
    torch.testing.assert_close(made, walk(*given))
    return made  # type: ignore[return-value]


def test_a_right_loop_passes_and_runs_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    run, runs = NativeLoop.__call__, [0]

    def counted(*given: object) -> object:
        runs[0] += 1
        return run(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeLoop, "__call__", counted)
    walked()
    assert runs == [1]


def test_a_wrong_kernel_inside_a_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = iter([wrong_units])  # the body's kernels are printed before those around the loop
    monkeypatch.setattr(
        "tilewright.pipeline.backends.cpu.emit_units", lambda *given: next(prints, EMIT)(*given)
    )
    wrong = "in step 0 of a loop, .* gave another result in the loop graph.*kernel 0"
    with pytest.raises(WrongResult, match=wrong) as told:
        walked(cache=False)
    assert "test_verified.py:" in told.value.place


def test_a_loop_that_goes_wrong_without_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = NativeLoop.__call__

    def a_step_short(
        self: NativeLoop, steps: int, most: int, *rest: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], int]:
        ends, stacks, done = run(self, steps, most, *rest)  # type: ignore[arg-type]
        return [x.clone() for x in [stacks[0][-2]]], stacks, done

    monkeypatch.setattr(NativeLoop, "__call__", a_step_short)
    with pytest.raises(WrongResult, match="loop gave another result.*result 0 of a loop without Python"):
        walked()


def test_a_loop_whose_steps_are_right_but_in_another_order_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = LoopRunner._stepwise

    def backwards(
        self: LoopRunner, steps: int, state: list[Tensor], sliced: Sequence[Tensor], rest: Sequence[object]
    ) -> tuple[Tensor, ...]:
        return step(self, steps, state, [x.flip(0) for x in sliced], rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LoopRunner, "_stepwise", backwards)
    monkeypatch.setattr("tilewright.runtime.loops.call.native_places", lambda *_: None)
    with pytest.raises(WrongResult, match="^.run. loop gave another result in the inference graph") as told:
        walked()
    assert "test_verified.py:" in told.value.place
