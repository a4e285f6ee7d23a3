"""Calls with a tensor that the program holds, and then another one: the program still reads its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import tilewright
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
