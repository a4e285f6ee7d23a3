"""A product and a sum with one rounding, against the C library's."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tilewright.interp.fused import fma

COUNT = 3000
LIBRARY = ctypes.CDLL(ctypes.util.find_library("m"))
KINDS: dict[str, tuple[Any, Any]] = {
    "fmaf": (np.float32, ctypes.c_float),
    "fma": (np.float64, ctypes.c_double),
}


def operands(kind: Any, which: str) -> list[NDArray[Any]]:
    """Three arrays: any bits, sums that nearly cancel, special numbers, or results that are barely normal."""
    rng, limits = np.random.default_rng(0), np.finfo(kind)
    if which == "bits":
        return [
            np.frombuffer(rng.bytes(COUNT * limits.bits // 8), kind) for _ in range(3)
        ]  # all NaNs, all ranges
    if which == "cancelling":
        a, b = (rng.standard_normal(COUNT).astype(kind) for _ in range(2))
        return [a, b, (-(a * b) * (1 + rng.integers(-2, 3, COUNT) * limits.eps)).astype(kind)]
    if which == "special":
        found = [0.0, 1.0, np.inf, limits.max, limits.tiny, limits.smallest_subnormal, 3.0, 1 + limits.eps]
        return [rng.choice(np.array([*found, np.nan, *[-x for x in found]], kind), COUNT) for _ in range(3)]
    half = limits.minexp // 2
    a, b = (np.ldexp(rng.standard_normal(COUNT), half + k).astype(kind) for k in (0, 2))
    return [
        a,
        b,
        np.ldexp(rng.standard_normal(COUNT), limits.minexp - rng.integers(0, 30, COUNT)).astype(kind),
    ]


@pytest.mark.parametrize("which", ["bits", "cancelling", "special", "small"])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_rounded_once(name: str, which: str) -> None:
    kind, held = KINDS[name]
    function = getattr(LIBRARY, name)
    function.restype, function.argtypes = held, [held] * 3
    with np.errstate(all="ignore"):
        given = operands(kind, which)
        made = fma(*given)
        want = np.array(
            [function(*numbers) for numbers in zip(*(x.tolist() for x in given), strict=True)], kind
        )
    assert made.dtype == kind
    np.testing.assert_array_equal(made, want)
    assert np.array_equal(np.signbit(made) | np.isnan(made), np.signbit(want) | np.isnan(want))


def test_twice_as_many_digits_are_not_enough() -> None:
    """The sum in doubles is a tie of singles, which it is not."""
    a, b, c = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    arrays = [np.asarray([x], np.float32) for x in (a, b, c)]
    assert fma(*arrays)[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert np.float32(float(a) * float(b) + float(c)) != fma(*arrays)[0]
