"""How a reduction is taken in parts: each part is reduced to the state that it leaves behind, and these are merged.

   r[i] = (+) over j < N of x(i, j)
=> t[p, i] = (+) over q < Q of x(i, p * Q + q), where there is such an element
   r[i] = (+) over p of t[p, i]                    in index order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, axis, both, call, cast, const, read, where
from tilewright.ir.graph import Value
from tilewright.ir.ops.common import position
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr

from .merge_laws import MergeLaw
from .seen_reads import as_one

Bring = Callable[[tuple[Expr, ...]], tuple[Expr, ...]]


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

    @classmethod
    def of_length(cls, whole: Axis, length: int, number: int) -> Cut:
        """Parts of so many elements, however many there are; the axes have the `number` in their names."""
        one = (dims.static(whole.extent) or length + 1) <= length
        p = None if one else Axis(f"p{number}", dims.ceildiv(whole.extent, dims.integer(length)))
        return cls(
            whole, p, Axis(f"q{number}", dims.integer(length)) if length > 1 else None, dims.integer(length)
        )

    @property
    def start(self) -> Expr:
        """Where the part begins on the axis."""
        return dims.mul(self.number, self.length)

    @property
    def place(self) -> Expr:
        """Where an element of a part lies on the axis."""
        return self.start if self.element is None else dims.add(self.start, axis(self.element))

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
        if self.inside is None:
            return self.length
        return dims.minimum(self.length, dims.sub(self.whole.extent, self.start))


@dataclass(frozen=True, slots=True)
class ReductionParts:
    """A reduction with results over `kept` in parts: `numbers` are the axes of the parts (none if there is one part),
    `elements` those that each part is reduced over. `inside` says whether there is an element (None: always). What
    parts leave lies part by part, or with the number of the part as its `last` axis."""

    kept: tuple[Axis, ...]
    numbers: tuple[Axis, ...]
    elements: tuple[Axis, ...]
    inside: Expr | None = None
    last: bool = False

    @classmethod
    def of(cls, kept: tuple[Axis, ...], cuts: Sequence[Cut]) -> tuple[ReductionParts, list[Cut]]:
        """The parts of several axes under one number, and the cuts with the digits of that as their numbers."""
        digits: dict[Expr, Expr] = {}
        number = as_one([c.part for c in cuts if c.part is not None], "p", digits)
        cuts = [c if c.part is None else replace(c, number=digits[axis(c.part)]) for c in cuts]
        inside: Expr | None = None
        for c in cuts:
            inside = both(inside, c.inside)
        elements = tuple(c.element for c in cuts if c.element is not None)
        return cls(kept, (number,), elements, inside, last=True), cuts

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Of what the parts leave."""
        return (*self.kept, *self.numbers) if self.last else (*self.numbers, *self.kept)

    def reduce(self, body: Sequence[Expr], reduction: Reduction, *, factors: bool = False) -> TensorExpr:
        """The reduction of each part. The last one, which may be shorter, takes neutral elements for what it lacks; of
        products, each of the `factors` if they should stay products."""
        if self.inside is not None:
            mask = _masked_factors if factors else where
            pairs = zip(body, reduction.identity, strict=True)
            body = [mask(self.inside, b, _identity(n, b.dtype)) for b, n in pairs]
        elements = tuple(cast(b, t) for b, t in zip(body, reduction.elements, strict=True))
        return TensorExpr(self.axes, elements, self.elements, reduction)

    def values(self, fresh: int, types: Sequence[DType]) -> tuple[Value, ...]:
        """What the parts leave, numbered from `fresh`."""
        shape = tuple(a.extent for a in self.axes)
        return tuple(Value(fresh + k, shape, t) for k, t in enumerate(types))

    def read(self, types: Sequence[DType], first: int = 0) -> tuple[Expr, ...]:
        """What a part has left, in operands from number `first` on."""
        return tuple(read(first + k, tuple(map(position, self.axes)), t) for k, t in enumerate(types))

    def merge(self, states: Sequence[Expr], reduction: Reduction) -> TensorExpr:
        """The reduction of the `states` of all parts."""
        return TensorExpr(self.kept, tuple(states), self.numbers, reduction)


def split_reduction(
    body: Sequence[Expr], parts: ReductionParts, law: MergeLaw, bring: Bring = tuple, *, factors: bool = False
) -> tuple[TensorExpr, TensorExpr]:
    """The reduction of each part by a law, and the merge of what these leave, its first operands. `bring` makes
    elements of the merge of that, where it takes more: the number of elements, a statistic that has moved."""
    partial = parts.reduce(body, law.part, factors=factors)
    return partial, parts.merge(bring(parts.read(partial.dtypes)), law.whole)


def _identity(state: Expr, dtype: DType) -> Expr:
    """The element whose state that is."""
    assert isinstance(state.value, (int, float))
    return const(state.value, dtype)


def _masked_factors(inside: Expr, body: Expr, nothing: Expr) -> Expr:
    if body.op == "mul" and nothing.value == 0:
        return call("mul", *(_masked_factors(inside, f, nothing) for f in body.args))
    return body if body.op == "where" and body.args[0] is inside else where(inside, body, nothing)
