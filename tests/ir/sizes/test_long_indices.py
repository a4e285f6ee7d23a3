"""Places that are divided and joined again step by step, and integers whose parts are shared, compile in time."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Expr, read, written
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.linear_form import key_of
from tilewright.tuning.search_limits import EXPRESSIONS

STEPS = 20
MOST_SECONDS = 60
"""What one compilation may take; those that write shared parts out take hours."""

MOST_TEXT = 100_000
"""Characters of all kernels; written out in one another, these indices have millions."""


def _turned(x: Tensor, step: int) -> Tensor:
    for _ in range(STEPS):
        x = x.permute(2, 0, 1).reshape(x.shape[1], -1, x.shape[0])
        x = (x + step).flip(1).roll(3, 0) if step else x.flip(1).roll(3, 0)
    return x


def _texts(step: int) -> int:
    tilewright.reset()
    x = torch.randn(6, 4, 8)
    fast = torch.compile(lambda x: _turned(x, step), backend=tilewright.backend, options={"cache": False})
    assert torch.equal(fast(x), _turned(x, step))
    return sum(len(k.source) for g in tilewright.compilations() for k in g.kernels)


def test_ops_between_views_end_a_kernel_where_indices_become_long() -> None:
    assert _texts(1) < MOST_TEXT


def test_views_of_views_are_stored_where_indices_become_long() -> None:
    assert _texts(0) < MOST_TEXT


def test_integers_that_share_their_parts() -> None:
    def mixed(x: Tensor) -> Tensor:
        for i in range(STEPS):
            x = (x * 3 + x // 2 + x % 5) ^ i
        return x

    x = torch.randint(-1000, 1000, (64,))
    fast = torch.compile(mixed, backend=tilewright.backend, options={"cache": False})
    assert torch.equal(fast(x), mixed(x))


@pytest.mark.parametrize("steps", [12, 30])
def test_integers_made_of_axes_that_share_their_parts(steps: int) -> None:
    def mixed(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0] * x.shape[1])
        for _ in range(steps):
            places = (places * 3 + places // 2 + places % 5) % 1000
        return places.view(x.shape) + x

    tilewright.reset()
    x = torch.randn(300, 300)
    start = time.monotonic()
    fast = torch.compile(mixed, backend=tilewright.backend, options={"cache": False})
    assert torch.equal(fast(x), mixed(x))
    assert time.monotonic() - start < MOST_SECONDS
    assert sum(len(k.source) for g in tilewright.compilations() for k in g.kernels) < MOST_TEXT


def test_keys_of_atoms_are_short_and_differ() -> None:
    def deep(e: Expr, steps: int) -> Expr:
        for k in range(steps):
            e = dims.floordiv(dims.add(e, dims.mod(e, dims.integer(k + 5))), dims.integer(2))
        return e

    a, b = (deep(read(n, [dims.ZERO], i64), STEPS) for n in (0, 1))
    assert written(a) > EXPRESSIONS.max_written_index_nodes
    assert len(key_of(a)) < 100 and key_of(a) != key_of(b)
