// Products of blocks held in registers and near caches. Included by kernel.h.
#pragma once
#include "vec.h"

namespace tw {
// What the sums of a product start from: nothing, the block itself, or the block with each column times a factor.
enum class Start { nothing, block, scaled };

// acc[r][j] = start + sum over k < depth of a[r][k] * b[k][j], for M rows (of which `rows` are there; others repeat the
// last one and are not stored) and J registers. `width` registers lie between rows of acc, and of b. Near: rows of a are
// neighbours in memory, all of them are there. With a `chain`, so many products are added up at a time, and what each
// such chain has summed is added to the block: in one chain of hundreds each step rounds by the size of the whole.
template <int M, int J, Start S, bool Near, bool Chained, class T, int L>
TW_NOINLINE void dot_strip(
    vec<T, L>* acc, i64 rows, i64 width, const T* a, i64 row_step, i64 k_step, const vec<T, L>* b, const vec<T, L>* factor, i64 depth,
    i64 chain) {
  typedef typename vec<T, L>::raw R;
  const T* at[M];
#pragma GCC unroll 16
  for (int r = 0; r < M; r++) at[r] = a + (Near || r < rows ? r : rows - 1) * row_step;
  i64 k = 0;
  do {
    const bool first = k == 0;
    const i64 stop = Chained && depth - k > chain ? k + chain : depth;
    R sum[M][J];
#pragma GCC unroll 16
    for (int r = 0; r < M; r++) {
      const i64 here = Near || r < rows ? r : rows - 1;
#pragma GCC unroll 4
      for (int j = 0; j < J; j++)
        sum[r][j] = Chained || S == Start::nothing ? R{} : S == Start::block ? acc[here * width + j].v : acc[here * width + j].v * factor[j].v;
    }
    for (; k < stop; k++) {
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
        for (int j = 0; j < J; j++) {
          R& to = acc[r * width + j].v;
          if (!Chained || (first && S == Start::nothing)) to = sum[r][j];
          else to = first && S == Start::scaled ? fused(to, factor[j].v, sum[r][j]) : to + sum[r][j];
        }
  } while (Chained && k < depth);
}

template <class V> TW_INLINE void clear(V* at, i64 count) {
  for (i64 i = 0; i < count; i++) at[i] = V{};
}

// The product of a whole block: `rows` rows of `width` registers (a multiple of J).
template <int M, int J, Start S, i64 Chain = 0, class T, int L>
TW_INLINE void dot(
    vec<T, L>* acc, i64 rows, i64 width, const T* a, i64 row_step, i64 k_step, const vec<T, L>* b, const vec<T, L>* factor, i64 depth) {
  constexpr bool C = Chain > 0;
  for (i64 j = 0; j < width; j += J)
    for (i64 r = 0; r < rows; r += M) {
      vec<T, L>* to = acc + r * width + j;
      const T* from = a + r * row_step;
      if (row_step == 1 && rows - r >= M) dot_strip<M, J, S, true, C>(to, M, width, from, 1, k_step, b + j, factor + j, depth, Chain);
      else dot_strip<M, J, S, false, C>(to, rows - r, width, from, row_step, k_step, b + j, factor + j, depth, Chain);
    }
}
// The same on single numbers, where there are no registers of several.
template <int M, int J, Start S, i64 Chain = 0, class T>
TW_INLINE void dot(
    T* acc, i64 rows, i64 width, const T* a, i64 row_step, i64 k_step, const T* b, const T* factor, i64 depth) {
  for (i64 r = 0; r < rows; r++)
    for (i64 j = 0; j < width; j++) {
      T sum = S == Start::nothing ? T{} : S == Start::block ? acc[r * width + j] : acc[r * width + j] * factor[j];
      for (i64 k = 0; k < depth;) {
        const i64 stop = Chain > 0 && depth - k > Chain ? k + Chain : depth;
        T part = Chain > 0 ? T{} : sum;
        for (; k < stop; k++) part = fma(a[r * row_step + k * k_step], b[k * width + j], part);
        sum = Chain > 0 ? sum + part : part;
      }
      acc[r * width + j] = sum;
    }
}
}  // namespace tw
