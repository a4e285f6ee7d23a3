// The exact element type: a double shadow that control follows, residues modulo three primes that carry the value, and
// a sort. Exact programs are slow and print the same loops, masks and pads as the float build; the interpreter defines
// what every operation means, and its elements have this layout.
#pragma once
#include "kernel.h"

// Set when residues cannot follow the shadow: division by a residue of 0, a product of two logarithms.
extern "C" {
__attribute__((visibility("default"), weak)) extern tw::i64 tw_exact_error;
tw::i64 tw_exact_error = 0;
}

namespace tw {
struct __attribute__((packed)) Exact {
  double v;
  u64 w[3];
  u8 log;  // this is the logarithm of the number that the residues belong to
};
typedef unsigned __int128 u128;
constexpr u64 exact_p0 = 4503599627370353, exact_p1 = 6 * exact_p0 + 1, exact_p2 = 12 * exact_p1 + 1;
constexpr u64 exact_prime[3] = {exact_p0, exact_p1, exact_p2};
constexpr u64 exact_root[2] = {64, 4096};  // of order prime[k] modulo prime[k + 1]
constexpr u64 exact_lost = ~u64(0);
struct Words { u64 w[3]; };

// ---- residues ----
TW_INLINE u64 exact_times(u64 a, u64 b, int k) { return u64(u128(a) * b % exact_prime[k]); }
TW_INLINE u64 exact_plus(u64 a, u64 b, int k) { return u64((u128(a) + b) % exact_prime[k]); }
TW_NOINLINE u64 exact_power(u64 base, u64 exponent, int k) {
  u64 r = 1;
  for (; exponent; exponent >>= 1, base = exact_times(base, base, k))
    if (exponent & 1) r = exact_times(r, base, k);
  return r;
}
TW_INLINE u64 exact_inverse(u64 a, int k) { return exact_power(a, exact_prime[k] - 2, k); }
TW_INLINE Words exact_words_of(const Exact& a) { return {{a.w[0], a.w[1], a.w[2]}}; }
template <class F> TW_INLINE Words exact_each(Words a, Words b, F f) {
  Words r;
  for (int k = 0; k < 3; k++)
    r.w[k] = a.w[k] == exact_lost || b.w[k] == exact_lost ? exact_lost : f(a.w[k], b.w[k], k);
  return r;
}
TW_INLINE Words exact_inverted(Words a) {
  for (int k = 0; k < 3; k++)
    if (a.w[k] != exact_lost) a.w[k] = exact_inverse(a.w[k], k);
  return a;
}
// Residues of exp: the power of a root, one word up; the lowest word is lost.
TW_INLINE Words exact_lifted(Words a) {
  Words r = {{exact_lost, exact_lost, exact_lost}};
  for (int k = 0; k < 2; k++)
    if (a.w[k] != exact_lost) r.w[k + 1] = exact_power(exact_root[k], a.w[k], k + 1);
  return r;
}
TW_INLINE Exact exact_pack(double v, Words w, bool log = false) {
  Exact r = {v, {0, 0, 0}, log};
  if (__builtin_isfinite(v))
    for (int k = 0; k < 3; k++) r.w[k] = w.w[k];
  return r;
}

// ---- constants and conversions ----
TW_INLINE u64 exact_residue(i64 a, int k) {
  i64 p = i64(exact_prime[k]), r = a % p;
  return u64(r < 0 ? r + p : r);
}
TW_NOINLINE Exact exact_ratio(i64 a, i64 b) {
  Words w;
  for (int k = 0; k < 3; k++) w.w[k] = exact_times(exact_residue(a, k), exact_inverse(exact_residue(b, k), k), k);
  return exact_pack(double(a) / double(b), w);
}
TW_INLINE Exact exact_shadow(double v) { return exact_pack(v, Words{}); }
TW_INLINE Exact exact_words(double v, u64 a, u64 b, u64 c) { return exact_pack(v, {{a, b, c}}); }
template <class T> TW_INLINE Exact exact_from(T a) {
  Words w;
  for (int k = 0; k < 3; k++) w.w[k] = exact_residue(i64(a), k);
  return exact_pack(double(i64(a)), w);
}
TW_NOINLINE Exact exact_double(double v) {
  if (!__builtin_isfinite(v)) return exact_shadow(v);
  int e;
  u64 whole = u64(__builtin_ldexp(__builtin_frexp(__builtin_fabs(v), &e), 53));
  Words w;
  for (int k = 0; k < 3; k++) {
    u64 p = exact_prime[k], scale = exact_power(2, u64(e < 53 ? 53 - e : e - 53), k);
    u64 t = exact_times(whole % p, e < 53 ? exact_inverse(scale, k) : scale, k);
    w.w[k] = v < 0 && t ? p - t : t;
  }
  return exact_pack(v, w);
}
template <class T> TW_INLINE T exact_to(Exact a) { return to<T>(double(a.v)); }
TW_INLINE Exact at(const Exact* p) { return *p; }
TW_INLINE void put(Exact* p, Exact a) { *p = a; }

// ---- ring and field ----
TW_INLINE Words exact_as_log(const Exact& a) { return a.log ? exact_words_of(a) : exact_lifted(exact_words_of(a)); }
TW_NOINLINE Exact operator+(Exact a, Exact b) {
  if (a.log || b.log) return exact_pack(a.v + b.v, exact_each(exact_as_log(a), exact_as_log(b), exact_times), true);
  return exact_pack(a.v + b.v, exact_each(exact_words_of(a), exact_words_of(b), exact_plus));
}
TW_NOINLINE Exact operator-(Exact a) {
  Words w = exact_words_of(a);
  if (a.log) return exact_pack(-a.v, exact_inverted(w), true);
  for (int k = 0; k < 3; k++)
    if (w.w[k] != exact_lost && w.w[k]) w.w[k] = exact_prime[k] - w.w[k];
  return exact_pack(-a.v, w);
}
TW_INLINE Exact operator-(Exact a, Exact b) { return a + -b; }
// c * log(E) = log(E^c), for the part of E in the subgroup on which the exponent is defined.
TW_NOINLINE Words exact_log_times(Words log, Words c) {
  constexpr u64 cofactor[2] = {6, 12};
  Words r = {{exact_lost, exact_lost, exact_lost}};
  for (int k = 0; k < 2; k++)
    if (log.w[k + 1] != exact_lost && c.w[k] != exact_lost) {
      u64 project = cofactor[k] * exact_inverse(cofactor[k], k);
      r.w[k + 1] = exact_power(exact_power(log.w[k + 1], project, k + 1), c.w[k], k + 1);
    }
  return r;
}
TW_NOINLINE Exact operator*(Exact a, Exact b) {
  double v = a.v * b.v;
  if (a.log && b.log && __builtin_isfinite(v)) tw_exact_error = 1;
  if (b.log) return exact_pack(v, exact_log_times(exact_words_of(b), exact_words_of(a)), true);
  if (a.log) return exact_pack(v, exact_log_times(exact_words_of(a), exact_words_of(b)), true);
  return exact_pack(v, exact_each(exact_words_of(a), exact_words_of(b), exact_times));
}
TW_NOINLINE Exact reciprocal(Exact a) {
  bool finite = __builtin_isfinite(a.v);
  if (finite && (a.log || (a.v != 0 && !(a.w[0] && a.w[1] && a.w[2])))) tw_exact_error = 1;
  return exact_pack(1.0 / a.v, finite ? exact_inverted(exact_words_of(a)) : Words{});
}
TW_INLINE Exact fma(Exact a, Exact b, Exact c) { return a * b + c; }
TW_INLINE Exact operator/(Exact a, Exact b) {
  Exact r = a * reciprocal(b);
  return exact_pack(a.v / b.v, exact_words_of(r), r.log);
}

// ---- exp and log ----
TW_NOINLINE Exact exp(Exact a) {
  double v = __builtin_exp(a.v);
  return exact_pack(v, a.v == -__builtin_inf() ? Words{} : exact_as_log(a));
}
TW_NOINLINE Exact log(Exact a) {
  if (a.log && __builtin_isfinite(a.v)) tw_exact_error = 1;
  return exact_pack(__builtin_log(a.v), {{exact_lost, a.w[1], a.w[2]}}, true);
}

// ---- opaque functions: a fixed scrambling of every residue, named by the checksum of the function's name ----
constexpr u64 exact_name(const char* s) {
  u32 c = ~u32(0);
  for (; *s; s++) {
    c ^= u8(*s);
    for (int i = 0; i < 8; i++) c = (c >> 1) ^ (c & 1 ? 0xEDB88320u : 0u);
  }
  return u32(~c);
}
TW_INLINE u64 exact_hash(u64 t, u64 seed, int k) {
  u64 z = t + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) % exact_prime[k];
}
TW_NOINLINE Words exact_scrambled(Words sum, Exact a, u64 seed) {
  u64 bits;
  double v = a.v;
  __builtin_memcpy(&bits, &v, 8);
  for (int k = 0; k < 3; k++) {
    u64 t = __builtin_isfinite(v) ? a.w[k] : bits;
    if (t == exact_lost || sum.w[k] == exact_lost) sum.w[k] = exact_lost;
    else sum.w[k] = exact_plus(exact_plus(sum.w[k], exact_hash(t, seed, k), k), a.log, k);
  }
  return sum;
}
#define TW_TAG(name, builtin)                                                                       \
  TW_INLINE Exact name(Exact a) {                                                                   \
    return exact_pack(builtin(a.v), exact_scrambled(Words{}, a, 8 * exact_name(#name)));            \
  }
#define TW_TAG_PAIR(label, name, builtin)                                                           \
  TW_INLINE Exact label(Exact a, Exact b) {                                                         \
    Words w = exact_scrambled(Words{}, a, 8 * exact_name(name));                                    \
    return exact_pack(builtin(a.v, b.v), exact_scrambled(w, b, 8 * exact_name(name) + 1));          \
  }
TW_TAG(sqrt, __builtin_sqrt) TW_TAG(erf, __builtin_erf) TW_TAG(tanh, __builtin_tanh) TW_TAG(sin, __builtin_sin)
TW_TAG(cos, __builtin_cos) TW_TAG(tan, __builtin_tan) TW_TAG(asin, __builtin_asin) TW_TAG(acos, __builtin_acos)
TW_TAG(atan, __builtin_atan) TW_TAG(sinh, __builtin_sinh) TW_TAG(cosh, __builtin_cosh) TW_TAG(asinh, __builtin_asinh)
TW_TAG(acosh, __builtin_acosh) TW_TAG(atanh, __builtin_atanh)
TW_TAG_PAIR(atan2, "atan2", __builtin_atan2)
TW_TAG_PAIR(exact_any_power, "pow", __builtin_pow)
#undef TW_TAG
#undef TW_TAG_PAIR
TW_INLINE Exact exact_atom(double v, const char* name) {
  u64 t = exact_name(name);
  return exact_words(v, exact_hash(t, 77, 0), exact_hash(t, 77, 1), exact_hash(t, 77, 2));
}

// ---- what is made of them ----
TW_INLINE Exact exact_one() { return exact_words(1.0, 1, 1, 1); }
TW_INLINE Exact exp2(Exact a) { return exp(a * exact_atom(0.6931471805599453, "ln 2")); }
TW_INLINE Exact expm1(Exact a) { return exp(a) - exact_one(); }
TW_INLINE Exact log1p(Exact a) { return log(a + exact_one()); }
TW_INLINE Exact log2(Exact a) { return log(a) / exact_atom(0.6931471805599453, "ln 2"); }
TW_INLINE Exact log10(Exact a) { return log(a) / exact_atom(2.302585092994046, "ln 10"); }
TW_INLINE Exact sigmoid(Exact a) { return reciprocal(exact_one() + exp(-a)); }
TW_INLINE Exact rsqrt(Exact a) { return reciprocal(sqrt(a)); }
TW_INLINE Exact erfc(Exact a) { return exact_one() - erf(a); }
TW_INLINE Exact pow(Exact a, Exact b) {
  Exact r = a;
  if (b.v == 1 || b.v == 2 || b.v == 3 || b.v == 4) {
    for (int i = 1; i < int(b.v); i++) r = r * a;
    return r;
  }
  return exact_any_power(a, b);
}
TW_INLINE Exact abs(Exact a) { return a.v < 0 ? -a : a; }
TW_INLINE Exact floor(Exact a) { return exact_double(__builtin_floor(a.v)); }
TW_INLINE Exact ceil(Exact a) { return exact_double(__builtin_ceil(a.v)); }
TW_INLINE Exact trunc(Exact a) { return exact_double(__builtin_trunc(a.v)); }
TW_INLINE Exact round_even(Exact a) { return exact_double(__builtin_rint(a.v)); }
TW_INLINE Exact sign(Exact a) { return exact_from(i64(a.v > 0) - i64(a.v < 0)); }
TW_INLINE Exact floor_divide(Exact a, Exact b) { return exact_double(__builtin_floor(a.v / b.v)); }
TW_INLINE Exact trunc_divide(Exact a, Exact b) { return exact_double(__builtin_trunc(a.v / b.v)); }
TW_INLINE Exact remainder(Exact a, Exact b) { return a - b * floor_divide(a, b); }
TW_INLINE Exact fmod(Exact a, Exact b) { return a - b * trunc_divide(a, b); }

// ---- control follows the shadow ----
#define TW_SHADOW(op) \
  TW_INLINE bool operator op(Exact a, Exact b) { return a.v op b.v; }
TW_SHADOW(<) TW_SHADOW(<=) TW_SHADOW(>) TW_SHADOW(>=) TW_SHADOW(==) TW_SHADOW(!=)
#undef TW_SHADOW
TW_INLINE bool is_nan(Exact a) { return a.v != a.v; }
TW_INLINE bool is_inf(Exact a) { return __builtin_isinf(a.v); }
TW_INLINE Exact maximum(Exact a, Exact b) { return is_nan(a) || (!is_nan(b) && a.v >= b.v) ? a : b; }
TW_INLINE Exact minimum(Exact a, Exact b) { return is_nan(a) || (!is_nan(b) && a.v <= b.v) ? a : b; }
}  // namespace tw
