"""Index arithmetic in a normal form: integer combinations of monomials over axes, symbols and opaque atoms.

Facts are carried by the leaves (an axis lies in [0, extent), a symbol in its range), so a simplification needs no
environment. `floordiv` and `mod` are only simplified by facts that hold on the whole domain; an axis of extent 0 has
an empty domain, on which everything holds. No sympy: capture translates at the border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from math import lcm

from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Axis, Expr, Symbol, integer, leaves, make, register_index
from tilewright.tuning.search_limits import EXPRESSIONS

from . import host, linear_form
from .linear_form import (
    Linear,
    Monomial,
    beyond,
    common_factors,
    held,
    is_short,
    key_of,
    linear,
    marked,
    may_wrap,
    monomial_of,
    needs_bound,
    next_digit,
    product_of,
    quotient_of,
    shifted_nonnegative,
    short_product,
    split_by,
    sum_of,
)

evaluate, symbols_of, divisible = host.evaluate, host.symbols_of, linear_form.divisible

ZERO, ONE = integer(0), integer(1)
_EXTREMA = ("maximum", "minimum")
_RING = ("add", "sub", "mul")


def from_linear(form: Linear) -> Expr:
    """The canonical expression of a normal form; a quotient and its remainder are joined again."""
    form = _joined(form)
    terms: list[Expr] = []
    for m, c in sorted(
        form.items(), key=lambda item: (not item[0], len(item[0]), [key_of(a) for a in item[0]])
    ):
        term: Expr | None = None
        for atom in m:
            term = atom if term is None else make("mul", (term, atom), i64)
        if term is None:
            term = integer(c)
        elif c != 1:
            term = make("mul", (term, integer(c)), i64)
        terms.append(term)
    if not terms:
        return ZERO
    total = terms[0]
    for term in terms[1:]:
        total = make("add", (total, term), i64)
    if is_short(form):
        total.linear_memo = form
    return total


def _joined(form: Linear) -> Linear:
    """`c*(r % b) + c*b*(r // b)` is `c*r`, and `c*(r % b) + c*b*(r // b % d)` is `c*(r % (b*d))`: splitting an index
    and merging it again leaves no trace."""
    for m in [m for m in form if any(atom.op == "mod" for atom in m)]:
        for k, atom in enumerate(m):
            if atom.op != "mod":
                continue
            r, b = atom.args
            rest: Linear = {m[:k] + m[k + 1 :]: form[m]}
            quotient = product_of(rest, product_of(linear(b), linear(floordiv(r, b))))
            if quotient and all(form.get(n) == c for n, c in quotient.items()):
                joined = sum_of(sum_of(form, quotient, -1), product_of(rest, {(atom,): 1}), -1)
                joined = sum_of(joined, product_of(rest, linear(r)), 1)
                return _joined(joined) if is_short(joined) else form
            size = static(b)
            digit = next_digit(form, rest, floordiv(r, b), size) if size is not None and size > 0 else None
            if digit is not None:
                others = {x: c for x, c in form.items() if x not in (m, digit.term)}
                whole = product_of(rest, linear(mod(r, mul(b, integer(digit.values)))))
                return _joined(sum_of(others, whole, 1))
    return form


@lru_cache(EXPRESSIONS.memo_results)
def add(*terms: Expr) -> Expr:
    """The sum of index expressions, in normal form if that is short."""
    form: Linear = {}
    for t in terms:
        form = sum_of(form, linear(t), 1)
    return from_linear(form) if len(terms) < 2 or is_short(form) else reduce(_plus, terms)


def _plus(a: Expr, b: Expr) -> Expr:
    form = sum_of(linear(a), linear(b), 1)
    return from_linear(form) if is_short(form) else make("add", (a, b), i64)


@lru_cache(EXPRESSIONS.memo_results)
def sub(a: Expr, b: Expr) -> Expr:
    """`a - b` in normal form if that is short."""
    form = sum_of(linear(a), linear(b), -1)
    return from_linear(form) if is_short(form) else make("sub", (a, b), i64)


@lru_cache(EXPRESSIONS.memo_results)
def mul(*factors: Expr) -> Expr:
    """The product of index expressions, in normal form if that is short."""
    total = ONE
    for f in factors:
        form = short_product(linear(total), linear(f))
        total = make("mul", (total, f), i64) if form is None else from_linear(form)
    return total


def prod(factors: Iterable[Expr]) -> Expr:
    """The product of any number of extents (1 for none)."""
    return mul(*factors)


@lru_cache(EXPRESSIONS.memo_results)
def floordiv(a: Expr, b: Expr) -> Expr:
    """`a // b` rounding down, for b > 0 a monomial of constants and symbols; anything else stays as it is."""
    mono = monomial_of(b)
    if mono is None or mono[1] <= 0 or not at_least(b, 0) or may_wrap(a):
        return make("floordiv", (a, b), i64)
    m, c = mono
    if not m and c == 1:
        return a
    quotient, rest = split_by(linear(a), m, c)
    r = from_linear(rest)
    if rest and not (at_least(r, 0) and at_least(sub(b, r), 1)):
        inner = _reduced("floordiv", r, b)
        quotient = sum_of(quotient, linear(inner), 1)
    return from_linear(quotient)


@lru_cache(EXPRESSIONS.memo_results)
def mod(a: Expr, b: Expr) -> Expr:
    """`a % b` in [0, b), for b > 0 a monomial of constants and symbols; anything else stays as it is."""
    mono = monomial_of(b)
    if mono is None or mono[1] <= 0 or not at_least(b, 0) or may_wrap(a):
        return make("mod", (a, b), i64)
    m, c = mono
    if not m and c == 1:
        return ZERO
    _, rest = split_by(linear(a), m, c)
    r = from_linear(rest)
    if not rest or (at_least(r, 0) and at_least(sub(b, r), 1)):
        return r
    if r.op == "mod" and exact_div(r.args[1], b) is not None:
        return mod(r.args[0], b)
    return _reduced("mod", r, b)


def _reduced(op: str, r: Expr, b: Expr) -> Expr:
    """floordiv or mod of a remainder by b, after taking out a common factor; nested divisions are merged."""
    if at_least(mul(r, integer(-1)), 1) and at_least(add(r, b), 0):  # -b <= r < 0
        return integer(-1) if op == "floordiv" else add(r, b)
    form = linear(r)
    mono = monomial_of(b)
    assert mono is not None
    if op == "floordiv":
        inner = _only_quotient(form)
        if inner is not None:
            # (a // m + t) // b = (a + m t) // (m b) for whole t
            return floordiv(add(inner.args[0], mul(inner.args[1], sub(r, inner))), mul(inner.args[1], b))
    for m, c in common_factors(form, *mono):
        quotient, rest = split_by(form, m, c)
        factor, low = from_linear({m: c}), from_linear(rest)
        if quotient and (not rest or (at_least(low, 0) and at_least(sub(factor, low), 1))):
            small = from_linear({quotient_of(mono[0], m) or (): mono[1] // c})
            high = from_linear(quotient)
            return floordiv(high, small) if op == "floordiv" else add(mul(mod(high, small), factor), low)
    return make(op, (r, b), i64)


def _only_quotient(form: Linear) -> Expr | None:
    """The term a // m (m >= 1) of a form whose other terms are constants and products of symbols, else None."""
    found: Expr | None = None
    for m, c in form.items():
        if len(m) == 1 and m[0].op == "floordiv":
            if found is not None or c != 1 or not at_least(m[0].args[1], 1):
                return None
            found = m[0]
        elif any(not isinstance(atom.value, Symbol) for atom in m):
            return None
    return found


def ceildiv(a: Expr, b: Expr) -> Expr:
    """`a / b` rounding up, for b > 0."""
    return floordiv(add(a, sub(b, ONE)), b)


@lru_cache(EXPRESSIONS.memo_results)
def maximum(a: Expr, b: Expr) -> Expr:
    """The larger of two index expressions; decided now if provable."""
    if _above(a, b):
        return a
    return b if _above(b, a) else make("maximum", tuple(sorted((a, b), key=key_of)), i64)


@lru_cache(EXPRESSIONS.memo_results)
def minimum(a: Expr, b: Expr) -> Expr:
    """The smaller of two index expressions; decided now if provable."""
    if _above(a, b):
        return b
    return a if _above(b, a) else make("minimum", tuple(sorted((a, b), key=key_of)), i64)


def _above(a: Expr, b: Expr) -> bool:
    """Whether a >= b is proved, argument by argument where they are extrema."""
    if may_wrap(a) or may_wrap(b):
        return False
    if at_least(sub(a, b), 0):
        return True
    if b.op in _EXTREMA and (all if b.op == "maximum" else any)(_above(a, x) for x in b.args):
        return True
    return a.op in _EXTREMA and (any if a.op == "maximum" else all)(_above(x, b) for x in a.args)


@lru_cache(EXPRESSIONS.memo_results)
def exact_div(a: Expr, b: Expr) -> Expr | None:
    """`a / b` if b is a monomial that provably divides a, else None."""
    mono = monomial_of(b)
    if mono is None or not mono[1]:
        return None
    quotient, rest = split_by(linear(a), *mono)
    return None if rest else from_linear(quotient)


def bounds(e: Expr) -> tuple[Expr | None, Expr | None]:
    """Inclusive bounds of `e` as expressions over symbols only (None = unknown)."""
    todo = [e]
    while todo:  # parts first: expressions may be of any depth
        x = todo.pop()
        if x.bounds_memo is None:
            parts = [a for m in linear(x) for atom in m for a in _bounded_by(atom) if a.bounds_memo is None]
            todo += [x, *parts] if parts else []
            x.bounds_memo = None if parts else _form_bounds(linear(x))
    return e.bounds_memo or (None, None)


def _bounded_by(atom: Expr) -> tuple[Expr, ...]:
    """The expressions whose bounds `_atom_bounds` asks for."""
    if atom.op in ("floordiv", "checked"):
        return atom.args[:1]
    return atom.args if atom.op in _EXTREMA or atom.op in _RING else ()


def _form_bounds(form: Linear) -> tuple[Expr | None, Expr | None]:
    low, high = (None, None) if beyond(form) else (ZERO, ZERO)
    for m, c in form.items():
        lo, hi = _monomial_bounds(m)
        if c < 0:
            lo, hi = hi, lo
        low = None if low is None or lo is None else add(low, mul(lo, integer(c)))
        high = None if high is None or hi is None else add(high, mul(hi, integer(c)))
    return low, high


def _monomial_bounds(m: Monomial) -> tuple[Expr | None, Expr | None]:
    low: Expr | None = ONE
    high: Expr | None = ONE
    for atom in m:
        lo, hi = _atom_bounds(atom)
        if len(m) == 1:
            return lo, hi
        if lo is None or not at_least(lo, 0):
            return None, None
        low = None if low is None else mul(low, lo)
        high = None if high is None or hi is None else mul(high, hi)
    return low, high


def _atom_bounds(atom: Expr) -> tuple[Expr | None, Expr | None]:
    if isinstance(atom.value, Axis):
        return ZERO, sub(atom.value.extent, ONE)
    if isinstance(atom.value, Symbol):
        return atom, atom
    if atom.op == "mod" and at_least(atom.args[1], 0):
        return ZERO, sub(atom.args[1], ONE)
    if atom.op == "floordiv" and at_least(atom.args[1], 1):
        lo, hi = bounds(atom.args[0])
        return (None if lo is None else floordiv(lo, atom.args[1])), (
            None if hi is None else floordiv(hi, atom.args[1]))  # fmt: skip
    if atom.op in _EXTREMA:
        return _extremum_bounds(atom)
    if atom.op in _RING:
        return _ring_bounds(atom)
    if atom.op == "checked":
        return bounds(atom.args[0])
    if atom.op == "cast" and atom.args[0].dtype is bool_:
        return ZERO, ONE
    return None, None


def _ring_bounds(atom: Expr) -> tuple[Expr | None, Expr | None]:
    """Bounds of a sum or product that has too many terms to be one of those."""
    if beyond({(atom,): 1}) or may_wrap(atom):
        return None, None
    (alo, ahi), (blo, bhi) = bounds(atom.args[0]), bounds(atom.args[1])
    if atom.op == "sub":
        blo, bhi = bhi, blo
    if atom.op == "mul" and not all(x is not None and at_least(x, 0) for x in (alo, blo)):
        return None, None
    join = {"add": add, "sub": sub, "mul": mul}[atom.op]
    return (None if alo is None or blo is None else join(alo, blo)), (
        None if ahi is None or bhi is None else join(ahi, bhi))  # fmt: skip


def _extremum_bounds(atom: Expr) -> tuple[Expr | None, Expr | None]:
    (alo, ahi), (blo, bhi) = bounds(atom.args[0]), bounds(atom.args[1])
    pick = maximum if atom.op == "maximum" else minimum
    low = None if alo is None or blo is None else pick(alo, blo)
    high = None if ahi is None or bhi is None else pick(ahi, bhi)
    if atom.op == "maximum":
        return (alo or blo if low is None else low), high
    return low, (ahi or bhi if high is None else high)


@lru_cache(EXPRESSIONS.memo_results)
def at_least(e: Expr, bound: int) -> bool:
    """Whether `e >= bound` is proved from the facts of its leaves (False = not proved)."""
    if e.op == "const":
        assert isinstance(e.value, int)
        return e.value >= bound
    if isinstance(e.value, Symbol):
        return e.value.low >= bound
    if e.op == "floordiv" and at_least(e.args[1], 1):  # a // d >= n where a >= n d
        return at_least(sub(e.args[0], mul(integer(bound), e.args[1])), 0)
    form = linear(e)
    if any(needs_bound(atom) for m in form for atom in m):
        if beyond(form):
            return False
        low, _ = bounds(e)
        if low is not None and low is not e:
            least = linear(low)
            moves = any(not isinstance(atom.value, Symbol) for m in least for atom in m)
            if (_low_of_atoms if moves else shifted_nonnegative)(least, bound):
                return True
        return _by_quotients(form, bound)
    return not beyond(form) and shifted_nonnegative(form, bound)


def _by_quotients(form: Linear, bound: int) -> bool:
    """Whether `form >= bound` follows from (a - d + 1) / d <= a // d <= a / d, for quotients by constants d.
    As the form is whole, it is enough that it is above bound - 1."""
    divisors = {m: _constant_divisor(m) for m in form}
    scale = lcm(*[d for d in divisors.values() if d])
    if scale == 1:
        return False
    total: Linear = {}
    for m, c in form.items():
        d = divisors[m]
        if not d:
            total = sum_of(total, {m: c * scale}, 1)
            continue
        top = m[0].args[0] if c < 0 else sub(m[0].args[0], integer(d - 1))
        total = sum_of(total, {n: k * c * (scale // d) for n, k in linear(top).items()}, 1)
    return at_least(from_linear(total), scale * (bound - 1) + 1)


def _constant_divisor(m: Monomial) -> int:
    """d if the monomial is one quotient a // d by a constant d > 1, else 0."""
    if len(m) != 1 or m[0].op != "floordiv":
        return 0
    d = static(m[0].args[1])
    return d if d is not None and d > 1 else 0


def _low_of_atoms(form: Linear, bound: int) -> bool:
    total = 0
    for m, c in form.items():
        lo, hi = 1, 1
        for atom in m:
            alo, ahi = int_range(atom)
            if alo is None or alo < 0:
                return False
            lo = lo * alo
            hi = None if hi is None or ahi is None else hi * ahi
        extreme = lo if c > 0 else hi
        if extreme is None:
            return False
        total += c * extreme
    return total >= bound


def int_range(e: Expr) -> tuple[int | None, int | None]:
    """Inclusive numeric bounds of `e` (None = unbounded or unknown)."""
    low, high = bounds(e)
    return _numeric(low, lower=True), _numeric(high, lower=False)


def _numeric(e: Expr | None, lower: bool) -> int | None:
    if e is None:
        return None
    total = 0
    for m, c in linear(e).items():
        term = c
        for atom in m:
            low, high = _numbers(atom)
            side = low if (c > 0) == lower else high
            if low is None or low < 0 or side is None:
                return None
            term *= side
        total += term
    return total


def _numbers(atom: Expr) -> tuple[int | None, int | None]:
    """Numeric bounds of a symbol, or of a quotient of symbols by a constant."""
    if isinstance(atom.value, Symbol):
        return atom.value.low, atom.value.high
    divisor = _constant_divisor((atom,))
    if not divisor:
        return None, None
    low, high = int_range(atom.args[0])
    return None if low is None else low // divisor, None if high is None else high // divisor


def equal(a: Expr, b: Expr) -> bool:
    """Whether two index expressions are proved equal (normal forms are nearly canonical, so usually `a is b`)."""
    return a is b or not _without_mod(linear(sub(a, b)))


def _without_mod(form: Linear) -> Linear:
    """Remainders written as `r - b*(r // b)`, which makes sums with them canonical (but hides their bounds)."""
    for m in [m for m in form if any(atom.op == "mod" for atom in m)]:
        c = form[m]
        term: Linear | None = {(): c}
        for atom in m:
            if term is not None and atom.op == "mod":
                r, b = atom.args
                difference = sum_of(linear(r), product_of(linear(b), linear(floordiv(r, b))), -1)
                term = short_product(term, difference)
            elif term is not None:
                term = product_of(term, {(atom,): 1})
        if term is not None:
            form = sum_of(sum_of(form, {m: c}, -1), term, 1)
    return form


def static(e: Expr) -> int | None:
    """The value of a constant index expression, else None."""
    return e.value if e.op == "const" and isinstance(e.value, int) else None


@lru_cache(EXPRESSIONS.memo_results)
def coefficient(e: Expr, of: Expr) -> Expr | None:
    """The factor of `of` in `e` if `e` is affine in it (0 if absent), else None."""
    form: Linear = {}
    for m, c in linear(e).items():
        if m.count(of) > 1 or any(of in leaves(atom, of.op) for atom in m if atom is not of):
            return None
        if of in m:
            q = quotient_of(m, (of,))
            assert q is not None
            form[q] = c
    return from_linear(form)


def dense_strides(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """Strides of a dense row-major tensor, in elements; a size of 0 or 1 counts as torch counts it (max(size, 1))."""
    out: list[Expr] = []
    step = ONE
    for size in reversed(shape):
        out.append(step)
        step = mul(step, maximum(size, ONE))
    return tuple(reversed(out))


def of_program(op: str, *args: Expr) -> Expr:
    """A sum ("add"), difference ("sub") or product ("mul") that a program wrote: it wraps around."""
    return _rebuilt({"add": add, "sub": sub, "mul": mul}[op], True, args)


def _rebuilt(build: Callable[..., Expr], programs: bool, args: tuple[Expr, ...]) -> Expr:
    """What a program computes wraps around; what `at_least` subtracts for a proof is exact."""
    form = held(linear(e := build(*args)))
    e = e if form is None else from_linear(form)
    return marked(e) if programs else e


for _name, _build in (("add", add), ("sub", sub), ("mul", mul), ("floordiv", floordiv), ("mod", mod),
                      ("neg", lambda a: mul(a, integer(-1))), ("maximum", maximum), ("minimum", minimum)):  # fmt: skip
    register_index(_name, lambda programs, *args, build=_build: _rebuilt(build, programs, args))
