// Products of blocks held in registers and near caches. Included by kernel.h.
#pragma once
#include "vec.h"

namespace tw {
// What the sums of a product start from: nothing, the block itself, or the block with each column times a factor.
enum class Start { nothing, block, scaled };

// acc[r][j] = start + sum over k < depth of a[r][k] * b[k][j], for M rows (of which `rows` are there; others repeat the
// last one and are not stored) and J registers. `width` registers lie between rows of acc, and of b. Near: rows of a are
// neighbours in memory, all of them are there.
template <int M, int J, Start S, bool Near, class T, int L>
TW_NOINLINE void dot_strip(
    vec<T, L>* acc, i64 rows, i64 width, const T* a, i64 row_step, i64 k_step, const vec<T, L>* b, const vec<T, L>* factor, i64 depth) {
  typedef typename vec<T, L>::raw R;
  R sum[M][J];
  const T* at[M];
#pragma GCC unroll 16
  for (int r = 0; r < M; r++) {
    const i64 here = Near || r < rows ? r : rows - 1;
    at[r] = a + here * row_step;
#pragma GCC unroll 4
    for (int j = 0; j < J; j++)
      sum[r][j] = S == Start::nothing ? R{} : S == Start::block ? acc[here * width + j].v : acc[here * width + j].v * factor[j].v;
  }
  for (i64 k = 0; k < depth; k++) {
    R w[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) w[j] = b[j].v;
#pragma GCC unroll 16
    for (int r = 0; r < M; r++) {
      const R x = (Near ? a[r] : *at[r]) - R{};
      if (!Near) at[r] += k_step;
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) sum[r][j] = fused(x, w[j], sum[r][j]);
    }
    a += k_step;
    b += width;
  }
#pragma GCC unroll 16
  for (int r = 0; r < M; r++)
    if (Near || r < rows)
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) acc[r * width + j].v = sum[r][j];
}

template <class V> TW_INLINE void clear(V* at, i64 count) {
  for (i64 i = 0; i < count; i++) at[i] = V{};
}

// The product of a whole block: `rows` rows of `width` registers (a multiple of J).
template <int M, int J, Start S, class T, int L>
TW_INLINE void dot(
    vec<T, L>* acc, i64 rows, i64 width, const T* a, i64 row_step, i64 k_step, const vec<T, L>* b, const vec<T, L>* factor, i64 depth) {
  for (i64 j = 0; j < width; j += J)
    for (i64 r = 0; r < rows; r += M) {
      vec<T, L>* to = acc + r * width + j;
      const T* from = a + r * row_step;
      if (row_step == 1 && rows - r >= M) dot_strip<M, J, S, true>(to, M, width, from, 1, k_step, b + j, factor + j, depth);
      else dot_strip<M, J, S, false>(to, rows - r, width, from, row_step, k_step, b + j, factor + j, depth);
    }
}
// The same on single numbers, where there are no registers of several.
template <int M, int J, Start S, class T>
TW_INLINE void dot(
    T* acc, i64 rows, i64 width, const T* a, i64 row_step, i64 k_step, const T* b, const T* factor, i64 depth) {
  for (i64 r = 0; r < rows; r++)
    for (i64 j = 0; j < width; j++) {
      T sum = S == Start::nothing ? T{} : S == Start::block ? acc[r * width + j] : acc[r * width + j] * factor[j];
      for (i64 k = 0; k < depth; k++) sum = fma(a[r * row_step + k * k_step], b[k * width + j], sum);
      acc[r * width + j] = sum;
    }
}
}  // namespace tw
