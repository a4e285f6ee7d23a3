"""Random tensor expressions: the vectorised interpreter against a plain loop over every point."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.errors import IndexOutOfRange
from tilewright.interp import FLOATS, evaluate
from tilewright.interp.evaluate import TensorEvaluator
from tilewright.ir import reduction
from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Axis, Expr, axis, call, const, integer, read, where
from tilewright.ir.reduction import Reduction
from tilewright.ir.tensor import TensorExpr

I, J, R, S = (Axis(n, integer(e)) for n, e in (("i", 3), ("j", 2), ("r", 4), ("s", 2)))  # noqa: E741
VECTOR, MATRIX = np.array([3, -1, 4, 1, -5]), np.arange(12).reshape(3, 4) % 5 - 1
OPERANDS = [VECTOR, MATRIX]
KINDS: list[Reduction] = [
    reduction.sum_(i64),
    reduction.maximum(i64),
    reduction.argmin(i64),
    reduction.product(i64),
]


@st.composite
def bodies(draw: st.DrawFn, depth: int = 3) -> Expr:
    """Integer expressions; a read may be out of range unless a guard protects it."""
    kind = draw(st.integers(0, 6 if depth else 1))
    if kind == 0:
        return axis(draw(st.sampled_from([I, J, R, S])))
    if kind == 1:
        return const(draw(st.integers(-3, 4)), i64)
    more = bodies(depth - 1)
    if kind == 2:
        return guarded(draw, 0, [draw(more)], draw(st.booleans()))
    if kind == 3:
        return guarded(draw, 1, [draw(more), draw(more)], draw(st.booleans()))
    if kind == 4:
        compare = call(draw(st.sampled_from(["lt", "ge", "eq"])), draw(more), draw(more))
        return where(compare, draw(more), draw(more))
    op = draw(st.sampled_from(["add", "sub", "mul", "maximum", "floordiv", "mod"]))
    return call(op, draw(more), draw(more))


def guarded(draw: st.DrawFn, operand: int, index: list[Expr], guard: bool) -> Expr:
    element = read(operand, index, i64)
    if not guard:
        return element
    inside: Expr = const(True, bool_)
    for e, size in zip(index, OPERANDS[operand].shape, strict=True):
        inside = call("and", inside, call("and", call("ge", e, integer(0)), call("lt", e, integer(size))))
    return where(inside, element, const(draw(st.integers(-2, 2)), i64))


def at(e: Expr, point: dict[Axis, int]) -> int:
    """The value at one point, lazily; raises IndexError and ZeroDivisionError."""
    if isinstance(e.value, Axis):
        return point[e.value]
    if e.op == "const":
        assert isinstance(e.value, (bool, int))
        return e.value
    if e.op == "where":
        return at(e.args[1] if at(e.args[0], point) else e.args[2], point)
    args = [at(a, point) for a in e.args]
    if e.op == "read":
        source = OPERANDS[e.value]  # type: ignore[index]
        if any(not 0 <= a < n for a, n in zip(args, source.shape, strict=True)):
            raise IndexError(e)
        return int(source[tuple(args)])
    plain = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "maximum": max,
        "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "lt": lambda a, b: a < b,
        "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "and": lambda a, b: a and b,
    }  # fmt: skip
    return plain[e.op](*args)


def fold(kind: Reduction, elements: list[tuple[int, ...]]) -> tuple[int, ...]:
    if kind.name == "argmin":
        return min(elements, key=lambda e: (e[0], e[1]))
    values = [e[0] for e in elements]
    if kind.name == "prod":
        out = 1
        for v in values:
            out *= v
        return (out,)
    return (sum(values),) if kind.name == "sum" else (max(values),)


def plain(t: TensorExpr) -> list[np.ndarray]:
    """Every element by itself."""
    sizes = [range(a.extent.value) for a in t.axes]  # type: ignore[arg-type]
    outs: list[np.ndarray] = [np.zeros([len(s) for s in sizes], object) for _ in t.dtypes]
    for place in itertools.product(*sizes):
        here = dict(zip(t.axes, place, strict=True))
        if t.reduction is None:
            outs[0][place] = at(t.body[0], here)
            continue
        points = [here]
        if t.scan is not None:
            points = [here | {t.scan: k} for k in range(here[t.scan] + 1)]
        for a in t.reduce:
            points = [p | {a: k} for p in points for k in range(a.extent.value)]  # type: ignore[arg-type]
        for out, v in zip(
            outs, fold(t.reduction, [tuple(at(b, p) for b in t.body) for p in points]), strict=True
        ):
            out[place] = v
    return outs


@pytest.mark.parametrize("limit", [1 << 22, 5])
@pytest.mark.parametrize("form", ["pointwise", "reduce", "scan"])
def test_against_a_loop(form: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values agree; where the loop fails, the interpreter raises too. Blocks of any size give the same."""
    monkeypatch.setattr(evaluate, "PIECES", replace(evaluate.PIECES, evaluated_points=limit))

    @settings(max_examples=250)
    @given(bodies(), st.sampled_from(KINDS), st.permutations([I, J, R, S]))
    def check(body: Expr, kind: Reduction, order: list[Axis]) -> None:
        if form == "pointwise":
            t = TensorExpr(tuple(order), (body,))
        else:
            kept, over = tuple(order[:2]), tuple(order[2:])
            if form == "scan":
                kept, over = tuple(order), ()
            number = (
                axis(order[-1])
                if form == "scan"
                else call("add", call("mul", axis(over[0]), integer(4)), axis(over[1]))
            )
            elements = (body, number) if kind.name == "argmin" else (body,)
            t = TensorExpr(kept, elements, over, kind, order[-1] if form == "scan" else None)
        run = TensorEvaluator(t, FLOATS, OPERANDS, {}).run
        try:
            want = plain(t)
        except (IndexError, ZeroDivisionError):
            with pytest.raises((IndexOutOfRange, ZeroDivisionError)):
                run()
            return
        if any(abs(x) >= 2**62 for w in want for x in w.ravel()):
            return
        for got, w in zip(run(), want, strict=True):
            assert np.array_equal(got, w.astype(np.int64))

    check()
