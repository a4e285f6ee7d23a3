"""Host scalars: the number that an expression over symbols has under given sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from tilewright.errors import VerifyError
from tilewright.ir.dtype import bool_
from tilewright.ir.expr import Axis, Expr, Symbol, leaves

Number = int | float | bool

_OPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "div": operator.truediv,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "truncdiv": lambda a, b: int(a / b) if b else 0,
    "maximum": max,
    "minimum": min,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "pow": operator.pow,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": operator.not_,
    "where": lambda c, a, b: a if c else b,
}


def number(e: Expr, sizes: Mapping[str, Number]) -> Number:
    """The value of `e` with each symbol replaced by its entry in `sizes`. Raises KeyError for one without.

    A divisor of 0 in index arithmetic gives 0, as such an index is never used."""
    if e.op == "const":
        assert isinstance(e.value, (bool, int, float))
        return e.value
    if isinstance(e.value, Symbol):
        return sizes[e.value.name]
    return rule_of(e)(*[number(a, sizes) for a in e.args])


def rule_of(e: Expr) -> Callable[..., Any]:
    """What makes the number of `e` of those of its arguments. Raises VerifyError for an operation that has no meaning
    on the host."""
    if e.op in ("cast", "narrow"):
        return bool if e.dtype is bool_ else float if e.dtype.is_float else int
    rule = _OPS.get(e.op)
    if rule is None:
        raise VerifyError(f"{e.op} has no meaning on the host", phase="ir")
    return rule


def size(e: Expr, sizes: Mapping[str, Number]) -> int:
    """The same for an index expression."""
    return int(number(e, sizes))


def evaluate(e: Expr, values: Mapping[str, int]) -> int:
    """The number that an index expression over symbols has under `values` (name -> size). Raises KeyError if
    unbound."""
    if e.op == "const":
        assert isinstance(e.value, int)
        return e.value
    if isinstance(e.value, (Symbol, Axis)):
        return values[e.value.name]
    if e.op not in INTEGER_OPS:
        return size(e, values)
    return _OPS[e.op](*(evaluate(a, values) for a in e.args))


INTEGER_OPS = ("add", "sub", "mul", "neg", "floordiv", "mod", "maximum", "minimum")
"""Operations of integers whose arguments may be axes."""


def symbols_of(e: Expr) -> list[Expr]:
    """The size symbols of `e` in order of first use."""
    return leaves(e, "symbol")
