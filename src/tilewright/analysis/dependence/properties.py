"""What is known of every value of a set of ops, from access maps and bodies alone (FlashTensor, PPoPP'25).

Reduce dependency and classes (`dependency`), broadcast (`axis_access.broadcast`), size, sign (`value.sign`) and value
(`value.constant_regions`): known constants where a predicate over axes holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.analysis.value.constant_regions import ConstantRegion, Regions, ValueAnalysis
from tilewright.analysis.value.interval import Interval, Sign
from tilewright.analysis.value.sign import Known, sign_of, signs_of
from tilewright.ir.expr import Axis, Expr
from tilewright.ir.graph import Op, Value
from tilewright.ir.sizes import dims

from .axis_access import broadcast
from .dependency import NO_CLASS, Dependency, DimClasses, classes_of


@dataclass(frozen=True, slots=True, eq=False)
class Properties:
    """Per value: dependency and class of each dim (`structure` has the classes in full), sign, and regions where it is
    a known constant; per reduction, where the elements that it folds are (over the op's own axes)."""

    dependency: Mapping[Value, tuple[Dependency, ...]]
    classes: Mapping[Value, tuple[int, ...]]
    sign: Mapping[Value, Interval]
    regions: Mapping[Value, Regions]
    element_regions: Mapping[Op, Regions]
    structure: DimClasses


def properties(ops: Sequence[Op], finite: bool = True) -> Properties:
    """The properties of all values that `ops` (of a graph or a kernel, in order) read or make.

    With `finite`, floats in memory are taken as finite, as trimming does; else signs and regions assume nothing."""
    found, values = classes_of(ops), ValueAnalysis(ops, finite)
    return Properties(
        found.dependency, found.classes, values.sign, values.regions, values.element_regions, found
    )


@dataclass(frozen=True, slots=True)
class Size:
    """Elements and bytes of a tensor, as expressions over size symbols."""

    elements: Expr
    bytes: Expr


def size(v: Value) -> Size:
    """The size property."""
    return Size(v.numel, dims.mul(v.numel, dims.integer(v.dtype.bytes)))


def unread(op: Op) -> Mapping[Expr, tuple[Axis, ...]]:
    """The broadcast property: for each read of an op, the axes along which its element is the same."""
    assert op.expr is not None
    axes = (*op.expr.axes, *op.expr.reduce)
    return {r: broadcast(axes, r) for r in op.expr.reads()}


def parallel_classes(ops: Sequence[Op], outputs: Sequence[Value], classes: DimClasses) -> tuple[int, ...]:
    """The classes that a kernel of `ops` may put on its grid: those that every output has and nothing reduces. An
    output without the class would be written by all who share it."""
    common: list[int] | None = None
    for v in outputs:
        own = [c for digits in classes.digits[v] for c in digits]
        common = own if common is None else [c for c in common if c in own]
    return tuple(dict.fromkeys(c for c in common or [] if classes.kinds[c] is not Dependency.NONPARA))


def parallelism(
    ops: Sequence[Op], outputs: Sequence[Value], target_tile: int = 128, found: DimClasses | None = None
) -> Expr:
    """The parallel degree of a kernel candidate: the product over its parallel classes of their extents, in tiles of
    `target_tile` where operands are reused. A reused class of no more than a tile is cut to single elements, except
    along the innermost dim of something in memory, whose neighbours stay together. `found` are the classes of `ops`,
    where they are known."""
    found = classes_of(ops) if found is None else found
    made = {v for op in ops for v in op.outputs}
    memory = [*outputs, *(v for op in ops for v in op.inputs if v not in made)]
    innermost = {found.digits[v][-1][-1] for v in memory if v.shape and found.digits[v][-1]}
    degree = dims.ONE
    for c in parallel_classes(ops, outputs, found):
        units = found.extents[c]
        if found.kinds[c] is Dependency.REUSE:
            extent = dims.static(units)
            if extent is None or extent > target_tile:
                units = dims.ceildiv(units, dims.integer(target_tile))
            elif c in innermost:
                units = dims.ONE
        degree = dims.mul(degree, units)
    return degree


__all__ = [
    "NO_CLASS",
    "ConstantRegion",
    "Dependency",
    "DimClasses",
    "Interval",
    "Known",
    "Properties",
    "Regions",
    "Sign",
    "Size",
    "classes_of",
    "parallel_classes",
    "parallelism",
    "properties",
    "sign_of",
    "signs_of",
    "size",
    "unread",
]  # fmt: skip
