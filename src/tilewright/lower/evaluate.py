"""Evaluation on demand: expressions of a kernel become loads, computations and stores where some axes are bound.

A scope remembers what has been evaluated in it, so that an expression is computed once where it is needed; a loop opens
a scope of its own and forgets it afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from tilewright.analysis.condition_ranges import End
from tilewright.analysis.needed_checks import needed_parts, repeated_parts
from tilewright.analysis.predicate import Truths, decide
from tilewright.analysis.runtime_checks import DIVISION_ERROR, INDEX_ERROR, divisor, unsafe
from tilewright.form.exp2 import power_of_two, quick_power
from tilewright.form.merge_selects import merge_selects
from tilewright.ir.dtype import DType, f32
from tilewright.ir.expr import (
    SCALARS,
    Axis,
    Expr,
    axes_of,
    axis,
    both,
    call,
    const,
    cost,
    is_const,
    rebuild,
    substitute,
    walk,
)
from tilewright.ir.form import Item
from tilewright.ir.program import Buffer, Check, Compute, Load, Stmt, Store, Var, value_of
from tilewright.ir.schedule import Role
from tilewright.ir.sizes import dims
from tilewright.rewrite.algebra.factors import constant_value, number
from tilewright.tuning.thresholds import LOWERING

from .plan import LoopContext

MIN_FACTOR = 2.0**-120
"""Constants are taken as numbers of full precision down to this, and up to its inverse."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Where an expression is held in scratch between passes."""

    buffer: Buffer
    offset: Expr


@dataclass(frozen=True, slots=True)
class LoopScope:
    """What holds here: bound axes with their tiles, their first and last values, tails that need masks, and conditions
    known to hold or not. And what has been found here: evaluated expressions, results of folds, expressions with a
    place in scratch, those of them whose loop is complete, and numbers from memory that loops end at."""

    bound: Mapping[Axis, int]
    spans: Mapping[Axis, tuple[Expr, Expr]]
    tails: Mapping[Axis, Expr] = field(default_factory=dict)
    truths: Truths = field(default_factory=dict)
    memo: dict[tuple[Expr, Expr | None], Expr] = field(default_factory=dict)
    results: dict[tuple[int, int], Expr] = field(default_factory=dict)
    kept: dict[Expr, Kept] = field(default_factory=dict)
    ready: set[Expr] = field(default_factory=set)
    ends: dict[End, Expr] = field(default_factory=dict)

    def child(self) -> LoopScope:
        """A scope that finds things of its own."""
        return replace(
            self, memo=dict(self.memo), results=dict(self.results), kept=dict(self.kept), ready=set(self.ready),
            ends=dict(self.ends),
        )  # fmt: skip

    def inside(
        self, a: Axis, tile: int, mask: Expr | None, span: tuple[Expr, Expr] | None, truths: Truths | None
    ) -> LoopScope:
        """The scope of a step of a loop over `a`."""
        inner, known = self.child(), set(truths or ())
        memo = {k: v for k, v in inner.memo.items() if not known & set(walk(k[0]))} if known else inner.memo
        own = (axis(a), axis(a)) if tile == 1 else span
        return replace(
            inner,
            bound={**self.bound, a: tile},
            spans=self.spans if own is None else {**self.spans, a: own},
            tails=self.tails if mask is None else {**self.tails, a: mask},
            truths={**self.truths, **(truths or {})},
            memo=memo,
        )


Demand = Callable[[int], None]
"""What writes a fold, by number, that is wanted where some axes are bound."""


class Evaluator:
    """Evaluates the expressions of a form under a schedule into the statement list `out`. Folds that it needs are asked
    of `compute`."""

    def __init__(self, known: LoopContext, compute: Demand) -> None:
        self.form, self.schedule, self.contractions = known.form, known.schedule, known.contractions
        form, self.compute = known.form, compute
        sized = enumerate(zip(form.params, form.sizes, strict=True))
        self.params = tuple(Buffer(f"p{k}", v.dtype, size) for k, (v, size) in sized)
        self.out: list[Stmt] = []
        points = [c.axis for c in self.schedule.tiling.classes if c.role is Role.GRID and not c.chunk]
        self.scope = LoopScope(dict.fromkeys(points, 1), {a: (axis(a), axis(a)) for a in points})
        self.vars: dict[int, Var] = {}
        roots = [r for i in form.items for r in i.roots]
        self.shared = _shared(roots)
        self.repeated = repeated_parts(roots, form.sizes)
        self.stepped = any(_steps(x) for r in roots for x in walk(r))
        self.written: set[Expr] = set()
        self.fetching: frozenset[int] = frozenset()
        self.states: dict[int, tuple[Var, ...]] = {}
        self.idle: dict[int, float] = {}
        """What lanes outside masks have of loaded values, where a fold relies on it."""

    def block(
        self, a: Axis, tile: int, mask: Expr | None, inner: Callable[[], None],
        span: tuple[Expr, Expr] | None = None, truths: Truths | None = None,
    ) -> tuple[Stmt, ...]:  # fmt: skip
        """The statements that `inner` writes with `a` bound in steps of `tile` within `span`; what it learns is
        forgotten afterwards."""
        return self.apart(self.scope.inside(a, tile, mask, span, truths), inner)

    def apart(self, scope: LoopScope, inner: Callable[[], None]) -> tuple[Stmt, ...]:
        """The statements that `inner` writes in a scope."""
        outer_scope, outer_out = self.scope, self.out
        self.scope, self.out = scope, []
        inner()
        body = tuple(self.out)
        self.scope, self.out = outer_scope, outer_out
        return body

    def var(self, dtype: DType, axes: tuple[Axis, ...]) -> Var:
        """A new value."""
        v = Var(len(self.vars), dtype, axes)
        self.vars[v.id] = v
        return v

    def blocks(self, e: Expr) -> tuple[Axis, ...]:
        """Block axes of an evaluated expression."""
        found: dict[Axis, None] = {}
        for x in walk(e):
            if x.op == "var" and isinstance(x.value, int):
                found |= dict.fromkeys(self.vars[x.value].axes)
            elif x.op == "axis" and isinstance(x.value, Axis) and self.scope.bound.get(x.value, 1) > 1:
                found[x.value] = None
        return tuple(found)

    def named(self, e: Expr) -> Expr:
        """A name for an evaluated expression."""
        if not e.args:
            return e
        v = self.var(e.dtype, self.blocks(e))
        self.out.append(Compute(v, e))
        return value_of(v)

    def eval(self, e: Expr, guard: Expr | None = None) -> Expr:
        """`e` with reads loaded and folds resolved; `guard` is the condition under which its reads are meant. What may
        fail and is needed on several ways is computed first, so that sides of choices find it."""
        if self.repeated and (self.repeated & set(walk(e))):
            asked = lambda c: decide(c, self.scope.truths)  # noqa: E731
            needed = needed_parts(e, self.repeated, asked, self._is_known)[e]
            for x in walk(e):
                if x in needed:
                    self.part(x, guard)
        return self.part(e, guard)

    def _is_known(self, e: Expr) -> bool:
        return e.op == "value" or (e in self.scope.kept and e in self.scope.ready)

    def part(self, e: Expr, guard: Expr | None) -> Expr:
        """`eval` where what is needed is computed. A value that was computed under a weaker condition (the guard
        without its last terms) serves as well."""
        if e.op in ("const", "symbol", "axis"):
            return e
        if e in self.scope.kept:
            guard = None  # who reads scratch may do so under another condition
        key = (e, guard if guard is not None and unsafe(e, self.params) else None)
        done = self.scope.memo.get(key)
        if done is None and e in self.repeated:
            weaker = (self.scope.memo.get((e, g)) for g in _weaker(key[1]))
            done = next((found for found in weaker if found is not None), None)
        if done is None:
            done = self.evaluated(e, key[1])
            self.scope.memo[key] = done
        return done

    def evaluated(self, e: Expr, guard: Expr | None) -> Expr:
        """`part` without the memo."""
        if e in self.scope.kept and e in self.scope.ready:
            return self.reload(e)
        if e.op == "value" and isinstance(e.value, tuple):
            if e.value not in self.scope.results:
                self.compute(e.value[0])
            return self.scope.results[e.value]
        if e.op == "read":
            return self.load(e, guard)
        if e.op == "checked":
            self.check(self.eval(e.args[1]), INDEX_ERROR, None)
            return self.part(e.args[0], guard)
        if e.op == "where":
            asked = decide(e.args[0], self.scope.truths)
            if asked.op == "const":
                chosen = self.part(e.args[1] if asked.value else e.args[2], guard)
                if e in self.scope.kept:
                    self.leave_in_scratch(e, chosen)
                held = e in self.shared and cost(e) >= LOWERING.min_held_cost
                return self.named(chosen) if held else chosen
            merged = self.schedule.math.merged_selects and e not in self.scope.kept
            one = merge_selects(rebuild(e, (asked, *e.args[1:]))) if merged else None
            if one is not None:
                return self.part(one, guard)
            condition = self.part(asked, guard)
            yes = self.eval(e.args[1], both(guard, condition))
            no = self.eval(e.args[2], both(guard, call("not", condition)))
            masked = e.args[1].op == "read" and unsafe(e.args[1], self.params) and is_const(no, 0)
            result = yes if masked else call("where", condition, yes, no)
        elif e.op == "exp" and self.schedule.math.exp2 and e.dtype.compute is f32:
            quick = "exp2" in self.schedule.math.fast
            x = self.part(e.args[0], guard)
            result = power_of_two(x, lambda t: len(self.blocks(t)), self.named, quick)
        elif e.op == "exp" and "exp2" in self.schedule.math.fast and e.dtype.compute is f32:
            result = quick_power(self.part(e.args[0], guard))
        elif e.op == "exp" and self.schedule.math.accurate and e.dtype is f32:
            result = call("close_exp", self.part(e.args[0], guard))
        elif e.op == "sigmoid" and self.schedule.math.accurate and e.dtype is f32:
            power = call("close_exp", call("neg", self.part(e.args[0], guard)))
            result = call("close_div", const(1, f32), call("add", const(1, f32), power))
        else:
            parts = tuple(self.part(a, guard) for a in e.args)
            result = self.applied(e, parts)
            if divisor(e) is not None:
                self.check(call("ne", parts[1], const(0, e.dtype)), DIVISION_ERROR, guard)
        if e in self.scope.kept:
            result = self.named(result)
            self.leave_in_scratch(e, result)
        return self.named(result) if e in self.shared and result.args else result

    def applied(self, e: Expr, args: tuple[Expr, ...]) -> Expr:
        """The operation of `e` on evaluated arguments. What a mask that is known to admit all adds, zero, is not added
        (which only a zero's sign could tell). Beside products of halves, division by a constant is multiplication by
        its inverse, unless something is rounded to whole numbers, which shows the least difference."""
        if e.op == "add" and e.dtype.is_float:
            for own, a, other in ((e.args[0], *args), (e.args[1], args[1], args[0])):
                if own.op == "where" and is_const(a, 0):
                    return other
        beside_halves = self.schedule.math.exp2 and not self.stepped
        if e.op == "div" and beside_halves and e.dtype is f32 and args[1].op == "const":
            inverse = _inverse(args[1])
            if inverse is not None:
                return call("mul", args[0], number(inverse, f32))
        if self.schedule.math.accurate and e.dtype is f32 and e.op in ("div", "reciprocal"):
            return call("close_div", *args) if e.op == "div" else call("close_div", const(1, f32), *args)
        return rebuild(e, args)

    def leave_in_scratch(self, e: Expr, value: Expr) -> None:
        """Store the value of a kept expression."""
        where = self.scope.kept[e]
        self.written.add(e)
        blocks = tuple(dict.fromkeys((*self.blocks(where.offset), *self.blocks(value))))
        self.out.append(Store(where.buffer, where.offset, value, blocks, self.tail(blocks)))

    def reload(self, e: Expr) -> Expr:
        """What an earlier pass left in scratch."""
        where = self.scope.kept[e]
        blocks = self.blocks(where.offset)
        var = self.var(e.dtype, blocks)
        self.out.append(Load(var, where.buffer, where.offset, self.tail(blocks), const(0, e.dtype)))
        return value_of(var)

    def check(self, tested: Expr, code: int, guard: Expr | None) -> None:
        """Test a condition in the lanes that count. One number is tested in each lane that a guard tells of."""
        blocks = self.blocks(tested)
        if guard is not None:
            blocks = tuple(dict.fromkeys(blocks + self.blocks(guard)))
        self.out.append(Check(tested, code, blocks, both(self.tail(blocks), guard)))

    def load(self, e: Expr, guard: Expr | None) -> Expr:
        """A read of a parameter. What a guard says holds inside the extents of its own axes alone."""
        assert isinstance(e.value, int)
        offset = self.eval(e.args[0], guard)
        blocks = self.blocks(offset)
        asked = blocks if guard is None else dict.fromkeys(blocks + self.blocks(guard))
        mask = both(self.tail(asked), guard)
        if mask is not None:
            blocks = tuple(dict.fromkeys(blocks + self.blocks(mask)))
        var = self.var(e.dtype, blocks)
        other = None if mask is None else const(0, e.dtype)
        self.out.append(Load(var, self.params[e.value], offset, mask, other, self.ahead(e.value, offset)))
        return value_of(var)

    def ahead(self, param: int, offset: Expr) -> Expr | None:
        """Where `param` is read soon, if this load is to fetch it: by the next step, or, in the last pass that reads
        it, by the next grid point."""
        streamed = [c for c in self.schedule.tiling.classes if c.role is Role.STREAMED]
        steps = [c for c in streamed if axis(c.axis) in axes_of(offset)]
        if param in self.schedule.memory.next_step and steps:
            last = steps[-1]
            return substitute(offset, {axis(last.axis): dims.add(axis(last.axis), dims.integer(last.tile))})
        if param not in self.fetching:
            return None
        point = axis([c.axis for c in self.schedule.tiling.classes if c.role is Role.GRID][-1])
        step = dims.sub(substitute(offset, {point: dims.add(point, dims.ONE)}), offset)
        (when,) = (s.when for s in self.schedule.memory.next_point if s.param == param)
        return dims.add(offset, call("where", when, step, dims.ZERO))

    def tail(self, axes: Iterable[Axis]) -> Expr | None:
        """The mask of lanes inside the extents of `axes`, None if all are."""
        mask: Expr | None = None
        for a in axes:
            mask = both(mask, self.scope.tails.get(a))
        return mask

    def hoist(self, roots: Sequence[Expr]) -> None:
        """Evaluate before the loop what does not change in it."""
        seen: set[Expr] = set()

        def visit(x: Expr) -> None:
            if x in seen or x.op in ("const", "axis", "symbol"):
                return
            seen.add(x)
            if self.fixed(x):
                known = x.op == "value" or (x, None) in self.scope.memo
                if not known and not unsafe(x, self.params) and not _is_index(x):
                    self.scope.memo[x, None] = self.named(self.eval(x))
                return
            for a in x.args:
                visit(a)

        for r in roots:
            visit(r)

    def fixed(self, x: Expr) -> bool:
        """Whether an expression depends only on what is bound and known here."""
        bound, results = self.scope.bound, self.scope.results
        return all(
            y.value in bound if isinstance(y.value, Axis) else y.op != "value" or y.value in results
            for y in walk(x)
        )

    def store(self, o: Item) -> None:
        """Write an output."""
        value = self.eval(o.body[0])
        blocks = tuple(dict.fromkeys((*self.blocks(o.offset), *self.blocks(value))))
        stream = next((s.when for s in self.schedule.memory.past_caches if s.param == o.param), None)
        self.out.append(Store(self.params[o.param], o.offset, value, blocks, self.tail(blocks), stream))


def _weaker(guard: Expr | None) -> Iterator[Expr | None]:
    """The conditions that a guard was made from by adding others, and none."""
    while guard is not None:
        guard = guard.args[0] if guard.op == "and" else None
        yield guard


def _shared(roots: Sequence[Expr]) -> set[Expr]:
    """Data expressions with more than one parent: they get a name, so they are computed once."""
    inside = dict.fromkeys(x for r in roots for x in walk(r))
    parents = Counter([*roots, *(a for x in inside for a in x.args)])
    return {x for x, n in parents.items() if n > 1 and x.op in SCALARS and not _is_index(x)}


def _steps(x: Expr) -> bool:
    """Whether an operation makes whole numbers of floats."""
    if x.op in ("floor", "ceil", "trunc", "round", "floordiv", "mod", "fmod", "truncdiv"):
        return x.dtype.is_float
    return x.op == "cast" and x.args[0].dtype.is_float and not x.dtype.is_float


def _inverse(c: Expr) -> Fraction | None:
    """The inverse of a constant, if both are numbers that fp32 has at full precision."""
    value = constant_value(c)
    found = None if value is None else 1 / value
    return found if found is not None and MIN_FACTOR <= abs(found) <= 1 / MIN_FACTOR else None


def _is_index(x: Expr) -> bool:
    return all(y.op not in ("read", "value", "var") for y in walk(x))
