/* The machine's own copy and read bandwidth, the yardstick of memory-bound kernels.

   Threads are made first and started together; only the work between two barriers is timed. The caller touches both
   buffers before. Modes: 0 copy with ordinary stores, 1 copy with non-temporal stores, 2 read. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

struct team {
    float *to;
    const float *from;
    long count;
    int threads, mode, repeats;
    double *seconds;
    atomic_int arrived, round;
};

struct member {
    struct team *team;
    int index;
    float sum;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A spinning barrier: both threads run on cores of their own here. */
static void meet(struct team *team) {
    int round = atomic_load(&team->round);
    if (atomic_fetch_add(&team->arrived, 1) + 1 == team->threads) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->round, round + 1);
    } else {
        while (atomic_load(&team->round) == round) {
        }
    }
}

static void copy_past_caches(float *to, const float *from, long count) {
    long i = 0;
#if defined(__AVX512F__)
    for (; i < count && ((uintptr_t)(to + i) & 63); i++) to[i] = from[i];
    for (; i + 32 <= count; i += 32) {
        __m512 a = _mm512_loadu_ps(from + i), b = _mm512_loadu_ps(from + i + 16);
        _mm512_stream_ps(to + i, a);
        _mm512_stream_ps(to + i + 16, b);
    }
    _mm_sfence();
#elif defined(__AVX__)
    for (; i < count && ((uintptr_t)(to + i) & 31); i++) to[i] = from[i];
    for (; i + 16 <= count; i += 16) {
        __m256 a = _mm256_loadu_ps(from + i), b = _mm256_loadu_ps(from + i + 8);
        _mm256_stream_ps(to + i, a);
        _mm256_stream_ps(to + i + 8, b);
    }
    _mm_sfence();
#endif
    for (; i < count; i++) to[i] = from[i];
}

static void copy_plainly(float *to, const float *from, long count) {
    for (long i = 0; i < count; i++) to[i] = from[i];
}

static float read_all(const float *from, long count) {
    float sums[64] = {0};
    long i = 0;
    for (; i + 64 <= count; i += 64)
        for (int j = 0; j < 64; j++) sums[j] += from[i + j];
    for (; i < count; i++) sums[0] += from[i];
    for (int j = 1; j < 64; j++) sums[0] += sums[j];
    return sums[0];
}

static void *work(void *argument) {
    struct member *member = argument;
    struct team *team = member->team;
    long share = (team->count / team->threads + 15) / 16 * 16;
    long start = share * member->index;
    long end = member->index + 1 == team->threads ? team->count : start + share;
    long count = end > start ? end - start : 0;
    for (int r = 0; r < team->repeats; r++) {
        meet(team);
        double begin = now();
        if (team->mode == 0) copy_plainly(team->to + start, team->from + start, count);
        if (team->mode == 1) copy_past_caches(team->to + start, team->from + start, count);
        if (team->mode == 2) member->sum += read_all(team->from + start, count);
        meet(team);
        if (member->index == 0) team->seconds[r] = now() - begin;
    }
    return 0;
}

/* Fills seconds[repeats]; returns 0, or -1 if a thread could not be made. At most 64 threads. */
int bandwidth(float *to, const float *from, long count, int threads, int mode, int repeats, double *seconds) {
    struct team team = {to, from, count, threads, mode, repeats, seconds, 0, 0};
    struct member members[64];
    pthread_t handles[64];
    if (threads < 1 || threads > 64) return -1;
    for (int i = 1; i < threads; i++) {
        members[i] = (struct member){&team, i, 0};
        if (pthread_create(&handles[i], 0, work, &members[i])) return -1;
    }
    members[0] = (struct member){&team, 0, 0};
    work(&members[0]);
    for (int i = 1; i < threads; i++) pthread_join(handles[i], 0);
    volatile float sink = members[0].sum;
    (void)sink;
    return 0;
}
