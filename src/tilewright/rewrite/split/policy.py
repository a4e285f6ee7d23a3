"""Whether something is split, and in how many parts: one policy for all that can be.

The numbers of parts that leave each part enough elements are tried; the one whose kernels take the least time by the
model wins, if that is less than what the whole takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tilewright.errors import IllegalSchedule
from tilewright.ir.graph import Layout, Value
from tilewright.ir.kernel import Kernel, Price
from tilewright.tuning.thresholds import SplitThresholds

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How reductions are split for a kind of processor; its scheduler says so."""

    limits: SplitThresholds
    counts: tuple[int, ...]
    """Numbers of parts of one reduction."""
    tries_all: bool
    """Whether all of them are tried that fit, or only the largest."""
    together: bool
    """Whether reductions that read each other are split together, and neighbouring axes as one: threads that share a
    grid point hold the elements of a part between two reductions, and walk any axis."""


def part_counts(counts: Iterable[int], extent: int, min_elements: int) -> list[int]:
    """Those of `counts` that leave each part of `extent` at least so many elements."""
    return [n for n in counts if n * min_elements <= extent]


def seconds_of(kernels: Iterable[Kernel], layouts: Mapping[Value, Layout], price: Price) -> float:
    """Modelled seconds of kernels that run one after the other; infinitely many if one of them has no legal form."""
    try:
        return sum(price(k, layouts) for k in kernels)
    except IllegalSchedule:
        return math.inf


def fastest_split(
    unsplit: Kernel,
    ways: Iterable[tuple[W, Sequence[Kernel]]],
    layouts: Mapping[Value, Layout],
    price: Price,
    times: float = 1,
) -> W | None:
    """The fastest of the ways, by the kernels of each; None if none is `times` as fast as one kernel, or if that has no
    legal form."""
    seconds = seconds_of([unsplit], layouts, price)
    if seconds == math.inf:
        return None
    return fastest(((w, seconds_of(kernels, layouts, price)) for w, kernels in ways), seconds / times)


def fastest(ways: Iterable[tuple[W, float]], less_than: float) -> W | None:
    """The first of the ways that take the least time, by the seconds of each; None if none takes less than that."""
    best: W | None = None
    for way, seconds in ways:
        if seconds < less_than:
            best, less_than = way, seconds
    return best
