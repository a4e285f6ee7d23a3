// Attention in one pass over the keys, in fp32: blocks of queries against blocks of keys, with the running maximum and sum
// of each row. Keys and values are packed first, as weights are. Follows product.cpp in its unit.

namespace {
constexpr i64 queries_each = 54, keys_each = 512;

struct Attention {  // steps in floats between batches, heads and places; the last dim is dense
  const float *q, *k, *v, *mask;
  float *out, *packed_k, *packed_v;
  i64 batch, heads, kv_heads, queries, keys, depth;
  i64 q_batch, q_head, q_place, k_batch, k_head, k_place, v_batch, v_head, v_place;
  i64 mask_batch, mask_head, mask_place, out_batch, out_head, out_place;
  i64 causal, trim;  // trim: what is masked may be taken for finite
  float scale;
  void* (*scratch)(i64 worker, i64 bytes);
  i64 failed;
};

inline i64 key_panels(const Attention& a) { return (a.keys + panel - 1) / panel; }
inline i64 depth_panels(const Attention& a) { return (a.depth + panel - 1) / panel; }

// One panel of keys of one head: keys as [depth][panel], values as [depth panel][keys][panel].
void pack_keys(void* context, i64 begin, i64 end, i64) {
  const Attention& a = *(const Attention*)context;
  const i64 panels = key_panels(a), wide = depth_panels(a);
  for (i64 i = begin; i < end; i++) {
    const i64 p = i % panels, head = i / panels % a.kv_heads, image = i / panels / a.kv_heads, first = p * panel;
    const i64 n = min(i64(panel), a.keys - first);
    const float* k = a.k + image * a.k_batch + head * a.k_head + first * a.k_place;
    const float* v = a.v + image * a.v_batch + head * a.v_head + first * a.v_place;
    float* to_k = a.packed_k + ((image * a.kv_heads + head) * panels + p) * a.depth * panel;
    float* to_v = a.packed_v + ((image * a.kv_heads + head) * wide * panels + p) * panel * panel;
    for (i64 j = 0; j < panel; j += lanes)
      for (i64 d = 0; d < a.depth; d += lanes) {
        const i64 left = a.depth - d;
        V rows[lanes];
        for (int l = 0; l < lanes; l++) {
          const float* from = k + (j + l) * a.k_place + d;
          if (j + l >= n) rows[l] = splat<float, lanes>(0.f);
          else rows[l] = left >= lanes ? load<float, lanes>(from) : load_part<float, lanes>(from, left);
        }
        transpose(rows);
        for (i64 l = 0; l < min(left, i64(lanes)); l++) store(to_k + (d + l) * panel + j, rows[l]);
      }
    for (i64 w = 0; w < wide; w++) {
      const i64 columns = min(i64(panel), a.depth - w * panel);
      for (i64 d = 0; d < (columns <= panel / 2 ? panel / 2 : panel); d += lanes)
        for (i64 j = 0; j < panel; j++) {
          float* to = to_v + w * panels * panel * panel + j * panel + d;
          const float* from = v + j * a.v_place + w * panel + d;
          const i64 left = columns - d;
          if (j >= n || left <= 0) store(to, splat<float, lanes>(0.f));
          else if (left >= lanes) store(to, load<float, lanes>(from));
          else store(to, load_part<float, lanes>(from, left));
        }
    }
  }
}

constexpr float masked = -1e30f;  // where a row has a key with more than that, one with less has no weight

// Which of the `panels` panels from key `start` on somebody among `count` queries can see, in order; all of them if some
// query sees no key at all (then it sees all of them alike). Returns how many.
i64 seen_panels(const Attention& a, const float* mask, i64 count, i64 start, i64 panels, i64* which) {
  const V low = splat<float, lanes>(masked);
  bool some[keys_each / panel] = {};
  bool all = !mask || !a.trim;
  for (i64 r = 0; r < count && !all; r++) {
    const float* row = mask + r * a.mask_place;
    bool sees = false;
    for (i64 p = 0; p < key_panels(a) && (!sees || p < start / panel + panels); p++) {
      const i64 here = p - start / panel;
      if (sees && (here < 0 || some[here])) continue;
      V most = splat<float, lanes>(-__builtin_inff());
      for (i64 j = p * panel; j < min(a.keys, (p + 1) * panel); j += lanes) {
        const i64 left = a.keys - j;
        most = maximum(most, left >= lanes ? load<float, lanes>(row + j) : select(iota<i32, lanes>() < splat<i32, lanes>(i32(left)), load_part<float, lanes>(row + j, left), low));
      }
      bool found = false;
      for (int j = 0; j < lanes; j++) found = found || !(get(most, j) <= masked);
      sees = sees || found;
      if (found && here >= 0 && here < panels) some[here] = true;
    }
    all = !sees;
  }
  i64 n = 0;
  for (i64 p = 0; p < panels; p++)
    if (all || some[p]) which[n++] = p;
  return n;
}

// Row r of the scores of the `panels` panels `which`, n of whose keys count, becomes exp(scaled score - maximum); returns the factor
// for what was summed before.
float soften(const Attention& a, float* row, i64 panels, const i64* which, i64 n, const float* mask, float& top, float& sum) {
  const V scale = splat<float, lanes>(a.scale), low = splat<float, lanes>(-__builtin_inff());
  V most = low;
  for (i64 p = 0; p < panels; p++)
    for (int j = 0; j < panel; j += lanes) {
      float* at = row + p * queries_each * panel + j;
      const i64 place = which[p] * panel + j, left = n - place;
      V s = load<float, lanes>(at) * scale;
      if (mask && left >= lanes) s = s + load<float, lanes>(mask + place);
      else if (mask && left > 0) s = s + load_part<float, lanes>(mask + place, left);
      if (left < lanes) s = select(iota<i32, lanes>() < splat<i32, lanes>(left < 0 ? 0 : i32(left)), s, low);
      store(at, s);
      most = maximum(most, s);
    }
  float high = top;
  for (int j = 0; j < lanes; j++) high = maximum(high, get(most, j));
  if (high == -__builtin_inff()) {  // nothing counts so far
    for (i64 p = 0; p < panels; p++)
      for (int j = 0; j < panel; j += lanes) store(row + p * queries_each * panel + j, splat<float, lanes>(0.f));
    return 1.f;
  }
  const float before = top == high ? 1.f : exp(top - high);
  V total = splat<float, lanes>(0.f);
  for (i64 p = 0; p < panels; p++)
    for (int j = 0; j < panel; j += lanes) {
      float* at = row + p * queries_each * panel + j;
      const V e = exp(load<float, lanes>(at) - splat<float, lanes>(high));
      store(at, e);
      total = total + e;
    }
  float part = 0.f;
  for (int j = 0; j < lanes; j++) part += get(total, j);
  sum = sum * before + part;
  top = high;
  return before;
}

void multiply(int J, int m, const float* const* rows, i64 taps, i64 n, const float* w, float* tile, bool more) {
  const Walk walk = {taps, n, n, taps, 1};
  if (J == across) sums_of<across>(m, rows, walk, w, {tile, more}, w, 0);
  else sums_of<across / 2>(m, rows, walk, w, {tile, more}, w, 0);
}

// `count` queries of one head from `first` on.
void attend(const Attention& a, i64 image, i64 head, i64 first, i64 count, float* memory) {
  const i64 panels = key_panels(a), wide = depth_panels(a), kv = head / (a.heads / a.kv_heads);
  const float* keys = a.packed_k + (image * a.kv_heads + kv) * panels * a.depth * panel;
  const float* values = a.packed_v + (image * a.kv_heads + kv) * wide * panels * panel * panel;
  const float* q = a.q + image * a.q_batch + head * a.q_head + first * a.q_place;
  float *scores = memory, *out = scores + queries_each * keys_each, *top = out + wide * queries_each * panel;
  float* sum = top + queries_each;
  for (i64 r = 0; r < count; r++) top[r] = -__builtin_inff(), sum[r] = 0.f;
  for (i64 i = 0; i < wide * queries_each * panel; i += lanes) store(out + i, splat<float, lanes>(0.f));
  const i64 last = a.causal ? min(a.keys, first + count) : a.keys;
  const float* rows[keys_each / panel * down];
  for (i64 start = 0; start < last; start += keys_each) {
    const i64 n = min(keys_each, last - start), place = start / panel;
    const float* hidden = a.mask ? a.mask + image * a.mask_batch + head * a.mask_head + first * a.mask_place : nullptr;
    i64 which[keys_each / panel];
    const i64 taps = seen_panels(a, hidden, count, start, (n + panel - 1) / panel, which);
    for (i64 t = 0; t < taps; t++)
      for (i64 r = 0; r < count; r += down) {
        const int m = int(min(i64(down), count - r));
        for (int i = 0; i < m; i++) rows[i] = q + (r + i) * a.q_place;
        multiply(across, m, rows, 1, a.depth, keys + (place + which[t]) * a.depth * panel, scores + (t * queries_each + r) * panel, false);
      }
    for (i64 r = 0; r < count; r++) {
      const i64 seen = a.causal ? min(n, first + r + 1 - start) : n;
      const float* mask = hidden ? hidden + r * a.mask_place + start : nullptr;
      const float before = soften(a, scores + r * panel, taps, which, seen < 0 ? 0 : seen, mask, top[r], sum[r]);
      if (before != 1.f)
        for (i64 w = 0; w < wide; w++)
          for (int j = 0; j < panel; j += lanes) {
            float* at = out + (w * queries_each + r) * panel + j;
            store(at, load<float, lanes>(at) * splat<float, lanes>(before));
          }
    }
    for (i64 w = 0; w < wide; w++)
      for (i64 r = 0; r < count; r += down) {
        const int m = int(min(i64(down), count - r));
        const i64 group = max(i64(1), chain / panel);
        for (i64 t = 0, some; t < taps; t += some) {
          for (some = 1; some < min(group, taps - t) && which[t + some] == which[t] + some;) some++;
          for (i64 u = 0; u < some; u++)
            for (int i = 0; i < m; i++) rows[u * down + i] = scores + ((t + u) * queries_each + r + i) * panel;
          multiply(
              a.depth - w * panel <= panel / 2 ? across / 2 : across, m, rows, some, panel,
              values + (w * panels + place + which[t]) * panel * panel, out + (w * queries_each + r) * panel, true);
        }
      }
  }
  for (i64 r = 0; r < count; r++) {
    float* to = a.out + image * a.out_batch + head * a.out_head + (first + r) * a.out_place;
    const float by = sum[r] == 0.f ? 0.f : 1.f / sum[r];
    for (i64 d = 0; d < a.depth; d += lanes) {
      const V v = load<float, lanes>(out + (d / panel * queries_each + r) * panel + d % panel) * splat<float, lanes>(by);
      if (a.depth - d >= lanes) store(to + d, v);
      else store_part(to + d, v, a.depth - d);
    }
  }
}

void attend_all(void* context, i64 begin, i64 end, i64 worker) {
  Attention& a = *(Attention*)context;
  const i64 blocks = (a.queries + queries_each - 1) / queries_each;
  const i64 floats = queries_each * (keys_each + depth_panels(a) * panel + 2);
  float* memory = (float*)a.scratch(worker, floats * 4);
  if (!memory) {
    __atomic_store_n(&a.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  for (i64 i = begin; i < end; i++) {
    const i64 block = blocks - 1 - i % blocks, head = i / blocks % a.heads, image = i / blocks / a.heads;
    const i64 first = a.queries * block / blocks;
    attend(a, image, head, first, a.queries * (block + 1) / blocks - first, memory);
  }
}
}  // namespace

// Floats that packed keys, or packed values, of one head take.
TW_API i64 tw_attention_floats(i64 keys, i64 depth) {
  return (keys + panel - 1) / panel * panel * ((depth + panel - 1) / panel * panel);
}

// out = softmax(scale * q k^T + mask) v, for each head. Returns 0, or 1 if memory ran out.
TW_API i64 tw_attention(Attention* a, void* scratch, i64 threads) {
  if (a->batch * a->heads * a->queries == 0) return 0;
  resize(threads < 0 ? -threads : threads, threads < 0);
  a->scratch = (decltype(a->scratch))scratch;
  a->failed = 0;
  parallel(pack_keys, a, a->batch * a->kv_heads * key_panels(*a), max(i64(1), 64 / max(i64(1), a->depth)), 1);
  parallel(attend_all, a, a->batch * a->heads * ((a->queries + queries_each - 1) / queries_each), 1, 0);
  return a->failed;
}
