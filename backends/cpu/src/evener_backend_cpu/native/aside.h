// One call of ``routed`` on a thread of its own, while the thread that asks for it goes on. A thread of Python's would wait for the
// interpreter's lock, which the one that asks holds most of the time: for milliseconds, before the call and after it.
#pragma once
#include <time.h>

#include <cstring>

#include "check.h"

struct Routed {
  const Experts* e;
  int64_t tokens;
  const void* x;
  const int32_t* ids;
  const float* weights;
  void* y;
  int64_t threads;
};

class Aside {
  typedef int (*Run)(const Routed&);
  pthread_t thread;
  Futex asked, answered;
  bool busy = false, over = false;
  Run run = nullptr;
  Routed call{};
  int32_t* word = nullptr;
  int result = DONE;
  int64_t taken = 0;
  char problem[256] = "";

  static void* main(void* arg) {
    Aside& me = *(Aside*)arg;
    for (int last = 0;; last = next(last)) {
      me.asked.wait_while_equal(last);
      if (me.over) return nullptr;
      int64_t began = now();
      me.result = me.run(me.call);
      me.taken = now() - began;
      if (me.result == WRONG) memcpy(me.problem, problem_text(), sizeof me.problem);
      if (me.word) __atomic_store_n(me.word, 1, __ATOMIC_RELEASE);  // also after an error: a device may wait for it
      me.answered.set(next(last));
    }
  }

 public:
  static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
  }
  // Null: the system gives no thread.
  static Aside* make() {
    Aside* made = new Aside;
    if (!pthread_create(&made->thread, nullptr, main, made)) return made;
    delete made;
    return nullptr;
  }
  // Once it is done, 1 is stored in ``word``, if there is one.
  int begin(Run how, const Routed& what, int32_t* to) {
    REQUIRE(!busy, "the thread has a call that nobody waited for");
    busy = true, run = how, call = what, word = to;
    asked.set(next(asked.get()));
    return DONE;
  }
  // Waits for the call, and returns its result.
  int end(int64_t* nanoseconds) {
    REQUIRE(busy, "the thread has no call");
    for (int seen; (seen = answered.get()) != asked.get();) answered.wait_while_equal(seen);
    busy = false, *nanoseconds = taken;
    if (result == WRONG) memcpy(problem_text(), problem, sizeof problem);
    return result;
  }
  void close() {
    int64_t unread;
    if (busy) end(&unread);
    over = true;
    asked.set(next(asked.get()));
    pthread_join(thread, nullptr);
    delete this;
  }
};
