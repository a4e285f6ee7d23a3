"""Whole numbers rounded to powers of two, up and down."""

from __future__ import annotations


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`; 1 for what is not positive."""
    return 1 << max(0, n - 1).bit_length()


def last_power_of_two(n: int) -> int:
    """The largest power of two that is at most `n`; 1 for what is not positive."""
    return 1 << (max(1, n).bit_length() - 1)
