// Sums of products for strips of a few rows, in fp32: what products and convolutions of our own are made of. All constants and
// structures that they share are here, too; product.cpp says how they are used.
#include "kernel.h"

#define TW_API extern "C" __attribute__((visibility("default")))

using namespace tw;

namespace {
constexpr int lanes = TW_WIDTH / 4;
#if defined(TW_AVX512) || defined(__aarch64__)
constexpr int across = 4, down = 6;  // 24 sums, 4 weights, 1 input: 29 of 32 registers
constexpr i64 chains = 4;            // in a stretch of weights: 128 KiB, which stay in a core's cache beside the rows
#else
constexpr int across = 2, down = 6;  // 12 sums, 2 weights, 1 input: 15 of 16 registers
constexpr i64 chains = 2;            // in a stretch of weights: 16 KiB, which stay in the nearest cache beside the rows
#endif
constexpr int panel = lanes * across;
constexpr i64 chain = 128;
constexpr int line_floats = 16;  // of a line of a cache
constexpr i64 most_rows = 96;
constexpr i64 rows_apart = 4, weights_apart = 1 << 17;  // fewer rows wait for weights; more floats do not stay in a core's cache
constexpr i64 worth_a_thread = 200000;  // operations that take as long as waking a thread
typedef vec<float, lanes> V;
typedef V::raw R;

enum Activation { none, relu, clamp, leaky, gelu, gelu_tanh, silu, hardswish, hardsigmoid, sigmoid_of, tanh_of };

struct Product {
  const float *weights, *bias, *zeros;  // bias (or null) and zeros are as long as they are read
  i64 columns, inner, taps;
  i64 height, width, out_height, out_width;  // of the images; without images (height 0) rows are rows
  i64 kernel_width, stride_y, stride_x, pad_y, pad_x, dilate_y, dilate_x;
  i64 activation;
  float low, high, scale, shift;
  i64 affine;  // whether scale and shift follow the activation
  i64 step, line;  // floats from place to place of an image, and from line to line
  const float* plain;                     // weights as they came: [columns][inner][taps], of a few convolutions
  void* (*scratch)(i64 worker, i64 bytes);  // memory of a worker until its next call
  const Product *first, *then;              // products in front of a convolution and behind it, of some (or null)
};
struct Run {
  const Product* p;
  const float* x;
  const float* added;
  float* out;
  i64 rows, stride, blocks, block_rows, panels, by_panel;
  bool zero;  // whether all of x is: weights are finite (others are not packed), so that all sums are zero as well
};

// How sums are stored: cut at one or both ends, from the registers; else by `finish`. An end that is not there is infinite.
struct Ending {
  V low, high;
  bool direct, both;
};
TW_INLINE Ending ending_of(const Product& p) {
  const bool both = p.activation == clamp, known = !both || (p.low == p.low && p.high == p.high);  // `at_least` wants no NaN
  const float low = both ? p.low : p.activation == relu ? 0.f : -__builtin_inff(), high = both ? p.high : __builtin_inff();
  return {splat<float, lanes>(low), splat<float, lanes>(high), p.activation <= clamp && !p.affine && known, both};
}
TW_INLINE V between(V v, const Ending& e) { return at_most(at_least(v, e.low), e.high); }

inline R broadcast(float a) { return a - R{}; }

// What strips of rows are multiplied with: `taps` runs of n weights, the last one of `last`. Each `group` of them is a chain.
// Addresses of the inputs of two strips are `apart` from each other.
struct Walk {
  i64 taps, n, last, group, strips, apart;
};
// What becomes of the sums of strips. Those of earlier stretches lie in `tile`, in panels, if they are `begun`; without `out`,
// sums are left there. Else out[r][:] = sums[r][:] (+ bias[:] + added[r][:]); what is null is left out. `n` columns are there,
// and what is stored of them is cut as `cut` (or null) says.
struct Ends {
  float* tile;
  bool begun;
  const float *bias, *added;
  float* out;
  i64 step;  // floats between rows of `added` and of `out`
  i64 n;
  const Ending* cut;
};
// What is known of the ends of strips, so that they are short: they stay in tiles; all columns are there, and nothing or
// something is added; or nothing.
enum Known { in_tile, whole, whole_added, unknown };

// Up to `left` of a vector, perhaps none or all.
TW_INLINE R some_of(const float* from, i64 left) {
  return left >= lanes ? load<float, lanes>(from).v : left > 0 ? load_part<float, lanes>(from, left).v : R{};
}
TW_INLINE void store_some(float* to, V v, i64 left) {
  if (left >= lanes) store(to, v);
  else if (left > 0) store_part(to, v, left);
}

#define TW_TILE _Pragma("GCC unroll 8") for (int r = 0; r < M; r++) _Pragma("GCC unroll 8") for (int j = 0; j < J; j++)
// Fetches M rows, `step` floats apart, of J vectors into the core's cache: rows that lie a power of two apart would drive each
// other out of the nearest.
template <int M, int J> TW_INLINE void fetch(const float* from, i64 step) {
  TW_TILE if (j * lanes % line_floats == 0) __builtin_prefetch(from + r * step + j * lanes, 0, 2);
}

// acc[r][:] += a[r][k] * w[:]
template <int M, int J> TW_INLINE void add_products(R (&acc)[M][J], const float* const (&a)[M], i64 k, const float* w) {
  R b[J];
#pragma GCC unroll 8
  for (int j = 0; j < J; j++) b[j] = *(const R*)(w + j * lanes);
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) {
    const R v = broadcast(a[r][k]);
#pragma GCC unroll 8
    for (int j = 0; j < J; j++) acc[r][j] = fused(v, b[j], acc[r][j]);
  }
}

// out[r][:] = sums of M rows, J vectors each (+ bias[:] + added[r][:]), cut.
template <int M, int J, Known K> TW_INLINE void end(R (&acc)[M][J], const Ends& ends, const float* added, float* out) {
  const bool all = K != unknown || ends.n >= J * lanes;
  const i64 step = ends.step;
  if (ends.bias) TW_TILE acc[r][j] = acc[r][j] + load<float, lanes>(ends.bias + j * lanes).v;
  if (K == whole_added || (K == unknown && added)) {
    if (all) TW_TILE acc[r][j] = acc[r][j] + load<float, lanes>(added + r * step + j * lanes).v;
    else TW_TILE acc[r][j] = acc[r][j] + some_of(added + r * step + j * lanes, ends.n - j * lanes);
  }
  if (ends.cut) {
    const V low = ends.cut->low, high = ends.cut->high;
    TW_TILE acc[r][j] = at_least(V{acc[r][j]}, low).v;
    if (ends.cut->both) TW_TILE acc[r][j] = at_most(V{acc[r][j]}, high).v;
  }
  if (all) TW_TILE store(out + r * step + j * lanes, V{acc[r][j]});
  else TW_TILE store_some(out + r * step + j * lanes, V{acc[r][j]}, ends.n - j * lanes);
}

// Ends of sums over taps and k of rows[t][r][k] * weights[t][k][:], on J vectors, for strips of M rows that follow each other.
// While one is summed, the places where the next one ends are fetched, and the line at `ahead`, `step` floats further in each
// turn.
template <int M, int J, Known K>
TW_NOINLINE void sums(const float* const* rows, const Walk& walk, const float* weights, const Ends& ends, const float* ahead, i64 step) {
  const i64 next = M * ends.step;
  const float* added = ends.added;
  float *tile = ends.tile, *out = ends.out;
  const bool fetched = K != in_tile && (K != unknown || out), fetched_added = K == whole_added || (K == unknown && added);
  if (fetched) fetch<M, J>(out, ends.step);
  if (fetched_added) fetch<M, J>(added, ends.step);
  for (i64 s = 0; s < walk.strips; s++, rows += walk.apart, tile += M * panel, out += next) {
    const i64 on = s + 1 < walk.strips ? next : 0;
    if (fetched) fetch<M, J>(out + on, ends.step);
    if (fetched_added) fetch<M, J>(added + on, ends.step);
    const float* w = weights;
    bool more = ends.begun;
    R acc[M][J];
    for (i64 t = 0;; more = true) {
      TW_TILE acc[r][j] = R{};
      for (const i64 stop = min(t + walk.group, walk.taps); t < stop; t++) {
        const float* a[M];
#pragma GCC unroll 8
        for (int r = 0; r < M; r++) a[r] = rows[t * down + r];
        const i64 n = t + 1 < walk.taps ? walk.n : walk.last;
        for (i64 k = 0; k < n; k++, w += panel, ahead += step) {
          __builtin_prefetch(ahead, 0, 2);
          add_products<M, J>(acc, a, k, w);
        }
      }
      if (more) TW_TILE acc[r][j] = *(const R*)(tile + r * panel + j * lanes) + acc[r][j];
      if (t == walk.taps) break;
      TW_TILE *(R*)(tile + r * panel + j * lanes) = acc[r][j];
    }
    if (K == in_tile || (K == unknown && !out)) TW_TILE *(R*)(tile + r * panel + j * lanes) = acc[r][j];
    else end<M, J, K>(acc, ends, added, out);
    if (fetched_added) added += next;
  }
}

// The same for sums of a single chain of n products, whose rows lie `stride` floats apart, from `from` on: without the tables
// and turns that only longer sums need, which take as long as a few products.
template <int M, int J, Known K>
TW_NOINLINE void short_sums_of_rows(const float* from, i64 stride, i64 n, i64 strips, const float* weights, const Ends& ends, const float* ahead, i64 step) {
  const i64 next = M * ends.step;
  const float* added = ends.added;
  float* out = ends.out;
  fetch<M, J>(out, ends.step);
  if (K == whole_added) fetch<M, J>(added, ends.step);
  for (i64 s = 0; s < strips; s++, from += M * stride, out += next) {
    const i64 on = s + 1 < strips ? next : 0;
    fetch<M, J>(out + on, ends.step);
    if (K == whole_added) fetch<M, J>(added + on, ends.step);
    const float* a[M];
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) a[r] = from + r * stride;
    const float* w = weights;
    R acc[M][J];
    TW_TILE acc[r][j] = R{};
    for (i64 k = 0; k < n; k++, w += panel, ahead += step) {
      __builtin_prefetch(ahead, 0, 2);
      add_products<M, J>(acc, a, k, w);
    }
    end<M, J, K>(acc, ends, added, out);
    if (K == whole_added) added += next;
  }
}
#undef TW_TILE

template <int J>
void sums_of(i64 m, const float* const* rows, const Walk& walk, const float* w, const Ends& ends, const float* ahead, i64 step) {
  switch (m) {
    case 1: return sums<1, J, unknown>(rows, walk, w, ends, ahead, step);
    case 2: return sums<2, J, unknown>(rows, walk, w, ends, ahead, step);
    case 3: return sums<3, J, unknown>(rows, walk, w, ends, ahead, step);
    case 4: return sums<4, J, unknown>(rows, walk, w, ends, ahead, step);
    case 5: return sums<5, J, unknown>(rows, walk, w, ends, ahead, step);
  }
  if (!ends.out) sums<6, J, in_tile>(rows, walk, w, ends, ahead, step);
  else if (ends.n < J * lanes) sums<6, J, unknown>(rows, walk, w, ends, ahead, step);
  else if (ends.added) sums<6, J, whole_added>(rows, walk, w, ends, ahead, step);
  else sums<6, J, whole>(rows, walk, w, ends, ahead, step);
}

// Whether there were strips of so many rows to sum so.
template <int J>
bool short_sums(i64 m, const float* from, i64 stride, i64 n, i64 strips, const float* w, const Ends& ends, const float* ahead, i64 step) {
  if (m < 5) return false;
  if (ends.added && m == 6) short_sums_of_rows<6, J, whole_added>(from, stride, n, strips, w, ends, ahead, step);
  else if (ends.added) short_sums_of_rows<5, J, whole_added>(from, stride, n, strips, w, ends, ahead, step);
  else if (m == 6) short_sums_of_rows<6, J, whole>(from, stride, n, strips, w, ends, ahead, step);
  else short_sums_of_rows<5, J, whole>(from, stride, n, strips, w, ends, ahead, step);
  return true;
}
}  // namespace
