// Runs the launch records of a plan, one after the other: the only native call between two library calls of a plan.
#include <stdint.h>

#define TW_API extern "C" __attribute__((visibility("default")))

typedef void (*tw_task)(void* context, int64_t begin, int64_t end, int64_t worker);

struct tw_record {  // parameter p lies at bases[slots[p]] + offsets[p] (bytes)
  tw_task task;
  int64_t count, grain, params;
  const int64_t *slots, *offsets;
};

namespace {
struct Context {  // as generated kernels read it
  void* const* pointers;
  const int64_t* symbols;
  void* (*scratch)(int64_t worker, int64_t bytes);
  int64_t* error;
};

void (*parallel)(tw_task task, void* context, int64_t count, int64_t grain, int more);
void* (*scratch)(int64_t worker, int64_t bytes);
void (*resize)(int64_t n, int pin);
}  // namespace

// Addresses of the thread pool's functions; called once, before anything else.
TW_API void tw_attach(void* parallel_at, void* scratch_at, void* resize_at) {
  parallel = (decltype(parallel))parallel_at;
  scratch = (decltype(scratch))scratch_at;
  resize = (decltype(resize))resize_at;
}

struct tw_run {
  const tw_record* records;
  int64_t count;
  char* const* bases;
  const int64_t* symbols;
  int64_t threads;  // negative: that many, each worker pinned to a core
};

namespace {
inline void fill(void** pointers, const tw_run* run, const tw_record& r) {
  for (int64_t p = 0; p < r.params; p++) pointers[p] = run->bases[r.slots[p]] + r.offsets[p];
}
}  // namespace

// Runs the records of one run on the caller alone. Returns as tw_launch does.
TW_API int64_t tw_launch_here(const tw_run* run) {
  int64_t error = 0;
  for (int64_t i = 0; i < run->count && !error; i++) {
    const tw_record& r = run->records[i];
    void* pointers[r.params > 0 ? r.params : 1];
    fill(pointers, run, r);
    Context context = {pointers, run->symbols, scratch, &error};
    r.task(&context, 0, r.count, 0);
  }
  return error;
}

// Runs the records of one run. Returns the code of a failed check, 0 for none; what stands behind it is not run.
TW_API int64_t tw_launch(const tw_run* run) {
  int64_t error = 0;
  resize(run->threads < 0 ? -run->threads : run->threads, run->threads < 0);
  for (int64_t i = 0; i < run->count && !error; i++) {
    const tw_record& r = run->records[i];
    void* pointers[r.params > 0 ? r.params : 1];
    fill(pointers, run, r);
    Context context = {pointers, run->symbols, scratch, &error};
    parallel(r.task, &context, r.count, r.grain, i + 1 < run->count);
  }
  return error;
}
