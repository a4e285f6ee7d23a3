// Vector mathematics. Included by vec.h. Bounds are the largest errors over all inputs, in units in the last place.
//
// The cores take raw float vectors of 4, 8 or 16 lanes, so that the compiler sees few calls. Coefficients are minimax
// fits made for this file (Remez exchange, rounded one by one).
#pragma once
#include "vec_tables.h"

namespace tw {
// ---- pieces ----
// Nearest even integer of x or x * by, below 2^22.
template <class V> TW_INLINE V near_int(V x) { return (x + 12582912.0f) - 12582912.0f; }
template <class V> TW_INLINE V near_int(V x, float by) { return fused(x, by, 12582912.0f) - 12582912.0f; }
// p * 2^n with one rounding; n whole, -280 < n < 260, NaN of p passes.
template <class V> TW_INLINE V scale(V p, V n) {
#if defined(TW_AVX512)
  if constexpr (sizeof(V) == 64) return __builtin_ia32_scalefps512_mask(p, n, p, (u16)-1, 4);
  else
#endif
  {
    auto k = __builtin_convertvector(n, ints_of<V>);
    auto h = k >> 1;
    return p * (V)((h + 127) << 23) * (V)((k - h + 127) << 23);
  }
}
// 1 / d to 14 bits at least, for d in [1, 2^126).
template <class V> TW_INLINE V near_inverse(V d) {
#if defined(TW_AVX512)
  if constexpr (sizeof(V) == 64) return __builtin_ia32_rcp14ps512_mask(d, d, (u16)-1);
  else
#endif
  return 1.0f / d;
}
// a / d to 0.53 ulp, for d in [1, 2^126) and finite a: whole divisions hold up everything else.
template <class V> TW_INLINE V quotient(V a, V d) {
#if defined(TW_AVX512)
  if constexpr (sizeof(V) == 64) {
    V r = __builtin_ia32_rcp14ps512_mask(d, d, (u16)-1), q = a * r;
    return fused(fused(-q, d, a), r, q);
  } else
#endif
  return a / d;
}
// 1 / d to 0.53 ulp, for d >= 1 or NaN.
template <class V> TW_INLINE V inverse(V d) {
#if defined(TW_AVX512)
  if constexpr (sizeof(V) == 64) {
    V r = __builtin_ia32_rcp14ps512_mask(d, d, (u16)-1), e = fused(-d, r, 1.0f);
    e = smaller(vec<float, TW_LANES(V)>{e}, vec<float, TW_LANES(V)>{fill<V>(1.0f)}).v;  // not NaN where d is infinite
    return fused(r, e, r);
  } else
#endif
  return 1.0f / d;
}
// (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2.
template <class V> TW_INLINE V exp_tail(V r) {
  V p = fused(r, 1.383890281e-3f, 8.369192481e-3f);
  p = fused(p, r, 4.166810215e-2f);
  p = fused(p, r, 1.666651666e-1f);
  return fused(p, r, 4.999999404e-1f);
}
template <class V> TW_INLINE V exp2_small(V r) {  // 2^r, |r| <= 1/2
  V p = fused(r, 1.333251130e-4f, 1.338792616e-3f);
  p = fused(p, r, 9.625445120e-3f);
  p = fused(p, r, 5.550366268e-2f);
  p = fused(p, r, 2.402259409e-1f);
  p = fused(p, r, 6.931471825e-1f);
  return fused(p, r, 1.0f);
}
#define TW_LN2_HIGH 0.693359375f  // 10 bits, so that n * TW_LN2_HIGH is exact
#define TW_LN2_LOW -2.12194440e-4f

// e^x as p * 2^n for x > -104.
template <class V> TW_INLINE V exp_parts(V x, V* n) {
  x = TW_BELOW(V, 89.0f, x);
#if defined(TW_TABLES)
  if constexpr (sizeof(V) == 64) return exp_parts<1>(x, n);
#endif
  *n = near_int(x, 1.442695041f);
  V r = fused(*n, -TW_LN2_HIGH, x);
  r = fused(*n, -(TW_LN2_LOW), r);
  return fused(exp_tail(r), r * r, r) + 1.0f;
}
// Where the result is zero, the way there must not be: many processors take hundreds of cycles for a result that is no
// normal number, and masked scores are all such.
template <class V> TW_INLINE V exp_core(V x) {
#if defined(TW_AVX512)
  if constexpr (sizeof(V) == 64) {  // lanes that are gone are left out where the result is made
    const u16 there = __builtin_ia32_cmpps512_mask(x, fill<V>(-103.98f), 21, (u16)-1, 4);  // not less
    V n, p = exp_parts(x, &n);
    return __builtin_ia32_scalefps512_mask(p, n, V{}, there, 4);
  } else
#endif
  {
    const auto gone = x < -103.98f;
    V n, p = exp_parts(gone ? V{} : x, &n);
    p = scale(p, n);
    return gone ? V{} : p;
  }
}
template <class V> TW_INLINE V exp2_core(V x) {
#if defined(TW_TABLES)
  if constexpr (sizeof(V) == 64) {
    const u16 there = __builtin_ia32_cmpps512_mask(x, fill<V>(-150.0f), 21, (u16)-1, 4);
    i32x16 at;
    x = TW_BELOW(V, 129.0f, x);
    V n = near_sixteenth(x, 1.0f, &at), f = x - n, root = looked_up(ROOT, at);
    V q = fused(fused(f, 5.550541131e-2f, 2.402342869e-1f), f * f, f * 6.931471825e-1f);
    return __builtin_ia32_scalefps512_mask(fused(q, root, looked_up(ROOT_REST, at)) + root, n, V{}, there, 4);
  }
#endif
  const auto gone = x < -150.0f;
  x = gone ? V{} : x;
  x = TW_BELOW(V, 129.0f, x);
  V n = near_int(x);
  const V p = scale(exp2_small(x - n), n);
  return gone ? V{} : p;
}
// e^x - 1 for -80 <= x <= 88 or NaN; the sign of zero is lost.
template <class V> TW_INLINE V expm1_near(V x) {
  V n = near_int(x, 1.442695041f);
  V r = fused(n, -TW_LN2_HIGH, x);
  r = fused(n, -(TW_LN2_LOW), r);
  V q = fused(exp_tail(r), r * r, r);
  V s = (V)((__builtin_convertvector(n, ints_of<V>) + 127) << 23);
  return fused(s, q, s - 1.0f);
}
// The same for x <= 88 or NaN.
template <class V> TW_INLINE V expm1_core(V x) { return expm1_near(TW_ABOVE(V, -25.0f, x)); }
// x = m * 2^e with m in [sqrt(1/2), sqrt(2)); returns m - 1. x is positive and finite.
template <class V> TW_INLINE V split_core(V x, V* e) {
  typedef ints_of<V> I;
  I tiny = x < 0x1p-126f;
  x = tiny ? x * 0x1p23f : x;
  I b = (I)x - 0x3f3504f3;
  *e = __builtin_convertvector((b >> 23) + (tiny & -23), V);
  return (V)((b & 0x7fffff) + 0x3f3504f3) - 1.0f;
}
// log(1 + f) - f for f in [sqrt(1/2) - 1, sqrt(2) - 1].
template <class V> TW_INLINE V log_tail(V f) {
  V q = fused(f, -7.644861192e-2f, 1.277047545e-1f);
  q = fused(q, f, -1.316065192e-1f);
  q = fused(q, f, 1.420066655e-1f);
  q = fused(q, f, -1.662321091e-1f);
  q = fused(q, f, 2.000126541e-1f);
  q = fused(q, f, -2.500082552e-1f);
  q = fused(q, f, 3.333333135e-1f);
  V f2 = f * f;
  return fused(q * f, f2, -0.5f * f2);
}
// log's values at 0, infinity, negative numbers and NaN.
template <class V> TW_INLINE V log_ends(V x, V r) {
  V odd = x == 0.0f ? fill<V>(-TW_FLOAT_INF) : fill<V>(__builtin_nanf(""));
  odd = x > 0.0f ? x : odd;
  return ((x > 0.0f) & (x < TW_FLOAT_INF)) ? r : odd;
}
template <class V> TW_INLINE V log_core(V x) {
  V e, f = split_core(x, &e);
  V y = fused(e, TW_LN2_LOW, log_tail(f));
  return log_ends(x, fused(e, TW_LN2_HIGH, f + y));
}
template <class V> TW_INLINE V log2_core(V x) {
  V e, f = split_core(x, &e);
  V y = log_tail(f);
  V r = fused(y, 4.426950409e-1f, f * 4.426950409e-1f);  // log2(e) = 1 + 0.4427
  return log_ends(x, ((r + y) + f) + e);
}
template <class V> TW_INLINE V log10_core(V x) {
  V e, f = split_core(x, &e);
  V y = log_tail(f);
  V r = fused(y, 4.342944819e-1f, e * 4.605038981e-6f);  // log10(2) = 0.301025390625 + this
  r = fused(f, -3.205518097e-3f, r);                     // log10(e) = 0.4375 - this
  return log_ends(x, fused(e, 0.301025390625f, fused(f, 0.4375f, r)));
}
template <class V> TW_INLINE V log1p_core(V x) {
  typedef ints_of<V> I;
  V u = 1.0f + x;
  V c = x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);  // what the sum lost
  I b = (I)u - 0x3f3504f3;
  I k = b >> 23;
  V e = __builtin_convertvector(k, V);
  V f = (V)((b & 0x7fffff) + 0x3f3504f3) - 1.0f;
  V s = (V)((127 - k) << 23);
  s = k > 126 ? fill<V>(0.0f) : s;
  f = fused(c, s, f);
  V y = fused(e, TW_LN2_LOW, log_tail(f));
  V r = log_ends(u, fused(e, TW_LN2_HIGH, f + y));
  return abs_raw(x) < 0x1p-25f ? x : r;
}
// t / (t + 2), t = e^(-2|x|) - 1: all three carry what their last rounding lost.
template <class V> TW_INLINE V tanh_core(V x) {
#if defined(TW_TABLES)
  if constexpr (sizeof(V) == 64) return tanh_by_table(x);
#endif
  const V a = -2.0f * below(10.0f, abs_raw(x)), n = near_int(a, 1.442695041f);
  const V r = fused(n, -(TW_LN2_LOW), fused(n, -TW_LN2_HIGH, a)), r2 = r * r, tail = exp_tail(r);
  const V q = fused(tail, r2, r), q_low = fused(tail, r2, r - q);
  const V s = (V)((__builtin_convertvector(n, ints_of<V>) + 127) << 23), below_one = s - 1.0f;
  const V t = fused(s, q, below_one), lost = s - (below_one + 1.0f);
  const V t_low = fused(s, q_low, fused(s, q, below_one - t) + lost);
  const V d = t + 2.0f, d_low = (t - (d - 2.0f)) + t_low;
#if defined(TW_FUSED)
  const V by = near_inverse(d), y = t * by;
  return with_sign(fused(fused(-y, d_low, t_low) + fused(-y, d, t), by, y), x);
#else
  const V y = t / d;
  return with_sign(y + (t_low - y * d_low) / d, x);
#endif
}
template <class V> TW_INLINE V erf_core(V x) {
#if defined(TW_TABLES)
  if constexpr (sizeof(V) == 64) return erf_by_table(x);
#endif
  V a = abs_raw(x), z = x * x;
  V s = fused(z, -5.958977854e-4f, 4.987252876e-3f);
  s = fused(s, z, -2.676291578e-2f);
  s = fused(s, z, 1.128173023e-1f);
  s = fused(s, z, -3.761248887e-1f);
  s = fused(s, z, 1.283791512e-1f);
  s = fused(s, a, a);
  V b = TW_BELOW(V, 4.0f, a);
  V t = fused(b, 2.826954296e-4f, -4.390554503e-3f);  // log2 of erfc
  t = fused(t, b, 3.206698224e-2f);
  t = fused(t, b, -1.499419957e-1f);
  t = fused(t, b, -9.192594290e-1f);
  t = fused(t, b, -1.626892090f);
  t = fused(t, b, -2.822997922e-4f);
  V n = near_int(t);
  V c = exp2_small(t - n);
  V big = fused(-c, (V)((__builtin_convertvector(n, ints_of<V>) + 127) << 23), 1.0f);
  return with_sign(a < 0.93f ? s : big, x);
}

// ---- sine and cosine ----
// Of r + low, where z = r * r: what a sum of two parts leaves out is added to the smaller one.
template <class V> TW_INLINE V sin_poly(V r, V z, V low) {
  V p = fused(z, 2.832510063e-6f, -1.985306444e-4f);
  p = fused(p, z, 8.333379403e-3f);
  p = fused(p, z, -1.666666716e-1f);
  return r + fused(p * z, r, low);
}
template <class V> TW_INLINE V cos_poly(V r, V z, V low) {
  V p = fused(z, -2.887844914e-7f, 2.482200762e-5f);
  p = fused(p, z, -1.388898003e-3f);
  p = fused(p, z, 4.166666791e-2f);
  V most = fused(z, -0.5f, 1.0f), rest = fused(z, -0.5f, 1.0f - most);
  rest = fused(fused(r, r, -z), -0.5f, rest);
  return most + fused(p, z * z, fused(-r, low, rest));
}
// x - q * pi/2 with q the nearest whole number; |x| < 30000. The result leaves `low` out.
template <class V> TW_INLINE V quarter_turns(V x, ints_of<V>* q, V* low) {
  V n = near_int(x, 6.366197724e-1f);
  *q = __builtin_convertvector(n, ints_of<V>);
#if defined(TW_FUSED)
  V near = fused(n, -1.570796371e+0f, x), part = n * 4.371139000e-8f, r = near + part, back = r - near;
  V lost = (near - (r - back)) + (part - back);  // by the sum, exactly: near a multiple of pi / 2 both parts outweigh it
  *low = fused(n, 1.715124510e-15f, lost + fused(n, 4.371139000e-8f, -part));
#else
  V near = x - n * 1.5703125f;  // 9 bits, then 11, 11 and the rest: products with |n| < 2^15 are exact
  near = near - n * 4.83512878417968750e-4f;
  V part = n * 3.13855707645416260e-7f, rest = n * 6.07710050650619224e-11f;
  V most = near - part, r = most - rest;
  *low = (most - r - rest) + (near - most - part);
#endif
  return r;
}
template <class V> TW_INLINE V sin_core(V x) {
  ints_of<V> q;
  V low, r = quarter_turns(x, &q, &low), z = r * r;
  V y = (q & 1) ? cos_poly(r, z, low) : sin_poly(r, z, low);
  y = (V)((ints_of<V>)y ^ ((q & 2) << 30));
  return x == 0.0f ? x : y;
}
template <class V> TW_INLINE V cos_core(V x) {
  ints_of<V> q;
  V low, r = quarter_turns(x, &q, &low), z = r * r;
  V y = (q & 1) ? sin_poly(r, z, low) : cos_poly(r, z, low);
  return (V)((ints_of<V>)y ^ (((q + 1) & 2) << 30));
}

template <class V> TW_INLINE V tan_core(V x) {
  ints_of<V> q;
  V low, r = quarter_turns(x, &q, &low), z = r * r;
  V p = fused(z, 4.380229861e-3f, 8.409642032e-5f);
  p = fused(p, z, 1.083755679e-2f);
  p = fused(p, z, 2.128280886e-2f);
  p = fused(p, z, 5.405944213e-2f);
  p = fused(p, z, 1.333267242e-1f);
  p = fused(p, z, 3.333334923e-1f);
  p = fused(p * z, r, fused(low, z, low));
  V sum = r + p, rest = (r - sum) + p;  // what the sum leaves out moves its reciprocal
  V over = -1.0f / sum;
#if defined(TW_FUSED)
  over = fused(over, fused(over, rest, fused(over, sum, 1.0f)), over);
#else
  over = over + over * (over * rest);
#endif
  p = (q & 1) ? over : sum;
  return x == 0.0f ? x : p;
}

// ---- inverse trigonometric and hyperbolic functions ----
template <class V> TW_INLINE V atan_core(V x) {
  V a = abs_raw(x);
  ints_of<V> big = a > 1.0f;
  V t = big ? -1.0f / a : a, z = t * t;
  V p = fused(z, -1.782175968e-3f, 1.086636260e-2f);
  p = fused(p, z, -3.109363094e-2f);
  p = fused(p, z, 5.787891522e-2f);
  p = fused(p, z, -8.399208635e-2f);
  p = fused(p, z, 1.095086113e-1f);
  p = fused(p, z, -1.426401436e-1f);
  p = fused(p, z, 1.999852955e-1f);
  p = fused(p, z, -3.333329856e-1f);
  p = fused(p * z, t, t);
  return with_sign(big ? p + -4.371139000e-8f + 1.570796371f : p, x);
}
// asin(t) - t for t in [0, 1/2], z = t * t.
template <class V> TW_INLINE V asin_tail(V t, V z) {
  V p = fused(z, 4.216641188e-2f, 2.418077365e-2f);
  p = fused(p, z, 4.546977207e-2f);
  p = fused(p, z, 7.495306432e-2f);
  p = fused(p, z, 1.666675210e-1f);
  return p * z * t;
}
template <class V> TW_INLINE V asin_core(V x) {
  V a = abs_raw(x);
  ints_of<V> big = a > 0.5f;
  V z = big ? fused(a, -0.5f, 0.5f) : a * a;
  V t = big ? sqrt_raw(z) : a;
  V p = t + asin_tail(t, z);
  return with_sign(big ? 1.570796371f - fused(p, 2.0f, 4.371139000e-8f) : p, x);
}
template <class V> TW_INLINE V acos_core(V x) {
  V a = abs_raw(x);
  ints_of<V> big = a > 0.5f;
  V z = big ? fused(a, -0.5f, 0.5f) : x * x;
  V t = big ? sqrt_raw(z) : x;
  V p = asin_tail(t, z);
  V near_one = 2.0f * (t + p);
  near_one = x < 0.0f ? 3.141592741f - (near_one + 8.742278000e-8f) : near_one;
  return big ? near_one : 1.570796371f - (t + (p + 4.371139000e-8f));
}
template <class V> TW_INLINE V expm1_whole(V x) {
  V r = expm1_core(below(88.0f, x));
  r = x > 88.0f ? exp_core(x) : r;
  return with_sign(r, x);
}
template <class V> TW_INLINE V sinh_core(V x) {
  V a = abs_raw(x);
  V t = expm1_core(below(20.0f, a));
  V half_power = exp_core(0.5f * a);
  V r = a > 20.0f ? (0.5f * half_power) * half_power : 0.5f * (t + t / (t + 1.0f));
  return with_sign(r, x);
}
template <class V> TW_INLINE V cosh_core(V x) {
  V a = abs_raw(x);
  V half_power = exp_core(0.5f * a);
  V e = exp_core(below(20.0f, a));
  return a > 20.0f ? (0.5f * half_power) * half_power : fused(e, 0.5f, 0.5f / e);
}
template <class V> TW_INLINE V asinh_core(V x) {
  V a = abs_raw(x), b = below(0x1p40f, a);
  V r = log1p_core(b + b * b / (1.0f + sqrt_raw(fused(b, b, 1.0f))));
  return with_sign(a > 0x1p20f ? log_core(a) + 6.931471825e-1f : r, x);
}
template <class V> TW_INLINE V acosh_core(V x) {
  V t = x - 1.0f;
  V r = log1p_core(t + sqrt_raw(fused(t, t, 2.0f * t)));
  r = x < 1.0f ? fill<V>(__builtin_nanf("")) : r;
  return x > 0x1p20f ? log_core(x) + 6.931471825e-1f : r;
}
template <class V> TW_INLINE V atanh_core(V x) {
  V a = abs_raw(x);
  return with_sign(0.5f * log1p_core(2.0f * a / (1.0f - a)), x);
}

// ---- pow through double: one rounding, right for every special case of C's pow ----
template <class D> TW_INLINE D pow_double(D a, D y) {  // a >= 0 or NaN; 2^(y * log2(a))
  typedef decltype(D{} < D{}) I;
  I b = (I)a - 0x3fe6a09e667f3bcdll;
  D e = __builtin_convertvector(b >> 52, D);
  D m = (D)((b & 0xfffffffffffffll) + 0x3fe6a09e667f3bcdll);
  D s = (m - 1.0) / (m + 1.0), z = s * s;
  D p = fused(z, 2.42890635616199141e-01, 2.61446856055049026e-01);
  p = fused(p, z, 3.20616284805488982e-01);
  p = fused(p, z, 4.12198404029297250e-01);
  p = fused(p, z, 5.77078017227690254e-01);
  p = fused(p, z, 9.61796693924410584e-01);
  p = fused(p, z, 2.88539008177792722e+00);
  D log2 = fused(p, s, e);
  log2 = a == 0.0 ? (D{} - __builtin_inf()) : log2;
  log2 = a < __builtin_inf() ? log2 : a;
  D t = y * log2, low = D{} - 1000.0, high = D{} + 1000.0;
  t = low > t ? low : t;
  t = high < t ? high : t;
  D n = (t + 6755399441055744.0) - 6755399441055744.0, r = t - n;
  D q = fused(r, 1.01460087668826408e-07, 1.32582784477241958e-06);
  q = fused(q, r, 1.52529971937923373e-05);
  q = fused(q, r, 1.54034410263678061e-04);
  q = fused(q, r, 1.33333576210354047e-03);
  q = fused(q, r, 9.61812918114479144e-03);
  q = fused(q, r, 5.55041086684245413e-02);
  q = fused(q, r, 2.40226506957225000e-01);
  q = fused(q, r, 6.93147180559885001e-01);
  q = fused(q, r, 1.0);
  I k = (I)(t + 6755399441055744.0) - (I)(D{} + 6755399441055744.0);
  return q * (D)((k + 1023) << 52);
}
template <int L> TW_INLINE vec<double, L> pow_wide(vec<double, L> a, vec<double, L> y) {
  if constexpr (kind_of<double, L> == 2) return {pow_wide(a.lo, y.lo), pow_wide(a.hi, y.hi)};
  else return {pow_double(a.v, y.v)};
}

// ---- from cores to vec<float, L>; double goes lane by lane through libm ----
template <class T, int L, class F> TW_INLINE vec<T, L> each_lane(vec<T, L> a, F f) {
  T buffer[L];
  store_bits(buffer, a);
  for (int i = 0; i < L; i++) buffer[i] = f(buffer[i]);
  return load_bits<T, L>(buffer);
}
template <class T, int L, class F> TW_INLINE vec<T, L> each_pair(vec<T, L> a, vec<T, L> b, F f) {
  T x[L], y[L];
  store_bits(x, a);
  store_bits(y, b);
  for (int i = 0; i < L; i++) x[i] = f(x[i], y[i]);
  return load_bits<T, L>(x);
}
#define TW_LIBM(name, builtin)                                                             \
  template <class T, int L> TW_NOINLINE vec<T, L> name##_libm(vec<T, L> a) {               \
    return each_lane(a, [](T x) TW_LAMBDA {                                                \
      if constexpr (same<T, float>) return __builtin_##builtin##f(x);                      \
      else return __builtin_##builtin(x);                                                  \
    });                                                                                    \
  }
// Where cores of 16 lanes go by tables, fewer lanes take that way, too: a value is the same in each kernel.
#if defined(TW_TABLES)
#define TW_FEWEST 16
#else
#define TW_FEWEST 4
#endif
#define TW_FUNCTION(name, linkage, core)                                                   \
  TW_LIBM(name, name)                                                                      \
  template <class T, int L> linkage vec<T, L> name(vec<T, L> a) {                          \
    if constexpr (same<T, double>) return name##_libm(a);                                  \
    else if constexpr (kind_of<T, L> == 2) return {name(a.lo), name(a.hi)};                \
    else if constexpr (L < TW_FEWEST) return lo(name(join(a, a)));                         \
    else return {core(a.v)};                                                               \
  }
TW_FUNCTION(exp, TW_INLINE, exp_core)          // 1 ulp, by table 0.57
TW_FUNCTION(exp2, TW_INLINE, exp2_core)        // 1.2 ulp, by table 0.57
TW_FUNCTION(expm1, TW_NOINLINE, expm1_whole)   // 1.5 ulp
TW_FUNCTION(log, TW_INLINE, log_core)          // 1 ulp
TW_FUNCTION(log2, TW_NOINLINE, log2_core)      // 1.5 ulp
TW_FUNCTION(log10, TW_NOINLINE, log10_core)    // 1.6 ulp
TW_FUNCTION(log1p, TW_NOINLINE, log1p_core)    // 1.5 ulp
TW_FUNCTION(tanh, TW_INLINE, tanh_core)        // 0.9 ulp, 1.4 without fma
TW_FUNCTION(erf, TW_INLINE, erf_core)          // 1.3 ulp, 1.1 by table
TW_FUNCTION(atan, TW_NOINLINE, atan_core)  // 1.3 ulp
TW_FUNCTION(asin, TW_NOINLINE, asin_core)  // 2.3 ulp
TW_FUNCTION(acos, TW_NOINLINE, acos_core)  // 1.2 ulp
TW_FUNCTION(sinh, TW_NOINLINE, sinh_core)  // 2.8 ulp
TW_FUNCTION(cosh, TW_NOINLINE, cosh_core)  // 2.8 ulp
TW_FUNCTION(asinh, TW_NOINLINE, asinh_core)  // 1.8 ulp
TW_FUNCTION(acosh, TW_NOINLINE, acosh_core)  // 2 ulp
TW_FUNCTION(atanh, TW_NOINLINE, atanh_core)  // 2 ulp

TW_LIBM(erfc, erfc)
TW_LIBM(lgamma, lgamma)
// Lane by lane through libm.
template <class T, int L> TW_INLINE vec<T, L> erfc(vec<T, L> a) { return erfc_libm(a); }
template <class T, int L> TW_INLINE vec<T, L> lgamma(vec<T, L> a) { return lgamma_libm(a); }

// Arguments of 30000 and more go to libm for the whole vector.
#define TW_PERIODIC(name)                                                                  \
  TW_LIBM(name, name)                                                                      \
  template <class T, int L> TW_NOINLINE vec<T, L> name(vec<T, L> a) {                      \
    if constexpr (same<T, double>) return name##_libm(a);                                  \
    else if constexpr (kind_of<T, L> == 2) return {name(a.lo), name(a.hi)};                \
    else if constexpr (L < 4) return lo(name(join(a, a)));                                 \
    else if (any(vec<T, L>{abs_raw(a.v)} > splat<T, L>(30000.0f))) return name##_libm(a);  \
    else return {name##_core(a.v)};                                                        \
  }
TW_PERIODIC(sin)  // 0.9 ulp with fma, 1.5 without
TW_PERIODIC(cos)  // 0.9 ulp with fma, 1.5 without
TW_PERIODIC(tan)  // 0.9 ulp with fma, 1.5 without

// 1 / (1 + e^-x): 2.5 ulp where e^-x is finite, else 0, as in torch.
template <class T, int L> TW_INLINE vec<T, L> sigmoid(vec<T, L> a) {
#if defined(TW_TABLES)
  if constexpr (same<T, float> && L == 16) {
    const u16 there = __builtin_ia32_cmpps512_mask(a.v, fill<f32x16>(103.98f), 26, (u16)-1, 4);  // not greater
    f32x16 n, p = exp_parts<-1>(TW_ABOVE(f32x16, -89.0f, a.v), &n);
    return {inverse(1.0f + __builtin_ia32_scalefps512_mask(p, n, f32x16{}, there, 4))};
  }
#endif
  if constexpr (same<T, float> && L < TW_FEWEST && TW_FEWEST == 16) return lo(sigmoid(join(a, a)));
  vec<T, L> d = splat<T, L>(1) + exp(-a);
  if constexpr (same<T, float> && kind_of<T, L> == 1) return {inverse(d.v)};
  else return splat<T, L>(1) / d;
}
template <class T, int L> TW_NOINLINE vec<T, L> atan2(vec<T, L> y, vec<T, L> x) {
  return each_pair(y, x, [](T b, T a) TW_LAMBDA {
    if constexpr (same<T, float>) return __builtin_atan2f(b, a);
    else return __builtin_atan2(b, a);
  });
}
template <class T, int L> TW_NOINLINE vec<T, L> pow_lanes(vec<T, L> a, vec<T, L> b) {
  return each_pair(a, b, [](T x, T y) TW_LAMBDA {
    if constexpr (same<T, double>) return __builtin_pow(x, y);
    else {  // integers wrap; a negative exponent gives 1, -1 or 0
      T r = 1;
      if (y < 0) return T(x == 1 ? 1 : x != T(-1) ? 0 : y & 1 ? -1 : 1);
      for (; y; y = T(y >> 1), x = T(x * x))
        if (y & 1) r = T(r * x);
      return r;
    }
  });
}
// 0.6 ulp in float; libm in double.
template <class T, int L> TW_NOINLINE vec<T, L> pow(vec<T, L> a, vec<T, L> b) {
  if constexpr (!same<T, float>) return pow_lanes(a, b);
  else if constexpr (L == 1) return lo(pow(join(a, a), join(b, b)));
  else {
    vec<T, L> one = splat<T, L>(1), zero = splat<T, L>(0), size = abs(a), whole = trunc(b);
    vec<T, L> r = recast<float>(pow_wide(recast<double>(size), recast<double>(b)));
    r = select((size == one) & (b == b), one, r);
    vec<T, L> h = b * splat<T, L>(0.5f);
    mask<L> negative = bitcast<i32>(a) < splat<i32, L>(0), odd = (whole == b) & (trunc(h) != h);
    r = select(negative & odd, -r, r);
    r = select((a < zero) & (whole != b) & (size < splat<T, L>(TW_FLOAT_INF)), splat<T, L>(__builtin_nanf("")), r);
    return select((a == one) | (b == zero), one, r);
  }
}
#undef TW_FUNCTION
#undef TW_FEWEST
#undef TW_PERIODIC
}  // namespace tw
