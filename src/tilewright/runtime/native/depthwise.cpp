// Convolutions of each channel on its own, in fp32. Follows product.cpp in its unit.
//
// Sums of some rows and places side by side stay in registers, so that what they share of the image is read once. Where they
// read is a table of addresses: outside of the image lies a line of zeros.

namespace {
constexpr i64 most_taps = 64;
constexpr i64 slower = 6;  // times as long as a product of matrices takes: most of it is memory

// How sums are stored: as they are, or cut at both ends, from the registers; else by `finish`.
struct Ending {
  V low, high;
  bool direct, cut;
  i64 columns;
};
TW_INLINE Ending ending_of(const Product& p) {
  const bool open = p.activation == relu;
  const V low = splat<float, lanes>(open ? 0.f : p.low), high = splat<float, lanes>(open ? __builtin_inff() : p.high);
  return {low, high, p.activation <= clamp && !p.affine, p.activation != none, p.columns};
}

// Stores sums of Q places side by side, n <= lanes channels of each.
template <int Q> TW_INLINE void ended(const Product& p, const Ending& e, const R* sum, i64 n, float* out) {
  if (e.direct && n == lanes) {
    if (e.cut) {
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) store(out + q * e.columns, minimum(maximum(V{sum[q]}, e.low), e.high));
    } else {
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) store(out + q * e.columns, V{sum[q]});
    }
    return;
  }
  alignas(64) float tile[Q * panel];
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) *(R*)(tile + q * panel) = sum[q];
  finish_of(p, tile, Q, n, nullptr, nullptr, out, e.columns);
}

#if defined(TW_AVX512) || defined(__aarch64__)
constexpr int rows_together = 4;  // with 4 places: 16 sums, at most 13 of the image, a weight
#else
constexpr int rows_together = 2;
#endif
constexpr int places_together = 4;

// Up to `rows_together` rows of Q places, for windows of K x K that move by S: at[row][column] is where the image lies; `line`
// floats lie between the rows of the result.
template <int K, int S, int Q> TW_NOINLINE void block(const Product& p, const float* const* at, int rows, float* out, i64 line) {
  constexpr int wide = (Q - 1) * S + K;
  const i64 columns = p.columns, step = round_up(columns, lanes);
  const float *weights = p.weights, *bias = p.bias;
  const Ending ending = ending_of(p);
  const int high = (rows - 1) * S + K;
  for (i64 c = 0;;) {
    const R first = bias ? load<float, lanes>(bias + c).v : R{};
    R sum[rows_together * Q];
#pragma GCC unroll 16
    for (int q = 0; q < rows_together * Q; q++) sum[q] = first;
    const float* const* place = at;
    for (int i = 0; i < high; i++, place += wide) {
      R v[wide];
#pragma GCC unroll 16
      for (int j = 0; j < wide; j++) v[j] = load<float, lanes>(place[j] + c).v;
#pragma GCC unroll 4
      for (int r = 0; r < rows_together; r++) {
        const int down_by = i - r * S;
        if (down_by < 0 || down_by >= K) continue;
        const float* w = weights + down_by * K * step + c;
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) {
          const R weight = load<float, lanes>(w + k * step).v;
#pragma GCC unroll 4
          for (int q = 0; q < Q; q++) sum[r * Q + q] = fused(v[q * S + k], weight, sum[r * Q + q]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows_together; r++)
      if (r < rows) ended<Q>(p, ending, sum + r * Q, lanes, out + r * line + c);
    if (c + lanes >= columns) return;
    c = min(c + lanes, columns - lanes);  // the last channels are done twice rather than in part
  }
}

// Blocks [begin, end) of places.
template <int K, int S> void blocks(void* context, i64 begin, i64 end, i64) {
  const Run& run = *(const Run*)context;
  const Product& p = *run.p;
  const i64 line = p.out_width * p.columns;
  const float* at[((rows_together - 1) * S + K) * ((places_together - 1) * S + K)];
  for (i64 i = begin; i < end; i++) {
    const i64 s = i % run.panels, g = i / run.panels % run.blocks, image = i / run.panels / run.blocks;
    const i64 x = p.out_width * s / run.panels, q = p.out_width * (s + 1) / run.panels - x;
    const i64 y = p.out_height * g / run.blocks, rows = p.out_height * (g + 1) / run.blocks - y;
    const i64 high = (rows - 1) * S + K, wide = (q - 1) * S + K, top = y * S - p.pad_y, left = x * S - p.pad_x;
    for (i64 r = 0; r < high; r++)
      for (i64 j = 0; j < wide; j++) {
        const bool inside = u64(top + r) < u64(p.height) && u64(left + j) < u64(p.width);
        at[r * wide + j] = inside ? run.x + ((image * p.height + top + r) * p.width + left + j) * p.columns : p.zeros;
      }
    float* out = run.out + (image * p.out_height + y) * line + x * p.columns;
    switch (q) {
      case 1: block<K, S, 1>(p, at, int(rows), out, line); break;
      case 2: block<K, S, 2>(p, at, int(rows), out, line); break;
      case 3: block<K, S, 3>(p, at, int(rows), out, line); break;
      default: block<K, S, 4>(p, at, int(rows), out, line);
    }
  }
}

// ---- windows of any kind, and fewer channels than a vector has ----

// n <= lanes channels from `c` on, at Q output places from x on: taps that begin at at[tap] for place 0 and move by
// step[tap] from place to place.
template <int Q, bool Whole>
TW_NOINLINE void places(const Product& p, const float* const* at, const i64* step, const float* w, i64 c, i64 n, i64 x, float* out) {
  const i64 wide = round_up(p.columns, lanes);
  R sum[Q];
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) sum[q] = p.bias ? load<float, lanes>(p.bias + c).v : R{};
  for (i64 t = 0; t < p.taps; t++, w += wide) {
    const R weight = load<float, lanes>(w).v;
    const float* source = at[t] + x * step[t] + c;
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++, source += step[t])
      sum[q] = fused((Whole ? load<float, lanes>(source) : load_part<float, lanes>(source, n)).v, weight, sum[q]);
  }
  ended<Q>(p, ending_of(p), sum, n, out);
}

void row(const Product& p, const float* const* at, const i64* step, i64 from, i64 to, float* out) {
  const i64 whole = p.columns / lanes * lanes, left = p.columns - whole;
  for (i64 x = from; x < to;) {
    const bool four = x + 4 <= to;
    float* place = out + x * p.columns;
    for (i64 c = 0; c < whole; c += lanes)
      if (four) places<4, true>(p, at, step, p.weights + c, c, lanes, x, place + c);
      else places<1, true>(p, at, step, p.weights + c, c, lanes, x, place + c);
    if (left && four) places<4, false>(p, at, step, p.weights + whole, whole, left, x, place + whole);
    else if (left) places<1, false>(p, at, step, p.weights + whole, whole, left, x, place + whole);
    x += four ? 4 : 1;
  }
}

// Rows [begin, end) of the images of the result.
void depthwise(void* context, i64 begin, i64 end, i64) {
  const Run& run = *(const Run*)context;
  const Product& p = *run.p;
  const i64 reach = (p.kernel_width - 1) * p.dilate_x;
  const i64 inner_from = min(p.out_width, (p.pad_x + p.stride_x - 1) / p.stride_x);
  const i64 room = p.width - 1 - reach + p.pad_x;
  const i64 inner_to = max(inner_from, min(p.out_width, room < 0 ? 0 : room / p.stride_x + 1));
  const float* at[most_taps];
  i64 step[most_taps];
  for (i64 i = begin; i < end; i++) {
    const i64 y = i % p.out_height, image = i / p.out_height;
    float* out = run.out + i * p.out_width * p.columns;
    const auto aim = [&](i64 x) {  // x < 0: for all places between the borders
      for (i64 t = 0; t < p.taps; t++) {
        const i64 iy = y * p.stride_y - p.pad_y + t / p.kernel_width * p.dilate_y;
        const i64 right = t % p.kernel_width * p.dilate_x - p.pad_x, ix = x * p.stride_x + right;
        const bool inside = u64(iy) < u64(p.height) && (x < 0 || u64(ix) < u64(p.width));
        at[t] = inside ? run.x + ((image * p.height + iy) * p.width + right) * p.columns : p.zeros;
        step[t] = inside ? p.stride_x * p.columns : 0;
      }
    };
    for (i64 x = 0; x < inner_from; x++) aim(x), row(p, at, step, x, x + 1, out);
    aim(-1), row(p, at, step, inner_from, inner_to, out);
    for (i64 x = inner_to; x < p.out_width; x++) aim(x), row(p, at, step, x, x + 1, out);
  }
}

typedef void (*Part)(void*, i64, i64, i64);

// How many pieces of so many products a thread takes at least.
i64 share_of(i64 pieces, i64 products, i64 threads) { return grain_for(pieces, slower * max(i64(1), products), threads); }

// What does blocks of places in registers, where the window is a usual one.
Part blocks_of(const Product& p) {
  const i64 k = p.kernel_width, s = p.stride_x;
  if (p.columns < lanes || p.taps != k * k || s != p.stride_y || p.dilate_x != 1 || p.dilate_y != 1) return nullptr;
  if (s == 1) return k == 3 ? blocks<3, 1> : k == 5 ? blocks<5, 1> : k == 7 ? blocks<7, 1> : (Part)nullptr;
  if (s == 2) return k == 3 ? blocks<3, 2> : k == 5 ? blocks<5, 2> : k == 7 ? blocks<7, 2> : (Part)nullptr;
  return nullptr;
}
}  // namespace

// A convolution of each channel on its own, as tw_product: weights are [taps][columns, rounded up to lanes].
TW_API void tw_depthwise(const Product* p, const float* x, i64 rows, i64 stride, const float* added, float* out, i64 threads) {
  (void)stride, (void)added;
  if (rows <= 0 || p->columns <= 0) return;
  const i64 images = rows / (p->out_height * p->out_width);
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  const Part usual = blocks_of(*p);
  if (!usual) {
    Run run = {p, x, nullptr, out, 0, 0, 0, 0, 0, 0, false};
    const i64 lines = images * p->out_height;
    parallel(depthwise, &run, lines, share_of(lines, p->out_width * p->columns * p->taps, threads), 0);
    return;
  }
  const i64 down_by = (p->out_height + rows_together - 1) / rows_together, right_by = (p->out_width + places_together - 1) / places_together;
  Run run = {p, x, nullptr, out, 0, 0, down_by, 0, right_by, 0, false};
  const i64 pieces = images * down_by * right_by;
  parallel(usual, &run, pieces, share_of(pieces, rows_together * places_together * p->columns * p->taps, threads), 0);
}
