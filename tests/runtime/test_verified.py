"""The net for wrong results: what is planted is named, what is right passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from tilewright import accuracy
from tilewright.emit import cpp
from tilewright.errors import BrokenPromise, WrongResult
from tilewright.runtime import steps

VERIFY = {"verify": True}


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = cpp.emit_units

    def wrong(*given: object) -> Sequence[object]:
        made = emit(*given)  # type: ignore[arg-type]
        assert any("1.5f" in source.text for source in made)
        return [type(s)(**{**_fields(s), "text": s.text.replace("1.5f", "1.6f")}) for s in made]

    def _fields(s: object) -> dict[str, object]:
        return {name: getattr(s, name) for name in s.__dataclass_fields__}  # type: ignore[attr-defined]

    x = torch.randn(64, 32)

    def run(x: Tensor) -> Tensor:
        return torch.tanh(x * 1.5).sum(-1)

    assert torch.allclose(tilewright.compile(run, (x,), options=VERIFY)(x), run(x), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("tilewright.building.emit_units", wrong)
    fast = tilewright.compile(run, (x,), options=VERIFY | {"cache": False})
    with pytest.raises(WrongResult, match="sum gave another result in the inference graph.*kernel 0") as told:
        fast(x)
    assert "test_verified.py:" in told.value.place


def test_a_wrong_kernel_of_the_backward_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> Tensor:
        return torch.tanh(x * 1.5).sum()

    given = torch.randn(64, 32, requires_grad=True)
    fast = torch.compile(run, backend=tilewright.backend, options=VERIFY)
    judge = accuracy.compare

    def failing(*given: Tensor, **more: object) -> accuracy.Verdict:
        made, eager, exact = given
        return judge(made + 1, eager, exact, **more)  # type: ignore[arg-type]

    loss = fast(given)
    monkeypatch.setattr(accuracy, "compare", failing)
    monkeypatch.setattr("tilewright.runtime.verified._in_ulps", lambda *_: float("inf"))
    with pytest.raises(WrongResult, match="gave another result in the backward graph") as told:
        loss.backward()
    assert "test_verified.py:" in told.value.place


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
