"""Masks made of data: where a kernel's ops put a constant in place of what whole numbers or truth values hide."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.analysis.dependence.dependency import Dependency, DimClasses, classes_of
from tilewright.analysis.predicate import slack_of
from tilewright.analysis.runtime_checks import from_data, inside_of
from tilewright.analysis.value.constant_regions import ConstantRegion, ValueAnalysis
from tilewright.ir.dtype import Kind, bool_
from tilewright.ir.expr import Expr, axes_of, axis, call, conjuncts, is_const, read, transform, walk
from tilewright.ir.graph import Op, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import output_axes


@dataclass(frozen=True, slots=True)
class Mask:
    """Elements of the result of `op` are `constant` where one of `hiding` holds, and thus but where `visible` does, a
    condition over the axes of the result that reads `inputs`; reductions take them along dim `along`."""

    op: Op
    constant: Expr
    hiding: frozenset[Expr]
    visible: Expr
    inputs: tuple[Value, ...]
    along: int

    @property
    def kept(self) -> list[int]:
        """The other dims that the condition depends on."""
        used = axes_of(self.visible)
        own = output_axes(self.op.output.shape)
        return [d for d, a in enumerate(own) if axis(a) in used and d != self.along]

    @property
    def has_holes(self) -> bool:
        """Whether what a row sees may well be more than one run of places: data decide it by equality, or one by one.
        Where they are only compared in order, as places and times are, it is one run as a rule."""
        by_data = [x for x in _literals(self.visible) if any(y.op == "read" for y in walk(x))]
        return any(x.op not in ("lt", "le", "gt", "ge") for x in by_data)


def masks(ops: Sequence[Op]) -> list[Mask]:
    """Where a kernel's ops first put a constant in place of what data hide, along dims that are folded."""
    made = {v for op in ops for v in op.outputs}
    outside = {v.id: v for op in ops for v in op.inputs if v not in made and _is_integer(v)}
    if not outside or any(op.expr is None for op in ops):
        return []
    analysis, classes = ValueAnalysis(ops), classes_of(ops)
    for constant in (-math.inf, 0.0):
        found = _masks(ops, constant, analysis, classes, outside)
        if found:
            return found
    return []


def _masks(
    ops: Sequence[Op],
    constant: float,
    analysis: ValueAnalysis,
    classes: DimClasses,
    outside: Mapping[int, Value],
) -> list[Mask]:
    """Those that put `constant`. What is made of masked values is masked already; another mask counts there only if it
    hides more, and all that the first one masks goes there."""
    readers = Counter(v for op in ops for v in set(op.inputs))
    found: list[Mask] = []
    behind: dict[Value, int] = {}
    for op in ops:
        if op.expr is None or not op.expr.is_pointwise or not op.output.dtype.is_float:
            continue
        first = next((behind[v] for v in op.inputs if v in behind), None)
        regions = [r for r in analysis.regions[op.output] if is_const(r.constant, constant)]
        mask = _mask(op, regions, classes, outside)
        if first is not None:
            only = all(readers[v] == 1 for v, n in behind.items() if n == first)
            if only and mask is not None and mask.hiding > found[first].hiding:
                found[first] = mask
            behind[op.output] = first
        elif mask is not None:
            behind[op.output] = len(found)
            found.append(mask)
    return found


def _mask(
    op: Op, regions: Sequence[ConstantRegion], classes: DimClasses, outside: Mapping[int, Value]
) -> Mask | None:
    v = op.output
    reduced = [
        d
        for d, kind in enumerate(classes.dependency[v])
        if kind is Dependency.NONPARA and v.shape[d] is not dims.ONE
    ]
    for region in regions:
        reads = [x for x in walk(region.condition) if x.op == "read"]
        along = [d for d in reduced if axis(output_axes(v.shape)[d]) in axes_of(region.condition)]
        if not reads or not all(_is_safe(x, outside) for x in reads) or len(along) != 1:
            continue
        if _ends_loops(region.condition, axis(output_axes(v.shape)[along[0]])):
            continue
        inputs = tuple(dict.fromkeys(outside[x.value] for x in reads if isinstance(x.value, int)))
        visible = _numbered(call("not", region.condition), {u.id: k for k, u in enumerate(inputs)})
        return Mask(
            op, region.constant, frozenset(_alternatives(region.condition)), visible, inputs, along[0]
        )
    return None


def _alternatives(condition: Expr) -> list[Expr]:
    """The terms of a disjunction."""
    if condition.op == "or" and condition.dtype is bool_:
        return [t for x in condition.args for t in _alternatives(x)]
    return [condition]


def _is_integer(v: Value) -> bool:
    return v.dtype.kind in (Kind.BOOL, Kind.INT, Kind.UINT)


def _is_safe(x: Expr, outside: Mapping[int, Value]) -> bool:
    """Whether a read is of whole numbers or truth values from outside the kernel, surely within them."""
    v = outside.get(x.value) if isinstance(x.value, int) else None
    return v is not None and all(
        not from_data(i) and inside_of(i, size) is None for i, size in zip(x.args, v.shape, strict=True)
    )


def _numbered(e: Expr, number: Mapping[int, int]) -> Expr:
    """`e` with operand numbers in place of those of values."""

    def change(x: Expr) -> Expr | None:
        return read(number[x.value], x.args, x.dtype) if x.op == "read" and isinstance(x.value, int) else None

    return transform(e, change)


def _ends_loops(condition: Expr, c: Expr) -> bool:
    """Whether all that the condition says of data are comparisons of `c` with numbers that do not change along it."""
    for x in _literals(condition):
        reads = [y for y in walk(x) if y.op == "read"]
        if reads and (slack_of(x, data=True) is None or any(c in axes_of(y) for y in reads)):
            return False
    return True


def _literals(e: Expr) -> list[Expr]:
    if e.op in ("and", "or", "not"):
        return [x for a in e.args for x in _literals(a)]
    return list(conjuncts(e))
