// Products with a stack of matrices, one for each expert, and a whole MoE block as one parallel region. Tokens are sorted by expert and
// never copied: products take rows by index. Threads take pieces of (expert, columns) until none is left.
#pragma once
#include "layer.h"

enum Scoring { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_TOP = 2 };
static const int CLAMPED_SWIGLU = 3;
// Tokens that go through routing, gate/up and down at a time; rows and columns of a thread's result buffer.
static const long EXPERT_PANEL = 512, TILE = 128, WIDE = 64;
// So many bytes of products with ``down`` are kept until they are added up.
static const long MOST_PARTS = 8 << 20;

struct Experts {
  int64_t hidden, inner, count, top, slots, copy_columns, scoring, groups, top_groups, group_best, renormalize, activation, shared_inner;
  int64_t packed, packed_inner, packed_shared;  // some matrix over the stream is block-quantized; ``down`` or ``shared_down`` is
  float eps, offset, scale, alpha, limit;
  const Matrix *gate_up, *down;  // of every slot
  Matrix router, shared_gate_up, shared_down, shared_gate;
  const void *norm, *post_norm, *router_bias, *gate_up_bias, *down_bias;
  const float* correction;
  const int32_t *slot_of, *copies;
  long best_of() const { return top > group_best ? top : group_best; }
  bool gated() const { return shared_gate.plain || shared_gate.blocks; }
};

// Indices of the k largest of n scores, largest first; the lowest index wins ties. ``taken``: n bytes.
INLINE void top_k_indices(const float* score, long n, long k, char* taken, int32_t* ids) {
  memset(taken, 0, n);
  for (long j = 0; j < k; j++) {
    long at = -1;
    for (long i = 0; i < n; i++)
      if (!taken[i] && (at < 0 || score[i] > score[at])) at = i;
    taken[at] = 1;
    ids[j] = (int32_t)at;
  }
}

// In place; n is a multiple of 16, with -inf after the last score.
INLINE void softmax(float* x, long n) {
  v16 top = load(x);
  for (long i = 16; i < n; i += 16) top = vmax(load(x + i), top);
  float most = max16(top);
  v16 acc = splat(0.f);
  for (long i = 0; i < n; i += 16) {
    v16 e = vexp(load(x + i) - most);
    store(x + i, e);
    acc += e;
  }
  float total = sum16(acc);
  for (long i = 0; i < n; i += 16) store(x + i, load(x + i) / total);
}

// Routing of one row. Buffers of one thread.
struct Router {
  const Experts& e;
  float *scores, *wanted, *totals;
  char* taken;
  int32_t* ids;
  static long pad(long n) { return (n + 15) / 16 * 16; }
  static long bytes(const Experts& e) { return (pad(e.count) * 2 + pad(e.groups)) * 4 + pad(e.count + e.groups) + pad(e.best_of() + e.top_groups) * 4; }
  Router(const Experts& e, char* p) : e(e) {
    scores = (float*)p, wanted = scores + pad(e.count), totals = wanted + pad(e.count);
    ids = (int32_t*)(totals + pad(e.groups)), taken = (char*)(ids + pad(e.best_of() + e.top_groups));
  }

  // -inf outside the groups with the largest sums of best scores.
  void mask_groups() {
    long size = e.count / e.groups;
    int32_t* chosen = ids + e.best_of();
    for (long g = 0; g < e.groups; g++) {
      float sum = 0.f;
      top_k_indices(wanted + g * size, size, e.group_best, taken, ids);
      for (long i = 0; i < e.group_best; i++) sum += wanted[g * size + ids[i]];
      totals[g] = sum;
    }
    top_k_indices(totals, e.groups, e.top_groups, taken, chosen);
    for (long g = 0; g < e.groups; g++)
      if (!taken[g])
        for (long i = 0; i < size; i++) wanted[g * size + i] = -INFINITY;
  }

  // Slots (-1: on another rank) and weights of the experts of token t.
  void row(const float* logits, long t, int32_t* slots, float* weights) {
    long n = e.count, padded = pad(n);
    for (long i = 0; i < padded; i++) scores[i] = i < n ? logits[i] : -INFINITY;
    if (e.scoring == SOFTMAX) softmax(scores, padded);
    if (e.scoring == SIGMOID)
      for (long i = 0; i < padded; i += 16) store(scores + i, 1.f / (vexp(-load(scores + i)) + 1.f));
    for (long i = 0; i < n; i++) wanted[i] = e.correction ? scores[i] + e.correction[i] : scores[i];
    if (e.top_groups < e.groups) mask_groups();
    top_k_indices(wanted, n, e.top, taken, ids);
    float most = scores[ids[0]], total = 0.f;
    for (long k = 0; k < e.top; k++) most = scores[ids[k]] > most ? scores[ids[k]] : most;
    for (long k = 0; k < e.top; k++) {
      weights[k] = e.scoring == SOFTMAX_TOP ? exp1(scores[ids[k]] - most) : scores[ids[k]];
      total += weights[k];
    }
    float soft = total;
    if (e.scoring == SOFTMAX_TOP) total = 1.f;
    for (long k = 0; k < e.top; k++) {
      if (e.scoring == SOFTMAX_TOP) weights[k] /= soft;
      if (e.renormalize) weights[k] /= total;
      weights[k] *= e.scale;
      long copies = e.copies[ids[k]];
      slots[k] = e.slot_of[ids[k] * e.copy_columns + (copies > 1 && e.copy_columns > 1 ? t % copies : 0)];
    }
  }
};

// (token, k) pairs sorted by slot, then by token; pairs without a slot are left out.
struct SortedPairs {
  int32_t *pair, *start, *active;  // [pairs], [slots + 1], [slots]
  long count;                      // slots that have pairs
  static long bytes(long pairs, long slots) { return (Router::pad(pairs) + 2 * Router::pad(slots + 1)) * 4; }
  SortedPairs(char* p, const int32_t* slot, long pairs, long slots) {
    pair = (int32_t*)p, start = pair + Router::pad(pairs), active = start + Router::pad(slots + 1);
    memset((void*)start, 0, (slots + 1) * 4);
    for (long i = 0; i < pairs; i++)
      if (slot[i] >= 0) start[slot[i]]++;
    long at = count = 0;
    for (long s = 0; s <= slots; s++) {
      long n = s < slots ? start[s] : 0;
      if (n) active[count++] = (int32_t)s;
      start[s] = (int32_t)at;
      at += n;
    }
    for (long i = 0; i < pairs; i++)
      if (slot[i] >= 0) pair[start[slot[i]]++] = (int32_t)i;
    for (long s = slots; s > 0; s--) start[s] = start[s - 1];
    start[0] = 0;
  }
  long rows(long s) const { return start[s + 1] - start[s]; }
};

// Pieces of ``total``, each a multiple of ``unit`` and about as large as the others, and so many that threads end at about the same time.
INLINE long even_piece(long total, long width, long threads, long unit) {
  if (threads == 1) return width;
  long wanted = total / (threads * 16), parts = wanted > unit ? ceil_div(width, wanted) : ceil_div(width, unit);
  return ceil_div(ceil_div(width, parts), unit) * unit;
}

// y = act(gate) * up of interleaved pairs: g sigmoid(alpha g) (u + 1), g clamped above and u on both sides.
template <class T> INLINE void clamped_row(const float* pairs, T* y, long n, float alpha, float limit) {
  for (long i = 0; i < n; i += 16) {
    float both[2][16] = {};
    for (long j = 0; j < 16 && i + j < n; j++) both[0][j] = pairs[2 * (i + j)], both[1][j] = pairs[2 * (i + j) + 1];
    v16 g = load(both[0]), u = load(both[1]);
    g = pick(g > limit, splat(limit), g), u = pick(u > limit, splat(limit), pick(u < -limit, splat(-limit), u));
    v16 r = g / (vexp(g * -alpha) + 1.f) * (u + 1.f);
    T out[16];
    store(out, r);
    memcpy((void*)(y + i), out, (n - i < 16 ? n - i : 16) * sizeof(T));
  }
}

struct ExpertSizes {
  long threads, tokens, panel, pairs, xn, ints, logits, routes, h, shared, h_ints, shared_ints, parts, priv, total;
  long own_ints, own_routes, routing, sorted, tokens_of, tile, sum, priv_bytes;
  bool few, apart;  // apart: products with ``down`` are kept
  template <class T> static ExpertSizes of(const Experts& e, long tokens, long threads) {
    ExpertSizes s;
    long at = 0;
    auto add = [&](long bytes) {
      long was = at;
      at += Sizes::up(bytes);
      return was;
    };
    s.threads = threads, s.tokens = tokens, s.few = tokens <= FEW;
    s.panel = tokens < EXPERT_PANEL ? tokens : EXPERT_PANEL;
    s.pairs = s.panel * e.top;
    s.xn = add(s.few ? 0 : tokens * e.hidden * sizeof(T));
    s.ints = add(e.packed && !s.few ? Quantized::bytes(tokens, e.hidden) : 0);
    s.logits = add(tokens * e.count * 4);
    s.routes = add(s.few ? 0 : tokens * (2 * e.top + 1) * 4);
    s.h = add(s.pairs * e.inner * sizeof(T)), s.shared = add(s.panel * e.shared_inner * sizeof(T));
    s.h_ints = add(e.packed_inner ? Quantized::bytes(s.pairs, e.inner) : 0);
    s.shared_ints = add(e.packed_shared ? Quantized::bytes(s.panel, e.shared_inner) : 0);
    const long parts = ((s.pairs + (e.shared_inner ? tokens : 0)) * e.hidden + 16) * 4;
    s.apart = tokens <= s.panel && parts <= MOST_PARTS;
    s.parts = add(s.apart ? parts : 0);
    s.priv = at, at = 0;
    add(FEW * e.hidden * (4 + sizeof(T)));
    s.own_ints = add(e.packed && s.few ? Quantized::bytes(FEW, e.hidden) : 0);
    s.own_routes = add(s.few ? tokens * (2 * e.top + 1) * 4 : 0);
    s.routing = add(Router::bytes(e)), s.sorted = add(SortedPairs::bytes(s.pairs, e.slots)), s.tokens_of = add(s.pairs * 4);
    s.tile = add(TILE * WIDE * 4), s.sum = add(s.panel * WIDE * 4);
    s.priv_bytes = at;
    s.total = s.priv + at * threads;
    return s;
  }
};

// x: [T, hidden], overwritten with the experts' sum; stream: [T, hidden] in float32, to which the incoming x is added.
template <class T> struct ExpertRun {
  const Experts& e;
  long tokens;
  T* x;
  float* stream;
  Barrier barrier;
  WorkQueue router_queue;
  SharedPieces gate_up_pieces, down_pieces;

  // Input of the block's second product.
  struct Inner {
    T* h;
    Quantized ints;
    long width;
    bool packed;
  };

  // Columns of h that are computed at a time from M rows, as many as ``tile`` holds: long runs of memory are read faster than short ones.
  static long columns_at_once(long M) { return TILE * WIDE / 2 / (M < TILE ? M : TILE) / UNIT * UNIT; }

  // The k-th span that ``run_gate_up`` reads.
  bool gate_up_span(const Matrix& w, long width, long M, long i0, long i1, long k, Span* to) {
    bool pairs = e.activation == CLAMPED_SWIGLU;
    long step = columns_at_once(M), i = i0 + (pairs ? k : k / 2) * step, n = i1 - i < step ? i1 - i : step;
    if (i >= i1) return false;
    long at = pairs ? 2 * i : k % 2 * width + i;
    *to = span_of(w, at, at + (pairs ? 2 * n : n), e.hidden, sizeof(T));
    return true;
  }

  // Columns i0 <= i < i1 of h for M rows of y (the normed input).
  void run_gate_up(const Matrix& w, const T* bias, const Inner& to, long row, const T* y, const Quantized& in, Rows rows, long M, long i0, long i1,
            float* tile, Ahead& ahead) {
    bool pairs = e.activation == CLAMPED_SWIGLU;
    const long step = columns_at_once(M), ld = 2 * step;
    for (long i = i0; i < i1; i += step) {
      long n = i1 - i < step ? i1 - i : step;
      for (long m = 0; m < M; m += TILE) {
        long some = M - m < TILE ? M - m : TILE;
        long at = pairs ? 2 * i : i, wide = pairs ? 2 * n : n;
        multiply<T, float>(w, y, in, some, at, at + wide, e.hidden, bias, tile, ld, rows.from(m), {}, m ? nullptr : &ahead);
        if (!pairs)
          multiply<T, float>(w, y, in, some, to.width + i, to.width + i + n, e.hidden, bias, tile + step, ld, rows.from(m), {},
                             m ? nullptr : &ahead);
        for (long r = 0; r < some; r++) {
          const float* from = tile + r * ld;
          long k = row + m + r;
          T* h = to.h + k * to.width + i;
          if (pairs) clamped_row(from, h, n, e.alpha, e.limit);
          else act_row<float, T>(from, from + step, h, n, (int)e.activation);
          // A piece starts and ends at a unit of columns that share a scale.
          if (to.packed) quantize_row(h, n, to.ints.q + k * to.width + i, to.ints.scale + (k * to.width + i) / 32, to.ints.sum + (k * to.width + i) / 16);
        }
      }
    }
  }

  void run_all_gate_up(const SortedPairs& by, const int32_t* tokens_of, const Inner& h, const Inner& shared, const T* y, const Quantized& in, long first,
                long M, float* tile, long tid, long threads) {
    long piece = even_piece(by.count * h.width + shared.width, h.width ? h.width : shared.width, threads, WIDE / 2);
    long each = ceil_div(h.width, piece), all = by.count * each + ceil_div(shared.width, piece), at;
    auto routed = [&](long at) { return at < by.count * each; };
    auto to_of = [&](long at) -> const Inner& { return routed(at) ? h : shared; };
    auto first_of = [&](long at) { return (routed(at) ? at % each : at - by.count * each) * piece; };
    auto last_of = [&](long at) { return first_of(at) + piece < to_of(at).width ? first_of(at) + piece : to_of(at).width; };
    auto own = pieces(gate_up_pieces, all, [&](long at, long k, Span* to) {
      long s = routed(at) ? by.active[at / each] : -1;
      return gate_up_span(s < 0 ? e.shared_gate_up : e.gate_up[s], to_of(at).width, s < 0 ? M : by.rows(s), first_of(at), last_of(at), k, to);
    }, tid, threads);
    Ahead ahead;
    ahead.follow(own);
    while (own.next(&at)) {
      const Inner& to = to_of(at);
      long i0 = first_of(at), i1 = last_of(at);
      if (!routed(at)) {
        run_gate_up(e.shared_gate_up, nullptr, to, 0, y, in, Rows{nullptr, first}, M, i0, i1, tile, ahead);
        continue;
      }
      long s = by.active[at / each], row = by.start[s];
      const T* bias = e.gate_up_bias ? (const T*)e.gate_up_bias + s * 2 * e.inner : nullptr;
      run_gate_up(e.gate_up[s], bias, to, row, y, in, Rows{tokens_of + row, 0}, by.rows(s), i0, i1, tile, ahead);
    }
  }

  // sum[token, 0:n1 - n0] += weight * (h · w) for M rows of h, with their tokens and weights by index.
  template <class W>
  void run_down(const Matrix& w, const T* bias, const Inner& from, long row, long M, long n0, long n1, float* tile, float* sum, Ahead& ahead,
                W weighted) {
    for (long m = 0; m < M; m += TILE) {
      long some = M - m < TILE ? M - m : TILE;
      multiply<T, float>(w, from.h, from.ints, some, n0, n1, from.width, bias, tile, WIDE, Rows{nullptr, row + m}, {}, m ? nullptr : &ahead);
      for (long r = 0; r < some; r++) {
        float weight, *to = sum + weighted(row + m + r, &weight) * WIDE, *one = tile + r * WIDE;
        for (long c = 0; c < n1 - n0; c += 16) store(to + c, load(to + c) + load(one + c) * weight);
      }
    }
  }

  // One thread computes a piece of the columns for all experts in order: no two threads add to the same number.
  void run_all_down(const SortedPairs& by, const int32_t* tokens_of, const Inner& h, const Inner& shared, const float* weights, const float* gates,
                long first, long M, float* tile, float* sum, long tid, long threads, bool wait_first) {
    long H = e.hidden, piece = even_piece(H, H, threads, 16), each = by.count + (shared.width > 0), at;
    auto last_of = [&](long at) { return (at + 1) * piece < H ? (at + 1) * piece : H; };
    auto own = pieces(down_pieces, ceil_div(H, piece), [&](long at, long k, Span* to) {
      long n0 = at * piece + (each ? k / each * WIDE : H), n1 = n0 + WIDE < last_of(at) ? n0 + WIDE : last_of(at), i = each ? k % each : 0;
      if (n0 >= n1) return false;
      *to = i < by.count ? span_of(e.down[by.active[i]], n0, n1, h.width, sizeof(T)) : span_of(e.shared_down, n0, n1, shared.width, sizeof(T));
      return true;
    }, tid, threads);
    Ahead ahead;
    ahead.follow(own);
    if (wait_first) wait_ahead(barrier, threads, ahead);
    while (own.next(&at))
      for (long n0 = at * piece, p1 = last_of(at); n0 < p1; n0 += WIDE) {
        long n1 = n0 + WIDE < p1 ? n0 + WIDE : p1;
        memset((void*)sum, 0, M * WIDE * 4);
        for (long i = 0; i < by.count; i++) {
          long s = by.active[i];
          const T* bias = e.down_bias ? (const T*)e.down_bias + s * H : nullptr;
          run_down(e.down[s], bias, h, by.start[s], by.rows(s), n0, n1, tile, sum, ahead, [&](long r, float* weight) {
            *weight = weights[by.pair[r]];
            return tokens_of[r] - first;
          });
        }
        if (shared.width)
          run_down(e.shared_down, nullptr, shared, 0, M, n0, n1, tile, sum, ahead, [&](long r, float* weight) {
            *weight = gates ? gates[first + r] : 1.f;
            return r;
          });
        put_sums(sum, first, M, n0, n1);
      }
  }

  // As ``run_all_down``, with the same bits, for few rows. A thread would read a short run of each expert's matrix there; here it reads a long one
  // of one expert's. ``parts``: [pairs, hidden] and, of shared experts, [M, hidden].
  void run_down_apart(const SortedPairs& by, const Inner& h, const Inner& shared, long M, float* parts, long tid, long threads) {
    long H = e.hidden, experts = by.count + (shared.width > 0), piece = even_piece(experts * H, H, threads, 16), each = ceil_div(H, piece), at;
    auto first_of = [&](long at) { return at % each * piece; };
    auto last_of = [&](long at) { return first_of(at) + piece < H ? first_of(at) + piece : H; };
    auto own = pieces(down_pieces, experts * each, [&](long at, long k, Span* to) {
      bool routed = at < by.count * each;
      return span_at(routed ? e.down[by.active[at / each]] : e.shared_down, first_of(at), last_of(at), k, routed ? h.width : shared.width, sizeof(T), to);
    }, tid, threads);
    Ahead ahead;
    ahead.follow(own);
    wait_ahead(barrier, threads, ahead);
    while (own.next(&at)) {
      long n0 = first_of(at), n1 = last_of(at);
      if (at < by.count * each) {
        long s = by.active[at / each];
        const T* bias = e.down_bias ? (const T*)e.down_bias + s * H : nullptr;
        Rows rows{nullptr, by.start[s]};
        multiply<T, float>(e.down[s], h.h, h.ints, by.rows(s), n0, n1, h.width, bias, parts + n0, H, rows, rows, &ahead);
      } else {
        float* to = parts + by.start[e.slots] * H;
        multiply<T, float>(e.shared_down, shared.h, shared.ints, M, n0, n1, shared.width, (const T*)nullptr, to + n0, H, {}, {}, &ahead);
      }
    }
  }

  // Adds up what ``run_down_apart`` kept, in the order of experts.
  void add_parts(const SortedPairs& by, const int32_t* tokens_of, const float* weights, const float* gates, bool shared, long M, const float* parts,
                 float* sum, long tid, long threads) {
    long H = e.hidden, units = ceil_div(H, 16), pairs = by.start[e.slots], to = units * (tid + 1) / threads * 16;
    for (long n0 = units * tid / threads * 16, n; n0 < to && n0 < H; n0 += WIDE) {
      n = to - n0 < WIDE ? to - n0 : WIDE, n = H - n0 < n ? H - n0 : n;
      memset((void*)sum, 0, M * WIDE * 4);
      for (long r = 0; r < pairs + (shared ? M : 0); r++) {
        float weight = r < pairs ? weights[by.pair[r]] : gates ? gates[r - pairs] : 1.f, *at = sum + (r < pairs ? tokens_of[r] : r - pairs) * WIDE;
        for (long c = 0; c < n; c += 16) store(at + c, load(at + c) + load(parts + r * H + n0 + c) * weight);
      }
      put_sums(sum, 0, M, n0, n0 + n);
    }
  }

  // Columns n0 <= n < n1 of M rows of x.
  void put_sums(const float* sum, long first, long M, long n0, long n1) {
    for (long t = 0; t < M; t++) {
      T* to = x + (first + t) * e.hidden + n0;
      long c = 0;
      for (; c + 16 <= n1 - n0; c += 16) store(to + c, load(sum + t * WIDE + c));
      for (; c < n1 - n0; c++) put(to + c, sum[t * WIDE + c]);
    }
  }

  void operator()(char* base, const ExpertSizes& s) {
    long H = e.hidden;
    float* logits = (float*)(base + s.logits);
    Inner h{(T*)(base + s.h), {}, e.inner, (bool)e.packed_inner}, shared{(T*)(base + s.shared), {}, e.shared_inner, (bool)e.packed_shared};
    if (h.packed) h.ints = Quantized::at(base + s.h_ints, s.pairs, e.inner);
    if (shared.packed) shared.ints = Quantized::at(base + s.shared_ints, s.panel, e.shared_inner);
    Pool::run(s.threads, [&](long tid, long threads) {
      char* mine = base + s.priv + tid * s.priv_bytes;
      float *tile = (float*)(mine + s.tile), *sum = (float*)(mine + s.sum), *kept;
      int32_t *tokens_of = (int32_t*)(mine + s.tokens_of), *slots = (int32_t*)(s.few ? mine + s.own_routes : base + s.routes);
      float *weights = (float*)(slots + tokens * e.top), *gates = weights + tokens * e.top;
      T* y = norm_rows(stream, tokens, H, (const T*)x, Norm{}, Norm{e.norm, e.eps, e.offset}, (T*)(base + s.xn), (float*)mine, barrier, tid,
                       threads, &kept);
      Quantized in{};
      if (e.packed) in = quantized(y, tokens, H, base + s.ints, mine + s.own_ints, barrier, tid, threads);
      gemm_parallel<T, float>(router_queue, threads, y, in, tokens, e.router, e.router_bias, e.count, H, logits);
      barrier.wait(threads);
      if (kept && tid == 0) memcpy((void*)stream, kept, tokens * H * sizeof(float));
      Router router(e, mine + s.routing);
      for (long t = s.few ? 0 : tokens * tid / threads, end = s.few ? tokens : tokens * (tid + 1) / threads; t < end; t++) {
        router.row(logits + t * e.count, t, slots + t * e.top, weights + t * e.top);
        if (!e.gated()) continue;
        multiply<T, float>(e.shared_gate, y, in, 1, 0, 1, H, (const T*)nullptr, gates + t, 1, Rows{nullptr, t});
        gates[t] = 1.f / (exp1(-gates[t]) + 1.f);
      }
      if (!s.few) barrier.wait(threads);
      const bool whole = tokens <= s.panel;  // then no queue is used again, and pieces of the next may be taken before the barrier
      for (long p = 0; p < tokens; p += s.panel) {
        long M = tokens - p < s.panel ? tokens - p : s.panel;
        SortedPairs by(mine + s.sorted, slots + p * e.top, M * e.top, e.slots);
        for (long i = 0; i < by.start[e.slots]; i++) tokens_of[i] = (int32_t)(p + by.pair[i] / e.top);
        run_all_gate_up(by, tokens_of, h, shared, y, in, p, M, tile, tid, threads);
        if (!whole) barrier.wait(threads);
        if (!whole && tid == 0) gate_up_pieces.reset();
        if (s.apart) {
          float* parts = (float*)(base + s.parts);
          run_down_apart(by, h, shared, M, parts, tid, threads);
          barrier.wait(threads);
          add_parts(by, tokens_of, weights, e.gated() ? gates : nullptr, shared.width > 0, M, parts, sum, tid, threads);
        } else run_all_down(by, tokens_of, h, shared, weights + p * e.top, e.gated() ? gates : nullptr, p, M, tile, sum, tid, threads, whole);
        barrier.wait(threads);
        if (tid == 0) down_pieces.reset();
      }
      if (e.post_norm)
        for (long t = tokens * tid / threads; t < tokens * (tid + 1) / threads; t++)
          norm_row(x + t * H, (const T*)e.post_norm, x + t * H, H, e.eps, e.offset);
    });
  }
};

// x = for each row of y the sum over k of weights[t, k] * (expert slots[t, k] of the row); nothing where the slot is -1. The experts' part
// of ``ExpertRun``, without norm, router and shared experts.
template <class T> static void routed(ExpertRun<T>& run, char* base, const ExpertSizes& s, const T* y, const int32_t* slots, const float* weights) {
  const Experts& e = run.e;
  typename ExpertRun<T>::Inner h{(T*)(base + s.h), {}, e.inner, (bool)e.packed_inner}, none{nullptr, {}, 0, false};
  if (h.packed) h.ints = Quantized::at(base + s.h_ints, s.pairs, e.inner);
  Pool::run(s.threads, [&](long tid, long threads) {
    char* mine = base + s.priv + tid * s.priv_bytes;
    float *tile = (float*)(mine + s.tile), *sum = (float*)(mine + s.sum);
    int32_t* tokens_of = (int32_t*)(mine + s.tokens_of);
    Quantized in{};
    if (e.packed) in = quantized(y, run.tokens, e.hidden, base + s.ints, mine + s.own_ints, run.barrier, tid, threads);
    const bool whole = run.tokens <= s.panel;
    for (long p = 0; p < run.tokens; p += s.panel) {
      long M = run.tokens - p < s.panel ? run.tokens - p : s.panel;
      SortedPairs by(mine + s.sorted, slots + p * e.top, M * e.top, e.slots);
      for (long i = 0; i < by.start[e.slots]; i++) tokens_of[i] = (int32_t)(p + by.pair[i] / e.top);
      run.run_all_gate_up(by, tokens_of, h, none, y, in, p, M, tile, tid, threads);
      if (!whole) run.barrier.wait(threads);
      if (!whole && tid == 0) run.gate_up_pieces.reset();
      if (s.apart) {
        float* parts = (float*)(base + s.parts);
        run.run_down_apart(by, h, none, M, parts, tid, threads);
        run.barrier.wait(threads);
        run.add_parts(by, tokens_of, weights, nullptr, false, M, parts, sum, tid, threads);
        continue;
      }
      run.run_all_down(by, tokens_of, h, none, weights + p * e.top, nullptr, p, M, tile, sum, tid, threads, whole);
      if (whole) continue;  // the last one
      run.barrier.wait(threads);
      if (tid == 0) run.down_pieces.reset();
    }
  });
}

// y[t, k] = x[t] · w[slots[t, k]] + bias; 0 where the slot is -1.
template <class T>
static int grouped(const T* x, long tokens, const int32_t* slots, long top, long count, const Matrix* w, const T* bias, long N, long K, T* y,
                   long threads, Scratch& memory) {
  long pairs = tokens * top, packed = count && needs_integers(w[0]);
  long sorted = Sizes::up(SortedPairs::bytes(pairs, count)), from = Sizes::up(pairs * 4), ints = packed ? Sizes::up(Quantized::bytes(tokens, K)) : 0;
  char* base = memory.reserve(sorted + from + 2 * ints);
  if (!base) return 1;
  SortedPairs by(base, slots, pairs, count);
  int32_t* rows = (int32_t*)(base + sorted);
  for (long i = 0; i < by.start[count]; i++) rows[i] = (int32_t)(by.pair[i] / top);
  for (long i = 0; i < pairs; i++)
    if (slots[i] < 0) memset((void*)(y + i * N), 0, N * sizeof(T));
  WorkQueue queue;
  Barrier barrier;
  Pool::run(threads, [&](long tid, long n) {
    Quantized in = Quantized::at(base + sorted + from, tokens, K);
    if (packed) quantize_rows(x, K, tokens * tid / n, tokens * (tid + 1) / n, K, in), barrier.wait(n);
    long piece = piece_of(by.count ? by.count * N : N, n, 16), each = ceil_div(N, piece), at, end;
    while (queue.take(by.count * each, 1, &at, &end)) {
      long s = by.active[at / each], row = by.start[s], n0 = at % each * piece, n1 = n0 + piece < N ? n0 + piece : N;
      multiply<T, T>(w[s], x, in, by.rows(s), n0, n1, K, bias ? bias + s * N : nullptr, y + n0, N, Rows{rows + row, 0}, Rows{by.pair + row, 0});
    }
  });
  return 0;
}
