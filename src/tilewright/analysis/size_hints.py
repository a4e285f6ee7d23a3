"""Numbers for symbolic sizes, where alternatives are weighed: an argument of whatever weighs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tilewright.ir.expr import Expr
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import SIZES


@dataclass(frozen=True, slots=True)
class SizeHints:
    """What unknown sizes are taken for, by name of symbol; others count as `SIZES.unseen_size`, within their ranges."""

    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def estimate(self, e: Expr) -> int:
        """A number for an index expression over symbols."""
        return dims.evaluate(
            e, {repr(s): _within(s, self.sizes.get(repr(s), SIZES.unseen_size)) for s in dims.symbols_of(e)}
        )

    def likely(self, e: Expr) -> int | None:
        """The number that an index expression has at these sizes, None if it depends on others."""
        return self.estimate(e) if all(repr(s) in self.sizes for s in dims.symbols_of(e)) else None

    def also(self, sizes: Mapping[str, int]) -> SizeHints:
        """These, and some sizes taken for others."""
        return SizeHints({**self.sizes, **sizes})

    def raised(self, least: int, symbols: Iterable[Expr]) -> SizeHints:
        """Those of which none of `symbols` is less than `least`, as far as their ranges allow."""
        known = [s for s in symbols if repr(s) in self.sizes]
        return self.also({repr(s): _within(s, max(self.sizes[repr(s)], least)) for s in known})


NO_HINTS = SizeHints()
"""Nothing is known of any size."""


def representative(counts: Iterable[Expr], traced: SizeHints) -> SizeHints:
    """Sizes to weigh alternatives at, for tensors of so many elements: those that a program was `traced` with, or, if
    all tensors of unknown size were tiny, the smallest of these raised together until one has
    `SIZES.min_largest_tensor_elements`. So what is decided does not depend on a tiny first call."""
    unknown = [n for n in dict.fromkeys(counts) if dims.symbols_of(n)]
    symbols = dict.fromkeys(s for n in unknown for s in dims.symbols_of(n))
    hints, least = traced, 1
    while unknown and least < SIZES.min_largest_tensor_elements:
        if max(map(hints.estimate, unknown)) >= SIZES.min_largest_tensor_elements:
            break
        least *= 2
        hints = traced.raised(least, symbols)
    return hints


def _within(symbol: Expr, guess: int) -> int:
    low, high = dims.int_range(symbol)
    return max(low or 0, min(guess, high if high is not None else guess))
