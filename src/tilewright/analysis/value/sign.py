"""Signs and bounds of expressions: which numbers can an expression be, given which ones its reads can be?

The paper's sign and value properties (FlashTensor, PPoPP'25) as one interval analysis. Nothing here names an op of a
graph: it follows scalar bodies, conditions of `where`s, and the declarations of reductions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewright.ir.dtype import DType, Kind, bool_, i64
from tilewright.ir.expr import Const, Expr, conjuncts, slot
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.tuning.search_limits import FACTS

from .interval import (  # fmt: skip
    ABOVE,
    ANYTHING,
    BELOW,
    INF,
    NAN,
    NONE,
    REAL,
    TRUTH,
    ZERO,
    Interval,
    interval,
    join,
    larger,
    magnitude,
    meet,
    negated,
    point,
    product,
    quotient,
    reciprocal,
    rising,
    smaller,
    square,
    sum_,
)

Known = Mapping[Expr, Interval]
"""What is known of nodes: of reads above all, but of any expression (`x - m` may be known where x and m are not)."""


def of_type(dtype: DType, finite: bool = True) -> Interval:
    """What a value of `dtype` in memory may be. Floats are taken as finite unless told otherwise."""
    if dtype.is_float:
        return REAL if finite else ANYTHING
    if dtype.kind is Kind.BOOL:
        return TRUTH
    bits = 8 * dtype.bytes
    return (
        interval(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1))
        if dtype.kind is Kind.INT
        else interval(0, 2.0**bits)
    )


def sign_of(e: Expr, known: Known | None = None) -> Interval:
    """The numbers that `e` may be. Reads that `known` does not name are what their type holds, floats finite."""
    return Signs(known or {}).of(e)


def signs_of(expr: TensorExpr, operands: Sequence[Interval]) -> tuple[Interval, ...]:
    """The numbers that the results of an op may be, given those of its operands."""
    analysis = Signs({}, dict(enumerate(operands)))
    body = [analysis.of(b) for b in expr.body]
    if expr.reduction is None:
        return tuple(body)
    some = all(dims.at_least(a.extent, 1) for a in expr.reduce)
    return reduction_signs(expr.reduction, body, some)


def reduction_signs(reduction: Reduction, elements: Sequence[Interval], some: bool) -> tuple[Interval, ...]:
    """The numbers that the results of a reduction may be; `some`: it has at least one element."""
    lift = {slot("e", k, t): x for k, (t, x) in enumerate(zip(reduction.elements, elements, strict=True))}
    lifted = [Signs(lift).of(x) for x in reduction.lift]
    state = (
        lifted if some else [join((x, sign_of(i))) for x, i in zip(lifted, reduction.identity, strict=True)]
    )
    sides = [slot(side, k, t) for side in "ab" for k, t in enumerate(reduction.state)]
    for step in range(FACTS.max_sign_rounds):
        merge = Signs(dict(zip(sides, (*state, *state), strict=True)))
        grown = [join((x, merge.of(m))) for x, m in zip(state, reduction.merge, strict=True)]
        if grown == state:
            break
        state = [
            _widened(x, y) if step >= FACTS.exact_sign_rounds else y
            for x, y in zip(state, grown, strict=True)
        ]
    else:
        state = [of_type(t, finite=False) for t in reduction.state]
    finish = Signs(dict(zip(sides, (*state, *state), strict=True)))
    return tuple(finish.of(f) for f in reduction.finish)


_STOPS = (-INF, -1.0, 0.0, 1.0, INF)
"""Bounds that still move after some rounds jump to the next of these, so that the iteration ends."""


def _widened(old: Interval, new: Interval) -> Interval:
    if old.empty or new.empty:
        return new
    low = new.low if new.low >= old.low else max(s for s in _STOPS if s <= new.low)
    high = new.high if new.high <= old.high else min(s for s in _STOPS if s >= new.high)
    return interval(low, high, new.zero, new.below, new.above, new.nan)


class Signs:
    """The analysis under one set of facts. `operands` gives what reads may be that `known` does not name, by operand
    number."""

    def __init__(self, known: Known, operands: Mapping[int, Interval] | None = None) -> None:
        self.known = known
        self.operands = {} if operands is None else operands
        self.memo: dict[Expr, Interval] = {}

    def of(self, e: Expr) -> Interval:
        found = self.memo.get(e)
        if found is None:
            found = self.node(e)
            fact = self.known.get(e)
            found = self.memo[e] = (
                found if fact is None else fact if e.op in ("read", "slot") else meet(found, fact)
            )
        return found

    def node(self, e: Expr) -> Interval:
        if e.op == "const":
            return _constant(e.value)
        if e.op in ("axis", "symbol"):
            low, high = dims.int_range(e)
            return interval(-INF if low is None else low, INF if high is None else high)
        if e.op == "read" and isinstance(e.value, int):
            return self.operands.get(e.value, of_type(e.dtype))
        if not e.args or e.op == "value":
            return of_type(e.dtype)
        if e.op == "where":
            return self.choice(e)
        if e.op in ("checked", "implied"):
            return self.of(e.args[0])
        made = self.scalar(e)
        return made if e.dtype.is_float else _wrapped(made, e.dtype)

    def choice(self, e: Expr) -> Interval:
        condition, yes, no = e.args
        decided = self.of(condition).constant
        sides: list[Interval] = []
        for side, truth in ((yes, True), (no, False)):
            if decided is None or bool(decided) == truth:
                facts = self.assumed(condition, truth)
                if not any(x == NONE for x in facts.values()):
                    inner = Signs({**self.known, **facts}, self.operands) if facts else self
                    sides.append(inner.of(side))
        return join(sides)

    def assumed(self, condition: Expr, truth: bool) -> dict[Expr, Interval]:
        """What else is known where the condition has this truth."""
        if condition.op == "not":
            return self.assumed(condition.args[0], not truth)
        terms = conjuncts(condition) if truth else _disjuncts(condition)
        facts: dict[Expr, Interval] = {}
        for t in terms:
            for x, fact in self.restricted(t, truth):
                facts[x] = meet(facts.get(x, self.of(x)), fact)
        return facts

    def restricted(self, t: Expr, truth: bool) -> list[tuple[Expr, Interval]]:
        if t.op in ("isnan", "isinf") and not truth:
            x = self.of(t.args[0])
            gone = replace(x, nan=False) if t.op == "isnan" else replace(x, below=False, above=False)
            return [(t.args[0], gone)]
        if t.op not in _NEGATED or t.args[0].dtype is bool_:
            return []
        op = t.op if truth else _NEGATED[t.op]
        a, b = t.args
        sure = truth == (t.op != "ne")  # a comparison that holds, other than "ne", says that nothing is NaN
        both = ((a, op, self.of(b)), (b, _TURNED[op], self.of(a)))
        return [
            (x, _compared(self.of(x), o, y, sure))
            for x, o, y in both
            if x.op != "const" and (sure or not y.nan)
        ]

    def scalar(self, e: Expr) -> Interval:
        a = self.of(e.args[0])
        if e.op == "fma":
            made = square(a) if e.args[0] is e.args[1] else product(a, self.of(e.args[1]))
            return sum_(made, self.of(e.args[2]))
        if len(e.args) == 2:
            if e.op in ("mul", "div") and e.args[0] is e.args[1]:
                return square(a) if e.op == "mul" else quotient(a, a)
            found = _binary(e.op, a, self.of(e.args[1]), e.dtype)
            return self.with_squares(e, found) if e.op == "mul" and e.dtype.is_float else found
        return (
            _converted(a, e.args[0].dtype, e.dtype)
            if e.op in ("cast", "narrow")
            else _unary(e.op, a, e.dtype)
        )

    def with_squares(self, e: Expr, found: Interval) -> Interval:
        """(x * a) * (x * b) = x^2 * (a * b): what is `found` of a product, and what follows where factors are equal."""
        factors = Counter(f for x in e.args for f in (x.args if x.op == "mul" else (x,)))
        if all(count == 1 for count in factors.values()):
            return found
        paired = point(1.0)
        for x, count in factors.items():
            for part in (square(self.of(x)),) * (count // 2) + (self.of(x),) * (count % 2):
                paired = product(paired, part)
        return meet(found, replace(paired, nan=found.nan))


_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
_TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _disjuncts(condition: Expr) -> tuple[Expr, ...]:
    if condition.op == "or" and condition.dtype is bool_:
        return _disjuncts(condition.args[0]) + _disjuncts(condition.args[1])
    return (condition,)


def _constant(value: object) -> Interval:
    assert isinstance(value, Const)
    return point(float(value))


def _wrapped(x: Interval, dtype: DType) -> Interval:
    """An integer result as its type holds it: what is out of range wraps to anything."""
    limits = of_type(dtype)
    inside = x.finite and (x.empty or (x.low >= limits.low and x.high <= limits.high))
    return x if inside or (dtype is i64 and not x.nan) else limits


def _compared(x: Interval, op: str, y: Interval, sure: bool) -> Interval:
    """What of x is left where `x op y` holds. Unless `sure`, x may also be NaN."""
    nan = x.nan and not sure
    if op == "eq":
        return replace(meet(x, y), nan=nan)
    if op == "ne":
        gone = y.constant
        zero = x.zero and gone != 0
        return interval(x.low, x.high, zero, x.below and gone != -INF, x.above and gone != INF, nan)
    if op in ("lt", "le"):
        return replace(negated(_compared(negated(x), _TURNED[op], negated(y), sure)), nan=nan)
    strict = op == "gt"
    zero = x.zero and not (y.positive or (strict and y.nonnegative))
    below = x.below and y.below and not strict
    return interval(max(x.low, y.bottom), x.high, zero, below, x.above and not (strict and y == ABOVE), nan)


def _binary(op: str, a: Interval, b: Interval, dtype: DType) -> Interval:
    if op in _ARITHMETIC:
        return _ARITHMETIC[op](a, b)
    if op in _NEGATED:
        return _comparison(op, a, b)
    if op in ("and", "or", "xor") and dtype is bool_:
        return _logic(op, a.constant, b.constant)
    if op in ("mod", "fmod", "floordiv", "truncdiv"):
        return _division(op, a, b, dtype)
    if op == "pow":
        return _power(a, b)
    return of_type(dtype, finite=False) if op != "atan2" else interval(-4, 4, nan=a.nan or b.nan)


_ARITHMETIC: dict[str, Callable[[Interval, Interval], Interval]] = {
    "add": sum_,
    "sub": lambda a, b: sum_(a, negated(b)),
    "mul": product,
    "div": quotient,
    "maximum": larger,
    "minimum": smaller,
}


def _comparison(op: str, a: Interval, b: Interval) -> Interval:
    if op in ("lt", "le"):
        a, b, op = b, a, _TURNED[op]
    if a.nan or b.nan:
        return TRUTH
    x, y = a.constant, b.constant
    if op in ("eq", "ne"):
        apart = _above(a, b) or _above(b, a)
        apart = apart or (x is not None and not b.contains(x)) or (y is not None and not a.contains(y))
        if apart or (x is not None and x == y):
            return point(float(apart == (op == "ne")))
        return TRUTH
    if _above(a, b) or (op == "ge" and a.bottom >= b.top):
        return point(1)
    if _above(b, a) or (op == "gt" and b.bottom >= a.top):
        return ZERO
    return TRUTH


def _above(a: Interval, b: Interval) -> bool:
    """Whether every value of a is larger than every value of b."""
    edge = a.bottom
    return edge > b.top or (edge == b.top and not (a.contains(edge) and b.contains(edge)))


def _logic(op: str, a: float | None, b: float | None) -> Interval:
    if op == "and" and 0 in (a, b):
        return ZERO
    if op == "or" and 1 in (a, b):
        return point(1)
    if a is None or b is None:
        return TRUTH
    return point(float(bool(a) != bool(b)) if op == "xor" else 1.0 if op == "and" else 0.0)


def _division(op: str, a: Interval, b: Interval, dtype: DType) -> Interval:
    """Of remainders the sign is known: mod has the divisor's, fmod the dividend's."""
    nan = dtype.is_float and not (a.finite and b.nonzero and not b.nan)
    if op in ("floordiv", "truncdiv"):
        if not dtype.is_float and a.nonnegative and b.positive:
            return interval(0, max(a.high, 0))
        return replace(of_type(dtype, finite=False), nan=dtype.is_float)
    giver = b if op == "mod" else a
    limit = max(abs(b.low), abs(b.high)) if not b.empty and not (b.below or b.above) else INF
    low = 0.0 if giver.nonnegative else -limit
    high = 0.0 if giver.nonpositive else limit
    endless = dtype.is_float and (b.below or b.above)
    return interval(low, high, True, endless and low < 0, endless and high > 0, nan)


def _power(a: Interval, b: Interval) -> Interval:
    """(-0.0) ** n = -inf for odd n < 0: a zero has either sign."""
    n = b.constant
    if a.positive and a.finite and b.finite:
        return interval(0, INF, False)
    even = n is not None and n == n // 2 * 2
    if a.nonnegative or even:
        negative_zero = a.zero and not even and b.bottom < 0
        return interval(0, INF, below=negative_zero, above=True, nan=a.nan or b.nan)
    return ANYTHING


def _converted(x: Interval, old: DType, new: DType) -> Interval:
    if new.kind is Kind.BOOL:
        return ZERO if x.constant == 0 else point(1) if x.nonzero else TRUTH
    if new.is_float or not old.is_float:
        return x
    if not x.finite:
        return of_type(new)
    return rising(x, _trunc)


def _trunc(x: float) -> float:
    return x if math.isinf(x) else float(math.trunc(x))


def _flat(f: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: x if math.isinf(x) else float(f(x))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


def _two_to(x: float) -> float:
    return math.pow(2.0, x)


_RISING: dict[str, Callable[[Interval], Interval]] = {
    "exp": lambda x: _positive(x, math.exp),
    "exp2": lambda x: _positive(x, _two_to),
    "sigmoid": lambda x: _positive(x, _sigmoid),
    "expm1": lambda x: rising(x, math.expm1, zero=x.zero),
    "tanh": lambda x: rising(x, math.tanh, zero=x.zero),
    "erf": lambda x: rising(x, math.erf, zero=x.zero),
    "atan": lambda x: rising(x, math.atan, zero=x.zero),
    "asinh": lambda x: rising(x, math.asinh, zero=x.zero),
    "sinh": lambda x: rising(x, math.sinh, zero=x.zero),
    "asin": lambda x: rising(x, math.asin, (-1, 1), x.zero),
    "sqrt": lambda x: rising(x, math.sqrt, (0, INF), x.zero),
    "log": lambda x: _logarithm(x, math.log),
    "log2": lambda x: _logarithm(x, math.log2),
    "log10": lambda x: _logarithm(x, math.log10),
    "log1p": lambda x: (
        _logarithm(sum_(x, point(1)), math.log) if not x.nonnegative else rising(x, math.log1p, zero=x.zero)
    ),
    "floor": lambda x: rising(x, _flat(math.floor)),
    "ceil": lambda x: rising(x, _flat(math.ceil)),
    "trunc": lambda x: rising(x, _trunc),
    "round": lambda x: rising(x, _flat(round)),
    "erfc": lambda x: negated(rising(x, lambda v: -math.erfc(v), zero=False)),
}


def _positive(x: Interval, f: Callable[[float], float]) -> Interval:
    """The image under a rising function that is 0 only at -inf."""
    finite = rising(replace(x, below=False), f, zero=False)
    finite = interval(max(finite.low, 0), finite.high, False, finite.below, finite.above, finite.nan)
    return join((finite, ZERO)) if x.below else finite


def _logarithm(x: Interval, f: Callable[[float], float]) -> Interval:
    finite = rising(interval(x.low, x.high, False, x.below, x.above, x.nan), f, (0, INF))
    return join((finite, BELOW)) if x.zero else finite


def _unary(op: str, x: Interval, dtype: DType) -> Interval:
    if op in _RISING:
        return _RISING[op](x)
    if op == "neg":
        return negated(x)
    if op == "abs":
        return magnitude(x)
    if op == "not":
        return TRUTH if x.constant is None or dtype is not bool_ else point(1 - x.constant)
    if op == "reciprocal":
        return reciprocal(x)
    if op == "rsqrt":
        return reciprocal(_RISING["sqrt"](x))
    if op == "sign":
        known = interval(0.0 if x.nonnegative else -1.0, 0.0 if x.nonpositive else 1.0, x.zero)
        return join((known, ZERO)) if x.nan else known
    if op == "isnan":
        return point(1) if x == NAN else TRUTH if x.nan else ZERO
    if op == "isinf":
        return TRUTH if x.below or x.above else ZERO
    if op in ("sin", "cos"):
        return interval(-1, 1, nan=not x.finite)
    if op in ("cosh", "acosh"):
        return interval(1 if op == "cosh" else 0, INF, above=x.below or x.above, nan=x.nan or op == "acosh")
    if op == "acos":
        return interval(0, 4, nan=not (x.finite and x.low >= -1 and x.high <= 1))
    return of_type(dtype, finite=False)
