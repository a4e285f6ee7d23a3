// The thread pool that generated kernels run on: plain C ABI, POSIX threads, no C++ library.
//
// A region is one call of tw_parallel. One word, the gate, says whether a region is open, which one it is, and how many
// workers are inside; workers watch it, first spinning, then asleep on a futex. The caller never waits for a worker that
// has not come in: it takes every piece that nobody else took, closes the gate and waits only for those inside. So a
// worker that is asleep, or not scheduled, costs nothing but its share.
//
// Pieces belong to workers in equal contiguous runs, so that the same worker meets the same data in the next kernel; who
// has finished takes from the others.
//
// Between calls of a library that has threads of its own, two sets of threads would disturb each other: each spins for a
// while after its work, on the cores that the other one needs. So where the process has such a team (tw_join), regions
// run on it, and our own workers are for what it cannot do: other sizes, pinned threads, a forked child.
//
// A team ends together: a thread of it that another program keeps from running costs the caller that program's whole
// turn, however little is left to do. So a caller who has waited long for nothing goes alone for a while, and then tries
// again, less and less often while it finds the cores taken. What is computed does not depend on it.
//
// A thread of a team that was asleep may be woken on its caller's core, though another one is idle (some machines do not
// tell the system that cores share a cache): there it would wait for a tick of the clock, and so would the caller. So the
// caller of a team that may be asleep (always, if it is told to sleep at once) offers its core once, and a thread that
// finds itself there goes elsewhere.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define TW_API extern "C" __attribute__((visibility("default")))

typedef void (*tw_task)(void* context, int64_t begin, int64_t end, int64_t worker);
typedef void (*tw_team_run)(void (*part)(void*), void* data, unsigned threads, unsigned flags);

namespace {
constexpr int most_workers = 200;  // the gate counts them in 8 bits
constexpr int64_t pieces_each = 8;
constexpr uint32_t inside_mask = 0xff, open_bit = 0x100, region_step = 0x200;
constexpr int64_t move_ns = 1000000;  // the least time between two changes of core
constexpr uint64_t turn_ns = 100000;
constexpr int64_t late_ns = 300000;  // a team that ends so much behind its caller, and half of the work, is late
constexpr int64_t late_call_ns = 1000000, late_call_times = 5;  // a call: so much, and so many times, longer than alone
constexpr int64_t shortest_lone_ns = 10000000, longest_lone_ns = 320000000;
constexpr int64_t asleep_ns = 500000;  // a team that did nothing for so long may sleep
constexpr int looks_first = 64;        // for threads that are awake, which come at once
constexpr uint32_t spin_more_us = 100, spin_last_us = 20;

struct alignas(64) Run {  // the pieces of one worker
  int64_t next, end;
};
struct alignas(64) Word {
  uint32_t value;
};
struct alignas(64) Job {
  tw_task task;
  void* context;
  int64_t count, piece, runs;
};

Word gate, sleepers, busy, wanted = {1}, pinned, stopping, spin_us, caller_core, sleeps_at_once;
Job job;
Run runs[most_workers];
pthread_t threads[most_workers];
int started = 0;  // threads that exist, under `busy`
uint32_t started_pinned = 0;
bool fork_hook = false;
tw_team_run team_run = nullptr;  // another library's team, its size for this thread, the number of a thread in it
int (*team_size)(void) = nullptr;
int (*team_number)(void) = nullptr;
void (*set_team_size)(int) = nullptr;       // for this thread
int (*set_product_threads)(int) = nullptr;  // of the library's matrix products, for this thread; gives the number before
Word regions;                               // parallel regions entered
int64_t own_end = 0;  // of the caller's part of a region on a team, under `busy`
int64_t lone_until = 0, lone_ns = shortest_lone_ns;
int64_t greeting = 0;  // threads that the caller of a team looks for, under `busy`
Word arrived;
__thread int64_t team_seen = 0;  // when the team of this thread was last seen at work; 0: it is not where it should be
__thread bool holding = false;   // this thread holds a team: see hold.cpp
void handed_out(tw_task task, void* context, int64_t count, int64_t grain);
__thread int64_t share_start = 0;
__thread bool alone = false;                // this thread asks nobody to help
__thread int team_before = 0, products_before = 0;

inline uint32_t get(const Word& w) { return __atomic_load_n(&w.value, __ATOMIC_SEQ_CST); }
inline void set(Word& w, uint32_t v) { __atomic_store_n(&w.value, v, __ATOMIC_SEQ_CST); }

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}
int64_t now_ns() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

int64_t spin_end() { return now_ns() + int64_t(get(spin_us)) * 1000; }

// The core that runs this; a number that is nobody's where the system does not tell.
uint32_t core() {
#if defined(__linux__)
  return uint32_t(sched_getcpu());
#else
  static uint32_t nobody = 0;
  return __atomic_add_fetch(&nobody, 1, __ATOMIC_RELAXED) | 0x80000000u;
#endif
}

// ---- sleeping ----
#if defined(__linux__)
void sleep_while(uint32_t seen) {
  __atomic_fetch_add(&sleepers.value, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &gate.value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  __atomic_fetch_sub(&sleepers.value, 1, __ATOMIC_SEQ_CST);
}
void wake(int most) {
  if (get(sleepers)) syscall(SYS_futex, &gate.value, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}
void reset_sleep() { set(sleepers, 0); }
#else
pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t sleep_signal = PTHREAD_COND_INITIALIZER;
void sleep_while(uint32_t seen) {
  pthread_mutex_lock(&sleep_lock);
  __atomic_fetch_add(&sleepers.value, 1, __ATOMIC_SEQ_CST);
  while (get(gate) == seen && !get(stopping)) pthread_cond_wait(&sleep_signal, &sleep_lock);
  __atomic_fetch_sub(&sleepers.value, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&sleep_lock);
}
void wake(int) {
  if (!get(sleepers)) return;
  pthread_mutex_lock(&sleep_lock);
  pthread_cond_broadcast(&sleep_signal);
  pthread_mutex_unlock(&sleep_lock);
}
void reset_sleep() {
  set(sleepers, 0);
  pthread_mutex_init(&sleep_lock, nullptr);
  pthread_cond_init(&sleep_signal, nullptr);
}
#endif

// ---- work ----
void run_pieces(int64_t worker) {
  const int64_t piece = job.piece, count = job.count, total = job.runs;
  const int64_t first = worker < total ? worker : worker % total;
  for (int64_t k = 0; k < total; k++) {
    Run& run = runs[(first + k) % total];
    while (__atomic_load_n(&run.next, __ATOMIC_RELAXED) < run.end) {
      int64_t i = __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED);
      if (i >= run.end) break;
      int64_t begin = i * piece, end = begin + piece;
      job.task(job.context, begin, end < count ? end : count, worker);
    }
  }
}

// A worker that shares the caller's core only keeps the caller from working, and the system may leave the two together
// for as long as the process lives. So the worker asks for any other core and takes the wish back at once: the threads
// keep the affinity that they had.
void step_aside() {
#if defined(__linux__)
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  others = allowed;
  CPU_CLR(int(get(caller_core)), &others);
  if (CPU_COUNT(&others) && sched_setaffinity(0, sizeof others, &others) == 0)
    sched_setaffinity(0, sizeof allowed, &allowed);
#endif
}
void leave_callers_core(int64_t now, int64_t* moved) {
  if (core() != get(caller_core) || get(pinned)) return;
  if (now < *moved + move_ns) {
    sched_yield();
    return;
  }
  *moved = now;
  step_aside();
}

// Short turns on the processor: Linux from 6.12 on then lets a worker that wakes up go before a thread that only spins
// (a library's own pool does so between its calls). Elsewhere, no effect.
void ask_for_short_turns() {
#if defined(__linux__) && defined(SYS_sched_setattr)
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } a = {};
  if (syscall(SYS_sched_getattr, 0, &a, sizeof a, 0) != 0 || a.policy != 0) return;
  a.size = sizeof a;
  a.flags = 0;
  a.runtime = turn_ns;
  syscall(SYS_sched_setattr, 0, &a, 0);
#endif
}

void* worker_main(void* argument) {
  const int64_t worker = (int64_t)(intptr_t)argument;
  ask_for_short_turns();
  uint32_t last = 0;  // the region of the last visit; 0 is never a region
  int64_t moved = 0;
  int64_t deadline = spin_end();
  for (;;) {
    uint32_t g = get(gate);
    if (get(stopping)) return nullptr;
    const uint32_t region = g & ~(inside_mask | open_bit);
    if ((g & open_bit) && region != last) {
      if (!__atomic_compare_exchange_n(&gate.value, &g, g + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
      last = region;
      run_pieces(worker);
      __atomic_fetch_sub(&gate.value, 1, __ATOMIC_SEQ_CST);
      deadline = spin_end();
      continue;
    }
    for (int i = 0; i < 64 && __atomic_load_n(&gate.value, __ATOMIC_RELAXED) == g; i++) relax();
    if (get(gate) != g) continue;
    const int64_t now = now_ns();
    if (now < deadline) {
      leave_callers_core(now, &moved);
      continue;
    }
    sleep_while(g);
    leave_callers_core(now_ns(), &moved);
    deadline = spin_end();  // woken too late for one region, be awake for the next
  }
}

void pin_to_core(pthread_t thread, int worker) {
#if defined(__linux__)
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const int cores = CPU_COUNT(&allowed);
  int skip = cores > 0 ? worker % cores : 0;
  for (int c = 0; c < CPU_SETSIZE; c++)
    if (CPU_ISSET(c, &allowed) && skip-- == 0) {
      CPU_ZERO(&one);
      CPU_SET(c, &one);
      pthread_setaffinity_np(thread, sizeof one, &one);
      return;
    }
#else
  (void)thread, (void)worker;
#endif
}

// All of the following run under `busy`.
void stop_workers() {
  if (!started) return;
  set(stopping, 1);
  set(gate, get(gate) + region_step);  // so that nobody falls asleep on the old word
  wake(most_workers);
  for (int i = 1; i <= started; i++) pthread_join(threads[i], nullptr);
  started = 0;
  set(stopping, 0);
}
void after_fork() {  // the child has only the thread that forked
  started = 0;
  set(gate, 0);
  set(stopping, 0);
  set(busy, 0);
  team_run = nullptr;
  reset_sleep();
}
void hook_fork() {
  if (!fork_hook) fork_hook = pthread_atfork(nullptr, nullptr, after_fork) == 0;
}
void fit_workers() {
  const int want = int(get(wanted)) - 1;
  if (started == want && started_pinned == get(pinned)) return;
  stop_workers();
  hook_fork();
  sigset_t every, before;  // signals belong to the program's own threads
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  started_pinned = get(pinned);
  while (started < want) {
    const int i = started + 1;
    if (pthread_create(&threads[i], nullptr, worker_main, (void*)(intptr_t)i) != 0) break;
    if (started_pinned) pin_to_core(threads[i], i);
    started = i;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started < want) set(wanted, uint32_t(started + 1));  // no more threads to be had: be content
}
// What each thread of a team begins with: all of them are awake, on cores of their own.
void arrive(int number) {
  if (!greeting) return;
  if (number) {
    if (core() == get(caller_core)) step_aside();
    __atomic_fetch_add(&arrived.value, 1, __ATOMIC_SEQ_CST);
    return;
  }
  for (int i = 0; i < looks_first && get(arrived) < uint32_t(greeting); i++) relax();
  if (get(arrived) < uint32_t(greeting)) sched_yield();
}
// Runs `part` on all threads of the team, under `busy`. Returns when it began.
int64_t run_team(void (*part)(void*), int64_t size) {
  const int64_t start = now_ns();
  greeting = get(sleeps_at_once) || start - team_seen > asleep_ns ? size - 1 : 0;
  if (greeting) set(arrived, 0), set(caller_core, core());
  team_run(part, nullptr, unsigned(size), 0);
  return start;
}
void team_part(void*) {
  const int number = team_number();
  arrive(number);
  run_pieces(number);
  if (number == 0) own_end = now_ns();
}
// Whether a team kept its caller waiting too long, until `end`.
void note(bool late, int64_t end) {
  int64_t lone = __atomic_load_n(&lone_ns, __ATOMIC_RELAXED);
  if (late) {
    __atomic_store_n(&lone_until, end + lone, __ATOMIC_RELAXED);
    lone = lone * 2 < longest_lone_ns ? lone * 2 : longest_lone_ns;
  } else {
    lone = lone / 2 > shortest_lone_ns ? lone / 2 : shortest_lone_ns;
  }
  __atomic_store_n(&lone_ns, lone, __ATOMIC_RELAXED);
  team_seen = late ? 0 : end;
}
void run_on_team(int64_t size) {
  const int64_t start = run_team(team_part, size), end = now_ns(), late = end - own_end;
  note(late > late_ns && late > (own_end - start) / 2, end);
}
bool left_the_team() {
  const int64_t until = __atomic_load_n(&lone_until, __ATOMIC_RELAXED);
  return until && now_ns() < until;
}
bool joins_team(int64_t want) { return team_run && !get(pinned) && team_size() == want && team_number() == 0; }
bool enter() {
  uint32_t free = 0;
  return __atomic_compare_exchange_n(&busy.value, &free, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
void wait_outside() {  // spins while workers are inside; they are running, unless another program has their core
  for (int i = 0; get(gate) & inside_mask; i++)
    if (i < 256) relax();
    else sched_yield();
}

// ---- scratch: one block for each thread ----
struct Scratch {
  void* block;
  int64_t bytes;
};
pthread_key_t scratch_key;
pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
bool scratch_ready = false;
void drop_scratch(void* p) {
  free(((Scratch*)p)->block);
  free(p);
}
void make_scratch_key() { scratch_ready = pthread_key_create(&scratch_key, drop_scratch) == 0; }
}  // namespace

// Calls task(context, begin, end, worker) for ranges that together are [0, count), each starting at a multiple of
// `grain` (the least work worth a call, at least 1). Returns when all are done. With more = 1 another region follows soon,
// and workers spin up to 100 us for it, otherwise 20 us. When the pool is busy with another caller (or this is a worker),
// the caller does everything itself as worker 0.
TW_API void tw_parallel(tw_task task, void* context, int64_t count, int64_t grain, int more) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  if (holding) return handed_out(task, context, count, grain);
  const int64_t want = get(wanted);
  if (want <= 1 || count <= grain || alone) return task(context, 0, count, 0);
  const bool in_team = joins_team(want);
  if ((in_team && left_the_team()) || !enter()) return task(context, 0, count, 0);
  set(regions, get(regions) + 1);
  if (!in_team) fit_workers();
  const int64_t total = in_team ? want : started + 1;
  int64_t grains = (count - 1) / grain + 1;
  int64_t each = (grains - 1) / (total * pieces_each) + 1;  // grains in a piece
  if (grains < 2 * total) each = (grains - 1) / total + 1;
  const int64_t piece = each * grain, pieces = (count - 1) / piece + 1;
  job.task = task;
  job.context = context;
  job.count = count;
  job.piece = piece;
  job.runs = pieces < total ? pieces : total;
  for (int64_t r = 0; r < job.runs; r++) {
    runs[r].next = pieces * r / job.runs;
    runs[r].end = pieces * (r + 1) / job.runs;
  }
  if (in_team) {
    run_on_team(want);
    set(busy, 0);
    return;
  }
  set(caller_core, core());
  set(spin_us, more ? spin_more_us : spin_last_us);
  uint32_t region = (get(gate) & ~(inside_mask | open_bit)) + region_step;
  if (region == 0) region = region_step;
  set(gate, region | open_bit);
  wake(int(job.runs - 1));
  run_pieces(0);
  __atomic_fetch_and(&gate.value, ~open_bit, __ATOMIC_SEQ_CST);
  wait_outside();
  set(busy, 0);
}

// Scratch of the calling thread, 64-byte aligned, at least `bytes` long, kept until the thread ends; its contents are not
// kept when it grows. `worker` is the number that the task was given. Null when memory is exhausted.
TW_API void* tw_scratch(int64_t worker, int64_t bytes) {
  (void)worker;  // two callers may both be worker 0, so threads own scratch
  pthread_once(&scratch_once, make_scratch_key);
  if (!scratch_ready) return nullptr;
  Scratch* s = (Scratch*)pthread_getspecific(scratch_key);
  if (!s) {
    s = (Scratch*)calloc(1, sizeof(Scratch));
    if (!s || pthread_setspecific(scratch_key, s) != 0) {
      free(s);
      return nullptr;
    }
  }
  if (s->bytes < bytes || !s->block) {
    const int64_t size = ((bytes > 0 ? bytes : 1) + 4095) / 4096 * 4096;
    free(s->block);
    s->bytes = 0;
    if (posix_memalign(&s->block, 64, size_t(size)) != 0) s->block = nullptr;
    else s->bytes = size;
  }
  return s->block;
}

// Threads that the next region uses, the caller included.
TW_API int64_t tw_workers(void) { return get(wanted); }

// From the next region on, use n threads (the caller included, clamped to 1 .. 200); pin = 1 binds worker i to the
// i-th core that the process may use, the caller is left alone.
TW_API void tw_resize(int64_t n, int pin) {
  n = n < 1 ? 1 : n > most_workers ? most_workers : n;
  if (get(wanted) != uint32_t(n)) set(wanted, uint32_t(n));
  if (get(pinned) != uint32_t(pin != 0)) set(pinned, uint32_t(pin != 0));
}

// Regions of as many threads as `size` says run on another library's team from now on: `run` calls its first argument in
// each thread of a team and returns when all are done, `number` is a thread's place in it (0 is the caller's). `set_size`
// sets what `size` says, and `set_products` (or null) the same of the library's products; both for the calling thread.
TW_API void tw_join(void* run, void* size, void* number, void* set_size, void* set_products) {
  team_run = (tw_team_run)run;
  team_size = (int (*)(void))size;
  team_number = (int (*)(void))number;
  set_team_size = (void (*)(int))set_size;
  set_product_threads = (int (*)(int))set_products;
  hook_fork();
}

// Whether the threads of a team that was joined sleep as soon as a region ends.
TW_API void tw_sleeps(int at_once) { set(sleeps_at_once, uint32_t(at_once != 0)); }

// From here to tw_together, whatever the calling thread runs (regions, the library's calls) runs on it alone. Both may
// come twice: only the first counts. What other threads may use is untouched.
TW_API void tw_alone(void) {
  if (alone) return;
  if (team_size) team_before = team_size();
  if (set_team_size) set_team_size(1);
  if (set_product_threads) products_before = set_product_threads(1);
  alone = true;
}

// The end of tw_alone.
TW_API void tw_together(void) {
  if (!alone) return;
  alone = false;
  if (set_team_size) set_team_size(team_before);
  if (set_product_threads) set_product_threads(products_before);
}

// From here to tw_shared the library may use its team, unless one came late a short while ago: then as after tw_alone.
TW_API void tw_share(void) {
  if (alone) return;
  if (team_run && left_the_team()) return tw_alone();
  share_start = now_ns();
  const int64_t size = team_run ? team_size() : 1;
  if (size > 1 && size <= most_workers && share_start - team_seen > asleep_ns && joins_team(size) && enter()) {
    set(regions, get(regions) + 1);
    run_team([](void*) { arrive(team_number()); }, size);
    set(busy, 0);
    const int64_t end = now_ns();
    if (end - share_start > late_ns) {
      note(true, end);
      return tw_alone();
    }
    team_seen = share_start = end;
  }
}

// The end of tw_share, of work for which one core takes `core_ns`.
TW_API void tw_shared(int64_t core_ns) {
  if (alone) tw_together();
  else if (share_start) {
    const int64_t end = now_ns(), took = end - share_start;
    note(took > core_ns + late_call_ns && took / late_call_times > core_ns, end);
  }
  share_start = 0;
}

// Forgets which team came late: what follows is to be timed as on a machine with nothing else to do.
TW_API void tw_rejoin(void) {
  __atomic_store_n(&lone_until, int64_t(0), __ATOMIC_RELAXED);
  __atomic_store_n(&lone_ns, shortest_lone_ns, __ATOMIC_RELAXED);
}

// Parallel regions entered so far.
TW_API int64_t tw_regions(void) { return get(regions); }

// Stops and joins the workers; until the next tw_resize regions run on their callers. Returns 0, or 1 if another
// thread's region did not end within two seconds (its workers are then left running).
TW_API int tw_shutdown(void) {
  const int64_t deadline = now_ns() + 2000000000;
  set(wanted, 1);
  while (!enter()) {
    if (now_ns() > deadline) return 1;
    sched_yield();
  }
  stop_workers();
  set(busy, 0);
  return 0;
}

TW_API int64_t tw_version(void) { return 6; }
