"""Functions that printed kernels call where the language has no operation with our meaning. A file holds those it uses.

Arguments are typed values (never bare numbers), scalars or blocks of any shape.
"""

from __future__ import annotations

from .angles import ANGLES, NEEDED_BY_ANGLES

HELPERS: dict[str, str] = {
    "floor_div": '''
def floor_div(a, b):
    """a / b of integers, rounded down; 0 where b is 0."""
    d = tl.where(b == 0, 1, b)
    q = a // d
    q -= ((a % d != 0) & ((a < 0) != (d < 0))).to(q.dtype)
    return tl.where(b == 0, 0, q)
''',
    "floor_mod": '''
def floor_mod(a, b):
    """What `floor_div` leaves: it has the sign of b; 0 where b is 0."""
    d = tl.where(b == 0, 1, b)
    r = a % d
    r = tl.where((r != 0) & ((r < 0) != (d < 0)), r + d, r)
    return tl.where(b == 0, 0, r)
''',
    "trunc_div": '''
def trunc_div(a, b):
    """a / b of integers, rounded to zero; 0 where b is 0."""
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b))
''',
    "trunc_mod": '''
def trunc_mod(a, b):
    """What `trunc_div` leaves: it has the sign of a; 0 where b is 0."""
    return tl.where(b == 0, 0, a % tl.where(b == 0, 1, b))
''',
    "divide": '''
def divide(a, b):
    """a / b, correctly rounded."""
    if a.dtype == tl.float64:
        q = a / b
    else:
        q = tl.div_rn(a, b)
    return q
''',
    "floor_divide": '''
def floor_divide(a, b):
    """a / b of floats, rounded down as if it had been exact."""
    r = libdevice.fmod(a, b)
    q = divide(a - r, b)
    q = tl.where((r != 0) & ((b < 0) != (r < 0)), q - 1, q)
    f = tl.floor(q)
    f = tl.where(q - f > 0.5, f + 1, f)
    f = tl.where(q == 0, divide(a, b) * 0, f)
    return tl.where(b == 0, divide(a, b), f)
''',
    "remainder": '''
def remainder(a, b):
    """What `floor_divide` leaves: it has the sign of b."""
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)
''',
    "power": '''
def power(a, b):
    """a ** b of integers; for b < 0 the inverse, rounded to zero."""
    left = tl.where(b < 0, 0, b)
    odd = (b & 1) != 0
    square = a
    result = a * 0 + b * 0 + 1
    for _ in range(64):
        result = tl.where((left & 1) != 0, result * square, result)
        square = square * square
        left = left >> 1
    inverse = tl.where(a * a == 1, tl.where(odd, a, a * a), 0)
    return tl.where(b < 0, inverse, result)
''',
    "shift_left": '''
def shift_left(a, b):
    """a << b; 0 for a count beyond the bits of a."""
    inside = (b >= 0) & (b < a.dtype.primitive_bitwidth)
    return tl.where(inside, a << tl.where(inside, b, 0), 0)
''',
    "shift_right": '''
def shift_right(a, b):
    """a >> b; the sign for a count beyond the bits of a."""
    inside = (b >= 0) & (b < a.dtype.primitive_bitwidth)
    return a >> tl.where(inside, b, a.dtype.primitive_bitwidth - 1)
''',
    "shift_right_unsigned": '''
def shift_right_unsigned(a, b):
    """a >> b; 0 for a count beyond the bits of a."""
    inside = (b >= 0) & (b < a.dtype.primitive_bitwidth)
    return tl.where(inside, a >> tl.where(inside, b, 0), 0)
''',
    "sign": '''
def sign(a):
    """-1, 0 or 1; 0 for NaN."""
    return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)
''',
    "is_nan": '''
def is_nan(a):
    """Whether a is no number."""
    return a != a
''',
    "logistic": '''
def logistic(a):
    """1 / (1 + e^-a)."""
    return 1 / (1 + tl.exp(-a))
''',
    "either": '''
def either(a, b):
    """Disjunction."""
    return a | b
''',
    "all_of": '''
def all_of(a, b):
    """Conjunction."""
    return a & b
''',
    "exclusive": '''
def exclusive(a, b):
    """Exclusive disjunction."""
    return a ^ b
''',
    "total": '''
def total(a, b):
    """Sum."""
    return a + b
''',
    "product": '''
def product(a, b):
    """Product."""
    return a * b
''',
    "coarse_tanh": '''
def coarse_tanh(a):
    """Hyperbolic tangent by one instruction: relative error 2^-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
''',
    "close_exp": '''
def close_exp(a):
    """e^a as 2^n * 2^r; a * log2(e) would be rounded by parts of its size."""
    n = tl.minimum(tl.maximum(tl.floor(a * 1.44269504 + 0.5), -150.0), 127.0)
    r = (a - n * 0.693359375) + n * 2.12194440e-4
    return tl.exp2(r * 1.44269504) * tl.exp2(n)
''',
    "quick_exp2": '''
def quick_exp2(a):
    """A power of two by one instruction: what is below the normal numbers is 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
''',
    "quick_erfc": '''
def quick_erfc(a):
    """1 - erf(a) as a power of two; its exponent is a minimax polynomial on [0, 4.6] (and falls beyond): absolute error
    2^-23."""
    x = tl.abs(a)
    p = tl.fma(x, -6.274301e-07, 1.43897214e-05)
    p = tl.fma(p, x, -1.39916199e-04)
    p = tl.fma(p, x, 7.30806089e-04)
    p = tl.fma(p, x, -1.94273423e-03)
    p = tl.fma(p, x, -3.83474224e-04)
    p = tl.fma(p, x, 2.80774496e-02)
    p = tl.fma(p, x, -1.48445547e-01)
    p = tl.fma(p, x, -9.18418467e-01)
    p = tl.fma(p, x, -1.62790871)
    q = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [p * x], tl.float32, True, 1)
    return tl.where(a < 0, 2.0 - q, q)
''',
    "coarse_erfc": '''
def coarse_erfc(a):
    """1 - erf(a) as a power of two; its exponent is a minimax polynomial on [0, 5], and falls beyond: relative error
    2^-15, absolute one 2^-31 where it is below 2^-17."""
    x = tl.abs(a)
    t = tl.minimum(x, 5.0)
    p = tl.fma(t, 2.6828315e-04, -4.3122238e-03)
    p = tl.fma(p, t, 3.2035425e-02)
    p = tl.fma(p, t, -1.5047549e-01)
    p = tl.fma(p, t, -9.180272e-01)
    p = tl.fma(p, t, -1.6279062)
    q = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [p * x], tl.float32, True, 1)
    return tl.where(a < 0, 2.0 - q, q)
''',
    "quick_log2": '''
def quick_log2(a):
    """A logarithm by one instruction: absolute error 2^-22."""
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
''',
    "quick_tanh": '''
def quick_tanh(a):
    """Hyperbolic tangent as 1 - 2 / (1 + e^2a), by two instructions for the power and the quotient: absolute error
    2^-21."""
    p = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [a * 2.88539008], tl.float32, True, 1)
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [p + 1.0], tl.float32, True, 1)
    return tl.fma(r, -2.0, 1.0)
''',
    "larger": '''
def larger(a, b):
    """Maximum; NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "smaller": '''
def smaller(a, b):
    """Minimum; NaN wins."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
} | ANGLES  # fmt: skip
"""Name -> text. Within one text a name of another one is a call."""

NEEDS: dict[str, tuple[str, ...]] = {"floor_divide": ("divide",)} | NEEDED_BY_ANGLES
"""Helpers that a helper calls."""


JITTED = {"tl": "@triton.jit", "gl": "@gluon.jit"}
"""What stands before a function, by the module of its dialect."""


class Helpers:
    """The functions that one file needs besides its kernel, in an order in which they may be defined."""

    def __init__(self, language: str = "tl") -> None:
        """`language`: the name of the module whose functions are written in the same dialect as these."""
        self.language = language
        self.texts: dict[str, str] = {}
        self.libdevice = False
        """Whether the file needs the library of device functions."""

    def use(self, name: str) -> str:
        """Ask for a helper of `HELPERS`; its name."""
        if name not in self.texts:
            for other in NEEDS.get(name, ()):
                self.use(other)
            self.add(name, HELPERS[name])
        return name

    def add(self, name: str, text: str) -> None:
        """Add a function made for this file."""
        self.texts[name] = self._decorated(text)
        self.libdevice |= "libdevice." in text

    def free(self, name: str, text: str) -> bool:
        """Whether the function `name` of this file has this text, or may be given it."""
        made = self._decorated(text)
        return self.texts.get(name, made) == made

    def _decorated(self, text: str) -> str:
        return f"{JITTED[self.language]}\n" + text.strip("\n") + "\n"
