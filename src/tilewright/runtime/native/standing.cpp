// Whether tensors still are what they were when somebody looked at them, at a few loads a tensor: the words in which torch
// keeps where they lie, their sizes, strides, type and device, in which ways they are kept, and how often they were written. Nothing of torch tells that
// one of these words has changed, so that each tensor is looked at. Where the words stand is found when the library is
// loaded (`Words` in standing.py), and what they tell is tried; where it is not as expected, nothing here is called.
//
// Follows tensors.cpp in one text.
#include <string.h>

struct tw_words {  // bytes to a word from the start of what holds it
  int64_t storage, form, counter, keys;  // of a tensor: its storage, its sizes and what follows, what counts writes, and
                                         // the ways in which it is kept, which end the form
  int64_t data, writes;            // of a storage: its memory; of what counts: the number
};

const int64_t DIMS = 5;    // sizes of more stand elsewhere
const int64_t FORM = 120;  // bytes of a tensor from its rank to its type and device

struct tw_seen {  // one tensor
  int64_t place;  // its number among the arguments
  int64_t counted;
  char *tensor, *storage, *data;
  uint64_t writes;
  char form[FORM];
};

struct tw_standing {
  int64_t count;
  tw_seen* seen;
};

namespace {
tw_words words;

char* word(char* of, int64_t at) { return *(char**)(of + at); }

// The words of a tensor. False for what is none, and for one without memory of its own or with too many dims.
bool look(tw_object t, tw_seen* s) {
  tw_object type = *(tw_object*)((char*)t + torch.type);
  if (type != torch.tensor && type != torch.parameter) return false;
  s->tensor = word((char*)t, torch.handle);
  if (!s->tensor || !(s->storage = word(s->tensor, words.storage))) return false;
  if (*(int64_t*)(s->tensor + words.form) > DIMS) return false;
  s->data = word(s->storage, words.data);
  char* counter = s->counted ? word(s->tensor, words.counter) : nullptr;
  s->writes = counter ? *(uint32_t*)(counter + words.writes) : 0;
  return true;
}

typedef uint64_t Two __attribute__((vector_size(16), aligned(8)));

// Whether two forms are the same, without a branch between their words.
bool is_same(const char* a, const char* b) {
  Two other = {*(const uint64_t*)a ^ *(const uint64_t*)b, 0};
#pragma GCC unroll 7
  for (int64_t at = 8; at < FORM; at += sizeof(Two)) other |= *(const Two*)(a + at) ^ *(const Two*)(b + at);
  return !(other[0] | other[1]);
}

inline bool is_still(const tw_words& at, const tw_seen& s, tw_object t) {
  tw_object type = *(tw_object*)((char*)t + torch.type);
  if (type != torch.tensor && type != torch.parameter) return false;  // it may be too short to have a handle
  char* tensor = word((char*)t, torch.handle);
  if (tensor != s.tensor || !tensor) return false;
  char* storage = word(tensor, at.storage);
  if (storage != s.storage || word(storage, at.data) != s.data || !is_same(tensor + at.form, s.form)) return false;
  if (!s.counted) return true;
  char* counter = word(tensor, at.counter);
  return (counter ? *(uint32_t*)(counter + at.writes) : 0) == s.writes;
}

tw_standing* standing_of(tw_object self) { return (tw_standing*)(uintptr_t)python.number(python.first(self, 0)); }

tw_object said(bool yes) {
  tw_object answer = yes ? python.yes : python.no;
  python.take(answer);
  return answer;
}

// (self: a tuple whose first item is the address of a tw_standing; the list of arguments) -> whether they are as noted.
// Not if one is missing.
tw_object stand(tw_object self, tw_object args) {
  const tw_standing* w = standing_of(self);
  const tw_words at = words;
  bool still = true;
  for (int64_t k = 0; k < w->count && still; k++) {
    tw_object t = python.item(args, w->seen[k].place);
    if (!t) python.forget();
    still = t && is_still(at, w->seen[k], t);
  }
  return said(still);
}

// The same -> whether they could be noted, as they are now.
tw_object note(tw_object self, tw_object args) {
  tw_standing* w = standing_of(self);
  bool seen = true;
  for (int64_t k = 0; k < w->count; k++) {
    tw_seen& s = w->seen[k];
    tw_object t = python.item(args, s.place);
    if (!t) return nullptr;
    bool noted = look(t, &s);
    if (noted) memcpy(s.form, s.tensor + words.form, FORM);
    if (!noted) s.tensor = nullptr;  // nothing is like it
    seen &= noted;
  }
  return said(seen);
}

tw_method standing_method = {"stand", (void*)stand, ONE, nullptr}, noting_method = {"note", (void*)note, ONE, nullptr};
}  // namespace

// Called once, before anything else.
TW_API void tw_attach_words(const tw_words* found) { words = *found; }

// The functions of Python's that look at the tensors which `self` names, and keep `self`.
TW_API tw_object tw_stand(tw_object self) { return python.function(&standing_method, self, nullptr); }
TW_API tw_object tw_note(tw_object self) { return python.function(&noting_method, self, nullptr); }
