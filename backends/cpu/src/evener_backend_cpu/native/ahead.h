// What a thread reads next, prefetched some kilobytes before it is used. Few rows of x are multiplied about as fast as one core reads memory, but
// the processor's own prefetchers stop at the end of each page, and the products wait for memory there: from memory, with one row, a core of a
// Xeon (AVX-512) gave 6.8 GB/s of Q4_K and 9 of bfloat16, and 12 and 15 with these; it reads 15.
#pragma once
#include "simd.h"

struct Span {
  const char *p, *end;
};

// A sequence of spans, in the order in which they are used. Whoever uses them says so with ``step``; as many bytes are prefetched further on.
class Ahead {
 public:
  static const long LEAD = 8192;

 private:
  typedef bool (*More)(void*, Span*);
  Span now{};
  More more = nullptr;
  void* context = nullptr;
  long owed = 0, lead = LEAD;

  MEMBER void fetch() {
    for (; owed > 0; owed -= 64, now.p += 64) {
      while (now.p >= now.end)
        if (!more || !more(context, &now)) {
          owed = 0;
          return;
        }
      __builtin_prefetch(now.p, 0, 2);
    }
  }

 public:
  Ahead() = default;
  // The rest of what the processor itself begins to fetch.
  explicit Ahead(Span all) : now{all.p + LEAD, all.end} {}
  // ``f(span)`` sets the next span and returns true, or returns false at the end. It has to live as long as it is used.
  template <class F> void follow(F& f) {
    now = Span{}, owed = lead = LEAD;
    context = &f, more = [](void* c, Span* to) { return (*(F*)c)(to); };
    fetch();
  }
  // So many bytes are prefetched before they are used, or more: of whoever uses many rows side by side.
  MEMBER void at_least(long bytes) {
    if (bytes <= lead) return;
    owed += bytes - lead, lead = bytes;
    fetch();
  }
  // So many bytes are prefetched earlier than they are due, by a thread that has to wait.
  void early(long bytes) {
    long due = owed;
    owed = bytes;
    fetch();
    owed = due - bytes;
  }
  // So many bytes are used, and the caller prefetches as many, from here on; ``otherwise`` at the end, and while what was prefetched early is used.
  MEMBER const char* take(long bytes, const char* otherwise) {
    if (owed < 0) {
      owed += bytes;
      return otherwise;
    }
    while (now.p >= now.end)
      if (!more || !more(context, &now)) return otherwise;
    const char* from = now.p;
    now.p += bytes;
    return from;
  }
  // So many bytes are used.
  MEMBER void step(long bytes) {
    owed += bytes;
    fetch();
  }
};
