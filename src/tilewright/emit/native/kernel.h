// What generated kernels stand on besides vec.h: the calling convention, scalar forms of the vector functions, index
// arithmetic, masked memory access. Included first by every generated file.
#pragma once
#include "dot.h"

namespace tw {
// ---- calling convention; pointers[j] is the base of parameter j ----
struct Context {
  void* const* pointers;
  const i64* symbols;
  void* (*scratch)(i64 worker, i64 bytes);  // 64-byte aligned, private to the worker until its next call
  i64* error;                               // set to the code of a failed check
};
struct Kernel {
  void (*task)(void* context, i64 begin, i64 end, i64 worker);
  i64 (*count)(const i64* symbols);
  i64 (*grain)(const i64* symbols);
};
TW_INLINE void fail(const Context& context, i64 code) { __atomic_store_n(context.error, code, __ATOMIC_RELAXED); }
// Makes streamed stores visible to other cores.
TW_INLINE void store_fence() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// ---- index arithmetic ----
TW_INLINE i64 min(i64 a, i64 b) { return a < b ? a : b; }
TW_INLINE i64 max(i64 a, i64 b) { return a < b ? b : a; }
TW_INLINE i64 round_up(i64 a, i64 step) { return (a + step - 1) / step * step; }
TW_INLINE i64 minimum(i64 a, i64 b) { return min(a, b); }
TW_INLINE i64 maximum(i64 a, i64 b) { return max(a, b); }
TW_INLINE i64 div_floor(i64 a, i64 b) {  // 0 for b = 0
  if (b == 0) return 0;
  if (b == -1) return -a;
  return a / b - (a % b != 0 && (a ^ b) < 0);
}
TW_INLINE i64 mod_floor(i64 a, i64 b) {  // the sign of b; 0 for b = 0
  if (b == 0 || b == -1) return 0;
  i64 r = a % b;
  return r != 0 && (r ^ b) < 0 ? r + b : r;
}
TW_INLINE i64 div_natural(i64 a, i64 b) { return i64(u64(a) / u64(b)); }  // a >= 0, b > 0
TW_INLINE i64 mod_natural(i64 a, i64 b) { return i64(u64(a) % u64(b)); }

// ---- scalar forms: a scalar is a vector of one lane ----
template <class T> constexpr bool is_number = false;
template <> constexpr bool is_number<float> = true;
template <> constexpr bool is_number<double> = true;
template <> constexpr bool is_number<i8> = true;
template <> constexpr bool is_number<i16> = true;
template <> constexpr bool is_number<i32> = true;
template <> constexpr bool is_number<i64> = true;
template <> constexpr bool is_number<u8> = true;
template <bool Yes> struct only_if {};
template <> struct only_if<true> { typedef int type; };
#define TW_SCALAR(name)                                                                                       \
  template <class T, typename only_if<is_number<T>>::type = 0> TW_INLINE T name(T a) { return name(vec<T, 1>{a}).v; }
#define TW_SCALAR_PAIR(name)                                                                                  \
  template <class T, typename only_if<is_number<T>>::type = 0> TW_INLINE T name(T a, T b) {                   \
    return name(vec<T, 1>{a}, vec<T, 1>{b}).v;                                                                \
  }
template <class T, int L> TW_INLINE vec<T, L> reciprocal(vec<T, L> a) { return splat<T, L>(1) / a; }
template <class T, int L> TW_INLINE vec<T, L> trunc_divide(vec<T, L> a, vec<T, L> b) { return trunc(a / b); }
TW_SCALAR(abs) TW_SCALAR(sign) TW_SCALAR(sqrt) TW_SCALAR(rsqrt) TW_SCALAR(reciprocal) TW_SCALAR(floor) TW_SCALAR(ceil)
TW_SCALAR(trunc) TW_SCALAR(round_even) TW_SCALAR(exp) TW_SCALAR(exp2) TW_SCALAR(expm1) TW_SCALAR(log) TW_SCALAR(log2)
TW_SCALAR(log10) TW_SCALAR(log1p) TW_SCALAR(tanh) TW_SCALAR(sigmoid) TW_SCALAR(erf) TW_SCALAR(erfc) TW_SCALAR(sin)
TW_SCALAR(cos) TW_SCALAR(tan) TW_SCALAR(asin) TW_SCALAR(acos) TW_SCALAR(atan) TW_SCALAR(sinh) TW_SCALAR(cosh)
TW_SCALAR(asinh) TW_SCALAR(acosh) TW_SCALAR(atanh)
TW_SCALAR_PAIR(maximum) TW_SCALAR_PAIR(minimum) TW_SCALAR_PAIR(pow) TW_SCALAR_PAIR(atan2) TW_SCALAR_PAIR(fmod)
TW_SCALAR_PAIR(remainder) TW_SCALAR_PAIR(floor_divide) TW_SCALAR_PAIR(trunc_divide) TW_SCALAR_PAIR(shift_left)
TW_SCALAR_PAIR(shift_right)
template <class T> TW_INLINE auto is_nan(T a) { return a != a; }
template <class T, typename only_if<is_number<T>>::type = 0> TW_INLINE bool is_inf(T a) {
  return abs(a) == T(__builtin_inf());
}
template <class T, int L> TW_INLINE mask<L> is_inf(vec<T, L> a) { return abs(a) == splat<T, L>(__builtin_inf()); }
// Integer division gives 0 for a zero divisor; programs check divisors themselves.
#define TW_INTEGER_DIVISION(name)                                                                             \
  template <class T, int L> TW_INLINE vec<T, L> name(vec<T, L> a, vec<T, L> b) {                              \
    i32 ignored;                                                                                              \
    return name(a, b, &ignored);                                                                              \
  }                                                                                                           \
  TW_SCALAR_PAIR(name)
TW_INTEGER_DIVISION(div_trunc) TW_INTEGER_DIVISION(mod_trunc) TW_INTEGER_DIVISION(div_floor) TW_INTEGER_DIVISION(mod_floor)
#undef TW_INTEGER_DIVISION
#undef TW_SCALAR
#undef TW_SCALAR_PAIR
// torch's conversions of one value; half and bf16 round but stay float.
template <class To, class From> TW_INLINE scalar<To> to(From a) {
  if constexpr (same<To, bool>) return a != From(0);
  else if constexpr (same<To, half> || same<To, bf16>) return convert<To>(vec<float, 1>{float(a)}).v;
  else if constexpr (same<From, bool>) return a ? scalar<To>(1) : scalar<To>(0);
  else return convert<To>(vec<From, 1>{a}).v;
}
// One element of memory.
template <class T> TW_INLINE scalar<T> at(const T* p) {
  if constexpr (same<T, bool>) return *(const u8*)p != 0;
  else return load<T, 1>(p).v;
}
template <class T> TW_INLINE void put(T* p, scalar<T> a) {
  if constexpr (same<T, bool>) *(u8*)p = a;
  else store(p, vec<scalar<T>, 1>{a});
}

// maximum and minimum with a bound that is not NaN: one instruction, NaN stays.
template <class T, int L> TW_INLINE vec<T, L> at_least(vec<T, L> a, vec<T, L> bound) { return larger(bound, a); }
template <class T, int L> TW_INLINE vec<T, L> at_most(vec<T, L> a, vec<T, L> bound) { return smaller(bound, a); }

// ---- lanes ----
template <int L> TW_INLINE mask<L> only_lane(i64 n) {
  return iota<i32, L>() == splat<i32, L>(n < 0 || n >= L ? L : i32(n));
}
template <class T, int L> TW_INLINE T first(vec<T, L> a) { return get(a, 0); }
template <int L> TW_INLINE bool first(mask<L> a) { return get(a, 0); }

template <class T, int L> TW_INLINE vec<T, L> shifted_right(vec<T, L> a, int n) {
  if constexpr (kind_of<T, L> == 2) return {shifted_right(a.lo, n), shifted_right(a.hi, n)};
  else return {typename vec<T, L>::raw(a.v >> n)};
}
// a / b and a % b, a >= 0 and b > 0: exact below 2^51, because (a + 1/2) / b is at least 1 / (2 b) from any integer.
template <class T, int L> TW_INLINE vec<T, L> div_natural(vec<T, L> a, i64 b) {
  if (__builtin_constant_p(b) && (b & (b - 1)) == 0) return shifted_right(a, __builtin_ctzll(u64(b)));
  vec<double, L> q = (recast<double>(a) + splat<double, L>(0.5)) * splat<double, L>(1.0 / double(b));
  return recast<T>(q);
}
template <class T, int L> TW_INLINE vec<T, L> mod_natural(vec<T, L> a, i64 b) {
  if (__builtin_constant_p(b) && (b & (b - 1)) == 0) return a & splat<T, L>(b - 1);
  return a - div_natural(a, b) * splat<T, L>(b);
}

// p[index] where m, else fill.
template <class T, int L, class I>
TW_INLINE reg<T, L> take(const T* p, vec<I, L> index, mask<L> m, scalar<T> fill = scalar<T>()) {
#if defined(TW_AVX512)
  typedef memory<T> M;
  if constexpr (L == 16 && sizeof(M) == 4 && sizeof(I) == 8) {
    typedef long long i64x8 __attribute__((vector_size(64)));
    vec<M, L> f = to_memory<T, L>(constant<T, L>(fill));
    u16 k = u16(__builtin_ia32_cvtd2mask512(m.m.v));
    f32x8 a = __builtin_ia32_gatherdiv16sf((f32x8)lo(f).v, (const float*)p, (i64x8)index.lo.v, u8(k), 4);
    f32x8 b = __builtin_ia32_gatherdiv16sf((f32x8)hi(f).v, (const float*)p, (i64x8)index.hi.v, u8(k >> 8), 4);
    typedef typename vec<M, 8>::raw raw;
    return from_memory<T, L>(join(vec<M, 8>{(raw)a}, vec<M, 8>{(raw)b}));
  } else
#endif
    return gather<T, L>(p, index, m, fill);
}

// ---- memory under a mask: lanes outside it are not touched ----
template <class T, int L> TW_INLINE vec<T, L> load_masked_bits(const T* p, mask<L> m, vec<T, L> fill) {
  if constexpr (kind_of<T, L> == 2)
    return {load_masked_bits(p, lo(m), fill.lo), load_masked_bits(p + L / 2, hi(m), fill.hi)};
#if defined(TW_AVX512)
  else if constexpr (L == 16) {
    typedef typename vec<T, L>::raw raw;
    u16 k = u16(__builtin_ia32_cvtd2mask512(m.m.v));
    if constexpr (sizeof(T) == 4)
      return {(raw)__builtin_ia32_loadups512_mask(TW_AT(float, f32x16, p), (f32x16)fill.v, k)};
    else if constexpr (sizeof(T) == 2)
      return {(raw)__builtin_ia32_loaddquhi256_mask(TW_AT(short, i16x16, p), (i16x16)fill.v, k)};
    else return {(raw)__builtin_ia32_loaddquqi128_mask(TW_AT(char, char16, p), (char16)fill.v, k)};
  } else if constexpr (L == 8 && sizeof(T) == 8) {
    typedef typename vec<T, L>::raw raw;
    u8 k = u8(__builtin_ia32_cvtd2mask256(m.m.v));
    return {(raw)__builtin_ia32_loadupd512_mask(TW_AT(double, f64x8, p), (f64x8)fill.v, k)};
  }
#endif
  else {
    T buffer[L];
    i32 on[L];
    store_bits(buffer, fill);
    store_bits(on, m.m);
    for (int i = 0; i < L; i++)
      if (on[i]) buffer[i] = p[i];
    return load_bits<T, L>(buffer);
  }
}
template <class T, int L> TW_INLINE reg<T, L> load_masked(const T* p, mask<L> m, scalar<T> fill = scalar<T>()) {
  typedef memory<T> M;
  return from_memory<T, L>(load_masked_bits<M, L>((const M*)p, m, to_memory<T, L>(constant<T, L>(fill))));
}
template <class T, int L> TW_INLINE void store_masked_bits(T* p, vec<T, L> a, mask<L> m) {
  if constexpr (kind_of<T, L> == 2) {
    store_masked_bits(p, a.lo, lo(m));
    store_masked_bits(p + L / 2, a.hi, hi(m));
  }
#if defined(TW_AVX512)
  else if constexpr (L == 16) {
    u16 k = u16(__builtin_ia32_cvtd2mask512(m.m.v));
    if constexpr (sizeof(T) == 4) __builtin_ia32_storeups512_mask(TW_TO(float, f32x16, p), (f32x16)a.v, k);
    else if constexpr (sizeof(T) == 2) __builtin_ia32_storedquhi256_mask(TW_TO(short, i16x16, p), (i16x16)a.v, k);
    else __builtin_ia32_storedquqi128_mask(TW_TO(char, char16, p), (char16)a.v, k);
  }
#endif
  else {
    T buffer[L];
    i32 on[L];
    store_bits(buffer, a);
    store_bits(on, m.m);
    for (int i = 0; i < L; i++)
      if (on[i]) p[i] = buffer[i];
  }
}
template <class T, class R> TW_INLINE void store_masked(T* p, R a, mask<lanes_of<R>> m) {
  store_masked_bits<memory<T>, lanes_of<R>>((memory<T>*)p, to_memory<T, lanes_of<R>>(a), m);
}
// p[index] = a where m, in lane order.
template <class T, class I, class R> TW_INLINE void scatter(T* p, vec<I, lanes_of<R>> index, mask<lanes_of<R>> m, R a) {
  constexpr int L = lanes_of<R>;
  memory<T> buffer[L];
  I to[L];
  i32 on[L];
  store_bits(buffer, to_memory<T, L>(a));
  store_bits(to, index);
  store_bits(on, m.m);
  for (int i = 0; i < L; i++)
    if (on[i]) ((memory<T>*)p)[to[i]] = buffer[i];
}
}  // namespace tw
