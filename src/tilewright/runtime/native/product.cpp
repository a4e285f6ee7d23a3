// Matrix products and convolutions (batch, space, channels innermost) with weights packed ahead of time, in fp32.
//
// A row of the result is an output place; its inputs are `taps` runs of `inner` consecutive floats (one run for a matrix
// product). Weights are packed [columns / panel][taps][inner][panel], so that one step of the inner loop reads one line of
// weights and one float of each row. Sums run over at most `chain` products one after the other, and those partial sums
// are added: the error of one long chain would grow with the root of its length.
#include "kernel.h"

#define TW_API extern "C" __attribute__((visibility("default")))

using namespace tw;

namespace {
constexpr int lanes = TW_WIDTH / 4;
#if defined(TW_AVX512) || defined(__aarch64__)
constexpr int across = 4, down = 6;  // 24 sums, 4 weights, 1 input: 29 of 32 registers
#else
constexpr int across = 2, down = 6;  // 12 sums, 2 weights, 1 input: 15 of 16 registers
#endif
constexpr int panel = lanes * across;
constexpr i64 chain = 192;
constexpr i64 most_rows = 96;
typedef vec<float, lanes> V;
typedef V::raw R;

enum Activation { none, relu, clamp, leaky, gelu, gelu_tanh, silu, hardswish, hardsigmoid, sigmoid_of, tanh_of };

struct Product {
  const float *weights, *bias, *zeros;  // bias (or null) and zeros are as long as they are read
  i64 columns, inner, taps;
  i64 height, width, out_height, out_width;  // of the images; without images (height 0) rows are rows
  i64 kernel_width, stride_y, stride_x, pad_y, pad_x, dilate_y, dilate_x;
  i64 activation;
  float low, high;
};
struct Run {
  const Product* p;
  const float* x;
  const float* added;
  float* out;
  i64 rows, stride, blocks, block_rows, panels, by_panel;
};

inline R broadcast(float a) { return a - R{}; }

// tile[r][:] = (more ? tile[r][:] : 0) + sum over taps and k < n of rows[t][r][k] * weights[t][k][:], on J vectors
template <int M, int J>
TW_NOINLINE void sums(const float* const* rows, i64 taps, i64 n, const float* w, float* tile, bool more) {
  R acc[M][J];
#pragma GCC unroll 8
  for (int r = 0; r < M; r++)
#pragma GCC unroll 8
    for (int j = 0; j < J; j++) acc[r][j] = R{};
  for (i64 t = 0; t < taps; t++) {
    const float* a[M];
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) a[r] = rows[t * down + r];
    for (i64 k = 0; k < n; k++) {
      R b[J];
#pragma GCC unroll 8
      for (int j = 0; j < J; j++) b[j] = *(const R*)(w + j * lanes);
#pragma GCC unroll 8
      for (int r = 0; r < M; r++) {
        const R v = broadcast(a[r][k]);
#pragma GCC unroll 8
        for (int j = 0; j < J; j++) acc[r][j] += v * b[j];
      }
      w += panel;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; r++)
#pragma GCC unroll 8
    for (int j = 0; j < J; j++) {
      R& at = *(R*)(tile + r * panel + j * lanes);
      at = more ? at + acc[r][j] : acc[r][j];
    }
}

template <int J> void sums_of(int m, const float* const* rows, i64 taps, i64 n, const float* w, float* tile, bool more) {
  switch (m) {
    case 1: return sums<1, J>(rows, taps, n, w, tile, more);
    case 2: return sums<2, J>(rows, taps, n, w, tile, more);
    case 3: return sums<3, J>(rows, taps, n, w, tile, more);
    case 4: return sums<4, J>(rows, taps, n, w, tile, more);
    case 5: return sums<5, J>(rows, taps, n, w, tile, more);
    default: return sums<6, J>(rows, taps, n, w, tile, more);
  }
}

template <int A> TW_INLINE V act(V v, const Product& p) {
  const V zero = splat<float, lanes>(0.f), one = splat<float, lanes>(1.f), half = splat<float, lanes>(0.5f);
  const V low = splat<float, lanes>(p.low), high = splat<float, lanes>(p.high);
  if constexpr (A == relu) return maximum(v, zero);
  else if constexpr (A == clamp) return minimum(maximum(v, low), high);
  else if constexpr (A == leaky) return select(v > zero, v, v * low);
  else if constexpr (A == gelu) return half * v * (one + erf(v * splat<float, lanes>(0.70710678118654752f)));
  else if constexpr (A == gelu_tanh)
    return half * v * (one + tanh(splat<float, lanes>(0.79788456080286536f) * (v + splat<float, lanes>(0.044715f) * (v * v * v))));
  else if constexpr (A == silu) return v * sigmoid(v);
  else if constexpr (A == hardswish || A == hardsigmoid) {
    const V six = splat<float, lanes>(6.f);
    const V part = minimum(maximum(v + splat<float, lanes>(3.f), zero), six);
    return (A == hardswish ? v * part : part) / six;
  } else if constexpr (A == sigmoid_of) return sigmoid(v);
  else if constexpr (A == tanh_of) return tanh(v);
  else return v;
}

// out = act(tile + bias + added) on m rows and n <= panel columns
template <int A>
TW_NOINLINE void finish(const Product& p, const float* tile, int m, i64 n, const float* bias, const float* added, float* out, i64 step) {
  for (int r = 0; r < m; r++)
    for (i64 j = 0; j < n; j += lanes) {
      V v = load<float, lanes>(tile + r * panel + j);
      if (bias) v = v + load<float, lanes>(bias + j);
      const i64 left = n - j, at = r * step + j;
      if (left >= lanes) {
        if (added) v = v + load<float, lanes>(added + at);
        store(out + at, act<A>(v, p));
      } else {
        if (added) v = v + load_part<float, lanes>(added + at, left);
        store_part(out + at, act<A>(v, p), left);
      }
    }
}

void finish_of(const Product& p, const float* tile, int m, i64 n, const float* bias, const float* added, float* out, i64 step) {
  switch (p.activation) {
#define TW_CASE(A) case A: return finish<A>(p, tile, m, n, bias, added, out, step);
    TW_CASE(relu) TW_CASE(clamp) TW_CASE(leaky) TW_CASE(gelu) TW_CASE(gelu_tanh) TW_CASE(silu) TW_CASE(hardswish)
    TW_CASE(hardsigmoid) TW_CASE(sigmoid_of) TW_CASE(tanh_of)
#undef TW_CASE
    default: return finish<none>(p, tile, m, n, bias, added, out, step);
  }
}

// Where the inputs of m output places from `row` on lie, for `taps` taps from `tap` on, k floats behind their start:
// rows[tap][down]
void locate(const Run& run, i64 row, int m, i64 tap, i64 taps, i64 k, const float** rows) {
  const Product& p = *run.p;
  if (p.height == 0) {
    for (int r = 0; r < m; r++) rows[r] = run.x + (row + r) * run.stride + k;
    return;
  }
  i64 x = row % p.out_width, y = row / p.out_width % p.out_height, image = row / p.out_width / p.out_height;
  for (int r = 0; r < m; r++) {
    i64 down_by = tap / p.kernel_width, right_by = tap % p.kernel_width;
    for (i64 t = 0; t < taps; t++) {
      const i64 iy = y * p.stride_y - p.pad_y + down_by * p.dilate_y, ix = x * p.stride_x - p.pad_x + right_by * p.dilate_x;
      const bool inside = u64(iy) < u64(p.height) && u64(ix) < u64(p.width);
      rows[t * down + r] = inside ? run.x + ((image * p.height + iy) * p.width + ix) * p.inner + k : p.zeros;
      if (++right_by == p.kernel_width) right_by = 0, down_by++;
    }
    if (++x == p.out_width) {
      x = 0;
      if (++y == p.out_height) y = 0, image++;
    }
  }
}

// One panel of columns for the rows from `first` to `last`, at most `most_rows`. A chain of weights stays in the cache
// while all rows pass it.
template <int J> void work(const Run& run, i64 column, i64 first, i64 last) {
  const Product& p = *run.p;
  const i64 start = column * panel, n = min(i64(panel), p.columns - start);
  const i64 count = last - first, strips = (count + down - 1) / down, length = p.inner * p.taps;
  const i64 group = min(p.taps, max(i64(1), chain / p.inner)), pieces = (p.inner + chain - 1) / chain;
  const bool whole = group == p.taps && pieces == 1;
  const float* weights = p.weights + column * length * panel;
  const float* bias = p.bias ? p.bias + start : nullptr;
  alignas(64) float tiles[most_rows * panel];
  const float* rows[chain * down];
  const auto ended = [&](i64 row, int m, const float* tile) {
    const i64 at = row * p.columns + start;
    finish_of(p, tile, m, n, bias, run.added ? run.added + at : nullptr, run.out + at, p.columns);
  };
  for (i64 t = 0; t < p.taps; t += group)
    for (i64 c = 0; c < pieces; c++) {
      const i64 k = p.inner * c / pieces, n_k = p.inner * (c + 1) / pieces - k, taps = min(group, p.taps - t);
      for (i64 s = 0; s < strips; s++) {
        const i64 row = first + count * s / strips;
        const int m = int(first + count * (s + 1) / strips - row);
        float* tile = tiles + (whole ? 0 : row - first) * panel;
        locate(run, row, m, t, taps, k, rows);
        sums_of<J>(m, rows, taps, n_k, weights + (t * p.inner + k) * panel, tile, t + c > 0);
        if (whole) ended(row, m, tile);
      }
    }
  for (i64 s = 0; s < strips && !whole; s++) {
    const i64 row = first + count * s / strips;
    ended(row, int(first + count * (s + 1) / strips - row), tiles + (row - first) * panel);
  }
}

void task(void* context, i64 begin, i64 end, i64) {
  const Run& run = *(const Run*)context;
  for (i64 i = begin; i < end; i++) {
    const i64 column = run.by_panel ? i / run.blocks : i % run.panels, block = run.by_panel ? i % run.blocks : i / run.panels;
    const i64 first = block * run.block_rows, last = min(run.rows, first + run.block_rows);
    if (run.p->columns - column * panel <= panel / 2) work<across / 2>(run, column, first, last);
    else work<across>(run, column, first, last);
  }
}

void (*parallel)(void (*task)(void*, i64, i64, i64), void* context, i64 count, i64 grain, int more);
void (*resize)(i64 n, int pin);
}  // namespace

// Addresses of the thread pool's functions; called once, before anything else.
TW_API void tw_attach(void* parallel_at, void* resize_at) {
  parallel = (decltype(parallel))parallel_at;
  resize = (decltype(resize))resize_at;
}

TW_API i64 tw_panel(void) { return panel; }

// out [rows][columns] = act(x times weights + bias + added), `stride` floats between the rows of x (no images); `added`
// may be null, or out itself. `threads` as for launches.
TW_API void tw_product(const Product* p, const float* x, i64 rows, i64 stride, const float* added, float* out, i64 threads) {
  if (rows <= 0 || p->columns <= 0) return;
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  const i64 panels = (p->columns + panel - 1) / panel, length = p->inner * p->taps;
  // Inputs of a block stay in a core's cache beside a panel of weights; enough tasks for all threads.
  i64 block = min(most_rows, max(i64(down), (1 << 17) / max(i64(1), p->inner) / down * down));
  const i64 tasks = threads == 1 ? 1 : 6 * threads;
  while (block > 4 * down && (rows + block - 1) / block * panels < tasks) block = block / 2 / down * down;
  const i64 blocks = (rows + block - 1) / block;
  block = (rows + blocks - 1) / blocks;
  Run run = {p, x, added, out, rows, stride, (rows + block - 1) / block, block, panels, 0};
  run.by_panel = length * p->columns > rows * p->inner;
  const i64 work_of_task = 2 * block * panel * length, grain = max(i64(1), 200000 / max(i64(1), work_of_task));
  parallel(task, &run, run.blocks * panels, grain, 1);
}
