// Images with their channels outermost, laid with their channels innermost. Follows product.cpp in its unit.

namespace {
constexpr i64 turned_at_once = 16;    // places: a line of the cache of each channel is read by one task, at once
constexpr i64 turning_operations = 8;  // a float that is moved takes as long as so many

struct Turning {
  const float* from;
  float* to;
  i64 channels, places, blocks;
};

// Blocks [begin, end) of places. Last ones and last channels are moved twice rather than in part.
void turn(void* context, i64 begin, i64 end, i64) {
  const Turning& t = *(const Turning*)context;
  for (i64 i = begin; i < end; i++) {
    const i64 image = i / t.blocks, place = min(i % t.blocks * turned_at_once, t.places - turned_at_once);
    const float* from = t.from + image * t.channels * t.places + place;
    float* to = t.to + (image * t.places + place) * t.channels;
    for (i64 first = 0; first < t.channels; first += lanes) {
      const i64 c = min(first, t.channels - lanes);
      for (i64 x = 0; x < turned_at_once; x += lanes) {
        V rows[lanes];
        load_transposed<float, lanes>(from + c * t.places + x, t.places, rows);
#pragma GCC unroll 16
        for (int r = 0; r < lanes; r++) store(to + (x + r) * t.channels + c, rows[r]);
      }
    }
  }
}
}  // namespace

// to[image][place][channel] = from[image][channel][place]. Returns 0 where images are too small for it: nothing is done.
TW_API i64 tw_turn(const float* from, i64 images, i64 channels, i64 places, float* to, i64 threads) {
  if (channels < lanes || places < turned_at_once) return 0;
  resize(threads < 0 ? -threads : threads, threads < 0);
  if (threads < 0) threads = -threads;
  Turning turning = {from, to, channels, places, (places - 1) / turned_at_once + 1};
  const i64 tasks = images * turning.blocks;
  parallel(turn, &turning, tasks, grain_for(tasks, turned_at_once * channels * turning_operations, threads), 0);
  return 1;
}
