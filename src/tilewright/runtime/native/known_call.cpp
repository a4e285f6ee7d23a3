// A call like one before it, from its arguments to its results: what it brings is held against what that one brought, what
// the program reads besides is asked for, and the plan runs. No line of Python stands between, but what is asked in it.
//
// Follows tensors.cpp and standing.cpp in one text.

struct tw_brought {  // an argument
  tw_object value;   // it is this very object; null: a tensor
  tw_object type, wants_gradient;
  int64_t rank;
  const int64_t *sizes, *strides;
  int32_t facts[3];  // type, kind and number of the device
  uint64_t keys;     // the ways in which it is kept, but those that do not matter
};

struct tw_asked {  // a function, what it is given (null: nothing), and the very object that it must return
  tw_object function, argument, answer;
};

struct tw_given {  // an argument of the plan: one that the call brings, or, if negative, this one
  int64_t leaf;
  tw_object held;
};

const int64_t TOGETHER = -1, ARRANGED = -2;

struct tw_known_call {
  int64_t count, positional;
  const tw_brought* brought;
  const tw_object* names;  // of those behind the positional ones
  int64_t asks;
  const tw_asked* asked;
  int64_t arguments;
  const tw_given* given;
  tw_object run, arrange;     // list of arguments -> list of results, None where it does not; that list -> what is returned
  int64_t alone;              // the number of the result that is returned; TOGETHER: all of them, as a tuple
  tw_object otherwise;        // returned where this is another call, or the plan does not run so
  tw_object gradient;         // the name of what a tensor is asked
  uint64_t all_but;           // the ways in which a tensor may be kept without another result
};

namespace {
enum Said { FAILED = -1, NO, YES };  // FAILED: an error is set, as of a signal that came meanwhile

// Whether what is found is `wanted`; null is an error.
Said is(tw_object found, tw_object wanted) {
  if (!found) return FAILED;
  python.drop(found);
  return found == wanted ? YES : NO;
}

// Whether an argument is what was brought, as far as nothing of Python's is asked.
bool is_like(const tw_known_call* w, const tw_brought& b, tw_object x) {
  if (b.value) return x == b.value;
  if (*(tw_object*)((char*)x + torch.type) != b.type) return false;
  void* handle = (char*)x + torch.handle;
  int64_t rank;
  const int64_t *sizes, *strides;
  int32_t facts[3];
  if (torch.rank(handle, &rank) || rank != b.rank || torch.sizes(handle, &sizes) || torch.strides(handle, &strides)) return false;
  for (int64_t d = 0; d < rank; d++) {
    if (sizes[d] != b.sizes[d] || strides[d] != b.strides[d]) return false;
  }
  if (torch.type_of(handle, &facts[0]) || torch.device(handle, &facts[1]) || torch.device_number(handle, &facts[2])) return false;
  if (memcmp(facts, b.facts, sizeof facts)) return false;
  return (*(uint64_t*)(*(char**)handle + words.keys) & ~w->all_but) == b.keys;
}

bool is_named(const tw_known_call* w, tw_object names) {
  intptr_t named = names ? python.tuple_size(names) : 0;
  if (named != w->count - w->positional) return false;
  for (intptr_t k = 0; k < named; k++) {
    if (python.first(names, k) != w->names[k]) return false;
  }
  return true;
}

// Tensors are asked last: by then it is known that no mode is there.
Said is_known(const tw_known_call* w, tw_object const* args, intptr_t positional, tw_object names) {
  if (positional != w->positional || !is_named(w, names)) return NO;
  for (int64_t k = 0; k < w->count; k++) {
    if (!is_like(w, w->brought[k], args[k])) return NO;
    for (int64_t j = 0; j < k && !w->brought[k].value; j++) {
      if (args[j] == args[k]) return NO;  // a program may ask whether two tensors are one: here they were not
    }
  }
  Said same = YES;
  for (int64_t k = 0; k < w->asks && same == YES; k++) {
    const tw_asked& a = w->asked[k];
    same = is(python.call(a.function, &a.argument, a.argument ? 1 : 0, nullptr), a.answer);
  }
  for (int64_t k = 0; k < w->count && same == YES; k++) {
    if (!w->brought[k].value) same = is(python.attribute(args[k], w->gradient), w->brought[k].wants_gradient);
  }
  return same;
}

tw_object other(const tw_known_call* w) {
  python.take(w->otherwise);
  return w->otherwise;
}

tw_object returned(const tw_known_call* w, tw_object results) {
  tw_object made;
  if (w->alone >= 0) {
    made = python.item(results, w->alone);
    if (made) python.take(made);
  } else if (w->alone == TOGETHER) {
    made = python.tuple_of(results);
  } else {
    made = python.call(w->arrange, &results, 1, nullptr);
  }
  python.drop(results);
  return made;
}

// (self: a tuple whose first item is the address of a tw_known_call; arguments) -> what the program returns; `otherwise`,
// and nothing has run, where this is another call.
tw_object known_call(tw_object self, tw_object const* args, intptr_t positional, tw_object names) {
  const tw_known_call* w = (const tw_known_call*)(uintptr_t)python.number(python.first(self, 0));
  Said known = is_known(w, args, positional, names);
  if (known != YES) return known == NO ? other(w) : nullptr;
  tw_object list = python.list(w->arguments);
  if (!list) return nullptr;
  for (int64_t k = 0; k < w->arguments; k++) {
    tw_object x = w->given[k].leaf < 0 ? w->given[k].held : args[w->given[k].leaf];
    python.take(x);
    python.put(list, k, x);
  }
  tw_object results = python.call(w->run, &list, 1, nullptr);
  python.drop(list);
  if (results != python.none) return results ? returned(w, results) : nullptr;
  python.drop(results);
  return other(w);
}

const int KEYWORDS = 2;  // METH_KEYWORDS
tw_method knowing = {"known_call", (void*)known_call, SEVERAL | KEYWORDS, nullptr};
}  // namespace

// The function of Python's that serves the calls which `self` names, and keeps `self`.
TW_API tw_object tw_known_call_of(tw_object self) { return python.function(&knowing, self, nullptr); }

// --- What calls of plans make ---

struct tw_output {
  int64_t place, slot;  // number of the result, and where its address goes
  tw_object shape, strides, dtype;
};

namespace {
// Makes `count` outputs by (shape, strides, dtype) -> tensor, and their addresses. Null with an error set; None if one has
// no memory that can be read.
tw_object outputs(int64_t count, const tw_output* output, tw_object make, char** at) {
  tw_object made = python.list(count);
  for (int64_t k = 0; k < count && made; k++) {
    const tw_output& o = output[k];
    tw_object how[] = {o.shape, o.strides, o.dtype};
    tw_object t = python.call(make, how, 3, nullptr);
    bool lies = t && address(t, &at[k]);
    if (t) python.put(made, o.place, t);
    if (lies) continue;
    python.drop(made);
    if (t) python.take(python.none);
    return t ? python.none : nullptr;
  }
  return made;
}
}  // namespace
