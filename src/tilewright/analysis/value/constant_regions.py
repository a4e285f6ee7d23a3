"""The value property: predicates over axes under which elements are known constants, and the signs of all values.

Pointwise ops are seen through, so a mask that several ops build is one expression; reductions are left standing, with
what is known of their results. A score behind a causal mask is -inf where its key is later than its query; its power is
0 there, if the row's maximum is provably finite, which it is where some element of every row is provably not masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tilewright.ir.expr import Axis, Expr, axes_of, axis, make, read, substitute, transform, walk
from tilewright.ir.graph import Op, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.tuning.search_limits import FACTS

from . import conditions
from .cases import Case, Cases, Chooser, folded
from .conditions import TRUE, Condition, TooManyTerms
from .interval import Interval, interval, join
from .sign import Signs, of_type, reduction_signs


@dataclass(frozen=True, slots=True)
class ConstantRegion:
    """Elements are `constant` wherever `condition` holds. The condition is over the axes i0, i1, ... of the value (of
    the op, for elements of a reduction) and may read data: `read(n, index)` is the value with id n."""

    condition: Expr
    constant: Expr


Regions = tuple[ConstantRegion, ...]


class ValueAnalysis:
    """Runs over ops in order. With `finite`, floats in memory are taken as finite (so -inf hides what is added to it,
    and 0 what it is multiplied with); else nothing is assumed of them."""

    def __init__(self, ops: Sequence[Op], finite: bool = True) -> None:
        self.finite = finite
        self.of_read: dict[int, Interval] = {}
        self.chooser = Chooser(Signs({}, self.of_read))
        self.element: dict[Value, Expr] = {}
        self.sign: dict[Value, Interval] = {}
        self.regions: dict[Value, Regions] = {}
        self.element_regions: dict[Op, Regions] = {}
        for op in ops:
            for v in op.inputs:
                self.sign.setdefault(v, of_type(v.dtype, finite))
            if op.expr is None:
                self.sign |= {v: of_type(v.dtype, finite) for v in op.outputs}
            elif op.expr.reduction is None:
                self.pointwise(op, op.expr)
            else:
                self.reduction(op, op.expr)

    def pointwise(self, op: Op, expr: TensorExpr) -> None:
        v = op.output
        own = output_axes(v.shape)
        table = {axis(a): _place(b) for a, b in zip(expr.axes, own, strict=True)}
        body = self.inlined(substitute(expr.body[0], table), op)
        found = self.chooser.cases(body)
        self.sign[v] = self.sign_of_cases(found)
        self.regions[v] = self.exported(found)
        if all(count < FACTS.max_inlined_nodes for count, _ in enumerate(walk(body))):
            self.element[v] = body

    def inlined(self, body: Expr, op: Op) -> Expr:
        """A body with reads of pointwise values replaced by what they are, and other reads by value id."""

        def change(r: Expr) -> Expr | None:
            if r.op != "read":
                return None
            assert isinstance(r.value, int)
            return self.at(op.inputs[r.value], tuple(transform(i, change) for i in r.args))

        return transform(body, change)

    def at(self, v: Value, index: tuple[Expr, ...]) -> Expr:
        inner = self.element.get(v)
        if inner is not None:
            return substitute(inner, {axis(a): i for a, i in zip(output_axes(v.shape), index, strict=True)})
        self.of_read[v.id] = self.sign[v]
        return read(v.id, index, v.dtype)

    def sign_of_cases(self, cases: Cases) -> Interval:
        return join(self.chooser.signs.of(c.value) for c in cases)

    def exported(self, cases: Cases) -> Regions:
        """The constant cases, by what is known of their conditions without opaque tests."""
        found: list[ConstantRegion] = []
        for c in cases:
            if c.value.op == "const":
                clear = frozenset(t for t in c.condition if not any(_is_opaque(x) for x in t))
                if clear:
                    found.append(ConstantRegion(conditions.as_expr(clear), c.value))
        return tuple(sorted(found, key=repr))

    # --- reductions

    def reduction(self, op: Op, expr: TensorExpr) -> None:
        assert expr.reduction is not None
        single = {axis(a): dims.ZERO for a in (*expr.axes, *expr.reduce) if a.extent is dims.ONE}
        body = [self.inlined(substitute(b, single), op) for b in expr.body]
        split = [self.chooser.cases(b) for b in body]
        some = all(dims.at_least(a.extent, 1) for a in expr.reduce)
        signs = list(reduction_signs(expr.reduction, [self.sign_of_cases(c) for c in split], some))
        if expr.reduction.combiner is not None and expr.scan is None:
            signs[0] = self.sharpened(expr, split[0], signs[0])
        self.sign |= dict(zip(op.outputs, signs, strict=True))
        self.element_regions[op] = self.exported(split[0])
        for v in op.outputs:
            self.regions[v] = ()
        if len(op.outputs) == 1:
            self.regions[op.output] = self.constant_results(expr, split[0], some)

    def constant_results(self, expr: TensorExpr, cases: Cases, some: bool) -> Regions:
        """c (+) c = c: where all that is folded is such a constant c, so is the result."""
        r = expr.reduction
        assert r is not None
        if r.combiner is None or expr.scan is not None or r.lift[0].op != "slot" or r.finish[0].op != "slot":
            return ()
        leaves: list[Case] = []
        reduced = {axis(a) for a in expr.reduce}
        table = {axis(a): _place(b) for a, b in zip(expr.axes, output_axes(expr.shape), strict=True)}
        for c in cases:
            free = frozenset(t for t in c.condition if not any(axes_of(x) & reduced for x in t))
            if c.value.op != "const" or not free or not (some or c.value is r.identity[0]):
                continue
            if folded(make(r.combiner, (c.value, c.value), c.value.dtype)) is c.value:
                leaves.append(Case(conditions.at(free, table), c.value))
        return self.exported(tuple(leaves))

    def sharpened(self, expr: TensorExpr, cases: Cases, sign: Interval) -> Interval:
        """What is known of a reduction besides, if one of its elements is provably in a good case for every result: a
        maximum is above -inf if one element is, a sum of nonnegative numbers is positive if one of them is."""
        assert expr.reduction is not None
        op = expr.reduction.combiner
        if op == "maximum" and sign.below and self.has_one(expr, cases, lambda x: not (x.below or x.nan)):
            return replace(sign, below=False)
        if op == "minimum" and sign.above and self.has_one(expr, cases, lambda x: not (x.above or x.nan)):
            return replace(sign, above=False)
        sums = op == "add" and sign.nonnegative and not sign.nan and sign.zero
        if sums and self.has_one(expr, cases, lambda x: x.positive and not x.nan):
            return interval(sign.low, sign.high, False, above=sign.above)
        return sign

    def has_one(self, expr: TensorExpr, cases: Cases, good: Callable[[Interval], bool]) -> bool:
        """Whether every result folds an element in a case whose values are good."""
        fine = [c.condition for c in cases if good(self.chooser.signs.of(c.value))]
        return any(_always(c, place) for place in _places(expr) for c in fine)


def _place(a: Axis) -> Expr:
    return dims.ZERO if a.extent is dims.ONE else axis(a)


def _is_opaque(x: Expr) -> bool:
    return any(n.op == "slot" for n in walk(x))


def _places(expr: TensorExpr) -> Iterator[dict[Expr, Expr]]:
    """Places of the reduced axes that may show something: first, last, and as far as each output axis, from either
    end."""
    choices: list[list[Expr]] = []
    for r in expr.reduce:
        own = [dims.ZERO, dims.sub(r.extent, dims.ONE)] if dims.at_least(r.extent, 1) else []
        for a in expr.axes:
            gap = dims.sub(r.extent, a.extent)
            if a.extent is not dims.ONE and dims.at_least(gap, 0):
                own += [axis(a), dims.add(axis(a), gap)]
        choices.append(list(dict.fromkeys(own)))
    for chosen in product(*choices):
        yield {axis(r): c for r, c in zip(expr.reduce, chosen, strict=True)}


def _always(c: Condition, place: Mapping[Expr, Expr]) -> bool:
    try:
        return conditions.at(c, place) == TRUE
    except TooManyTerms:
        return False
