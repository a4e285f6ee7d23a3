"""Calls with a tensor that the program holds, and then another one: the program still reads its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import VerifyError
from tilewright.pipeline import compiler
from tilewright.runtime.call.around.frame import Frame
from tilewright.runtime.call.around.guards import GuardLog
from tilewright.runtime.call.around.reads import Reads
from tilewright.runtime.call.fast_path import key_of

Program = Callable[[Tensor], Tensor]


class Holder(nn.Module):
    """Holds a tensor, and reads it in one of several ways."""

    def __init__(self, read: Callable[[Holder], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.state: Tensor
        self.register_buffer("state", torch.arange(4.0))
        self.deep = SimpleNamespace(items={"a": [self.state]})
        self._hidden = [self.state]

    def forward(self, x: Tensor) -> Tensor:
        return x * 10 + self.read(self)

    def hidden(self) -> Tensor:
        return self._hidden[0]


def of_module(read: Callable[[Holder], Tensor]) -> tuple[Program, Tensor]:
    m = Holder(read)
    return m, m.state


def of_closure(nested: bool) -> tuple[Program, Tensor]:
    held = torch.arange(4.0)
    several = [held]

    def plain(x: Tensor) -> Tensor:
        return x * 10 + held

    def listed(x: Tensor) -> Tensor:
        return x * 10 + several[0]

    return listed if nested else plain, held


PROGRAMS: dict[str, Callable[[], tuple[Program, Tensor]]] = {
    "buffer": lambda: of_module(lambda m: m.state),
    "object": lambda: of_module(lambda m: m.deep.items["a"][0]),
    "hidden": lambda: of_module(Holder.hidden),
    "closure": lambda: of_closure(False),
    "list": lambda: of_closure(True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tensor_that_the_program_holds_is_no_stand_in_for_it(name: str) -> None:
    program, held = PROGRAMS[name]()
    fast = tilewright.compile(program)
    for x in (held, held, torch.zeros(4), held, torch.ones(4)):
        torch.testing.assert_close(fast(x), program(x))


class Frozen(nn.Module):
    """Writes into what it is given, and then reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.arange(9.0).view(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x @ self.weight


@pytest.mark.filterwarnings("ignore:a program was called with inputs that it writes:RuntimeWarning")
@pytest.mark.parametrize("shown", [lambda t: t, lambda t: t.view(3, 3)], ids=["itself", "view"])
def test_a_frozen_weight_that_is_given_to_be_written(shown: Callable[[Tensor], Tensor]) -> None:
    eager, compiled = Frozen(), Frozen()
    fast = tilewright.compile(compiled, (torch.ones(3, 3),), freeze=True)
    for own in (False, False, True, False, True):
        results = [
            f(shown(m.weight) if own else torch.ones(3, 3)) for f, m in ((eager, eager), (fast, compiled))
        ]
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(compiled.weight, eager.weight)


def test_a_key_knows_how_products_on_gpus_may_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are made for torch's switch as it is when they are compiled: another call needs others."""
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    x, before = torch.ones(2), torch.get_float32_matmul_precision()
    keys = list[tuple[object, ...]]()
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            keys.append(key_of((x,), {}))
    finally:
        torch.set_float32_matmul_precision(before)
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.filterwarnings("ignore:runs as captured")
def test_what_the_program_reads_is_looked_at_where_calls_become_short(
    monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    """No call becomes short of a program that runs as captured, and a look at what it reads takes longer than it."""
    looked: list[int] = []
    plain = GuardLog.reads

    def reads(log: GuardLog, number: int, frame: Frame | None) -> Reads | None:
        looked.append(number)
        return plain(log, number, frame)

    def refuse(*_: object) -> None:
        raise VerifyError("a defect", phase="select")

    monkeypatch.setattr(GuardLog, "reads", reads)
    if refused:
        monkeypatch.setattr(compiler, "run_phases", refuse)
    held = torch.arange(4.0)
    fast = tilewright.compile(lambda x: x * 10 + held)
    for x in (torch.ones(4), torch.zeros(4), torch.ones(4)):
        torch.testing.assert_close(fast(x), x * 10 + held)
    assert bool(looked) is not refused
