// Products and convolutions of our own, whose fetches are written down: each must lie where memory is. Follows the sources of
// code of our own, compiled with `__builtin_prefetch` as `note`.
#include <stdlib.h>

#include <initializer_list>

namespace {
struct Array {
  const float *from, *to;
};
Array arrays[8];
int count = 0;
i64 outside = 0, noted = 0;

float* make(i64 n) {
  float* p = (float*)aligned_alloc(64, round_up(n * 4, 64));
  for (i64 i = 0; i < n; i++) p[i] = float(i % 7) - 3.f;
  arrays[count++] = {p, p + n};
  return p;
}
void free_all() {
  while (count) free((void*)arrays[--count].from);
}
void serial(void (*run)(void*, i64, i64, i64), void* context, i64 n, i64 grain, int) {
  for (i64 i = 0; i < n; i += grain) run(context, i, min(n, i + grain), 0);
}
void keep_size(i64, int) {}
i64 not_held() { return 0; }
void* scratch(i64, i64 bytes) {
  static void* block = nullptr;
  free(block);
  arrays[7] = {(float*)(block = aligned_alloc(64, round_up(bytes, 64))), (float*)((char*)block + bytes)};
  return block;
}

void product(i64 rows, i64 inner, i64 columns, bool added) {
  Product p = {};
  const i64 panels = (columns + panel - 1) / panel;
  p.weights = make(panels * panel * inner), p.columns = columns, p.inner = inner, p.taps = 1, p.scale = 1.f;
  const float* x = make(rows * inner);
  float* out = make(rows * columns);
  tw_product(&p, x, rows, inner, added ? make(rows * columns) : nullptr, out, 2);
  free_all();
}

void convolution(i64 side, i64 channels, i64 columns, bool fewer) {
  Product p = {};
  const i64 wide = fewer ? panel2 : panel, panels = (columns + wide - 1) / wide, taps = fewer ? numbers : 9;
  p.weights = make(panels * wide * channels * taps), p.zeros = make(channels + lanes), p.columns = columns, p.inner = channels, p.taps = 9;
  p.height = p.width = p.out_height = p.out_width = side, p.kernel_width = 3, p.scale = 1.f, p.step = channels, p.line = side * channels;
  p.stride_y = p.stride_x = p.dilate_y = p.dilate_x = p.pad_y = p.pad_x = 1, p.plain = make(columns * channels * 9), p.scratch = scratch;
  const float* x = make(side * side * channels);
  float* out = make(side * side * columns);
  (fewer ? tw_winograd : tw_product)(&p, x, side * side, channels, nullptr, out, 2);
  free_all();
}
}  // namespace

void note(const void* at) {
  noted++;
  bool inside = false;
  for (const Array& a : arrays) inside |= (const float*)at >= a.from && (const float*)at < a.to + panel;
  outside += !inside;
}

// How many fetches there were; of them, outside of all memory, if so asked.
TW_API i64 fetches(i64 only_outside) {
  noted = outside = 0;
  tw_attach((void*)serial, (void*)keep_size, (void*)not_held, 1);
  for (const i64 rows : {2, 6, 49, 200})
    for (const i64 inner : {3, 64, 300, 700})
      for (const i64 columns : {8, 40, 200}) product(rows, inner, columns, rows == 49);
  for (const i64 side : {7, 20}) {
    convolution(side, 24, 40, false), convolution(side, 200, 70, false);
    convolution(side, 24, 40, true), convolution(side, 200, 70, true);
  }
  return only_outside ? outside : noted;
}
