// Convolutions with windows of 3 x 3 that move by one place, in fp32, with fewer products (Winograd). Follows product.cpp and
// depthwise.cpp in its unit.
//
// Blocks of 2 x 3 places of the result are made of 4 x 5 of the image: both sides are turned into 20 numbers (the image here,
// the weights when they are packed), which are multiplied one by one, and the sums are turned back. Their law, and where the
// numbers come from, is in rewrite/winograd.py. 20 products take the place of 54.
//
// What differs from a plain sum is rounding: each place of a block errs by the largest numbers of the whole block. So sums are
// short (`short_chain`), and blocks that hold much larger numbers than the image has elsewhere, or some that are not finite,
// are summed plainly.

namespace {
constexpr int tile_high = 2, tile_wide = 3, from_high = 4, from_wide = 5, numbers = from_high * from_wide;
constexpr int across2 = 2, panel2 = lanes * across2;
constexpr i64 short_chain = 16, long_chain = 64;
constexpr i64 image_floats = 260000;  // numbers of some blocks, which stay in a core's cache
constexpr i64 most_tiles = 48;
constexpr i64 looked_at = 128, exceptions = 3;  // places of an image whose size tells what is usual, and how many of them may not
constexpr float unusual = 2.f;                  // times of that which the places of a block may have

struct Tiling {
  const Run* run;
  i64 high, wide, count;  // tiles of an image, and of all images
  i64 blocks, groups, panels, step;
  float limit;
  void* (*scratch)(i64 worker, i64 bytes);
};

// Four rows x0 .. x3 are turned into x2 - x0, x1 + x2, x2 - x1 and x3 - x1 (`turn_vectors`); their sums back to two places:
TW_INLINE void turn4_back(const R* m, i64 d, R* y, i64 e) {
  y[0] = m[0] + m[d] + m[2 * d];
  y[e] = m[d] - m[2 * d] + m[3 * d];
}
// Five numbers of a row, for the points 0, +-3/4, +-5/2: all constants are exact.
TW_INLINE void turn5(const R* x, R* y) {
  const R c = broadcast(-25.f / 4), d = broadcast(-9.f / 16);
  y[0] = fused(x[0], broadcast(225.f / 64), fused(x[2], broadcast(-109.f / 16), x[4]));
  const R even = fused(x[2], c, x[4]), odd = fused(x[1], c, x[3]) * broadcast(3.f / 4);
  y[1] = even + odd, y[2] = even - odd;
  const R even2 = fused(x[2], d, x[4]), odd2 = fused(x[1], d, x[3]) * broadcast(5.f / 2);
  y[3] = even2 + odd2, y[4] = even2 - odd2;
}
TW_INLINE void turn5_back(const R* m, R* y) {
  const R sum = m[1] + m[2], difference = m[1] - m[2], sum2 = m[3] + m[4], difference2 = m[3] - m[4];
  y[0] = m[0] + sum + sum2;
  y[1] = fused(difference, broadcast(3.f / 4), difference2 * broadcast(5.f / 2));
  y[2] = fused(sum, broadcast(9.f / 16), sum2 * broadcast(25.f / 4));
}

// Of several addresses with the same steps, each stays in a register of its own: compilers would keep all sums of addresses and
// steps instead, in memory.
template <class T> TW_INLINE T* apart_from_others(T* at) {
  __asm__("" : "+r"(at));
  return at;
}

// A row of five places, `step` floats apart, turned; adds their squares.
TW_INLINE void turn_row(const float* from, i64 step, R* y, R& squares) {
  R x[from_wide];
#pragma GCC unroll 5
  for (int k = 0; k < from_wide; k++) x[k] = load<float, lanes>(from + k * step).v;
  R sum = x[0] * x[0];
#pragma GCC unroll 4
  for (int k = 1; k < from_wide; k++) sum = fused(x[k], x[k], sum);
  squares += sum;
  turn5(x, y);
}

// Numbers of some vectors of channels of one tile: to[number][channel], `apart` floats between two numbers. Lines of the tile
// are `line` floats apart, places `step`. The two rows in the middle, which all others need, are turned first: all of a vector
// stays in registers then. Gives the sums of squares of what is read.
TW_NOINLINE R turn_vectors(const float* from, i64 line, i64 step, i64 vectors, float* to, i64 apart) {
  const float* rows[from_high];
  float* ends[from_high];
#pragma GCC unroll 4
  for (int r = 0; r < from_high; r++) {
    rows[r] = apart_from_others(from + r * line);
    ends[r] = apart_from_others(to + r * from_wide * apart);
  }
  R squares = R{};
  for (i64 c = 0; c < vectors * lanes; c += lanes) {
    R y[from_wide], above[from_wide], below[from_wide];
    turn_row(rows[1] + c, step, above, squares);
    turn_row(rows[2] + c, step, below, squares);
#pragma GCC unroll 5
    for (int k = 0; k < from_wide; k++) *(R*)(ends[1] + k * apart + c) = above[k] + below[k];
#pragma GCC unroll 5
    for (int k = 0; k < from_wide; k++) *(R*)(ends[2] + k * apart + c) = below[k] - above[k];
    turn_row(rows[0] + c, step, y, squares);
#pragma GCC unroll 5
    for (int k = 0; k < from_wide; k++) *(R*)(ends[0] + k * apart + c) = below[k] - y[k];
    turn_row(rows[3] + c, step, y, squares);
#pragma GCC unroll 5
    for (int k = 0; k < from_wide; k++) *(R*)(ends[3] + k * apart + c) = y[k] - above[k];
  }
  return squares;
}

// to[r][:] = sums over n of from[r][k] * w[k][:], for M rows that lie `apart` floats from each other: chains of products are
// added, and sums of some chains. w[k] has J vectors that are wanted. Also fetches lines from `ahead` on into the core's cache,
// `step` floats further in each turn. Sums of chains are kept in memory: there are too few registers.
#define TW_TILE _Pragma("GCC unroll 8") for (int r = 0; r < M; r++) _Pragma("GCC unroll 8") for (int j = 0; j < J; j++)
#define TW_SUM(to) (*(R*)((to) + r * panel2 + j * lanes))
template <int M, int J>
TW_NOINLINE void short_sums(const float* from, i64 apart, const float* w, i64 n, float* to, const float* ahead, i64 step) {
  const float* at[M];
  alignas(64) float part[M * panel2];
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) at[r] = from + r * apart;
  for (i64 k = 0, end; k < n; k = end) {
    end = min(n, k + long_chain);
    const bool more = k > 0;
    for (bool begun = false;; begun = true) {
      R sum[M][J];
      TW_TILE sum[r][j] = R{};
      if (end - k >= short_chain) {
#pragma GCC unroll 16
        for (int i = 0; i < short_chain; i++) {
          if (i % 2 == 0) __builtin_prefetch(ahead + i * step, 0, 2);
          add_products<M, J>(sum, at, k + i, w + i * panel2);
        }
        k += short_chain, w += short_chain * panel2, ahead += short_chain * step;
      } else {
        for (; k < end; k++, w += panel2) add_products<M, J>(sum, at, k, w);
      }
      if (begun) TW_TILE sum[r][j] += TW_SUM(part);
      if (k < end) {
        TW_TILE TW_SUM(part) = sum[r][j];
        continue;
      }
      if (more) TW_TILE sum[r][j] += TW_SUM(to);
      TW_TILE TW_SUM(to) = sum[r][j];
      break;
    }
  }
}
#undef TW_TILE
#undef TW_SUM

template <int J>
void short_sums_of(i64 m, const float* from, i64 apart, const float* w, i64 n, float* to, const float* ahead, i64 step) {
  switch (m) {
    case 1: return short_sums<1, J>(from, apart, w, n, to, ahead, step);
    case 2: return short_sums<2, J>(from, apart, w, n, to, ahead, step);
    case 3: return short_sums<3, J>(from, apart, w, n, to, ahead, step);
    case 4: return short_sums<4, J>(from, apart, w, n, to, ahead, step);
    case 5: return short_sums<5, J>(from, apart, w, n, to, ahead, step);
    default: return short_sums<6, J>(from, apart, w, n, to, ahead, step);
  }
}

// Floats between two numbers that take so many.
i64 number_floats(i64 floats) { return round_up(floats, 2 * line_floats) + line_floats; }

// Where a tile lies: its image, its first row and place.
struct Corner {
  i64 image, y, x;
};
Corner corner_of(const Tiling& t, i64 tile) {
  return {tile / t.wide / t.high, tile / t.wide % t.high * tile_high, tile % t.wide * tile_wide};
}
Corner next_corner(const Tiling& t, Corner corner) {
  const Product& p = *t.run->p;
  if ((corner.x += tile_wide) < p.out_width) return corner;
  corner.x = 0;
  if ((corner.y += tile_high) >= p.out_height) corner.y = 0, corner.image++;
  return corner;
}

void aim(const Tiling& t, const Corner& corner, const float** at) {
  const Product& p = *t.run->p;
  for (i64 r = 0; r < from_high; r++)
    for (i64 k = 0; k < from_wide; k++) {
      const i64 y = corner.y + r - p.pad_y, x = corner.x + k - p.pad_x;
      const bool inside = u64(y) < u64(p.height) && u64(x) < u64(p.width);
      at[r * from_wide + k] = inside ? t.run->x + ((corner.image * p.height + y) * p.width + x) * p.inner : p.zeros;
    }
}

// Numbers of one tile, as turn_vectors. Gives the sum of squares of what is read.
TW_NOINLINE float turn_tile(const Tiling& t, const Corner& corner, float* to, i64 apart) {
  const Product& p = *t.run->p;
  const i64 y = corner.y - p.pad_y, x = corner.x - p.pad_x, whole = p.inner / lanes;
  const bool inside = y >= 0 && x >= 0 && y + from_high <= p.height && x + from_wide <= p.width;
  const i64 line = p.width * p.inner, done = inside ? whole * lanes : 0;
  R squares = R{};
  if (inside) squares = turn_vectors(t.run->x + (corner.image * p.height + y) * line + x * p.inner, line, p.inner, whole, to, apart);
  if (done < p.inner) {  // what has no place in the image, or no vector, is laid out with zeros
    alignas(64) float window[numbers * lanes];
    const float* at[numbers];
    aim(t, corner, at);
    for (i64 c = done; c < p.inner; c += lanes) {
      const i64 left = p.inner - c;
      for (int k = 0; k < numbers; k++)
        *(V*)(window + k * lanes) = left >= lanes ? load<float, lanes>(at[k] + c) : load_part<float, lanes>(at[k] + c, left);
      squares += turn_vectors(window, from_wide * lanes, lanes, 1, to + c, apart);
    }
  }
  float parts[lanes], sum = 0.f;
  __builtin_memcpy(parts, &squares, sizeof parts);
  for (int k = 0; k < lanes; k++) sum += parts[k];
  return sum;
}

// Places of a tile whose sums lie in sums[place], `panel` floats apart: n columns from `column` on.
void finish_tile(const Tiling& t, const Corner& corner, i64 column, i64 n, const float* sums) {
  const Run& run = *t.run;
  const Product& p = *run.p;
  const int wide = int(min(i64(tile_wide), p.out_width - corner.x));
  for (i64 r = 0; r < min(i64(tile_high), p.out_height - corner.y); r++) {
    const i64 at = (((corner.image * p.out_height) + corner.y + r) * p.out_width + corner.x) * p.columns + column;
    finish_of(p, sums + r * tile_wide * panel, wide, n, p.bias ? p.bias + column : nullptr,
              run.added ? run.added + at : nullptr, run.out + at, p.columns);
  }
}

// Sums of J vectors of columns of a tile turned back: from[number], `apart` floats from each other, to the places of the
// result, all or as many as are `there`, from `at` on.
struct There {
  i64 high, wide;
};
template <int J, bool All>
TW_NOINLINE void turn_back_directly(const Run& run, i64 at, const There& there, const Ending& ending, const float* bias, const float* from, i64 apart) {
  const i64 step = run.p->columns, line = run.p->out_width * step;
  const float* rows[from_high];
#pragma GCC unroll 4
  for (int r = 0; r < from_high; r++) rows[r] = apart_from_others(from + r * from_wide * apart);
#pragma GCC unroll 1
  for (int j = 0; j < J * lanes; j += lanes) {
    R sums[tile_high * from_wide];
#pragma GCC unroll 5
    for (int k = 0; k < from_wide; k++) {
      R m[from_high];
#pragma GCC unroll 4
      for (int r = 0; r < from_high; r++) m[r] = *(const R*)(rows[r] + k * apart + j);
      turn4_back(m, 1, sums + k, from_wide);
    }
    const R more = bias ? load<float, lanes>(bias + j).v : R{};
#pragma GCC unroll 2
    for (int r = 0; r < tile_high; r++) {
      R y[tile_wide];
      turn5_back(sums + r * from_wide, y);
#pragma GCC unroll 3
      for (int k = 0; k < tile_wide; k++) {
        if (!All && (r >= there.high || k >= there.wide)) continue;
        const i64 to = at + r * line + k * step + j;
        V v = {y[k] + more};
        if (run.added) v = v + load<float, lanes>(run.added + to);
        store(run.out + to, between(v, ending));
      }
    }
  }
}

// The same for n columns from `column` on, whatever becomes of them.
TW_NOINLINE void turn_tile_back(const Tiling& t, const Corner& corner, const Ending& ending, i64 column, i64 n, const float* from, i64 apart) {
  const Product& p = *t.run->p;
  if (ending.direct && n % lanes == 0) {
    const There there = {min(i64(tile_high), p.out_height - corner.y), min(i64(tile_wide), p.out_width - corner.x)};
    const bool all = there.high == tile_high && there.wide == tile_wide;
    const i64 at = ((corner.image * p.out_height + corner.y) * p.out_width + corner.x) * p.columns + column;
    const auto turn = n == lanes ? all ? turn_back_directly<1, true> : turn_back_directly<1, false>
                                 : all ? turn_back_directly<across2, true> : turn_back_directly<across2, false>;
    return turn(*t.run, at, there, ending, p.bias ? p.bias + column : nullptr, from, apart);
  }
  alignas(64) float sums[tile_high * tile_wide * panel];
  for (int j = 0; j < round_up(n, lanes); j += lanes) {
    R rows[tile_high * from_wide];
#pragma GCC unroll 5
    for (int k = 0; k < from_wide; k++) {
      R m[from_high];
#pragma GCC unroll 4
      for (int r = 0; r < from_high; r++) m[r] = *(const R*)(from + (r * from_wide + k) * apart + j);
      turn4_back(m, 1, rows + k, from_wide);
    }
#pragma GCC unroll 2
    for (int r = 0; r < tile_high; r++) {
      R y[tile_wide];
      turn5_back(rows + r * from_wide, y);
#pragma GCC unroll 3
      for (int k = 0; k < tile_wide; k++) *(R*)(sums + (r * tile_wide + k) * panel + j) = y[k];
    }
  }
  finish_tile(t, corner, column, n, sums);
}

// A tile by plain sums, in chains of a piece of the channels, for n columns from `column` on.
TW_NOINLINE void sum_plainly(const Tiling& t, const Corner& corner, const float* const* at, i64 column, i64 n) {
  constexpr i64 piece = 64, taps = 9;
  const Product& p = *t.run->p;
  alignas(64) float sums[tile_high * tile_wide * panel], window[piece * taps + lanes];
  for (i64 place = 0; place < tile_high * tile_wide; place++) {
    const float* const* from = at + place / tile_wide * from_wide + place % tile_wide;
    float* to = sums + place * panel;
    for (i64 o = 0; o < panel2; o++) to[o] = 0.f;
    for (i64 c = 0; c < p.inner; c += piece) {
      const i64 some = min(piece, p.inner - c), length = some * taps;
      for (i64 tap = 0; tap < taps; tap++)
        for (i64 k = 0; k < some; k++) window[k * taps + tap] = from[tap / 3 * from_wide + tap % 3][c + k];
      for (i64 o = 0; o < n; o++) {
        const float* w = p.plain + ((column + o) * p.inner + c) * taps;
        R sum = R{};
        i64 k = 0;
        for (; k + lanes <= length; k += lanes)
          sum = fused(load<float, lanes>(window + k).v, load<float, lanes>(w + k).v, sum);
        float parts[lanes], all = 0.f;
        for (; k < length; k++) all = __builtin_fmaf(window[k], w[k], all);
        __builtin_memcpy(parts, &sum, sizeof parts);
        for (int l = 0; l < lanes; l++) all += parts[l];
        to[o] += all;
      }
    }
  }
  finish_tile(t, corner, column, n, sums);
}

// Fetches the places of a tile, of a panel of columns from `column` on, into the core's cache: they are written at a time when
// nothing else is to be done, and would be waited for.
TW_INLINE void fetch_results(const Tiling& t, const Corner& corner, i64 column) {
  const Product& p = *t.run->p;
  const float* to = t.run->out + ((corner.image * p.out_height + corner.y) * p.out_width + corner.x) * p.columns + column;
  const i64 high = min(i64(tile_high), p.out_height - corner.y), wide = min(i64(tile_wide), p.out_width - corner.x);
  for (i64 r = 0; r < high; r++)
    for (i64 k = 0; k < wide; k++)
      for (int j = 0; j < panel2; j += line_floats) __builtin_prefetch(to + (r * p.out_width + k) * p.columns + j, 1, 2);
}

// Tiles [first, last) for some panels of columns.
void tiles(const Tiling& t, i64 first, i64 last, i64 panel_from, i64 panel_to, float* memory) {
  const Product& p = *t.run->p;
  const i64 count = last - first, row = t.step, strips = (count + down - 1) / down;
  // Numbers lie an odd number of lines apart: else those of a tile would drive each other out of the nearest cache.
  const i64 apart = number_floats(count * row), sums_apart = number_floats(count * panel2);
  float* sums = memory ? memory + numbers * apart : nullptr;
  const float* at[numbers];
  bool plainly[most_tiles];
  Corner corners[most_tiles];
  const Ending ending = ending_of(p);
  for (i64 k = 0; k < count; k++) {
    corners[k] = k ? next_corner(t, corners[k - 1]) : corner_of(t, first);
    plainly[k] = !memory || !(turn_tile(t, corners[k], memory + k * row, apart) <= t.limit);
    if (plainly[k]) aim(t, corners[k], at);
    for (i64 g = panel_from; plainly[k] && g < panel_to; g++)
      sum_plainly(t, corners[k], at, g * panel2, min(i64(panel2), p.columns - g * panel2));
  }
  if (!memory) return;
  for (i64 g = panel_from; g < panel_to; g++) {
    const i64 length = p.inner * panel2, part = panel2 / strips, n = min(i64(panel2), p.columns - g * panel2);
    const auto sum = n <= lanes ? short_sums_of<1> : short_sums_of<across2>;
    const float* w = p.weights + g * numbers * length;
    for (i64 a = 0; a < numbers; a++, w += length) {
      const float* ahead = g + 1 < t.panels || a + 1 < numbers ? w + length : p.weights;  // there is nothing behind the last
      for (i64 k = count * a / numbers; k < count * (a + 1) / numbers; k++) fetch_results(t, corners[k], g * panel2);
      for (i64 s = 0, k = 0, end; s < strips; s++, k = end) {
        end = count * (s + 1) / strips;
        sum(end - k, memory + a * apart + k * row, row, w, p.inner, sums + a * sums_apart + k * panel2, ahead + s * part * p.inner, part);
      }
    }
    for (i64 k = 0; k < count; k++)
      if (!plainly[k])
        turn_tile_back(t, corners[k], ending, g * panel2, n, sums + k * panel2, sums_apart);
  }
}

void tile_blocks(void* context, i64 begin, i64 end, i64 worker) {
  const Tiling& t = *(const Tiling*)context;
  const i64 most = (t.count + t.blocks - 1) / t.blocks;
  float* memory = (float*)t.scratch(worker, numbers * (number_floats(most * t.step) + number_floats(most * panel2)) * 4);
  for (i64 i = begin; i < end; i++) {
    const i64 block = i / t.groups, group = i % t.groups;
    tiles(t, t.count * block / t.blocks, t.count * (block + 1) / t.blocks, t.panels * group / t.groups,
          t.panels * (group + 1) / t.groups, memory);
  }
}

// Chooses into how many blocks of tiles, at least `least`, and groups of panels to cut: each block reads all weights of its
// groups, and each group turns all tiles of its blocks.
void deal(Tiling& t, i64 least, i64 threads) {
  constexpr i64 turned = 60, bytes_each = 6;  // cycles for a vector of a tile, bytes of weights in a cycle
  const Product& p = *t.run->p;
  const i64 weights = numbers * p.inner * t.panels * panel2;
  i64 best = -1;
  const i64 cuts[2] = {least, min(t.count, round_up(least, threads))}, parts[2] = {1, min(t.panels, threads)};
  for (const i64 blocks : cuts)
    for (const i64 groups : parts) {
      const i64 tiles = (t.count + blocks - 1) / blocks, panels = (t.panels + groups - 1) / groups, share = weights * panels / t.panels;
      const i64 each = tiles * t.step / lanes * turned + share * 4 / bytes_each + tiles * share / lanes / 2;
      const i64 cost = (blocks * groups + threads - 1) / threads * each;
      if (best < 0 || cost < best) best = cost, t.blocks = blocks, t.groups = groups;
    }
}

// A sum of squares that few of some places of the images exceed. The largest ones do not count: a single place that is far
// out would make all like it usual.
float usual_squares(const Product& p, const float* x, i64 places) {
  float largest[exceptions + 1] = {};
  const i64 some = min(places, looked_at);
  for (i64 k = 0; k < some; k++) {
    const float* at = x + places * k / some * p.inner;
    R sum = R{};
    for (i64 c = 0; c < p.inner; c += lanes) {
      const V v = p.inner - c >= lanes ? load<float, lanes>(at + c) : load_part<float, lanes>(at + c, p.inner - c);
      sum = fused(v.v, v.v, sum);
    }
    float parts[lanes], all = 0.f;
    __builtin_memcpy(parts, &sum, sizeof parts);
    for (int l = 0; l < lanes; l++) all += parts[l];
    if (!(all < __builtin_inff())) continue;
    for (i64 e = 0; e <= exceptions; e++)
      if (all > largest[e]) {
        const float other = largest[e];
        largest[e] = all, all = other;
      }
  }
  return largest[min(exceptions, some - 1)];
}
}  // namespace

TW_API i64 tw_winograd_panel(void) { return panel2; }

// out = act(images convolved with weights + bias + added), as tw_product; weights are [panel][number][channel][panel2].
TW_API void tw_winograd(const Product* p, const float* x, i64 rows, i64 stride, const float* added, float* out, i64 threads) {
  (void)stride;
  if (rows <= 0 || p->columns <= 0) return;
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  Run run = {p, x, added, out, rows, 0, 0, 0, 0, 0, false};
  const i64 images = rows / (p->out_height * p->out_width);
  Tiling t = {&run, (p->out_height + tile_high - 1) / tile_high, (p->out_width + tile_wide - 1) / tile_wide, 0, 0, 1, 0, 0, 0.f, p->scratch};
  t.count = images * t.high * t.wide;
  t.panels = (p->columns + panel2 - 1) / panel2;
  t.step = round_up(p->inner, lanes) + lanes;  // no power of two apart
  const i64 most = max(i64(1), min(most_tiles, image_floats / (numbers * t.step)));
  deal(t, (t.count + most - 1) / most, threads);
  // A sum of squares that is infinite is below no limit: what is not finite may be among what is squared.
  t.limit = unusual * numbers * usual_squares(*p, x, images * p->height * p->width);
  if (!(t.limit < __FLT_MAX__)) t.limit = __FLT_MAX__;
  parallel(tile_blocks, &t, t.blocks * t.groups, 1, 0);
}
