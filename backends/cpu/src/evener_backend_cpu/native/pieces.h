// Work that threads share, piece by piece, and what a thread prefetches before it gets there.
#pragma once
#include <atomic>

#include "ahead.h"
#include "pool.h"

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }

// A range of ``total`` that threads take in pieces until it is used up.
struct WorkQueue {
  std::atomic<long> next{0};
  bool take(long total, long piece, long* from, long* to) {
    long at = next.fetch_add(piece, std::memory_order_relaxed);
    if (at >= total) return false;
    *from = at;
    *to = at + piece < total ? at + piece : total;
    return true;
  }
  void reset() { next.store(0, std::memory_order_relaxed); }
};

INLINE long piece_of(long total, long threads, long unit) {
  long p = threads == 1 ? total : (total / (threads * 6) + unit - 1) / unit * unit;
  return p > unit ? p : unit;
}

// Pieces that are shared among threads. Each thread has a run of its own, which it takes from the front: a long run of memory is read faster than short ones.
// After its own it takes from the ends of the others' runs, so that all end at about the same time.
struct SharedPieces {
  static const long RUNS = 256;
  std::atomic<uint64_t> taken[RUNS] = {};  // of each run: how many from the front, and 2^32 times how many from the end
  // One of the ``size`` pieces of a run, by number. One addition decides: what is taken from both sides together never is more than there is.
  bool take(long run, long size, bool front, long* piece) {
    auto left = [size](uint64_t was) { return size - (long)(was & 0xffffffff) - (long)(was >> 32); };
    // Only read: at the end of a product every thread asks for every run.
    if (left(taken[run].load(std::memory_order_relaxed)) <= 0) return false;
    uint64_t was = taken[run].fetch_add(front ? 1 : 1ul << 32, std::memory_order_relaxed);
    *piece = front ? (long)(was & 0xffffffff) : size - 1 - (long)(was >> 32);
    return left(was) > 0;
  }
  void reset() {
    for (auto& each : taken) each.store(0, std::memory_order_relaxed);
  }
};

// Pieces that a thread takes. What it reads next is prefetched, so it takes a piece shortly before it needs it.
// ``span_of(piece, k, to)``: whether there is a k-th span of a piece, which is put into ``to``.
template <class F> struct Pieces {
  static const long MOST = 8;
  SharedPieces& shared;
  long total, own, runs, passed;  // own: the thread's run; passed: how many runs are used up, from its own on
  F span_of;
  long taken[MOST], count, at, part;  // at, part: what is prefetched next
  bool begun;
  Pieces(SharedPieces& shared, long total, F span_of, long tid, long threads)
      : shared(shared), total(total), runs(threads < SharedPieces::RUNS ? threads : SharedPieces::RUNS), passed(0), span_of(span_of), count(0), at(0),
        part(0), begun(false) {
    own = tid % runs;
  }

  bool take() {
    for (long piece; count < MOST && passed < runs; passed++) {
      const long run = (own + passed) % runs, first = total * run / runs;
      if (!shared.take(run, total * (run + 1) / runs - first, !passed, &piece)) continue;
      taken[count++] = first + piece;
      return true;
    }
    return false;
  }
  // All may be taken once more.
  void again() { passed = 0; }

  bool operator()(Span* to) {
    for (; at < count || take(); at++, part = 0)
      if (span_of(taken[at], part++, to)) return true;
    return false;
  }
  // The piece to be computed now.
  bool next(long* piece) {
    if (begun) {
      count--;
      for (long i = 0; i < count; i++) taken[i] = taken[i + 1];
      if (at) at--;
      else part = 0;
    }
    begun = count || take();
    if (begun) *piece = taken[0];
    return begun;
  }
};
template <class F> static Pieces<F> pieces(SharedPieces& shared, long total, F span_of, long tid, long threads) {
  return Pieces<F>(shared, total, span_of, tid, threads);
}

// Waits for the other threads, and prefetches meanwhile: memory would have nothing to do, and threads seldom arrive at the same time.
static const long EARLY = 49152;
INLINE void wait_ahead(Barrier& barrier, long threads, Ahead& ahead) {
  long early = 0;
  barrier.wait(threads, [&] {
    ahead.early(EARLY / 16);
    return (early += EARLY / 16) < EARLY;
  });
}
