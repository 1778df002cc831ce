// Paged attention over the layout "cpu.paged". A page holds one block of one layer: all keys, then all values. Both are split
// into groups of 16 tokens, so that 16 scores, or 16 value columns, are one vector; E = 4 / sizeof(T) elements share a 32-bit lane:
//   keys   [kv_head][group][d / E][16][E]      values [kv_head][group][16 / E][dv][E]
// Keys are read in chunks of 64 tokens, and chunks in spans of SPAN, both aligned to the token's position; partial results of spans
// are merged in order. So the arithmetic of a row depends on the row alone, not on tiles, chunked prefill, threads or other rows.
// Quantized state has the same layout in elements of one byte (state_elements.h): a chunk becomes T when it is read, and the scale of a
// head's keys is a factor on its scores, that of its values one on its output.
#pragma once
#include "ahead.h"
#include "state_elements.h"

static const long SPAN = 256, CHUNK = 64, TILE_ROWS = 48;

struct Geometry {
  int64_t heads, kv_heads, d, dv, block, page_bytes, window, chunked;  // window 0: none; chunked: its tokens are a chunk
  int64_t blocks;         // pages of the pool
  int64_t stored;         // StoredKind of quantized state; 0: elements are T
  float scale, softcap;   // softcap 0: none
  char* pages;
  const float* slopes;  // slope of each head: a score loses this per token of distance; null: no slopes
  const float *key_scales, *value_scales;  // of each KV head, of quantized state
};

struct Step {
  int64_t tokens, requests, slots64, table_stride, table_columns, items, parts;
  mutable uint64_t checked;  // the geometry for which check.h found the step in order; 0: none yet
  const void* slots;
  const int32_t *query_start, *kv_lens, *table;
  const struct Item* plan;
};

// A tile of queries, all of its spans (span = -1) or one of them; ``part`` numbers partial results.
struct Item {
  int32_t request, token, count, span, spans, part;
};

// The first position that the query at ``position`` attends to.
INLINE long first_attended(const Geometry& g, long position) {
  if (g.chunked) return position / g.window * g.window;
  return g.window && position >= g.window ? position - g.window + 1 : 0;
}

INLINE long index_at(const void* p, long i, long is64) {
  return is64 ? (long)((const int64_t*)p)[i] : (long)((const int32_t*)p)[i];
}

template <class T> INLINE long element_bytes(const Geometry& g) { return g.stored ? 1 : sizeof(T); }
template <class T> INLINE char* key_group(const Geometry& g, long block, long head, long group) {
  return g.pages + block * g.page_bytes + (head * (g.block / 16) + group) * 16 * g.d * element_bytes<T>(g);
}
template <class T> INLINE char* value_group(const Geometry& g, long block, long head, long group) {
  long at = g.kv_heads * g.block * g.d + (head * (g.block / 16) + group) * 16 * g.dv;
  return g.pages + block * g.page_bytes + at * element_bytes<T>(g);
}

// Keys and values of a group.
template <class T> INLINE long group_bytes(const Geometry& g) { return 16 * (g.d + g.dv) * element_bytes<T>(g); }

// Elements of a row of n numbers to a lane of its group; ``step``: from a pack of E numbers to the next.
template <class T>
__attribute__((noinline)) static void quantize_row(long kind, const T* x, long n, float scale, uint8_t* to, long pack, long step) {
  with_stored_kind(kind, [&](auto k) {
    for (long i = 0; i < n; i += pack)
      for (long e = 0; e < pack; e++) to[i / pack * step + e] = element<decltype(k)::value>(wide(x[i + e]) / scale);
  });
}

template <class T> INLINE void write_key(const Geometry& g, long slot, long head, const T* k) {
  constexpr long E = 4 / sizeof(T);
  long at = slot % g.block;
  char* group = key_group<T>(g, slot / g.block, head, at / 16);
  if (g.stored) return quantize_row(g.stored, k, g.d, g.key_scales[head], (uint8_t*)group + (at % 16) * E, E, 16 * E);
  T* to = (T*)group + (at % 16) * E;
  for (long i = 0; i < g.d; i += E) memcpy((void*)(to + i * 16), k + i, 4);
}
template <class T> INLINE void write_value(const Geometry& g, long slot, long head, const T* v) {
  constexpr long E = 4 / sizeof(T);
  long at = slot % g.block, lane = at % 16, first = (lane / E) * g.dv * E + lane % E;
  char* group = value_group<T>(g, slot / g.block, head, at / 16);
  if (g.stored) return quantize_row(g.stored, v, g.dv, g.value_scales[head], (uint8_t*)group + first, 1, E);
  T* to = (T*)group + first;
  for (long i = 0; i < g.dv; i++) to[i * E] = v[i];
}

INLINE v16 broadcast32(const void* p) {
  float f;
  memcpy(&f, p, 4);
  return splat(f);
}

// Of R rows, the vectors that a loop sums at a time: what fits the registers.
#ifdef EVENER_LANES256
constexpr int vectors_at_once(int rows) { return rows > 2 ? 1 : 4 / rows; }
#else
constexpr int vectors_at_once(int) { return 4; }
#endif

// Scores of G groups of 16 tokens.
template <class T, int R, int G> INLINE void group_scores(const T* const q[R], const T* const k[G], long d, float* out) {
  constexpr int E = 4 / sizeof(T);
  v16 a[R][G];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) a[r][g] = splat(0.f);
  for (long i = 0; i < d; i += E) {
    v16 key[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) key[g] = Lanes<T>::raw(k[g] + i * 16);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      v16 x = broadcast32(q[r] + i);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) Lanes<T>::dot(a[r][g], key[g], x);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) store(out + r * CHUNK + g * 16, a[r][g]);
}
template <class T, int R> __attribute__((noinline)) void scores(const T* const q[R], const T* const k[4], long d, float* out) {
  constexpr int G = vectors_at_once(R);
  for (int g = 0; g < 4; g += G) group_scores<T, R, G>(q, k + g, d, out + g * 16);
}

// out[r] = out[r] * scale[r] + p[r] · values, for C vectors of columns, over the tokens j0 <= j < n.
template <class T, int R, int C>
INLINE void accumulate_values(const T* p, const T* const v[4], long dv, long j0, long n, const float* scale, float* out, long ld) {
  constexpr int E = 4 / sizeof(T);
  v16 a[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) a[r][c] = load(out + r * ld + c * 16) * scale[r];
  for (long j = j0; j < n; j += E) {
    const T* row = v[j / 16] + (j % 16) * dv;
    v16 x[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) x[c] = Lanes<T>::raw(row + c * 16 * E);
    if (E == 2 && j + 1 == n)  // the second token of the last pair was never written
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) x[c] = (v16)((u16x)x[c] & 0xffffu);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      v16 w = broadcast32(p + r * CHUNK + j);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) Lanes<T>::dot(a[r][c], x[c], w);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + r * ld + c * 16, a[r][c]);
}

template <class T, int R>
__attribute__((noinline)) void accumulate_values_all(const T* p, const T* const v[4], long dv, long j0, long n, const float* scale, float* out) {
  constexpr int E = 4 / sizeof(T), C = vectors_at_once(R);
  long c = 0;
  for (; c + 16 * C <= dv; c += 16 * C) {
    const T* at[4] = {v[0] + c * E, v[1] + c * E, v[2] + c * E, v[3] + c * E};
    accumulate_values<T, R, C>(p, at, dv, j0, n, scale, out + c, dv);
  }
  for (; c < dv; c += 16) {
    const T* at[4] = {v[0] + c * E, v[1] + c * E, v[2] + c * E, v[3] + c * E};
    accumulate_values<T, R, 1>(p, at, dv, j0, n, scale, out + c, dv);
  }
}

// The state of a tile's rows: unnormalised outputs [rows, dv], running maxima and sums.
struct Partial {
  float *out, *top, *sum;
};
INLINE long partial_floats(long rows, long dv) { return rows * (dv + 2); }
INLINE Partial partial_at(float* p, long rows, long dv) { return Partial{p, p + rows * dv, p + rows * dv + rows}; }
INLINE void clear(const Partial& p, long rows, long dv) {
  memset(p.out, 0, rows * dv * sizeof(float));
  for (long r = 0; r < rows; r++) p.top[r] = -INFINITY, p.sum[r] = 0.f;
}

INLINE void merge(const Partial& to, const Partial& from, long rows, long dv) {
  for (long r = 0; r < rows; r++) {
    float top = to.top[r] > from.top[r] ? to.top[r] : from.top[r];
    if (top == -INFINITY) continue;
    float a = exp1(to.top[r] - top), b = exp1(from.top[r] - top);
    to.top[r] = top;
    to.sum[r] = to.sum[r] * a + from.sum[r] * b;
    for (long c = 0; c < dv; c += 16) {
      float* o = to.out + r * dv + c;
      store(o, sum_of_products(load(o), splat(a), load(from.out + r * dv + c), splat(b)));
    }
  }
}

// Softmax of one chunk for the query at ``high``: writes the weights to p, returns the factor for the earlier sums.
template <class T>
INLINE float softmax_chunk(const Geometry& g, float scale, float slope, float* s, T* p, long first, long low, long high, bool edge, float* top,
                    float* sum) {
  v16 v[4];
  v16 best = splat(-INFINITY);
  for (int i = 0; i < 4; i++) {
    v[i] = load(s + i * 16) * scale;
    if (g.softcap != 0.f) v[i] = vtanh(v[i] / g.softcap) * g.softcap;
    if (slope != 0.f) v[i] += (lanes() + (float)(first + i * 16 - high)) * slope;
    if (edge) {
      v16 at = lanes() + (float)(first + i * 16 - low);  // small integers: exact
      v[i] = pick((at >= 0.f) & (at <= (float)(high - low)), v[i], splat(-INFINITY));
    }
    best = vmax(v[i], best);
  }
  float now = max16(best), before = *top;
  now = now > before ? now : before;
  float base = now == -INFINITY ? 0.f : now;
  v16 total = splat(0.f);
  for (int i = 0; i < 4; i++) {
    v16 e = vexp(v[i] - base);
    store(p + i * 16, e);
    total += e;
  }
  float factor = before == -INFINITY ? 0.f : (before == now ? 1.f : exp1(before - base));
  *top = now;
  *sum = *sum * factor + sum16(total);
  return factor;
}

template <class T> struct Tile {
  const Geometry& g;
  const Step& step;
  const T* query;
  Ahead* ahead;
  long request, token, count, head, group, rows, start;  // start: position of the first query
  Tile(const Geometry& g, const Step& s, const T* query, const Item& item, long head, Ahead* ahead = nullptr)
      : g(g), step(s), query(query), ahead(ahead), request(item.request), token(item.token), count(item.count), head(head),
        group(g.heads / g.kv_heads), rows(item.count * group),
        start(s.kv_lens[item.request] - (s.query_start[item.request + 1] - item.token)) {}

  const T* row(long r) const { return query + ((token + r / group) * g.heads + head * group + r % group) * g.d; }
  long position(long r) const { return start + r / group; }
  long low(long position) const { return first_attended(g, position); }
  long first() const { return low(start) / CHUNK * CHUNK; }
  long last() const { return start + count - 1; }

  // Positions that an item reads: those of one span, or of all.
  long begin(long span) const { return span * SPAN > first() ? span * SPAN : first(); }
  long end(long span) const { return span >= 0 && (span + 1) * SPAN < last() + 1 ? (span + 1) * SPAN : last() + 1; }
  // The k-th memory that an item reads: of each chunk four groups of keys, then four of values.
  bool memory(long span, long k, Span* to) const {
    const long at = begin(span) + k / 8 * CHUNK + k % 4 * 16;
    if (k % 4 == 0 && at >= end(span)) return false;
    *to = Span{};
    if (at >= end(span)) return true;
    const long block = step.table[request * step.table_stride + at / g.block], in = at % g.block / 16, values = k % 8 / 4;
    const char* p = values ? value_group<T>(g, block, head, in) : key_group<T>(g, block, head, in);
    *to = Span{p, p + 16 * (values ? g.dv : g.d) * element_bytes<T>(g)};
    return true;
  }

  // Computes one span into ``to``; s and p are scratch of [4, CHUNK], room is scratch of quantized state.
  void span(long number, const Partial& to, float* s, T* p, T* room) const {
    clear(to, rows, g.dv);
    const long end = this->end(number);
    for (long c = begin(number); c < end; c += CHUNK) chunk(c, end - c < CHUNK ? end - c : CHUNK, to, s, p, room);
  }

  void chunk(long c, long n, const Partial& to, float* s, T* p, T* room) const {
    const T *k[4], *v[4];
    if (ahead) ahead->step((n + 15) / 16 * group_bytes<T>(g));
    const int32_t* table = step.table + request * step.table_stride;
    for (long i = 0; i < 4; i++) {
      long at = c + (i * 16 < n ? i * 16 : 0);
      k[i] = (const T*)key_group<T>(g, table[at / g.block], head, at % g.block / 16);
      v[i] = (const T*)value_group<T>(g, table[at / g.block], head, at % g.block / 16);
    }
    for (long i = 3; i >= 0 && g.stored; i--) {
      if (i * 16 < n) widen(g.stored, (const uint8_t*)k[i], 16 * g.d, room + i * 16 * g.d);
      if (i * 16 < n) widen(g.stored, (const uint8_t*)v[i], 16 * g.dv, room + 64 * g.d + i * 16 * g.dv);
      long j = i * 16 < n ? i : 0;
      k[i] = room + j * 16 * g.d, v[i] = room + 64 * g.d + j * 16 * g.dv;
    }
    float factor = g.stored ? g.scale * g.key_scales[head] : g.scale;
    // Blocks that are wholly before the window were freed: their slots may hold values that are not finite.
    long dead = low(start) - c, skip = dead > 0 ? dead / 16 * 16 : 0;
    bool edge = c + CHUNK > start + 1 || c < low(last());
    for (long r = 0; r < rows; r += 4) {
      long left = rows - r < 4 ? rows - r : 4;
      const T* q[4];
      for (long i = 0; i < 4; i++) q[i] = row(r + (i < left ? i : 0));
      if (left == 4) scores<T, 4>(q, k, g.d, s);
      if (left == 3) scores<T, 3>(q, k, g.d, s);
      if (left == 2) scores<T, 2>(q, k, g.d, s);
      if (left == 1) scores<T, 1>(q, k, g.d, s);
      float scale[4];
      for (long i = 0; i < left; i++) {
        long at = position(r + i);
        float slope = g.slopes ? g.slopes[head * group + (r + i) % group] : 0.f;
        scale[i] = softmax_chunk<T>(g, factor, slope, s + i * CHUNK, p + i * CHUNK, c, low(at), at, edge, to.top + r + i, to.sum + r + i);
      }
      float* out = to.out + r * g.dv;
      if (left == 4) accumulate_values_all<T, 4>(p, v, g.dv, skip, n, scale, out);
      if (left == 3) accumulate_values_all<T, 3>(p, v, g.dv, skip, n, scale, out);
      if (left == 2) accumulate_values_all<T, 2>(p, v, g.dv, skip, n, scale, out);
      if (left == 1) accumulate_values_all<T, 1>(p, v, g.dv, skip, n, scale, out);
    }
  }

  void finish(const Partial& from, const T* sinks, T* out) const {
    for (long r = 0; r < rows; r++) {
      float sum = from.sum[r], factor = 1.f;
      if (sinks) {
        float sink = wide(sinks[head * group + r % group]), top = sink > from.top[r] ? sink : from.top[r];
        factor = exp1(from.top[r] - top);
        sum = sum * factor + exp1(sink - top);
      }
      factor = sum > 0.f ? factor / sum : 0.f;
      if (g.stored) factor *= g.value_scales[head];
      T* to = out + ((token + r / group) * g.heads + head * group + r % group) * g.dv;
      for (long c = 0; c < g.dv; c += 16) store(to + c, load(from.out + r * g.dv + c) * factor);
    }
  }
};

INLINE long tile_tokens(const Geometry& g) {
  long n = TILE_ROWS / (g.heads / g.kv_heads);
  return n > 1 ? n : 1;
}
INLINE long tile_rows(const Geometry& g) { return tile_tokens(g) * (g.heads / g.kv_heads); }
// Scratch of one thread in floats: two partials, scores, weights, a chunk of quantized state as T.
INLINE long attention_floats(const Geometry& g) {
  return 2 * partial_floats(tile_rows(g), g.dv) + 8 * CHUNK + 64 + (g.stored ? CHUNK * (g.d + g.dv) : 0);
}

// One item for one head: either all spans with the final result, or one span into ``parts``. ``ahead``: has what ``Tile::memory`` gives, and
// what is used after it; null: nothing is prefetched.
template <class T>
__attribute__((noinline)) void attend_item(const Geometry& g, const Step& s, const Item& item, long head, const T* query, const T* sinks,
                                           T* out, float* parts, float* scratch, Ahead* ahead) {
  Tile<T> tile(g, s, query, item, head, ahead);
  long size = partial_floats(tile_rows(g), g.dv);
  Partial all = partial_at(scratch, tile.rows, g.dv), one = partial_at(scratch + size, tile.rows, g.dv);
  float* sc = scratch + 2 * size;
  T *p = (T*)(sc + 4 * CHUNK), *room = (T*)(sc + 8 * CHUNK);
  if (item.span >= 0) {
    float* at = parts + (item.part * g.kv_heads + head) * partial_floats(tile.group, g.dv);
    tile.span(item.span, partial_at(at, tile.rows, g.dv), sc, p, room);
    return;
  }
  long first = tile.first() / SPAN, last = tile.last() / SPAN;
  tile.span(first, all, sc, p, room);
  for (long n = first + 1; n <= last; n++) {
    tile.span(n, one, sc, p, room);
    merge(all, one, tile.rows, g.dv);
  }
  tile.finish(all, sinks, out);
}

// Merges the spans of one request, in the same order as attend_item.
template <class T>
void merge_item(const Geometry& g, const Step& s, const Item& item, long head, const T* query, const T* sinks, T* out, float* parts) {
  Tile<T> tile(g, s, query, item, head);
  long size = partial_floats(tile.group, g.dv);
  Partial all = partial_at(parts + (item.part * g.kv_heads + head) * size, tile.rows, g.dv);
  for (long n = 1; n < item.spans; n++)
    merge(all, partial_at(parts + ((item.part + n) * g.kv_heads + head) * size, tile.rows, g.dv), tile.rows, g.dv);
  tile.finish(all, sinks, out);
}

// Splits a step into items; returns their number, or -1 if there is no ``room`` for them, and sets ``parts``.
static long make_plan(const Geometry& g, const int32_t* query_start, const int32_t* kv_lens, long requests, Item* plan, long room, int64_t* parts) {
  long n = 0, tokens = tile_tokens(g);
  *parts = 0;
  for (long r = 0; r < requests; r++) {
    long start = query_start[r], count = query_start[r + 1] - start, length = kv_lens[r];
    if (count <= 0 || length <= 0) continue;
    long low = first_attended(g, length - 1);
    long first = low / CHUNK * CHUNK / SPAN, spans = (length - 1) / SPAN - first + 1;
    bool spanned = count == 1 && spans > 1;
    if (n + (spanned ? spans : (count + tokens - 1) / tokens) > room) return -1;
    if (spanned) {
      for (long i = 0; i < spans; i++)
        plan[n++] = Item{(int32_t)r, (int32_t)start, 1, (int32_t)(first + i), (int32_t)spans, (int32_t)(*parts + i)};
      *parts += spans;
    } else {
      // Later tiles of a prompt have more keys: the longest come first, so that threads finish together.
      for (long t = (count - 1) / tokens * tokens; t >= 0; t -= tokens)
        plan[n++] = Item{(int32_t)r, (int32_t)(start + t), (int32_t)(count - t < tokens ? count - t : tokens), -1, 1, 0};
    }
  }
  return n;
}
