"""Numbers for symbolic sizes, where alternatives are weighed."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from tilewright.ir.expr import Expr
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import SIZES

_seen: ContextVar[Mapping[str, int]] = ContextVar("seen", default=MappingProxyType({}))


@contextmanager
def seen_sizes(sizes: Mapping[str, int]) -> Generator[None]:
    """Within it, estimates take unknown sizes for these (by name of symbol)."""
    token = _seen.set(sizes)
    try:
        yield
    finally:
        _seen.reset(token)


@contextmanager
def also_seen(sizes: Mapping[str, int]) -> Generator[None]:
    """Within it, estimates take these unknown sizes for these, and all others for what they took them for before."""
    with seen_sizes({**_seen.get(), **sizes}):
        yield


def estimate(e: Expr) -> int:
    """A number for an index expression over symbols: the size seen, or `SIZES.unseen_size`, for a symbol, within its
    range."""
    seen = _seen.get()
    return dims.evaluate(
        e, {repr(s): _within(s, seen.get(repr(s), SIZES.unseen_size)) for s in dims.symbols_of(e)}
    )


def likely(e: Expr) -> int | None:
    """The number that an index expression has at the sizes seen, None if it depends on others."""
    seen = _seen.get()
    return estimate(e) if all(repr(s) in seen for s in dims.symbols_of(e)) else None


def raise_sizes(sizes: Mapping[str, int], least: int, symbols: Iterable[Expr]) -> dict[str, int]:
    """Sizes of which none of `symbols` is less than `least`, as far as their ranges allow."""
    found = {repr(s): _within(s, max(sizes[repr(s)], least)) for s in symbols if repr(s) in sizes}
    return {**sizes, **found}


def representative(counts: Iterable[Expr], traced: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes to weigh alternatives at, for tensors of so many elements: those that a program was `traced` with, or, if
    all tensors of unknown size were tiny, the smallest of these raised together until one has
    `SIZES.min_largest_tensor_elements`. So what is decided does not depend on a tiny first call."""
    unknown = [n for n in dict.fromkeys(counts) if dims.symbols_of(n)]
    symbols = dict.fromkeys(s for n in unknown for s in dims.symbols_of(n))
    sizes, least = traced, 1
    while unknown and least < SIZES.min_largest_tensor_elements:
        with seen_sizes(sizes):
            if max(map(estimate, unknown)) >= SIZES.min_largest_tensor_elements:
                break
        least *= 2
        sizes = raise_sizes(traced, least, symbols)
    return sizes


def _within(symbol: Expr, guess: int) -> int:
    low, high = dims.int_range(symbol)
    return max(low or 0, min(guess, high if high is not None else guess))
