// Loads, stores and torch's type conversions. Included by vec.h.
#pragma once
#include "vec_core.h"

#define TW_BOTH(f, ...) join(f(lo(a), ##__VA_ARGS__), f(hi(a), ##__VA_ARGS__))
// The pointer that a builtin wants: GCC and Clang declare different types, and Clang not always vectors.
#if defined(__clang__)
#define TW_AT(gcc, clang, p) (tw::any_pointer{(void*)(p)})
#define TW_TO(gcc, clang, p) (tw::any_pointer{(void*)(p)})
#else
#define TW_AT(gcc, clang, p) ((const gcc*)(p))
#define TW_TO(gcc, clang, p) ((gcc*)(p))
#endif

namespace tw {
struct any_pointer {
  void* p;
  template <class T> TW_MEMBER operator T*() const { return (T*)p; }
};
// Raw vectors with fixed lanes, for builtins.
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef double f64x2 __attribute__((vector_size(16)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef i32 i32x4 __attribute__((vector_size(16)));
typedef i32 i32x8 __attribute__((vector_size(32)));
typedef i32 i32x16 __attribute__((vector_size(64)));
typedef long long i64x4 __attribute__((vector_size(32)));
typedef i16 i16x8 __attribute__((vector_size(16)));
typedef i16 i16x16 __attribute__((vector_size(32)));
typedef u16 u16x8 __attribute__((vector_size(16)));
typedef u16 u16x16 __attribute__((vector_size(32)));
typedef char char16 __attribute__((vector_size(16)));

// ---- half types: u16 lanes to and from float lanes; to_ rounds to nearest even, NaN stays NaN ----
template <int L> TW_INLINE vec<float, L> from_bf16(vec<u16, L> a) {
  return bitcast<float>(recast<u32>(a) * splat<u32, L>(65536));
}
template <class V> TW_INLINE auto bf16_bits(V a) {  // raw float to raw int
  auto b = (decltype(a < a))a;
  auto r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  return a == a ? r : (b - b) + 0x7fc0;
}
template <class V> TW_INLINE auto half_bits(V a) {
  auto b = (decltype(a < a))a;
  auto size = b & 0x7fffffff, sign = (b >> 16) & 0x8000;
  auto small = (decltype(b))((V)size + 0.5f) - 0x3f000000;  // the last bit of 0.5 + x is binary16's smallest unit
  auto normal = (size + (0xfff - 0x38000000) + ((size >> 13) & 1)) >> 13;
  auto r = size < 0x38800000 ? small : normal;
  r = size >= 0x477ff000 ? (b - b) + 0x7c00 : r;
  r = size > 0x7f800000 ? (b - b) + 0x7e00 : r;
  return r | sign;
}
template <class I, class V> TW_INLINE V half_value(I h) {  // raw int to raw float V
  auto size = h & 0x7fff;
  auto f = (I)((V)(size << 13) * 0x1p112f);
  return (V)(f | (size >= 0x7c00 ? (h - h) + 0x7f800000 : h - h) | ((h & 0x8000) << 16));
}
template <int L> TW_INLINE vec<u16, L> to_bf16(vec<float, L> a) {
  if constexpr (kind_of<float, L> == 2) return TW_BOTH(to_bf16);
  else if constexpr (L == 1) return lo(to_bf16(join(a, a)));
  else return recast<u16>(vec<i32, L>{bf16_bits(a.v)});
}
// Machines that convert whole vectors: Clang and AArch64 through a half type, GCC on x86 through builtins.
#if defined(__clang__) && (defined(__F16C__) || defined(__aarch64__))
typedef _Float16 native_half;
#define TW_NATIVE_HALF 1
#elif defined(__aarch64__)
typedef __fp16 native_half;
#define TW_NATIVE_HALF 1
#elif defined(__F16C__)
#define TW_F16C 1
#endif
#if defined(TW_NATIVE_HALF)
template <int L> struct halves {
  typedef native_half type __attribute__((vector_size(2 * L)));
};
#endif
template <int L> TW_INLINE vec<u16, L> to_half(vec<float, L> a) {
  if constexpr (kind_of<float, L> == 2) return TW_BOTH(to_half);
  else if constexpr (L < 4) return lo(to_half(join(a, a)));
#if defined(TW_NATIVE_HALF)
  else return {(typename vec<u16, L>::raw)__builtin_convertvector(a.v, typename halves<L>::type)};
#else
#if defined(TW_F16C)
#if defined(TW_AVX512)
  else if constexpr (L == 16) return {(u16x16)__builtin_ia32_vcvtps2ph512_mask(a.v, 8, i16x16{}, 0xffff)};
#endif
  else if constexpr (L == 8) return {(u16x8)__builtin_ia32_vcvtps2ph256(a.v, 0)};
  else if constexpr (L == 4) return lo(vec<u16, 8>{(u16x8)__builtin_ia32_vcvtps2ph(a.v, 0)});
#endif
  else return recast<u16>(vec<i32, L>{half_bits(a.v)});
#endif
}
template <int L> TW_INLINE vec<float, L> from_half(vec<u16, L> a) {
  if constexpr (kind_of<float, L> == 2) return TW_BOTH(from_half);
  else if constexpr (L < 4) return lo(from_half(join(a, a)));
#if defined(TW_NATIVE_HALF)
  else return {__builtin_convertvector((typename halves<L>::type)a.v, typename vec<float, L>::raw)};
#else
#if defined(TW_F16C)
#if defined(TW_AVX512)
  else if constexpr (L == 16) return {__builtin_ia32_vcvtph2ps512_mask((i16x16)a.v, f32x16{}, 0xffff, 4)};
#endif
  else if constexpr (L == 8) return {__builtin_ia32_vcvtph2ps256((i16x8)a.v)};
  else if constexpr (L == 4) return {__builtin_ia32_vcvtph2ps((i16x8)join(a, a).v)};
#endif
  else return {half_value<typename vec<i32, L>::raw, typename vec<float, L>::raw>(recast<i32>(a).v)};
#endif
}

// ---- torch's conversions between memory types; half and bf16 round but stay in float registers ----
template <class To, class From, int L> TW_INLINE reg<To, L> convert(vec<From, L> a) {
  if constexpr (same<To, bool>) return a != splat<From, L>(0);
  else if constexpr (same<To, half>) return from_half(to_half(recast<float>(a)));
  else if constexpr (same<To, bf16>) return from_bf16(to_bf16(recast<float>(a)));
  else if constexpr (is_float<From> && same<To, u8>) return recast<u8>(recast<i64>(a));
  else return recast<To>(a);
}
template <class To, int L> TW_INLINE reg<To, L> convert(mask<L> a) {
  if constexpr (same<To, bool>) return a;
  else return select(a, splat<scalar<To>, L>(1), splat<scalar<To>, L>(0));
}
// Memory bits of a register, as the integer or float lanes that are stored; and back.
template <class T, int L> TW_INLINE auto to_memory(reg<T, L> a) {
  if constexpr (same<T, half>) return to_half(a);
  else if constexpr (same<T, bf16>) return to_bf16(a);
  else if constexpr (same<T, bool>) return recast<u8>(-a.m);
  else return a;
}
template <class T> struct memory_of { typedef T type; };
template <> struct memory_of<half> { typedef u16 type; };
template <> struct memory_of<bf16> { typedef u16 type; };
template <> struct memory_of<bool> { typedef u8 type; };
template <class T> using memory = typename memory_of<T>::type;
template <class T, int L> TW_INLINE reg<T, L> from_memory(vec<memory<T>, L> a) {
  if constexpr (same<T, half>) return from_half(a);
  else if constexpr (same<T, bf16>) return from_bf16(a);
  else if constexpr (same<T, bool>) return a != splat<u8, L>(0);
  else return a;
}
template <class T, int L> TW_INLINE auto constant(scalar<T> x) {
  if constexpr (same<T, bool>) return splat_mask<L>(x);
  else return splat<scalar<T>, L>(x);
}

// ---- whole vectors; no alignment is asked ----
// A register at any address, whatever lies there. Not memcpy: a constant vector then becomes one wide integer, of which
// GCC 12 loses zeros in the upper part where the rest is one word again and again.
template <class V> struct __attribute__((packed, may_alias)) anywhere {
  V v;
};
template <class T, int L> TW_INLINE vec<T, L> load_bits(const void* p) {
  if constexpr (kind_of<T, L> == 2)
    return {load_bits<T, L / 2>(p), load_bits<T, L / 2>((const char*)p + sizeof(T) * (L / 2))};
  else return {((const anywhere<typename vec<T, L>::raw>*)p)->v};
}
template <class T, int L> TW_INLINE void store_bits(void* p, vec<T, L> a) {
  if constexpr (kind_of<T, L> == 2) {
    store_bits(p, a.lo);
    store_bits((char*)p + sizeof(T) * (L / 2), a.hi);
  } else ((anywhere<typename vec<T, L>::raw>*)p)->v = a.v;
}
template <class T, int L> TW_INLINE reg<T, L> load(const T* p) {
  if constexpr (same<T, memory<T>> && kind_of<T, L> < 2)  // the common case in one call, for compile time
    return {((const anywhere<typename vec<T, L>::raw>*)p)->v};
  else return from_memory<T, L>(load_bits<memory<T>, L>(p));
}
template <class T, int L> TW_INLINE void store(T* p, vec<T, L> a) {
  if constexpr (kind_of<T, L> < 2) ((anywhere<typename vec<T, L>::raw>*)p)->v = a.v;
  else store_bits(p, a);
}
template <int L> TW_INLINE void store(half* p, vec<float, L> a) { store_bits(p, to_half(a)); }
template <int L> TW_INLINE void store(bf16* p, vec<float, L> a) { store_bits(p, to_bf16(a)); }
template <int L> TW_INLINE void store(bool* p, mask<L> a) { store_bits(p, to_memory<bool, L>(a)); }

// ---- the first n lanes; memory beyond them is never touched; n < 0 means 0, n > L means L ----
#if defined(__AVX2__)
template <class T> constexpr bool masked_access = sizeof(T) >= 4;
#else
template <class T> constexpr bool masked_access = false;
#endif
template <class T, int L> TW_INLINE vec<T, L> load_part_bits(const T* p, i64 n, vec<T, L> fill) {
  constexpr int bytes = int(sizeof(T)) * L;
  (void)bytes;
  if constexpr (kind_of<T, L> == 2 && masked_access<T>)
    return {load_part_bits<T, L / 2>(p, n, fill.lo), load_part_bits<T, L / 2>(p + L / 2, n - L / 2, fill.hi)};
#if defined(TW_AVX512)
  else if constexpr (bytes == 64 || (L == 16 && bytes < 64)) {
    typedef typename vec<T, L>::raw raw;
    u32 k = (1u << (n < 0 ? 0 : n > L ? L : n)) - 1;  // no branch: a loop may use this for every step
    if constexpr (bytes == 64 && sizeof(T) == 4)
      return {(raw)__builtin_ia32_loadups512_mask((const float*)p, (f32x16)fill.v, u16(k))};
    else if constexpr (bytes == 64 && sizeof(T) == 8)
      return {(raw)__builtin_ia32_loadupd512_mask((const double*)p, (f64x8)fill.v, u8(k))};
    else if constexpr (sizeof(T) == 2 && L == 16)
      return {(raw)__builtin_ia32_loaddquhi256_mask(TW_AT(short, i16x16, p), (i16x16)fill.v, u16(k))};
    else if constexpr (sizeof(T) == 1 && L == 16)
      return {(raw)__builtin_ia32_loaddquqi128_mask(TW_AT(char, char16, p), (char16)fill.v, u16(k))};
    else return load_lanes(p, n, fill);
  }
#endif
#if defined(__AVX2__)
  else if constexpr (bytes == 32 && sizeof(T) == 4) {
    typedef vec<i32, L> I;
    I m = first_lanes<L>(n).m;
    auto r = __builtin_ia32_maskloadd256((const i32x8*)p, m.v);
    return select(mask<L>{m}, vec<T, L>{(typename vec<T, L>::raw)r}, fill);
  } else if constexpr (bytes == 32 && sizeof(T) == 8) {
    mask<L> m = first_lanes<L>(n);
    auto r = __builtin_ia32_maskloadq256((const i64x4*)p, (i64x4)recast<i64>(m.m).v);
    return select(m, vec<T, L>{(typename vec<T, L>::raw)r}, fill);
  }
#endif
  else return load_lanes(p, n, fill);
}
template <class T, int L> TW_INLINE vec<T, L> load_lanes(const T* p, i64 n, vec<T, L> fill) {
  if (n >= L) return load_bits<T, L>(p);
  T buffer[L];
  store_bits(buffer, fill);
  for (i64 i = 0; i < n; i++) buffer[i] = p[i];
  return load_bits<T, L>(buffer);
}
template <class T, int L> TW_INLINE void store_lanes(T* p, vec<T, L> a, i64 n) {
  if (n >= L) return store_bits(p, a);
  T buffer[L];
  store_bits(buffer, a);
  for (i64 i = 0; i < n; i++) p[i] = buffer[i];
}
template <class T, int L> TW_INLINE void store_part_bits(T* p, vec<T, L> a, i64 n) {
  constexpr int bytes = int(sizeof(T)) * L;
  (void)bytes;
  if constexpr (kind_of<T, L> == 2 && masked_access<T>) {
    store_part_bits(p, a.lo, n);
    store_part_bits(p + L / 2, a.hi, n - L / 2);
  }
#if defined(TW_AVX512)
  else if constexpr (bytes == 64 || (L == 16 && bytes < 64)) {
    u32 k = (1u << (n < 0 ? 0 : n > L ? L : n)) - 1;
    if constexpr (bytes == 64 && sizeof(T) == 4)
      __builtin_ia32_storeups512_mask((float*)p, (f32x16)a.v, u16(k));
    else if constexpr (bytes == 64 && sizeof(T) == 8)
      __builtin_ia32_storeupd512_mask((double*)p, (f64x8)a.v, u8(k));
    else if constexpr (sizeof(T) == 2 && L == 16)
      __builtin_ia32_storedquhi256_mask(TW_TO(short, i16x16, p), (i16x16)a.v, u16(k));
    else if constexpr (sizeof(T) == 1 && L == 16)
      __builtin_ia32_storedquqi128_mask(TW_TO(char, char16, p), (char16)a.v, u16(k));
    else store_lanes(p, a, n);
  }
#endif
#if defined(__AVX2__)
  else if constexpr (bytes == 32 && sizeof(T) == 4) {
    if (n >= L) return store_bits(p, a);  // masked stores are slow on some AVX2 machines
    vec<i32, L> m = first_lanes<L>(n).m;
    __builtin_ia32_maskstored256((i32x8*)p, m.v, (i32x8)a.v);
  } else if constexpr (bytes == 32 && sizeof(T) == 8) {
    if (n >= L) return store_bits(p, a);
    mask<L> m = first_lanes<L>(n);
    __builtin_ia32_maskstoreq256((i64x4*)p, (i64x4)recast<i64>(m.m).v, (i64x4)a.v);
  }
#endif
  else store_lanes(p, a, n);
}
template <class T, int L> TW_INLINE reg<T, L> load_part(const T* p, i64 n, scalar<T> fill = scalar<T>()) {
  typedef memory<T> M;
  return from_memory<T, L>(load_part_bits<M, L>((const M*)p, n, to_memory<T, L>(constant<T, L>(fill))));
}
template <class T, int L> TW_INLINE void store_part(T* p, vec<T, L> a, i64 n) { store_part_bits(p, a, n); }
template <int L> TW_INLINE void store_part(half* p, vec<float, L> a, i64 n) {
  store_part_bits((u16*)p, to_half(a), n);
}
template <int L> TW_INLINE void store_part(bf16* p, vec<float, L> a, i64 n) {
  store_part_bits((u16*)p, to_bf16(a), n);
}
template <int L> TW_INLINE void store_part(bool* p, mask<L> a, i64 n) {
  store_part_bits((u8*)p, to_memory<bool, L>(a), n);
}

// ---- strided, stride in elements; gathers ----
template <class T, int... I> TW_INLINE auto pick(const T* p, i64 stride, seq<I...>) {
  return typename vec<T, sizeof...(I)>::raw{p[I * stride]...};
}
template <class T, int L> TW_INLINE vec<T, L> load_strided_bits(const T* p, i64 stride) {
  if constexpr (kind_of<T, L> == 0) return {p[0]};
  else if constexpr (kind_of<T, L> == 1) return {pick(p, stride, seq_to<L>())};
  else return {load_strided_bits<T, L / 2>(p, stride), load_strided_bits<T, L / 2>(p + stride * (L / 2), stride)};
}
template <class T, int L> TW_INLINE reg<T, L> load_strided(const T* p, i64 stride) {
  return from_memory<T, L>(load_strided_bits<memory<T>, L>((const memory<T>*)p, stride));
}
template <class T, int L>
TW_INLINE reg<T, L> load_strided_part(const T* p, i64 stride, i64 n, scalar<T> fill = scalar<T>()) {
  typedef memory<T> M;
  M buffer[L];
  store_bits(buffer, to_memory<T, L>(constant<T, L>(fill)));
  for (i64 i = 0; i < L && i < n; i++) buffer[i] = ((const M*)p)[i * stride];
  return from_memory<T, L>(load_bits<M, L>(buffer));
}
template <class T, class R> TW_INLINE void store_strided_part(T* p, i64 stride, R a, i64 n);
template <class T, int L> TW_INLINE void scatter_lanes(T* p, i64 stride, vec<T, L> a, i64 n) {
  T buffer[L];
  store_bits(buffer, a);
  for (i64 i = 0; i < L && i < n; i++) p[i * stride] = buffer[i];
}
template <class R> constexpr int lanes_of = 0;
template <class T, int L> constexpr int lanes_of<vec<T, L>> = L;
template <int L> constexpr int lanes_of<mask<L>> = L;
template <class T, class R> TW_INLINE void store_strided_part(T* p, i64 stride, R a, i64 n) {
  scatter_lanes((memory<T>*)p, stride, to_memory<T, lanes_of<R>>(a), n);
}
template <class T, class R> TW_INLINE void store_strided(T* p, i64 stride, R a) {
  store_strided_part(p, stride, a, lanes_of<R>);
}
// p[index] where m, else fill. Lanes outside m are not read.
template <class T, int L, class I>
TW_INLINE reg<T, L> gather(const T* p, vec<I, L> index, mask<L> m, scalar<T> fill = scalar<T>()) {
  typedef memory<T> M;
#if defined(TW_AVX512)
  if constexpr (L == 16 && sizeof(M) == 4 && same<I, i32>) {
    vec<M, L> f = to_memory<T, L>(constant<T, L>(fill));
    u16 k = u16(__builtin_ia32_cvtd2mask512(m.m.v));
    return {(typename vec<M, L>::raw)__builtin_ia32_gathersiv16sf((f32x16)f.v, (const float*)p, index.v, k, 4)};
  } else
#endif
  {
    M buffer[L];
    I at[L];
    i32 on[L];
    store_bits(buffer, to_memory<T, L>(constant<T, L>(fill)));
    store_bits(at, index);
    store_bits(on, m.m);
    for (int i = 0; i < L; i++)
      if (on[i]) buffer[i] = ((const M*)p)[at[i]];
    return from_memory<T, L>(load_bits<M, L>(buffer));
  }
}

// A store that goes past the caches when p is aligned; for large outputs that are not read again soon.
template <class T, int L> TW_INLINE void stream_bits(T* p, vec<T, L> a) {
  if constexpr (kind_of<T, L> == 2) {
    stream_bits(p, a.lo);
    stream_bits(p + L / 2, a.hi);
  } else if constexpr (sizeof(T) * L < 16) store_bits(p, a);
  else if ((u64)p % (sizeof(T) * L) != 0) store_bits(p, a);
#if defined(__clang__)
  else __builtin_nontemporal_store(a.v, (typename vec<T, L>::raw*)p);
#elif defined(__SSE2__)
#if defined(TW_AVX512)
  else if constexpr (sizeof(T) * L == 64) __builtin_ia32_movntps512((float*)p, (f32x16)a.v);
#endif
#if defined(__AVX__)
  else if constexpr (sizeof(T) * L == 32) __builtin_ia32_movntps256((float*)p, (f32x8)a.v);
#endif
  else __builtin_ia32_movntps((float*)p, (f32x4)a.v);
#else
  else store_bits(p, a);
#endif
}
template <class T, class R> TW_INLINE void store_stream(T* p, R a, bool past = true) {  // `past`: or an ordinary store
  if (past) stream_bits((memory<T>*)p, to_memory<T, lanes_of<R>>(a));
  else store(p, a);
}
}  // namespace tw
