"""One axis in parts of equal length: index j = p * Q + q, for part p and element q of it.

All that is split is split so: folds (`reduction`), a mean and what is summed around it (`moments`), folds that follow
each other (`cascade_parts`). The last part may end beyond the axis; `inside` says which elements there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.ir.expr import Axis, Expr, axis, call
from tilewright.ir.sizes import dims


@dataclass(frozen=True, slots=True)
class Cut:
    """Axis `whole` in parts of `length`: its index is `place`, of which `inside` says whether it is one. `part` or
    `element` may be missing (one part; parts of one element)."""

    whole: Axis
    part: Axis | None
    element: Axis | None
    length: Expr
    number: Expr = dims.ZERO
    """Of the part."""

    @classmethod
    def into(cls, whole: Axis, count: int, multiple: int = 1) -> Cut:
        """`count` parts, each of which begins at a multiple of some elements; the axes are named p and q."""
        length = dims.mul(dims.ceildiv(whole.extent, dims.integer(count * multiple)), dims.integer(multiple))
        p = Axis("p", dims.integer(count))
        return cls(whole, p, Axis("q", length), length, axis(p))

    @property
    def place(self) -> Expr:
        """Where an element of a part lies on the axis."""
        start = dims.mul(self.number, self.length)
        return start if self.element is None else dims.add(start, axis(self.element))

    @property
    def inside(self) -> Expr | None:
        """Whether there is such an element; None if there always is."""
        if self.part is None or dims.equal(dims.mul(self.part.extent, self.length), self.whole.extent):
            return None
        return call("lt", self.place, self.whole.extent)

    @property
    def count(self) -> Expr:
        """Elements of a part."""
        if self.part is None:
            return self.whole.extent
        start = dims.mul(self.number, self.length)
        return (
            self.length
            if self.inside is None
            else dims.minimum(self.length, dims.sub(self.whole.extent, start))
        )
