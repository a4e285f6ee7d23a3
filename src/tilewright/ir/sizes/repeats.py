"""Known sizes and strides: whether some elements share a place."""

from __future__ import annotations

from collections.abc import Sequence


def repeats(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share a place: a stride does not exceed the reach of smaller ones."""
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def same_repeats(shape: Sequence[int], given: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether elements that share a place by the `wanted` strides are equal for sure, as they do by the `given` ones
    too."""
    left = [(n, w) for n, g, w in zip(shape, given, wanted, strict=True) if not (n > 1 and g == 0 and w == 0)]
    return not repeats([n for n, _ in left], [w for _, w in left])
