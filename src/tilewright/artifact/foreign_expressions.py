"""Expressions of a graph that nobody vouches for: each node one that the language has, each read inside its tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from tilewright.analysis.runtime_checks import from_data, inside_of
from tilewright.ir.dtype import DTYPES, Kind, bool_, i64
from tilewright.ir.expr import OF_PROGRAM, SCALARS, Axis, Expr, Symbol, conjuncts, make, walk
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.tuning.input_limits import ARTIFACTS

SYMBOL = re.compile(r"[su][0-9]{1,9}")
_UNTOLD = re.compile(r"[^A-Za-z0-9_.:]")
_DIVISIONS = frozenset({"floordiv", "mod", "truncdiv", "fmod"})


class Unsafe(Exception):
    """What cannot be made harmless."""


def check_divisions(e: Expr) -> None:
    """Raise Unsafe where a divisor may be zero. One that comes from data is tested when it runs."""
    for x in walk(e):
        if (
            x.op in _DIVISIONS
            and not x.dtype.is_float
            and not from_data(x.args[1])
            and not dims.at_least(x.args[1], 1)
        ):
            raise Unsafe(f"{x} may divide by zero")


class ReadsInside:
    """Moves the reads of one expression to places inside of their tensors."""

    def __init__(self, whole: Expr, inputs: Sequence[Value]) -> None:
        self._inputs = inputs
        self._reading: set[Expr] = set()
        for x in walk(whole):
            if x.op == "read" or not self._reading.isdisjoint(x.args):
                self._reading.add(x)
        self._made: dict[tuple[Expr, tuple[Expr, ...]], Expr] = {}

    def held(self, e: Expr, known: tuple[Expr, ...]) -> Expr:
        """A part of the expression with each read inside, under conditions that are `known` to hold."""
        if e not in self._reading:
            return e
        found = self._made.get((e, known))
        if found is None:
            if len(self._made) > ARTIFACTS.max_expression_nodes:
                raise Unsafe("an expression has too many parts")
            found = self._made[e, known] = self._moved(e, known)
        return found

    def _moved(self, e: Expr, known: tuple[Expr, ...]) -> Expr:
        if e.op == "read":
            assert isinstance(e.value, int)
            if not 0 <= e.value < len(self._inputs) or len(e.args) != len(self._inputs[e.value].shape):
                raise Unsafe(f"{e} reads no operand")
            index = [self.held(i, known) for i in e.args]
            shape = self._inputs[e.value].shape
            places = tuple(_place(i, n, known) for i, n in zip(index, shape, strict=True))
            return make("read", places, e.dtype, e.value)
        if e.op == "where":
            condition = self.held(e.args[0], known)
            yes = self.held(e.args[1], (*known, *conjuncts(condition)))
            return _again(e, (condition, yes, self.held(e.args[2], known)))
        return _again(e, tuple(self.held(a, known) for a in e.args))


def _again(e: Expr, args: tuple[Expr, ...]) -> Expr:
    return e if args == e.args else make(e.op, args, e.dtype, e.value)


def _place(i: Expr, size: Expr, known: tuple[Expr, ...]) -> Expr:
    """An index inside a dim of `size`. One that comes from data is tested when it runs."""
    missing = inside_of(i, size)
    if missing is None or from_data(i) or set(conjuncts(missing)) <= set(known):
        return i
    if not dims.at_least(size, 1):
        raise Unsafe(f"{i} may lie outside of {size} elements")
    return dims.minimum(dims.maximum(i, dims.ZERO), dims.sub(size, dims.ONE))


def check_node(x: Expr) -> None:
    """Raise Unsafe unless a node is one of the language."""
    if DTYPES.get(x.dtype.name) is not x.dtype:
        raise Unsafe(f"{x.dtype} is no type of an element")
    match x.op:
        case "const":
            whole = type(x.value) in (bool,) if x.dtype.kind is Kind.BOOL else type(x.value) is int
            whole = type(x.value) in (float, Fraction) if x.dtype.is_float else whole
            good = (
                whole and not x.args and (not isinstance(x.value, Fraction) or math.isfinite(float(x.value)))
            )
        case "symbol":
            good = isinstance(x.value, Symbol) and _is_size(x.value) and not x.args and x.dtype is i64
        case "axis":
            good = isinstance(x.value, Axis) and not x.args and x.dtype is i64
        case "read":
            good = type(x.value) is int and all(a.dtype is i64 for a in x.args)
        case _:
            rule = SCALARS.get(x.op)
            good = rule is not None and rule.arity == len(x.args) and x.value in (None, OF_PROGRAM)
            good = good and _fits(x, rule.result if rule is not None else "")
    if not good:
        raise Unsafe(f"{plain_name(x.op)} {plain_name(x.value)} is no node of an expression")


def _is_size(s: Symbol) -> bool:
    ends = type(s.low) is int and (s.high is None or (type(s.high) is int and s.high >= s.low))
    return type(s.name) is str and SYMBOL.fullmatch(s.name) is not None and ends


def _fits(x: Expr, result: str) -> bool:
    """Whether the types of a node are those that its operation has."""
    types = [a.dtype for a in x.args]
    if result == "branch":
        return types[0] is bool_ and types[1] is types[2] is x.dtype
    if result == "given":
        return True
    return len(set(types)) == 1 and (x.dtype is bool_ if result == "bool" else x.dtype is types[0])


def nodes_of(e: Expr) -> Iterable[Expr]:
    """The parts of an expression. Raises Unsafe where there are too many."""
    found = walk(e)
    if len(found) > ARTIFACTS.max_expression_nodes:
        raise Unsafe(f"an expression has {len(found)} parts")
    return found


def plain_name(text: object) -> str:
    """A name that may stand in generated code."""
    return _UNTOLD.sub("_", str(text))[:80] or "op"
