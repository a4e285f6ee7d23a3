"""Tensors that have no memory: a compiled graph refuses them, and what it is called in that makes them."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright
from tilewright.errors import UnsupportedError


def program(x: Tensor) -> Tensor:
    """Anything that kernels compute."""
    return x.sin() * x


@pytest.mark.parametrize("entry", [tilewright.compile, partial(torch.compile, backend="tilewright")])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_read_no_memory_that_is_not_there(
    entry: Callable[..., Any], warm: bool, dynamic: bool
) -> None:
    x, mode = torch.randn(5), FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(x)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(fake, 0)
    fast = entry(program)
    if warm:
        fast(x)
    with pytest.raises(UnsupportedError, match="with a fake tensor"):
        fast(fake)
    for given in (x, fake):
        with mode, pytest.raises(UnsupportedError, match="under FakeTensorMode"):
            fast(given)
    torch.testing.assert_close(fast(x), program(x))


def test_an_exported_program_that_saw_real_tensors() -> None:
    x = torch.randn(5)
    module = torch.nn.Tanh()
    fast = tilewright.compile(torch.export.export(module, (x,)))
    torch.testing.assert_close(fast(x), module(x))
    with pytest.raises(UnsupportedError, match="with a fake tensor"):
        fast(FakeTensorMode().from_tensor(x))
