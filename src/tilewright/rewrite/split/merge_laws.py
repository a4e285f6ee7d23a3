"""Which reduction merges what parts leave behind: it follows from the state of the reduction that is in parts.

A part leaves, and a merge makes of that:

    one value, or several (sum, maximum, argmax)    the same reduction, of states            `law_of`
    of singles that may cancel, a double            their sum, rounded once                  `IN_WIDE_PARTS`
    number, mean, squared distances from it         Chan, Golub, LeVeque 1979                `means_of_parts`
    number, sum, squared distances from the mean    the same                                 `moments_of_parts`
    what follows a running maximum                  the same, rescaled to that of all        online law, `rescale_state`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilewright.analysis.contraction import is_product_of_blocks
from tilewright.analysis.value.sign import sign_of
from tilewright.ir.dtype import DType, f32, f64
from tilewright.ir.expr import Expr, call, cast, const, slot, walk
from tilewright.ir.reduction import Reduction, moments, sum_
from tilewright.ir.tensor import TensorExpr


@dataclass(frozen=True, slots=True)
class MergeLaw:
    """`part` makes of a part's elements what it leaves, `whole` makes the results of that."""

    part: Reduction
    whole: Reduction


def law_of(reduction: Reduction) -> MergeLaw:
    """A part leaves its state."""
    return MergeLaw(keeping_state(reduction), of_states(reduction))


def keeping_state(reduction: Reduction) -> Reduction:
    """The same reduction, whose result is its state: what a part leaves."""
    return replace(reduction, finish=_slots("a", reduction.state))


def of_states(reduction: Reduction) -> Reduction:
    """The same reduction, whose elements are states: what merges parts."""
    return replace(reduction, elements=reduction.state, lift=_slots("e", reduction.state), step=())


def has_neutral(reduction: Reduction) -> bool:
    """Whether there are elements whose state is the identity: those that are the identity."""
    same = reduction.elements == reduction.state
    return same and reduction.lifted(reduction.identity) == reduction.identity


def _slots(side: str, types: Sequence[DType]) -> tuple[Expr, ...]:
    return tuple(slot(side, k, t) for k, t in enumerate(types))


# -- sums of singles in doubles: each addition of singles rounds to half a unit of what has been summed so far, so a
# sum that comes out small keeps few digits, and rounded parts would lose what cancels between them. `form.wide_sums`
# sees to sums that are not in parts.

SINGLES = sum_(f32)
"""The sum of singles, over a state of a single."""

_E, _A, _B = slot("e", 0, f32), slot("a", 0, f64), slot("b", 0, f64)
IN_DOUBLES = Reduction(
    "sum in doubles", (f32,), (f64,), (const(0, f64),), (cast(_E, f64),), (call("add", _A, _B),), (cast(_A, f32),)
)  # fmt: skip
"""The sum of singles over a state of a double, rounded once."""
TO_DOUBLES = replace(keeping_state(IN_DOUBLES), name="sum to doubles")
"""The same, which its readers round: a sum of n equal singles, divided by n, is that single only if it was not rounded
before."""
OF_PARTS = replace(of_states(IN_DOUBLES), name="sum of parts")
"""The sum of singles from its parts, each a double."""
IN_WIDE_PARTS = MergeLaw(sum_(f64), OF_PARTS)
"""Singles are widened before they are summed."""


def may_cancel(expr: TensorExpr, summed: Callable[[], Expr]) -> bool:
    """Whether a reduction sums singles of both signs that were no halves, and no products of blocks. `summed` tells
    what it sums, seen through the pointwise ops before it; it is asked of sums of singles alone, as it walks through
    them."""
    if expr.reduction != SINGLES or expr.scan is not None:
        return False
    term = summed()
    halves = any(x.op == "read" and x.dtype.is_half for x in walk(term))
    return cancels(term, halves) and not is_product_of_blocks(term, expr.axes, expr.reduce)


def cancels(term: Expr, halves: bool) -> bool:
    """Whether what is summed has both signs, and no halves among what it reads (`halves`)."""
    sign = sign_of(term)
    return not halves and not sign.nonnegative and not sign.nonpositive


# -- moments


def means_of_parts(dtype: DType) -> Reduction:
    """(number, mean, squared distances from it) of parts; large means do not overflow where there was nothing
    before."""
    return replace(of_states(moments(dtype)), name="moments of parts")


def moments_of_parts(dtype: DType) -> Reduction:
    """(number, sum, squared distances from the mean) of parts; results: the last two. Nothing overflows where there
    were no elements."""
    a, b = _slots("a", (dtype,) * 3), _slots("b", (dtype,) * 3)
    one, zero = const(1, dtype), const(0, dtype)
    means = [call("div", s, call("maximum", n, one)) for n, s, _ in (a, b)]
    inverse = [call("div", one, call("maximum", n, one)) for n, _, _ in (a, b)]
    off = call("sub", call("mul", a[1], inverse[0]), call("mul", b[1], inverse[1]))
    return Reduction(
        "moments", (dtype,) * 3, (dtype,) * 3, (zero,) * 3, _slots("e", (dtype,) * 3), _joint(a, b, means), a[1:],
        pooled=(a[0], a[1], call("add", a[2], call("mul", call("mul", off, a[0]), off))),
    )  # fmt: skip


def _joint(a: Sequence[Expr], b: Sequence[Expr], means: Sequence[Expr]) -> tuple[Expr, ...]:
    """(number, sum, squared distances) of two parts with `means`."""
    n = call("add", a[0], b[0])
    apart = call("sub", means[1], means[0])
    share = call("div", call("mul", a[0], b[0]), call("maximum", n, const(1, n.dtype)))
    squares = call("add", call("add", a[2], b[2]), call("mul", call("mul", apart, share), apart))
    return n, call("add", a[1], b[1]), squares


def chunk_law(dtype: DType) -> MergeLaw:
    """Parts of chunks leave all sums; how many elements they have follows from the sizes."""
    return MergeLaw(moments_of_chunks(dtype), moments_and_sum(dtype))


def moments_and_sum(dtype: DType) -> Reduction:
    """`moments_of_parts` with one more sum in the state; results: this one, the squared distances, and the sum that
    these go with."""
    of = moments_of_parts(dtype)
    a, b, e = (_slots(side, (dtype,) * 4) for side in "abe")
    return replace(
        of, name="moments and sum", elements=(dtype,) * 4, state=(dtype,) * 4, identity=of.identity[:1] * 4, lift=e,
        merge=(*of.merge, call("add", a[3], b[3])), finish=(a[3], a[2], a[1]), pooled=(*of.pooled, a[3]),
    )  # fmt: skip


def moments_of_chunks(dtype: DType) -> Reduction:
    """`moments_and_sum`, where a lane takes one chunk (number, sum from an origin, squares, sum) after the other;
    results: all sums. All lanes have seen as many elements, so a division is one for all of them."""
    a, e = _slots("a", (dtype,) * 4), _slots("e", (dtype,) * 4)
    one = const(1, dtype)
    means = [call("mul", s, call("div", one, call("maximum", n, one))) for n, s, _, _ in (a, e)]
    step = (*_joint(a, e, means), call("add", a[3], e[3]))
    return replace(moments_and_sum(dtype), name="moments of chunks", finish=a[1:], step=step)


def with_number(plain: Reduction) -> Reduction:
    """A sum beside a number that is the same for all elements."""
    types = plain.state * 2
    (a, m), (b, n) = _slots("a", types), _slots("b", types)
    merge = (call("add", a, b), call("maximum", m, n))
    return Reduction("sum and number", types, types, plain.identity * 2, _slots("e", types), merge, (a, m))
