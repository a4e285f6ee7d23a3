// Convolutions of each channel on its own, in fp32. Follows product.cpp in its unit.

namespace {
constexpr i64 most_taps = 64;

// n <= lanes channels from `c` on, at Q output places from x on: taps that begin at at[tap] for place 0 and move by
// step[tap] from place to place.
template <int Q, bool Whole, int A>
TW_INLINE void places(const Product& p, const float* const* at, const i64* step, const float* w, i64 c, i64 n, i64 x, float* out) {
  const i64 wide = round_up(p.columns, lanes);
  V sum[Q];
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) sum[q] = p.bias ? load<float, lanes>(p.bias + c) : splat<float, lanes>(0.f);
  for (i64 t = 0; t < p.taps; t++, w += wide) {
    const V weight = load<float, lanes>(w);
    const float* source = at[t] + x * step[t] + c;
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++, source += step[t])
      sum[q] = sum[q] + (Whole ? load<float, lanes>(source) : load_part<float, lanes>(source, n)) * weight;
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++, out += p.columns)
    if (Whole) store(out, made<A>(sum[q], p));
    else store_part(out, made<A>(sum[q], p), n);
}

template <int A> TW_NOINLINE void row_of(const Product& p, const float* const* at, const i64* step, i64 from, i64 to, float* out) {
  const i64 whole = p.columns / lanes * lanes, left = p.columns - whole;
  for (i64 x = from; x < to;) {
    const bool four = x + 4 <= to;
    float* place = out + x * p.columns;
    for (i64 c = 0; c < whole; c += lanes)
      if (four) places<4, true, A>(p, at, step, p.weights + c, c, lanes, x, place + c);
      else places<1, true, A>(p, at, step, p.weights + c, c, lanes, x, place + c);
    if (left && four) places<4, false, A>(p, at, step, p.weights + whole, whole, left, x, place + whole);
    else if (left) places<1, false, A>(p, at, step, p.weights + whole, whole, left, x, place + whole);
    x += four ? 4 : 1;
  }
}

void row(const Product& p, const float* const* at, const i64* step, i64 from, i64 to, float* out) {
  if (from >= to) return;
  switch (p.activation) {
    case relu: return row_of<relu>(p, at, step, from, to, out);
    case clamp: return row_of<clamp>(p, at, step, from, to, out);
    case silu: return row_of<silu>(p, at, step, from, to, out);
    case hardswish: return row_of<hardswish>(p, at, step, from, to, out);
    default: return row_of<none>(p, at, step, from, to, out);
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
}  // namespace

// A convolution of each channel on its own: weights [taps][columns, rounded up to lanes].
TW_API void tw_depthwise(const Product* p, const float* x, i64 images, float* out, i64 threads) {
  if (images <= 0 || p->columns <= 0) return;
  resize(threads < 0 ? -threads : threads, threads < 0);
  Run run = {p, x, nullptr, out, 0, 0, 0, 0, 0, 0};
  const i64 work_of_row = p->out_width * p->columns * p->taps;
  parallel(depthwise, &run, images * p->out_height, max(i64(1), 100000 / max(i64(1), work_of_row)), 0);
}
