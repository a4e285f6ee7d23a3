// Reads where tensors lie, and whether dicts and lists hold what they held, without a line of Python between: objects through
// Python's stable C interface, tensors through torch's, so that nothing is built against headers of either. What a tensor
// says is read anew in each call: nothing is remembered that could be out of date. Of a dict, its version is: Python
// changes it with everything that it puts there.
//
// Stands before standing.cpp and known_call.cpp, and these before launch.cpp or launch_cuda.cpp, in one text.
#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <vector>

#define TW_API extern "C" __attribute__((visibility("default")))

typedef void* tw_object;  // PyObject*

// What is used of Python, declared by hand; the names are `Python.FUNCTIONS` in reading.py.
struct tw_python {
  tw_object (*function)(void* method, tw_object self, tw_object module);
  tw_object (*first)(tw_object tuple, intptr_t place);
  tw_object (*item)(tw_object list, intptr_t place);
  unsigned long long (*number)(tw_object);
  tw_object (*integer)(long long);
  tw_object (*call)(tw_object function, tw_object const* args, size_t count, tw_object names);
  tw_object (*list)(intptr_t count);
  int (*put)(tw_object list, intptr_t place, tw_object);
  intptr_t (*length)(tw_object list);
  int (*replace)(tw_object list, intptr_t begin, intptr_t end, tw_object by);
  void (*take)(tw_object);
  void (*drop)(tw_object);
  intptr_t (*size)(tw_object dict);
  tw_object (*find)(tw_object dict, tw_object key);
  int (*next)(tw_object dict, intptr_t* place, tw_object* key, tw_object* value);
  tw_object (*own)(tw_object object, void*);
  void (*forget)();  // an error
  tw_object (*code)(tw_object function);
  tw_object (*defaults)(tw_object function);
  tw_object (*named)(tw_object function);
  intptr_t (*tuple_size)(tw_object tuple);
  tw_object (*attribute)(tw_object object, tw_object name);
  tw_object (*tuple_of)(tw_object list);
  void* (*let_go)();  // of the interpreter's lock
  void (*wait_for)(void* thread);
  void (*fetch)(void** type, void** value, void** trace);  // the error that is set
  void (*restore)(void* type, void* value, void* trace);
  int (*matches)(tw_object type);  // the error that is set
  tw_object none, yes, no;
};

// The same of torch; a handle is the place of the pointer that a tensor's object holds.
struct tw_torch {
  int (*data)(void* handle, char** address);
  int (*rank)(void* handle, int64_t* dims);
  int (*strides)(void* handle, const int64_t** elements);
  int (*sizes)(void* handle, const int64_t** sizes);
  int (*type_of)(void* handle, int32_t* number);
  int (*device)(void* handle, int32_t* kind);
  int (*device_number)(void* handle, int32_t* number);
  int64_t handle, type;         // bytes from the start of an object to its handle, and to its type
  tw_object tensor, parameter;  // the types whose objects have a handle there
};

struct tw_input {  // how an argument must lie
  int64_t place, slot;  // its number, and where its address goes among the bases
  int64_t rank;
  const int64_t* strides;  // negative: does not matter
  char* wanted;            // its address, where that matters; ANY: it does not
  const int64_t* sizes;    // null: others see to them, to the type and to the device
  int32_t facts[3];        // type, kind and number of the device
};

struct tw_inputs {
  int64_t count;
  const tw_input* input;
};

namespace {
tw_python python;
tw_torch torch;

// The address of the first element of a tensor; false for what is none, and for a tensor without memory.
bool address(tw_object t, char** at) {
  tw_object type = *(tw_object*)((char*)t + torch.type);
  return (type == torch.tensor || type == torch.parameter) && !torch.data((char*)t + torch.handle, at);
}

char* const ANY = (char*)~0ull;

// Whether a tensor of the right rank has the sizes, the type and the device that are wanted.
bool fits(const tw_input& i, void* handle) {
  const int64_t* sizes;
  int32_t facts[3];
  if (torch.sizes(handle, &sizes) || torch.type_of(handle, &facts[0]) || torch.device(handle, &facts[1]) ||
      torch.device_number(handle, &facts[2])) {
    return false;
  }
  bool same = facts[0] == i.facts[0] && facts[1] == i.facts[1] && facts[2] == i.facts[2];
  for (int64_t d = 0; d < i.rank && same; d++) same = sizes[d] == i.sizes[d];
  return same;
}

// The same of a tensor that lies as wanted.
bool lies(const tw_input& i, tw_object t, char** at) {
  if (!address(t, at)) return false;
  void* handle = (char*)t + torch.handle;
  int64_t rank;
  const int64_t* strides;
  if (torch.rank(handle, &rank) || rank != i.rank || torch.strides(handle, &strides)) return false;
  if (i.sizes && !fits(i, handle)) return false;
  for (int64_t d = 0; d < rank; d++) {
    if (i.strides[d] >= 0 && strides[d] != i.strides[d]) return false;
  }
  return true;
}

// (self: a tuple whose first item is the address of tw_inputs; the list of arguments; the address of bases, or 0) ->
// whether all inputs lie as wanted. Their addresses then stand among the bases; without any they are what is wanted.
tw_object read(tw_object self, tw_object const* given, intptr_t) {
  const tw_inputs* w = (const tw_inputs*)(uintptr_t)python.number(python.first(self, 0));
  char** bases = (char**)(uintptr_t)python.number(given[1]);
  bool same = true;
  for (int64_t k = 0; k < w->count && same; k++) {
    const tw_input& i = w->input[k];
    tw_object t = python.item(given[0], i.place);
    if (!t) return nullptr;
    char* at;
    same = lies(i, t, &at) && (bases || at == i.wanted || i.wanted == ANY);
    if (same && bases) bases[i.slot] = at;
  }
  tw_object answer = same ? python.yes : python.no;
  python.take(answer);
  return answer;
}

}  // namespace

struct tw_named {
  tw_object name, value;  // no value: the name is not there
};

struct tw_dict {  // what a dict held
  tw_object dict;
  uint64_t version;  // when it was last seen to hold that
  int64_t size;      // negative: does not matter
  int64_t count;
  const tw_named* item;
  int64_t keys;  // negative: their order does not matter
  const tw_object* key;
};

struct tw_place {
  int64_t number;
  tw_object value;
};

struct tw_list {  // what a list held
  tw_object list;
  int64_t size;
  int64_t count;
  const tw_place* item;
};

struct tw_word {  // what an object refers to
  const tw_object* place;
  tw_object value;
};

struct tw_function {  // what a function runs, and what stands for arguments that it is not given; null: nothing
  tw_object function, code, defaults, named;
};

struct tw_argument {  // a tensor: the number of the argument, bytes of an element, and whether it is written
  int64_t place, bytes, written;
};

struct tw_apart {
  int64_t count;
  const tw_argument* tensor;
};

struct tw_held {
  int64_t dicts;
  tw_dict* dict;
  int64_t lists;
  const tw_list* list;
  int64_t words;
  const tw_word* word;  // objects' types, and the dicts of their attributes where it is known where they stand
  int64_t owners;
  const tw_named* owner;  // objects and the dicts of their attributes
  int64_t functions;
  const tw_function* function;
  int64_t version;         // bytes from the start of a dict to its version; 0: it has none
  int64_t untold;          // the first so many dicts may change without Python telling of it
  int64_t changes;         // how many it had told of, of all dicts, when these were last seen to hold that
};

namespace {
int64_t changes = 1;  // of watched dicts, ever

bool in_order(const tw_dict& d) {
  intptr_t place = 0;
  tw_object key;
  for (int64_t k = 0; k < d.keys; k++) {
    if (!python.next(d.dict, &place, &key, nullptr) || key != d.key[k]) return false;
  }
  return !python.next(d.dict, &place, &key, nullptr);
}

bool holds(tw_dict& d, int64_t version) {
  uint64_t now = version ? *(uint64_t*)((char*)d.dict + version) : 0;
  if (version && now == d.version) return true;
  if (d.size >= 0 && python.size(d.dict) != d.size) return false;
  for (int64_t k = 0; k < d.count; k++) {
    if (python.find(d.dict, d.item[k].name) != d.item[k].value) return false;
  }
  if (d.keys >= 0 && !in_order(d)) return false;
  d.version = now;
  return true;
}

bool holds(const tw_list& l) {
  if (python.length(l.list) != l.size) return false;
  for (int64_t k = 0; k < l.count; k++) {
    if (python.item(l.list, l.item[k].number) != l.item[k].value) return false;
  }
  return true;
}

bool owns(const tw_named& o) {
  tw_object own = python.own(o.name, nullptr);
  if (own) {
    python.drop(own);
  } else {
    python.forget();
  }
  return own == o.value;
}

bool runs(const tw_function& f) {
  return python.code(f.function) == f.code && python.defaults(f.function) == f.defaults &&
         python.named(f.function) == f.named;
}

// The same of all dicts. What those hold of whose changes Python tells is looked up only after a change of one that
// anybody watches.
bool dicts_hold(tw_held* w) {
  int64_t now = changes;
  for (int64_t k = 0; k < w->untold; k++) {
    if (!holds(w->dict[k], w->version)) return false;
  }
  if (w->changes == now) return true;
  for (int64_t k = w->untold; k < w->dicts; k++) {
    if (!holds(w->dict[k], w->version)) return false;
  }
  w->changes = now;
  return true;
}

// (self: a tuple whose first item is the address of tw_held) -> whether dicts and lists hold the same objects, objects
// have the same types and dicts, and functions run the same code.
tw_object same(tw_object self, tw_object) {
  tw_held* w = (tw_held*)(uintptr_t)python.number(python.first(self, 0));
  bool held = dicts_hold(w);
  for (int64_t k = 0; k < w->lists && held; k++) held = holds(w->list[k]);
  for (int64_t k = 0; k < w->words && held; k++) held = *w->word[k].place == w->word[k].value;
  for (int64_t k = 0; k < w->owners && held; k++) held = owns(w->owner[k]);
  for (int64_t k = 0; k < w->functions && held; k++) held = runs(w->function[k]);
  tw_object answer = held ? python.yes : python.no;
  python.take(answer);
  return answer;
}

struct Span {  // bytes of a tensor, the first one and the one behind the last, and whether it is written
  uintptr_t start, end;
  bool written;
  bool operator<(const Span& other) const { return start < other.start; }
};

// The span of a tensor whose elements have so many bytes; false where that is not seen. Without elements it is empty.
bool span(tw_object t, int64_t bytes, Span* found) {
  char* at;
  if (!address(t, &at)) return false;
  void* handle = (char*)t + torch.handle;
  int64_t rank, reach = 0;
  const int64_t *strides, *sizes;
  if (torch.rank(handle, &rank) || torch.strides(handle, &strides) || torch.sizes(handle, &sizes)) return false;
  for (int64_t d = 0; d < rank; d++) {
    if (!sizes[d]) {
      reach = -1;
      break;
    }
    reach += (sizes[d] - 1) * strides[d];
  }
  found->start = (uintptr_t)at;
  found->end = found->start + (reach + 1) * bytes;
  return true;
}

// (self: a tuple whose first item is the address of tw_apart; the list of arguments) -> whether no written tensor shares
// bytes with another one. False as well where that is not seen.
tw_object apart(tw_object self, tw_object const* given, intptr_t) {
  const tw_apart* w = (const tw_apart*)(uintptr_t)python.number(python.first(self, 0));
  std::vector<Span> spans;
  spans.reserve(w->count);
  bool seen = true;
  for (int64_t k = 0; k < w->count && seen; k++) {
    tw_object t = python.item(given[0], w->tensor[k].place);
    if (!t) return nullptr;
    Span found{0, 0, w->tensor[k].written != 0};
    seen = span(t, w->tensor[k].bytes, &found);
    if (found.end > found.start) spans.push_back(found);
  }
  std::sort(spans.begin(), spans.end());
  uintptr_t end = 0, end_of_written = 0;
  for (size_t k = 0; k < spans.size() && seen; k++) {
    const Span& s = spans[k];
    seen = s.start >= (s.written ? end : end_of_written);
    end = std::max(end, s.end);
    if (s.written) end_of_written = std::max(end_of_written, s.end);
  }
  tw_object answer = seen ? python.yes : python.no;
  python.take(answer);
  return answer;
}

struct tw_method {  // PyMethodDef
  const char* name;
  void* function;
  int convention;
  const char* text;
};

const int NONE = 4, ONE = 8, SEVERAL = 0x80;  // METH_NOARGS, METH_O, METH_FASTCALL
tw_method reading = {"read", (void*)read, SEVERAL, nullptr}, comparing = {"same", (void*)same, NONE, nullptr},
          proving = {"apart", (void*)apart, SEVERAL, nullptr};
}  // namespace

// What Python calls where a watched dict is about to change, or to end.
TW_API int tw_dict_changes(int, tw_object, tw_object, tw_object) {
  changes++;
  return 0;
}

// How many changes that were.
TW_API int64_t tw_dict_changes_told() { return changes; }

// Called once, before anything else.
TW_API void tw_attach_python(const tw_python* found, const tw_torch* tensors) {
  python = *found;
  torch = *tensors;
}

// The function of Python's that reads the inputs which `self` names, and keeps `self`.
TW_API tw_object tw_reader(tw_object self) { return python.function(&reading, self, nullptr); }

// The same for the function that looks at dicts.
TW_API tw_object tw_comparer(tw_object self) { return python.function(&comparing, self, nullptr); }

// The same for the function that looks whether tensors lie apart.
TW_API tw_object tw_prover(tw_object self) { return python.function(&proving, self, nullptr); }
