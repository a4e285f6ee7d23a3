// Loads GPU kernels and runs the launch records of a plan: the only native call between two library calls of a plan.
// Speaks to the driver's library directly; its prototypes stand here, so that no CUDA header is needed.
#include <dlfcn.h>
#include <stdint.h>

#define TW_API extern "C" __attribute__((visibility("default")))

namespace {
typedef int result;  // CUresult; 0 is success
typedef void *context, *module, *function, *stream;

struct Driver {
  result (*init)(unsigned flags);
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
  result (*error_name)(result error, const char** text);
} driver;

struct Symbol {
  void* at;
  const char* name;
};

const Symbol symbols[] = {
    {&driver.init, "cuInit"},
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
    {&driver.error_name, "cuGetErrorName"},
};

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
};

struct tw_kernel {  // one built variant, loaded
  function entry;
  int64_t threads, shared;
};

struct tw_record {  // pointer p is bases[slots[p]] + offsets[p] (bytes)
  const tw_kernel *generic, *aligned;  // aligned: null, or right for pointers that are multiples of 16
  int64_t blocks, pointers;
  const int64_t *slots, *offsets;
  uint64_t** places;  // where pointer p stands among the values that `arguments` shows
  void** arguments;
};

struct tw_run {
  const tw_device* device;
  const tw_record* records;
  int64_t count;
  char* const* bases;
};

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
  return driver.init(0);
}

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
  *made->error = 0;
  return driver.host_address(&made->error_address, word, 0);
}

// Loads machine code and finds its kernel. `used` gets registers and local bytes of a thread.
TW_API int tw_cuda_load(const tw_device* device, const void* image, const char* name, int64_t threads, int64_t shared,
                        tw_kernel* made, int* used) {
  Current scope(device->primary);
  if (scope.error) return scope.error;
  module loaded = nullptr;
  result error = driver.module_load(&loaded, image);
  if (error || (error = driver.module_function(&made->entry, loaded, name))) return error;
  if (shared > SHARED_DEFAULT && (error = driver.function_set(made->entry, MAX_DYNAMIC_SHARED, (int)shared))) return error;
  made->threads = threads;
  made->shared = shared;
  if ((error = driver.function_get(&used[0], REGISTERS, made->entry))) return error;
  return driver.function_get(&used[1], LOCAL_BYTES, made->entry);
}

// Launches the records of one run on a stream, and returns at once. Gives the number of a check that failed in an
// earlier launch (which is then forgotten, and nothing is launched), a driver's error as its negative, or 0.
TW_API int64_t tw_cuda_launch(const tw_run* run, void* on) {
  int32_t failed = *run->device->error;
  if (__builtin_expect(failed != 0, 0)) {
    *run->device->error = 0;
    return failed;
  }
  Current scope(run->device->primary);
  if (scope.error) return -scope.error;
  for (int64_t i = 0; i < run->count; i++) {
    const tw_record& r = run->records[i];
    uint64_t bits = 0;
    for (int64_t p = 0; p < r.pointers; p++) {
      uint64_t address = (uint64_t)(run->bases[r.slots[p]] + r.offsets[p]);
      *r.places[p] = address;
      bits |= address;
    }
    const tw_kernel* k = r.aligned && !(bits & 15) ? r.aligned : r.generic;
    result error = driver.launch(k->entry, (unsigned)r.blocks, 1, 1, (unsigned)k->threads, 1, 1, (unsigned)k->shared, on,
                                 r.arguments, nullptr);
    if (error) return -error;
  }
  return 0;
}
