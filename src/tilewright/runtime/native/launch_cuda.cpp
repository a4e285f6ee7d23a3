// Loads GPU kernels and runs the launch records of a plan: the only native call between two library calls of a plan.
// Speaks to the driver's library directly; its prototypes stand here, so that no CUDA header is needed.
//
// Follows known_call.cpp in one text.
#include <dlfcn.h>

namespace {
typedef int result;  // CUresult; 0 is success
typedef void *context, *module, *function, *stream, *graph, *node, *executable;

struct Node {  // CUDA_KERNEL_NODE_PARAMS, as `cuGraphAddKernelNode` takes it since it exists
  function f;
  unsigned grid[3], block[3], shared;
  void **arguments, **extra;
};

struct alignas(8) Attribute {  // CUlaunchAttribute
  int id, unused;
  int value[16];
};

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  stream on;
  const Attribute* attributes;
  unsigned count;
};

struct Edge {  // CUgraphEdgeData
  unsigned char from, to, type, unused[5];
};

struct Driver {
  result (*init)(unsigned flags);
  result (*version)(int* number);
  result (*device_get)(int* device, int ordinal);
  result (*primary_retain)(context* made, int device);
  result (*context_get)(context* current);
  result (*context_push)(context pushed);
  result (*context_pop)(context* popped);
  result (*host_alloc)(void** memory, uint64_t bytes, unsigned flags);
  result (*host_address)(uint64_t* address, void* memory, unsigned flags);
  result (*module_load)(module* made, const void* image);
  result (*module_function)(function* found, module in, const char* name);
  result (*function_set)(function f, int attribute, int value);
  result (*function_get)(int* value, int attribute, function f);
  result (*launch)(function f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, stream on, void** arguments, void** extra);
  result (*encode)(void* map, int type, unsigned rank, void* base, const uint64_t* extents, const uint64_t* strides,
                   const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill);
  result (*error_name)(result error, const char** text);
  result (*stream_capturing)(stream on, int* status);
  result (*graph_create)(graph* made, unsigned flags);
  result (*graph_add)(node* made, graph in, const node* after, size_t count, const Node* what);
  result (*graph_instantiate)(executable* made, graph from, unsigned long long flags);
  result (*graph_set)(executable in, node which, const Node* what);
  result (*graph_launch)(executable what, stream on);
  result (*copy)(uint64_t target, uint64_t source, size_t bytes, stream on);
  result (*graph_destroy)(graph what);
  result (*graph_end)(executable what);
  result (*launch_as)(const Config* how, function f, void** arguments, void** extra);  // null in old drivers, as below
  result (*graph_order)(graph in, const node* from, const node* to, const Edge* edges, size_t count);
} driver;

struct Symbol {
  void* at;
  const char* name;
};

const Symbol symbols[] = {
    {&driver.init, "cuInit"},
    {&driver.version, "cuDriverGetVersion"},
    {&driver.device_get, "cuDeviceGet"},
    {&driver.primary_retain, "cuDevicePrimaryCtxRetain"},
    {&driver.context_get, "cuCtxGetCurrent"},
    {&driver.context_push, "cuCtxPushCurrent_v2"},
    {&driver.context_pop, "cuCtxPopCurrent_v2"},
    {&driver.host_alloc, "cuMemHostAlloc"},
    {&driver.host_address, "cuMemHostGetDevicePointer_v2"},
    {&driver.module_load, "cuModuleLoadData"},
    {&driver.module_function, "cuModuleGetFunction"},
    {&driver.function_set, "cuFuncSetAttribute"},
    {&driver.function_get, "cuFuncGetAttribute"},
    {&driver.launch, "cuLaunchKernel"},
    {&driver.encode, "cuTensorMapEncodeTiled"},
    {&driver.error_name, "cuGetErrorName"},
    {&driver.stream_capturing, "cuStreamIsCapturing"},
    {&driver.graph_create, "cuGraphCreate"},
    {&driver.graph_add, "cuGraphAddKernelNode"},
    {&driver.graph_instantiate, "cuGraphInstantiateWithFlags"},
    {&driver.graph_set, "cuGraphExecKernelNodeSetParams"},
    {&driver.graph_launch, "cuGraphLaunch"},
    {&driver.copy, "cuMemcpyDtoDAsync_v2"},
    {&driver.graph_destroy, "cuGraphDestroy"},
    {&driver.graph_end, "cuGraphExecDestroy"},
};

const Symbol newer[] = {  // both, or neither is used
    {&driver.launch_as, "cuLaunchKernelEx"},
    {&driver.graph_order, "cuGraphAddDependencies_v2"},
};
const int ORDERS_GRAPHS = 12030;  // drivers from here on launch early, in streams, captures and graphs
const Attribute EARLY = {6, 0, {1}};  // PROGRAMMATIC_STREAM_SERIALIZATION
const result NOT_SUPPORTED = 801;
const Edge AFTER_RELEASE = {1, 0, 1, {}};  // from the port and of the type PROGRAMMATIC

const int SHARED_DEFAULT = 48 << 10;  // above it, a function must ask
const int MAX_DYNAMIC_SHARED = 8, REGISTERS = 4, LOCAL_BYTES = 3;  // attributes of functions
const unsigned PORTABLE = 1, MAPPED = 2;                           // host memory for all contexts, seen by the device

// Makes a context current for one scope; free of charge where it is already.
struct Current {
  bool pushed = false;
  result error = 0;
  explicit Current(context wanted) {
    context now = nullptr;
    error = driver.context_get(&now);
    if (!error && now != wanted) {
      error = driver.context_push(wanted);
      pushed = !error;
    }
  }
  ~Current() {
    context popped;
    if (pushed) driver.context_pop(&popped);
  }
};
}  // namespace

struct tw_device {
  context primary;
  volatile int32_t* error;  // pinned host memory: kernels write the number of a failed check here
  uint64_t error_address;   // the same for the device
  function put;             // writes its arguments to memory; null before the first launch of a list
};

struct tw_kernel {  // one built variant, loaded
  function entry;
  int64_t threads, shared;
  int64_t early;  // its code waits for the end of the kernel in front before it touches memory
  int64_t releases_first;  // before that it lets the kernel behind begin
  int64_t max_blocks;  // of a launch, which then go through many grid points; 0: one for each point
};

struct tw_map {  // a tensor descriptor; dims here have the contiguous one first, as the driver wants them
  uint64_t* place;         // 128 bytes of it, at a multiple of 64
  int64_t pointer, start;  // it begins so many bytes behind this pointer
  uint64_t made;           // the address that it was made for; 0: none
  int64_t type, swizzle, rank;
  uint64_t extents[5], strides[5];  // elements; bytes from one to the next, of the contiguous dim first
  uint32_t box[6];
};

struct tw_record {  // pointer p is bases[slots[p]] + offsets[p] (bytes)
  const tw_kernel *generic, *aligned;  // aligned: right for pointers that are multiples of 16; one of them may be null
  int64_t blocks, pointers;
  const int64_t *slots, *offsets;
  uint64_t** places;  // where pointer p stands among the values that both lists of arguments show
  void **arguments, **special;  // special: of the aligned variant, which may have descriptors
  tw_map* maps;
  int64_t mapped;
  const tw_kernel *chosen, *bundled;  // the variant of this call, and of the node in the bundle
  node member;
  int64_t stale;  // a pointer has changed since the node was set
  uint64_t table;  // of a list: where the kernel reads its pointers; 0: they are arguments
  const uint64_t* addresses;  // what must stand there
  int64_t told;  // it does, for what the run's stream does next
  int64_t outside;  // it may be launched before a kernel has ended that is not of its run
};

struct tw_run {
  tw_device* device;
  tw_record* records;
  int64_t count;
  char* const* bases;
  int64_t least;  // runs of so many records are launched as one bundle; 0: none are
  int64_t calls;  // -1: no bundle can be made
  executable bundle;
};

namespace {
const int64_t UNBUILT = -1000000;  // no error of the driver's
const int64_t PLAIN_CALLS = 2;  // before a bundle is made: most programs that run thrice run often

const int WHOLE_LINES = 2;  // promotion: the cache fetches 128 bytes
const int FLAWED = 13010;   // drivers up to here set a bit in descriptors that those of small tensors must not have
const uint64_t SMALL = 128 << 10, BIT = 1ull << 21;  // (CUTLASS clears it likewise)
int driver_version = 0;

void** arguments(const tw_record& r) { return r.chosen == r.aligned ? r.special : r.arguments; }

unsigned blocks_of(const tw_record& r) {
  const int64_t most = r.chosen->max_blocks;
  return (unsigned)(most && most < r.blocks ? most : r.blocks);
}

Node describe(const tw_record& r) {
  const tw_kernel* k = r.chosen;
  return {k->entry, {blocks_of(r), 1, 1}, {(unsigned)k->threads, 1, 1}, (unsigned)k->shared, arguments(r), nullptr};
}

// Makes a descriptor for an address.
result make(tw_map& m, uint64_t base) {
  const uint32_t steps[5] = {1, 1, 1, 1, 1};
  result error = driver.encode(m.place, (int)m.type, (unsigned)m.rank, (void*)base, m.extents, m.strides + 1, m.box, steps, 0,
                               (int)m.swizzle, WHOLE_LINES, 0);
  m.made = error ? 0 : base;
  if (error || driver_version > FLAWED) return error;
  uint64_t last = 0;
  for (int64_t d = 0; d < m.rank; d++) last += (m.extents[d] - 1) * m.strides[d];
  if (last + 1 < SMALL) m.place[1] &= ~BIT;
  return error;
}

// Reads this call's addresses, chooses the variant, and makes its descriptors where their pointers have moved.
result fill(tw_record& r, char* const* bases) {
  uint64_t bits = 0;
  for (int64_t p = 0; p < r.pointers; p++) {
    uint64_t address = (uint64_t)(bases[r.slots[p]] + r.offsets[p]);
    if (*r.places[p] != address) {
      *r.places[p] = address;
      r.stale = !r.table;  // the arguments of a list stay
      r.told = 0;
    }
    bits |= address;
  }
  r.chosen = r.aligned && !(bits & 15) ? r.aligned : r.generic;
  if (r.chosen != r.aligned) return 0;
  for (int64_t i = 0; i < r.mapped; i++) {
    tw_map& m = r.maps[i];
    uint64_t base = *r.places[m.pointer] + m.start;
    result error = m.made == base ? 0 : make(m, base);
    if (error) return error;
  }
  return 0;
}

// Whether a record of a run is launched before the kernel in front has ended: then its code waits. So does that of the
// kernel in front, or it was launched behind the end of what stood there, so that its end is the end of all before it.
// What others launch behind a run may begin at the release of the last record: all before that one must have ended.
bool is_early(const tw_run* run, int64_t i) {
  const tw_record& r = run->records[i];
  bool last_releases_first = r.chosen->releases_first && i + 1 == run->count;
  return r.chosen->early && !last_releases_first && driver.launch_as && (i > 0 || r.outside);
}

result launch(const tw_record& r, bool early, stream on) {
  const tw_kernel* k = r.chosen;
  unsigned blocks = blocks_of(r), threads = (unsigned)k->threads, shared = (unsigned)k->shared;
  if (early) {
    const Config how = {{blocks, 1, 1}, {threads, 1, 1}, shared, on, &EARLY, 1};
    result error = driver.launch_as(&how, k->entry, arguments(r), nullptr);
    if (error != NOT_SUPPORTED) return error;
  }
  return driver.launch(k->entry, blocks, 1, 1, threads, 1, 1, shared, on, arguments(r), nullptr);
}

// Adds record i of a run to a graph, behind the record in front.
bool add(tw_run* run, int64_t i, graph whole) {
  tw_record& r = run->records[i];
  Node what = describe(r);
  const node* front = i ? &run->records[i - 1].member : nullptr;
  bool early = i && is_early(run, i);
  if (driver.graph_add(&r.member, whole, early ? nullptr : front, i && !early, &what)) return false;
  return !early || !driver.graph_order(whole, front, &r.member, &AFTER_RELEASE, 1);
}

// The records of a run as a graph of the driver's, one after the other: one call launches all of them.
bool make_bundle(tw_run* run) {
  graph whole = nullptr;
  if (driver.graph_create(&whole, 0)) return false;
  bool good = true;
  for (int64_t i = 0; i < run->count && good; i++) {
    good = add(run, i, whole);
    run->records[i].bundled = run->records[i].chosen;
    run->records[i].stale = 0;
  }
  good = good && !driver.graph_instantiate(&run->bundle, whole, 0);
  driver.graph_destroy(whole);
  return good;
}

// A kernel that writes its arguments where lists read theirs: what is launched, or captured, keeps its arguments, so that
// nothing on the host must outlive the launch. 500 addresses are nearly all that arguments may have (4 KB).
const unsigned ADDRESSES = 500;
const char PUT[] = R"(
.version 6.0
.target sm_50
.address_size 64
.visible .entry tw_put(.param .u64 target, .param .u64 count, .param .align 8 .b8 addresses[4000]) {
  .reg .pred %past;
  .reg .b32 %thread;
  .reg .b64 %number, %count, %from, %to, %address;
  mov.u32 %thread, %tid.x;
  cvt.u64.u32 %number, %thread;
  ld.param.u64 %count, [count];
  setp.ge.u64 %past, %number, %count;
  @%past ret;
  shl.b64 %number, %number, 3;
  mov.b64 %from, addresses;
  add.s64 %from, %from, %number;
  ld.param.u64 %address, [%from];
  ld.param.u64 %to, [target];
  cvta.to.global.u64 %to, %to;
  add.s64 %to, %to, %number;
  st.global.u64 [%to], %address;
  ret;
})";

// Writes the table of a list.
result tell(tw_device* device, const tw_record& r, stream on) {
  if (!device->put) {
    module loaded = nullptr;
    result error = driver.module_load(&loaded, PUT);
    if (error || (error = driver.module_function(&device->put, loaded, "tw_put"))) return error;
  }
  for (int64_t k = 0; k < r.pointers; k += ADDRESSES) {
    uint64_t target = r.table + 8 * k, count = r.pointers - k < ADDRESSES ? r.pointers - k : ADDRESSES;
    uint64_t addresses[ADDRESSES] = {};
    for (uint64_t i = 0; i < count; i++) addresses[i] = r.addresses[k + i];
    void* arguments[] = {&target, &count, addresses};
    result error = driver.launch(device->put, 1, 1, 1, (ADDRESSES + 31) / 32 * 32, 1, 1, 0, on, arguments, nullptr);
    if (error) return error;
  }
  return 0;
}

// Writes the tables of a run that are not as its kernels must find them. What is captured writes all of them, each time
// that it runs, and whoever launches later must not take them for written.
result tell_all(tw_run* run, stream on) {
  int capturing = -1;
  for (int64_t i = 0; i < run->count; i++) {
    tw_record& r = run->records[i];
    if (!r.table) continue;
    result error = capturing < 0 ? driver.stream_capturing(on, &capturing) : 0;
    if (!error && (capturing || !r.told)) error = tell(run->device, r, on);
    if (error) return error;
    r.told = !capturing;
  }
  return 0;
}

// Launches a run as a bundle; false if it must be launched record by record.
bool launch_bundle(tw_run* run, stream on) {
  int capturing = 0;
  if (driver.stream_capturing(on, &capturing) || capturing) return false;
  if (!run->bundle && !make_bundle(run)) {
    run->calls = -1;
    return false;
  }
  for (int64_t i = 0; i < run->count; i++) {
    if (run->records[i].chosen != run->records[i].bundled) return false;
  }
  for (int64_t i = 0; i < run->count; i++) {
    tw_record& r = run->records[i];
    if (!r.stale) continue;
    Node what = describe(r);
    if (driver.graph_set(run->bundle, r.member, &what)) return false;
    r.stale = 0;
  }
  return !driver.graph_launch(run->bundle, on);
}
}  // namespace

// Finds the driver. Returns 0, a driver's error, or -1 with `text` set if the library is not there.
TW_API int tw_cuda_open(const char* library, const char** text) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    *text = dlerror();
    return -1;
  }
  for (const Symbol& s : symbols) {
    *(void**)s.at = dlsym(handle, s.name);
    if (!*(void**)s.at) {
      *text = s.name;
      return -1;
    }
  }
  for (const Symbol& s : newer) *(void**)s.at = dlsym(handle, s.name);
  result error = driver.init(0);
  if (!error) error = driver.version(&driver_version);
  if (driver_version < ORDERS_GRAPHS || !driver.graph_order) driver.launch_as = nullptr;
  return error;
}

// Whether kernels can be launched before the kernel in front has ended.
TW_API int tw_cuda_launches_early() { return driver.launch_as != nullptr; }

TW_API const char* tw_cuda_error(int error) {
  const char* text = nullptr;
  return driver.error_name && !driver.error_name(error, &text) && text ? text : "unknown error";
}

// The device's primary context (torch's) and its error word.
TW_API int tw_cuda_device(int ordinal, tw_device* made) {
  int device = 0;
  result error = driver.device_get(&device, ordinal);
  if (error || (error = driver.primary_retain(&made->primary, device))) return error;
  Current scope(made->primary);
  if (scope.error) return scope.error;
  void* word = nullptr;
  if ((error = driver.host_alloc(&word, 64, PORTABLE | MAPPED))) return error;
  made->error = (volatile int32_t*)word;
  made->put = nullptr;
  *made->error = 0;
  return driver.host_address(&made->error_address, word, 0);
}

// Loads machine code and finds its kernel, of which the rest is known. `used` gets registers and local bytes of a thread.
TW_API int tw_cuda_load(const tw_device* device, const void* image, const char* name, tw_kernel* made, int* used) {
  Current scope(device->primary);
  if (scope.error) return scope.error;
  module loaded = nullptr;
  result error = driver.module_load(&loaded, image);
  if (error || (error = driver.module_function(&made->entry, loaded, name))) return error;
  if (made->shared > SHARED_DEFAULT && (error = driver.function_set(made->entry, MAX_DYNAMIC_SHARED, (int)made->shared)))
    return error;
  if ((error = driver.function_get(&used[0], REGISTERS, made->entry))) return error;
  return driver.function_get(&used[1], LOCAL_BYTES, made->entry);
}

// Launches the records of one run on a stream, and returns at once. Gives the number of a check that failed in an
// earlier launch (which is then forgotten, and nothing is launched), a driver's error as its negative, or 0. UNBUILT:
// nothing was launched, as addresses need a variant that is not there: that of every record with nothing `chosen`.
TW_API int64_t tw_cuda_launch(tw_run* run, void* on) {
  int32_t failed = *run->device->error;
  if (__builtin_expect(failed != 0, 0)) {
    *run->device->error = 0;
    return failed;
  }
  Current scope(run->device->primary);
  if (scope.error) return -scope.error;
  bool whole = true;
  for (int64_t i = 0; i < run->count; i++) {
    result error = fill(run->records[i], run->bases);
    if (error) return -error;
    whole &= run->records[i].chosen != nullptr;
  }
  if (__builtin_expect(!whole, 0)) return UNBUILT;
  if (result error = tell_all(run, on)) return -error;
  if (run->least && run->count >= run->least && run->calls >= 0) {
    if (run->calls < PLAIN_CALLS) {
      run->calls++;
    } else if (launch_bundle(run, on)) {
      return 0;
    }
  }
  for (int64_t i = 0; i < run->count; i++) {
    if (result error = launch(run->records[i], is_early(run, i), on)) return -error;
  }
  return 0;
}

// Launches an instantiated graph. Returns 0 or a driver's error.
TW_API int tw_cuda_replay(const tw_device* device, void* instance, void* on) {
  Current scope(device->primary);
  return scope.error ? scope.error : driver.graph_launch(instance, on);
}

// Forgets the bundle of a run that will not run again.
TW_API void tw_cuda_forget(tw_run* run) {
  Current scope(run->device->primary);
  if (run->bundle) driver.graph_end(run->bundle);
  run->bundle = nullptr;
}
