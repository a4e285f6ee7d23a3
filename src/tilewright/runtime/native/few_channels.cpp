// Convolutions of images with few channels, as the colours of a picture, in fp32. Follows product.cpp in its unit.
//
// A window takes kernel_width * channels floats from each line of an image with its channels innermost: these are one run, a
// tap is a line of the window. So that no run leaves the image, each band of lines is laid out with its borders in the memory
// of the thread that needs it; images come as they are, channel by channel. The runs of some windows are then put side by side,
// as rows of a matrix: single runs are too short to be multiplied one by one.

namespace {
struct Bands {
  const Product* p;
  const float *x, *added;
  float* out;
  i64 channels, count, lines, width;  // bands of an image; lines of a band, at most, and floats of a line
};

// Line `from` of each of C channels, `apart` floats from each other, to places of C floats. What is outside is zero.
template <int C> void lay_line(const float* from, i64 apart, i64 width, i64 before, i64 places, float* to) {
  const i64 stop = min(before + width, places);
  for (i64 k = 0; k < min(before, places) * C; k++) to[k] = 0.f;
  for (i64 x = before; x < stop; x++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) to[x * C + c] = from[c * apart + x - before];
  for (i64 k = max(before, stop) * C; k < places * C; k++) to[k] = 0.f;
}

// Lines from `top` on, perhaps above or below of the image.
void lay_band(const Bands& b, i64 image, i64 top, i64 lines, float* to) {
  const Product& p = *b.p;
  const i64 apart = p.height * p.width, places = b.width / b.channels;
  for (i64 line = 0; line < lines; line++, to += b.width) {
    const i64 y = top + line;
    if (u64(y) >= u64(p.height)) {
      for (i64 k = 0; k < b.width; k++) to[k] = 0.f;
      continue;
    }
    const float* from = b.x + image * b.channels * apart + y * p.width;
    switch (b.channels) {
      case 1: lay_line<1>(from, apart, p.width, p.pad_x, places, to); break;
      case 2: lay_line<2>(from, apart, p.width, p.pad_x, places, to); break;
      case 3: lay_line<3>(from, apart, p.width, p.pad_x, places, to); break;
      default: lay_line<4>(from, apart, p.width, p.pad_x, places, to);
    }
  }
}

// Lines [y, y + high) of the result without memory for a band: number by number, through tiles of one place.
TW_NOINLINE void sum_apart(const Bands& b, i64 image, i64 y, i64 high) {
  const Product& p = *b.p;
  const i64 apart = p.height * p.width, length = p.inner * p.taps;
  alignas(64) float tile[panel];
  for (i64 place = 0; place < high * p.out_width; place++)
    for (i64 start = 0; start < p.columns; start += panel) {
      for (i64 j = 0; j < panel; j++) {
        tile[j] = 0.f;
        for (i64 k = 0; k < length; k++) {
          const i64 iy = (y + place / p.out_width) * p.stride_y - p.pad_y + k / p.inner * p.dilate_y;
          const i64 ix = place % p.out_width * p.stride_x - p.pad_x + k % p.inner / b.channels;
          if (u64(iy) >= u64(p.height) || u64(ix) >= u64(p.width)) continue;
          const float v = b.x[(image * b.channels + k % b.channels) * apart + iy * p.width + ix];
          tile[j] = __builtin_fmaf(v, p.weights[(start / panel * length + k) * panel + j], tile[j]);
        }
      }
      const i64 at = ((image * p.out_height + y) * p.out_width + place) * p.columns + start;
      finish_of(p, tile, 1, min(i64(panel), p.columns - start), p.bias ? p.bias + start : nullptr,
                b.added ? b.added + at : nullptr, b.out + at, p.columns);
    }
}

// The windows of places [first, last) of a band as rows of `to`. More is written behind each run, until the next one.
void lay_windows(const Bands& b, const float* band, i64 first, i64 last, float* to) {
  const Product& p = *b.p;
  for (i64 place = first, y = first / p.out_width, x = first - y * p.out_width; place < last; place++) {
    const float* from = band + y * p.stride_y * b.width + x * p.stride_x * b.channels;
    for (i64 t = 0; t < p.taps; t++, from += p.dilate_y * b.width, to += p.inner)
      for (i64 k = 0; k < p.inner; k += lanes) store(to + k, load<float, lanes>(from + k));
    if (++x == p.out_width) x = 0, y++;
  }
}

// Bands [begin, end).
void bands(void* context, i64 begin, i64 end, i64 worker) {
  const Bands& b = *(const Bands*)context;
  const Product& p = *b.p;
  const i64 panels = (p.columns + panel - 1) / panel, length = p.inner * p.taps, band_floats = b.lines * b.width + lanes;
  float* memory = (float*)p.scratch(worker, (band_floats + most_rows * length + lanes) * 4);
  Product matrix = p;
  matrix.height = 0, matrix.inner = length, matrix.taps = 1;
  for (i64 i = begin; i < end; i++) {
    const i64 image = i / b.count, band = i % b.count;
    const i64 y = p.out_height * band / b.count, high = p.out_height * (band + 1) / b.count - y;
    if (!memory) {
      sum_apart(b, image, y, high);
      continue;
    }
    float* windows = memory + band_floats;
    lay_band(b, image, y * p.stride_y - p.pad_y, (high - 1) * p.stride_y + (p.taps - 1) * p.dilate_y + 1, memory);
    for (i64 first = 0, rows = high * p.out_width, last; first < rows; first = last) {
      last = min(rows, first + most_rows);
      lay_windows(b, memory, first, last, windows);
      const i64 at = ((image * p.out_height + y) * p.out_width + first) * p.columns;
      const Run run = {&matrix, windows, b.added ? b.added + at : nullptr, b.out + at, last - first, length, 0, 0, panels, 0, false};
      for (i64 column = 0; column < panels; column++) work_on(run, column, 0, last - first);
    }
  }
}
}  // namespace

// A convolution of at most four channels, dilated only from line to line, as tw_product, with a line of the window as a tap;
// x is dense: [image][channel][line][place].
TW_API void tw_few_channels(const Product* p, const float* x, i64 rows, i64 stride, const float* added, float* out, i64 threads) {
  (void)stride;
  if (rows <= 0 || p->columns <= 0) return;
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  constexpr i64 bands_each = 4, least_lines = 4;  // of a thread, of the result: the fewer, the more often lines are laid out twice
  const i64 images = rows / (p->out_height * p->out_width), channels = p->step;
  Bands b = {p, x, added, out, channels};
  b.count = max(i64(1), min(p->out_height / least_lines, (bands_each * threads + images - 1) / images));
  const i64 high = (p->out_height + b.count - 1) / b.count;
  b.lines = (high - 1) * p->stride_y + (p->taps - 1) * p->dilate_y + 1;
  b.width = (p->out_width - 1) * p->stride_x * channels + p->inner;
  const i64 tasks = images * b.count, panels = (p->columns + panel - 1) / panel;
  parallel(bands, &b, tasks, grain_for(tasks, 2 * high * p->out_width * p->inner * p->taps * panels * panel, threads), 0);
}
