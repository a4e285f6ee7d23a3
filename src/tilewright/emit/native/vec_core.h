// Types, operators, masks and lane access. Included by vec.h; no other header is needed.
#pragma once

#define TW_INLINE static inline __attribute__((always_inline))
#define TW_MEMBER inline __attribute__((always_inline))
#define TW_NOINLINE static __attribute__((noinline))
#define TW_LAMBDA __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TW_AVX512 1
#define TW_WIDTH 64
#elif defined(__AVX2__)
#define TW_WIDTH 32
#else
#define TW_WIDTH 16
#endif
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define TW_FUSED 1  // there is an instruction for a * b + c
#endif
#if defined(__has_builtin)
#define TW_HAS(x) __has_builtin(x)
#else
#define TW_HAS(x) 0
#endif

namespace tw {

typedef __INT8_TYPE__ i8;
typedef __INT16_TYPE__ i16;
typedef __INT32_TYPE__ i32;
typedef __INT64_TYPE__ i64;
typedef __UINT8_TYPE__ u8;
typedef __UINT16_TYPE__ u16;
typedef __UINT32_TYPE__ u32;
typedef __UINT64_TYPE__ u64;
struct half { u16 bits; };  // IEEE binary16, a storage type only: registers hold float
struct bf16 { u16 bits; };  // bfloat16, a storage type only: registers hold float

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;
template <class T> constexpr bool is_float = same<T, float> || same<T, double>;

// 0: one scalar; 1: one machine vector; 2: two halves (a raw vector wider than the machine is scalarised by GCC).
template <class T, int L> constexpr int kind_of = L == 1 ? 0 : (int(sizeof(T)) * L <= TW_WIDTH ? 1 : 2);

template <class T, int L, int K = kind_of<T, L>> struct vec;
template <class T, int L> struct vec<T, L, 0> {
  typedef T raw;
  raw v;
};
template <class T, int L> struct vec<T, L, 1> {
  typedef T raw __attribute__((vector_size(sizeof(T) * L)));
  raw v;
};
template <class T, int L> struct vec<T, L, 2> { vec<T, L / 2> lo, hi; };

// One truth value per lane, 0 or -1 as a 32-bit integer, whatever was compared.
template <int L> struct mask { vec<i32, L> m; };

template <class T, int L> struct reg_of { typedef vec<T, L> type; };
template <int L> struct reg_of<half, L> { typedef vec<float, L> type; };
template <int L> struct reg_of<bf16, L> { typedef vec<float, L> type; };
template <int L> struct reg_of<bool, L> { typedef mask<L> type; };
// What a register holds for memory type T.
template <class T, int L> using reg = typename reg_of<T, L>::type;
template <class T> struct scalar_of { typedef T type; };
template <> struct scalar_of<half> { typedef float type; };
template <> struct scalar_of<bf16> { typedef float type; };
template <class T> using scalar = typename scalar_of<T>::type;

template <int Size> struct int_of_size;
template <> struct int_of_size<1> { typedef i8 type; };
template <> struct int_of_size<2> { typedef i16 type; };
template <> struct int_of_size<4> { typedef i32 type; };
template <> struct int_of_size<8> { typedef i64 type; };
template <class T> using int_like = typename int_of_size<sizeof(T)>::type;

template <int... I> struct seq {};
#if defined(__clang__)
template <class T, T... I> struct seq_box { typedef seq<I...> type; };
template <int N> using seq_to = typename __make_integer_seq<seq_box, int, N>::type;
#else
template <int N> using seq_to = seq<__integer_pack(N)...>;
#endif

// ---- halves ----
template <int From, class V, int... I> TW_INLINE auto lanes_from(V v, seq<I...>) {
  return __builtin_shufflevector(v, v, (I + From)...);
}
template <class V, int... I> TW_INLINE auto joined(V a, V b, seq<I...>) {
  return __builtin_shufflevector(a, b, I...);
}
template <class T, int L> TW_INLINE vec<T, L / 2> lo(vec<T, L> a) {
  if constexpr (kind_of<T, L> == 2) return a.lo;
  else if constexpr (L == 2) return {a.v[0]};
  else return {lanes_from<0>(a.v, seq_to<L / 2>())};
}
template <class T, int L> TW_INLINE vec<T, L / 2> hi(vec<T, L> a) {
  if constexpr (kind_of<T, L> == 2) return a.hi;
  else if constexpr (L == 2) return {a.v[1]};
  else return {lanes_from<L / 2>(a.v, seq_to<L / 2>())};
}
template <class T, int L> TW_INLINE vec<T, 2 * L> join(vec<T, L> a, vec<T, L> b) {
  if constexpr (kind_of<T, 2 * L> == 2) return {a, b};
  else if constexpr (L == 1) return {typename vec<T, 2>::raw{a.v, b.v}};
  else return {joined(a.v, b.v, seq_to<2 * L>())};
}
template <int L> TW_INLINE mask<L / 2> lo(mask<L> a) { return {lo(a.m)}; }
template <int L> TW_INLINE mask<L / 2> hi(mask<L> a) { return {hi(a.m)}; }
template <int L> TW_INLINE mask<2 * L> join(mask<L> a, mask<L> b) { return {join(a.m, b.m)}; }

// ---- construction and lane access ----
template <class T, int L, class S> TW_INLINE vec<T, L> splat(S x) {
  if constexpr (kind_of<T, L> == 0) return {T(x)};
  else if constexpr (kind_of<T, L> == 1) return {T(x) - typename vec<T, L>::raw{}};  // not +: keeps -0.0
  else return {splat<T, L / 2>(x), splat<T, L / 2>(x)};
}
template <class T, int L> TW_INLINE T get(vec<T, L> a, int i) {
  if constexpr (kind_of<T, L> == 0) return a.v;
  else if constexpr (kind_of<T, L> == 1) return a.v[i];
  else return i < L / 2 ? get(a.lo, i) : get(a.hi, i - L / 2);
}
template <int L> TW_INLINE bool get(mask<L> a, int i) { return get(a.m, i) != 0; }

// ---- lane by lane conversion of numbers, C++ rules ----
template <int Size> constexpr int toward(int from) { return from < Size ? 2 * from : from > Size ? from / 2 : from; }
template <class To, class From, int L> TW_INLINE vec<To, L> recast(vec<From, L> a) {
  constexpr bool float_to = is_float<To>, float_from = is_float<From>;
  if constexpr (same<To, From>) return a;
  else if constexpr (L == 1) return {To(a.v)};
  else if constexpr (float_to && !float_from && sizeof(From) < 4) return recast<To>(recast<i32>(a));
  else if constexpr (float_from && !float_to && sizeof(To) < 4) return recast<To>(recast<i32>(a));
  else if constexpr (kind_of<To, L> == 2 || kind_of<From, L> == 2)
    return join(recast<To>(lo(a)), recast<To>(hi(a)));
  else if constexpr (!float_to && !float_from && toward<sizeof(To)>(sizeof(From)) != sizeof(To)) {
#if defined(TW_AVX512) && !defined(__clang__)
    if constexpr (L == 16 && sizeof(To) == 4 && same<From, i8>)
      return {(typename vec<To, L>::raw)__builtin_ia32_pmovsxbd512_mask(
          (__attribute__((vector_size(16))) char)a.v, typename vec<i32, L>::raw{}, 0xffff)};
    else if constexpr (L == 16 && sizeof(To) == 4 && same<From, u8>)
      return {(typename vec<To, L>::raw)__builtin_ia32_pmovzxbd512_mask(
          (__attribute__((vector_size(16))) char)a.v, typename vec<i32, L>::raw{}, 0xffff)};
    else if constexpr (L == 16 && sizeof(To) == 1 && sizeof(From) == 4)
      return {(typename vec<To, L>::raw)__builtin_ia32_pmovdb512_mask(
          (__attribute__((vector_size(64))) int)a.v, (__attribute__((vector_size(16))) char){}, 0xffff)};
    else
#endif
    return recast<To>(recast<typename int_of_size<toward<sizeof(To)>(sizeof(From))>::type>(a));
  } else return {__builtin_convertvector(a.v, typename vec<To, L>::raw)};
}
// The same bits read as another type of the same size.
template <class To, class From, int L> TW_INLINE vec<To, L> bitcast(vec<From, L> a) {
  static_assert(sizeof(To) == sizeof(From), "bitcast keeps the size of a lane");
  if constexpr (kind_of<To, L> == 2) return {bitcast<To>(a.lo), bitcast<To>(a.hi)};
  else if constexpr (kind_of<To, L> == 1) return {(typename vec<To, L>::raw)a.v};
  else {
    vec<To, L> r;
    __builtin_memcpy(&r.v, &a.v, sizeof(To));
    return r;
  }
}

// ---- operators: both sides have the same type; a constant is written splat<T, L>(c) ----
#define TW_OPERATOR(op)                                                                              \
  template <class T, int L> TW_INLINE vec<T, L> operator op(vec<T, L> a, vec<T, L> b) {              \
    if constexpr (kind_of<T, L> == 2) return {a.lo op b.lo, a.hi op b.hi};                           \
    else return {typename vec<T, L>::raw(a.v op b.v)};                                               \
  }
TW_OPERATOR(+)
TW_OPERATOR(-)
TW_OPERATOR(*)
TW_OPERATOR(&)
TW_OPERATOR(|)
TW_OPERATOR(^)
#undef TW_OPERATOR
// True division; for integers see div_floor and div_trunc in vec_math.h.
template <class T, int L> TW_INLINE vec<T, L> operator/(vec<T, L> a, vec<T, L> b) {
  static_assert(!same<T, int_like<T>>, "integer division needs div_floor or div_trunc");
  if constexpr (kind_of<T, L> == 2) return {a.lo / b.lo, a.hi / b.hi};
  else return {a.v / b.v};
}
template <class T, int L> TW_INLINE vec<T, L> operator-(vec<T, L> a) {
  if constexpr (kind_of<T, L> == 2) return {-a.lo, -a.hi};
  else return {typename vec<T, L>::raw(-a.v)};
}
template <class T, int L> TW_INLINE vec<T, L> operator~(vec<T, L> a) {
  if constexpr (kind_of<T, L> == 2) return {~a.lo, ~a.hi};
  else return {typename vec<T, L>::raw(~a.v)};
}

// ---- a * b + c ----
// Rounded once where the machine can; nothing else ever is (-ffp-contract=off), so that what two loops compute of the
// same numbers is the same. On scalars and raw vectors of floats.
template <class V> TW_INLINE V fused_raw(V a, V b, V c) {
#if defined(__clang__)
#pragma clang fp contract(fast)
  return a * b + c;
#elif defined(TW_FUSED)
  if constexpr (same<V, float>) return __builtin_fmaf(a, b, c);
  else if constexpr (same<V, double>) return __builtin_fma(a, b, c);
  else {
    constexpr bool single = sizeof(a[0]) == 4;
#if defined(__FMA__)
#if defined(TW_AVX512)
    if constexpr (sizeof(V) == 64 && single) return __builtin_ia32_vfmaddps512_mask(a, b, c, (u16)-1, 4);
    else if constexpr (sizeof(V) == 64) return __builtin_ia32_vfmaddpd512_mask(a, b, c, (u8)-1, 4);
    else
#endif
    if constexpr (sizeof(V) == 32 && single) return __builtin_ia32_vfmaddps256(a, b, c);
    else if constexpr (sizeof(V) == 32) return __builtin_ia32_vfmaddpd256(a, b, c);
    else if constexpr (sizeof(V) == 16 && single) return __builtin_ia32_vfmaddps(a, b, c);
    else if constexpr (sizeof(V) == 16) return __builtin_ia32_vfmaddpd(a, b, c);
#else
    if constexpr (sizeof(V) == 16 && single) return __builtin_aarch64_fmav4sf(a, b, c);
    else if constexpr (sizeof(V) == 16) return __builtin_aarch64_fmav2df(a, b, c);
#endif
    else {
      for (int i = 0; i < int(sizeof(V) / sizeof(a[0])); i++) c[i] = fused_raw(a[i], b[i], c[i]);
      return c;
    }
  }
#else
  return a * b + c;
#endif
}
// The same with constants for any but the first.
template <class V, class A> TW_INLINE V wide(A a) {
  if constexpr (same<V, A>) return a;
  else return a - V{};  // not +: keeps -0.0
}
template <class V, class B, class C> TW_INLINE V fused(V a, B b, C c) { return fused_raw<V>(a, wide<V>(b), wide<V>(c)); }
TW_INLINE float fma(float a, float b, float c) { return fused_raw(a, b, c); }
TW_INLINE double fma(double a, double b, double c) { return fused_raw(a, b, c); }
template <class T, int L> TW_INLINE vec<T, L> fma(vec<T, L> a, vec<T, L> b, vec<T, L> c) {
  if constexpr (kind_of<T, L> == 2) return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
  else return {fused_raw(a.v, b.v, c.v)};
}

// ---- masks ----
#define TW_COMPARE(op)                                                                               \
  template <class T, int L> TW_INLINE mask<L> operator op(vec<T, L> a, vec<T, L> b) {                \
    if constexpr (kind_of<T, L> == 2) return join(a.lo op b.lo, a.hi op b.hi);                       \
    else if constexpr (kind_of<T, L> == 0) return {{-i32(a.v op b.v)}};                              \
    else if constexpr (sizeof(T) == 4) return {{a.v op b.v}};                                        \
    else return {recast<i32>(vec<int_like<T>, L>{(typename vec<int_like<T>, L>::raw)(a.v op b.v)})}; \
  }
TW_COMPARE(<)
TW_COMPARE(<=)
TW_COMPARE(>)
TW_COMPARE(>=)
TW_COMPARE(==)
TW_COMPARE(!=)
#undef TW_COMPARE
template <int L> TW_INLINE mask<L> operator&(mask<L> a, mask<L> b) { return {a.m & b.m}; }
template <int L> TW_INLINE mask<L> operator|(mask<L> a, mask<L> b) { return {a.m | b.m}; }
template <int L> TW_INLINE mask<L> operator^(mask<L> a, mask<L> b) { return {a.m ^ b.m}; }
template <int L> TW_INLINE mask<L> operator~(mask<L> a) { return {~a.m}; }
template <int L> TW_INLINE mask<L> operator!(mask<L> a) { return {~a.m}; }
template <int L> TW_INLINE mask<L> splat_mask(bool x) { return {splat<i32, L>(x ? -1 : 0)}; }
template <class T, int L> TW_INLINE vec<T, L> iota(T first = 0, T step = 1);
// True in lanes 0 .. n-1.
template <int L> TW_INLINE mask<L> first_lanes(i64 n) {
  return iota<i32, L>() < splat<i32, L>(n < 0 ? 0 : n > L ? L : i32(n));
}
// Lane by lane: m ? a : b.
template <class T, int L> TW_INLINE vec<T, L> select(mask<L> m, vec<T, L> a, vec<T, L> b) {
  if constexpr (kind_of<T, L> == 2) return {select(lo(m), a.lo, b.lo), select(hi(m), a.hi, b.hi)};
  else if constexpr (kind_of<T, L> == 0) return {m.m.v ? a.v : b.v};
  else if constexpr (sizeof(T) == 4) return {m.m.v ? a.v : b.v};
  else return {recast<int_like<T>>(m.m).v ? a.v : b.v};
}
template <int L> TW_INLINE mask<L> select(mask<L> m, mask<L> a, mask<L> b) {
  return {(m.m & a.m) | (~m.m & b.m)};
}
// a where m, else 0 (cheaper than select).
template <class T, int L> TW_INLINE vec<T, L> keep(mask<L> m, vec<T, L> a) {
  return select(m, a, splat<T, L>(0));
}

template <class T, int... I> TW_INLINE auto counting(T first, T step, seq<I...>) {
  typedef typename vec<T, sizeof...(I)>::raw raw;
  return raw(first - raw{} + raw{T(I)...} * step);
}
// first, first + step, first + 2 * step, ...
template <class T, int L> TW_INLINE vec<T, L> iota(T first, T step) {
  if constexpr (kind_of<T, L> == 0) return {first};
  else if constexpr (kind_of<T, L> == 1) return {counting(first, step, seq_to<L>())};
  else return {iota<T, L / 2>(first, step), iota<T, L / 2>(T(first + step * T(L / 2)), step)};
}
}  // namespace tw
