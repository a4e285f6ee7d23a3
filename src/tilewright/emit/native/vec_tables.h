// Functions by tables of 16 numbers, each table in one register, where a machine finds 16 entries at once. Included by
// vec_math.h, which holds the same functions for other machines.
#pragma once
#include "vec_arith.h"

#if defined(TW_AVX512) && !defined(__clang__)
#define TW_TABLES 1
namespace tw {
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
// e^(Sign * x) as p * 2^floor(n), |x| < 120; to 0.57 ulp.
template <int Sign> TW_INLINE f32x16 exp_parts(f32x16 x, f32x16* n) {
  i32x16 at;
  *n = near_sixteenth(x, Sign * 1.442695041f, &at);
  f32x16 r = fused(*n, -6.931471825e-1f, Sign < 0 ? -x : x);
  r = fused(*n, 1.904654299e-9f, r);
  const f32x16 root = looked_up(ROOT, at), q = fused(fused(r, 1.666705782e-1f, 5.000161928e-1f), r * r, r);
  return fused(q, root, looked_up(ROOT_REST, at)) + root;
}

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
}  // namespace tw
#endif
