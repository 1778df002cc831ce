// The id of the largest logit of one token, without reading all of the head's weight. screened.py says what codes are, and why a logit is not
// above its bound.
//
// The codes of all rows give each row an upper bound. Each thread computes the logit of the row that looks the best to it, and the largest of
// these is known to be reached. Then the rows whose bound reaches it get their logits, and the largest one wins. Logits are computed as a head
// computes them, so that also ties are those of all logits.
#pragma once
#include "check.h"
#include "sampling.h"

// The head's weight [rows, columns], and its codes. Byte k of a row has column k in its lower half, and column k + columns / 2 in the upper one.
struct Screened {
  const bf16* values;
  const uint8_t* codes;
  const float *scales, *mean, *spread, *dither;  // [rows]; [columns] each
  int64_t rows, columns;
};

static const long CODED_UNIT = 64, MOST_CODED = 16384;
static const float CODE_REACH = 7.5f;
// x is rounded to integers up to this, so that the upper of their two bytes has room for a carry.
static const float LARGEST_WHOLE = 32512.f;
// A thread takes so many rows at a time, and computes so many logits at a time.
static const long CODED_PIECE = 1024, COMPARED = 16;

static int check_screened(const Screened* s, long threads) {
  PASS(check_pointer("the head", s));
  PASS(check_size("the number of rows", s->rows, 1, 1L << 30));
  PASS(check_size("the number of columns", s->columns, CODED_UNIT, MOST_CODED));
  REQUIRE(s->columns % CODED_UNIT == 0, "codes are of multiples of %ld columns, not %ld", CODED_UNIT, (long)s->columns);
  for (const void* each : {(const void*)s->values, (const void*)s->codes, (const void*)s->scales, (const void*)s->mean, (const void*)s->spread, (const void*)s->dither})
    PASS(check_pointer("a part of the head", each));
  return check_size("the number of threads", threads, 1, MOST_THREADS);
}

// Rows that the columns' means and spreads are taken from. They need not be exact.
static const long SAMPLED_ROWS = 1024;

// Mean, spread and dither of the columns; the same for the same matrix. The spread is the root of the standard deviation: where numbers are
// large, x often is small, so that these columns are not worth all of a row's scale. None is so small that its inverse is large.
static void describe_columns(const bf16* from, long rows, long columns, float* mean, float* spread, float* dither) {
  const long step = rows > SAMPLED_ROWS ? rows / SAMPLED_ROWS : 1, count = (rows + step - 1) / step;
  std::vector<float> sums(columns), squares(columns);
  for (long r = 0; r < rows; r += step)
    for (long k = 0; k < columns; k += 16) {
      v16 x = load(from + r * columns + k);
      store(&sums[k], load(&sums[k]) + x), store(&squares[k], add_product(load(&squares[k]), x, x));
    }
  double all = 0;
  for (long k = 0; k < columns; k++) {
    mean[k] = sums[k] / (float)count;
    float variance = squares[k] / (float)count - mean[k] * mean[k];
    spread[k] = sqrtf(sqrtf(variance > 0 ? variance : 0));
    dither[k] = ((float)(hash32((uint32_t)k + 20) >> 8) + 0.5f) * 0x1p-24f - 0.5f;
    all += spread[k];
  }
  const float least = fmaxf((float)(all / columns) * 0.01f, 1e-6f);
  for (long k = 0; k < columns; k++) spread[k] = spread[k] > least ? spread[k] : least;
}

// Codes of one row. ``from``: the numbers; ``per``: 1 / spread; ``at``: the dither and half of the codes' range, so that the code is what is
// below it; ``left``: room for a row.
static void code_row(const bf16* from, const float* mean, const float* per, const float* at, long columns, float* left, uint8_t* codes, float* scale) {
  v16 most = splat(0.f);
  for (long k = 0; k < columns; k += 16) {
    v16 x = (load(from + k) - load(mean + k)) * load(per + k);
    store(left + k, x);
    most = vmax(most, (v16)((u16x)x & 0x7fffffffu));
  }
  // A little more than it has to be, so that no number is rounded over the last code; and never so small that its inverse is infinite.
  float size = max16(most) * (1.000002f / CODE_REACH), own = size > 1e-30f ? size : 1e-30f, into = 1.f / own;
  *scale = own;
  for (long k = 0, half = columns / 2; k < half; k += 16) {
    u16x low = (u16x)ints_of(add_product(load(at + k), load(left + k), splat(into))) & 15u;
    u16x high = (u16x)ints_of(add_product(load(at + half + k), load(left + half + k), splat(into))) & 15u;
    u16x both = low | (high << 4);
#ifdef EVENER_LANES512
    _mm_storeu_si128((__m128i*)(codes + k), _mm512_cvtepi32_epi8((__m512i)both));
#else
    uint16_t wide[16];
    store_lower(wide, both);
    for (int i = 0; i < 16; i++) codes[k + i] = (uint8_t)wide[i];
#endif
  }
}

// Fills all but the values. ``from``: what to copy there before, or null. Rows are copied when they are coded, since then they are in a cache.
static int code_rows(const Screened& s, const bf16* from, long threads) {
  const long K = s.columns;
  describe_columns(from ? from : s.values, s.rows, K, (float*)s.mean, (float*)s.spread, (float*)s.dither);
  std::vector<float> per(K), at(K);
  for (long k = 0; k < K; k++) per[k] = 1.f / s.spread[k], at[k] = s.dither[k] + (CODE_REACH + 0.5f);
  Pool::run(threads, [&](long tid, long n) {
    float left[MOST_CODED];
    for (long r = s.rows * tid / n; r < s.rows * (tid + 1) / n; r++) {
      const bf16* row = s.values + r * K;
      if (from) memcpy((void*)row, from + r * K, K * sizeof(bf16));
      code_row(row, s.mean, per.data(), at.data(), K, left, (uint8_t*)s.codes + r * K / 2, (float*)s.scales + r);
    }
  });
  return DONE;
}

// x of one step, as the products with codes need it.
struct Asking {
  bf16* x;              // [columns]: after the norm
  int8_t *upper, *lower;  // [columns]: x times spread, as 256 upper + lower, times ``factor``
  float factor, middle, apart;  // a row's approximate logit is scale * (factor * sum + middle), and the bound is ``apart`` scales above it
  double mean, rounding;        // what the mean row adds to all logits; a bound of how inexact sums with it are
  static long bytes(long columns) { return columns * 4 + 2 * 64; }

  // ``norm``: the weight of an RMS norm; null: ``from`` is normed. False if there are no bounds: x is zero, or has something that is no number.
  bool enter(const Screened& s, const float* from, const float* norm, float eps, float offset, float certainty, char* room) {
    const long K = s.columns;
    x = (bf16*)room, upper = (int8_t*)(room + 2 * K), lower = upper + K + 64;
    if (norm) norm_row(from, norm, x, K, eps, offset);
    else
      for (long k = 0; k < K; k++) put(x + k, from[k]);
    float most = 0.f;
    for (long k = 0; k < K; k++) {
      float y = fabsf(wide(x[k]) * s.spread[k]);
      if (!(y < INFINITY)) return false;
      most = y > most ? y : most;
    }
    if (!(most > 1e-30f)) return false;
    factor = most / LARGEST_WHOLE;
    const float into = LARGEST_WHOLE / most;
    double squares = 0, sizes = 0, lost = 0, shift = 0, mean_sizes = 0;
    mean = 0;
    for (long k = 0; k < K; k++) {
      const float y = wide(x[k]) * s.spread[k];
      const long whole = lrintf(y * into), above = (whole + 128) >> 8;
      upper[k] = (int8_t)above, lower[k] = (int8_t)(whole - above * 256);
      const double its = (double)wide(x[k]) * s.mean[k];
      squares += (double)y * y, sizes += fabs(y), lost += fabs(y - (double)factor * whole);
      shift += (double)y * (CODE_REACH + s.dither[k]);
      mean += its, mean_sizes += fabs(its);
    }
    memset(upper + K, 0, 64), memset(lower + K, 0, 64);
    middle = (float)-shift;
    // How far the sums of a head may be from those of real numbers, in whatever order it adds, as a part of the sum of the sizes of all products.
    const double adding = (double)(K + 64) * 0x1p-24;
    // Of x as integers nothing is left out that is more than ``lost`` of its numbers times 8, the largest code less its middle and dither. What is
    // rounded in float32, here and in codes and bounds, is less than 2^-15 of a scale for each.
    apart = (float)((certainty * sqrt(squares) + 8 * lost + (0x1p-15 + 8 * adding) * sizes) * 1.00001);
    rounding = adding * mean_sizes + 1e-30;
    return true;
  }
};

// Sums of x, in integers, times the codes of R rows, in float32: R sums, each of sixteen lanes.
#if defined(EVENER_LANES512)
#ifdef __AVX512VNNI__
INLINE __m512i dot_codes(__m512i sum, __m512i codes, __m512i x) { return _mm512_dpbusd_epi32(sum, codes, x); }
#else
INLINE __m512i dot_codes(__m512i sum, __m512i codes, __m512i x) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1)));
}
#endif
template <int R> INLINE void dot_rows(const Asking& a, const uint8_t* codes, long columns, v16 out[R]) {
  const long half = columns / 2;
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i upper[R], lower[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) upper[r] = lower[r] = _mm512_setzero_si512();
  for (long k = 0; k < half; k += 64) {
    const __m512i u0 = _mm512_loadu_si512(a.upper + k), u1 = _mm512_loadu_si512(a.upper + half + k);
    const __m512i l0 = _mm512_loadu_si512(a.lower + k), l1 = _mm512_loadu_si512(a.lower + half + k);
    const bool whole = half - k >= 64;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const uint8_t* p = codes + r * half + k;
      __m512i both = whole ? _mm512_loadu_si512(p) : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
      __m512i even = _mm512_and_si512(both, mask), odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
      upper[r] = dot_codes(dot_codes(upper[r], even, u0), odd, u1);
      lower[r] = dot_codes(dot_codes(lower[r], even, l0), odd, l1);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) out[r] = floats_of((i16x)_mm512_add_epi32(_mm512_slli_epi32(upper[r], 8), lower[r]));
}
#elif defined(EVENER_LANES256)
INLINE __m256i dot_codes(__m256i sum, __m256i even, __m256i odd, const int8_t* x, const int8_t* y) {
  // 15 times 128 four times fits 16 bits.
  __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(even, _mm256_loadu_si256((const __m256i*)x)),
                                   _mm256_maddubs_epi16(odd, _mm256_loadu_si256((const __m256i*)y)));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <int R> INLINE void dot_rows(const Asking& a, const uint8_t* codes, long columns, v16 out[R]) {
  const long half = columns / 2;
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i upper[R], lower[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) upper[r] = lower[r] = _mm256_setzero_si256();
  for (long k = 0; k < half; k += 32)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      __m256i both = _mm256_loadu_si256((const __m256i*)(codes + r * half + k));
      __m256i even = _mm256_and_si256(both, mask), odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
      upper[r] = dot_codes(upper[r], even, odd, a.upper + k, a.upper + half + k);
      lower[r] = dot_codes(lower[r], even, odd, a.lower + k, a.lower + half + k);
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    __m256i both = _mm256_add_epi32(_mm256_slli_epi32(upper[r], 8), lower[r]);
    out[r] = {_mm256_cvtepi32_ps(both), v16::Half{}};
  }
}
#else
template <int R> INLINE void dot_rows(const Asking& a, const uint8_t* codes, long columns, v16 out[R]) {
  const long half = columns / 2;
  for (int r = 0; r < R; r++) {
    int32_t sums[16] = {};
    for (long k = 0; k < half; k++) {
      int even = codes[r * half + k] & 15, odd = codes[r * half + k] >> 4;
      sums[k % 16] += even * (256 * a.upper[k] + a.lower[k]) + odd * (256 * a.upper[half + k] + a.lower[half + k]);
    }
    for (int i = 0; i < 16; i++) out[r][i] = (float)sums[i];
  }
}
#endif

// The codes that a thread reads, piece by piece.
struct CodePieces {
  const Screened& s;
  bool operator()(long at, long k, Span* to) const {
    const long first = at * CODED_PIECE, last = first + CODED_PIECE < s.rows ? first + CODED_PIECE : s.rows;
    if (k) return false;
    *to = {(const char*)s.codes + first * (s.columns / 2), (const char*)s.codes + last * (s.columns / 2)};
    return true;
  }
};

// What becomes of the products of a head: they are multiplied by a factor above 0, and a soft cap of more than 0 follows. Neither changes their
// order, but rounding can make some of them equal.
struct Shaping {
  float factor, cap;
  bool none() const { return factor == 1.f && !(cap > 0.f); }
  // Products below this are less than ``v`` afterwards, too, whoever computes factor and cap in float32: each step of that is exact to 2^-20.
  double alike(float v) const {
    if (none()) return v;
    const double slack = 0x1p-18, y = (double)v * factor;
    if (!(cap > 0.f)) return (y - slack * fabs(y)) / factor;
    const double t = tanh(y / cap), least = t - slack * fabs(t);
    return least <= -1 ? -(double)INFINITY : cap * atanh(least) / factor;
  }
};

// The best logit so far, and the lowest of its ids; -1: none. ``next``: the largest of other rows.
struct alignas(64) Best {
  float value = -INFINITY, known = -INFINITY, next = -INFINITY;
  long id = -1;
  void take(float other, long its) {
    if (its < 0 || its == id) return;
    const bool better = other > value || (other == value && (id < 0 || its < id));
    const float less = better ? value : other;
    next = less > next ? less : next;
    if (better) value = other, id = its;
  }
};

struct Search {
  const Screened& s;
  const Asking& a;
  float* bounds;  // [rows]
  Best* bests;    // [threads]
  Shaping shaping;
  long few;       // more candidates than these are not compared
  SharedPieces pieces_taken;
  WorkQueue queue;
  std::atomic<long> count{0};
  Barrier barrier;

  // Returns the row that looks the best to this thread; -1: it had none.
  long screen(long tid, long threads) {
    auto own = pieces(pieces_taken, ceil_div(s.rows, CODED_PIECE), CodePieces{s}, tid, threads);
    Ahead ahead;
    ahead.follow(own);
    const long bytes = s.columns / 2;
    float best = -INFINITY;
    long id = -1;
    for (long at; own.next(&at);) {
      const long end = at * CODED_PIECE + CODED_PIECE < s.rows ? at * CODED_PIECE + CODED_PIECE : s.rows;
      for (long r = at * CODED_PIECE; r < end; r += 4) {
        const long some = end - r < 4 ? end - r : 4;
        ahead.step(some * bytes);
        v16 lanes[4];
        if (some == 4) dot_rows<4>(a, s.codes + r * bytes, s.columns, lanes);
        else
          for (long i = 0; i < 4; i++) dot_rows<1>(a, s.codes + (r + (i < some ? i : 0)) * bytes, s.columns, lanes + i);
        v4 sum = sums(lanes[0], lanes[1], lanes[2], lanes[3]), scale{};
        memcpy(&scale, s.scales + r, some * sizeof(float));
        v4 about = scale * (sum * a.factor + a.middle), bound = about + scale * a.apart;
        bound = bound == bound ? bound : v4{} + INFINITY;  // the row's numbers are too large for a scale
        memcpy(bounds + r, &bound, some * sizeof(float));
        for (long i = 0; i < some; i++)
          if (about[i] > best) best = about[i], id = r + i;
      }
    }
    return id;
  }

  // Logits of ``count`` rows, which are put side by side first.
  void compare(const long* ids, long count, bf16* side, Best& best) {
    const long K = s.columns;
    float logits[COMPARED];
    for (long i = 0; i < count; i++) memcpy((void*)(side + i * K), s.values + ids[i] * K, K * sizeof(bf16));
    gemm<bf16, float>(a.x, K, 1, side, 0, count, K, nullptr, logits, count);
    for (long i = 0; i < count; i++) best.take(logits[i], ids[i]);
  }

  // f(row) for every row of [from, to) whose bound reaches ``least``.
  template <class F> void each_candidate(float least, long from, long to, F f) {
    for (long r = from; r < to; r += 16) {
      if (r + 16 <= to && !(max16(load(bounds + r)) >= least)) continue;
      for (long i = r; i < r + 16 && i < to; i++)
        if (bounds[i] >= least) f(i);
    }
  }

  void operator()(long tid, long threads, bf16* side) {
    Best best;
    const long K = s.columns, first = screen(tid, threads);
    if (first >= 0) compare(&first, 1, side, best);
    bests[tid].known = best.value;
    barrier.wait(threads);
    float known = -INFINITY;
    for (long t = 0; t < threads; t++) known = bests[t].known > known ? bests[t].known : known;
    const double reached = shaping.alike(known) - a.mean;
    const float least = nextafterf((float)(reached - a.rounding - 0x1p-22 * fabs(reached)), -INFINITY);
    // Two lists: what is in the second is on its way from memory.
    long ids[2][COMPARED], have = 0, ready = 0, mine = 0, from, to;
    int now = 0;
    auto flush = [&] {
      if (ready) compare(ids[1 - now], ready, side, best);
      ready = have, have = 0, now = 1 - now;
    };
    while (queue.take(s.rows, CODED_PIECE, &from, &to)) {
      each_candidate(least, from, to, [&](long r) {
        for (const char *p = (const char*)(s.values + r * K), *end = p + K * sizeof(bf16); p < end; p += 64) __builtin_prefetch(p, 0, 2);
        ids[now][have++] = r, mine++;
        if (have == COMPARED) flush();
      });
      if (count.load(std::memory_order_relaxed) + mine > few) break;
    }
    count.fetch_add(mine, std::memory_order_relaxed);
    flush(), flush();
    bests[tid].value = best.value, bests[tid].next = best.next, bests[tid].id = best.id;
  }
};

// All that a search needs beside the head, for so many threads.
struct SearchRoom {
  long bounds, bests, sides, side, total;
  SearchRoom(long rows, long columns, long threads) {
    bounds = Sizes::up(Asking::bytes(columns));
    bests = bounds + Sizes::up(rows * sizeof(float));
    sides = bests + threads * sizeof(Best);
    side = Sizes::up(COMPARED * columns * sizeof(bf16));
    total = sides + threads * side;
  }
};

// The id, or -1: there are no bounds, or more than ``few`` candidates, or several rows that ``shaping`` may make equal, so all logits have to be
// computed. ``a.x`` is the normed x in any case.
static long search(const Screened& s, Asking& a, const float* x, const float* norm, float eps, float offset, float certainty, Shaping shaping, long few,
                   char* base, const SearchRoom& room, long threads, int64_t* candidates) {
  if (!a.enter(s, x, norm, eps, offset, certainty, base) || few < 0) return -1;
  Best* bests = (Best*)(base + room.bests);
  for (long t = 0; t < threads; t++) bests[t] = Best{};
  Search run{s, a, (float*)(base + room.bounds), bests, shaping, few};
  Pool::run(threads, [&](long tid, long n) { run(tid, n, (bf16*)(base + room.sides + tid * room.side)); });
  *candidates = run.count.load();
  Best best;
  for (long t = 0; t < threads; t++) {
    best.take(bests[t].value, bests[t].id);
    best.next = bests[t].next > best.next ? bests[t].next : best.next;
  }
  if (!shaping.none() && best.next >= shaping.alike(best.value)) return -1;
  return *candidates > few || !(fabsf(best.value) < INFINITY) ? -1 : best.id;
}

// The id of the largest logit of one token, whose stream is ``x``; if ``norm`` is null, it is normed. ``few``: with more candidates than these all logits are computed, and with
// fewer than none at once; if there is a factor or a cap, the caller computes them, and the id is -1. ``candidates``: how many there were, or -1.
static int largest(const Screened* s, const float* x, const float* norm, const bf16* bias, float eps, float offset, float certainty, int64_t few,
                   int32_t* id, int64_t* candidates, int64_t threads, float factor, float cap, Scratch& memory) {
  PASS(check_screened(s, threads));
  REQUIRE(factor > 0 && cap >= 0, "a factor is above 0, and a cap is not below: %g and %g", (double)factor, (double)cap);
  for (const void* each : {(const void*)x, (const void*)id, (const void*)candidates}) PASS(check_pointer("an argument", each));
  SearchRoom room(s->rows, s->columns, threads);
  char* base = memory.reserve(room.total);
  if (!base) return NO_MEMORY;
  Asking asking;
  *candidates = -1;
  const Shaping shaping{factor, cap};
  long found = search(*s, asking, x, norm, eps, offset, certainty, shaping, bias ? -1 : few, base, room, threads, candidates);
  if (found >= 0 || !shaping.none()) return *id = (int32_t)found, DONE;
  float* logits = (float*)(base + room.bounds);
  Matrix w{s->values, nullptr};
  WorkQueue queue;
  Pool::run(threads, [&](long, long n) { gemm_parallel<bf16, float>(queue, n, asking.x, {}, 1, w, bias, s->rows, s->columns, logits); });
  *id = largest_of(logits, s->rows);
  return DONE;
}
