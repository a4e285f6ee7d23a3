// Operations across the lanes of one vector. Included by vec.h.
#pragma once
#include "vec_memory.h"

namespace tw {
// a > b ? a : b and a < b ? a : b, so b where one is NaN: one instruction where the machine has it. GCC does not find it.
#if defined(__AVX__) && !defined(__clang__)
#define TW_NARROW_EXTREMUM(x)                                                                                        \
  else if constexpr (same<T, float> && L == 8) return {__builtin_ia32_##x##ps256(a.v, b.v)};                         \
  else if constexpr (same<T, float> && L == 4) return {__builtin_ia32_##x##ps(a.v, b.v)};                            \
  else if constexpr (same<T, double> && L == 4) return {__builtin_ia32_##x##pd256(a.v, b.v)};
#else
#define TW_NARROW_EXTREMUM(x)
#endif
#if defined(TW_AVX512) && !defined(__clang__)
#define TW_WIDE_EXTREMUM(x)                                                                                          \
  else if constexpr (same<T, float> && L == 16)                                                                      \
    return {__builtin_ia32_##x##ps512_mask(a.v, b.v, a.v, (u16)-1, 4)};                                              \
  else if constexpr (same<T, double> && L == 8)                                                                      \
    return {__builtin_ia32_##x##pd512_mask(a.v, b.v, a.v, (u8)-1, 4)};
#else
#define TW_WIDE_EXTREMUM(x)
#endif
// The same, but NaN if either is: b where it is NaN, else the instruction, which gives a where that is NaN. A running
// extremum stands in a: what is asked of b does not wait for it.
#if defined(TW_AVX512) && !defined(__clang__)
#define TW_SURE_EXTREMUM(x)                                                                                          \
  else if constexpr (same<T, float> && L == 16)                                                                      \
    return {__builtin_ia32_##x##ps512_mask(b.v, a.v, b.v, __builtin_ia32_cmpps512_mask(b.v, b.v, 7, (u16)-1, 4), 4)}; \
  else if constexpr (same<T, double> && L == 8)                                                                      \
    return {__builtin_ia32_##x##pd512_mask(b.v, a.v, b.v, __builtin_ia32_cmppd512_mask(b.v, b.v, 7, (u8)-1, 4), 4)};
#else
#define TW_SURE_EXTREMUM(x)
#endif
template <class T, int L> TW_INLINE vec<T, L> larger(vec<T, L> a, vec<T, L> b) {
  if constexpr (kind_of<T, L> == 2) return {larger(a.lo, b.lo), larger(a.hi, b.hi)};
  TW_WIDE_EXTREMUM(max)
  TW_NARROW_EXTREMUM(max)
  else return {a.v > b.v ? a.v : b.v};
}
template <class T, int L> TW_INLINE vec<T, L> smaller(vec<T, L> a, vec<T, L> b) {
  if constexpr (kind_of<T, L> == 2) return {smaller(a.lo, b.lo), smaller(a.hi, b.hi)};
  TW_WIDE_EXTREMUM(min)
  TW_NARROW_EXTREMUM(min)
  else return {a.v < b.v ? a.v : b.v};
}
// torch's maximum and minimum: NaN if either is NaN.
template <class T, int L> TW_INLINE vec<T, L> maximum(vec<T, L> a, vec<T, L> b) {
  if constexpr (kind_of<T, L> == 2) return {maximum(a.lo, b.lo), maximum(a.hi, b.hi)};
  TW_SURE_EXTREMUM(max)
  else {
    typename vec<T, L>::raw r = larger(a, b).v;
    if constexpr (is_float<T>) r = a.v != a.v ? a.v : r;
    return {r};
  }
}
template <class T, int L> TW_INLINE vec<T, L> minimum(vec<T, L> a, vec<T, L> b) {
  if constexpr (kind_of<T, L> == 2) return {minimum(a.lo, b.lo), minimum(a.hi, b.hi)};
  TW_SURE_EXTREMUM(min)
  else {
    typename vec<T, L>::raw r = smaller(a, b).v;
    if constexpr (is_float<T>) r = a.v != a.v ? a.v : r;
    return {r};
  }
}

// Fixed order, the same on every machine: lane i meets lane i + L/2, then i + L/4, ...
template <class F, class T, int L> TW_INLINE T fold(vec<T, L> a, F f) {
  if constexpr (L == 1) return a.v;
  else return fold(f(lo(a), hi(a)), f);
}
template <class T, int L> TW_INLINE T reduce_add(vec<T, L> a) {
  return fold(a, [](auto x, auto y) TW_LAMBDA { return x + y; });
}
template <class T, int L> TW_INLINE T reduce_mul(vec<T, L> a) {
  return fold(a, [](auto x, auto y) TW_LAMBDA { return x * y; });
}
template <class T, int L> TW_INLINE T reduce_max(vec<T, L> a) {
  return fold(a, [](auto x, auto y) TW_LAMBDA { return maximum(x, y); });
}
template <class T, int L> TW_INLINE T reduce_min(vec<T, L> a) {
  return fold(a, [](auto x, auto y) TW_LAMBDA { return minimum(x, y); });
}
template <int L> TW_INLINE bool any(mask<L> a) {
#if defined(TW_AVX512)
  if constexpr (L == 16) return __builtin_ia32_cvtd2mask512(a.m.v) != 0;
  else
#endif
#if defined(__AVX__)
  if constexpr (L == 8) return __builtin_ia32_movmskps256((f32x8)a.m.v) != 0;
  else
#endif
#if defined(__SSE2__)
  if constexpr (L == 4) return __builtin_ia32_movmskps((f32x4)a.m.v) != 0;
  else
#endif
  if constexpr (L == 1) return a.m.v != 0;
  else return any(lo(a) | hi(a));
}
template <int L> TW_INLINE bool all(mask<L> a) { return !any(~a); }

// The best value and the smallest index among equals; NaN wins, as in torch's argmax and argmin.
template <bool Max, class T, class I, int L> TW_INLINE I reduce_arg(vec<T, L> a, vec<I, L> index, T* best) {
  T value = Max ? reduce_max(a) : reduce_min(a);
  vec<T, L> b = splat<T, L>(value);
  mask<L> hit = a == b;
  if constexpr (is_float<T>)
    if (value != value) hit = a != a;
  *best = value;
  constexpr I last = I(~(u64(1) << (8 * sizeof(I) - 1)));
  return reduce_min(select(hit, index, splat<I, L>(last)));
}
template <class T, class I, int L> TW_INLINE I reduce_arg_max(vec<T, L> a, vec<I, L> index, T* best) {
  return reduce_arg<true>(a, index, best);
}
template <class T, class I, int L> TW_INLINE I reduce_arg_min(vec<T, L> a, vec<I, L> index, T* best) {
  return reduce_arg<false>(a, index, best);
}
// Keeps (a, i) or takes (b, j) lane by lane, where all of j is greater than all of i.
template <bool Max, class T, int L> TW_INLINE mask<L> takes(vec<T, L> a, vec<T, L> b) {
  mask<L> m = Max ? b > a : b < a;
  if constexpr (is_float<T>) m = m | ((b != b) & (a == a));
  return m;
}

// Inclusive prefix sums: lane i holds a[0] + ... + a[i].
template <int Step, class V, int... I> TW_INLINE V shift_up(V v, seq<I...>) {
  return __builtin_shufflevector(V{}, v, (int(sizeof...(I)) - Step + I)...);
}
template <int Step, class V, int L> TW_INLINE V scan_steps(V v) {
  if constexpr (Step >= L) return v;
  else return scan_steps<2 * Step, V, L>(v + shift_up<Step>(v, seq_to<L>()));
}
template <class T, int L> TW_INLINE T last_lane(vec<T, L> a) {
  if constexpr (kind_of<T, L> == 0) return a.v;
  else if constexpr (kind_of<T, L> == 1) return a.v[L - 1];
  else return last_lane(a.hi);
}
template <class T, int L> TW_INLINE vec<T, L> scan_add(vec<T, L> a) {
  if constexpr (kind_of<T, L> == 0) return a;
  else if constexpr (kind_of<T, L> == 1) return {scan_steps<1, typename vec<T, L>::raw, L>(a.v)};
  else {
    vec<T, L / 2> low = scan_add(a.lo);
    return {low, scan_add(a.hi) + splat<T, L / 2>(last_lane(low))};
  }
}
// Lanes in reverse order.
template <class V, int... I> TW_INLINE V flipped(V v, seq<I...>) {
  return __builtin_shufflevector(v, v, (int(sizeof...(I)) - 1 - I)...);
}
template <class T, int L> TW_INLINE vec<T, L> reverse(vec<T, L> a) {
  if constexpr (kind_of<T, L> == 0) return a;
  else if constexpr (kind_of<T, L> == 1) return {flipped(a.v, seq_to<L>())};
  else return {reverse(a.hi), reverse(a.lo)};
}

// In-register transpose of L rows of L lanes: rows r and r + L/2 are interleaved, log2(L) times.
template <int From, class V, int... I> TW_INLINE V interleaved(V a, V b, seq<I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(a, b, (From + I / 2 + (I % 2) * n)...);
}
template <class T, int L> TW_INLINE vec<T, L> zip_lo(vec<T, L> a, vec<T, L> b) {
  if constexpr (kind_of<T, L> == 2) return {zip_lo(a.lo, b.lo), zip_hi(a.lo, b.lo)};
  else return {interleaved<0>(a.v, b.v, seq_to<L>())};
}
template <class T, int L> TW_INLINE vec<T, L> zip_hi(vec<T, L> a, vec<T, L> b) {
  if constexpr (kind_of<T, L> == 2) return {zip_lo(a.hi, b.hi), zip_hi(a.hi, b.hi)};
  else return {interleaved<L / 2>(a.v, b.v, seq_to<L>())};
}
template <class T, int L, int... I> TW_INLINE void zip_rows(const vec<T, L>* from, vec<T, L>* to, seq<I...>) {
  ((to[2 * I] = zip_lo(from[I], from[I + L / 2]), to[2 * I + 1] = zip_hi(from[I], from[I + L / 2])), ...);
}
template <int Rounds, class T, int L> TW_INLINE void transpose_rounds(vec<T, L>* rows) {
  if constexpr (Rounds > 1) {
    vec<T, L> other[L];
    zip_rows(rows, other, seq_to<L / 2>());
    transpose_rounds<Rounds / 2>(other);
    copy_rows(other, rows, seq_to<L>());
  }
}
template <class T, int L, int... I> TW_INLINE void copy_rows(const vec<T, L>* from, vec<T, L>* to, seq<I...>) {
  ((to[I] = from[I]), ...);
}
template <class T, int L> TW_INLINE void transpose(vec<T, L> (&rows)[L]) { transpose_rounds<L>(rows + 0); }

// rows[r][l] = p[l * stride + r]: L rows of memory, transposed. Registers of 16 words are put together from quarters of
// rows, which load ports do nearly alone: half of the shuffles are left for the one port that has them.
template <class T, int L> TW_INLINE void load_transposed(const T* p, i64 stride, vec<T, L> (&rows)[L]) {
#if defined(TW_AVX512) && !defined(__clang__)
  if constexpr (L == 16 && sizeof(T) == 4) {
    f32x16 made[4][4];
#pragma GCC unroll 16
    for (int l = 0; l < 16; l++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {
        f32x4 quarter;
        __builtin_memcpy(&quarter, p + l * stride + 4 * c, sizeof(quarter));
        f32x16& to = made[c][l % 4];
        to = __builtin_ia32_broadcastf32x4_512(quarter, l < 4 ? f32x16{} : to, l < 4 ? u16(-1) : u16(15 << (l / 4 * 4)));
      }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
#define TW_EACH(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define TW_ZIP_LO 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define TW_ZIP_HI 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define TW_PAIR_LO 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define TW_PAIR_HI 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
      f32x16 a = TW_EACH(made[c][0], made[c][1], TW_ZIP_LO), b = TW_EACH(made[c][0], made[c][1], TW_ZIP_HI);
      f32x16 d = TW_EACH(made[c][2], made[c][3], TW_ZIP_LO), e = TW_EACH(made[c][2], made[c][3], TW_ZIP_HI);
      typedef typename vec<T, L>::raw raw;
      rows[4 * c] = {(raw)TW_EACH(a, d, TW_PAIR_LO)};
      rows[4 * c + 1] = {(raw)TW_EACH(a, d, TW_PAIR_HI)};
      rows[4 * c + 2] = {(raw)TW_EACH(b, e, TW_PAIR_LO)};
      rows[4 * c + 3] = {(raw)TW_EACH(b, e, TW_PAIR_HI)};
#undef TW_EACH
#undef TW_ZIP_LO
#undef TW_ZIP_HI
#undef TW_PAIR_LO
#undef TW_PAIR_HI
    }
    return;
  }
#endif
  for (int l = 0; l < L; l++) rows[l] = load<T, L>(p + l * stride);
  transpose(rows);
}
}  // namespace tw
