"""Calls that were known: what makes them others, what their native functions keep, and what they let through."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tilewright
from tilewright.runtime.call import model
from tilewright.runtime.call.fast_path import LONG_WAY, Direct
from tilewright.runtime.call.model import CompiledModel
from tilewright.runtime.objects.known_call import KnownCall, Question, native_call_of
from tilewright.tuning.input_limits import GRAPHS

ENOUGH = 4
"""Calls after which one is known."""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Torch forgets what it was told before and after, and nothing is recorded."""
    tilewright.reset()
    with torch.no_grad():
        yield
    tilewright.reset()


@pytest.fixture
def long_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each call that no native function served, but that was a short one."""
    found: list[int] = []
    served = Direct.__call__

    def counted(self: Direct, *args: Any) -> object:
        found.append(len(found))
        return served(self, *args)

    monkeypatch.setattr(Direct, "__call__", counted)
    return found


class Scaled(nn.Module):
    """Has one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + 1


def begins(result: object) -> float:
    assert isinstance(result, Tensor)
    return float(result[0])


def test_two_callables_of_one_module_see_the_same_weights() -> None:
    module, x = Scaled(), torch.ones(4)
    first = tilewright.compile(module)
    second = copy.copy(first)
    for _ in range(ENOUGH):
        assert begins(first(x)) == begins(second(x)) == 3
    module.weight = nn.Parameter(torch.full((4,), 5.0), requires_grad=False)
    for _ in range(ENOUGH):
        assert begins(first(x)) == 6  # it is compiled anew for the first one
        assert begins(second(x)) == 6


def asks_for_one(x: Tensor, y: Tensor) -> Tensor:
    return x + 1 if x is y else y + 2 * x


ZEROS = torch.zeros(4)


def asks_within(x: Tensor, several: tuple[Tensor, Tensor]) -> Tensor:
    return x + 1 if x is several[1] else x * 2


WAYS: dict[
    str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]
] = {
    "by position": (asks_for_one, lambda x, y: ((x, y), {})),
    "by name": (asks_for_one, lambda x, y: ((), {"x": x, "y": y})),
    "both": (asks_for_one, lambda x, y: ((x,), {"y": y})),
    "in a tuple": (asks_within, lambda x, y: ((x, (ZEROS, y)), {})),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_tensor_given_twice_is_another_call(way: str) -> None:
    program, given = WAYS[way]
    fast, x, y = tilewright.compile(program), torch.ones(4), torch.zeros(4)
    for a, b in ((x, y), (x, y), (x, y), (x, x), (x, y), (x, x), (y, y)):
        args, named = given(a, b)
        torch.testing.assert_close(fast(*args, **named), program(*args, **named))


def test_weights_that_move_leave_calls_known(long_calls: list[int]) -> None:
    module, x = Scaled(), torch.ones(4)
    fast = tilewright.compile(module)
    for _ in range(ENOUGH):
        fast(x)
    seen = len(long_calls)
    for k in range(3):
        module.weight.data = torch.full((4,), float(k))
        for _ in range(ENOUGH):
            assert begins(fast(x)) == k + 1
        assert len(long_calls) == seen + k + 1  # the first of them each time


class Seen(TorchFunctionMode):
    """Writes down which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_no_more_than_before_a_call_is_known() -> None:
    fast, x = tilewright.compile(Scaled()), torch.ones(4)
    sightings: list[list[str]] = []
    for k in range(ENOUGH + 2):
        if k in (1, ENOUGH + 1):  # before and after it is known
            for _ in range(2):  # torch sees the mode for the first time
                with Seen() as mode:
                    fast(x)
            sightings.append(mode.names)
        fast(x)
    assert sightings[0] == sightings[1]


def test_what_a_signal_raises_while_something_is_asked_is_not_lost() -> None:
    fast, x = tilewright.compile(Scaled()), torch.ones(4)
    fast(x)  # the native side is there

    def interrupted() -> bool:
        raise KeyboardInterrupt

    ran: list[int] = []
    call = native_call_of(
        KnownCall(
            (x,),
            {},
            [Question(interrupted)],
            [(0, None)],
            lambda args: ran.append(1),
            0,
            lambda made: made,
            LONG_WAY,
        )
    )
    assert call is not None
    with pytest.raises(KeyboardInterrupt):
        call(x)
    assert (
        not ran and call(torch.ones(5)) is LONG_WAY
    )  # nothing is asked of a call that brings something else


def test_threads_make_known_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = CompiledModel(mock.Mock())
    monkeypatch.setattr(model, "GRAPHS", replace(GRAPHS, max_known_calls=2))
    short = mock.Mock(known_call=lambda key, args, kwargs: lambda: key)

    def make(thread: int) -> None:
        for k in range(3000):
            fast._shorten((thread, k % 7), short, (), {})

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(make, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(fast._calls) == 2 == len({call() for call in fast._calls})


@pytest.mark.parametrize("freeze", [False, True])
def test_a_dropped_model_leaves_nothing(freeze: bool) -> None:
    """Torch keeps what it has traced until it is reset."""
    module, x = Scaled(), torch.ones(4)
    fast = tilewright.compile(module, options={"freeze": freeze})
    for _ in range(ENOUGH):
        fast(x)
    alive = [weakref.ref(o) for o in (module, module.weight, fast)]
    del module, fast
    tilewright.reset()
    gc.collect()
    assert [r() for r in alive] == [None] * 3


@pytest.mark.parametrize("freeze", [False, True])
def test_old_weights_are_gone_with_the_first_call_of_others(freeze: bool) -> None:
    module, x = Scaled(), torch.ones(4)
    fast = tilewright.compile(module, options={"freeze": freeze})
    for _ in range(ENOUGH):
        fast(x)
    old = weakref.ref(module.weight)
    module.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
    fast(x)
    gc.collect()
    assert old() is None
