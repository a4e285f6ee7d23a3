"""An element type in which equal programs of exact arithmetic give equal bits, and different ones do not.

An element is a float64 *shadow* that control follows (comparisons, maxima, masks, indices), three residues
that carry the value, and a sort. Ring arithmetic acts on the residues. exp maps a residue modulo one prime
to a power of a generator modulo the next, so exp(a + b) = exp(a) * exp(b) holds exactly, two levels deep;
the lowest residue is *lost*. The logarithm of E is E itself in the *log sort*, where adding multiplies.
Casts between floats do nothing.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np

from tilewright.ir.dtype import DType, Kind, f64
from tilewright.ir.expr import SCALARS, Const

from . import modular
from .algebra import FLOATS, OF_FLOATS, Array, convert, to_numpy
from .modular import LOST, PRIMES, Words

ELEMENT = np.dtype([("v", np.float64), ("w", np.uint64, (3,)), ("log", np.bool_)])
"""Shadow, residues (or LOST), and whether the sort is log."""


class ResidueError(ArithmeticError):
    """The residues cannot follow the shadow (division by a residue of 0, a product of two logarithms): other
    inputs or another program are needed."""


def pack(v: Array, w: Words, log: Array | bool = False) -> Array:
    """Elements from their parts; a shadow that is not finite has residues 0."""
    out = np.zeros(np.broadcast_shapes(np.shape(v), w.shape[:-1]), ELEMENT)
    out["v"], out["w"], out["log"] = v, w, log
    out["w"][~np.isfinite(out["v"])] = 0
    return out


def from_floats(x: Array) -> Array:
    """The exact elements of finite or non-finite float64 numbers."""
    x = np.asarray(x, np.float64)
    mantissa, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    numerator = np.ldexp(np.abs(mantissa), 53).astype(np.uint64)
    scales, which = np.unique(exponent.astype(np.int64) - 53, return_inverse=True)
    words: list[Words] = []
    for k, p in enumerate(PRIMES):
        table = np.array([pow(2, int(s), p) for s in scales], np.uint64)
        magnitude = modular.multiply(
            numerator % np.uint64(p), table[which.reshape(x.shape)], modular.moduli(k)
        )
        words.append(np.where(x < 0, modular.negate(magnitude, modular.moduli(k)), magnitude))
    return pack(x, np.stack(words, -1))


@lru_cache(1 << 10)
def _number(bits: bytes) -> Array:
    """The exact element of the float64 number of some bits, of rank 0, which nobody may change: a program asks for its
    constants at every step. By its bits, as zeros of both signs are equal."""
    made = from_floats(np.frombuffer(bits, "<f8").reshape(()))
    made.flags.writeable = False
    return made


def from_integers(x: Array) -> Array:
    """The exact elements of integers or bools."""
    wide = x.astype(np.int64)
    return pack(
        wide.astype(np.float64), np.stack([(wide % np.int64(p)).astype(np.uint64) for p in PRIMES], -1)
    )


def from_fraction(x: Fraction) -> Array:
    """The exact element of a rational number, of rank 0."""
    words = [x.numerator * pow(x.denominator, -1, p) % p for p in PRIMES]
    return pack(np.asarray(float(x)), np.array(words, np.uint64))


def exact_random(shape: tuple[int, ...], seed: int, low: float = -1, high: float = 1) -> Array:
    """Elements with shadows uniform in [low, high) and independent residues: unknowns in general position."""
    rng = np.random.default_rng(seed)
    words = np.stack([rng.integers(1, p, shape, np.uint64) for p in PRIMES], -1)
    return pack(rng.uniform(low, high, shape), words)


def equal(a: Array, b: Array) -> bool:
    """Whether all elements agree: the last residue and the sort, or the class of what is not finite.
    Integers and bools are compared as they are; logarithms by the part that products with numbers keep, so that
    2 * log(E) is log(E) + log(E). Raises ResidueError if a last residue is lost."""
    if a.shape != b.shape:
        return False
    if a.dtype.names is None:
        return bool(np.array_equal(a, b))
    finite = np.isfinite(a["v"])
    last_a, last_b = a["w"][..., 2], b["w"][..., 2]
    if np.any(finite & ((last_a == LOST) | (last_b == LOST))):
        raise ResidueError("exp was nested more than two levels deep")
    if np.any(apart := finite & a["log"] & b["log"] & (last_a != last_b)):
        last_a, last_b = (np.where(apart, _in_subgroup(w, 1), w) for w in (last_a, last_b))
    agree = (last_a == last_b) & (a["log"] == b["log"]) & np.isfinite(b["v"])
    kind = np.where(np.isnan(a["v"]), np.isnan(b["v"]), a["v"] == b["v"])
    return bool(np.all(np.where(finite, agree, kind)))


def _each(function: Callable[..., Words], *words: Words) -> Words:
    """Per word: function(residues of all operands, prime); a lost operand loses the result."""
    shaped = np.broadcast_arrays(*words)
    lost = np.logical_or.reduce([t == LOST for t in shaped])
    clean = [np.where(lost, np.uint64(0), t) for t in shaped]
    return np.where(lost, LOST, function(*clean, modular.moduli()))


def _lifted(w: Words) -> Words:
    """The residues of exp of residues."""
    out = np.full(w.shape, LOST)
    for k in (0, 1):
        known = w[..., k] != LOST
        out[..., k + 1] = np.where(known, modular.exponential(np.where(known, w[..., k], 0), k), LOST)
    return out


def _as_log(x: Array) -> Words:
    """The residues of `x` as elements of the log sort."""
    return x["w"] if x["log"].all() else np.where(x["log"][..., None], x["w"], _lifted(x["w"]))


def _add(a: Array, b: Array) -> Array:
    v = a["v"] + b["v"]
    plain = _each(modular.add, a["w"], b["w"])
    log = np.broadcast_to(a["log"] | b["log"], v.shape)
    if not log.any():
        return pack(v, plain)
    product = _each(modular.multiply, _as_log(a), _as_log(b))
    return pack(v, np.where(log[..., None], product, plain), log)


def _negate(a: Array) -> Array:
    plain = _each(modular.negate, a["w"])
    if a["log"].any():
        plain = np.where(a["log"][..., None], _inverted(a["w"]), plain)
    return pack(-a["v"], plain, a["log"])


def _subtract(a: Array, b: Array) -> Array:
    return _add(a, _negate(b))


def _inverted(w: Words) -> Words:
    out = np.full(w.shape, LOST)
    for k in range(3):
        known = w[..., k] != LOST
        if known.any():
            out[..., k] = np.where(known, modular.inverse(np.where(known, w[..., k], 0), k), LOST)
    return out


def _multiply(a: Array, b: Array) -> Array:
    v = a["v"] * b["v"]
    plain = _each(modular.multiply, a["w"], b["w"])
    first, second = np.broadcast_to(a["log"], v.shape), np.broadcast_to(b["log"], v.shape)
    if not (first.any() or second.any()):
        return pack(v, plain)
    if np.any(first & second & np.isfinite(v)):
        raise ResidueError("a product of two logarithms")
    a, b = np.broadcast_to(a, v.shape), np.broadcast_to(b, v.shape)
    powers = np.where(second[..., None], _log_times(b["w"], a["w"]), _log_times(a["w"], b["w"]))
    log = first | second
    return pack(v, np.where(log[..., None], powers, plain), log)


def _in_subgroup(word: Words, level: int) -> Words:
    """The part of known residues modulo PRIMES[level + 1] that lies in the subgroup of order PRIMES[level]."""
    project = modular.COFACTORS[level] * pow(modular.COFACTORS[level], -1, PRIMES[level])
    return modular.power(word, np.asarray(project, np.uint64), level + 1)


def _log_times(log: Words, factor: Words) -> Words:
    """c * log(E) = log(E ** c), for the part of E in the subgroup on which the exponent c is defined."""
    out = np.full(log.shape, LOST)
    for k in (0, 1):
        base, c = log[..., k + 1], factor[..., k]
        known = (base != LOST) & (c != LOST)
        inside = _in_subgroup(np.where(known, base, 0), k)
        out[..., k + 1] = np.where(known, modular.power(inside, np.where(known, c, 0), k + 1), LOST)
    return out


def _reciprocal(a: Array) -> Array:
    finite = np.isfinite(a["v"])
    if np.any(finite & a["log"]):
        raise ResidueError("division by a logarithm")
    if np.any(finite & (a["v"] != 0) & (a["w"] == 0).any(-1)):
        raise ResidueError("division by a residue of 0")
    v = np.divide(1.0, a["v"])
    return pack(v, np.where(finite[..., None], _inverted(a["w"]), np.uint64(0)))


def _divide(a: Array, b: Array) -> Array:
    out = _multiply(a, _reciprocal(b))
    v = np.divide(*np.broadcast_arrays(a["v"], b["v"]))
    return pack(v, out["w"], out["log"])


def _exp(a: Array) -> Array:
    words = _as_log(a)
    nothing = np.isneginf(a["v"])
    return pack(np.exp(a["v"]), np.where(nothing[..., None], np.uint64(0), words))


def _log(a: Array) -> Array:
    if np.any(a["log"] & np.isfinite(a["v"])):
        raise ResidueError("a logarithm of a logarithm")
    words = a["w"].copy()
    words[..., 0] = LOST
    return pack(np.log(a["v"]), words, True)


def _tag(name: str, shadow: Callable[..., object]) -> Callable[..., Array]:
    """An opaque function: a fixed scrambling of each residue, so that only equal arguments give equal
    results."""
    seed = zlib.crc32(name.encode())

    def apply(*args: Array) -> Array:
        v = np.asarray(shadow(*[a["v"] for a in args]), np.float64)
        words = np.zeros((*v.shape, 3), np.uint64)
        for k, a in enumerate(args):
            scramble = partial(modular.hashed, seed=8 * seed + k)
            bits = np.asarray(a["v"], order="C")[..., None].view(np.uint64)
            words = _each(
                modular.add, words, _each(scramble, np.where(np.isfinite(a["v"])[..., None], a["w"], bits))
            )
            words = _each(modular.add, words, a["log"][..., None].astype(np.uint64))
        return pack(v, words)

    return apply


def _atom(value: float, name: str) -> Array:
    """An irrational constant: its shadow, and residues of its own."""
    t = np.full(3, zlib.crc32(name.encode()), np.uint64)
    return pack(np.asarray(value), modular.hashed(t, modular.moduli(), 77))


LN2, LN10 = _atom(math.log(2), "ln 2"), _atom(math.log(10), "ln 10")


def _choose(condition: Array, yes: Array, no: Array) -> Array:
    return np.where(condition, yes, no)


TRACELESS = 2.0**60
"""Numbers to whose shadows unknowns of size 1 add nothing."""


NEAR = 2.0**-44
"""Shadows that differ by less, beside their size, may be one number whose terms were added in two orders."""


def _told_apart(a: Array, b: Array | None = None) -> tuple[Array, ...]:
    """Numbers that are to be compared, those that are one with one shadow. Raises ResidueError where shadows are so
    large that what is added to them leaves no trace, or so near that the order of additions decides between them, and
    residues differ: a comparison would take two numbers for one, or chance for an order."""
    if b is None:
        return (a,)
    a, b = np.broadcast_arrays(a, b)
    v, w = a["v"], b["v"]
    size = np.maximum(np.abs(v), np.abs(w))
    finite = np.isfinite(size)
    large = finite & (v == w) & (size >= TRACELESS)
    near = finite & (v != w) & (np.abs(v - w) <= NEAR * size)
    known = (a["w"] != LOST) & (b["w"] != LOST)
    different = (known & (a["w"] != b["w"])).any(-1)
    one = known.all(-1) & ~different
    if np.any((large & different) | (near & ~one)):
        raise ResidueError("numbers too large or too near to be told apart")
    return a, _choose(near & one, a, b)


def _extremum(better: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """The better shadow; of equal ones the better residues, so that no order of many makes a difference (what is added
    to 0.2 may leave no trace in its shadow)."""

    def apply(a: Array, b: Array) -> Array:
        a, b = _told_apart(a, b)
        alike, ahead = a["v"] == b["v"], better(a["v"], b["v"])
        for k in (2, 1, 0):
            one, other = a["w"][..., k], b["w"][..., k]
            ahead = np.where(alike, better(one, other), ahead)
            alike = alike & (one == other)
        return _choose(np.isnan(a["v"]) | (~np.isnan(b["v"]) & ahead), a, b)

    return apply


def _rounded(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda a: from_floats(function(a["v"]))


def _modulo(rounding: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: _subtract(a, _multiply(b, from_floats(rounding(a["v"] / b["v"]))))


def _odd(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """f(-a) is -f(a), and f(0) is 0: laws that rewrite erf rest on it."""

    def apply(a: Array) -> Array:
        above = _choose(a["v"] < 0, _negate(a), a)
        return _choose(a["v"] == 0, a, _choose(a["v"] < 0, _negate(function(above)), function(above)))

    return apply


def _power(a: Array, b: Array) -> Array:
    """Opaque, but for small whole exponents: products, element by element, so that parts are as the whole."""
    out = _TAGGED_POWER(a, b)
    for n in range(1, 5):
        exponent = from_floats(np.asarray(float(n)))
        small = np.broadcast_to((b["v"] == n) & (b["w"] == exponent["w"]).all(-1) & ~b["log"], out.shape)
        if not small.any():
            continue
        base = _choose(small, a, ONE)
        product = base
        for _ in range(n - 1):
            product = _multiply(product, base)
        out = _choose(small, product, out)
    return out


ONE = from_floats(np.asarray(1.0))
_ERF = _odd(_tag("erf", lambda v: np.asarray(np.frompyfunc(math.erf, 1, 1)(v))))
_SQRT = _tag("sqrt", np.sqrt)
_TANH = _tag("tanh", np.tanh)
_TAGGED_POWER = _tag("pow", np.power)

_KNOWN: dict[str, Callable[..., Array]] = {
    "add": _add, "sub": _subtract, "mul": _multiply, "div": _divide, "neg": _negate, "reciprocal": _reciprocal,
    "exp": _exp, "exp2": lambda a: _exp(_multiply(a, LN2)), "expm1": lambda a: _subtract(_exp(a), ONE),
    "log": _log, "log1p": lambda a: _log(_add(a, ONE)), "log2": lambda a: _divide(_log(a), LN2),
    "log10": lambda a: _divide(_log(a), LN10), "sigmoid": lambda a: _reciprocal(_add(ONE, _exp(_negate(a)))),
    "sqrt": _SQRT, "rsqrt": lambda a: _reciprocal(_SQRT(a)), "erf": _ERF, "erfc": lambda a: _subtract(ONE, _ERF(a)),
    "fma": lambda a, b, c: _add(_multiply(a, b), c),
    "maximum": _extremum(np.greater_equal), "minimum": _extremum(np.less_equal), "pow": _power,
    "abs": lambda a: _choose(a["v"] < 0, _negate(a), a), "mod": _modulo(np.floor), "fmod": _modulo(np.trunc),
    "floordiv": lambda a, b: from_floats(np.floor(a["v"] / b["v"])),
    "truncdiv": lambda a, b: from_floats(np.trunc(a["v"] / b["v"])),
    "floor": _rounded(np.floor), "ceil": _rounded(np.ceil), "trunc": _rounded(np.trunc), "round": _rounded(np.rint),
    "sign": _rounded(lambda v: (v > 0).astype(np.float64) - (v < 0)), "atan2": _tag("atan2", np.arctan2),
    "close_exp": _exp, "close_div": _divide,
    "quick_exp2": lambda a: _exp(_multiply(a, LN2)), "quick_log2": lambda a: _divide(_log(a), LN2),
    "quick_erfc": lambda a: _subtract(ONE, _ERF(a)), "coarse_erfc": lambda a: _subtract(ONE, _ERF(a)),
    "tanh": _TANH, "coarse_tanh": _TANH, "quick_tanh": _TANH,
}  # fmt: skip
_OPAQUE = [n for n in OF_FLOATS if n not in _KNOWN and SCALARS[n].result == "same"]
_OPS = _KNOWN | {name: _tag(name, OF_FLOATS[name]) for name in _OPAQUE}

_BY_SHADOW = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"})


class Exact:
    """The algebra of exact elements; integers and bools are as in FLOATS."""

    def load(self, data: object, dtype: DType) -> Array:
        """See `Algebra`. Floats are taken as the rational numbers that they are."""
        if isinstance(data, np.ndarray) and data.dtype == ELEMENT:
            return data
        plain = to_numpy(data)
        return (
            from_floats(plain.astype(np.float64)) if dtype.is_float else convert(plain, FLOATS.storage(dtype))
        )

    def constant(self, value: Const, dtype: DType) -> Array:
        """See `Algebra`. Fractions stay exact."""
        if not dtype.is_float:
            return FLOATS.constant(value, dtype)
        return from_fraction(value) if isinstance(value, Fraction) else _number(struct.pack("<d", value))

    def apply(self, op: str, args: Sequence[Array], dtype: DType, result: DType) -> Array:
        """See `Algebra`. Raises ResidueError where the residues cannot follow."""
        with np.errstate(all="ignore"):
            if op == "where":
                return _choose(*args)
            if op in ("cast", "narrow"):
                return self._cast(args[0], dtype, result)
            if not dtype.is_float:
                return FLOATS.apply(op, args, dtype, result)
            if op in _BY_SHADOW:
                return FLOATS.apply(op, [a["v"] for a in _told_apart(*args)], f64, result)
            return _OPS[op](*args)

    def _cast(self, x: Array, dtype: DType, result: DType) -> Array:
        if dtype.is_float:
            if result.is_float:
                return x
            return x["v"] != 0 if result.kind is Kind.BOOL else convert(x["v"], FLOATS.storage(result))
        return from_integers(x) if result.is_float else convert(x, FLOATS.storage(result))

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        """See `Algebra`."""
        return np.concatenate(parts, axis)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """See `Algebra`."""
        return np.zeros(shape, ELEMENT if dtype.is_float else FLOATS.storage(dtype))

    def reduce(self, op: str, x: Array, axes: tuple[int, ...], start: Array) -> Array | None:
        """See `Algebra`; integers only."""
        return FLOATS.reduce(op, x, axes, start) if x.dtype.names is None else None

    def contract(self, x: Array, y: Array, axes: tuple[int, ...]) -> Array | None:
        """See `Algebra`; no shortcut."""
        return None


EXACT = Exact()
"""Exact elements."""
