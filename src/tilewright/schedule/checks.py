"""What may fail at run time, and where it must not be tried: indices from data, integer divisors from data."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import dims
from ..ir.expr import Expr, walk
from ..ir.program import Buffer

INDEX_ERROR = 1
"""Code of a failed index check (see `ir.program.Check`)."""
DIVISION_ERROR = 2
"""Code of an integer divided by zero."""

_DIVISIONS = frozenset({"floordiv", "mod", "truncdiv", "fmod"})


def divisor(e: Expr) -> Expr | None:
    """The divisor of an integer division, if it comes from data and so may be zero."""
    if e.op not in _DIVISIONS or e.dtype.is_float:
        return None
    return e.args[1] if any(x.op in ("read", "value") for x in walk(e.args[1])) else None


def unsafe(e: Expr, params: Sequence[Buffer]) -> bool:
    """Whether evaluating `e` where it is not meant could touch memory outside a buffer, or divide by zero."""
    for x in walk(e):
        if x.op == "read" and isinstance(x.value, int):
            offset = x.args[0]
            if not (dims.at_least(offset, 0) and dims.at_least(dims.sub(params[x.value].size, offset), 1)):
                return True
        if divisor(x) is not None:
            return True
    return False
