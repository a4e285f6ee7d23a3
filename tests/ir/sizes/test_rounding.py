"""Whole numbers rounded to powers of two."""

from __future__ import annotations

from tilewright.ir.sizes.rounding import last_power_of_two, next_power_of_two


def test_up_and_down() -> None:
    assert [next_power_of_two(n) for n in (-3, 0, 1, 2, 3, 4, 5, 1025)] == [1, 1, 1, 2, 4, 4, 8, 2048]
    assert [last_power_of_two(n) for n in (-3, 0, 1, 2, 3, 4, 5, 1025)] == [1, 1, 1, 2, 2, 4, 4, 1024]
