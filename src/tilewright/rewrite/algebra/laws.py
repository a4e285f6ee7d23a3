"""Laws that move factors and terms over the border of a reduction, as data.

They are few, and they hold of tensor expressions, not of ops: a product on either side of a matmul, a normaliser, a
scale and a mask are factors and terms that do or do not read the axes of a sum. Pointwise ops in between are looked
through, and copied without the factor if others read them too.

In exact arithmetic a law holds on its own. In floats it also needs that what is left is neither infinite nor 0 where
the program's own intermediates are not, and that NaN and infinities stay where they are, which `bounds` proves. So a
softmax without its maximum is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tilewright.ir import reduction
from tilewright.ir.dtype import DType, Kind, bool_
from tilewright.ir.expr import Expr, axes_of, axis, call, cast, const, read, substitute, walk, where
from tilewright.ir.pattern import Proof
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.tuning.input_limits import MODELS

from .bounds import LARGEST_FINITE
from .factors import Draft, Factored, constant, constant_value, factors, terms
from .region import Step, operand, position
from .scale import scaled, scaled_operand

Found = Iterator[tuple[Step, ...]]


@dataclass(frozen=True, slots=True)
class AlgebraRule:
    """`find` gives the ways in which the rule applies at a step: steps to add or redefine, producers first. `law` is
    what makes it true, `proof` the arithmetic in which it is, `condition` what floats need besides."""

    name: str
    find: Callable[[Draft, Step], Found]
    law: str
    proof: Proof
    condition: str


ENDLESS = "the factor may be infinite or NaN"
ROUNDED = "what is left would be rounded anew in half precision"
CANCELS = "terms may cancel: their signs are unknown"


# --- what floats need ------------------------------------------------------------


def _leaves_sum(d: Draft, p: Factored, step: Step) -> bool:
    """Whether the sum of what is left is finite where the program's is, and the factor keeps NaN and infinities."""
    f = d.bounds.of(p.part)
    if p.divides:
        harmless, gentle = (
            not f.zero and f.least > 0,
            f.finite and f.largest <= MODELS.max_assumed_tensor_elements,
        )
        shrinks = not f.zero and f.least >= 1
    else:
        harmless, gentle = f.finite, not f.zero and f.least >= 1 / MODELS.max_assumed_tensor_elements
        shrinks = f.largest <= 1
    most = LARGEST_FINITE[step.value.dtype.name]
    room = d.bounds.of(p.rest).largest * MODELS.max_assumed_tensor_elements <= most
    if not harmless:
        why = "the divisor may be 0" if p.divides else ENDLESS
    elif not (gentle or room):
        why = "what is left may overflow"
    else:
        why = "" if _keeps_precision(d, p, shrinks) else ROUNDED
    return d.allows(p.part, why)


def _keeps_precision(d: Draft, p: Factored, shrinks: bool) -> bool:
    """Whether what is left passes the roundings to half precision on its way: exactly, or without overflow and with no
    less magnitude than before (the factor that it lost `shrinks`)."""
    return all(r.exact or (r.fits and shrinks and not d.round_intermediates) for r in p.rounded)


def _leaves_extreme(d: Draft, p: Factored, step: Step) -> bool:
    """Whether a factor is positive, and no infinity that would make NaN of 0."""
    f = d.bounds.of(p.part)
    if not (f.positive and f.finite):
        return d.allows(p.part, "the sign of the factor is unknown" if f.finite else ENDLESS)
    precise = _keeps_precision(d, p, shrinks=f.largest <= 1 and not p.divides)
    return d.allows(p.part, "" if precise else ROUNDED)


# --- out of reductions ------------------------------------------------------------


def _banned(step: Step) -> frozenset[Expr]:
    return frozenset(axis(a) for a in step.expr.reduce)


def _outside(d: Draft, step: Step, rest: Expr, finish: Callable[[Expr], Expr], made: tuple[Step, ...],
             kind: reduction.Reduction | None = None) -> tuple[Step, ...]:  # fmt: skip
    """The steps that reduce `rest` instead, and apply `finish` to the result."""
    assert step.expr.reduction is not None
    expr = replace(step.expr, body=(rest,), reduction=kind or step.expr.reduction)
    inner = d.make(step, expr, expr.dtypes[0])
    element = read(inner.id, [position(a) for a in step.expr.axes], inner.value.dtype)
    return (*made, inner, replace(step, expr=TensorExpr(step.expr.axes, (finish(element),)), name="outside"))


def _times(p: Factored, wide: DType) -> Callable[[Expr], Expr]:
    return lambda e: call("div" if p.divides else "mul", e, cast(p.part, wide))


def factor_leaves_sum(d: Draft, step: Step, rounded: bool = False, exponential: bool = False) -> Found:
    """Sums of products with a factor that does not read the axes of the sum: without a rounding on its way, or with
    one (`rounded`), or one that comes out of an exponential."""
    if step.simple != "add" or not step.value.dtype.is_float or not step.has_terms:
        return
    for p in factors(d, step.body, _banned(step)):
        if (
            any(not r.exact for r in p.rounded) is rounded
            and p.exponential is exponential
            and _leaves_sum(d, p, step)
        ):
            yield _outside(d, step, p.rest, _times(p, step.value.dtype), p.made)


def factor_leaves_extreme(d: Draft, step: Step) -> Found:
    """Maxima and minima of products with a positive factor."""
    if step.simple not in ("maximum", "minimum") or not step.value.dtype.is_float or not step.has_terms:
        return
    for p in factors(d, step.body, _banned(step)):
        if not p.exponential and _leaves_extreme(d, p, step):
            yield _outside(d, step, p.rest, _times(p, step.value.dtype), p.made)


def term_leaves_extreme(d: Draft, step: Step) -> Found:
    """Maxima and minima of sums with a term that does not read their axes."""
    if step.simple not in ("maximum", "minimum") or not step.value.dtype.is_float or not step.has_terms:
        return
    for p in terms(d, step.body, _banned(step), "add"):
        if p.mask is None and d.bounds.of(p.part).finite and all(r.exact for r in p.rounded):
            yield _outside(d, step, p.rest, lambda e, p=p: call("add", e, cast(p.part, e.dtype)), p.made)


def bound_leaves_extreme(d: Draft, step: Step) -> Found:
    """Maxima and minima of clamped elements, with a bound that does not read their axes."""
    if step.simple not in ("maximum", "minimum") or not step.has_terms:
        return
    for op in ("maximum", "minimum"):
        for p in terms(d, step.body, _banned(step), op):
            yield _outside(d, step, p.rest, lambda e, p=p, op=op: call(op, e, cast(p.part, e.dtype)), p.made)


def condition_leaves_any(d: Draft, step: Step) -> Found:
    """`any` of conjunctions and `all` of disjunctions with a condition that does not read their axes."""
    op = {"or": "and", "and": "or"}.get(step.simple or "") if step.value.dtype is bool_ else None
    if op is None:
        return
    for p in terms(d, step.body, _banned(step), op):
        yield _outside(d, step, p.rest, lambda e, p=p, op=op: call(op, e, p.part), p.made)


def comparison_leaves_any(d: Draft, step: Step) -> Found:
    """`any` and `all` of comparisons of integers with a threshold that does not read their axes."""
    if step.simple not in ("or", "and") or step.value.dtype is not bool_ or not step.has_terms:
        return
    e = d.seen(step.body)
    if e.op not in ("ge", "gt", "le", "lt") or e.args[0].dtype.kind not in (Kind.INT, Kind.UINT):
        return
    for x, t, turned in ((*e.args, False), (*reversed(e.args), True)):
        if not axes_of(t) & _banned(step):
            grows = (e.op in ("ge", "gt")) is not turned
            kind = reduction.maximum if grows is (step.simple == "or") else reduction.minimum
            compare = lambda m, t=t, turned=turned: call(e.op, *((t, m) if turned else (m, t)))  # noqa: E731
            yield _outside(d, step, x, compare, (), kind(x.dtype))


MONOTONE = ("exp", "exp2", "tanh", "sigmoid", "erf")
"""Functions that never fall and are defined everywhere."""


def function_leaves_extreme(d: Draft, step: Step) -> Found:
    """Maxima and minima of a function that never falls, whose elements nobody else reads: exponentials that are less by
    a maximum fold beside it only if it is one of what they see."""
    e = d.seen(step.body)
    extreme = step.simple in ("maximum", "minimum") and step.has_terms
    if extreme and e.op in MONOTONE and not _is_read_by_others(d, step):
        yield _outside(d, step, e.args[0], lambda x: call(e.op, x), ())


def _is_read_by_others(d: Draft, step: Step) -> bool:
    """Whether other steps read the elements of a reduction, or these are a result."""
    e, passed = step.body, set[int]()
    while (made := d.pointwise(e)) is not None:
        passed.add(made.id)
        e = made.expr.at(e.args)
    others = (s for s in d.program.steps.values() if s is not step and s.id not in passed)
    return not passed.isdisjoint(d.program.outputs) or any(not passed.isdisjoint(s.reads) for s in others)


def term_leaves_sum(d: Draft, step: Step) -> Found:
    """Sums of elements with a term that does not read the axes of the sum."""
    if step.simple != "add" or not step.value.dtype.is_float or not step.has_terms:
        return
    for p in terms(d, step.body, _banned(step), "add"):
        if p.rounded or not d.allows(p.part, "" if _same_sign(d, p.rest, p.part) else CANCELS):
            continue
        made, times = _counted(d, step, p)
        add = lambda e, t=times: call("add", e, t)  # noqa: E731
        yield _outside(d, step, p.rest, add, (*p.made, *made))


def _counted(d: Draft, step: Step, p: Factored) -> tuple[tuple[Step, ...], Expr]:
    """The term times the number of elements that its mask admits (0 for none, also of NaN), with the steps that count
    them."""
    kind = step.value.dtype
    term = cast(p.part, kind)
    if p.mask is None:
        return (), call("mul", cast(dims.prod(a.extent for a in step.expr.reduce), kind), term)
    one, zero = const(1, kind), const(0, kind)
    count = d.make(step, replace(step.expr, body=(where(p.mask, one, zero),)), kind, "count")
    n = read(count.id, [position(a) for a in step.expr.axes], kind)
    return (count,), where(call("eq", n, zero), zero, call("mul", n, term))


def _same_sign(d: Draft, a: Expr, b: Expr) -> bool:
    x, y = d.bounds.of(a), d.bounds.of(b)
    return (x.low >= 0 and y.low >= 0) or (x.high <= 0 and y.high <= 0)


def sum_splits(d: Draft, step: Step) -> Found:
    """Sums of products, one factor of which is a sum of two terms."""
    if step.simple != "add" or not step.value.dtype.is_float:
        return
    for a, b in _distributed(d, step.body):
        if d.allows(call("add", a, b), "" if _same_sign(d, a, b) else CANCELS):
            first = d.make(step, replace(step.expr, body=(a,)), step.value.dtype)
            element = read(first.id, [position(x) for x in step.expr.axes], step.value.dtype)
            yield _outside(d, step, b, lambda e, x=element: call("add", x, e), (first,))


def _distributed(d: Draft, e: Expr) -> Iterator[tuple[Expr, Expr]]:
    """The ways to write a product as a sum of two, by a factor that makes no NaN of 0."""
    e = d.seen(e)
    if e.op == "add":
        yield e.args[0], e.args[1]
    elif e.op == "mul":
        for x, y in (e.args, e.args[::-1]):
            for a, b in _distributed(d, x) if d.bounds.of(y).finite else ():
                yield call("mul", a, y), call("mul", b, y)
    elif e.op == "div" and not d.bounds.of(e.args[1]).zero:
        for a, b in _distributed(d, e.args[0]):
            yield call("div", a, e.args[1]), call("div", b, e.args[1])


def sums_join(d: Draft, step: Step) -> Found:
    """Two sums of products that share a factor and are added."""
    e = step.body
    if not step.expr.is_pointwise or e.op != "add" or any(x.op != "read" for x in e.args):
        return
    first, second = (d.step(operand(x)) for x in e.args)
    if first is None or second is None or first is second or any(s.simple != "add" for s in (first, second)):
        return
    if e.args[0].args != e.args[1].args or first.expr.shape != second.expr.shape:
        return
    same = dict(zip(second.expr.axes + second.expr.reduce, first.expr.axes + first.expr.reduce, strict=False))
    if any(not dims.equal(a.extent, b.extent) for a, b in same.items()):
        return
    if len(second.expr.reduce) != len(first.expr.reduce) or first.value.dtype.is_half:
        return
    x, y = first.body, second.expr.renamed(same).body[0]
    if x.op != "mul" or y.op != "mul":
        return
    for w in x.args:
        if w in y.args and d.bounds.of(w).finite:
            a, b = (t.args[0] if t.args[1] is w else t.args[1] for t in (x, y))
            if _operand_type(a).is_half or _operand_type(b).is_half:
                continue  # the sum of the operands would be rounded, and might not fit
            joined = d.make(
                first, replace(first.expr, body=(call("mul", call("add", a, b), w),)), first.value.dtype
            )
            body = read(joined.id, e.args[0].args, joined.value.dtype)
            yield joined, replace(step, expr=replace(step.expr, body=(body,)))


def _operand_type(e: Expr) -> DType:
    while e.op in ("cast", "narrow"):
        e = e.args[0]
    return e.dtype


# --- into sums, and into the exponent ------------------------------------------------------------


def factor_enters_sum(d: Draft, step: Step, into: str = "sum") -> Found:
    """Products of a sum and a factor, where one operand of the sum has the axes of the factor; the smaller one gets
    it. `into` "constant" merges it with another constant factor instead."""
    if not step.expr.is_pointwise:
        return
    for node in walk(step.body):
        if node.op not in ("mul", "div") or not node.dtype.is_float:
            continue
        for x, f in (node.args, node.args[::-1]) if node.op == "mul" else (node.args,):
            part = constant(f, node.op == "div") or Factored(x, f, node.op == "div")
            found = scaled(d, x, part, into)
            if found is not None:
                new, made = found
                yield (
                    *made,
                    replace(step, expr=replace(step.expr, body=(substitute(step.body, {node: new}),))),
                )


def factor_changes_sides(d: Draft, step: Step) -> Found:
    """Sums of products, one operand of which has a factor that only reads axes of the other."""
    e = step.body
    if step.simple != "add" or e.op != "mul" or not e.dtype.is_float:
        return
    for x, y in (e.args, e.args[::-1]):
        for p in factors(d, x, axes_of(x) - axes_of(y)):
            if axes_of(p.part) <= axes_of(y) and not p.exponential and _leaves_sum(d, p, step):
                found = scaled_operand(d, step, y, p)
                if found is not None:
                    body = call("mul", p.rest, found[0])
                    yield (*p.made, *found[1], replace(step, expr=replace(step.expr, body=(body,))))


def factor_stands_in_exp(d: Draft, step: Step) -> Found:
    """Exponents whose terms share a constant factor."""
    for body in step.expr.body if step.expr.is_pointwise else ():
        for node in walk(body):
            if node.op != "exp" or _is_scaled(node.args[0]):
                continue
            for p in factors(d, node.args[0], frozenset(), constants=True):
                value = constant_value(p.part)
                if (
                    value is None
                    or not 1 / MODELS.max_assumed_tensor_elements
                    <= abs(value)
                    <= MODELS.max_assumed_tensor_elements
                ):
                    continue
                if not all(r.exact for r in p.rounded):
                    continue
                new = call("exp", call("mul", p.rest, cast(p.part, p.rest.dtype)))
                yield (*p.made, replace(step, expr=replace(step.expr, body=(substitute(body, {node: new}),))))


def _is_scaled(e: Expr) -> bool:
    return e.op in ("mul", "div") and any(a.op == "const" for a in e.args)


def _rounding(d: Draft, step: Step) -> Found:
    return factor_leaves_sum(d, step, rounded=True)


def _exponential(d: Draft, step: Step) -> Found:
    return factor_leaves_sum(d, step, exponential=True)


def _merging(d: Draft, step: Step) -> Found:
    return factor_enters_sum(d, step, "constant")


HEADROOM = (
    "what is left is at most 2^40 times larger, or far from the largest float; the factor is no infinity"
)

RULES: tuple[AlgebraRule, ...] = (
    AlgebraRule("factor leaves sum", factor_leaves_sum, "sum(x*f) = sum(x)*f, f free of the axes", "field", HEADROOM),
    AlgebraRule("factor leaves sum of rounded", _rounding, "sum(half(x/f)*y) = sum(half(x)*y)/f, f free of the axes",
                "real only", "|f| >= 1 and half(x) does not overflow; " + HEADROOM),
    AlgebraRule("exponential leaves sum", _exponential, "sum(exp(t+u)*y) = sum(exp(t)*y)*exp(u), u free of the axes",
                "exp", "t and u have one sign, so that neither exponential is beyond that of their sum; " + HEADROOM),
    AlgebraRule("factor leaves maximum", factor_leaves_extreme, "max(x*f) = max(x)*f, f free of the axes", "order",
                "f > 0 and finite"),
    AlgebraRule("term leaves maximum", term_leaves_extreme, "max(x+t) = max(x)+t, t free of the axes", "order",
                "t is finite"),
    AlgebraRule("bound leaves maximum", bound_leaves_extreme, "max(min(x,t)) = min(max(x),t), t free of the axes",
                "order", "the axes are not empty"),
    AlgebraRule("function leaves maximum", function_leaves_extreme, "max(g(x)) = g(max(x)), g never falls", "order",
                "g is defined everywhere; the axes are not empty"),
    AlgebraRule("condition leaves any", condition_leaves_any, "any(p and t) = any(p) and t; all(p or t) = all(p) or t",
                "order", "none"),
    AlgebraRule("comparison leaves any", comparison_leaves_any, "any(x >= t) = max(x) >= t, and so on", "order",
                "there is no NaN: x is an integer"),
    AlgebraRule("term leaves sum", term_leaves_sum, "sum where(m, x+t, 0) = sum where(m, x, 0) + t * count(m)", "ring",
                "nothing cancels: x and t have one sign"),
    AlgebraRule("sum splits", sum_splits, "sum((a+b)*c) = sum(a*c) + sum(b*c)", "ring",
                "nothing cancels: the terms have one sign; c is finite"),
    AlgebraRule("sums join", sums_join, "sum(a*c) + sum(b*c) = sum((a+b)*c)", "ring",
                "c is finite; a and b are not rounded to half precision"),
    AlgebraRule("factor enters sum", factor_enters_sum, "sum(x*y)*f = sum((x*f)*y), f free of the axes", "field",
                "|f| <= 1, or x*f does not overflow; f is a constant if x is in half precision (tiny x lose digits)"),
    AlgebraRule("factor changes sides", factor_changes_sides, "sum((x*f)*y) = sum(x*(y*f))", "field",
                "as for leaving x, and for entering y"),
    AlgebraRule("constants merge", _merging, "(x*c)*d = x*(c*d)", "field", "neither overflows"),
    AlgebraRule("factor stands in exp", factor_stands_in_exp, "exp(x*c - y*c) = exp((x - y)*c)", "field",
                "c is neither tiny nor huge; nothing is rounded to half precision anew"),
)  # fmt: skip
"""Every rule. Factors are looked for under products, quotients, conversions and masks, and in all terms of sums."""
