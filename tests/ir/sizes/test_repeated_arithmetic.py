"""Integer arithmetic whose steps square or multiply the terms of what came before grows with its steps alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axis, integer, read, symbol, walk
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.linear_form import linear, may_wrap
from tilewright.tuning.search_limits import LINEAR_FORMS

PLACE = axis(Axis("i", integer(1000)))
DATA = read(0, [PLACE], i64)


def _squares(x: Expr) -> Expr:
    return dims.add(dims.mul(x, x), dims.floordiv(x, integer(2)))


def _parts(x: Expr) -> Expr:
    return dims.add(dims.mul(x, integer(3)), dims.floordiv(x, integer(2)), dims.mod(x, integer(5)))


def _products(x: Expr) -> Expr:
    return dims.mul(x, x)


def _repeated(step: Callable[[Expr], Expr], x: Expr, steps: int) -> Expr:
    for _ in range(steps):
        x = step(x)
    return x


@pytest.mark.parametrize("start", [PLACE, DATA, integer((1 << 63) - 1)])
@pytest.mark.parametrize("step", [_squares, _parts, _products])
def test_expressions_grow_with_their_steps(step: Callable[[Expr], Expr], start: Expr) -> None:
    # Numbers only: pytest would write out an expression of a comparison that fails.
    few, many = (len(walk(_repeated(step, start, steps))) for steps in (60, 120))
    assert many < 2.5 * few + LINEAR_FORMS.max_terms


@pytest.mark.parametrize("step", [_squares, _parts])
def test_what_is_too_long_for_a_form_has_the_same_value(step: Callable[[Expr], Expr]) -> None:
    long = _repeated(step, PLACE, 5)
    for place in (0, 1, 7, 999):
        value = place
        for _ in range(5):
            value = value**2 + value // 2 if step is _squares else value * 3 + value // 2 + value % 5
        assert dims.evaluate(long, {"i": place}) == value


def test_sums_and_products_that_are_atoms_may_wrap_and_have_sound_bounds() -> None:
    far = _repeated(_squares, PLACE, 12)
    wraps, bounds = may_wrap(far), dims.bounds(far)
    assert wraps and bounds == (None, None)
    axes = [axis(Axis(f"a{k}", integer(5))) for k in range(2 * LINEAR_FORMS.max_terms)]
    near = dims.add(*(dims.mul(a, integer(k + 1)) for k, a in enumerate(axes)))
    assert len(linear(near)) <= LINEAR_FORMS.max_terms and not may_wrap(near)
    assert dims.int_range(near) == (0, sum(4 * (k + 1) for k in range(len(axes))))


def test_sizes_of_many_parts_stay_sums() -> None:
    sizes = [symbol(f"s{k}", 2) for k in range(150)]
    there, back = dims.add(*sizes), dims.add(*reversed(sizes))
    assert there is back and dims.equal(dims.sub(there, sizes[0]), dims.add(*sizes[1:]))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("steps", [8, 40])
def test_squares_of_places_and_of_data(steps: int, dynamic: bool | None) -> None:
    def mixed(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0])
        for _ in range(steps):
            places, x = places * places + places // 2, x * x + x // 2
        return places ^ x

    x = torch.randint(-(2**62), 2**62, (1000,))
    fast = torch.compile(mixed, backend=tilewright.backend, options={"cache": False}, dynamic=dynamic)
    assert torch.equal(fast(x), mixed(x))
