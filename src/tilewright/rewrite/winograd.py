"""Short convolutions with fewer products, over any field: where their numbers come from, and their law.

    m results of a window with r taps:   y[i] = sum of g[k] * x[i + k] over k
    the same with m + r - 1 products:    y = back ((weights g) * (image x))       element by element

For m + r - 1 points that differ, one of which may be infinity, the three matrices are those of Toom and Cook,
transposed. `law` states what they must fulfil, exactly; `weights_of` turns weights of a window with two dims.
Rewriting a sum in this way is a rule of a field: exact over rationals, and rounded otherwise over floats. How much
it may differ, and when it does not apply, lies with who takes it (`runtime/native/winograd.cpp`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True, slots=True)
class Short:
    """A short convolution: how results are made `back` of products, and what stands for `weights` and for the
    `image`."""

    back: Matrix
    weights: Matrix
    image: Matrix

    def law(self) -> bool:
        """Whether the weight of tap k meets input j in result i just where j = i + k, and with a factor of 1."""
        products = range(len(self.image))
        return all(
            sum(self.back[i][n] * self.weights[n][k] * self.image[n][j] for n in products) == (j == i + k)
            for i in range(len(self.back))
            for k in range(len(self.weights[0]))
            for j in range(len(self.image[0]))
        )


def short(results: int, taps: int, points: Sequence[Fraction]) -> Short:
    """The short convolution with so many results and taps that evaluates at these points, and at infinity if there
    is one too few of them."""
    count = results + taps - 1
    if len(set(points)) != len(points) or len(points) not in (count - 1, count):
        raise ValueError(f"{count} points that differ are needed, or one less")
    others = [[q for q in points if q != p] for p in points]
    zero, one = Fraction(0), Fraction(1)
    back = [[p**i for p in points] for i in range(results)]
    weights = [
        [p**k / math.prod((p - q for q in rest), start=one) for k in range(taps)]
        for p, rest in zip(points, others, strict=True)
    ]
    image = [_with_roots(rest) for rest in others]
    if len(points) < count:
        back = [[*row, one if i == results - 1 else zero] for i, row in enumerate(back)]
        weights.append([zero] * (taps - 1) + [one])
        image = [[*row, zero] for row in image] + [_with_roots(points)]
    return Short(_frozen(back), _frozen(weights), _frozen(image))


def _with_roots(roots: Sequence[Fraction]) -> list[Fraction]:
    """The coefficients of the product of (x - root), of the lowest power first."""
    found = [Fraction(1)]
    for root in roots:
        found = [a - root * b for a, b in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


def _frozen(rows: Sequence[Sequence[Fraction]]) -> Matrix:
    return tuple(map(tuple, rows))


TWO = short(2, 3, [Fraction(0), Fraction(1), Fraction(-1)])
"""Two results of three taps with four products."""

THREE = short(3, 3, [Fraction(0), *(Fraction(sign * n, 4) for n in (3, 10) for sign in (1, -1))])
"""Three results of three taps with five products. All constants but those of weights are exact in floats. A sum
over many channels errs 1.6 times as much as a plain one, which is near the least of all such points, and 2.0 times
as much for 0, 1, -1, 2 and infinity. Four results err 2.2 times as much at their best points, with a tenth less
products."""


def weights_of(down: Short, across: Short) -> list[list[Fraction]]:
    """What stands for the weights of a window with two dims: a row for each product, a column for each tap."""
    return [[a * b for a in rows for b in columns] for rows in down.weights for columns in across.weights]
