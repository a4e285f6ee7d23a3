// Vectors and mathematics for generated C++: no other header, GCC >= 12 or Clang >= 14, C++17, any target.
//
//   -std=c++17 -O2 -fno-math-errno -fno-trapping-math -fwrapv -ffp-contract=off, never -ffast-math. Only `fma` adds a
//   product with one rounding; nothing here is reassociated. The width follows the target: AVX-512 64 bytes, AVX2 32,
//   else 16.
//
// Everything is in namespace tw. One loop nest uses one number of lanes L (a power of two, 1 included) for every type.
// T is a memory type: float, double, i8, i16, i32, i64, u8 .. u64, half, bf16, bool. What a register holds for it is
// reg<T, L>: vec<float, L> for half and bf16, mask<L> for bool, else vec<T, L>. scalar<T> is the type of one lane.
//
// Memory (no alignment needed; n lanes, clamped to 0 .. L, nothing beyond them is touched; strides in elements)
//   reg<T,L> load<T, L>(const T* p)                       void store(T* p, v)
//   reg<T,L> load_part<T, L>(p, i64 n, scalar<T> fill=0)  void store_part(T* p, v, i64 n)
//   reg<T,L> load_strided<T, L>(p, i64 stride)            void store_strided(T* p, i64 stride, v)
//   reg<T,L> load_strided_part<T, L>(p, stride, n, fill)  void store_strided_part(T* p, stride, v, n)
//   reg<T,L> gather<T, L>(p, vec<I,L> index, mask<L> m, scalar<T> fill=0)      void store_stream(T* p, v)  (non-temporal)
// Making and taking apart
//   splat<T, L>(x)  splat_mask<L>(bool)  constant<T, L>(scalar<T>)  iota<T, L>(first=0, step=1)  first_lanes<L>(n) -> mask
//   get(v, lane)  lo(v) hi(v) join(a, b)  reverse(v)
// Types
//   convert<To>(v)   torch's cast from vec or mask (bool: != 0; half, bf16: rounds, stays float)     bitcast<To>(v)
// Operators on equal types: + - * / (floats only) unary -, & | ^ ~ on integers; < <= > >= == != -> mask; & | ^ ~ ! on masks
//   fma(a, b, c) (a * b + c, one rounding where the machine has it)  select(m, a, b)  keep(m, a) (else 0)  any(m)  all(m)
// Arithmetic: maximum minimum (NaN wins)  larger smaller (b where unordered; one instruction)  abs copysign sign sqrt rsqrt  floor ceil trunc round_even
//   fmod remainder floor_divide (floats)  div_floor div_trunc mod_floor mod_trunc (integers: a, b, i32* error[, active])
//   shift_left shift_right (torch's rule for counts out of range)   divided(v, T d): v / d for one float d
// Functions (errors in vec_math.h): exp exp2 expm1 log log2 log10 log1p tanh sigmoid erf erfc lgamma sin cos tan asin acos
//   atan atan2 sinh cosh tanh asinh acosh atanh pow (also integers)
// Across lanes, in an order that is the same on every machine
//   reduce_add reduce_mul reduce_max reduce_min (-> one lane)  scan_add (inclusive)  transpose(vec<T,L> (&rows)[L])
//   load_transposed(const T* p, i64 stride, vec<T,L> (&rows)[L]): from rows of memory that are `stride` elements apart
//   reduce_arg_max reduce_arg_min(v, vec<I,L> index, T* best) -> I   takes<Max>(a, b) -> mask: b replaces a
#pragma once
#include "vec_core.h"
#include "vec_memory.h"
#include "vec_cross.h"
#include "vec_arith.h"
#include "vec_tables.h"
#include "vec_math.h"
