"""Addresses from where a block begins: one number for all, and what lies between its elements.

An offset that is linear in the axes of a block is the offset of the block's first element, a scalar, plus a multiple
of a lane for each axis. Lanes are numbers below the tile, so 32 bits hold the multiples even where the scalar needs 64,
and tensors of more than 2^31 elements cost no more instructions per element than others. Where each element has an
access of its own, because nothing is aligned, the multiples are constants in the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, substitute
from tilewright.ir.sizes import dims
from tilewright.lower.variants import NARROW_LIMIT, is_index

from .expr import Expressions
from .scope import ATOM, PRODUCT, SUM, Term


@dataclass(frozen=True, slots=True)
class _Place:
    """A block axis as `first`, the index expression of its first value, and a lane of 32 bits."""

    first: Expr
    lane: Term


class BoundAxes:
    """The block axes that are bound in a program."""

    def __init__(self, printer: Expressions) -> None:
        self.printer = printer
        self.bound: dict[Axis, _Place] = {}

    def bind(self, a: Axis, tile: int, start: Term, number: str) -> Term:
        """Print the lanes of `a` in a block that begins at `start`, and its first value; the values of the axis."""
        put = self.printer.lines.put
        lane = Term(f"l{number}", ATOM, (a,))
        put(f"{lane.text} = tl.arange(0, {tile})")
        if start.number and start.text == "0":
            self.bound[a] = _Place(dims.ZERO, lane)
            return self.printer.cast_text(lane, i64) if self.printer.index_type is i64 else lane
        first = Axis(f"s{number}", a.extent)
        put(f"{first.name} = {self.printer.spread(start, (), self.printer.index_type).text}")
        self.printer.axes[first] = Term(first.name)
        self.bound[a] = _Place(axis(first), lane)
        return self.printer.infix("+", SUM, [Term(first.name), lane])

    def axes(self, e: Expr) -> tuple[Axis, ...]:
        """The block axes over which `address` can be `e`; none if it cannot."""
        plain, _ = _parted(e)
        axes = self.printer.ordered([a.value for a in axes_of(e) if isinstance(a.value, Axis)])
        linear = is_index(plain) and all(dims.coefficient(plain, axis(a)) is not None for a in axes)
        return axes if linear and set(axes) <= set(self.bound) else ()

    def address(self, pointer: str, e: Expr, wanted: tuple[Axis, ...]) -> str | None:
        """The pointers `pointer` + `e` over the axes `wanted`; None if `e` has others or is not linear in them."""
        if not wanted or self.axes(e) != wanted:
            return None
        plain, choices = _parted(e)
        steps = [(a, dims.coefficient(plain, axis(a)) or dims.ZERO) for a in wanted]
        terms = [self._moved(a, step) for a, step in steps if step is not dims.ZERO]
        terms += [] if choices is dims.ZERO else [self.printer.offset(choices)]
        base = self.printer.term(substitute(plain, {axis(a): self.bound[a].first for a in wanted}))
        parts = [] if base.number and base.text == "0" else [base]
        return " + ".join([pointer, *(self.printer.fit(t, wanted).at(SUM + 1) for t in (*parts, *terms))])

    def _moved(self, a: Axis, step: Expr) -> Term:
        """How far a lane of `a` lies behind the first one."""
        lane, length = self.bound[a].lane, dims.static(step)
        if length == 1:
            return lane
        if length is not None and abs(length) * self.printer.tiles[a] <= NARROW_LIMIT:
            return self.printer.infix("*", PRODUCT, [lane, Term(str(length), number=True)])
        if self.printer.index_type is i64:
            lane = self.printer.cast_text(lane, i64)
        return self.printer.infix("*", PRODUCT, [lane, self.printer.term(step)])


def _parted(e: Expr) -> tuple[Expr, Expr]:
    """The terms of an offset without and with numbers of conditions."""
    terms = dims.linear(e)
    chosen = {m: c for m, c in terms.items() if any(x.op == "cast" and x.args[0].dtype is bool_ for x in m)}
    return dims.from_linear({m: c for m, c in terms.items() if m not in chosen}), dims.from_linear(chosen)
