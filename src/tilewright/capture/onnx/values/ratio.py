"""Exact fractions of symbolic integers.

Models compute sizes in floating point too: floor(cast(h) * 0.5). Kept as (h, 2) this is h // 2, which torch's
symbolic reasoning understands; as a symbolic float it is opaque.
"""

from __future__ import annotations

import math
from typing import Union

import torch

from tilewright.tuning.input_limits import MODEL_FILES

Real = Union[int, float, "Ratio"]


class Ratio:
    """numerator / denominator; the numerator is a (symbolic) integer, the denominator a positive int."""

    __slots__ = ("denominator", "numerator")

    def __init__(self, numerator: int, denominator: int) -> None:
        symbolic = isinstance(numerator, torch.SymInt)
        shared = 1 if symbolic or denominator == 1 else math.gcd(numerator, denominator)
        self.numerator = numerator if shared == 1 else numerator // shared
        self.denominator = denominator // shared

    def real(self) -> float:
        """The value as a float (symbolic if the numerator is)."""
        if isinstance(self.numerator, torch.SymInt):
            return torch.sym_float(self.numerator) / self.denominator
        return self.numerator / self.denominator

    def floor(self) -> int:
        """Rounded down."""
        return self.numerator if self.denominator == 1 else self.numerator // self.denominator

    def ceil(self) -> int:
        """Rounded up."""
        return self.numerator if self.denominator == 1 else -((-self.numerator) // self.denominator)

    def __neg__(self) -> Ratio:
        return Ratio(-self.numerator, self.denominator)

    def __abs__(self) -> Ratio:
        return Ratio(abs(self.numerator), self.denominator)

    def __add__(self, other: Real) -> Real:
        pair = parts(other)
        if pair is None:
            return self.real() + _real(other)
        n, d = pair
        return Ratio(self.numerator * d + n * self.denominator, self.denominator * d)

    __radd__ = __add__

    def __sub__(self, other: Real) -> Real:
        return self + -other

    def __rsub__(self, other: Real) -> Real:
        return -self + other

    def __mul__(self, other: Real) -> Real:
        pair = parts(other)
        if pair is None:
            return self.real() * _real(other)
        n, d = pair
        if not isinstance(n, torch.SymInt):  # cancel without asking about the symbol
            shared = math.gcd(n, self.denominator)
            return Ratio(self.numerator * (n // shared), self.denominator // shared * d)
        return Ratio(self.numerator * n, self.denominator * d)

    __rmul__ = __mul__

    def __truediv__(self, other: Real) -> Real:
        pair = parts(other)
        if pair is None or isinstance(pair[0], torch.SymInt) or pair[0] == 0:
            return self.real() / _real(other)
        n, d = pair
        sign = 1 if n > 0 else -1
        return self * Ratio(sign * d, abs(n))

    def __rtruediv__(self, other: Real) -> Real:
        return _real(other) / self.real()

    def __pow__(self, other: Real) -> Real:
        return self.real() ** _real(other)

    def __mod__(self, other: Real) -> Real:
        return self.real() % _real(other)

    def _cross(self, other: Real) -> tuple[int, int] | None:
        pair = parts(other)
        return None if pair is None else (self.numerator * pair[1], pair[0] * self.denominator)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, float, Ratio, torch.SymInt, torch.SymFloat)):
            return NotImplemented
        number: Real = other  # type: ignore[assignment]
        pair = self._cross(number)
        return self.real() == _real(number) if pair is None else pair[0] == pair[1]

    __hash__ = None  # type: ignore[assignment]

    def __lt__(self, other: Real) -> bool:
        pair = self._cross(other)
        return self.real() < _real(other) if pair is None else pair[0] < pair[1]

    def __le__(self, other: Real) -> bool:
        pair = self._cross(other)
        return self.real() <= _real(other) if pair is None else pair[0] <= pair[1]

    def __gt__(self, other: Real) -> bool:
        pair = self._cross(other)
        return self.real() > _real(other) if pair is None else pair[0] > pair[1]

    def __ge__(self, other: Real) -> bool:
        pair = self._cross(other)
        return self.real() >= _real(other) if pair is None else pair[0] >= pair[1]


def parts(value: Real) -> tuple[int, int] | None:
    """Numerator and denominator, or None for a number that is no small fraction."""
    if isinstance(value, Ratio):
        return value.numerator, value.denominator
    if isinstance(value, (int, torch.SymInt)):
        return value, 1
    if isinstance(value, torch.SymFloat) or not math.isfinite(value):
        return None
    numerator, denominator = value.as_integer_ratio()
    return (numerator, denominator) if denominator <= MODEL_FILES.max_scale_denominator else None


def _real(value: Real) -> float:
    return value.real() if isinstance(value, Ratio) else value
