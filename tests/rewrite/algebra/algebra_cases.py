"""One move of a rule at a time, and small programs on which each rule applies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tilewright.interp import EXACT, FLOATS, REALS, Array, equal, exact_random, run_graph
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType, f16, f32, i32
from tilewright.ir.expr import Expr, call, const, integer
from tilewright.ir.graph import Graph, Value
from tilewright.ir.ops import contract, norm, pointwise, reduce, view
from tilewright.ir.ops.common import pointwise as each
from tilewright.rewrite.algebra.laws import RULES, AlgebraRule
from tilewright.rewrite.algebra.search import Search, Walk, ops_of, program_of
from tilewright.rewrite.normal.normalise import normalise

RULE = {rule.name: rule for rule in RULES}


def after(graph: Graph, rule: str | AlgebraRule, limit: float | None = 8.0, **options: bool) -> list[Graph]:
    """The graphs that one use of a rule leads to. Inputs are trusted to stay below `limit`."""
    chosen = RULE[rule] if isinstance(rule, str) else rule
    program, values = program_of(graph, graph.ops, graph.ops, {})
    walk = Walk(
        program, Search(rules=(chosen,), limit=limit, **options), lambda step: graph.ops[step.source].name
    )
    first = 1 + max(v.id for v in values)
    found: list[Graph] = []
    for move in walk.moves(program):
        new = walk.after(walk.start, move).program
        found.append(normalise(graph.with_ops(ops_of(new, graph.ops, values, first))))
        found[-1].verify()
    return found


def exact_inputs(graph: Graph, seed: int = 0, low: float = -1, high: float = 1) -> list[Array]:
    """Unknowns in general position for every float input, small numbers for integers and bools."""
    rng = np.random.default_rng(seed)
    out: list[Array] = []
    for k, v in enumerate(graph.inputs):
        assert isinstance(v, Value)
        shape = tuple(int(s.value) for s in v.shape)  # type: ignore[arg-type]
        if v.dtype.is_float:
            out.append(exact_random(shape, 17 * seed + k, low, high))
        else:
            out.append(FLOATS.load(rng.integers(-5, 5, shape), v.dtype))
    return out


def agree(a: Graph, b: Graph, seed: int = 0) -> bool:
    """Whether two graphs compute the same in exact arithmetic."""
    inputs = exact_inputs(a, seed)
    pairs = zip(run_graph(a, inputs, EXACT), run_graph(b, inputs, EXACT), strict=True)
    return all(isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and equal(x, y) for x, y in pairs)


class Net:
    """A builder of a program over inputs of small random sizes."""

    def __init__(self, seed: int = 0, dtype: DType = f32) -> None:
        self.b = Builder()
        self.dtype = dtype
        rng = np.random.default_rng(seed)
        self.m, self.n, self.k = (int(x) for x in rng.integers(1, 6, 3))
        self.inputs: list[Value] = []

    def input(self, *shape: int, dtype: DType | None = None) -> Value:
        self.inputs.append(self.b.value(tuple(map(integer, shape)), dtype or self.dtype))
        return self.inputs[-1]

    def at_least_one(self, *shape: int) -> Value:
        """1 + x * x."""
        return each(
            self.b, "some", lambda e: call("add", const(1, e.dtype), call("mul", e, e)), self.input(*shape)
        )

    def positive(self, x: Value) -> Value:
        """exp(-x * x): in (0, 1]."""
        return each(self.b, "positive", lambda e: call("exp", call("neg", call("mul", e, e))), x)

    def times(self, x: Value, y: Value) -> Value:
        return pointwise.mul(self.b, x, y)

    def over(self, x: Value, y: Value) -> Value:
        return pointwise.div(self.b, x, y)

    def plus(self, x: Value, y: Value) -> Value:
        return pointwise.add(self.b, x, y)

    def scaled(self, x: Value, by: float, op: str = "mul") -> Value:
        return each(self.b, op, lambda e: call(op, e, const(by, e.dtype)), x)

    def matmul(self, x: Value, y: Value) -> Value:
        return contract.matmul(self.b, x, y)

    def a(self) -> Value:
        return self.input(self.m, self.k)

    def bb(self) -> Value:
        return self.input(self.k, self.n)

    def done(self, *outputs: Value) -> Graph:
        return normalise(self.b.finish(self.inputs, list(outputs)))


Case = Callable[[Net], Sequence[Value]]


def _attention(net: Net, half: bool = False) -> Value:
    b = net.b
    q, k, v = net.input(net.m, 3), net.input(net.k, 3), net.input(net.k, net.n)
    s = net.scaled(net.matmul(q, view.transpose(b, k, 0, 1)), 1.7, "div")
    p = norm.softmax(b, s, -1, f32)
    return net.matmul(pointwise.to(b, p, f16) if half else p, pointwise.to(b, v, f16) if half else v)


def _masked(net: Net, x: Value, otherwise: float) -> Value:
    keep = net.input(net.m, net.k, dtype=i32)

    def choose(e: Expr, c: Expr) -> Expr:
        return call("where", call("gt", c, const(0, i32)), e, const(otherwise, e.dtype))

    return each(net.b, "masked", choose, x, keep)


CASES: dict[str, dict[str, Case]] = {
    "factor leaves sum": {
        "left row": lambda t: [t.matmul(t.times(t.a(), t.input(t.m, 1)), t.bb())],
        "right column": lambda t: [t.matmul(t.a(), t.times(t.bb(), t.input(1, t.n)))],
        "left divisor": lambda t: [t.matmul(t.over(t.a(), t.at_least_one(t.m, 1)), t.bb())],
        "constant": lambda t: [reduce.sum_(t.b, t.scaled(t.a(), 0.3), [1])],
        "negated": lambda t: [reduce.sum_(t.b, pointwise.neg(t.b, t.times(t.a(), t.input(t.m, 1))), [1])],
        "both terms": lambda t: [
            (lambda f: reduce.sum_(t.b, t.plus(t.times(t.a(), f), t.times(t.a(), f)), [1]))(t.input(t.m, 1))
        ],
        "masked": lambda t: [reduce.sum_(t.b, _masked(t, t.scaled(t.a(), 0.3), 0.0), [1])],
        "in the denominator": lambda t: [
            reduce.sum_(t.b, t.over(t.a(), t.times(t.at_least_one(t.m, 1), t.at_least_one(t.m, t.k))), [1])
        ],
        "softmax": lambda t: [_attention(t)],
    },
    "exponential leaves sum": {
        "exponent": lambda t: [
            reduce.sum_(t.b, each(t.b, "exp", lambda x, y: call("exp", call("sub", call("neg", call("mul", x, x)),
                                                                                call("mul", y, y))),
                                  t.a(), t.input(t.m, 1)), [1])],
    },
    "factor leaves sum of rounded": {"softmax": lambda t: [_attention(t, half=True)]},
    "factor leaves maximum": {
        "constant": lambda t: [reduce.amax(t.b, t.scaled(t.a(), 0.3), [1])],
        "minimum": lambda t: [reduce.amin(t.b, t.scaled(t.a(), 0.3, "div"), [1])],
        "positive": lambda t: [reduce.amax(t.b, t.times(t.a(), t.positive(t.input(t.m, 1))), [1])],
        "masked": lambda t: [reduce.amax(t.b, _masked(t, t.scaled(t.a(), 0.3), -np.inf), [1])],
    },
    "term leaves maximum": {
        "row": lambda t: [reduce.amax(t.b, t.plus(t.a(), t.input(t.m, 1)), [1])],
        "subtracted": lambda t: [reduce.amin(t.b, pointwise.sub(t.b, t.a(), t.input(t.m, 1)), [1])],
        "from": lambda t: [reduce.amax(t.b, pointwise.sub(t.b, t.input(t.m, 1), t.a()), [1])],
        "masked": lambda t: [
            reduce.amax(t.b, _masked(t, each(t.b, "add", lambda e: call("add", e, const(0.3, f32)), t.a()), -np.inf),
                        [1])],
    },
    "bound leaves maximum": {
        "above": lambda t: [reduce.amax(t.b, pointwise.minimum(t.b, t.a(), t.input(t.m, 1)), [1])],
        "below": lambda t: [reduce.amin(t.b, pointwise.maximum(t.b, t.a(), t.input(t.m, 1)), [1])],
    },
    "function leaves maximum": {
        "exp": lambda t: [reduce.amax(t.b, pointwise.exp(t.b, t.a()), [1])],
        "tanh": lambda t: [reduce.amin(t.b, pointwise.tanh(t.b, t.a()), [1])],
    },
    "condition leaves any": {
        "and": lambda t: [reduce.any_(t.b, pointwise.logical_and(t.b, *_conditions(t)), [1])],
        "or": lambda t: [reduce.all_(t.b, pointwise.logical_or(t.b, *_conditions(t)), [1])],
    },
    "comparison leaves any": {
        f"{holds.__name__}{op}": lambda t, op=op, holds=holds: [holds(t.b, each(t.b, op, lambda x, y: call(op, x, y),
                                                        t.input(t.m, t.k, dtype=i32), t.input(t.m, 1, dtype=i32)), [1])]
        for op in ("ge", "gt", "le", "lt") for holds in (reduce.any_, reduce.all_)
    },
    "term leaves sum": {
        "positive": lambda t: [reduce.sum_(t.b, t.plus(t.positive(t.a()), t.positive(t.input(t.m, 1))), [1])],
        "masked": lambda t: [
            reduce.sum_(t.b, _masked(t, t.plus(t.positive(t.a()), t.positive(t.input(t.m, 1))), 0.0), [1])],
    },
    "sum splits": {
        "product": lambda t: [t.matmul(t.plus(t.positive(t.a()), t.positive(t.input(1, t.k))), t.positive(t.bb()))],
    },
    "sums join": {
        "same right side": lambda t: [(lambda w: t.plus(t.matmul(t.a(), w), t.matmul(t.a(), w)))(t.bb())],
    },
    "factor enters sum": {
        "constant": lambda t: [t.scaled(t.matmul(t.a(), t.bb()), 0.3)],
        "divisor": lambda t: [t.scaled(t.matmul(t.a(), t.bb()), 3.3, "div")],
        "row": lambda t: [t.times(t.matmul(t.a(), t.bb()), t.positive(t.input(t.m, 1)))],
        "column": lambda t: [t.times(t.matmul(t.a(), t.bb()), t.positive(t.input(1, t.n)))],
        "both terms": lambda t: [t.scaled(t.plus(t.matmul(t.a(), t.bb()), t.matmul(t.a(), t.bb())), 0.3)],
        "masked": lambda t: [t.scaled(_masked(_square(t), t.matmul(t.a(), t.bb()), -np.inf), 0.3)],
    },
    "factor changes sides": {
        "inner": lambda t: [t.matmul(t.times(t.a(), t.positive(t.input(1, t.k))), t.bb())],
    },
    "constants merge": {
        "quotient": lambda t: [t.scaled(t.scaled(t.a(), 3.0, "div"), 7.0)],
        "quotients": lambda t: [t.scaled(t.scaled(t.a(), 3.0, "div"), 7.0, "div")],
        "product": lambda t: [t.scaled(t.scaled(t.a(), 0.3), 0.7)],
    },
    "factor stands in exp": {
        "difference": lambda t: [
            each(t.b, "exp", lambda x, y: call("exp", call("sub", x, y)), t.scaled(t.a(), 0.3),
                 t.scaled(t.input(t.m, 1), 0.3))],
        "masked": lambda t: [pointwise.exp(t.b, _masked(t, t.scaled(t.a(), 0.3), -np.inf))],
    },
}  # fmt: skip
"""For each rule programs on which it applies."""


def _square(net: Net) -> Net:
    """The same net with as many columns as the mask has."""
    net.n = net.k
    return net


def _conditions(net: Net) -> tuple[Value, Value]:
    kinds = [net.input(net.m, net.k, dtype=i32), net.input(net.m, 1, dtype=i32)]
    first, second = (each(net.b, "gt", lambda e: call("gt", e, const(0, i32)), x) for x in kinds)
    return first, second


def build(case: Case, seed: int = 0, dtype: DType = f32) -> Graph:
    """The graph of a case, with sizes drawn by the seed."""
    net = Net(seed, dtype)
    return net.done(*case(net))


__all__ = ["CASES", "RULE", "Net", "after", "agree", "build", "exact_inputs"]


def special_inputs(graph: Graph, seed: int, huge: float = 3e38) -> list[Array]:
    """Random numbers with some extreme ones among them."""
    extreme = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, huge, -huge, 1e-38, 65504.0, 300.0, 1e-6]
    rng = np.random.default_rng(seed)
    out: list[Array] = []
    for v in graph.inputs:
        assert isinstance(v, Value)
        shape = tuple(int(s.value) for s in v.shape)  # type: ignore[arg-type]
        if not v.dtype.is_float:
            out.append(FLOATS.load(rng.integers(-5, 5, shape), v.dtype))
            continue
        x = np.where(
            rng.random(shape) < rng.choice([0.05, 0.2]), rng.choice(extreme, shape), rng.uniform(-2, 2, shape)
        )
        out.append(FLOATS.load(x.astype(np.float32), v.dtype))
    return out


def kind(x: Array) -> Array:
    """0 for numbers, else which infinity, or NaN."""
    x = x.astype(np.float64)
    return np.where(np.isnan(x), 3, np.where(np.isposinf(x), 1, np.where(np.isneginf(x), 2, 0)))


def keeps_what_is_not_finite(graph: Graph, new: Graph, inputs: list[Array]) -> bool:
    """NaN and infinities stand where they stood, or, where the program overflows, at least nowhere else than in exact
    arithmetic. A number stays a number."""
    for a, b, exact in zip(
        run_graph(graph, inputs), run_graph(new, inputs), run_graph(graph, inputs, REALS), strict=True
    ):
        assert isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and isinstance(exact, np.ndarray)
        if a.dtype.kind in "iub":
            if not np.all((a == b) | (b == exact)):
                return False
            continue
        before, now = kind(a), kind(b)
        if not np.all((now == before) | ((before != 0) & (now == kind(exact)))):
            return False
    return True
