"""Kernel -> form: pointwise ops are put into their readers, access maps become offsets, indices from data are
checked.

A test of an index holds for every element of the op that the program wrote, however few of them its readers use: no
condition of a reader excuses it. Only where a reader asks for elements that do not exist (behind the border of a pad,
in another piece of a concatenation) nothing is tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.runtime_checks import checked_index, checked_where, from_data, inside_of, with_tests
from tilewright.errors import IllegalSchedule
from tilewright.ir.dtype import DType, Kind
from tilewright.ir.expr import (
    Axis,
    Expr,
    axis,
    both,
    call,
    cast,
    is_const,
    longest_index,
    make,
    rebuild,
    substitute,
    walk,
)
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.graph import Layout, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.pattern import Rewriter
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.normal.identities import CASTS, INDEX_COMPARISONS
from tilewright.target import ONE_PLUS_ERF
from tilewright.tuning.search_limits import EXPRESSIONS

from .exp2 import argument_of_erfc
from .repeated_elements import fold_repeated

JUMPS = frozenset({"eq", "ne", "floor", "ceil", "trunc", "round", "mod", "fmod", "floordiv", "truncdiv"})
"""Functions of floats that jump."""
ORDERS = frozenset({"lt", "le", "gt", "ge"})


def compose(
    kernel: Kernel,
    layouts: Mapping[Value, Layout],
    round_halves: bool = False,
    coarse: Sequence[str] = (),
) -> Form:
    """The form of a kernel in which every op still has axes of its own. Values without a layout are dense;
    `round_halves` keeps the rounding of half intermediates; `coarse` are functions whose coarse form may take the
    place of that rounding."""
    return _Composer(kernel, layouts, round_halves, coarse).form()


_ONE_ROUNDING = Rewriter(CASTS)
"""Takes out roundings of what is rounded already, as where one op ends with one and the next begins with it."""

_TOGETHER = Rewriter(CASTS + INDEX_COMPARISONS)
"""And comparisons that only bodies together decide: one op makes places, the next compares them."""

_WRITTEN: dict[object, tuple[Expr, ...]] = {}
"""Bodies of ops with what they read put in, by all that they are made of: a kernel that grew by an op writes that op
alone."""


class _Composer:
    def __init__(
        self, kernel: Kernel, layouts: Mapping[Value, Layout], round_halves: bool, coarse: Sequence[str]
    ) -> None:
        self.kernel, self.layouts, self.round_halves, self.coarse = kernel, layouts, round_halves, coarse
        self.params = (*kernel.inputs, *kernel.outputs)
        self.slot = {v: k for k, v in enumerate(kernel.inputs)}
        self.pointwise: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
        """Elements of pointwise results over axes p0, p1, ..: the same in all ops, so that a reader at its own place
        finds them as they are."""
        self.folded: dict[Value, tuple[int, int]] = {}
        self.items: list[Item] = []
        self.fresh = 0

    def form(self) -> Form:
        for op in self.kernel.ops:
            self.add(op)
        for k, v in enumerate(self.kernel.outputs):
            shape_axes = tuple(self.axis(e) for e in v.shape)
            index = tuple(_plain(a) for a in shape_axes)
            body = _given_to_store(self.element(v, index), v.dtype)
            offset = self.offset(v, index)
            kept = tuple(a for a in shape_axes if a.extent is not dims.ONE)
            self.items.append(Item(len(self.items), kept, (body,), param=len(self.slot) + k, offset=offset))
        return Form(self.params, tuple(map(self.span, self.params)), tuple(self.items))

    def span(self, v: Value) -> Expr:
        layout = self.layouts.get(v)
        if layout is None or dims.ZERO in v.shape:
            return v.numel
        reach = (
            dims.mul(dims.sub(size, dims.ONE), s) for size, s in zip(v.shape, layout.strides, strict=True)
        )
        return dims.add(dims.ONE, *reach)

    def axis(self, extent: Expr) -> Axis:
        self.fresh += 1
        return Axis(f"c{self.fresh}", extent)

    def add(self, op: Op) -> None:
        assert op.expr is not None, f"{op.name} is a library call"
        expr = op.expr
        if expr.reduction is None:
            axes = tuple(Axis(f"p{k}", a.extent) for k, a in enumerate(expr.axes))
            self.fresh += len(axes)
        else:
            axes = tuple(self.axis(a.extent) for a in (*expr.axes, *expr.reduce))
        fresh = dict(zip((*expr.axes, *expr.reduce), axes, strict=True))
        body = self.written(op, expr, fresh)
        if expr.reduction is None:
            self.pointwise[op.output] = (axes, self.rounded(body[0], op.output))
            return
        self.fold(op, expr, fresh, body)

    def written(self, op: Op, expr: TensorExpr, fresh: Mapping[Axis, Axis]) -> tuple[Expr, ...]:
        """The body of an op over `fresh` axes, with what it reads put in."""
        reads = tuple(map(self.meaning, op.inputs))
        key = (expr, tuple(fresh.values()), reads, self.round_halves, tuple(self.coarse))
        body = _WRITTEN.get(key)
        if body is None:
            table = {axis(a): _plain(b) for a, b in fresh.items()}
            body = tuple(_TOGETHER(self.inline(substitute(b, table), op)) for b in expr.body)
            if len(_WRITTEN) >= EXPRESSIONS.memo_bodies:
                _WRITTEN.clear()
            _WRITTEN[key] = body
        return body

    def meaning(self, v: Value) -> tuple[object, ...]:
        """All that `element` sees of a value: equal for values whose elements are written alike."""
        if v in self.folded:
            return "fold", *self.folded[v], v.shape, v.dtype, v in self.kernel.outputs
        if v in self.pointwise:
            return "pointwise", *self.pointwise[v], v.shape
        layout = self.layouts.get(v)
        return "input", self.slot[v], v.shape, v.dtype, None if layout is None else layout.strides

    def fold(self, op: Op, expr: TensorExpr, fresh: dict[Axis, Axis], body: tuple[Expr, ...]) -> None:
        number = len(self.items)
        live = lambda group: tuple(fresh[a] for a in group if a.extent is not dims.ONE)  # noqa: E731
        along = expr.scan  # over one element, a running fold is that of the element
        scan = None if along is None or along.extent is dims.ONE else fresh[along]
        source = self.kernel.ops.index(op)
        summed = not any(x.op == "mul" for b in expr.body for x in walk(b))
        kept, over = live(expr.axes), live(expr.reduce)
        if scan is None and expr.reduction is not None:
            body, over = fold_repeated(body, over, expr.reduction)
        item = Item(number, kept, body, over, expr.reduction, scan, source=source, summed=summed)
        self.items.append(replace(item, halves=_halves_read(op), operands=_multiplies_halves(op)))
        for r, v in enumerate(op.outputs):
            self.folded[v] = (number, r)

    def inline(self, body: Expr, op: Op) -> Expr:
        """Reads of values made in the kernel become their expressions; halves are computed in fp32."""
        done: dict[Expr, Expr] = {}
        factors = _factors(body) if ONE_PLUS_ERF in self.coarse and not self.round_halves else set[Expr]()
        for x in walk(body):
            args = tuple(done[a] for a in x.args)
            if x.op == "read":
                assert isinstance(x.value, int)
                done[x] = self.element(op.inputs[x.value], args, tuple(map(from_data, x.args)))
            else:
                done[x] = self.widened(x, self.stepped(x, args, op))
            inside = argument_of_erfc(done[x]) if x in factors else None
            if inside is not None:
                done[x] = call("coarse_erfc", inside)
        return done[body]

    def stepped(self, x: Expr, args: tuple[Expr, ...], op: Op) -> tuple[Expr, ...]:
        """The arguments of `x` on the way. Where it jumps, halves that other ops of the kernel make are rounded as
        the program rounds them: equal ones are to be equal, also to what was stored."""
        if not _jumps(x):
            return args
        return tuple(
            call("cast", call("cast", new, dtype=old.dtype), dtype=new.dtype)
            if old.op == "read" and old.dtype.is_half and not self.stored(op, old)
            else new
            for old, new in zip(x.args, args, strict=True)
        )

    def stored(self, op: Op, x: Expr) -> bool:
        """Whether a read is of what lies in memory."""
        assert isinstance(x.value, int)
        return op.inputs[x.value] in self.kernel.inputs

    def widened(self, x: Expr, args: tuple[Expr, ...]) -> Expr:
        if x.op == "const" and x.dtype.is_half:
            return make("const", (), x.dtype.compute, x.value)
        if x.op == "narrow":
            if x.dtype.is_half and self.round_halves:
                return call("cast", call("cast", args[0], dtype=x.dtype), dtype=x.dtype.compute)
            return call("cast", args[0], dtype=x.dtype.compute)
        if x.op == "cast" and x.dtype.is_half:
            rounded = call("cast", args[0], dtype=x.dtype)
            return call("cast", rounded, dtype=x.dtype.compute)
        if x.op == "cast":
            return call("cast", args[0], dtype=x.dtype)
        if x.dtype.is_half and x.op in self.coarse and not self.round_halves:
            return call(f"coarse_{x.op}", *args)
        return rebuild(x, args) if x.args else x

    def rounded(self, e: Expr, v: Value) -> Expr:
        """What computes an element of `v`, rounded as it would be in memory if that is asked for, or if it is stored
        and made of folds: a maximum that is read here is to be the one that other kernels read, or what either makes
        with it does not fit."""
        if not v.dtype.is_half or e.op in ("read", "const"):
            return e
        if not self.round_halves and not (v in self.kernel.outputs and folds_read((e,))):
            return e
        if e.op == "cast" and e.args[0].op == "cast" and e.args[0].dtype is v.dtype:
            return e
        return call("cast", call("cast", e, dtype=v.dtype), dtype=v.dtype.compute)

    def element(self, v: Value, index: tuple[Expr, ...], data: tuple[bool, ...] = ()) -> Expr:
        """An element of a value. Of an index that is `data` to the op that reads it, what this kernel knows of the
        data proves nothing."""
        if v in self.folded:
            number, result = self.folded[v]
            plain = tuple(i for i, extent in zip(index, v.shape, strict=True) if extent is not dims.ONE)
            return self.rounded(make("value", plain, v.dtype.compute, (number, result)), v)
        index = tuple(
            checked_index(i, size, data=from_)
            for i, size, from_ in zip(index, v.shape, data or [False] * len(index), strict=True)
        )
        if v in self.pointwise:
            axes, body = self.pointwise[v]
            table = {axis(a): i for a, i in zip(axes, index, strict=True) if i is not axis(a)}
            moved = with_tests(_moved(body, table) if table else body, index)
            if all(x.op != "checked" for x in walk(moved)):
                return moved
            inside: Expr | None = None
            for i, size in zip(index, v.shape, strict=True):
                inside = both(inside, inside_of(i, size))
            return moved if inside is None else checked_where(moved, inside)
        return with_tests(make("read", (self.offset(v, index),), v.dtype.compute, self.slot[v]), index)

    def offset(self, v: Value, index: tuple[Expr, ...]) -> Expr:
        layout = self.layouts.get(v)
        strides = layout.strides if layout is not None else dims.dense_strides(v.shape)
        return dims.add(*(dims.mul(i, s) for i, s in zip(index, strides, strict=True)))


def _moved(body: Expr, table: Mapping[Expr, Expr]) -> Expr:
    """`body` at another place. Raises IllegalSchedule where an index becomes too long by it."""
    moved = substitute(body, table)
    longest = longest_index(_places(moved))
    if longest > EXPRESSIONS.max_written_index_nodes and longest > longest_index(_places(body)):
        raise IllegalSchedule(
            f"an index would be written out in {longest} terms", law="indices are short", phase="schedule"
        )
    return moved


def _places(body: Expr) -> list[Expr]:
    return [i for x in walk(body) if x.op in ("read", "value") for i in x.args]


def _halves_read(op: Op) -> DType | None:
    """The half type of an op whose factors, or whose folded elements, are all of that type as they are read; else None.
    It is not enough that the inputs are halves: other ops may stand inside of this one, and widen them first."""
    assert op.expr is not None
    read = {v.dtype for v in op.inputs if v.dtype.is_half}
    folded = [x for b in op.expr.body for x in (b.args if b.op == "mul" else (b,))]
    types = {t for x in folded for t in _types_before_widening(x)}
    return next(iter(read)) if len(read) == 1 and types == read else None


def _types_before_widening(e: Expr) -> set[DType]:
    """The types of what an element is chosen from, each as it was before a cast of it; none of numbers."""
    if e.op == "where":
        return {t for x in e.args[1:] for t in _types_before_widening(x)}
    if e.op == "const":
        return set()
    return {e.args[0].dtype if e.op == "cast" else e.dtype}


def _factors(body: Expr) -> set[Expr]:
    """The factors of a product in half precision, whose relative errors are those of its result, or all of what is no
    product; those alone that are read by nothing else."""
    found, inside, todo = set[Expr](), set[Expr](), [body]
    while todo:
        x = todo.pop()
        if x.dtype.is_half and x.op == "mul":
            inside.add(x)
            todo += x.args
        elif x.dtype.is_half:
            found.add(x)
    return found - {a for x in walk(body) if x not in inside for a in x.args}


def _multiplies_halves(op: Op) -> bool:
    """Whether an op multiplies two values of one half type with each other, and nothing else."""
    assert op.expr is not None
    (body, *others) = op.expr.body
    sides = [a.args[0] if a.op == "cast" else a for a in body.args] if body.op == "mul" and not others else []
    types = {a.dtype for a in sides if a.op == "read" and a.dtype.is_half}
    return len(sides) == 2 and len(types) == 1 and all(a.op == "read" for a in sides)


def _jumps(x: Expr) -> bool:
    """Whether a rounding of an argument can change the result by more than a rounding. The sign of a number survives
    it."""
    if x.op == "cast":
        return x.dtype.kind in (Kind.INT, Kind.UINT)
    return x.op in JUMPS or (x.op in ORDERS and not any(is_const(a, 0) for a in x.args))


def _given_to_store(body: Expr, dtype: DType) -> Expr:
    """What a store of type `dtype` is given for `body`: the rounding to that type is its own."""
    stored = _ONE_ROUNDING(cast(body, dtype))
    return stored.args[0] if stored.op == "cast" and stored.args[0].dtype is dtype.compute else body


def _plain(a: Axis) -> Expr:
    return dims.ZERO if a.extent is dims.ONE else axis(a)
