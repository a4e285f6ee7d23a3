"""Tensor expressions: axes, access maps, a scalar body, and a reduction with state. Everything else about an
op follows.

The output has one dim per entry of `axes`. A read inside the body is `read(operand, index)`; its index expressions over
the axes are the access map. Reads on the side of a `where` that is not taken are not performed, which is how pads,
slices with borders and concatenations are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .dtype import DType
from .expr import Axis, Expr, axes_of, axis, substitute, transform, walk
from .reduction import Reduction
from .sizes import dims


@dataclass(frozen=True, slots=True)
class TensorExpr:
    """out[axes] = finish(reduction of lift(body) over `reduce`), or body[0] without a reduction.

    With `scan` (one of `axes`) the reduction is an inclusive running one along that axis and every prefix is a
    result."""

    axes: tuple[Axis, ...]
    body: tuple[Expr, ...]
    reduce: tuple[Axis, ...] = ()
    reduction: Reduction | None = None
    scan: Axis | None = None

    @property
    def shape(self) -> tuple[Expr, ...]:
        """Extents of the output axes."""
        return tuple(a.extent for a in self.axes)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Types of the results."""
        return self.reduction.results if self.reduction else (self.body[0].dtype,)

    @property
    def is_pointwise(self) -> bool:
        """Whether every output element is computed on its own (CINN's T)."""
        return self.reduction is None

    def reads(self) -> list[Expr]:
        """The distinct reads of the body, also those inside other reads' indices."""
        found: dict[Expr, None] = {}
        for b in self.body:
            found |= {x: None for x in walk(b) if x.op == "read"}
        return list(found)

    def is_view(self) -> bool:
        """Whether the body is a single read at an index free of data: a pure access map."""
        only = self.body[0]
        return (
            self.is_pointwise
            and only.op == "read"
            and not any(x.op == "read" for a in only.args for x in walk(a))
        )

    def at(self, index: tuple[Expr, ...]) -> Expr:
        """The element of a pointwise expression at `index` (composition of access maps)."""
        assert self.is_pointwise
        return substitute(self.body[0], {axis(a): i for a, i in zip(self.axes, index, strict=True)})

    def map_reads(self, change: Callable[[Expr], Expr | None]) -> TensorExpr:
        """The same expression with reads replaced by `change` (None = keep)."""

        def visit(x: Expr) -> Expr | None:
            return change(x) if x.op == "read" else None

        return replace(self, body=tuple(transform(b, visit) for b in self.body))

    def renamed(self, mapping: Mapping[Axis, Axis]) -> TensorExpr:
        """The same expression with other axes (equal extents)."""
        table = {axis(a): axis(b) for a, b in mapping.items()}
        rename = lambda old: tuple(mapping.get(a, a) for a in old)  # noqa: E731
        scan = mapping.get(self.scan, self.scan) if self.scan else None
        return TensorExpr(
            rename(self.axes),
            tuple(substitute(b, table) for b in self.body),
            rename(self.reduce),
            self.reduction,
            scan,
        )

    def verify(self) -> None:
        """Raise ValueError unless every axis used is declared, names differ, and bodies match the reduction."""
        declared = {axis(a) for a in self.axes + self.reduce}
        names = [a.name for a in self.axes + self.reduce]
        if len(set(names)) != len(names):
            raise ValueError(f"axis names repeat: {names}")
        for b in self.body:
            loose = axes_of(b) - declared
            if loose:
                raise ValueError(f"undeclared axes {sorted(map(repr, loose))}")
        if self.reduction is None:
            if self.reduce or len(self.body) != 1 or self.scan:
                raise ValueError("a pointwise expression has one body and no reduce axis")
        elif tuple(b.dtype for b in self.body) != self.reduction.elements:
            raise ValueError(
                f"{self.reduction.name} takes {self.reduction.elements}, got {[b.dtype for b in self.body]}"
            )

    def points(self) -> Expr:
        """Number of evaluations of the body (a symbolic extent product)."""
        return dims.prod(a.extent for a in self.axes + self.reduce)


def output_axes(shape: tuple[Expr, ...]) -> tuple[Axis, ...]:
    """The standard axes i0, i1, ... of an output of this shape."""
    return tuple(Axis(f"i{k}", extent) for k, extent in enumerate(shape))


def show_tensor_expr(t: TensorExpr) -> str:
    """One line of text."""
    kept = ", ".join(f"{a.name}:{a.extent}" for a in t.axes)
    body = ", ".join(map(repr, t.body))
    if t.reduction is None:
        return f"[{kept}] = {body}"
    over = ", ".join(f"{a.name}:{a.extent}" for a in t.reduce) if t.scan is None else f"prefix {t.scan.name}"
    return f"[{kept}] = {t.reduction.name}({over}) {body}"
