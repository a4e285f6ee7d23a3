// Vector mathematics. Included by vec.h. Bounds are the largest errors over all inputs, in units in the last place.
//
// The cores take raw float vectors of 4, 8 or 16 lanes, so that the compiler sees few calls. Coefficients are minimax
// fits made for this file (Remez exchange, rounded one by one).
#pragma once
#include "vec_arith.h"

namespace tw {
#define TW_FLOAT_INF __builtin_inff()
template <class V> TW_INLINE V fill(float x) { return x - V{}; }
template <class V> TW_INLINE V as_float(ints_of<V> a) { return (V)a; }
template <class V> TW_INLINE V abs_raw(V x) { return (V)((ints_of<V>)x & 0x7fffffff); }
// |a| with the sign of b.
template <class V> TW_INLINE V with_sign(V a, V b) {
  return (V)(((ints_of<V>)a & 0x7fffffff) | ((ints_of<V>)b & (i32)0x80000000));
}
// Clamps that let NaN through: `larger` and `smaller` return their second operand where unordered.
#define TW_LANES(V) int(sizeof(V) / sizeof(float))
#define TW_ABOVE(V, low, x) larger(vec<float, TW_LANES(V)>{(low) - V{}}, vec<float, TW_LANES(V)>{x}).v
#define TW_BELOW(V, high, x) smaller(vec<float, TW_LANES(V)>{(high) - V{}}, vec<float, TW_LANES(V)>{x}).v
template <class V> TW_INLINE V below(float high, V x) { return TW_BELOW(V, high, x); }

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

#if defined(TW_AVX512) && !defined(__clang__)
#define TW_TABLES 1
TW_INLINE f32x16 looked_up(const float* table, i32x16 index) {  // table[index % 16]
  f32x16 t = load<float, 16>(table).v;
  return __builtin_ia32_permvarsf512_mask(t, index, t, (u16)-1);
}
// a, which has no sign, with the sign of b.
TW_INLINE f32x16 signed_as(f32x16 a, f32x16 b) { return (f32x16)((i32x16)a | ((i32x16)b & (i32)0x80000000)); }
// 2^(i / 16), and what its rounding lost.
alignas(64) constexpr float ROOT[16] = {
    1.000000000e+00f, 1.044273734e+00f, 1.090507746e+00f, 1.138788581e+00f, 1.189207077e+00f, 1.241857767e+00f,
    1.296839595e+00f, 1.354255557e+00f, 1.414213538e+00f, 1.476826191e+00f, 1.542210817e+00f, 1.610490322e+00f,
    1.681792855e+00f, 1.756252170e+00f, 1.834008098e+00f, 1.915206552e+00f};
alignas(64) constexpr float ROOT_REST[16] = {
    0.0f, 4.8334701e-08f, -1.3077540e-08f, 5.3862221e-08f, 3.7976354e-08f, 4.4968382e-08f,
    -4.0189994e-08f, -1.0123349e-08f, 2.4203234e-08f, -4.5008987e-08f, 8.0709047e-09f, 9.8362172e-09f,
    -2.4755327e-08f, -9.2357703e-09f, -1.1239278e-08f, 9.8453284e-09f};
// The nearest sixteenth of x * by, and in the last four bits of `*bits` how many sixteenths it is above a whole number.
TW_INLINE f32x16 near_sixteenth(f32x16 x, float by, i32x16* bits) {
  f32x16 t = fused(x, by, 786432.0f);
  *bits = (i32x16)t;
  return t - 786432.0f;
}
// e^(Sign * x) as p * 2^floor(n), |x| < 120; to half an ulp if Fine, else to one.
template <int Sign, bool Fine> TW_INLINE f32x16 exp_parts(f32x16 x, f32x16* n) {
  i32x16 at;
  *n = near_sixteenth(x, Sign * 1.442695041f, &at);
  f32x16 r = fused(*n, -6.931471825e-1f, Sign < 0 ? -x : x);
  r = fused(*n, 1.904654299e-9f, r);
  const f32x16 root = looked_up(ROOT, at), q = fused(fused(r, 1.666705782e-1f, 5.000161928e-1f), r * r, r);
  if constexpr (Fine) return fused(q, root, looked_up(ROOT_REST, at)) + root;
  return fused(q, root, root);
}
#endif
// e^x as p * 2^n for x > -104.
template <class V> TW_INLINE V exp_parts(V x, V* n) {
  x = TW_BELOW(V, 89.0f, x);
#if defined(TW_TABLES)
  if constexpr (sizeof(V) == 64) return exp_parts<1, false>(x, n);
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
    return __builtin_ia32_scalefps512_mask(fused(q, root, root), n, V{}, there, 4);
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
  V r = fused(y, 4.342944819e-1f, e * 1.259148040e-7f);  // log10(2) = 0.3010299 + this
  return log_ends(x, fused(e, 3.010298908e-1f, fused(f, 4.342944819e-1f, r)));
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
#if defined(TW_TABLES)
// tanh near 16 points, as erf below; which of them the exponent of |x| + 0.625 and two bits more tell.
alignas(64) constexpr float TANH_AT[16] = {
    1.624985695e+00f, 2.124457598e+00f, 2.624897718e+00f, 3.124786854e+00f, 3.875107288e+00f, 4.874471188e+00f,
    5.874471188e+00f, 6.872582436e+00f, 8.369278908e+00f, 0.0f, 1.875010878e-01f, 3.125234246e-01f, 4.999707937e-01f,
    7.500480413e-01f, 1.000199199e+00f, 1.249769449e+00f};
alignas(64) constexpr float TANH_VALUE[16] = {
    9.253441691e-01f, 9.718426466e-01f, 9.895576239e-01f, 9.961448908e-01f, 9.991390705e-01f, 9.998832941e-01f,
    9.999842048e-01f, 9.999978542e-01f, 9.999998808e-01f, 0.0f, 1.853342503e-01f, 3.027310073e-01f, 4.620941877e-01f,
    6.351776123e-01f, 7.616778016e-01f, 8.482189775e-01f};
alignas(64) constexpr float TANH_TERMS[6][16] = {
    {1.437380910e-01f, 5.552186072e-02f, 2.077571116e-02f, 7.695358712e-03f, 1.721152221e-03f, 2.334030578e-04f,
     3.159081461e-05f, 4.291511232e-06f, 2.150819256e-07f, 0.0f, 9.656512141e-01f, 9.083539248e-01f, 7.864689827e-01f,
     5.965493917e-01f, 4.198469222e-01f, 2.805245519e-01f},
    {-1.330072284e-01f, -5.395852029e-02f, -2.055876143e-02f, -7.665690035e-03f, -1.719660359e-03f, -2.333742596e-04f,
     -3.158997060e-05f, -4.291258392e-06f, -3.915411995e-09f, 0.0f, -1.789682508e-01f, -2.749869227e-01f,
     -3.634227216e-01f, -3.789148331e-01f, -3.197880685e-01f, -2.379462570e-01f},
    {7.517466694e-02f, 3.393302858e-02f, 1.341852825e-02f, 5.070751067e-03f, 1.143317553e-03f, 1.553829352e-04f,
     2.103772931e-05f, 2.859160986e-06f, 1.466027157e-07f, -3.333276212e-01f, -2.887130082e-01f, -2.195254117e-01f,
     -9.423028678e-02f, 4.182783142e-02f, 1.036273316e-01f, 1.083266735e-01f},
    {-2.522249520e-02f, -1.499105338e-02f, -6.425839849e-03f, -2.496227622e-03f, -5.697827437e-04f, -7.766937051e-05f,
     -1.052090920e-05f, -1.431396640e-06f, -6.383868936e-07f, 0.0f, 1.131687835e-01f, 1.581474245e-01f,
     1.646684706e-01f, 9.973962605e-02f, 2.766496874e-02f, -1.256625820e-02f},
    {1.156874816e-03f, 4.456378985e-03f, 2.358178608e-03f, 9.756529471e-04f, 2.356459590e-04f, 3.236570774e-05f,
     4.386560249e-06f, 5.928490623e-07f, 1.611626921e-08f, 1.321611255e-01f, 9.623765200e-02f, 4.307003692e-02f,
     -2.622897737e-02f, -6.363847852e-02f, -4.628546908e-02f, -1.951677352e-02f},
    {4.218078684e-03f, -5.384873948e-04f, -6.364110159e-04f, -3.027625498e-04f, -7.717727567e-05f, -1.073108888e-05f,
     -1.455403435e-06f, -1.934404992e-07f, 3.586223443e-07f, 0.0f, -6.020142138e-02f, -7.812353224e-02f,
     -4.954657331e-02f, -1.321294112e-03f, 1.882255822e-02f, 1.521224156e-02f}};
TW_INLINE f32x16 tanh_by_table(f32x16 x) {
  const f32x16 a = below(9.37f, abs_raw(x)), b = a + 0.625f;
  const i32x16 at = (i32x16)b >> 21;
  const f32x16 t = a - looked_up(TANH_AT, at), s = b < 0.75f ? t : looked_up(TANH_VALUE, at);
  f32x16 p = looked_up(TANH_TERMS[5], at);
  p = fused(p, t, looked_up(TANH_TERMS[4], at));
  p = fused(p, t, looked_up(TANH_TERMS[3], at));
  p = fused(p, t, looked_up(TANH_TERMS[2], at));
  p = fused(p, t, looked_up(TANH_TERMS[1], at));
  p = fused(p, t, looked_up(TANH_TERMS[0], at));
  return signed_as(fused(p, t, s), x);
}
#endif
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
#if defined(TW_TABLES)
// erf near 16 points: ERF_AT[i], close to i / 4, where erf is almost a float, ERF_VALUE[i]; then a polynomial in the
// distance to it. In the first interval the value is the distance itself.
alignas(64) constexpr float ERF_AT[16] = {
    0.0f, 1.580848843e-01f, 5.000019073e-01f, 7.500410080e-01f, 1.000008583e+00f, 1.250047684e+00f,
    1.500026703e+00f, 1.749894142e+00f, 1.999986649e+00f, 2.249994278e+00f, 2.500014305e+00f, 2.750016212e+00f,
    2.999837875e+00f, 3.250375748e+00f, 3.503813744e+00f, 3.746186256e+00f};
alignas(64) constexpr float ERF_VALUE[16] = {
    0.0f, 1.769048125e-01f, 5.205015540e-01f, 7.111819983e-01f, 8.427043557e-01f, 9.229114056e-01f,
    9.661083221e-01f, 9.866660833e-01f, 9.953219891e-01f, 9.985372424e-01f, 9.995930791e-01f, 9.998993874e-01f,
    9.999778867e-01f, 9.999957085e-01f, 9.999992847e-01f, 9.999998808e-01f};
alignas(64) constexpr float ERF_TERMS[5][16] = {
    {1.283791661e-01f, 1.100529790e+00f, 8.787809014e-01f, 6.428915262e-01f, 4.151003659e-01f, 2.364929318e-01f,
     1.189207584e-01f, 5.279454961e-02f, 2.066808753e-02f, 7.142502815e-03f, 2.178128576e-03f, 5.862252438e-04f,
     1.393887069e-04f, 2.911795491e-05f, 5.269755093e-06f, 1.070427629e-06f},
    {0.0f, -1.739770621e-01f, -4.393868446e-01f, -4.821921885e-01f, -4.151043892e-01f, -2.956296206e-01f,
     -1.783863753e-01f, -9.238578379e-02f, -4.133595154e-02f, -1.607025042e-02f, -5.445041694e-03f, -1.611894113e-03f,
     -4.180026299e-04f, -9.469053475e-05f, -2.038021921e-05f, -2.853586466e-06f},
    {-3.761227131e-01f, -3.487600982e-01f, -1.464635134e-01f, 2.680950426e-02f, 1.383683383e-01f, 1.675339490e-01f,
     1.387482882e-01f, 9.017882496e-02f, 4.822552204e-02f, 2.172513679e-02f, 8.349478245e-03f, 2.760038245e-03f,
     7.897036267e-04f, 1.953194733e-04f, 3.715014100e-05f, 7.064385045e-06f},
    {0.0f, 8.933223784e-02f, 1.819909811e-01f, 1.500911564e-01f, 6.927927583e-02f, -5.710390396e-03f,
     -4.417931288e-02f, -4.791217297e-02f, -3.443543985e-02f, -1.914850250e-02f, -8.683668450e-03f, -3.297081916e-03f,
     -1.064567477e-03f, -2.879142412e-04f, 3.515030403e-05f, -4.298736530e-05f},
    {1.122104675e-01f, 7.983569801e-02f, 7.469521370e-03f, -5.274100602e-02f, -6.877232343e-02f, -4.708271101e-02f,
     -1.499520428e-02f, 6.460678764e-03f, 1.299691666e-02f, 1.063918136e-02f, 6.132037379e-03f, 2.773386892e-03f,
     1.027397229e-03f, 3.194026067e-04f, 3.409840574e-04f, 8.952745702e-05f}};
TW_INLINE f32x16 erf_by_table(f32x16 x) {
  f32x16 a = below(3.874990f, abs_raw(x));
  i32x16 at = (i32x16)(a + 2097152.0f);  // the last bits count quarters
  f32x16 t = a - looked_up(ERF_AT, at);
  f32x16 s = a <= 0.125f ? t : looked_up(ERF_VALUE, at);
  f32x16 p = looked_up(ERF_TERMS[4], at);
  p = fused(p, t, looked_up(ERF_TERMS[3], at));
  p = fused(p, t, looked_up(ERF_TERMS[2], at));
  p = fused(p, t, looked_up(ERF_TERMS[1], at));
  p = fused(p, t, looked_up(ERF_TERMS[0], at));
  return signed_as(fused(p, t, s), x);
}
#endif
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
template <class V> TW_INLINE V sin_poly(V r, V z) {
  V p = fused(z, 2.832510063e-6f, -1.985306444e-4f);
  p = fused(p, z, 8.333379403e-3f);
  p = fused(p, z, -1.666666716e-1f);
  return fused(p * z, r, r);
}
template <class V> TW_INLINE V cos_poly(V z) {
  V p = fused(z, -2.887844914e-7f, 2.482200762e-5f);
  p = fused(p, z, -1.388898003e-3f);
  p = fused(p, z, 4.166666791e-2f);
  return fused(p, z * z, fused(z, -0.5f, 1.0f));
}
// x - q * pi/2 with q the nearest whole number; |x| < 30000.
template <class V> TW_INLINE V quarter_turns(V x, ints_of<V>* q) {
  V n = near_int(x, 6.366197724e-1f);
  *q = __builtin_convertvector(n, ints_of<V>);
#if defined(TW_FUSED)
  V r = fused(n, -1.570796371e+0f, x);
  r = fused(n, 4.371139000e-8f, r);
  return fused(n, 1.715124510e-15f, r);
#else
  V r = x - n * 1.5703125f;  // 9 bits, then 11, 11 and the rest: products with |n| < 2^15 are exact
  r = r - n * 4.83512878417968750e-4f;
  r = r - n * 3.13855707645416260e-7f;
  return r - n * 6.07710050650619224e-11f;
#endif
}
template <class V> TW_INLINE V sin_core(V x) {
  ints_of<V> q;
  V r = quarter_turns(x, &q), z = r * r;
  V y = (q & 1) ? cos_poly(z) : sin_poly(r, z);
  y = (V)((ints_of<V>)y ^ ((q & 2) << 30));
  return x == 0.0f ? x : y;
}
template <class V> TW_INLINE V cos_core(V x) {
  ints_of<V> q;
  V r = quarter_turns(x, &q), z = r * r;
  V y = (q & 1) ? sin_poly(r, z) : cos_poly(z);
  return (V)((ints_of<V>)y ^ (((q + 1) & 2) << 30));
}

template <class V> TW_INLINE V tan_core(V x) {
  ints_of<V> q;
  V r = quarter_turns(x, &q), z = r * r;
  V p = fused(z, 4.380229861e-3f, 8.409642032e-5f);
  p = fused(p, z, 1.083755679e-2f);
  p = fused(p, z, 2.128280886e-2f);
  p = fused(p, z, 5.405944213e-2f);
  p = fused(p, z, 1.333267242e-1f);
  p = fused(p, z, 3.333334923e-1f);
  p = fused(p * z, r, r);
  p = (q & 1) ? -1.0f / p : p;
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
#define TW_FUNCTION(name, linkage, core)                                                   \
  TW_LIBM(name, name)                                                                      \
  template <class T, int L> linkage vec<T, L> name(vec<T, L> a) {                          \
    if constexpr (same<T, double>) return name##_libm(a);                                  \
    else if constexpr (kind_of<T, L> == 2) return {name(a.lo), name(a.hi)};                \
    else if constexpr (L < 4) return lo(name(join(a, a)));                                 \
    else return {core(a.v)};                                                               \
  }
TW_FUNCTION(exp, TW_INLINE, exp_core)          // 1 ulp, by table 0.99
TW_FUNCTION(exp2, TW_INLINE, exp2_core)        // 1.2 ulp, by table 0.99
TW_FUNCTION(expm1, TW_NOINLINE, expm1_whole)   // 1.5 ulp
TW_FUNCTION(log, TW_INLINE, log_core)          // 1 ulp
TW_FUNCTION(log2, TW_NOINLINE, log2_core)      // 1.5 ulp
TW_FUNCTION(log10, TW_NOINLINE, log10_core)    // 2.5 ulp
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
TW_PERIODIC(sin)  // 1.6 ulp with fma, 2.3 without
TW_PERIODIC(cos)  // 1.6 ulp with fma, 2.3 without
TW_PERIODIC(tan)  // 2.5 ulp with fma, 3 without

// 1 / (1 + e^-x): 2.5 ulp where e^-x is finite, else 0, as in torch.
template <class T, int L> TW_INLINE vec<T, L> sigmoid(vec<T, L> a) {
#if defined(TW_TABLES)
  if constexpr (same<T, float> && L == 16) {
    const u16 there = __builtin_ia32_cmpps512_mask(a.v, fill<f32x16>(103.98f), 26, (u16)-1, 4);  // not greater
    f32x16 n, p = exp_parts<-1, true>(TW_ABOVE(f32x16, -89.0f, a.v), &n);
    return {inverse(1.0f + __builtin_ia32_scalefps512_mask(p, n, f32x16{}, there, 4))};
  }
#endif
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
#undef TW_PERIODIC
}  // namespace tw
