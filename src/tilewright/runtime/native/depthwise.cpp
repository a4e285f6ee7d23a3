// Convolutions of each channel on its own, in fp32. Follows product.cpp in its unit.
//
// Weights are packed [vectors of channels][taps][lanes]. The last vector is that of the last `lanes` channels, which it may
// share with the one before: those channels are done twice rather than in part.
//
// Sums of some rows and places side by side stay in registers, so that each place of the image is loaded once for all of
// them. A row of the image that is outside is skipped; a place beside the image is zero. At most half of a window is outside.

namespace {
constexpr i64 most_taps = 64;
constexpr i64 slower = 6;  // times as long as a product of matrices takes: most of it is memory

// Rows of places, n <= lanes channels of each, from a tile.
TW_NOINLINE void finish_places(const Product& p, const float* tile, int rows, int places, i64 n, float* out, i64 out_line, i64 out_step) {
  for (int r = 0; r < rows; r++) finish_of(p, tile + r * places * panel, places, n, nullptr, nullptr, out + r * out_line, out_step);
}

// Stores sums of M rows of Q places, n <= lanes channels of each.
template <int M, int Q>
TW_INLINE void ended(const Product& p, const Ending& e, const R* sum, i64 n, float* out, i64 out_line, i64 out_step) {
#define TW_PLACES _Pragma("GCC unroll 4") for (int r = 0; r < M; r++) _Pragma("GCC unroll 4") for (int q = 0; q < Q; q++)
  if (!e.direct || n < lanes) {
    alignas(64) float tile[M * Q * panel];
    TW_PLACES *(R*)(tile + (r * Q + q) * panel) = sum[r * Q + q];
    finish_places(p, tile, M, Q, n, out, out_line, out_step);
  } else if (e.both) {
    TW_PLACES store(out + r * out_line + q * out_step, between(V{sum[r * Q + q]}, e));
  } else {
    TW_PLACES store(out + r * out_line + q * out_step, at_least(V{sum[r * Q + q]}, e.low));
  }
#undef TW_PLACES
}

// Rows and places whose sums are kept together. Large windows would take a compiler long: for them, fewer kinds of blocks.
#if defined(TW_AVX512) || defined(__aarch64__)
template <int K> constexpr int rows_together = K == 3 ? 4 : 2;  // 16 sums, at most 7 places that wait for a later tap, a weight
#else
template <int K> constexpr int rows_together = 2;  // 8 sums, at most 5 places, a weight
#endif
constexpr int places_together = 4;
template <int K> constexpr int least_places = K == 3 ? 1 : 3;
constexpr i64 tasks_each = 4;          // for each thread, so that all of them end together
constexpr i64 least_vectors = 512 / (4 * lanes);  // in a task: fewer are read in short pieces, which are fetched late

// Where a block reads and writes.
struct Block {
  const float* at;               // the first place of its window, perhaps beside the image
  i64 line, step;                // floats to the next line, to the next place
  i64 top, bottom, left, right;  // which lines and places of its window are inside of the image
  float* out;
  i64 out_line, out_step;
  i64 from, to;  // vectors of channels
};

// The lines of a window from `line` on that the same rows of a block read: where they end.
template <int K, int S, int M> constexpr int same_rows_until(int line) {
  int stop = (M - 1) * S + K;
  for (int r = 0; r < M; r++) {
    if (r * S > line && r * S < stop) stop = r * S;
    if (r * S + K > line && r * S + K < stop) stop = r * S + K;
  }
  return stop;
}

// What one line of the window at `from` gives to rows First to Last, of Q places. Weights are those of row 0.
template <int K, int S, int Q, int First, int Last, bool Edge>
TW_INLINE void line_of(R* sum, const Block& b, const float* from, i64 step, const float* weights) {
  constexpr int wide = (Q - 1) * S + K, border = Edge ? K / 2 : 0;
  R v[wide];
#pragma GCC unroll 8
  for (int k = 0; k < K; k++) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) {
      const int j = q * S + k;
      const bool inside = (j >= border || j >= b.left) && (j < wide - border || j < b.right);
      if (k < S || q == Q - 1) v[j] = inside ? load<float, lanes>(from + j * step).v : R{};
    }
#pragma GCC unroll 4
    for (int r = First; r <= Last; r++) {
      const R weight = load<float, lanes>(weights + (k - r * S * K) * lanes).v;
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) sum[r * Q + q] = fused(v[q * S + k], weight, sum[r * Q + q]);
    }
  }
}

// The same for all lines from `Line` on, of which `at` is the first. Lines of a small window are written out: a loop of one
// or two turns costs as much.
template <int K, int S, int M, int Q, bool Edge, int Line>
TW_INLINE void lines_of(R* sum, const Block& b, i64 line, i64 step, i64 top, i64 bottom, const float* at, const float* weights) {
  constexpr int high = (M - 1) * S + K, border = K / 2;
  if constexpr (Line < high) {
    constexpr int first = Line < K ? 0 : (Line - K + S) / S, last = Line / S < M ? Line / S : M - 1;
    if constexpr (K == 3) {
      if ((Line >= border || Line >= top) && (Line < high - border || Line < bottom)) {
        __asm__("" : "+r"(weights));  // all weights at once would not fit the registers
        line_of<K, S, Q, first, last, Edge>(sum, b, at, step, weights + Line * K * lanes);
      }
      lines_of<K, S, M, Q, Edge, Line + 1>(sum, b, line, step, top, bottom, at + line, weights);
    } else {
      constexpr int stop = same_rows_until<K, S, M>(Line);
      const i64 from = max(i64(Line), top), to = min(i64(stop), bottom);
      const float *here = at + (from - Line) * line, *w = weights + from * K * lanes;
      for (i64 i = from; i < to; i++, here += line, w += K * lanes) line_of<K, S, Q, first, last, Edge>(sum, b, here, step, w);
      lines_of<K, S, M, Q, Edge, stop>(sum, b, line, step, top, bottom, at + (stop - Line) * line, weights);
    }
  }
}

// M rows of Q places, for windows of K x K that move by S. Edge: places of the window may lie beside the image.
template <int K, int S, int M, int Q, bool Edge> TW_NOINLINE void block(const Product& p, const Ending& ending, const Block& b) {
  const i64 line = b.line, step = b.step, top = b.top, bottom = b.bottom, out_line = b.out_line, out_step = b.out_step, before_last = p.columns - lanes;
  const float* weights = p.weights + b.from * (K * K * lanes);
  for (i64 v = b.from; v < b.to; v++, weights += K * K * lanes) {
    const i64 c = min(v * lanes, before_last);
    const R first = p.bias ? load<float, lanes>(p.bias + c).v : R{};
    R sum[M * Q];
#pragma GCC unroll 16
    for (int q = 0; q < M * Q; q++) sum[q] = first;
    lines_of<K, S, M, Q, Edge, 0>(sum, b, line, step, top, bottom, b.at + c, weights);
    ended<M, Q>(p, ending, sum, lanes, b.out + c, out_line, out_step);
  }
}

template <int K, int S, int M, int Q> TW_INLINE void block_at(const Product& p, const Ending& ending, const Block& b) {
  constexpr bool usual = M + 1 >= rows_together<K> && Q + 1 >= places_together;  // what most blocks of a large image are
  if constexpr (usual)
    if (b.left == 0 && b.right == (Q - 1) * S + K) return block<K, S, M, Q, false>(p, ending, b);
  block<K, S, M, Q, true>(p, ending, b);
}

// M rows of the result, from the left to the right.
template <int K, int S, int M> void blocks_of_rows(const Product& p, const Ending& ending, Block b) {
  const i64 count = (p.out_width + places_together - 1) / places_together;
  const float* start = b.at;
  float* out = b.out;
  for (i64 i = 0, x = 0, next; i < count; i++, x = next) {
    next = max(p.out_width * (i + 1) / count, i64(least_places<K>));
    x = min(x, next - least_places<K>);  // of five, the one in the middle is done twice
    const i64 places = next - x, left = x * S - p.pad_x;
    b.at = start + left * b.step, b.out = out + x * b.out_step;
    b.left = max(i64(0), -left), b.right = min((places - 1) * S + K, p.width - left);
    if (places == 4) block_at<K, S, M, 4>(p, ending, b);
    else if (places == 3) block_at<K, S, M, 3>(p, ending, b);
    else if constexpr (least_places<K> == 1) places == 2 ? block_at<K, S, M, 2>(p, ending, b) : block_at<K, S, M, 1>(p, ending, b);
  }
}

// Some rows of the result from y on. `b` says where row 0 of the image and of the result lie.
template <int K, int S> void rows_of(const Product& p, const Ending& ending, Block b, i64 y, i64 rows) {
  const i64 top = y * S - p.pad_y;
  b.at += top * b.line, b.out += y * b.out_line;
  b.top = max(i64(0), -top), b.bottom = min((rows - 1) * S + K, p.height - top);
  if (rows == 1) blocks_of_rows<K, S, 1>(p, ending, b);
  else if (rows == 2) blocks_of_rows<K, S, 2>(p, ending, b);
  else if constexpr (rows_together<K> == 4) rows == 3 ? blocks_of_rows<K, S, 3>(p, ending, b) : blocks_of_rows<K, S, 4>(p, ending, b);
}

// Tasks [begin, end): some rows of the result, some of their channels.
template <int K, int S> void blocks(void* context, i64 begin, i64 end, i64) {
  const Run& run = *(const Run*)context;
  const Product& p = *run.p;
  const Ending ending = ending_of(p);
  const i64 vectors = (p.columns + lanes - 1) / lanes;
  for (i64 i = begin; i < end; i++) {
    const i64 part = i % run.panels, band = i / run.panels % run.blocks, image = i / run.panels / run.blocks;
    const i64 y = p.out_height * band / run.blocks, rows = p.out_height * (band + 1) / run.blocks - y;
    Block b = {run.x + image * p.height * p.line, p.line, p.columns};
    b.out_step = p.columns, b.out_line = p.out_width * p.columns;
    b.out = run.out + image * p.out_height * b.out_line;
    b.from = vectors * part / run.panels, b.to = vectors * (part + 1) / run.panels;
    rows_of<K, S>(p, ending, b, y, rows);
  }
}

// ---- windows of any kind, and fewer channels than a vector has ----

// n <= lanes channels of Q places: taps that begin at at[tap] for place 0 and move by step[tap] from place to place.
template <int Q, bool Whole>
TW_NOINLINE void places(const Product& p, const float* const* at, const i64* step, i64 v, i64 c, i64 n, i64 x, float* out) {
  const float* w = p.weights + v * p.taps * lanes;
  R sum[Q];
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) sum[q] = p.bias ? load<float, lanes>(p.bias + c).v : R{};
  for (i64 t = 0; t < p.taps; t++, w += lanes) {
    const R weight = load<float, lanes>(w).v;
    const float* source = at[t] + x * step[t] + c;
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++, source += step[t])
      sum[q] = fused((Whole ? load<float, lanes>(source) : load_part<float, lanes>(source, n)).v, weight, sum[q]);
  }
  ended<1, Q>(p, ending_of(p), sum, n, out + c, 0, p.columns);
}

void row(const Product& p, const float* const* at, const i64* step, i64 from, i64 to, float* out) {
  for (i64 x = from; x < to;) {
    const bool four = x + 4 <= to;
    float* place = out + x * p.columns;
    if (p.columns < lanes) {
      if (four) places<4, false>(p, at, step, 0, 0, p.columns, x, place);
      else places<1, false>(p, at, step, 0, 0, p.columns, x, place);
    }
    for (i64 v = 0; v * lanes < p.columns && p.columns >= lanes; v++) {
      const i64 c = min(v * lanes, p.columns - lanes);
      if (four) places<4, true>(p, at, step, v, c, lanes, x, place);
      else places<1, true>(p, at, step, v, c, lanes, x, place);
    }
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

// What does blocks of places in registers, and how many rows each has.
struct Usual {
  Part part;
  void (*rows_of)(const Product&, const Ending&, Block, i64, i64);
  i64 rows;
};
template <int K> Usual blocks_by(const Product& p) {
  const i64 s = p.stride_x, right = (p.out_width - 1) * s + K - p.pad_x - p.width, below = (p.out_height - 1) * s + K - p.pad_y - p.height;
  if (p.out_width < least_places<K> || s > 2 || max(max(p.pad_x, p.pad_y), max(right, below)) > K / 2) return {};
  if (p.stride_x == 1) return {blocks<K, 1>, rows_of<K, 1>, rows_together<K>};
  return {blocks<K, 2>, rows_of<K, 2>, rows_together<K>};
}
// None where the window is not a usual one.
Usual blocks_of(const Product& p) {
  const i64 k = p.kernel_width;
  if (p.columns < lanes || p.taps != k * k || p.stride_x != p.stride_y || p.dilate_x != 1 || p.dilate_y != 1) return {};
  return k == 3 ? blocks_by<3>(p) : k == 5 ? blocks_by<5>(p) : k == 7 ? blocks_by<7>(p) : Usual{};
}
}  // namespace

// A convolution of each channel on its own, as tw_product, with weights as above.
TW_API void tw_depthwise(const Product* p, const float* x, i64 rows, i64 stride, const float* added, float* out, i64 threads) {
  (void)stride, (void)added;
  if (rows <= 0 || p->columns <= 0) return;
  const i64 images = rows / (p->out_height * p->out_width);
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  const Usual usual = blocks_of(*p);
  if (!usual.part) {
    Run run = {p, x, nullptr, out, 0, 0, 0, 0, 0, 0, false};
    const i64 lines = images * p->out_height;
    parallel(depthwise, &run, lines, share_of(lines, p->out_width * p->columns * p->taps, threads), 0);
    return;
  }
  // Whole rows go through memory in order; only few of them are cut by channels.
  const i64 bands = (p->out_height + usual.rows - 1) / usual.rows, vectors = (p->columns + lanes - 1) / lanes;
  const i64 wanted = threads > 1 ? (tasks_each * threads - 1) / (images * bands) + 1 : 1;
  const i64 parts = max(i64(1), min(wanted, vectors / least_vectors));
  Run run = {p, x, nullptr, out, 0, 0, bands, 0, parts, 0, false};
  const i64 tasks = images * bands * parts;
  parallel(usual.part, &run, tasks, share_of(tasks, rows / bands / images * p->columns / parts * p->taps, threads), 0);
}
