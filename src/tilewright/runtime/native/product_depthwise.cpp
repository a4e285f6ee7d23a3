// A product over the channels of each place, and a convolution of each channel on its own behind it, in fp32: the image
// between them is never whole. Follows product.cpp and depthwise.cpp in its unit.
//
// Some rows of that image, of some of its channels, lie in the memory of a thread and stay in its core's cache: those that
// the next rows of the result need are made, the others are there from the rows before. Both parts sum as they do apart, so
// that results are the same bit by bit.

namespace {
constexpr i64 between_floats = 1 << 15;  // of the image between: 128 KiB, which stay in a core's cache
constexpr i64 band_tasks_each = 2;       // for each thread; where a task begins, rows of the image between are made twice
constexpr i64 least_band = 12;           // rows of the result in a task: one to six rows more are made for them

struct Between {
  const Product *first, *second;
  const float* x;
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

// Lets `there` hold rows [from, to) of an image: those that are there already move to the front.
void make_rows(const Between& b, i64 image, i64 from, i64 to, Rows& there) {
  const Product& second = *b.second;
  const i64 line = second.width * there.channels, kept = max(i64(0), there.to - from);
  if (kept) __builtin_memmove(there.memory, there.memory + (from - there.from) * line, kept * line * 4);
  const i64 count = (to - from - kept) * second.width, blocks = (count + most_rows - 1) / most_rows, inner = b.first->inner;
  const Product first = part_of(*b.first, there.channel, there.channels);
  const float* x = b.x + (image * second.height + from + kept) * second.width * inner;
  const Run run = {&first, x, nullptr, there.memory + kept * line, count, inner, 0, 0, 0, 0, false};
  for (i64 k = 0; k < blocks; k++)
    for (i64 column = 0; column * panel < there.channels; column++) work_on(run, column, count * k / blocks, count * (k + 1) / blocks);
  there.from = from, there.to = to;
}

// Rows [y, last) of the result through memory.
void band_between(const Between& b, i64 image, i64 y, i64 last, Rows there) {
  const Product second = part_of(*b.second, there.channel, there.channels);
  const Ending ending = ending_of(second);
  const i64 line = second.width * there.channels, stride = second.stride_y;
  Block block = {nullptr, line, there.channels};
  block.out_step = b.second->columns, block.out_line = second.out_width * block.out_step;
  block.out = b.out + image * second.out_height * block.out_line + there.channel;
  block.to = (there.channels + lanes - 1) / lanes;
  for (; y < last; y += b.rows) {
    const i64 rows = min(b.rows, last - y), top = y * stride - second.pad_y, bottom = top + (rows - 1) * stride + second.kernel_width;
    make_rows(b, image, max(i64(0), top), min(second.height, bottom), there);
    block.at = there.memory - there.from * line;
    for (i64 r = 0; r < rows; r += b.usual.rows) b.usual.rows_of(second, ending, block, y + r, min(b.usual.rows, rows - r));
  }
}

// The same without memory, or for windows of another kind: the places of a window one by one, for a panel of channels.
TW_NOINLINE void band_apart(const Between& b, i64 image, i64 y, i64 last, i64 channel, i64 channels) {
  const Product &second = *b.second, first = part_of(*b.first, channel, channels);
  const i64 inner = first.inner, high = second.taps / second.kernel_width;
  alignas(64) float made[panel], tile[panel];
  for (i64 place = y * second.out_width; place < last * second.out_width; place++) {
    const i64 top = place / second.out_width * second.stride_y - second.pad_y, left = place % second.out_width * second.stride_x - second.pad_x;
    float* out = b.out + (image * second.out_height * second.out_width + place) * second.columns + channel;
    for (i64 start = 0; start < channels; start += panel) {
      const i64 n = min(i64(panel), channels - start);
      for (i64 j = 0; j < n; j++) tile[j] = second.bias ? second.bias[channel + start + j] : 0.f;
      for (i64 t = 0; t < high * second.kernel_width; t++) {
        const i64 iy = top + t / second.kernel_width * second.dilate_y, ix = left + t % second.kernel_width * second.dilate_x;
        if (u64(iy) >= u64(second.height) || u64(ix) >= u64(second.width)) continue;
        const Product some = part_of(first, start, n);
        const Run run = {&some, b.x + ((image * second.height + iy) * second.width + ix) * inner, nullptr, made, 1, inner, 0, 0, 0, 0, false};
        work_on(run, 0, 0, 1);
        for (i64 j = 0; j < n; j++) {
          const i64 c = channel + start + j, behind = second.columns - lanes, v = c / lanes;
          const i64 lane = v * lanes > behind ? c - max(i64(0), behind) : c - v * lanes;
          tile[j] = __builtin_fmaf(made[j], second.weights[(v * second.taps + t) * lanes + lane], tile[j]);
        }
      }
      finish_of(second, tile, 1, n, nullptr, nullptr, out + start, second.columns);
    }
  }
}

void bands_between(void* context, i64 begin, i64 end, i64 worker) {
  const Between& b = *(const Between*)context;
  const Product& p = *b.second;
  const i64 lines = min(p.height, (b.rows - 1) * p.stride_y + p.kernel_width);
  float* memory = b.usual.part ? (float*)p.scratch(worker, (lines * p.width * b.width + lanes) * 4) : nullptr;
  for (i64 i = begin; i < end; i++) {
    const i64 group = i % b.groups, band = i / b.groups % b.bands, image = i / b.groups / b.bands;
    const i64 y = p.out_height * band / b.bands, last = p.out_height * (band + 1) / b.bands;
    const i64 channel = group * b.width, channels = min(b.width, p.columns - channel);
    if (memory && channels >= lanes) band_between(b, image, y, last, {memory, 0, 0, channel, channels});
    else band_apart(b, image, y, last, channel, channels);
  }
}
}  // namespace

// The convolution of each channel on its own that `p` says, as tw_depthwise, of what the product p->first makes of x.
TW_API void tw_product_depthwise(const Product* p, const float* x, i64 rows, i64 stride, const float* added, float* out, i64 threads) {
  (void)stride, (void)added;
  if (rows <= 0 || p->columns <= 0) return;
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  const i64 images = rows / (p->out_height * p->out_width), panels = (p->columns + panel - 1) / panel;
  Between b = {p->first, p, x, out, blocks_of(*p)};
  // All channels of a few rows, or where these are too wide, some of them.
  const i64 together = max(i64(1), b.usual.rows), least_lines = (together - 1) * p->stride_y + p->kernel_width;
  b.width = max(i64(1), min(panels, between_floats / (least_lines * p->width * panel))) * panel;
  b.groups = (panels * panel + b.width - 1) / b.width;
  const i64 lines = between_floats / (b.width * p->width), more = max(i64(0), lines - least_lines) / (p->stride_y * together);
  b.rows = together * (1 + more);
  const i64 wanted = threads > 1 ? (band_tasks_each * threads - 1) / (images * b.groups) + 1 : 1;
  b.bands = max(i64(1), min(wanted, p->out_height / least_band));
  const i64 tasks = images * b.bands * b.groups, places = p->height * p->width / b.bands, inner = p->first->inner;
  parallel(bands_between, &b, tasks, grain_for(tasks, 2 * places * inner * min(b.width, p->columns), threads), 0);
}
