// A convolution of each channel on its own with the products over channels in front of it and behind it, or one of them, in
// fp32: the images between them are never whole. Follows product.cpp and depthwise.cpp in its unit.
//
//     image between = first(x)       all channels of some rows; those that are there from the rows before are kept
//     result rows   = second(image between)
//     out           = then(result rows) (+ added)
//
// Such rows lie in the memory of a thread and stay in its core's cache. Each part sums as it does apart, so that results are
// the same bit by bit.

namespace {
constexpr i64 between_floats = 1 << 15;  // of the image between: 128 KiB, which stay in a core's cache
constexpr i64 band_tasks_each = 2;       // for each thread; where a task begins, rows of the image between are made twice
constexpr i64 least_band = 12;           // rows of the result in a task: one to six rows more are made for them

struct Chain {
  const Product *first, *second, *then;  // what is not there is null
  const float *x, *added;
  float* out;
  Usual usual;
  i64 bands, groups, width, rows;  // tasks of an image, of its channels; channels of a task; rows of the result at a time
};

// What of the image between lies in memory: rows [from, to) of `channels` channels from `channel` on.
struct Rows {
  float* memory;
  i64 from, to, channel, channels;
};

// The product for `channels` channels from `channel` on, a multiple of `panel`.
Product part_of(const Product& p, i64 channel, i64 channels) {
  Product part = p;
  part.columns = channels, part.weights += channel * p.inner * p.taps;
  if (p.bias) part.bias += channel;
  return part;
}

// All columns of a product for so many rows.
void multiply_rows(const Product& p, const float* x, i64 rows, const float* added, float* out) {
  const Run run = {&p, x, added, out, rows, p.inner, 0, 0, 0, 0, false};
  const i64 blocks = (rows + most_rows - 1) / most_rows;
  for (i64 k = 0; k < blocks; k++)
    for (i64 column = 0; column * panel < p.columns; column++) work_on(run, column, rows * k / blocks, rows * (k + 1) / blocks);
}

// Lets `there` hold rows [from, to) of an image: those that are there already move to the front.
void make_rows(const Chain& c, i64 image, i64 from, i64 to, Rows& there) {
  const Product& second = *c.second;
  const i64 line = second.width * there.channels, kept = max(i64(0), there.to - from);
  if (kept) __builtin_memmove(there.memory, there.memory + (from - there.from) * line, kept * line * 4);
  const float* x = c.x + (image * second.height + from + kept) * second.width * c.first->inner;
  const Product first = part_of(*c.first, there.channel, there.channels);
  multiply_rows(first, x, (to - from - kept) * second.width, nullptr, there.memory + kept * line);
  there.from = from, there.to = to;
}

// Rows [y, last) of the result through memory; with `then`, rows of what it reads lie at `made`.
void band_of(const Chain& c, i64 image, i64 y, i64 last, Rows there, float* made) {
  const Product second = part_of(*c.second, there.channel, there.channels);
  const Ending ending = ending_of(second);
  const i64 line = second.width * there.channels, stride = second.stride_y, all = c.second->columns;
  const i64 columns = c.then ? c.then->columns : all, first_place = image * second.out_height * second.out_width;
  Block block = {c.x + image * second.height * line, line, there.channels};
  block.out_step = all, block.out_line = second.out_width * all;
  block.out = c.out + first_place * all + there.channel;
  block.to = (there.channels + lanes - 1) / lanes;
  for (; y < last; y += c.rows) {
    const i64 rows = min(c.rows, last - y), top = y * stride - second.pad_y, bottom = top + (rows - 1) * stride + second.kernel_width;
    if (c.first) {
      make_rows(c, image, max(i64(0), top), min(second.height, bottom), there);
      block.at = there.memory - there.from * line;
    }
    if (c.then) block.out = made - y * block.out_line;
    for (i64 r = 0; r < rows; r += c.usual.rows) c.usual.rows_of(second, ending, block, y + r, min(c.usual.rows, rows - r));
    if (!c.then) continue;
    const i64 at = (first_place + y * second.out_width) * columns;
    multiply_rows(*c.then, made, rows * second.out_width, c.added ? c.added + at : nullptr, c.out + at);
  }
}

// n <= panel channels of one place of the second result, from `channel` on, one place of the window after the other.
TW_NOINLINE void place_apart(const Chain& c, i64 image, i64 y, i64 x, i64 channel, i64 n, float* to) {
  const Product& p = *c.second;
  const i64 behind = max(i64(0), p.columns - lanes);
  alignas(64) float made[panel], tile[panel];
  for (i64 j = 0; j < n; j++) tile[j] = p.bias ? p.bias[channel + j] : 0.f;
  for (i64 t = 0; t < p.taps; t++) {
    const i64 iy = y * p.stride_y - p.pad_y + t / p.kernel_width * p.dilate_y, ix = x * p.stride_x - p.pad_x + t % p.kernel_width * p.dilate_x;
    if (u64(iy) >= u64(p.height) || u64(ix) >= u64(p.width)) continue;
    const i64 place = (image * p.height + iy) * p.width + ix;
    const float* from = c.x + place * p.columns + channel;
    if (c.first) multiply_rows(part_of(*c.first, channel, n), c.x + place * c.first->inner, 1, nullptr, made), from = made;
    for (i64 j = 0; j < n; j++) {  // the last vector of weights is that of the last channels
      const i64 v = (channel + j) / lanes, lane = channel + j - min(v * lanes, behind);
      tile[j] = fma(from[j], p.weights[(v * p.taps + t) * lanes + lane], tile[j]);
    }
  }
  finish_of(p, tile, 1, n, nullptr, nullptr, to, 0);
}

// Rows [y, last) of the result, channels [channel, end), without memory, or for windows of another kind.
TW_NOINLINE void band_apart(const Chain& c, i64 image, i64 y, i64 last, i64 channel, i64 end) {
  const Product& p = *c.second;
  alignas(64) float made[panel], tile[panel];
  for (i64 place = y * p.out_width; place < last * p.out_width; place++) {
    const i64 row = place / p.out_width, x = place % p.out_width, at = image * p.out_height * p.out_width + place;
    for (i64 k = channel; !c.then && k < end; k += panel)
      place_apart(c, image, row, x, k, min(i64(panel), end - k), c.out + at * p.columns + k);
    for (i64 start = 0; c.then && start < c.then->columns; start += panel) {
      const i64 n = min(i64(panel), c.then->columns - start), to = at * c.then->columns + start;
      for (i64 j = 0; j < panel; j++) tile[j] = 0.f;
      for (i64 k = 0; k < p.columns; k += panel) {
        const i64 some = min(i64(panel), p.columns - k);
        place_apart(c, image, row, x, k, some, made);
        for (i64 j = 0; j < n; j++) {
          const float* w = c.then->weights + (start * p.columns + k * panel) + j;
          float sum = 0.f;
          for (i64 i = 0; i < some; i++) sum = fma(made[i], w[i * panel], sum);
          tile[j] += sum;
        }
      }
      const float* bias = c.then->bias ? c.then->bias + start : nullptr;
      finish_of(*c.then, tile, 1, n, bias, c.added ? c.added + to : nullptr, c.out + to, 0);
    }
  }
}

void chained_bands(void* context, i64 begin, i64 end, i64 worker) {
  const Chain& c = *(const Chain*)context;
  const Product& p = *c.second;
  const i64 lines = min(p.height, (c.rows - 1) * p.stride_y + p.kernel_width);
  const i64 between = c.first ? round_up(lines * p.width * min(c.width, p.columns) + lanes, lanes) : 0;
  const i64 made = c.then ? c.rows * p.out_width * p.columns : 0;
  float* memory = c.usual.part ? (float*)p.scratch(worker, (between + made + lanes) * 4) : nullptr;
  for (i64 i = begin; i < end; i++) {
    const i64 group = i % c.groups, band = i / c.groups % c.bands, image = i / c.groups / c.bands;
    const i64 y = p.out_height * band / c.bands, last = p.out_height * (band + 1) / c.bands;
    const i64 channel = group * c.width, channels = min(c.width, p.columns - channel);
    if (memory && channels >= lanes) band_of(c, image, y, last, {memory, 0, 0, channel, channels}, memory + between);
    else band_apart(c, image, y, last, channel, channel + channels);
  }
}
}  // namespace

// The convolution of each channel on its own that `p` says, as tw_depthwise, of what the product p->first makes of x, and
// through the product p->then; either may be null.
TW_API void tw_depthwise_chain(const Product* p, const float* x, i64 rows, i64 stride, const float* added, float* out, i64 threads) {
  (void)stride;
  if (rows <= 0 || p->columns <= 0) return;
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  const i64 images = rows / (p->out_height * p->out_width), panels = (p->columns + panel - 1) / panel;
  Chain c = {p->first, p, p->then, x, added, out, blocks_of(*p)};
  // All channels of a few rows, or where these are too wide and nothing needs all of them, some.
  const i64 together = max(i64(1), c.usual.rows), least_lines = (together - 1) * p->stride_y + p->kernel_width;
  c.width = (c.then ? panels : max(i64(1), min(panels, between_floats / (least_lines * p->width * panel)))) * panel;
  c.groups = (panels * panel + c.width - 1) / c.width;
  const i64 lines = between_floats / (c.width * p->width), more = max(i64(0), lines - least_lines) / (p->stride_y * together);
  c.rows = together * (1 + more);
  const i64 wanted = threads > 1 ? (band_tasks_each * threads - 1) / (images * c.groups) + 1 : 1;
  c.bands = max(i64(1), min(wanted, p->out_height / least_band));
  const i64 tasks = images * c.bands * c.groups, columns = min(c.width, p->columns);
  const i64 operations = (c.first ? p->height * p->width * c.first->inner : 0) + p->out_height * p->out_width * (p->taps + (c.then ? c.then->columns : 0));
  parallel(chained_bands, &c, tasks, grain_for(tasks, 2 * operations * columns / c.bands, threads), 0);
}
