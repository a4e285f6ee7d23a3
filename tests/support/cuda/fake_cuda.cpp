// A driver library without a GPU: it writes down what it is asked. A module's image is the number of its kernel's
// arguments as text; a launch copies eight bytes of each.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API extern "C" __attribute__((visibility("default")))

struct Function {
  char name[32];
  int arguments, shared_limit;
};

struct Launch {
  Function* function;
  unsigned grid[3], block[3], shared;
  void* stream;
  uint64_t values[16];
  void* context;
  int early;  // launched with the attribute, or behind an edge that says so
};

struct Encoded {
  int type, swizzle, promotion, fill;
  unsigned rank;
  void *place, *base;
  uint64_t extents[5], strides[5];
  uint32_t box[5];
};

extern "C" {
Launch log_launches[64];
int log_count, fail_launch, fail_load, fail_graph, context_depth, stream_captures, graphs_alive, nodes_set;
int driver_version, maps_made, fail_map, copies_made, tables_written, fail_early;
int fail_copy, copies_before_failure, fail_replay, replays;
void* current_context;
Encoded log_maps[64];
}

static void* stack[8];
static int primary[4];  // addresses stand for contexts

API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* number) {
  *number = driver_version;
  return 0;
}
// A descriptor shows its base in its first word, and a bit that is right for large tensors only.
API int cuTensorMapEncodeTiled(uint64_t* place, int type, unsigned rank, void* base, const uint64_t* extents,
                               const uint64_t* strides, const uint32_t* box, const uint32_t*, int, int swizzle,
                               int promotion, int fill) {
  if (fail_map) return fail_map;
  Encoded& e = log_maps[maps_made++ % 64];
  e = {type, swizzle, promotion, fill, rank, place, base, {}, {}, {}};
  memcpy(e.extents, extents, 8 * rank);
  memcpy(e.strides, strides, 8 * (rank - 1));
  memcpy(e.box, box, 4 * rank);
  place[0] = (uint64_t)base;
  place[1] = 1ull << 21;
  return 0;
}
API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 4 ? 0 : 101;
}
API int cuDevicePrimaryCtxRetain(void** made, int device) {
  *made = &primary[device];
  return 0;
}
API int cuCtxGetCurrent(void** now) {
  *now = current_context;
  return 0;
}
API int cuCtxPushCurrent_v2(void* wanted) {
  stack[context_depth++] = current_context;
  current_context = wanted;
  return 0;
}
API int cuCtxPopCurrent_v2(void** popped) {
  *popped = current_context;
  current_context = stack[--context_depth];
  return 0;
}
API int cuMemHostAlloc(void** memory, uint64_t bytes, unsigned) {
  *memory = calloc(1, bytes);
  return 0;
}
API int cuMemHostGetDevicePointer_v2(uint64_t* address, void* memory, unsigned) {
  *address = (uint64_t)memory;
  return 0;
}
API int cuModuleLoadData(void** made, const void* image) {
  if (fail_load || !current_context) return fail_load == 2 ? 2 : 200;
  *made = calloc(1, sizeof(Function));
  ((Function*)*made)->arguments = atoi((const char*)image);
  return 0;
}
API int cuModuleGetFunction(void** found, void* in, const char* name) {
  strncpy(((Function*)in)->name, name, 31);
  *found = in;
  return 0;
}
API int cuFuncSetAttribute(void* f, int attribute, int value) {
  if (attribute != 8) return 1;
  ((Function*)f)->shared_limit = value;
  return 0;
}
API int cuFuncGetAttribute(int* value, int attribute, void*) {
  *value = attribute == 4 ? 40 : 8;
  return 0;
}
API int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void* stream) {
  if (!stream || !current_context) return 400;
  if (fail_copy && copies_made >= copies_before_failure) return fail_copy;
  memcpy((void*)target, (void*)source, bytes);
  copies_made++;
  return 0;
}
API int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void* stream, void** arguments, void**) {
  if (fail_launch) return fail_launch;
  if (!strcmp(((Function*)f)->name, "tw_put")) {  // writes its third argument, so many numbers, where the first says
    if (!current_context || *(uint64_t*)arguments[1] > bx) return 1;
    memcpy(*(void**)arguments[0], arguments[2], 8 * *(uint64_t*)arguments[1]);
    tables_written++;
    return 0;
  }
  Launch& l = log_launches[log_count++ % 64];
  l = {(Function*)f, {gx, gy, gz}, {bx, by, bz}, shared, stream, {}, current_context, 0};
  for (int i = 0; i < l.function->arguments && i < 16; i++) memcpy(&l.values[i], arguments[i], 8);
  return 0;
}
struct Attribute {
  int id, pad, value[16];
};
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};
API int cuLaunchKernelEx(const Config* c, void* f, void** arguments, void** extra) {
  if (fail_early) return fail_early;
  if (c->count != 1 || c->attributes->id != 6 || c->attributes->value[0] != 1) return 1;
  int error = cuLaunchKernel(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
                             c->stream, arguments, extra);
  log_launches[(log_count - 1) % 64].early = 1;
  return error;
}
struct Node {
  Function* function;
  unsigned grid[3], block[3], shared;
  void **arguments, **extra;
};
struct Graph {
  Launch nodes[16];
  int count, ordered;  // nodes that stand behind another one
};
static void write(Launch& l, const Node* n) {
  l = {n->function, {n->grid[0], 1, 1}, {n->block[0], 1, 1}, n->shared, nullptr, {}, current_context, l.early};
  for (int i = 0; i < l.function->arguments && i < 16; i++) memcpy(&l.values[i], n->arguments[i], 8);
}
API int cuStreamIsCapturing(void*, int* status) {
  *status = stream_captures;
  return 0;
}
API int cuGraphCreate(Graph** made, unsigned) {
  *made = (Graph*)calloc(1, sizeof(Graph));
  return fail_graph;
}
API int cuGraphAddKernelNode(Launch** made, Graph* in, Launch* const* after, size_t count, const Node* what) {
  if (count > 1 || (count && *after != &in->nodes[in->count - 1])) return 1;
  in->ordered += count;
  *made = &in->nodes[in->count++];
  write(**made, what);
  return 0;
}
API int cuGraphAddDependencies_v2(Graph* in, Launch* const* from, Launch* const* to, const unsigned char* edge,
                                  size_t count) {
  if (fail_early) return fail_early;
  if (count != 1 || *to != &in->nodes[in->count - 1] || *from + 1 != *to || memcmp(edge, "\1\0\1\0\0\0\0", 8)) return 1;
  (*to)->early = 1;
  in->ordered++;
  return 0;
}
API int cuGraphInstantiateWithFlags(Graph** made, Graph* from, unsigned long long) {
  if (from->ordered + 1 != from->count) return 1;
  *made = from;  // the nodes stay where they are
  graphs_alive++;
  return 0;
}
API int cuGraphExecKernelNodeSetParams(Graph*, Launch* which, const Node* what) {
  write(*which, what);
  nodes_set++;
  return 0;
}
API int cuGraphLaunch(Graph* what, void* stream) {
  if (fail_replay) return fail_replay;
  replays++;
  for (int i = 0; i < what->count; i++) {
    log_launches[log_count % 64] = what->nodes[i];
    log_launches[log_count++ % 64].stream = stream;
  }
  return 0;
}
API int cuGraphDestroy(Graph*) { return 0; }
API int cuGraphExecDestroy(Graph*) {
  graphs_alive--;
  return 0;
}
API int cuGetErrorName(int error, const char** text) {
  *text = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr;
  return error == 700 ? 0 : 1;
}
