"""Calls that are one native function: what they check, how they fail, and that nothing is lost or kept."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, fx

import tilewright
from tilewright.capture.trace import trace
from tilewright.errors import IndexOutOfRange
from tilewright.options import Options
from tilewright.pipeline.compiler import compile_fx
from tilewright.runtime.cpu.kernels import _launchers  # pyright: ignore[reportPrivateUsage]
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.known_sizes import Result
from tilewright.runtime.stats import STATS

Run = Callable[[list[Argument]], list[Result]]


class Module(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def executable(function: Callable[..., object], inputs: Sequence[Tensor]) -> Executable:
    """A function compiled for inputs like these by callers that are trusted."""
    gm: fx.GraphModule = trace(Module(function), inputs, [()] * len(inputs)).gm
    made = compile_fx(gm, Options.make({}), trusted=True).executable
    assert isinstance(made, Executable)
    return made


def is_native(made: Executable) -> bool:
    """Whether its last call was one native function."""
    bound = made._recent  # pyright: ignore[reportPrivateUsage]
    return type(bound and bound.run).__name__ == "builtin_function_or_method"


def several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.relu(x + 1) - y.sum(-1, keepdim=True), y * 2, x.to(torch.float16)


def test_several_results_in_order() -> None:
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    made = executable(several, (x, y))
    run = made.entry()
    for _ in range(3):
        args: list[Argument] = [x, y]
        torch.testing.assert_close(tuple(run(args)), several(x, y))
        assert not args, "the list is emptied"
    assert is_native(made)


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(6, 4).t(),
        torch.randn(5, 6)[1:, :],
        torch.randn(4, 7)[:, 1:],
        torch.randn(1, 6).expand(4, 6),
    ],
    ids=["transposed", "offset", "sliced", "expanded"],
)
def test_inputs_that_lie_otherwise(other: Tensor) -> None:
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    made = executable(several, (x, y))
    run = made.entry()
    run([x, y])
    before, foreign = STATS.input_copies, not other.is_contiguous()
    torch.testing.assert_close(tuple(run([other, y])), several(other, y))
    assert STATS.input_copies == before + foreign
    assert is_native(made)
    torch.testing.assert_close(tuple(run([x, other])), several(x, other))


def test_what_is_no_tensor_raises() -> None:
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    run = executable(several, (x, y)).entry()
    run([x, y])
    with pytest.raises(AttributeError):
        run([3, y])
    with pytest.raises(IndexError):
        run([x])
    torch.testing.assert_close(tuple(run([x, y])), several(x, y))


def test_a_failed_check_raises() -> None:
    table, index = torch.randn(10, 4), torch.tensor([1, 2])
    made = executable(lambda t, i: t[i] * 2, (table, index))
    run = made.entry()
    torch.testing.assert_close(run([table, index])[0], table[index] * 2)
    assert is_native(made)
    for _ in range(3):
        with pytest.raises(IndexOutOfRange):
            run([table, torch.tensor([1, 10])])
    torch.testing.assert_close(run([table, index])[0], table[index] * 2)


def test_nothing_is_kept_and_nothing_lost() -> None:
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    made = executable(several, (x, y))
    run = made.entry()
    shared = (x, y, torch.float16, None, True)
    counts: list[list[int]] = []
    for _ in range(3):
        for _ in range(200):
            run([x, y])
            run([x.t().contiguous().t(), y])
        results = run([x, y])
        seen = [weakref.ref(cast(Tensor, r)) for r in results]
        del results
        assert all(r() is None for r in seen), "results belong to the caller alone"
        gc.collect()
        counts.append([sys.getrefcount(o) for o in shared])
    assert all(abs(a - b) < 100 for a, b in zip(counts[1], counts[2], strict=True))


def test_a_call_outlives_its_executable() -> None:
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    made = executable(several, (x, y))
    made([x, y])
    bound = made._recent  # pyright: ignore[reportPrivateUsage]
    assert bound is not None and bound.run is not None
    call = bound.run
    del made, bound
    gc.collect()
    torch.testing.assert_close(tuple(cast(list[Tensor], call([x, y]))), several(x, y))


def test_threads_share_a_call() -> None:
    inputs = [(torch.randn(4, 6), torch.randn(6, 4).t()) for _ in range(4)]
    run = executable(several, inputs[0]).entry()
    wanted = [several(*pair) for pair in inputs]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(500):
            made = run(list(inputs[k]))
            if not all(torch.equal(cast(Tensor, a), b) for a, b in zip(made[1:], wanted[k][1:], strict=True)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_large_work_lets_other_threads_run() -> None:
    x = torch.randn(1 << 20)
    made = executable(lambda t: torch.exp(t) + 1, (x,))
    torch.testing.assert_close(made([x])[0], torch.exp(x) + 1)
    assert not is_native(made)


def test_many_operands() -> None:
    inputs = [torch.randn(3) for _ in range(100)]
    made = executable(lambda *ts: sum(ts[:20]), inputs)
    torch.testing.assert_close(made(list(inputs))[0], sum(inputs[:20]))
    assert is_native(made)


def test_without_such_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an interpreter without a lock, where two calls could share the table."""
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    kept = _launchers[:]
    _launchers.clear()
    try:
        made = executable(several, (x, y))
        torch.testing.assert_close(tuple(made([x, y])), several(x, y))
        assert not is_native(made)
    finally:
        _launchers[:] = kept


def test_by_either_door() -> None:
    x = torch.randn(8)

    def chain(t: Tensor) -> Tensor:
        return torch.relu(t * 2.0 + 1.0)

    for compiled in (tilewright.compile(chain), torch.compile(chain, backend="tilewright")):
        for _ in range(3):
            torch.testing.assert_close(compiled(x), chain(x))
