// Matrix products and convolutions (batch, space, channels innermost) with weights packed ahead of time, in fp32.
//
// A row of the result is an output place; its inputs are `taps` runs of `inner` consecutive floats (one run for a matrix
// product). Weights are packed [columns / panel][taps][inner][panel], so that one step of the inner loop reads one line of
// weights and one float of each row. Sums run over at most `chain` products one after the other, and those partial sums
// are added: the error of one long chain would grow with the root of its length.
// Follows strips.cpp in its unit.

namespace {
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

// What is stored of a sum.
template <int A> TW_INLINE V made(V v, const Product& p) {
  v = act<A>(v, p);
  return p.affine ? v * splat<float, lanes>(p.scale) + splat<float, lanes>(p.shift) : v;
}

// out = made of tile + bias + added, on m rows and n <= panel columns
template <int A>
TW_NOINLINE void finish(const Product& p, const float* tile, i64 m, i64 n, const float* bias, const float* added, float* out, i64 step) {
  for (i64 r = 0; r < m; r++)
    for (i64 j = 0; j < n; j += lanes) {
      V v = load<float, lanes>(tile + r * panel + j);
      if (bias) v = v + load<float, lanes>(bias + j);
      const i64 left = n - j, at = r * step + j;
      if (left >= lanes) {
        if (added) v = v + load<float, lanes>(added + at);
        store(out + at, made<A>(v, p));
      } else {
        if (added) v = v + load_part<float, lanes>(added + at, left);
        store_part(out + at, made<A>(v, p), left);
      }
    }
}

void finish_of(const Product& p, const float* tile, i64 m, i64 n, const float* bias, const float* added, float* out, i64 step) {
  switch (p.activation) {
#define TW_CASE(A) case A: return finish<A>(p, tile, m, n, bias, added, out, step);
    TW_CASE(relu) TW_CASE(clamp) TW_CASE(leaky) TW_CASE(gelu) TW_CASE(gelu_tanh) TW_CASE(silu) TW_CASE(hardswish)
    TW_CASE(hardsigmoid) TW_CASE(sigmoid_of) TW_CASE(tanh_of)
#undef TW_CASE
    default: return finish<none>(p, tile, m, n, bias, added, out, step);
  }
}

// A place of the result.
struct Place {
  i64 x, y, image;
};
Place place_of(const Product& p, i64 row) {
  const i64 line = row / p.out_width, image = line / p.out_height;
  return {row - line * p.out_width, line - image * p.out_height, image};
}

// Where the inputs of m places of the result from `at` on lie, for `taps` taps from that of (`below`, `right`) on, k floats
// behind their start: rows[tap][down]. Moves `at` behind these places.
void locate(const Run& run, Place& at, i64 m, i64 below, i64 right, i64 taps, i64 k, const float** rows) {
  const Product& p = *run.p;
  for (int r = 0; r < m; r++) {
    i64 iy = at.y * p.stride_y - p.pad_y + below * p.dilate_y, ix = at.x * p.stride_x - p.pad_x + right * p.dilate_x, left = p.kernel_width - right;
    const float* from = run.x + (at.image * p.height + iy) * p.line + ix * p.step + k;
    for (i64 t = 0; t < taps; t++) {
      rows[t * down + r] = u64(iy) < u64(p.height) && u64(ix) < u64(p.width) ? from : p.zeros;
      ix += p.dilate_x, from += p.dilate_x * p.step;
      if (--left == 0) {
        left = p.kernel_width;
        ix -= left * p.dilate_x, iy += p.dilate_y, from += p.dilate_y * p.line - left * p.dilate_x * p.step;
      }
    }
    if (++at.x == p.out_width) {
      at.x = 0;
      if (++at.y == p.out_height) at.y = 0, at.image++;
    }
  }
}

// What of the weights a block of rows passes at a time, and where its sums go.
struct Stretch {
  const float* weights;
  Walk walk;
  i64 tap, taps, parts, start;  // the first tap, how many, in how many parts each, and where in a tap they start
  bool begun, ended;            // whether there are sums of earlier stretches, whether this is the last one
};

// The rows from `first` to `last`, at most `most_rows`, past one stretch. Rows are cut evenly into strips; strips of as many
// rows are summed together, as far as there is room for the addresses of their inputs.
template <int J> void pass(const Run& run, const Stretch& stretch, i64 column, i64 first, i64 last, float* tiles) {
  constexpr i64 room = 512;
  const Product& p = *run.p;
  const Ending ending = ending_of(p);
  const i64 count = last - first, strips = (count + down - 1) / down, least = count / strips, more = count - least * strips;
  const i64 start = column * panel, n = min(i64(panel), p.columns - start), runs = stretch.taps * stretch.parts;
  const i64 below = stretch.tap ? stretch.tap / p.kernel_width : 0, right = stretch.tap - below * p.kernel_width;
  const i64 together = max(i64(1), room / (runs * down)), inputs = stretch.walk.n * (runs - 1) + stretch.walk.last;
  const float* bias = p.bias ? p.bias + start : nullptr;
  // While the rows pass this stretch, the next one comes into the core's cache, a part of it with each strip; or where rows
  // are read for the first time, those of the next strip. Behind the end no memory may be: to ask for that takes as long as
  // 50 products.
  const bool fresh = p.height == 0 && !run.by_panel && column == 0 && run.stride == p.inner && stretch.ended && !stretch.begun;
  const i64 share = panel / strips, panels = (p.columns + panel - 1) / panel;
  const float* then = stretch.weights + inputs * panel;
  if (then + inputs * panel > p.weights + panels * p.inner * p.taps * panel) then = p.weights;
  const float* rows[room + chains * chain * down];  // those of rows that a strip does not have are not read
  Walk walk = stretch.walk;
  walk.apart = runs * down;
  const bool brief = p.height == 0 && runs == 1 && !run.zero && stretch.ended && !stretch.begun && ending.direct && n >= J * lanes;
  Place place = p.height ? place_of(p, first) : Place{};
  for (i64 s = 0, row = first; s < strips; s += walk.strips) {
    const i64 m = s < more ? least + 1 : least, at = row * p.columns + start;
    walk.strips = min(together, (s < more ? more : strips) - s);
    float *tile = tiles + (row - first) * panel, *out = run.out + at;
    const float* added = run.added ? run.added + at : nullptr;
    const float** here = rows;
    const float* from = run.x + row * run.stride + stretch.start;  // without images
    if (brief) {
      const Ends ends = {tile, false, bias, added, out, p.columns, n, p.activation == none ? nullptr : &ending};
      const i64 all = (s < more ? more : strips) - s;
      const float* ahead = fresh ? run.x + min(row + m, run.rows - m * all) * run.stride : then + inputs * s * share;
      if (short_sums<J>(m, from, run.stride, inputs, all, stretch.weights, ends, ahead, fresh ? m : share)) {
        walk.strips = all, row += m * all;
        continue;
      }
    }
    for (i64 i = 0; i < walk.strips; i++, here += walk.apart, from += m * run.stride) {
      if (p.height) {
        locate(run, place, m, below, right, stretch.taps, stretch.start, here);
        for (i64 q = 1; q < stretch.parts; q++)
          for (i64 r = 0; r < m; r++) here[q * down + r] = here[r] + q * walk.n;
      } else {
        for (i64 q = 0; q < stretch.parts; q++)
#pragma GCC unroll 8
          for (i64 r = 0; r < down; r++) here[q * down + r] = from + q * walk.n + r * run.stride;
      }
    }
    Ends ends = {tile, stretch.begun};
    if (stretch.ended && ending.direct)
      ends = {tile, stretch.begun, bias, added, out, p.columns, n, p.activation == none ? nullptr : &ending};
    const float* ahead = fresh ? run.x + min(row + m, run.rows - m * walk.strips) * run.stride : then + inputs * s * share;
    sums_of<J>(m, rows, walk, stretch.weights, ends, ahead, fresh ? m : share);
    if (stretch.ended && !ending.direct) finish_of(p, tile, m * walk.strips, n, bias, added, out, p.columns);
    row += m * walk.strips;
  }
}

// One panel of columns for the rows from `first` to `last`, at most `most_rows`. A stretch of weights stays in the core's
// cache while all rows pass it: some taps, or where one is longer, some pieces of it.
template <int J> void work(const Run& run, i64 column, i64 first, i64 last) {
  const Product& p = *run.p;
  const i64 pieces = max(i64(1), (p.inner + chain - 1) / chain), piece = (p.inner + pieces - 1) / pieces;
  const i64 group = pieces > 1 ? 1 : min(p.taps, chain / max(i64(1), p.inner));
  const i64 most = chains * group, some_taps = pieces > 1 ? 1 : most, some_pieces = pieces > 1 ? most : 1;
  const float* weights = p.weights + column * p.inner * p.taps * panel;
  alignas(64) float tiles[most_rows * panel];
  for (i64 t = 0; t < p.taps; t += some_taps)
    for (i64 c = 0; c < pieces; c += some_pieces) {
      const i64 k = c * piece, taps = min(some_taps, p.taps - t), parts = min(some_pieces, pieces - c);
      const Walk walk = {run.zero ? 0 : taps * parts, piece, min(piece, p.inner - (c + parts - 1) * piece), group, 0, 0};
      const bool ended = t + taps == p.taps && c + parts == pieces;
      pass<J>(run, {weights + (t * p.inner + k) * panel, walk, t, taps, parts, k, t + c > 0, ended}, column, first, last, tiles);
    }
}

// ---- a single row: the weights come from an outer cache, and that is all there is to wait for ----

// P panels of J vectors from `column` on. Each has sums of its own, in the order of `work`: with few vectors in a panel, one
// panel alone would wait for each sum to be ready for the next one.
template <int A, int P, int J> TW_INLINE void alone(const Run& run, i64 column) {
  const Product& p = *run.p;
  const i64 length = run.zero ? 0 : p.inner, pieces = max(i64(1), (length + chain - 1) / chain), piece = (length + pieces - 1) / pieces;
  const float* w[P];
#pragma GCC unroll 8
  for (int q = 0; q < P; q++) w[q] = p.weights + (column + q) * length * panel;
  R total[P][J];
  for (i64 c = 0; c < pieces; c++) {
    R acc[P][J];
#pragma GCC unroll 8
    for (int q = 0; q < P; q++)
#pragma GCC unroll 8
      for (int j = 0; j < J; j++) acc[q][j] = R{};
    for (i64 k = c * piece; k < min(length, (c + 1) * piece); k++) {
      const R v = broadcast(run.x[k]);
#pragma GCC unroll 8
      for (int q = 0; q < P; q++) {
#pragma GCC unroll 8
        for (int j = 0; j < J; j++) acc[q][j] = fused(v, *(const R*)(w[q] + j * lanes), acc[q][j]);
        w[q] += panel;
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < P; q++)
#pragma GCC unroll 8
      for (int j = 0; j < J; j++) total[q][j] = c ? total[q][j] + acc[q][j] : acc[q][j];
  }
#pragma GCC unroll 8
  for (int q = 0; q < P; q++)
#pragma GCC unroll 8
    for (int j = 0; j < J; j++) {
      const i64 at = (column + q) * panel + j * lanes, left = p.columns - at;
      if (left <= 0) return;
      V v = {total[q][j]};
      if (p.bias) v = v + load<float, lanes>(p.bias + at);
      if (left >= lanes) {
        if (run.added) v = v + load<float, lanes>(run.added + at);
        store(run.out + at, made<A>(v, p));
      } else {
        if (run.added) v = v + load_part<float, lanes>(run.added + at, left);
        store_part(run.out + at, made<A>(v, p), left);
      }
    }
}

template <int A> TW_NOINLINE void panels_alone(const Run& run, i64 column, i64 end) {
  constexpr int together = 8 / across;
  for (; column + together <= end; column += together) alone<A, together, across>(run, column);
  for (; column < end; column++)
    if (run.p->columns - column * panel <= panel / 2) alone<A, 1, across / 2>(run, column);
    else alone<A, 1, across>(run, column);
}

void one_row(void* context, i64 begin, i64 end, i64) {
  const Run& run = *(const Run*)context;
  switch (run.p->activation) {
#define TW_CASE(A) case A: return panels_alone<A>(run, begin, end);
    TW_CASE(relu) TW_CASE(clamp) TW_CASE(leaky) TW_CASE(gelu) TW_CASE(gelu_tanh) TW_CASE(silu) TW_CASE(hardswish)
    TW_CASE(hardsigmoid) TW_CASE(sigmoid_of) TW_CASE(tanh_of)
#undef TW_CASE
    default: return panels_alone<none>(run, begin, end);
  }
}

void work_on(const Run& run, i64 column, i64 first, i64 last) {
  if (run.p->columns - column * panel <= panel / 2) work<across / 2>(run, column, first, last);
  else work<across>(run, column, first, last);
}

void task(void* context, i64 begin, i64 end, i64) {
  const Run& run = *(const Run*)context;
  for (i64 i = begin; i < end; i++) {
    const i64 column = run.by_panel ? i / run.blocks : i % run.panels, block = run.by_panel ? i % run.blocks : i / run.panels;
    const i64 first = block * run.block_rows;
    work_on(run, column, first, min(run.rows, first + run.block_rows));
  }
}

// ---- packing ----
struct Packing {
  const float* from;
  float* to;
  i64 columns, inner, taps, by_column, by_inner, by_tap;
};

void pack(void* context, i64 begin, i64 end, i64) {
  const Packing& k = *(const Packing*)context;
  for (i64 c = begin; c < end; c++) {
    const i64 n = min(i64(panel), k.columns - c * panel);
    float* to = k.to + c * panel * k.inner * k.taps;
    for (i64 t = 0; t < k.taps; t++)
      for (i64 i = 0; i < k.inner; i++, to += panel) {
        const float* from = k.from + c * panel * k.by_column + i * k.by_inner + t * k.by_tap;
        for (i64 j = 0; j < n; j++) to[j] = from[j * k.by_column];
        for (i64 j = n; j < panel; j++) to[j] = 0.f;
      }
  }
}

constexpr i64 look_at = 1 << 14;  // floats of a piece
struct Look {
  const float* from;
  i64 count, found;
};

void look(void* context, i64 begin, i64 end, i64) {
  Look& k = *(Look*)context;
  u32 worst = 0, denormal = 0;
  const i64 stop = min(end * look_at, k.count);
  for (i64 j = begin * look_at; j < stop; j++) {
    u32 bits;
    __builtin_memcpy(&bits, &k.from[j], 4);
    bits &= 0x7fffffffu;
    worst = bits > worst ? bits : worst;
    denormal |= bits - 1 < 0x007fffffu;
  }
  const i64 found = (worst >= 0x7f800000u ? 1 : 0) | (denormal ? 2 : 0);
  if (found) __atomic_fetch_or(&k.found, found, __ATOMIC_RELAXED);
}

void (*parallel)(void (*task)(void*, i64, i64, i64), void* context, i64 count, i64 grain, int more);
void (*resize)(i64 n, int pin);
i64 (*held)(void);
i64 worth_a_turn = worth_a_thread;  // operations that take as long as handing over to a thread that watches for it
}  // namespace

namespace {
// Into how many blocks of at most `most` rows to cut, so that the threads end together: the pool hands out at most eight
// pieces for each thread, and a strip of rows costs the same whether it is full or not.
i64 blocks_for(i64 rows, i64 most, i64 panels, i64 threads) {
  const i64 least = (rows + most - 1) / most, all = 8 * threads;
  if (threads == 1) return least;
  i64 best = least, best_cost = -1;
  for (i64 b = least; b <= least + 24 && b * down <= rows + down; b++) {
    const i64 tasks = b * panels, each = tasks < 2 * threads ? 1 : (tasks - 1) / all + 1;
    const i64 pieces = (tasks + each - 1) / each, busiest = min(tasks, (pieces + threads - 1) / threads * each);
    const i64 strips = ((rows + b - 1) / b + down - 1) / down, cost = busiest * (8 * strips + 1);
    if (best_cost < 0 || cost < best_cost) best = b, best_cost = cost;
  }
  return best;
}

// Whether rows of floats are all zero, as the first state of a recurrent layer is. Nearly always the first float tells.
bool all_zero(const float* x, i64 rows, i64 stride, i64 length) {
  for (i64 r = 0; r < rows; r++)
    for (i64 k = 0; k < length; k++)
      if (!(x[r * stride + k] == 0.f)) return false;
  return true;
}

// How many tasks a thread takes at least, each of so many operations: few tasks are dealt out evenly, to no more threads
// than have enough to do.
i64 grain_for(i64 tasks, i64 work_of_task, i64 threads) {
  const i64 worth = held() ? worth_a_turn : worth_a_thread, least = max(i64(1), worth / max(i64(1), work_of_task));
  if (tasks >= 2 * threads * least) return least;
  const i64 busy = min(threads, max(i64(1), tasks * work_of_task / worth));
  return (tasks + busy - 1) / busy;
}
}  // namespace

// Addresses of the thread pool's functions; called once, before anything else.
TW_API void tw_attach(void* parallel_at, void* resize_at, void* held_at, i64 worth) {
  parallel = (decltype(parallel))parallel_at;
  resize = (decltype(resize))resize_at;
  held = (decltype(held))held_at;
  worth_a_turn = worth;
}

TW_API i64 tw_panel(void) { return panel; }
TW_API i64 tw_lanes(void) { return lanes; }

// 1 if one of so many floats is not finite, plus 2 if one is denormal.
TW_API i64 tw_look(const float* from, i64 count, i64 threads) {
  Look all = {from, count, 0};
  resize(threads < 0 ? -threads : threads, threads < 0);
  parallel(look, &all, (count + look_at - 1) / look_at, 4, 0);
  return all.found;
}

// Weights with these steps (floats) between columns, inner places and taps, as tw_product reads them.
TW_API void tw_pack(const float* from, i64 columns, i64 inner, i64 taps, i64 by_column, i64 by_inner, i64 by_tap, float* to, i64 threads) {
  Packing packing = {from, to, columns, inner, taps, by_column, by_inner, by_tap};
  resize(threads < 0 ? -threads : threads, threads < 0);
  parallel(pack, &packing, (columns + panel - 1) / panel, 1, 0);
}

// out [rows][columns] = act(x times weights + bias + added), `stride` floats between the rows of x (no images); `added`
// may be null, or out itself. `threads` as for launches.
TW_API void tw_product(const Product* p, const float* x, i64 rows, i64 stride, const float* added, float* out, i64 threads) {
  if (rows <= 0 || p->columns <= 0) return;
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  const i64 panels = (p->columns + panel - 1) / panel, length = p->inner * p->taps;
  // Inputs of a block stay in a core's cache beside a panel of weights.
  const i64 most = min(most_rows, max(i64(down), (1 << 17) / max(i64(1), p->inner) / down * down));
  // Threads that are held share out what follows by rows, too: each then reads what it has made itself.
  const bool apart = held() && rows >= rows_apart * threads && rows <= most * threads && length * p->columns <= weights_apart;
  const i64 blocks = apart ? threads : blocks_for(rows, most, panels, threads), block = (rows + blocks - 1) / blocks;
  const bool zero = p->height == 0 && all_zero(x, rows, stride, length);
  Run run = {p, x, added, out, rows, stride, (rows + block - 1) / block, block, panels, 0, zero};
  run.by_panel = !apart && length * p->columns > rows * p->inner;
  if (rows == 1 && p->taps == 1 && p->height == 0) {
    parallel(one_row, &run, panels, grain_for(panels, 2 * panel * length, threads), 0);
    return;
  }
  const i64 tasks = run.blocks * panels;
  const i64 grain = grain_for(tasks, 2 * block * panel * length, threads);
  parallel(task, &run, tasks, apart && grain < tasks ? panels : grain, 0);
}
