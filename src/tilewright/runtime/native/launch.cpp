// Runs the launch records of a plan, one after the other: the only native call between two library calls of a plan. Where
// they are all that there is to run, and are short, one call does everything else as well: it reads the addresses of the
// inputs, makes the outputs and hands them over.
//
// Follows known_call.cpp in one text.

typedef void (*tw_task)(void* context, int64_t begin, int64_t end, int64_t worker);

struct tw_record {  // parameter p lies at bases[slots[p]] + offsets[p] (bytes)
  tw_task task;
  int64_t count, grain, params;  // points and parameters of one row
  const int64_t *slots, *offsets;
  int64_t rows;  // the parameters of a row stand behind those of the one before
};

struct tw_kernel {  // points under the sizes at an address, and points worth one hand-over to another thread
  tw_task task;
  int64_t (*count)(const int64_t* sizes);
  int64_t (*grain)(const int64_t* sizes);
};

// Sizes the records of launches whose kernels are numbered `kernels`: those over no points are left out, and those that
// `alone` marks are one piece. `held`: threads watch for work, so that each point of the others is worth one. Returns how
// many are left, negative and less one if none of them takes longer than it takes to let other Python threads run.
TW_API int64_t tw_size(tw_record* records, const int64_t* kernels, int64_t count, const tw_kernel* of, const int64_t* sizes,
                       const char* alone, int64_t held) {
  int64_t left = 0;
  bool brief = true;
  for (int64_t i = 0; i < count; i++) {
    const tw_kernel& kernel = of[kernels[i]];
    int64_t points = kernel.count(sizes);
    if (points <= 0) continue;
    tw_record& r = records[left++] = records[i];
    int64_t all = r.rows * points, grain = held ? 1 : std::max<int64_t>(1, kernel.grain(sizes));
    brief &= all <= grain;
    r.count = points;
    r.grain = alone && alone[i] ? std::max(grain, all) : grain;
  }
  return brief ? -left - 1 : left;
}

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
  for (int64_t p = 0; p < r.params * r.rows; p++) pointers[p] = run->bases[r.slots[p]] + r.offsets[p];
}

struct List {  // what the points of all rows of a record are given
  Context context;
  const tw_record* record;
};

// The points of all rows, numbered one row after the other.
void list_task(void* of, int64_t begin, int64_t end, int64_t worker) {
  const List* list = (const List*)of;
  const tw_record& r = *list->record;
  Context context = list->context;
  while (begin < end) {
    int64_t row = begin / r.count, first = row * r.count, behind = first + r.count < end ? first + r.count : end;
    context.pointers = list->context.pointers + row * r.params;
    r.task(&context, begin - first, behind - first, worker);
    begin = behind;
  }
}

int64_t pointers_of(const tw_record& r) { return r.params > 0 ? r.params * r.rows : 1; }
}  // namespace

// Runs the records of one run on the caller alone. Returns as tw_launch does.
TW_API int64_t tw_launch_here(const tw_run* run) {
  int64_t error = 0;
  for (int64_t i = 0; i < run->count && !error; i++) {
    const tw_record& r = run->records[i];
    void* pointers[pointers_of(r)];
    fill(pointers, run, r);
    List list = {{pointers, run->symbols, scratch, &error}, &r};
    list_task(&list, 0, r.rows * r.count, 0);
  }
  return error;
}

// Runs the records of one run. Returns the code of a failed check, 0 for none; what stands behind it is not run.
TW_API int64_t tw_launch(const tw_run* run) {
  int64_t error = 0;
  resize(run->threads < 0 ? -run->threads : run->threads, run->threads < 0);
  for (int64_t i = 0; i < run->count && !error; i++) {
    const tw_record& r = run->records[i];
    void* pointers[pointers_of(r)];
    fill(pointers, run, r);
    List list = {{pointers, run->symbols, scratch, &error}, &r};
    bool listed = r.rows > 1;
    parallel(listed ? list_task : r.task, listed ? (void*)&list : &list.context, r.rows * r.count, r.grain, i + 1 < run->count);
  }
  return error;
}

// --- A call of a plan, as a function of Python's ---

struct tw_call {
  const tw_run* run;
  char** bases;  // those of `run`
  int64_t outputs;
  tw_inputs inputs;
  const tw_output* output;
  tw_object make, fail;  // (shape, strides, dtype) -> tensor; raises what an error number means
};

namespace {
// (self: a tuple whose first item is the address of a tw_call; args: the list of arguments, which is emptied) -> the list
// of results; None, and nothing has happened, if an input lies in memory in another way than compiled for, or is no plain
// tensor.
//
// Other threads may run while Python makes something. So addresses are kept here until the kernels run, which no other
// thread can interrupt.
tw_object native_call(tw_object self, tw_object args) {
  const tw_call* w = (const tw_call*)(uintptr_t)python.number(python.first(self, 0));
  char* at[w->inputs.count + w->outputs + 1];
  for (int64_t k = 0; k < w->inputs.count; k++) {
    tw_object t = python.item(args, w->inputs.input[k].place);
    if (!t) return nullptr;
    if (lies(w->inputs.input[k], t, &at[k])) continue;
    python.take(python.none);
    return python.none;
  }
  tw_object made = outputs(w->outputs, w->output, w->make, at + w->inputs.count);
  if (!made || made == python.none) return made;
  for (int64_t k = 0; k < w->inputs.count; k++) w->bases[w->inputs.input[k].slot] = at[k];
  for (int64_t k = 0; k < w->outputs; k++) w->bases[w->output[k].slot] = at[w->inputs.count + k];
  if (int64_t error = tw_launch_here(w->run)) {
    python.drop(made);
    tw_object code = python.integer(error);
    made = code ? python.call(w->fail, &code, 1, nullptr) : nullptr;
    if (code) python.drop(code);
    return made;
  }
  python.replace(args, 0, python.length(args), nullptr);
  return made;
}

tw_method calling = {"call", (void*)native_call, ONE, nullptr};
}  // namespace

// The function of Python's that makes the call which `self` names, and keeps `self`.
TW_API tw_object tw_native_call(tw_object self) { return python.function(&calling, self, nullptr); }
