// Every function of vec.h as a loop over arrays, for test_vec.py. LANES is set by the including text.
#include "vec.h"

using namespace tw;
#define API extern "C" __attribute__((visibility("default")))
constexpr int L = LANES;

template <class To, class T, class F> static void unary(const T* a, To* b, i64 n, F f) {
  i64 i = 0;
  for (; i + L <= n; i += L) store(b + i, f(load<T, L>(a + i)));
  if (i < n) store_part(b + i, f(load_part<T, L>(a + i, n - i, scalar<T>(1))), n - i);
}
template <class To, class T, class F> static void binary(const T* a, const T* b, To* c, i64 n, F f) {
  i64 i = 0;
  for (; i + L <= n; i += L) store(c + i, f(load<T, L>(a + i), load<T, L>(b + i)));
  if (i < n)
    store_part(c + i, f(load_part<T, L>(a + i, n - i, 1), load_part<T, L>(b + i, n - i, 1)), n - i);
}

#define UNARY(name, T) \
  API void name##_##T(const T* a, T* b, i64 n) { unary(a, b, n, [](auto x) { return name(x); }); }
#define FLOATS(name) UNARY(name, float) UNARY(name, double)
FLOATS(exp) FLOATS(exp2) FLOATS(expm1) FLOATS(log) FLOATS(log2) FLOATS(log10) FLOATS(log1p) FLOATS(tanh)
FLOATS(sigmoid) FLOATS(erf) FLOATS(erfc) FLOATS(lgamma) FLOATS(sin) FLOATS(cos) FLOATS(tan) FLOATS(asin) FLOATS(acos)
FLOATS(atan) FLOATS(sinh) FLOATS(cosh) FLOATS(asinh) FLOATS(acosh) FLOATS(atanh) FLOATS(floor) FLOATS(ceil)
FLOATS(trunc) FLOATS(round_even) FLOATS(sqrt) FLOATS(rsqrt) FLOATS(abs) FLOATS(sign)
UNARY(abs, i8) UNARY(abs, i32) UNARY(abs, i64) UNARY(sign, i8) UNARY(sign, i32) UNARY(sign, i64)

// What rounding takes from a product; 0 where a * b + c cannot be rounded once.
template <class V> static V rounded_off(V a, V b) { return fma(a, b, -(a * b)); }

#define BINARY(name, T)                                                  \
  API void name##_##T(const T* a, const T* b, T* c, i64 n) {             \
    binary(a, b, c, n, [](auto x, auto y) { return name(x, y); });       \
  }
#define BINARY_FLOATS(name) BINARY(name, float) BINARY(name, double)
#define EVERY_INT(m, name) m(name, i8) m(name, i16) m(name, i32) m(name, i64) m(name, u8)
BINARY_FLOATS(maximum) BINARY_FLOATS(minimum) BINARY_FLOATS(fmod) BINARY_FLOATS(remainder) BINARY_FLOATS(floor_divide)
BINARY_FLOATS(pow) BINARY_FLOATS(atan2) BINARY_FLOATS(copysign) BINARY_FLOATS(rounded_off)
EVERY_INT(BINARY, maximum) EVERY_INT(BINARY, minimum) EVERY_INT(BINARY, shift_left) EVERY_INT(BINARY, shift_right)
EVERY_INT(BINARY, pow)

// All of a by the one number d[0].
#define DIVIDED(T)                                                                     \
  API void divided_##T(const T* a, const T* d, T* c, i64 n) {                           \
    unary(a, c, n, [d](auto x) { return divided(x, d[0]); });                           \
  }
DIVIDED(float) DIVIDED(double)

#define OPERATOR(name, op, T)                                             \
  API void name##_##T(const T* a, const T* b, T* c, i64 n) {              \
    binary(a, b, c, n, [](auto x, auto y) { return x op y; });            \
  }
#define COMPARE(name, op, T)                                              \
  API void name##_##T(const T* a, const T* b, bool* c, i64 n) {           \
    binary(a, b, c, n, [](auto x, auto y) { return x op y; });            \
  }
#define NUMBER(T)                                                                                              \
  OPERATOR(add, +, T) OPERATOR(sub, -, T) OPERATOR(mul, *, T) COMPARE(lt, <, T) COMPARE(le, <=, T)             \
  COMPARE(gt, >, T) COMPARE(ge, >=, T) COMPARE(eq, ==, T) COMPARE(ne, !=, T)                                   \
  API void select_##T(const bool* m, const T* a, T* c, i64 n) { /* where(m, a, -a) */                           \
    for (i64 i = 0; i < n; i += L) {                                                                           \
      auto x = load_part<T, L>(a + i, n - i);                                                                  \
      store_part(c + i, select(load_part<bool, L>(m + i, n - i), x, -x), n - i);                               \
    }                                                                                                          \
  }                                                                                                            \
  API void reduce_##T(const T* a, T* c) { /* of L lanes: sum, product, largest, smallest, index of both */     \
    auto x = load<T, L>(a);                                                                                    \
    T best;                                                                                                    \
    c[0] = reduce_add(x), c[1] = reduce_mul(x), c[2] = reduce_max(x), c[3] = reduce_min(x);                    \
    c[4] = T(reduce_arg_max(x, iota<i32, L>(), &best)), c[5] = T(reduce_arg_min(x, iota<i64, L>(), &best));    \
    c[6] = get(x, L - 1);                                                                                      \
  }                                                                                                            \
  API void lanes_##T(const T* a, T* c) { /* prefix sums; reversed; first 0..L-1; takes the larger of a, reversed */ \
    auto x = load<T, L>(a), y = reverse(x);                                                                    \
    store(c, scan_add(x)), store(c + L, y), store(c + 2 * L, iota<T, L>(3, 2));                                \
    store(c + 3 * L, select(takes<true>(x, y), y, x));                                                         \
  }                                                                                                            \
  API void strided_##T(const T* a, i64 s, T* c, i64 n) { /* gather with stride, scatter with stride, part */   \
    store(c, load_strided<T, L>(a, s)), store_strided(c + L, 2, load<T, L>(a));                                \
    store(c + 3 * L, load_strided_part<T, L>(a, s, n, T(7))), store_strided_part(c + 4 * L, 3, load<T, L>(a), n); \
  }                                                                                                            \
  API void gather_##T(const T* a, const i64* at, const bool* m, T* c) {                                        \
    store(c, gather<T, L>(a, load<i64, L>(at), load<bool, L>(m), T(9)));                                       \
    store(c + L, gather<T, L>(a, convert<i32>(load<i64, L>(at)), load<bool, L>(m), T(9)));                     \
  }                                                                                                            \
  API void part_##T(const T* a, T* c, i64 n) {                                                                 \
    auto x = load_part<T, L>(a, n, T(5));                                                                      \
    store_part(c, x, n), store(c + L, x);                                                                      \
  }                                                                                                            \
  API void transpose_##T(const T* a, T* c) {                                                                   \
    vec<T, L> rows[L];                                                                                         \
    for (int i = 0; i < L; i++) rows[i] = load<T, L>(a + i * L);                                               \
    transpose(rows);                                                                                           \
    for (int i = 0; i < L; i++) store_stream(c + i * L, rows[i]);                                              \
    load_transposed(a, L + 3, rows);                                                                           \
    for (int i = 0; i < L; i++) store(c + (L + i) * L, rows[i]);                                               \
  }
NUMBER(float) NUMBER(double) NUMBER(i8) NUMBER(i16) NUMBER(i32) NUMBER(i64) NUMBER(u8)
OPERATOR(div, /, float) OPERATOR(div, /, double)
#define BITS(T) OPERATOR(and, &, T) OPERATOR(or, |, T) OPERATOR(xor, ^, T)
BITS(i8) BITS(i16) BITS(i32) BITS(i64) BITS(u8)

#define DIVISION(name, T)                                                                       \
  API void name##_##T(const T* a, const T* b, T* c, i64 n, i32* error) {                        \
    for (i64 i = 0; i < n; i += L)                                                              \
      store_part(c + i, name(load_part<T, L>(a + i, n - i), load_part<T, L>(b + i, n - i), error, \
                             first_lanes<L>(n - i)), n - i);                                    \
  }
EVERY_INT(DIVISION, div_floor) EVERY_INT(DIVISION, div_trunc) EVERY_INT(DIVISION, mod_floor) EVERY_INT(DIVISION, mod_trunc)

API void logic(const bool* a, const bool* b, bool* c, i64 n) {  // a & b, a | b, a ^ b, !a, where(a, b, !b), any, all
  for (i64 i = 0; i < n; i += L) {
    auto x = load_part<bool, L>(a + i, n - i), y = load_part<bool, L>(b + i, n - i);
    store_part(c + i, x & y, n - i), store_part(c + n + i, x | y, n - i), store_part(c + 2 * n + i, x ^ y, n - i);
    store_part(c + 3 * n + i, !x, n - i), store_part(c + 4 * n + i, select(x, y, ~y), n - i);
    store_part(c + 5 * n + i, splat_mask<L>(any(x & first_lanes<L>(n - i))), n - i);
    store_part(c + 6 * n + i, splat_mask<L>(all(x | ~first_lanes<L>(n - i))), n - i);
  }
}

#define CONVERT(A, B) \
  API void convert_##A##_##B(const A* a, B* b, i64 n) { unary(a, b, n, [](auto x) { return convert<B>(x); }); }
#define CONVERT_FROM(A)                                                                                       \
  CONVERT(A, float) CONVERT(A, double) CONVERT(A, half) CONVERT(A, bf16) CONVERT(A, i8) CONVERT(A, i16)       \
  CONVERT(A, i32) CONVERT(A, i64) CONVERT(A, u8) CONVERT(A, bool)
CONVERT_FROM(float) CONVERT_FROM(double) CONVERT_FROM(half) CONVERT_FROM(bf16) CONVERT_FROM(i8) CONVERT_FROM(i16)
CONVERT_FROM(i32) CONVERT_FROM(i64) CONVERT_FROM(u8) CONVERT_FROM(bool)

// Vectors that the compiler knows, if not at first: -1 in every second lane of the first half, quarter or eighth, else 0.
template <int part, class T> static void known(T* c) {
  for (i64 first = 0; first < L; first += L) {
    auto at = iota<i32, L>(first);
    auto even = (at & splat<i32, L>(1)) == splat<i32, L>(0);
    store(c, select(even & (at < splat<i32, L>(L / part)), splat<T, L>(-1), splat<T, L>(0)));
  }
}
#define KNOWN(T) API void known_##T(T* c) { known<2>(c), known<4>(c + L), known<8>(c + 2 * L); }
KNOWN(float) KNOWN(double) KNOWN(i8) KNOWN(i16) KNOWN(i32) KNOWN(i64)
