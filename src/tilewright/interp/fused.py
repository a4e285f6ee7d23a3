"""a * b + c with one rounding, where numpy has none: by numbers twice as long, and by rounding to odd between.

Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd" (2008): a
number of at least two digits more, whose last digit is odd wherever something was cut off, rounds like the exact one.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_SPLITTER = float((1 << 27) + 1)
_MODERATE = 300
"""Numbers whose exponents are smaller than this have products, and parts of products, that are normal."""


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of singles or doubles, rounded once to nearest."""
    if a.dtype == np.float32:
        product = a.astype(np.float64) * b.astype(np.float64)  # 48 digits, held exactly
        return _rounded_to_odd(product, c.astype(np.float64)).astype(np.float32)
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = _product(a, b)
    upper, lower = _sum(c, low)
    top, rest = _sum(high, upper)
    result = np.asarray(top + _rounded_to_odd(rest, lower))
    plain = np.where(np.isfinite(a) & np.isfinite(b) & np.isinf(c), c, a * b + c)  # however large a * b
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    nothing = (a == 0) | (b == 0)
    moderate = _is_moderate(a) & _is_moderate(b) & (_is_moderate(c) | (c == 0))
    result = np.where(finite & ~nothing & moderate & (result != 0), result, plain)
    for place in map(tuple, np.argwhere(finite & ~nothing & ~moderate)):
        result[place] = _by_fractions(float(a[place]), float(b[place]), float(c[place]))
    return result


def _is_moderate(x: Array) -> Array:
    return np.asarray((np.abs(np.frexp(x)[1]) < _MODERATE) & (x != 0))


def _sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b, and what its rounding left (Knuth)."""
    total = np.asarray(a + b)
    part = total - a
    return total, np.asarray((a - (total - part)) + (b - part))


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b, and what its rounding left (Dekker)."""
    total = np.asarray(a * b)
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return total, np.asarray(((a1 * b1 - total) + a1 * b2 + a2 * b1) + a2 * b2)


def _halves(x: Array) -> tuple[Array, Array]:
    large = np.asarray(_SPLITTER * x)
    high = large - (large - x)
    return high, np.asarray(x - high)


def _rounded_to_odd(a: Array, b: Array) -> Array:
    """a + b of doubles: where it is not exact, the one of its two neighbours whose last digit is odd."""
    total, rest = _sum(a, b)
    even = (np.asarray(total).view(np.int64) & 1) == 0
    inexact = np.isfinite(total) & (rest != 0)
    neighbour = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    return np.asarray(np.where(inexact & even, neighbour, total))


def _by_fractions(a: float, b: float, c: float) -> float:
    """The same of any finite numbers whose product is not zero."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")
