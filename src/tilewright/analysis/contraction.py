"""Contractions inside a kernel: which folds are products of two matrices, given the tiles of their classes.

A fold is a contraction if it sums products along one class k, and the factors fall into two sides: one uses k and a
kept class m, the other k and a kept class n. Other classes have a tile of 1 there. (Of batch classes only such, since
matrix units take two dimensions.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, axes_of, call, is_const
from tilewright.ir.form import Item
from tilewright.ir.graph import Value
from tilewright.tuning.thresholds import CONTRACTION


@dataclass(frozen=True, slots=True)
class Contraction:
    """sum over `k` of left[m, k] * right[k, n], with operands of type `operand`."""

    m: Axis
    n: Axis
    k: Axis
    left: Expr
    right: Expr
    operand: DType


@dataclass(frozen=True, slots=True)
class _Factor:
    expr: Expr
    inverse: bool

    def classes(self, of: Callable[[Axis], bool]) -> set[Axis]:
        return {a.value for a in axes_of(self.expr) if isinstance(a.value, Axis) and of(a.value)}


def contraction(item: Item, params: Sequence[Value], tile: Callable[[Axis], int]) -> Contraction | None:
    """The contraction that a fold is under these tiles, if it is one."""
    if item.scan is not None or item.reduction is None or item.reduction.combiner != "add":
        return None
    if len(item.body) != 1 or not item.body[0].dtype.is_float:
        return None
    large = lambda a: tile(a) > 1  # noqa: E731
    folded, kept = [a for a in item.reduce if large(a)], [a for a in item.kept if large(a)]
    if len(folded) != 1 or len(kept) != 2 or min(map(tile, (*folded, *kept))) < CONTRACTION.min_block_side:
        return None
    (k,), (m, n) = folded, kept
    written = _as_written(item, (m, n, k), large)
    if written is not None:
        one, two = written
        return Contraction(m, n, k, one, two, _operand(written, params, item.halves, True))
    left: list[_Factor] = []
    right: list[_Factor] = []
    for factor in _factors(item.body[0], False):
        used = factor.classes(large)
        if n in used and m in used:
            return None
        (right if n in used else left).append(factor)
    if not all(_reaches(side, {k, own}, large) for side, own in ((left, m), (right, n))):
        return None
    one, two = _product(left), _product(right)
    return Contraction(m, n, k, one, two, _operand((one, two), params, item.halves))


def _as_written(
    item: Item, classes: tuple[Axis, Axis, Axis], large: Callable[[Axis], bool]
) -> tuple[Expr, Expr] | None:
    """Both sides of a product of two halves as the program has them, where each is computed: a scale that an element
    is multiplied with stays on its side, and what is rounded there is what was."""
    m, n, k = classes
    if not item.operands or item.body[0].op != "mul":
        return None
    one, two = item.body[0].args
    used = [_Factor(e, False).classes(large) for e in (one, two)]
    if used == [{n, k}, {m, k}]:
        one, two = two, one
    elif used != [{m, k}, {n, k}]:
        return None
    return one, two


def product_sides(item: Item) -> tuple[list[Axis], list[Axis], list[Axis]] | None:
    """Kept classes of the left side alone, of the right side alone, and folded classes of both, for a sum of products
    whose factors can be told apart by what they keep."""
    if item.scan is not None or item.reduction is None or item.reduction.combiner != "add":
        return None
    return is_product_of_blocks(item.body[0], item.kept, item.reduce)


def is_product_of_blocks(
    term: Expr, kept_axes: Sequence[Axis], reduce: Sequence[Axis]
) -> tuple[list[Axis], list[Axis], list[Axis]] | None:
    """The same of the term of a sum over the axes `reduce`."""
    factors = _factors(term, False)
    used = [f.classes(lambda a: True) for f in factors]
    if len(factors) < 2:
        return None
    kept = set(kept_axes)
    first = next((u for u in used if u & kept and u & set(reduce)), None)
    if first is None:
        return None
    other = [u for u in used if not u & kept <= first]
    if not other:
        return None
    second = set[Axis]().union(*other)
    left = [a for a in kept_axes if a in first and a not in second]
    right = [a for a in kept_axes if a in second and a not in first]
    folded = [a for a in reduce if a in first and a in second]
    return (left, right, folded) if left and right and folded else None


def _factors(e: Expr, inverse: bool) -> list[_Factor]:
    if e.op == "mul":
        return [f for a in e.args for f in _factors(a, inverse)]
    if e.op == "div":
        return [*_factors(e.args[0], inverse), *_factors(e.args[1], not inverse)]
    if e.op == "narrow" and e.dtype.is_float:
        return _factors(e.args[0], inverse)
    return [_Factor(e, inverse)]


def factors(e: Expr) -> list[Expr]:
    """The factors of a product; a single one that is divided by others is none of theirs."""
    found = _factors(e, False)
    return [f.expr for f in found] if all(not f.inverse for f in found) else [e]


def _reaches(side: Sequence[_Factor], wanted: set[Axis], large: Callable[[Axis], bool]) -> bool:
    found = set[Axis]().union(*(f.classes(large) for f in side))
    return found == wanted and any(not f.inverse for f in side)


def _product(side: Sequence[_Factor]) -> Expr:
    straight = [f.expr for f in side if not f.inverse]
    result = straight[0]
    for e in straight[1:]:
        result = call("mul", result, e)
    for f in side:
        if f.inverse:
            result = call("div", result, f.expr)
    return result


def stored(e: Expr, params: Sequence[Value]) -> DType | None:
    """The float type in which a plain read, or one with zero elsewhere, finds its elements."""
    if e.op == "where" and is_const(e.args[2], 0):
        return stored(e.args[1], params)
    if e.op == "read" and isinstance(e.value, int):
        found = params[e.value].dtype
        return found if found.is_float else None
    return None


def stored_half(e: Expr, params: Sequence[Value]) -> DType | None:
    """The same, if it is a half type."""
    found = stored(e, params)
    return found if found is not None and found.is_half else None


def _rounded(e: Expr) -> DType | None:
    """The half type to which an element has been rounded, so that it holds it whole."""
    if e.op == "where" and is_const(e.args[2], 0):
        return _rounded(e.args[1])
    return e.args[0].dtype if e.op == "cast" and e.args[0].op == "cast" and e.args[0].dtype.is_half else None


def _operand(
    both: tuple[Expr, Expr], params: Sequence[Value], read: DType | None, written: bool = False
) -> DType:
    """The half type in which a side is stored, if the other one is rounded to it, or the op itself reads numbers of
    this type (`read`): a product of matrices takes one type, so that a computed side was of it there too, or is
    rounded to it by the library's routine, as the weights of attention are. Sides that are `written` so in the program
    are numbers of the type that the op reads."""
    if written and read is not None:
        return read
    sources = {stored_half(e, params) or _rounded(e) for e in both}
    if len(sources) == 1 and (same := sources.pop()) is not None:
        return same
    halves = {h for e in both if (h := stored_half(e, params)) is not None}
    return read if read is not None and halves == {read} else both[0].dtype
