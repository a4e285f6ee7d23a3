"""Torch's symbolic sizes as index expressions. Nothing here asks a question that could install a guard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, canonicalize_bool_expr, free_unbacked_symbols
from torch.utils._sympy import functions as fn
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import bool_, f64, i64
from tilewright.ir.expr import Expr, call, cast, const, integer, symbol, where
from tilewright.ir.sizes import dims

SymbolicNumber = torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool
_LIMIT = 1 << 63


def factors(env: ShapeEnv | None) -> dict[sympy.Symbol, int]:
    """The number of which a size is known to be a multiple, where the program was traced under that condition."""
    found: dict[sympy.Symbol, int] = {}
    for fact in map(env.replace, env.divisible) if env is not None else ():
        size, by = fact.args if isinstance(fact, fn.Mod) else (None, None)
        if (
            isinstance(size, sympy.Symbol)
            and isinstance(by, sympy.Integer)
            and not free_unbacked_symbols(size)
        ):
            found[size] = math.lcm(found.get(size, 1), int(by))
    return {size: by for size, by in found.items() if 1 < by < _LIMIT}


def guarded_numbers(env: ShapeEnv | None) -> dict[sympy.Expr, sympy.Integer]:
    """The sizes made of others that are a number wherever the trace's guards hold: torch keeps their expressions."""
    found: dict[sympy.Expr, sympy.Integer] = {}
    if env is None:
        return found
    for guard in env.guards:
        fact = guard.expr
        if not isinstance(fact, sympy.Eq) or free_unbacked_symbols(fact):
            continue
        for size, number in (fact.args, fact.args[::-1]):
            if isinstance(number, sympy.Integer) and isinstance(size, sympy.Expr) and not size.is_Atom:
                found[env.replace(size)] = number
    return {size: number for size, number in found.items() if not size.is_Atom}


def factor_name(size: sympy.Symbol, by: int) -> str:
    """The name of the size that is `size` over `by`."""
    return f"{size.name}_{by}"


Ranges = Mapping[sympy.Symbol, ValueRanges[sympy.Expr]]
"""From where to where a size may go."""


class Symbols:
    """Translates the numbers of one captured graph; `env` is its ShapeEnv, or None if every size is a constant.

    A size that is known to be a multiple is that number times another size, so that views which rely on it are plain.
    Ranges of sizes that come from data hold because the program asserts them. To translate an assertion itself, give
    `asserted` False, and such sizes have no range; to translate guards, `guarded` False, and they do not make
    themselves true. Sizes that `ranges` names have those, not the ones of `env`."""

    def __init__(
        self,
        env: ShapeEnv | None,
        *,
        asserted: bool = True,
        guarded: bool = True,
        ranges: Ranges | None = None,
    ) -> None:
        self._env = env
        self._ranges = ranges or {}
        self._asserted = asserted
        self._factors = factors(env)
        self._numbers = guarded_numbers(env) if guarded else {}
        self._memo: dict[sympy.Basic, Expr] = {}
        self._asked: set[sympy.Expr] = set()
        self._ones: dict[sympy.Expr, sympy.Expr] = {}

    def expr(self, value: SymbolicNumber) -> Expr:
        """A host scalar: i64 for integers, f64 for floats, bool. Raises UnsupportedError for an unknown function."""
        if isinstance(value, bool):
            return const(value, bool_)
        if isinstance(value, int):
            return integer(value)
        if isinstance(value, float):
            return const(value, f64)
        return self._sympy(value.node.expr)

    def own(self, value: SymbolicNumber) -> Expr | None:
        """The symbol of a number that comes from data, whatever the program says that it is equal to."""
        if not isinstance(value, torch.SymInt):
            return None
        e = value.node._expr  # pyright: ignore[reportPrivateUsage]
        return self._symbol(e) if isinstance(e, sympy.Symbol) and free_unbacked_symbols(e) else None

    def shape(self, sizes: Sequence[SymbolicNumber]) -> tuple[Expr, ...]:
        """Sizes or strides of a tensor."""
        for s in sizes:
            self._learn(s)
        return tuple([integer(s) if type(s) is int else self.expr(s) for s in sizes])

    def strides(self, t: Tensor) -> tuple[Expr, ...]:
        """Strides of a tensor that has elements: then max(1, n) = n for each factor n >= 0 of its sizes. (Torch steps
        over an empty dim as over one element.)"""
        for n in t.shape:
            self._learn(n)
        sizes = [self._now(n.node.expr) for n in t.shape if isinstance(n, torch.SymInt)]
        parts = {n for e in sizes for n in (e, *sympy.Mul.make_args(e)) if not n.is_number}
        there = {fn.Max(sympy.S.One, n): n for n in parts if dims.at_least(self._sympy(n), 0)}
        return tuple(
            self._sympy(self._now(s.node.expr).xreplace(there)) if isinstance(s, torch.SymInt) else integer(s)
            for s in t.stride()
        )

    def _now(self, e: sympy.Expr) -> sympy.Expr:
        """`e` by what is known of its symbols by now."""
        now: sympy.Expr = e if self._env is None else self._env.replace(e)
        if self._numbers and not now.is_Atom:
            now = now.xreplace(self._numbers)  # pyright: ignore[reportAssignmentType]
        return now.xreplace(self._ones) if self._ones else now  # pyright: ignore[reportReturnType]

    def _sympy(self, e: sympy.Basic) -> Expr:
        found = self._memo.get(e)
        if found is None:
            found = self._memo[e] = self._convert(self._now(e) if isinstance(e, sympy.Expr) else e)
        return found

    def _learn(self, size: SymbolicNumber) -> None:
        """Note a size that is 1 in each call, not in the traced one alone. Of one that is made of others torch keeps
        the expression, and stretches the dim."""
        if self._env is None or not isinstance(size, torch.SymInt) or size.node.hint != 1:
            return
        e = self._now(size.node.expr)
        if e.is_Atom or e in self._asked or free_unbacked_symbols(e):
            return
        self._asked.add(e)
        question = canonicalize_bool_expr(self._env.simplify(sympy.Eq(e, 1)))
        known = self._env.axioms.get(question) or self._env._maybe_evaluate_static(question)  # pyright: ignore[reportPrivateUsage]
        if known is sympy.true:
            self._ones[e] = sympy.S.One
            self._memo.clear()  # it may have been met as a number before

    def ones(self) -> set[Expr]:
        """The sizes found so far that are 1 in each call, and not by their expression."""
        return {self._convert(e) for e in self._ones}

    def _convert(self, e: sympy.Basic) -> Expr:
        if isinstance(e, sympy.Symbol):
            return self._symbol(e)
        if isinstance(e, sympy.Integer):
            return integer(int(e))
        if isinstance(e, sympy.Float):
            return const(float(e), f64)
        if e is sympy.true or e is sympy.false:
            return const(e is sympy.true, bool_)
        if isinstance(e, sympy.Piecewise):
            return self._cases([(a.args[0], a.args[1]) for a in e.args])
        rounding = _ROUNDING.get(type(e))
        if rounding is not None:
            return self._rounded(e.args[0], rounding)
        build = _BUILD.get(type(e)) or _BUILD.get(e.func)
        if build is None:
            if isinstance(e, sympy.Pow) and isinstance(e.args[1], sympy.Integer) and int(e.args[1]) >= 0:
                return _power(self._convert(e.args[0]), integer(int(e.args[1])))
            if isinstance(e, sympy.Pow) and e.args[1].is_integer and e.args[1].is_nonnegative:
                return _natural_power(*map(self._convert, e.args))  # shifts before torch 2.12
            raise UnsupportedError(f"size expression {e} of kind {type(e).__name__}", phase="capture")
        return build(*[self._convert(a) for a in e.args])

    def _cases(self, cases: Sequence[tuple[sympy.Basic, sympy.Basic]]) -> Expr:
        """The first value whose condition holds; the last condition is taken as true."""
        out = self._convert(cases[-1][0])
        for value, condition in reversed(cases[:-1]):
            out = _where(self._convert(condition), self._convert(value), out)
        return out

    def _symbol(self, e: sympy.Symbol) -> Expr:
        low: int = -_LIMIT
        high: int | None = None
        free = not self._asserted and bool(free_unbacked_symbols(e))
        known = self._env.var_to_range.get(e) if self._env is not None else None
        bound = None if free else self._ranges.get(e, known)
        if bound is not None:
            if bound.lower not in (-int_oo, -sympy.oo):
                low = int(bound.lower)
            if bound.upper not in (int_oo, sympy.oo) and int(bound.upper) < _LIMIT - 1:
                high = int(bound.upper)
        factor = self._factors.get(e, 1)
        if factor == 1:
            return symbol(e.name, low, high)
        part = symbol(factor_name(e, factor), -(-low // factor), None if high is None else high // factor)
        return dims.mul(part, integer(factor))

    def _rounded(self, e: sympy.Basic, mode: str) -> Expr:
        """A float brought to an integer; exact integer division where the float is a known ratio of integers."""
        exact = self._ratio(e)
        if exact is not None:
            number, by = exact
            if mode == "ceil":
                return dims.ceildiv(number, by)
            if mode == "floor" or dims.at_least(number, 0):
                return dims.floordiv(number, by)
        return cast(call(mode, _float(self._convert(e))), i64)

    def _ratio(self, e: sympy.Basic) -> tuple[Expr, Expr] | None:
        """(numerator, positive denominator) of a float that is a ratio of integers, if that can be read off."""
        if isinstance(e, sympy.Integer):
            return integer(int(e)), dims.ONE
        if isinstance(e, sympy.Float):
            value = Fraction(float(e))
            return (
                (integer(value.numerator), integer(value.denominator))
                if value.denominator < 1 << 20
                else None
            )
        if isinstance(e, fn.ToFloat):
            return self._convert(e.args[0]), dims.ONE
        if isinstance(e, sympy.Symbol):
            return (self._symbol(e), dims.ONE) if e.is_integer else None
        if not isinstance(e, (sympy.Mul, sympy.Add, fn.FloatTrueDiv, fn.IntTrueDiv)):
            return None
        parts = [self._ratio(a) for a in e.args]
        known = [p for p in parts if p is not None]
        if len(known) < len(parts):
            return None
        if isinstance(e, sympy.Mul):
            return dims.mul(*[p[0] for p in known]), dims.mul(*[p[1] for p in known])
        (n, d), *rest = known
        for m, k in rest:
            if isinstance(e, sympy.Add):
                n, d = dims.add(dims.mul(n, k), dims.mul(m, d)), dims.mul(d, k)
            elif dims.at_least(m, 1):
                n, d = dims.mul(n, k), dims.mul(d, m)
            else:
                return None
        return n, d


def _float(e: Expr) -> Expr:
    return cast(e, f64)


def _fold(op: str, exact: Callable[..., Expr]) -> Callable[..., Expr]:
    def build(*args: Expr) -> Expr:
        if all(a.dtype is i64 for a in args):
            return exact(*args)
        total = _float(args[0])
        for a in args[1:]:
            total = call(op, total, _float(a))
        return total

    return build


def _pairs(exact: Callable[[Expr, Expr], Expr]) -> Callable[..., Expr]:
    def build(*args: Expr) -> Expr:
        total = args[0]
        for a in args[1:]:
            total = exact(total, a)
        return total

    return build


def _power(base: Expr, exponent: Expr) -> Expr:
    times = dims.static(exponent)
    if times is not None and times >= 0 and base.dtype is i64:
        return dims.mul(*[base] * times)
    return call("pow", _float(base), _float(exponent))


def _natural_power(base: Expr, exponent: Expr) -> Expr:
    """An integer, as torch marks powers whose exponent is one and not negative; its shifts are made of them."""
    if base.dtype is exponent.dtype is i64 and dims.static(exponent) is None:
        return call("pow", base, exponent)
    return _power(base, exponent)


def _divide(a: Expr, b: Expr) -> Expr:
    return call("div", _float(a), _float(b))


def _compare(op: str) -> Callable[[Expr, Expr], Expr]:
    def build(a: Expr, b: Expr) -> Expr:
        if a.dtype is b.dtype is i64:
            decided = _decided(op, dims.sub(b, a))
            return call(op, a, b) if decided is None else const(decided, bool_)
        return call(op, _float(a), _float(b))

    return build


def _decided(op: str, gap: Expr) -> bool | None:
    """Whether `a op b` holds, if that is proved, given b - a."""
    back = dims.mul(gap, integer(-1))
    if op in ("eq", "ne"):
        if dims.static(gap) == 0:
            return op == "eq"
        return op == "ne" if dims.at_least(gap, 1) or dims.at_least(back, 1) else None
    if dims.at_least(gap, 1 if op == "lt" else 0):
        return True
    return False if dims.at_least(back, 0 if op == "lt" else 1) else None


def _swapped(op: str) -> Callable[[Expr, Expr], Expr]:
    return lambda a, b: _compare(op)(b, a)


def _logical(op: str) -> Callable[..., Expr]:
    return _pairs(lambda a, b: call(op, a, b))


def _unary(op: str) -> Callable[[Expr], Expr]:
    return lambda a: call(op, _float(a))


def _where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return where(condition, yes, no) if yes.dtype is no.dtype else where(condition, _float(yes), _float(no))


_ROUNDING: dict[type, str] = {
    fn.CeilToInt: "ceil",
    fn.FloorToInt: "floor",
    fn.TruncToInt: "trunc",
    fn.RoundToInt: "round",
    sympy.floor: "floor",
    sympy.ceiling: "ceil",
}

_BUILD: dict[object, Callable[..., Expr]] = {
    sympy.Add: _fold("add", dims.add),
    sympy.Mul: _fold("mul", dims.mul),
    fn.FloorDiv: _pairs(dims.floordiv),
    fn.CleanDiv: _pairs(dims.floordiv),
    fn.CeilDiv: _pairs(dims.ceildiv),
    fn.Mod: _pairs(dims.mod),
    fn.PythonMod: _pairs(dims.mod),
    fn.ModularIndexing: lambda a, d, m: dims.mod(dims.floordiv(a, d), m),
    fn.Max: _fold("maximum", _pairs(dims.maximum)),
    fn.Min: _fold("minimum", _pairs(dims.minimum)),
    sympy.Max: _fold("maximum", _pairs(dims.maximum)),
    sympy.Min: _fold("minimum", _pairs(dims.minimum)),
    fn.PowByNatural: _natural_power,
    fn.FloatPow: _power,
    fn.FloatTrueDiv: _divide,
    fn.IntTrueDiv: _divide,
    fn.ToFloat: _float,
    fn.TruncToFloat: _unary("trunc"),
    fn.Identity: lambda a: a,
    fn.Where: _where,
    fn.OpaqueUnaryFn_sqrt: _unary("sqrt"),
    fn.OpaqueUnaryFn_exp: _unary("exp"),
    fn.OpaqueUnaryFn_log: _unary("log"),
    fn.OpaqueUnaryFn_log2: _unary("log2"),
    sympy.Abs: lambda a: dims.maximum(a, dims.mul(a, integer(-1))) if a.dtype is i64 else call("abs", a),
    sympy.Eq: _compare("eq"),
    sympy.Ne: _compare("ne"),
    sympy.Lt: _compare("lt"),
    sympy.Le: _compare("le"),
    sympy.Gt: _swapped("lt"),
    sympy.Ge: _swapped("le"),
    sympy.And: _logical("and"),
    sympy.Or: _logical("or"),
    sympy.Not: lambda a: call("not", a),
}
