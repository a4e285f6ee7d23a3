// Rounding, roots, remainders, integer division and shifts with torch's rules. Included by vec.h.
#pragma once
#include "vec_cross.h"

namespace tw {
template <class V> using ints_of = decltype(V{} < V{});

// ---- rounding: 0 to even, 1 down, 2 up, 3 toward zero ----
template <int Mode, class T> TW_INLINE T round_lane(T x) {
  if constexpr (same<T, float>)
    return Mode == 0 ? __builtin_rintf(x) : Mode == 1 ? __builtin_floorf(x) : Mode == 2 ? __builtin_ceilf(x) : __builtin_truncf(x);
  else
    return Mode == 0 ? __builtin_rint(x) : Mode == 1 ? __builtin_floor(x) : Mode == 2 ? __builtin_ceil(x) : __builtin_trunc(x);
}
template <int Mode, class T, class V, int... I> TW_INLINE V round_lanes(V v, seq<I...>) {
  return V{round_lane<Mode, T>(v[I])...};
}
template <int Mode, class T, int L> TW_INLINE vec<T, L> rounded(vec<T, L> a) {
  constexpr int bytes = int(sizeof(T)) * L;
  (void)bytes;
  if constexpr (!is_float<T>) return a;
  else if constexpr (kind_of<T, L> == 2) return {rounded<Mode>(a.lo), rounded<Mode>(a.hi)};
  else if constexpr (L == 1) return {round_lane<Mode>(a.v)};
#if defined(__clang__)
  else if constexpr (Mode == 0) return {__builtin_elementwise_roundeven(a.v)};
  else if constexpr (Mode == 1) return {__builtin_elementwise_floor(a.v)};
  else if constexpr (Mode == 2) return {__builtin_elementwise_ceil(a.v)};
  else return {__builtin_elementwise_trunc(a.v)};
#else
#if defined(__SSE4_1__)
  else if constexpr (bytes < 16) return lo(rounded<Mode>(join(a, a)));
  else if constexpr (bytes == 16 && same<T, float>) return {__builtin_ia32_roundps(a.v, 8 | Mode)};
  else if constexpr (bytes == 16) return {__builtin_ia32_roundpd(a.v, 8 | Mode)};
#endif
#if defined(__AVX__)
  else if constexpr (bytes == 32 && same<T, float>) return {__builtin_ia32_roundps256(a.v, 8 | Mode)};
  else if constexpr (bytes == 32) return {__builtin_ia32_roundpd256(a.v, 8 | Mode)};
#endif
#if defined(TW_AVX512)
  else if constexpr (bytes == 64 && same<T, float>)
    return {__builtin_ia32_rndscaleps_mask(a.v, 8 | Mode, a.v, (u16)-1, 4)};
  else if constexpr (bytes == 64) return {__builtin_ia32_rndscalepd_mask(a.v, 8 | Mode, a.v, (u8)-1, 4)};
#endif
  else return {round_lanes<Mode, T>(a.v, seq_to<L>())};
#endif
}
template <class T, int L> TW_INLINE vec<T, L> round_even(vec<T, L> a) { return rounded<0>(a); }
template <class T, int L> TW_INLINE vec<T, L> floor(vec<T, L> a) { return rounded<1>(a); }
template <class T, int L> TW_INLINE vec<T, L> ceil(vec<T, L> a) { return rounded<2>(a); }
template <class T, int L> TW_INLINE vec<T, L> trunc(vec<T, L> a) { return rounded<3>(a); }

// ---- signs and roots ----
template <class T, int L> TW_INLINE vec<T, L> abs(vec<T, L> a) {
  if constexpr (is_float<T>) {
    typedef int_like<T> I;
    return bitcast<T>(bitcast<I>(a) & splat<I, L>(I(~(u64(1) << (8 * sizeof(I) - 1)))));
  } else return select(a < splat<T, L>(0), -a, a);
}
template <class T, int L> TW_INLINE vec<T, L> copysign(vec<T, L> a, vec<T, L> b) {
  typedef int_like<T> I;
  vec<I, L> m = splat<I, L>(I(~(u64(1) << (8 * sizeof(I) - 1))));
  return bitcast<T>((bitcast<I>(a) & m) | (bitcast<I>(b) & ~m));
}
// -1, 0 or 1; 0 for NaN, as in torch.
template <class T, int L> TW_INLINE vec<T, L> sign(vec<T, L> a) {
  vec<T, L> zero = splat<T, L>(0), one = splat<T, L>(1);
  return select(a > zero, one, zero) - select(a < zero, one, zero);
}
template <class T> TW_INLINE T sqrt_lane(T x) {
  if constexpr (same<T, float>) return __builtin_sqrtf(x);
  else return __builtin_sqrt(x);
}
template <class T, class V, int... I> TW_INLINE V sqrt_lanes(V v, seq<I...>) { return V{sqrt_lane<T>(v[I])...}; }
// Correctly rounded.
template <class T, int L> TW_INLINE vec<T, L> sqrt(vec<T, L> a) {
  constexpr int bytes = int(sizeof(T)) * L;
  (void)bytes;
  if constexpr (kind_of<T, L> == 2) return {sqrt(a.lo), sqrt(a.hi)};
  else if constexpr (L == 1) return {sqrt_lane(a.v)};
#if TW_HAS(__builtin_elementwise_sqrt)
  else return {__builtin_elementwise_sqrt(a.v)};
#else
#if defined(__SSE2__)
  else if constexpr (bytes < 16) return lo(sqrt(join(a, a)));
  else if constexpr (bytes == 16 && same<T, float>) return {__builtin_ia32_sqrtps(a.v)};
  else if constexpr (bytes == 16) return {__builtin_ia32_sqrtpd(a.v)};
#endif
#if defined(__AVX__)
  else if constexpr (bytes == 32 && same<T, float>) return {__builtin_ia32_sqrtps256(a.v)};
  else if constexpr (bytes == 32) return {__builtin_ia32_sqrtpd256(a.v)};
#endif
#if defined(TW_AVX512) && defined(__clang__)
  else if constexpr (bytes == 64 && same<T, float>) return {__builtin_ia32_sqrtps512(a.v, 4)};
  else if constexpr (bytes == 64) return {__builtin_ia32_sqrtpd512(a.v, 4)};
#elif defined(TW_AVX512)
  else if constexpr (bytes == 64 && same<T, float>) return {__builtin_ia32_sqrtps512_mask(a.v, a.v, (u16)-1, 4)};
  else if constexpr (bytes == 64) return {__builtin_ia32_sqrtpd512_mask(a.v, a.v, (u8)-1, 4)};
#endif
  else return {sqrt_lanes<T>(a.v, seq_to<L>())};
#endif
}
template <class V> TW_INLINE V sqrt_raw(V v) { return sqrt(vec<float, int(sizeof(V) / 4)>{v}).v; }
// 1 / sqrt(a), both correctly rounded.
template <class T, int L> TW_INLINE vec<T, L> rsqrt(vec<T, L> a) { return splat<T, L>(1) / sqrt(a); }

// a / d for one d, which a loop over many a keeps: times its reciprocal in two parts, the first one below it, so that
// zeros and infinities come out right. Rounded as a division, but for few quotients almost halfway between two floats
// and those below 2^-120, which may err by one unit in the last place.
template <class T, int L> TW_INLINE vec<T, L> divided(vec<T, L> a, T d) {
#if defined(TW_FUSED)
  if constexpr (same<T, float> && L > 1) {
    const u32 size = bitcast<u32>(vec<float, 1>{d}).v & 0x7fffffff;
    float high = 1.0f / d;
    const i32 bits = bitcast<i32>(vec<float, 1>{high}).v - (fma(-high, d, 1.0f) <= 0);
    high = bitcast<float>(vec<i32, 1>{bits}).v;
    const float low = fma(-high, d, 1.0f) * high;
    if (__builtin_expect(size - 0x0d800000u < 0x64000000u, 1))  // from 2^-100 to 2^100
      return fma(a, splat<T, L>(high), a * splat<T, L>(low));
  }
#endif
  return a / splat<T, L>(d);
}

// ---- remainders of floats: exact, lane by lane ----
template <class T> TW_INLINE T fmod_lane(T a, T b) {
  if constexpr (same<T, float>) return __builtin_fmodf(a, b);
  else return __builtin_fmod(a, b);
}
template <class T, int L, class F> TW_INLINE vec<T, L> pairs_of(vec<T, L> a, vec<T, L> b, F f) {
  T x[L], y[L];
  store_bits(x, a);
  store_bits(y, b);
  for (int i = 0; i < L; i++) x[i] = f(x[i], y[i]);
  return load_bits<T, L>(x);
}
// The sign of a (torch.fmod).
template <class T, int L> TW_NOINLINE vec<T, L> fmod(vec<T, L> a, vec<T, L> b) {
  return pairs_of(a, b, [](T x, T y) TW_LAMBDA { return fmod_lane(x, y); });
}
// The sign of b (torch.remainder).
template <class T, int L> TW_NOINLINE vec<T, L> remainder(vec<T, L> a, vec<T, L> b) {
  return pairs_of(a, b, [](T x, T y) TW_LAMBDA {
    T r = fmod_lane(x, y);
    return r != 0 && (r < 0) != (y < 0) ? T(r + y) : r;
  });
}
// torch.floor_divide of floats.
template <class T, int L> TW_NOINLINE vec<T, L> floor_divide(vec<T, L> a, vec<T, L> b) {
  return pairs_of(a, b, [](T x, T y) TW_LAMBDA {
    if (y == 0) return T(x / y);
    T r = fmod_lane(x, y), q = (x - r) / y;
    if (r != 0 && (y < 0) != (r < 0)) q -= 1;
    if (q == 0) return T((x / y) * 0);  // a zero with the sign of the quotient
    T f = round_lane<1>(q);
    return q - f > T(0.5) ? T(f + 1) : f;
  });
}

// ---- integer division; a zero divisor in a lane of `active` sets *error and gives 0; the smallest number over -1 wraps ----
enum class division { trunc, floor };
template <division D, bool Rest, class T> TW_INLINE T divide_lane(T a, T b) {
  if (b == 0) return T(0);
  if (T(-1) < T(0) && b == T(-1)) return Rest ? T(0) : T(-a);
  T q = T(a / b), r = T(a % b);
  if (D == division::floor && r != 0 && (r < 0) != (b < 0)) return Rest ? T(r + b) : T(q - 1);
  return Rest ? r : q;
}
template <division D, bool Rest, class T, int L>
TW_NOINLINE vec<T, L> divide(vec<T, L> a, vec<T, L> b, i32* error, mask<L> active) {
  if (any(active & (b == splat<T, L>(0)))) *error = 1;
  return pairs_of(a, b, [](T x, T y) TW_LAMBDA { return divide_lane<D, Rest>(x, y); });
}
#define TW_DIVISION(name, rounding, rest)                                                              \
  template <class T, int L>                                                                            \
  TW_INLINE vec<T, L> name(vec<T, L> a, vec<T, L> b, i32* error, mask<L> active = splat_mask<L>(true)) { \
    return divide<division::rounding, rest>(a, b, error, active);                                      \
  }
TW_DIVISION(div_floor, floor, false)
TW_DIVISION(div_trunc, trunc, false)
TW_DIVISION(mod_floor, floor, true)  // torch.remainder: the sign of b
TW_DIVISION(mod_trunc, trunc, true)  // torch.fmod: the sign of a
#undef TW_DIVISION

// ---- shifts, as torch's: a count outside 0 .. bits-1 gives 0, or the sign for a right shift ----
template <class T, int L> TW_INLINE vec<T, L> shift_left(vec<T, L> a, vec<T, L> n) {
  if constexpr (kind_of<T, L> == 2) return {shift_left(a.lo, n.lo), shift_left(a.hi, n.hi)};
  else {
    constexpr T bits = 8 * sizeof(T);
    mask<L> in = (n >= splat<T, L>(0)) & (n < splat<T, L>(bits));
    vec<T, L> s = keep(in, n);
    return keep(in, vec<T, L>{typename vec<T, L>::raw(a.v << s.v)});
  }
}
template <class T, int L> TW_INLINE vec<T, L> shift_right(vec<T, L> a, vec<T, L> n) {
  if constexpr (kind_of<T, L> == 2) return {shift_right(a.lo, n.lo), shift_right(a.hi, n.hi)};
  else {
    constexpr T most = 8 * sizeof(T) - 1;
    mask<L> in = (n >= splat<T, L>(0)) & (n <= splat<T, L>(most));
    vec<T, L> s = select(in, n, splat<T, L>(most));
    vec<T, L> r{typename vec<T, L>::raw(a.v >> s.v)};
    return T(-1) < T(0) ? r : keep(in, r);
  }
}

// ---- raw vectors of floats, for functions ----
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
}  // namespace tw
