"""Inverse trigonometric functions of singles, for kernels where the library of device functions is too coarse.

Half of pi is no single; with the nearest one alone, atan(x) for x > 1 and acos(x) are 4e-8 too large, all of them, and
sums of many show it. Here it is a sum of two singles: h + l with l = -4.4e-8. Each text states its largest error.
"""

from __future__ import annotations

ANGLES: dict[str, str] = {
    "arctangent_of_part": '''
def arctangent_of_part(t):
    """Arc tangent of -1 to 1 by an odd minimax polynomial."""
    z = t * t
    p = tl.fma(z, -1.782175968e-3, 1.086636260e-2)
    p = tl.fma(p, z, -3.109363094e-2)
    p = tl.fma(p, z, 5.787891522e-2)
    p = tl.fma(p, z, -8.399208635e-2)
    p = tl.fma(p, z, 1.095086113e-1)
    p = tl.fma(p, z, -1.426401436e-1)
    p = tl.fma(p, z, 1.999852955e-1)
    p = tl.fma(p, z, -3.333329856e-1)
    return tl.fma(p * z, t, t)
''',
    "arctangent": '''
def arctangent(a):
    """Arc tangent: 1.4 units of the last place."""
    m = tl.abs(a)
    big = m > 1.0
    p = arctangent_of_part(tl.where(big, tl.div_rn(tl.full((), -1.0, tl.float32), m), m))
    p = tl.where(big, (p + -4.371139e-08) + 1.570796371, p)
    return tl.where(a.to(tl.int32, bitcast=True) < 0, -1.0 * p, p)
''',
    "arctangent_of_point": '''
def arctangent_of_point(a, b):
    """Angle of the point (b, a), with the signs of zeros: 2 units of the last place."""
    y, x = tl.abs(a), tl.abs(b)
    steep = y > x
    top, under = tl.where(steep, x, y), tl.where(steep, y, x)
    alike = tl.where(under == 0.0, 0.0, 1.0)
    p = arctangent_of_part(tl.where(top == under, alike, tl.div_rn(top, under)))
    p = tl.where(steep, (-4.371139e-08 - p) + 1.570796371, p)
    p = tl.where(b.to(tl.int32, bitcast=True) < 0, (-8.742278e-08 - p) + 3.141592741, p)
    return tl.where(a.to(tl.int32, bitcast=True) < 0, -1.0 * p, p)
''',
    "arcsine_tail": '''
def arcsine_tail(t, z):
    """asin(t) - t for |t| <= 1/2; z is t * t."""
    p = tl.fma(z, 4.216641188e-2, 2.418077365e-2)
    p = tl.fma(p, z, 4.546977207e-2)
    p = tl.fma(p, z, 7.495306432e-2)
    p = tl.fma(p, z, 1.666675210e-1)
    return p * z * t
''',
    "arcsine": '''
def arcsine(a):
    """Arc sine: 2.3 units of the last place."""
    m = tl.abs(a)
    big = m > 0.5
    z = tl.where(big, tl.fma(m, -0.5, 0.5), m * m)
    t = tl.where(big, tl.sqrt_rn(z), m)
    p = t + arcsine_tail(t, z)
    p = tl.where(big, 1.570796371 - tl.fma(p, 2.0, 4.371139e-08), p)
    return tl.where(a.to(tl.int32, bitcast=True) < 0, -1.0 * p, p)
''',
    "arccosine": '''
def arccosine(a):
    """Arc cosine: 1.5 units of the last place."""
    m = tl.abs(a)
    big = m > 0.5
    z = tl.where(big, tl.fma(m, -0.5, 0.5), m * m)
    t = tl.where(big, tl.sqrt_rn(z), a)
    p = arcsine_tail(t, z)
    near = 2.0 * (t + p)
    near = tl.where(a < 0.0, 3.141592741 - (near + 8.742278e-08), near)
    return tl.where(big, near, 1.570796371 - (t + (p + 4.371139e-08)))
''',
    "area_cosine": '''
def area_cosine(a):
    """Inverse hyperbolic cosine: 2 units of the last place."""
    t = a - 1.0
    p = libdevice.log1p(t + tl.sqrt_rn(tl.fma(t, t, 2.0 * t)))
    p = tl.where(a > 1048576.0, tl.log(a) + 6.931471825e-1, p)
    return tl.where(a < 1.0, float("nan"), p)
''',
}  # fmt: skip
"""Name -> text, as `helpers.HELPERS`."""

NEEDED_BY_ANGLES: dict[str, tuple[str, ...]] = {
    "arctangent": ("arctangent_of_part",),
    "arctangent_of_point": ("arctangent_of_part",),
    "arcsine": ("arcsine_tail",),
    "arccosine": ("arcsine_tail",),
}
"""Helpers that they call."""

ANGLES_OF_SINGLES = {
    "atan": "arctangent",
    "atan2": "arctangent_of_point",
    "asin": "arcsine",
    "acos": "arccosine",
    "acosh": "area_cosine",
}
"""Operations on singles that are one of them."""
