// Runs a loop whose body is a list of stages: kernels and products of ours on memory that is known beforehand. Nothing of
// Python happens between two steps.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TW_API extern "C" __attribute__((visibility("default")))

struct tw_stage {  // addresses are bases[slot] + offset (bytes)
  int64_t kind;    // 0: launches, 1: a product, 2: a copy of `rows` bytes, 3: `rows` steps of a loop with `x` wires,
                   // 4: `rows` stages side by side, or where there are not threads for them, `held_task`, if not null
  void* function;    // what runs a launch table, or a product
  const void* task;     // the table, the product, the loop, or the stages
  void* held_function;  // the same where threads watch for work
  const void* held_task;  // of a loop: its wires; of stages side by side: what does the same in one
  int64_t x, x_offset, added, added_offset, out, out_offset;  // slots; added < 0: nothing is added
  int64_t rows, stride;
};

struct tw_part {  // what each step reads or makes of a tensor: its address is `base` + place * `step` (bytes)
  int64_t slot;
  char* base;
  int64_t step;
};

struct tw_state {  // a carried value is read in slot `in` and made in slot `out`
  int64_t in, out;
  char *first, *even, *odd;  // the value before the first step; two places that take turns
  int64_t stacked;           // bytes of a step if all values are kept, one behind the other from `even` on; else 0
  char* last;                // where the value goes that the last step made
  int64_t bytes;
};

struct tw_loop {
  char** bases;
  const tw_stage* stages;
  const tw_part* parts;
  const tw_state* states;
  int64_t count, part_count, state_count;
  int64_t* counter;
  const char* goes;  // the condition that the body makes; null: none
  int64_t last;      // the place of the last step if places count down, else -1
  int64_t threads;
  int64_t done;      // steps that were run
  int64_t hold;      // whether all steps together are worth other threads
};

struct tw_wire {  // how a loop inside is told an address: *to = bases[slot] + offset
  char** to;
  int64_t slot, offset;
};

typedef int64_t (*tw_launcher)(const void* table);
typedef void (*tw_multiply)(const void* p, const float* x, int64_t rows, int64_t stride, const float* added, float* out, int64_t threads);

namespace {
void (*hold)(void (*body)(void*), void* context);
int64_t (*held)(void);
void (*resize)(int64_t n, int pin);

void (*parallel)(void (*task)(void*, int64_t, int64_t, int64_t), void* context, int64_t count, int64_t grain, int more);

int64_t steps(tw_loop* l, int64_t end);
int64_t run(const tw_stage& s, char* const* bases, int64_t threads, bool watched);

struct Beside {
  const tw_stage* stages;
  char* const* bases;
  int64_t threads, error;
};
void beside(void* context, int64_t begin, int64_t end, int64_t) {
  Beside& b = *(Beside*)context;
  for (int64_t k = begin; k < end; k++)
    if (int64_t error = run(b.stages[k], b.bases, b.threads, false)) __atomic_store_n(&b.error, error, __ATOMIC_RELAXED);
}

int64_t run(const tw_stage& s, char* const* bases, int64_t threads, bool watched) {
  if (s.kind == 4) {
    const tw_stage* all = (const tw_stage*)s.task;
    Beside b = {all, bases, threads, 0};
    const int64_t have = threads < 0 ? -threads : threads;
    if (watched && have > 1 && have <= s.rows) {  // a thread for each, which none waits for step by step
      parallel(beside, &b, s.rows, 1, 0);
      return b.error;
    }
    if (s.held_task) return run(*(const tw_stage*)s.held_task, bases, threads, watched);
    for (int64_t k = 0; k < s.rows; k++)
      if (int64_t error = run(all[k], bases, threads, watched)) return error;
    return 0;
  }
  if (s.kind == 3) {
    tw_loop* inner = (tw_loop*)s.task;
    const tw_wire* wires = (const tw_wire*)s.held_task;
    for (int64_t k = 0; k < s.x; k++) *wires[k].to = bases[wires[k].slot] + wires[k].offset;
    inner->done = 0, inner->threads = threads;
    return steps(inner, s.rows);
  }
  if (s.kind == 0) return watched ? ((tw_launcher)s.held_function)(s.held_task) : ((tw_launcher)s.function)(s.task);
  char *from = bases[s.x] + s.x_offset, *to = bases[s.out] + s.out_offset;
  if (s.kind == 2) {
    memcpy(to, from, (size_t)s.rows);
    return 0;
  }
  const char* added = s.added < 0 ? nullptr : bases[s.added] + s.added_offset;
  ((tw_multiply)s.function)(s.task, (const float*)from, s.rows, s.stride, (const float*)added, (float*)to, threads);
  return 0;
}
int64_t steps(tw_loop* l, int64_t end) {
  const bool watched = held();
  for (int64_t t = l->done; t < end; t++) {
    const int64_t place = l->last < 0 ? t : l->last - t, before = l->last < 0 ? place - 1 : place + 1;
    if (l->counter) *l->counter = t;
    for (int64_t k = 0; k < l->part_count; k++) {
      const tw_part& p = l->parts[k];
      l->bases[p.slot] = p.base + place * p.step;
    }
    for (int64_t k = 0; k < l->state_count; k++) {
      const tw_state& s = l->states[k];
      char *even = s.stacked ? s.even + place * s.stacked : s.even, *odd = s.stacked ? s.even + before * s.stacked : s.odd;
      const bool turn = !s.stacked && (t & 1);
      l->bases[s.in] = t ? (turn ? even : odd) : s.first;
      l->bases[s.out] = turn ? odd : even;
    }
    for (int64_t k = 0; k < l->count; k++)
      if (int64_t error = run(l->stages[k], l->bases, l->threads, watched)) return error;
    l->done = t + 1;
    if (l->goes && !*l->goes) break;
  }
  if (l->done)
    for (int64_t k = 0; k < l->state_count; k++) memcpy(l->states[k].last, l->bases[l->states[k].out], (size_t)l->states[k].bytes);
  return 0;
}

struct Steps {
  tw_loop* loop;
  int64_t end, error;
};
void held_steps(void* context) {
  Steps& s = *(Steps*)context;
  s.error = steps(s.loop, s.end);
}
}  // namespace

// Addresses of the thread pool's functions; called once, before anything else.
TW_API void tw_attach(void* hold_at, void* held_at, void* resize_at, void* parallel_at) {
  hold = (decltype(hold))hold_at;
  held = (decltype(held))held_at;
  resize = (decltype(resize))resize_at;
  parallel = (decltype(parallel))parallel_at;
}

// Runs steps from number `l->done` up to `end`, or until the condition forbids another one. Returns the code of a failed
// check, 0 for none.
TW_API int64_t tw_loop_run(tw_loop* l, int64_t end) {
  Steps all = {l, end, 0};
  if (l->threads) resize(l->threads < 0 ? -l->threads : l->threads, l->threads < 0);
  if (l->hold) hold(held_steps, &all);
  else held_steps(&all);
  return all.error;
}
