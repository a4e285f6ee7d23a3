"""Modes and transforms of torch around a call: what torch then leaves alone, now and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright
from tilewright.errors import UnsupportedError


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Torch forgets what it was told before and after."""
    tilewright.reset()
    yield
    tilewright.reset()


class Counting(TorchDispatchMode):
    """Wants to see each op."""

    def __torch_dispatch__(
        self, func: Callable[..., object], types: Sequence[type], args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        return func(*args, **(kwargs or {}))


def counted(program: Callable[..., Any], x: Tensor) -> object:
    with Counting():
        return program(x)


def mapped(program: Callable[..., Any], x: Tensor) -> object:
    return torch.vmap(program)(x)


@pytest.mark.filterwarnings("ignore:torch gave up compiling torch's own modules:RuntimeWarning")
@pytest.mark.parametrize("around", [counted, mapped])
def test_torchs_own_modules_compile_after_one_of_them_was_left_alone(
    around: Callable[[Callable[..., Any], Tensor], object],
) -> None:
    x = torch.randn(3, 4)
    around(torch.compile(nn.Tanh(), backend="tilewright"), x)
    for module in (nn.Tanh(), nn.Sigmoid()):
        torch.testing.assert_close(tilewright.compile(module)(x), module(x))


def test_a_mode_that_wants_to_see_each_op_is_named_and_leaves_no_trace() -> None:
    x, module = torch.randn(3, 4), nn.Tanh()
    fast = tilewright.compile(module)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="Counting is active"):
            counted(fast, x)
        torch.testing.assert_close(fast(x), module(x))


def written(x: Tensor) -> Tensor:
    y = x.sin()
    y.mul_(2).clamp_(min=-1)
    return y + x


@pytest.mark.parametrize("strict", [False, True])
def test_functionalize_runs_eagerly_and_is_named(strict: bool) -> None:
    """What functionalize gives is refused by torch's own compilers, too. Calls without it are compiled as ever."""
    x = torch.randn(3, 4)
    options = {"strict": strict}
    for fast in (
        tilewright.compile(written, options=options),
        torch.compile(written, backend="tilewright", options=options),
    ):
        for _ in range(2):
            torch.testing.assert_close(fast(x), written(x))
        around = torch.func.functionalize(fast)
        if strict:
            with pytest.raises(Exception, match="functionalize around it"):
                around(x)
        else:
            with pytest.warns(RuntimeWarning, match="functionalize around it.*run in eager mode"):
                torch.testing.assert_close(around(x), written(x))
            torch.testing.assert_close(around(x), written(x))
        torch.testing.assert_close(fast(x), written(x))


def test_code_that_torch_was_told_to_leave_alone_is_named() -> None:
    def program(x: Tensor) -> Tensor:
        return x.sin()

    x = torch.randn(3)
    counted(torch.compile(program, backend="tilewright"), x)
    fast = tilewright.compile(program)
    with pytest.raises(UnsupportedError, match="not to be compiled"):
        fast(x)
    tilewright.reset()
    torch.testing.assert_close(fast(x), program(x))
