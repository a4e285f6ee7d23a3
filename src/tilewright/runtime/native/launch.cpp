// Runs the launch records of a plan, one after the other: the only native call between two library calls of a plan. Where
// they are all that there is to run, and are short, one call does everything else as well: it reads the addresses of the
// inputs, makes the outputs and hands them over.
#include <stddef.h>
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

// --- A call of a plan, as a function of Python's ---

typedef void* tw_object;  // PyObject*

// What is used of Python's stable C interface, declared by hand; the names are `Python.FUNCTIONS` in native_call.py.
struct tw_python {
  tw_object (*function)(void* method, tw_object self, tw_object module);
  tw_object (*first)(tw_object tuple, intptr_t place);
  tw_object (*item)(tw_object list, intptr_t place);
  unsigned long long (*number)(tw_object);
  tw_object (*integer)(long long);
  int (*compare)(tw_object, tw_object, int how);
  tw_object (*call)(tw_object function, tw_object const* args, size_t count, tw_object names);
  tw_object (*call_method)(tw_object name, tw_object const* args, size_t count, tw_object names);
  tw_object (*list)(intptr_t count);
  int (*put)(tw_object list, intptr_t place, tw_object);
  intptr_t (*length)(tw_object list);
  int (*replace)(tw_object list, intptr_t begin, intptr_t end, tw_object by);
  void (*take)(tw_object);
  void (*drop)(tw_object);
  tw_object is_contiguous, stride, data_ptr, none;  // three names, and None
};

struct tw_input {
  int64_t place, slot;  // number of the argument, and where its address goes among the bases
  tw_object strides;    // null: contiguous
};

struct tw_output {
  int64_t place, slot;  // number of the result, and as above
  tw_object shape, strides, dtype;
};

struct tw_call {
  const tw_run* run;
  char** bases;  // those of `run`
  int64_t inputs, outputs;
  const tw_input* input;
  const tw_output* output;
  tw_object make, fail;  // (shape, strides, dtype) -> tensor; raises what an error number means
};

namespace {
const int MAX_TENSORS = 32;  // inputs and outputs together; `MAX_TENSORS` of native_call.py
const int EQUAL = 2;  // Py_EQ
tw_python python;

// Whether `t` lies in memory as compiled for; negative with an error set.
int lies(const tw_input& i, tw_object t) {
  tw_object found = python.call_method(i.strides ? python.stride : python.is_contiguous, &t, 1, nullptr);
  if (!found) return -1;
  int same = i.strides ? python.compare(found, i.strides, EQUAL) : (int)python.number(found);
  python.drop(found);
  return same;
}

// The address of a tensor's first element; `bad` if an error is set.
char* address(tw_object t, bool& bad) {
  tw_object found = python.call_method(python.data_ptr, &t, 1, nullptr);
  bad = !found;
  if (bad) return nullptr;
  char* at = (char*)(uintptr_t)python.number(found);
  python.drop(found);
  return at;
}

// Makes the outputs; null with an error set.
tw_object outputs(const tw_call* w, char** at) {
  tw_object made = python.list(w->outputs);
  bool bad = !made;
  for (int64_t k = 0; k < w->outputs && !bad; k++) {
    const tw_output& o = w->output[k];
    tw_object how[] = {o.shape, o.strides, o.dtype};
    tw_object t = python.call(w->make, how, 3, nullptr);
    bad = !t;
    if (bad) break;
    at[k] = address(t, bad);
    python.put(made, o.place, t);
  }
  if (bad && made) python.drop(made);
  return bad ? nullptr : made;
}

// (self: a tuple whose first item is the address of a tw_call; args: the list of arguments, which is emptied) -> the list
// of results; None, and nothing has happened, if an input lies in memory in another way than compiled for.
//
// Other threads may run while Python makes something. So addresses are kept here until the kernels run, which no other
// thread can interrupt.
tw_object native_call(tw_object self, tw_object args) {
  const tw_call* w = (const tw_call*)(uintptr_t)python.number(python.first(self, 0));
  char* at[MAX_TENSORS];
  for (int64_t k = 0; k < w->inputs; k++) {
    tw_object t = python.item(args, w->input[k].place);
    int same = t ? lies(w->input[k], t) : -1;
    bool bad = same < 0;
    if (same > 0) at[k] = address(t, bad);
    if (bad) return nullptr;
    if (same == 0) {
      python.take(python.none);
      return python.none;
    }
  }
  tw_object made = outputs(w, at + w->inputs);
  if (!made) return nullptr;
  for (int64_t k = 0; k < w->inputs; k++) w->bases[w->input[k].slot] = at[k];
  for (int64_t k = 0; k < w->outputs; k++) w->bases[w->output[k].slot] = at[w->inputs + k];
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

struct {  // PyMethodDef
  const char* name;
  tw_object (*function)(tw_object, tw_object);
  int convention;  // METH_O
  const char* text;
} method = {"call", native_call, 8, nullptr};
}  // namespace

// Called once, before `tw_native_call`.
TW_API void tw_attach_python(const tw_python* found) { python = *found; }

// The function of Python's that makes the call which `self` names, and keeps `self`.
TW_API tw_object tw_native_call(tw_object self) { return python.function(&method, self, nullptr); }
