"""The law of short convolutions, over rationals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest

from tilewright.rewrite.winograd import THREE, TWO, Short, short, weights_of

FORMS = {"two": TWO, "three": THREE, "four": short(4, 3, [Fraction(n) for n in (0, 1, -1, 2, -2)])}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_short_convolutions_are_exact(form: Short) -> None:
    assert form.law()
    count, taps = len(form.image[0]), len(form.weights[0])
    x = [Fraction(3 * k * k - 7 * k + 1, k + 2) for k in range(count)]
    g = [Fraction(5 - 2 * k, 3) for k in range(taps)]
    dot = lambda row, v: sum((a * b for a, b in zip(row, v, strict=True)), Fraction(0))  # noqa: E731
    made = [dot(a, g) * dot(b, x) for a, b in zip(form.weights, form.image, strict=True)]
    assert [dot(row, made) for row in form.back] == [
        sum(g[k] * x[i + k] for k in range(taps)) for i in range(len(form.back))
    ]


def test_a_wrong_number_breaks_the_law() -> None:
    for name in ("back", "weights", "image"):
        matrix = getattr(THREE, name)
        for i, j in itertools.product(range(len(matrix)), range(len(matrix[0]))):
            row = (*matrix[i][:j], matrix[i][j] + Fraction(1, 64), *matrix[i][j + 1 :])
            assert not replace(THREE, **{name: (*matrix[:i], row, *matrix[i + 1 :])}).law()


def test_points_must_differ() -> None:
    for points in ([0, 1, 1], [0, 1], [0, 1, 2, 3, 4]):
        with pytest.raises(ValueError, match="points"):
            short(2, 3, [Fraction(p) for p in points])


def test_weights_of_two_dims_are_products_of_both() -> None:
    rows = weights_of(TWO, THREE)
    assert len(rows) == 20 and all(len(row) == 9 for row in rows)
    assert rows[7][5] == TWO.weights[1][1] * THREE.weights[2][2]
