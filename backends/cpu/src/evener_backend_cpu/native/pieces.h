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

// Pieces that a thread takes from a queue. What it reads next is prefetched, so it takes a piece shortly before it needs it.
// ``span_of(piece, k, to)``: whether there is a k-th span of a piece, which is put into ``to``.
template <class F> struct Pieces {
  static const long MOST = 8;
  WorkQueue& queue;
  long total;
  F span_of;
  long taken[MOST], count, at, part;  // at, part: what is prefetched next
  bool begun, used_up;
  Pieces(WorkQueue& queue, long total, F span_of) : queue(queue), total(total), span_of(span_of), count(0), at(0), part(0), begun(false), used_up(false) {}

  bool take() {
    long end;
    if (count == MOST || used_up) return false;
    used_up = !queue.take(total, 1, taken + count, &end);
    count += !used_up;
    return !used_up;
  }
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
    else used_up = false;  // the queue may be filled again
    return begun;
  }
};
template <class F> static Pieces<F> pieces(WorkQueue& queue, long total, F span_of) { return Pieces<F>(queue, total, span_of); }

// Waits for the other threads, and prefetches meanwhile: memory would have nothing to do, and threads seldom arrive at the same time.
static const long EARLY = 49152;
INLINE void wait_ahead(Barrier& barrier, long threads, Ahead& ahead) {
  long early = 0;
  barrier.wait(threads, [&] {
    ahead.early(EARLY / 16);
    return (early += EARLY / 16) < EARLY;
  });
}
