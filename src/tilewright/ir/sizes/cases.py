"""Equality of sizes case by case: where a maximum or minimum changes sides, a symbol's range is taken in two."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.ir.expr import Expr, Symbol, integer, substitute, symbol, walk
from tilewright.tuning.search_limits import EXPRESSIONS

from . import dims
from .linear_form import linear


def equal(a: Expr, b: Expr) -> bool:
    """Whether two sizes are proved equal, in one form or in each of the cases that their extrema tell apart."""
    return dims.equal(a, b) or _equal_by_cases(a, b, EXPRESSIONS.max_cases_of_a_size)


def _equal_by_cases(a: Expr, b: Expr, splits: int) -> bool:
    if not splits:
        return False
    for s, first in _turns(a, b):
        parts = _parts(s, first)
        if len(parts) > 1:
            cases = [(substitute(a, {s: part}), substitute(b, {s: part})) for part in parts]
            return all(dims.equal(x, y) or _equal_by_cases(x, y, splits - 1) for x, y in cases)
    return False


def _turns(*sizes: Expr) -> Iterator[tuple[Expr, int]]:
    """Symbols, each with the first of its values from which on another side of a maximum or minimum is taken."""
    for e in sizes:
        for extremum in (x for x in walk(e) if x.op in ("maximum", "minimum")):
            form = dict(linear(dims.sub(*extremum.args)))
            fixed = form.pop((), 0)
            if len(form) != 1:
                continue
            ((m, c),) = form.items()
            if len(m) == 1 and isinstance(m[0].value, Symbol):
                # c s + fixed >= 0 from there on (c > 0), or up to there
                yield m[0], -(fixed // c) if c > 0 else fixed // -c + 1


def _parts(s: Expr, first: int) -> tuple[Expr, ...]:
    """A symbol below `first`, and from there on."""
    assert isinstance(s.value, Symbol)
    low, high = s.value.low, s.value.high
    below = first - 1 if high is None else min(high, first - 1)
    above = max(low, first)
    ranges = [(low, below), *([] if high is not None and above > high else [(above, high)])]
    return tuple(
        integer(start) if start == end else symbol(s.value.name, start, end)
        for start, end in ranges
        if end is None or start <= end
    )
