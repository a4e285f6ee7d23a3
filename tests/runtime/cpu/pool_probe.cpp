// Uses of the thread pool, for test_pool.py: the pool's functions come in by address.
#include <sched.h>
#include <time.h>
#include <unistd.h>
typedef long long i64;
typedef void (*task_type)(void*, i64, i64, i64);
typedef void (*parallel_type)(task_type, void*, i64, i64, int);
typedef void* (*scratch_type)(i64, i64);
#define API extern "C" __attribute__((visibility("default")))

struct Count {
  int* seen;
  i64 grain, odd_starts, workers;
};
static void count_task(void* context, i64 begin, i64 end, i64 worker) {
  Count* c = (Count*)context;
  if (begin % c->grain) __atomic_fetch_add(&c->odd_starts, 1, __ATOMIC_RELAXED);
  __atomic_fetch_or(&c->workers, 1ll << worker, __ATOMIC_RELAXED);
  for (i64 i = begin; i < end; i++) __atomic_fetch_add(&c->seen[i], 1, __ATOMIC_RELAXED);
}
// How many indices were not visited exactly once, or ranges that start off the grain, over `rounds` regions.
API i64 cover(parallel_type parallel, int* seen, i64 n, i64 grain, i64 rounds) {
  i64 bad = 0;
  for (i64 r = 0; r < rounds; r++) {
    for (i64 i = 0; i < n; i++) seen[i] = 0;
    Count c = {seen, grain, 0, 0};
    parallel(count_task, &c, n, grain, int(r & 1));
    for (i64 i = 0; i < n; i++) bad += seen[i] != 1;
    bad += c.odd_starts;
  }
  return bad;
}

struct Spin {
  i64 loops, workers;
  double sum;
};
static void spin_task(void* context, i64 begin, i64 end, i64 worker) {
  Spin* s = (Spin*)context;
  volatile double x = 0;
  for (i64 i = begin; i < end; i++)
    for (i64 k = 0; k < s->loops; k++) x = x + 1.0;
  __atomic_fetch_or(&s->workers, 1ll << worker, __ATOMIC_RELAXED);
}
// A bit for each worker that took part in n items of `loops` additions.
API i64 who(parallel_type parallel, i64 n, i64 loops) {
  Spin s = {loops, 0, 0};
  parallel(spin_task, &s, n, 1, 1);
  return s.workers;
}

struct Block {
  scratch_type scratch;
  i64 bytes, bad;
};
static void scratch_task(void* context, i64 begin, i64 end, i64 worker) {
  Block* b = (Block*)context;
  for (i64 i = begin; i < end; i++) {
    i64* p = (i64*)b->scratch(worker, b->bytes);
    if (!p || (unsigned long long)p % 64) {
      __atomic_fetch_add(&b->bad, 1, __ATOMIC_RELAXED);
      continue;
    }
    i64 n = b->bytes / 8;
    for (i64 k = 0; k < n; k++) p[k] = i * n + k;
    for (i64 k = 0; k < n; k++)
      if (p[k] != i * n + k) __atomic_fetch_add(&b->bad, 1, __ATOMIC_RELAXED);
  }
}
// Faults of scratch blocks that several workers write at the same time.
API i64 scratch_faults(parallel_type parallel, scratch_type scratch, i64 n, i64 bytes) {
  Block b = {scratch, bytes, 0};
  parallel(scratch_task, &b, n, 1, 0);
  return b.bad;
}

struct Nest {
  parallel_type parallel;
  int* seen;
};
static void inner_task(void* context, i64 begin, i64 end, i64) {
  for (i64 i = begin; i < end; i++) __atomic_fetch_add(&((int*)context)[i], 1, __ATOMIC_RELAXED);
}
static void outer_task(void* context, i64 begin, i64 end, i64) {
  Nest* n = (Nest*)context;
  for (i64 i = begin; i < end; i++) n->parallel(inner_task, n->seen, 100, 1, 0);
}
// A region inside a region: every one of 100 indices is visited `n` times. Returns the faults.
API i64 nested(parallel_type parallel, int* seen, i64 n) {
  Nest c = {parallel, seen};
  for (i64 i = 0; i < 100; i++) seen[i] = 0;
  parallel(outer_task, &c, n, 1, 0);
  i64 bad = 0;
  for (i64 i = 0; i < 100; i++) bad += seen[i] != n;
  return bad;
}

typedef void (*hold_type)(void (*)(void*), void*);
struct Hold {
  parallel_type parallel;
  int* seen;
  i64 n, grain, rounds, bad, workers;
};
static void hold_body(void* context) {
  Hold* h = (Hold*)context;
  Count c = {h->seen, h->grain, 0, 0};
  for (i64 r = 1; r <= h->rounds; r++) {
    h->parallel(count_task, &c, h->n, h->grain, 0);
    for (i64 i = 0; i < h->n; i++) h->bad += h->seen[i] != r;  // all of this region, nothing of the next
  }
  h->bad += c.odd_starts;
  h->workers = c.workers;
}
// Regions of a team that is held: the faults, and from bit 32 on a bit for each worker that took part.
API i64 held(parallel_type parallel, hold_type hold, int* seen, i64 n, i64 grain, i64 rounds) {
  for (i64 i = 0; i < n; i++) seen[i] = 0;
  Hold h = {parallel, seen, n, grain, rounds, 0, 0};
  hold(hold_body, &h);
  return h.bad | h.workers << 32;
}

struct Cores {
  i64 each[2], home;
  bool come;
};
static void core_task(void* context, i64, i64, i64 worker) {
  Cores* c = (Cores*)context;
  cpu_set_t all, one;
  c->each[worker & 1] = sched_getcpu();
  if (!worker || !c->come || sched_getaffinity(0, sizeof all, &all)) return;
  CPU_ZERO(&one);
  CPU_SET(int(c->home), &one);
  if (sched_setaffinity(0, sizeof one, &one) == 0) sched_setaffinity(0, sizeof all, &all);
}
static i64 micros() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return i64(t.tv_sec) * 1000000 + t.tv_nsec / 1000;
}
struct Held {
  parallel_type parallel;
  Cores* cores;
};
static void both(void* context) {
  Held* h = (Held*)context;
  const i64 end = micros() + 1500;  // a tick of the clock is not awaited
  while (h->cores->each[1] < 0 && micros() < end) h->parallel(core_task, h->cores, 2, 1, 0);
}
// How often a thread that fell asleep on its caller's core is still there when work comes `pause_us` later, in `rounds`
// regions.
API i64 together(parallel_type parallel, hold_type hold, i64 rounds, i64 pause_us) {
  i64 found = 0;
  for (i64 r = 0; r < rounds; r++) {
    for (int come = 1; come >= 0; come--) {
      Cores c = {{-1, -1}, sched_getcpu(), come != 0};
      Held h = {parallel, &c};
      hold(both, &h);
      found += !come && (c.each[1] < 0 || c.each[0] == c.each[1]);
      if (come) usleep(pause_us);
      else usleep(20000);
    }
  }
  return found;
}

struct Uneven {
  parallel_type parallel;
  i64 first_us, second_us, workers;
};
static void uneven_task(void* context, i64 begin, i64 end, i64 worker) {
  Uneven* u = (Uneven*)context;
  for (i64 i = begin; i < end; i++)
    for (const i64 until = micros() + (worker ? u->second_us : u->first_us); micros() < until;) {}
  __atomic_fetch_or(&u->workers, 1ll << worker, __ATOMIC_RELAXED);
}
static void uneven_body(void* context) {
  Uneven* u = (Uneven*)context;
  u->parallel(uneven_task, u, 2, 1, 0);
  u->workers = 0;
  u->parallel(uneven_task, u, 2, 1, 0);
}
// A bit for each worker that takes part behind a region whose shares take so long.
API i64 uneven(parallel_type parallel, hold_type hold, i64 first_us, i64 second_us) {
  Uneven u = {parallel, first_us, second_us, 0};
  hold(uneven_body, &u);
  return u.workers;
}

static void nothing(void*, i64, i64, i64) {}
API void empty(parallel_type parallel, i64 n) { parallel(nothing, 0, n, 1, 1); }
API void many_empty(parallel_type parallel, i64 n, i64 rounds) {
  for (i64 r = 0; r < rounds; r++) parallel(nothing, 0, n, 1, 1);
}

// A team of two whose second thread comes `lag_us` after the first has ended.
static int number = 0;
static i64 teams = 0, lag_us = 0;
static void team_run(void (*part)(void*), void* data, unsigned, unsigned) {
  teams++;
  number = 0;
  part(data);
  if (lag_us) usleep(unsigned(lag_us));
  number = 1;
  part(data);
  number = 0;
}
static int team_size() { return 2; }
static int team_number() { return number; }
static void set_team_size(int) {}
API i64 join_late_team(void (*join)(void*, void*, void*, void*, void*), i64 lag) {
  lag_us = lag;
  join((void*)team_run, (void*)team_size, (void*)team_number, (void*)set_team_size, nullptr);
  return teams;
}
