// A caller with many short regions to come holds its team (tw_hold): its threads stay in one region and watch for what it
// hands out, so that handing over and taking back costs two lines that go from cache to cache. Nobody waits for a thread
// that has not begun its share: who hands out takes back what was not begun.
//
// Follows pool.cpp in one text.

namespace {
constexpr int64_t watches = 256;  // looks of a waiting thread between two offers of its core to others
struct alignas(64) Post {  // what the holder of a team hands out; `turn` is written last
  int64_t turn;            // 0: nothing yet, -1: nothing will come
  tw_task task;
  void* context;
  int64_t count, piece;
};
struct alignas(64) Share {  // of a held thread: twice the turn that it took; one more if that is done
  int64_t word;
};

Post post;                                  // of the team that is held, as the following, under `busy`
Share shares[most_workers];
int64_t hold_size = 0, hold_began = 0;
bool hold_late = false;  // a thread kept the holder waiting, who goes on alone
void (*hold_body)(void*) = nullptr;
void* hold_context = nullptr;

// What a held thread does until the holder is done.
void watch(int64_t worker) {
  int64_t idle = 0;
  for (int64_t last = 0;;) {
    const int64_t turn = __atomic_load_n(&post.turn, __ATOMIC_ACQUIRE);
    if (turn < 0) return;
    if (turn == last) {
      relax();
      if (++idle % watches == 0) sched_yield();
      continue;
    }
    const tw_task task = post.task;
    void* const context = post.context;
    const int64_t count = post.count, begin = post.piece * worker, end = begin + post.piece;
    int64_t& word = shares[worker].word;
    int64_t before = __atomic_load_n(&word, __ATOMIC_RELAXED);
    last = turn;
    idle = 0;
    // Only who takes the share knows that what was read belongs to this turn: the holder waits for it.
    if (before >= 2 * turn || !__atomic_compare_exchange_n(&word, &before, 2 * turn, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      continue;
    if (begin < count) task(context, begin, end < count ? end : count, worker);
    __atomic_store_n(&word, 2 * turn + 1, __ATOMIC_RELEASE);
  }
}
// Waits until a share of this turn is done. A thread that does not come back in time is the last to be asked: of long shares
// one may well end later than the other, so time is also measured by what a turn took up to now.
void take_back(const int64_t& word, int64_t turn) {
  int64_t start = 0, most = late_ns;
  for (int64_t i = 1; __atomic_load_n(&word, __ATOMIC_ACQUIRE) != 2 * turn + 1; i++) {
    relax();
    if (i % watches) continue;
    sched_yield();
    const int64_t now = now_ns();
    if (!start) {
      start = now;
      const int64_t half = (start - hold_began) / turn / 2;
      most = half > late_ns ? half : late_ns;
    }
    if (now - start > most) hold_late = true;
  }
}
// A region of who holds a team.
void handed_out(tw_task task, void* context, int64_t count, int64_t grain) {
  if (count <= grain || hold_late) return task(context, 0, count, 0);
  const int64_t grains = (count - 1) / grain + 1, piece = ((grains - 1) / hold_size + 1) * grain;
  const int64_t turn = post.turn + 1, parts = (count - 1) / piece + 1;
  post.task = task, post.context = context, post.count = count, post.piece = piece;
  __atomic_store_n(&post.turn, turn, __ATOMIC_RELEASE);
  holding = false;  // regions of a share are its own
  task(context, 0, piece < count ? piece : count, 0);
  for (int64_t w = 1; w < hold_size; w++) {
    int64_t& word = shares[w].word;
    int64_t before = __atomic_load_n(&word, __ATOMIC_RELAXED);
    if (before >= 2 * turn || !__atomic_compare_exchange_n(&word, &before, 2 * turn + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      take_back(word, turn);
    else if (w < parts) task(context, piece * w, piece * (w + 1) < count ? piece * (w + 1) : count, 0);
  }
  holding = true;
}
void hold_part(void*) {
  const int number = team_number();
  arrive(number);
  if (number) return watch(number);
  holding = true;
  hold_began = now_ns();
  hold_body(hold_context);
  holding = false;
  __atomic_store_n(&post.turn, int64_t(-1), __ATOMIC_RELEASE);
  own_end = now_ns();
}
}  // namespace

// Calls body(context), whose regions come one after the other, all of them short: the threads of the team stay between
// them. Where there is no team to hold, its regions are regions.
TW_API void tw_hold(void (*body)(void*), void* context) {
  const int64_t want = get(wanted);
  if (want <= 1 || alone || holding || !joins_team(want) || left_the_team() || !enter()) return body(context);
  set(regions, get(regions) + 1);
  hold_body = body, hold_context = context, hold_size = want, hold_late = false;
  post.turn = 0;
  for (int64_t w = 0; w < want; w++) shares[w].word = 0;
  const int64_t start = run_team(hold_part, want), end = now_ns(), late = end - own_end;
  note(hold_late || (late > late_ns && late > (own_end - start) / 2), end);
  set(busy, 0);
}

// Whether the calling thread holds a team.
TW_API int64_t tw_held(void) { return holding; }
