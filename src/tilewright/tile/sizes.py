"""Numbers for symbolic sizes, where alternatives are weighed."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from ..ir import dims
from ..ir.expr import Expr

TYPICAL = 64
"""What an unknown size is taken for."""

_seen: ContextVar[Mapping[str, int]] = ContextVar("seen", default=MappingProxyType({}))


@contextmanager
def seen_sizes(sizes: Mapping[str, int]) -> Generator[None]:
    """Within it, estimates take unknown sizes for those that the program was traced with (by name of symbol)."""
    token = _seen.set(sizes)
    try:
        yield
    finally:
        _seen.reset(token)


def estimate(e: Expr) -> int:
    """A number for an index expression over symbols: the size seen, or `TYPICAL`, for a symbol, within its range."""
    values: dict[str, int] = {}
    seen = _seen.get()
    for s in dims.symbols_of(e):
        low, high = dims.int_range(s)
        guess = seen.get(repr(s), TYPICAL)
        values[repr(s)] = max(low or 0, min(guess, high if high is not None else guess))
    return dims.evaluate(e, values)


def likely(e: Expr) -> int | None:
    """The number that an index expression has at the sizes seen, None if it depends on others."""
    seen = _seen.get()
    return estimate(e) if all(repr(s) in seen for s in dims.symbols_of(e)) else None
