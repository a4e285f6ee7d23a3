// A replay of a CUDA graph, as a function of Python's: inputs are looked at and copied in, the graph is launched, and while
// it runs the results are made, into which copies stand behind it.
//
// Follows launch_cuda.cpp in one text.

struct tw_copy {  // on the device
  uint64_t target, source, bytes;
};

struct tw_replay {
  const tw_device* device;
  void* instance;
  tw_copy* copies;
  int64_t before, behind, outputs;
  tw_inputs moving;  // their addresses go to `copies`
  const tw_output* output;
  int64_t* last;  // the stream that the memory was last used on
  tw_object stand;     // list of arguments -> whether those that are read in place lie where they did
  tw_object make, fail;  // as of a call; a driver's error is negative
  tw_object lack;        // the type of error that says that there is no memory
  tw_object acquire, release;  // of the lock of the graph's memory
  tw_object stream, ordinal;   // number of the device -> the current stream
  tw_object written;           // told the list of arguments where some are written; or null
};

namespace {
result copy_all(const tw_copy* copies, int64_t count, stream on) {
  result error = 0;
  for (int64_t i = 0; i < count && !error; i++) {
    const tw_copy& c = copies[i];
    if (c.bytes) error = driver.copy(c.target, c.source, c.bytes, on);
  }
  return error;
}

// Whether the graph may be replayed now, and reads and copies what is there. Looks, and changes nothing but `copies`.
Said serves(tw_replay* w, tw_object args, stream* on) {
  tw_object at = python.call(w->stream, &w->ordinal, 1, nullptr);
  if (!at) return FAILED;
  *on = (stream)(uintptr_t)python.number(at);
  python.drop(at);
  int capturing = 0;
  if ((int64_t)*on != *w->last || driver.stream_capturing(*on, &capturing) || capturing) return NO;
  Said stand = is(python.call(w->stand, &args, 1, nullptr), python.yes);
  for (int64_t k = 0; k < w->moving.count && stand == YES; k++) {
    const tw_input& i = w->moving.input[k];
    tw_object t = python.item(args, i.place);
    char* address;
    if (!t) return python.forget(), NO;
    if (!lies(i, t, &address)) return NO;
    ((char**)w->copies)[i.slot] = address;
  }
  return stand;
}

// Copies and launches. Another thread of Python's may run meanwhile: the driver waits where its queue is full.
result launch_graph(tw_replay* w, stream on) {
  void* thread = python.let_go();
  Current scope(w->device->primary);
  result error = scope.error;
  if (!error) error = copy_all(w->copies, w->before, on);
  if (!error) error = driver.graph_launch(w->instance, on);
  python.wait_for(thread);
  return error;
}

result copy_out(tw_replay* w, char* const* at, stream on) {
  for (int64_t k = 0; k < w->outputs; k++) w->copies[w->output[k].slot].target = (uint64_t)at[k];
  void* thread = python.let_go();
  Current scope(w->device->primary);
  result error = scope.error ? scope.error : copy_all(w->copies + w->before, w->behind, on);
  python.wait_for(thread);
  return error;
}

tw_object failed(const tw_replay* w, int64_t code) {
  tw_object number = python.integer(code);
  tw_object made = number ? python.call(w->fail, &number, 1, nullptr) : nullptr;
  if (number) python.drop(number);
  return made;
}

tw_object none() {
  python.take(python.none);
  return python.none;
}

// The results, None, or null with an error set. Where there is no memory for them, None: Python gives some back.
tw_object results(tw_replay* w, char** at) {
  tw_object made = outputs(w->outputs, w->output, w->make, at);
  if (made || !python.matches(w->lack)) return made;
  python.forget();
  return none();
}

// The results, into which copies stand behind the graph. It runs by now: who is told of what it writes is told, whatever
// comes of the copies.
tw_object delivered(tw_replay* w, tw_object args, tw_object made, char* const* at, stream on) {
  tw_object told = w->written ? python.call(w->written, &args, 1, nullptr) : none();
  if (told) python.drop(told);
  if (w->written) python.replace(args, 0, python.length(args), nullptr);  // nobody runs it again
  result error = told ? copy_out(w, at, on) : 0;
  if (error || !told) {
    python.drop(made);
    return error ? failed(w, -(int64_t)error) : nullptr;
  }
  python.replace(args, 0, python.length(args), nullptr);
  return made;
}

// With the lock held. What writes into its inputs may run once only: its results are made first. Others make them while
// the graph runs, and where there is no memory, nothing has happened.
tw_object replayed(tw_replay* w, tw_object args) {
  stream on;
  Said said = serves(w, args, &on);
  if (said != YES) return said == NO ? none() : nullptr;
  if (int32_t code = *w->device->error) {
    *w->device->error = 0;
    return failed(w, code);
  }
  char* at[w->outputs + 1];
  tw_object made = w->written ? results(w, at) : nullptr;
  if (w->written && (!made || made == python.none)) return made;
  if (launch_graph(w, on)) {
    if (made) python.drop(made);
    return none();  // Python tries it, and raises what there is to raise
  }
  if (!w->written) made = results(w, at);
  return !made || made == python.none ? made : delivered(w, args, made, at, on);
}

// (self: a tuple whose first item is the address of a tw_replay; the list of arguments, which is emptied) -> the list of
// results; None, and nothing has run that shows, where this graph does not serve them now.
tw_object replay(tw_object self, tw_object args) {
  tw_replay* w = (tw_replay*)(uintptr_t)python.number(python.first(self, 0));
  Said got = is(python.call(w->acquire, &python.no, 1, nullptr), python.yes);
  if (got != YES) return got == NO ? none() : nullptr;
  tw_object made = replayed(w, args);
  // An error that is set stays so: what releases a lock leaves it alone.
  void* error[3];
  if (!made) python.fetch(&error[0], &error[1], &error[2]);
  tw_object released = python.call(w->release, nullptr, 0, nullptr);
  released ? python.drop(released) : python.forget();
  if (!made) python.restore(error[0], error[1], error[2]);
  return made;
}

tw_method replaying = {"replay", (void*)replay, ONE, nullptr};
}  // namespace

// The function of Python's that replays what `self` names, and keeps `self`.
TW_API tw_object tw_cuda_replayer(tw_object self) { return python.function(&replaying, self, nullptr); }
