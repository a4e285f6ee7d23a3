"""Choices between like expressions as one expression with choices inside it: two reads of one tensor become one.

    where(c, f(a, b), f(a', b')) = f(where(c, a, a'), where(c, b, b'))
    where(c, x[i], x[j])         = x[where(c, i, j)]
    where(c, -a, a)              = a * where(c, -1, 1)

The halves of a rotary embedding, a roll, pieces of a concatenation: each element belongs to one side, but lanes of a
machine whose threads run in step pay for the loads and the arithmetic of both. All laws hold for every number: a sum is
rounded like the difference from the negated term.
"""

from __future__ import annotations

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Expr, axes_of, call, cast, const, make, rebuild, walk, where
from tilewright.ir.sizes import dims

_SUMS = ("add", "sub")


def merge_selects(e: Expr) -> Expr | None:
    """The choice `e` with what its sides have in common outside it, if that leaves less to load; else None."""
    condition, yes, no = e.args
    before = _reads(yes) | _reads(no)
    if len(before) < 2:
        return None
    made = _choice(condition, yes, no)
    after = _reads(made)
    added = len(_choices(made) - _choices(yes) - _choices(no))
    return made if len(after) < len(before) and added <= len(before) - len(after) else None


def _reads(e: Expr) -> set[Expr]:
    return {x for x in walk(e) if x.op == "read"}


def _choices(e: Expr) -> set[Expr]:
    """Choices of data."""
    return {x for x in walk(e) if x.op == "where" and _reads(x)}


def _choice(c: Expr, x: Expr, y: Expr) -> Expr:
    """`x` where `c` holds, else `y`."""
    if x is y:
        return x
    if x.op == y.op == "read" and x.value == y.value:
        return make("read", (_place(c, x.args[0], y.args[0]),), x.dtype, x.value)
    if x.op != y.op and x.op in _SUMS and y.op in _SUMS:
        second = _signed(c, x.args[1], y.args[1], x.op == "sub")
        return call("add", _choice(c, x.args[0], y.args[0]), second)
    if x.op == "neg" != y.op:
        return _signed(c, x.args[0], y, True)
    if y.op == "neg" != x.op:
        return _signed(c, x, y.args[0], False)
    alike = (x.op, x.dtype, x.value, len(x.args)) == (y.op, y.dtype, y.value, len(y.args))
    if not alike or not x.args or not (_reads(x) and _reads(y)) or x.op in ("where", "checked", "read"):
        return where(c, x, y)
    if any(a.dtype is not b.dtype for a, b in zip(x.args, y.args, strict=True)):
        return where(c, x, y)
    return rebuild(x, tuple(_choice(c, a, b) for a, b in zip(x.args, y.args, strict=True)))


def _signed(c: Expr, x: Expr, y: Expr, first: bool) -> Expr:
    """-x where `c` holds, else y; or, unless `first`, x where `c` holds, else -y."""
    if x.op == y.op == "mul":
        # The sign goes to the factor that is the same for more elements.
        least = min((0, 1), key=lambda k: len(axes_of(x.args[k]) | axes_of(y.args[k])))
        factors = [_choice(c, a, b) for a, b in zip(x.args, y.args, strict=True)]
        factors[least] = _signed(c, x.args[least], y.args[least], first)
        return call("mul", *factors)
    if x.op == y.op == "cast" and x.args[0].dtype is y.args[0].dtype and x.args[0].dtype.is_float:
        return rebuild(x, (_signed(c, x.args[0], y.args[0], first),))
    both = _choice(c, x, y)
    if both.op == "where":
        return where(c, call("neg", x), y) if first else where(c, x, call("neg", y))
    signs = const(-1, both.dtype), const(1, both.dtype)
    return call("mul", both, where(c, *(signs if first else signs[::-1])))


def _place(c: Expr, i: Expr, j: Expr) -> Expr:
    """An index, `i` or `j`: one of them and the condition's number (0 or 1) times how far apart they are, since
    compilers of kernels see through a product how many neighbours it leaves neighbours."""
    return dims.add(j, dims.mul(cast(c, i64), dims.sub(i, j)))
