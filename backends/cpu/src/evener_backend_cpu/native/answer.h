// Calls of ``routed`` that a device asks for in captured steps: it unlocks a word in page-locked memory, and waits for another one. A thread
// of Python's would wait for the interpreter's lock before each call and after it, which the thread that prepares the next step may hold.
#pragma once
#include "aside.h"

// A place in a step where a device asks. ``ready`` is a lock of pthread_spin_lock; at ``done`` 1 is stored once the rows are there. The call's
// tokens are those of the whole step.
struct Asked {
  int32_t *ready, *done;
  Routed call;
  int64_t expert_bytes;
};
// Shared with whoever ends the thread that answers: the address of the word that is waited for, else 0; and whether no answer is wanted.
struct Waiting {
  int64_t word, closed;
};
struct Answered {
  int64_t nanoseconds, read_bytes;  // of products; each expert's bytes once a call
};

// Experts that some row of the call chooses and that are in this memory; all ids are in range.
static int64_t experts_read(const Routed& call) {
  static thread_local uint64_t seen[MOST_EXPERTS / 64];
  memset(seen, 0, (call.e->count + 63) / 64 * 8);
  int64_t found = 0;
  for (int64_t i = 0; i < call.tokens * call.e->top; i++) {
    int32_t id = call.ids[i];
    uint64_t bit = 1ul << id % 64;
    found += call.e->copies[id] > 0 && !(seen[id / 64] & bit);
    seen[id / 64] |= bit;
  }
  return found;
}

// Answers a step: ``rows`` rows of each call, or (-1) all. After an error the others are answered without products, because the device waits.
template <class Run>
static int answer(Run run, const Asked* asked, int64_t count, int64_t rows, int64_t threads, Waiting* waiting, Answered* spent) {
  int result = DONE;
  Pool::Awake awake;
  for (int64_t i = 0; i < count; i++) {
    const Asked& one = asked[i];
    __atomic_store_n(&waiting->word, (int64_t)one.ready, __ATOMIC_SEQ_CST);
    pthread_spin_lock((pthread_spinlock_t*)one.ready);
    if (__atomic_load_n(&waiting->closed, __ATOMIC_SEQ_CST)) break;
    awake.begin();
    Routed call = one.call;
    if (rows >= 0) call.tokens = rows;
    call.threads = threads;
    if (result == DONE && call.tokens) {
      int64_t began = Aside::now();
      result = rows <= one.call.tokens ? run(call) : wrong("%ld rows of %ld were asked for", (long)rows, (long)one.call.tokens);
      spent->nanoseconds += Aside::now() - began;
      if (result == DONE) spent->read_bytes += one.expert_bytes * experts_read(call);
    }
    __atomic_store_n(one.done, 1, __ATOMIC_RELEASE);
  }
  __atomic_store_n(&waiting->word, 0, __ATOMIC_SEQ_CST);
  return result;
}
