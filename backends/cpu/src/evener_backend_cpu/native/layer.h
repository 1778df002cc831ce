// A decoder layer, or a part of it, as one parallel region: threads divide the rows of weights and synchronize at barriers.
#pragma once
#include <cstdlib>

#include "attention.h"
#include "pieces.h"
#include "quant_gemm.h"
#include "rows.h"

enum Part { ENTER = 1, ATTEND = 2, MLP = 4 };

struct Layer {
  Geometry g;
  int64_t hidden, rotary, interleaved, inner, activation, packed;  // packed: some matrix is block-quantized
  float eps, offset, mlp_eps, mlp_offset;
  Matrix qkv, o, gate_up, down;
  const void *norm, *qkv_bias, *q_norm, *k_norm, *cos_sin, *o_bias, *sinks, *post_norm, *query_scale;
  const void *mlp_norm, *gate_up_bias, *down_bias, *mlp_post_norm;
  int64_t positions;  // rows of cos_sin and of query_scale
};

// Rows of a matrix in pieces, as a thread takes and prefetches them.
template <class T> struct RowPieces {
  const Matrix& w;
  long N, K, piece;
  long count() const { return ceil_div(N, piece); }
  bool operator()(long at, long k, Span* to) const {
    const long n0 = at * piece;
    return span_at(w, n0, n0 + piece < N ? n0 + piece : N, k, K, sizeof(T), to);
  }
};

template <class T, class O>
INLINE void gemm_pieces(Pieces<RowPieces<T>>& own, const T* x, const Quantized& q, long M, const void* bias, O* y, Ahead* ahead) {
  const RowPieces<T>& rows = own.span_of;
  for (long at; own.next(&at);) {
    const long n0 = at * rows.piece, n1 = n0 + rows.piece < rows.N ? n0 + rows.piece : rows.N;
    multiply<T, O>(rows.w, x, q, M, n0, n1, rows.K, (const T*)bias, y + n0, rows.N, {}, {}, ahead);
  }
}

template <class T, class O>
INLINE void gemm_parallel(WorkQueue& queue, long threads, const T* x, const Quantized& q, long M, const Matrix& w, const void* bias, long N, long K, O* y) {
  long piece = piece_of(N, threads, 16), n0, n1;
  while (queue.take(N, piece, &n0, &n1)) multiply<T, O>(w, x, q, M, n0, n1, K, (const T*)bias, y + n0, N);
}

static const long FEW = 4, MLP_PANEL = 256;
// Rows of gate and up that a thread multiplies before it applies the activation.
#if defined(EVENER_AMX)
static const long MLP_ROWS = 32;
#elif defined(EVENER_PANELS)
static const long MLP_ROWS = GATE_ROWS;
#else
static const long MLP_ROWS = 16;
#endif

// For a few tokens, threads take long runs of rows of each half: weights come from memory, and every run starts slowly.
INLINE long rows_at_once(long tokens) { return tokens <= FEW ? MLP_PANEL * MLP_ROWS / FEW : MLP_ROWS; }

// Rows of gate and up in pieces: ``some`` rows of gate, then as many of up, and so on.
template <class T> struct GateUpRows {
  const Matrix& w;
  long inner, K, piece, some;
  long count() const { return ceil_div(inner, piece); }
  bool operator()(long at, long k, Span* to) const {
    const long i = at * piece + k / 2 * some, end = at * piece + piece < inner ? at * piece + piece : inner;
    if (i >= end) return false;
    const long n0 = k % 2 * inner + i;
    *to = span_of(w, n0, n0 + (end - i < some ? end - i : some), K, sizeof(T));
    return true;
  }
};

// What items of attention read, for one KV head each.
template <class T> struct Attended {
  const Geometry& g;
  const Step* step;
  bool operator()(long at, long k, Span* to) const {
    const Item& item = step->plan[at / g.kv_heads];
    return Tile<T>(g, *step, nullptr, item, at % g.kv_heads).memory(item.span, k, to);
  }
};

// Rounds the rows of x to integers: if they are few, every thread does all of them; otherwise threads share them.
template <class T>
INLINE Quantized quantized(const T* x, long M, long K, char* shared, char* mine, Barrier& barrier, long tid, long threads) {
  bool few = M <= FEW;
  Quantized q = Quantized::at(few ? mine : shared, M, K);
  quantize_rows(x, K, few ? 0 : M * tid / threads, few ? M : M * (tid + 1) / threads, K, q);
  if (!few) barrier.wait(threads);
  return q;
}
// The same, if the matrix needs integers.
template <class T>
INLINE Quantized quantized(const Matrix& w, const T* x, long M, long K, char* shared, char* mine, Barrier& barrier, long tid, long threads) {
  return takes_integers<T>(w) ? quantized(x, M, K, shared, mine, barrier, tid, threads) : Quantized{};
}

struct Norm {
  const void* weight;
  float eps, offset;
};

// Norm of the stream plus ``add`` (if not null; first normed by ``post``, if that has a weight). If rows are few, every thread computes
// all of them, in ``priv``, and ``sum`` holds the new stream; otherwise threads share them, in ``xn``, and the stream is updated.
template <class T>
T* norm_rows(float* stream, long tokens, long H, const T* add, Norm post, Norm norm, T* xn, float* priv, Barrier& barrier, long tid, long threads,
             float** sum) {
  bool few = tokens <= FEW;
  T* y = few ? (T*)(priv + FEW * H) : xn;
  *sum = few && add ? priv : nullptr;
  long from = few ? 0 : tokens * tid / threads, to = few ? tokens : tokens * (tid + 1) / threads;
  for (long t = from; t < to; t++) {
    const float* in = stream + t * H;
    if (add) {
      float* s = few ? priv + t * H : stream + t * H;
      const T* more = add + t * H;
      if (post.weight) {
        norm_row(more, (const T*)post.weight, y + t * H, H, post.eps, post.offset);
        more = y + t * H;
      }
      add_row(in, more, s, H);
      in = s;
    }
    norm_row(in, (const T*)norm.weight, y + t * H, H, norm.eps, norm.offset);
  }
  if (!few) barrier.wait(threads);
  return y;
}

struct Sizes {
  long threads, tokens, xn, qkv, q, attn, ao, h, ints, priv, total;
  static long up(long n) { return (n + 63) / 64 * 64; }
  template <class T> static Sizes of(const Layer& l, long tokens, long parts, long threads) {
    const Geometry& g = l.g;
    Sizes s;
    long panel = tokens < MLP_PANEL ? tokens : MLP_PANEL, at = 0;
    auto add = [&](long bytes) {
      long was = at;
      at += up(bytes);
      return was;
    };
    s.threads = threads, s.tokens = tokens;
    s.xn = add(tokens * l.hidden * sizeof(T));
    s.qkv = add(tokens * (g.heads * g.d + g.kv_heads * (g.d + g.dv)) * 4);
    s.q = add(tokens * g.heads * g.d * sizeof(T));
    s.attn = add(tokens * g.heads * g.dv * sizeof(T));
    s.ao = add(tokens * l.hidden * sizeof(T));
    s.h = add(panel * l.inner * sizeof(T));
    long part = add(parts * g.kv_heads * partial_floats(g.kv_heads ? g.heads / g.kv_heads : 0, g.dv) * 4);
    s.parts = part;
    auto most = [&](long rows, long panel) {
      long inner = Quantized::bytes(panel, l.inner), heads = Quantized::bytes(rows, g.heads * g.dv), hidden = Quantized::bytes(rows, l.hidden);
      return !l.packed ? 0 : up(inner > heads ? (inner > hidden ? inner : hidden) : (heads > hidden ? heads : hidden));
    };
    s.ints = add(most(tokens, panel));
    s.few_bytes = most(FEW, FEW);
    s.priv_bytes = s.few_bytes + up((g.kv_heads ? attention_floats(g) : 0) * 4) + up(FEW * l.hidden * (4 + sizeof(T))) + up(2 * MLP_PANEL * MLP_ROWS * 4);
    s.priv = add(s.priv_bytes * threads);
    s.total = at;
    return s;
  }
  long parts, few_bytes, priv_bytes;
};

// x, stream: [T, hidden], the stream in float32; ``x`` is null if only the stream enters. ``out``: the layer's x, or the query with ENTER alone.
template <class T> struct Run {
  const Layer& l;
  const Step* step;
  long tokens;
  T* x;
  float* stream;
  T* out;
  const void* positions;
  long positions64, flags;
  Barrier barrier;
  SharedPieces qkv_pieces, attend_pieces, o_pieces, gate_up_pieces, down_pieces;

  T* norms(T* add, const void* post, const void* weight, float eps, float offset, T* xn, float* priv, long tid, long threads, float** sum) {
    return norm_rows(stream, tokens, l.hidden, add, Norm{post, l.eps, l.offset}, Norm{weight, eps, offset}, xn, priv, barrier, tid, threads, sum);
  }

  void commit_residual(float* sum, long tid) {
    if (sum && tid == 0) memcpy((void*)stream, sum, tokens * l.hidden * sizeof(float));
  }

  void wait(long threads, Ahead* ahead) { ahead ? wait_ahead(barrier, threads, *ahead) : barrier.wait(threads); }

  // Queries and keys stay in float32 up to here: if keys have a large bias (Qwen2), rounding them before the rotation as well
  // as after it costs more than all other roundings.
  void heads(float* qkv, T* q, long tid, long threads) {
    const Geometry& g = l.g;
    long width = g.heads * g.d + g.kv_heads * (g.d + g.dv), all = g.heads + 2 * g.kv_heads, work = tokens * all;
    T row[1024];
    for (long i = work * tid / threads; i < work * (tid + 1) / threads; i++) {
      long t = i / all, h = i % all;
      float* in = qkv + t * width + h * g.d;
      if (h >= g.heads + g.kv_heads) {
        long v = h - g.heads - g.kv_heads;
        in = qkv + t * width + (g.heads + g.kv_heads) * g.d + v * g.dv;
        for (long j = 0; j < g.dv; j++) put(row + j, in[j]);
        write_value<T>(g, index_at(step->slots, t, step->slots64), v, row);
        continue;
      }
      bool is_q = h < g.heads;
      const T* norm = (const T*)(is_q ? l.q_norm : l.k_norm);
      T* to = is_q ? q + (t * g.heads + h) * g.d : row;
      if (norm) norm_row(in, norm, in, g.d, l.eps, l.offset);
      if (is_q && l.query_scale) {
        float factor = ((const float*)l.query_scale)[index_at(positions, t, positions64)];
        for (long j = 0; j < g.d; j++) in[j] *= factor;
      }
      rotate_row(in, to, (const float*)l.cos_sin + index_at(positions, t, positions64) * l.rotary, l.rotary, g.d, l.interleaved);
      if (!is_q) write_key<T>(g, index_at(step->slots, t, step->slots64), h - g.heads, row);
    }
  }

  void operator()(char* base, const Sizes& s) {
    const Geometry& g = l.g;
    long H = l.hidden, width = g.heads * g.d + g.kv_heads * (g.d + g.dv);
    T *xn = (T*)(base + s.xn), *attn = (T*)(base + s.attn), *h = (T*)(base + s.h);
    T* q = flags == ENTER ? out : (T*)(base + s.q);
    T* ao = flags & MLP ? (T*)(base + s.ao) : out;
    float* qkv = (float*)(base + s.qkv);
    float* parts = (float*)(base + s.parts);
    Pool::run(s.threads, [&](long tid, long threads) {
      char* mine = base + s.priv + tid * s.priv_bytes;
      float* priv = (float*)mine;
      float* temp = (float*)(mine + Sizes::up(FEW * H * (4 + sizeof(T))));
      float* scratch = (float*)((char*)temp + Sizes::up(2 * MLP_PANEL * MLP_ROWS * 4));
      char *ints = base + s.ints, *few = mine + s.priv_bytes - s.few_bytes;
      float* sum = nullptr;
      auto rows = [&](const Matrix& w, long N, long K) { return RowPieces<T>{w, N, K, piece_of(N, threads, 16)}; };
      const RowPieces<T> qkv_rows = rows(l.qkv, width, H), o_rows = rows(l.o, H, g.heads * g.dv), down_rows = rows(l.down, H, l.inner);
      const GateUpRows<T> gate_up_rows{l.gate_up, l.inner, H, piece_of(l.inner, threads, 16), rows_at_once(tokens)};
      auto own_qkv = pieces(qkv_pieces, qkv_rows.count(), qkv_rows, tid, threads);
      auto own_items = items(tid, threads);
      auto own_o = pieces(o_pieces, o_rows.count(), o_rows, tid, threads);
      auto own_gate_up = pieces(gate_up_pieces, gate_up_rows.count(), gate_up_rows, tid, threads);
      auto own_down = pieces(down_pieces, down_rows.count(), down_rows, tid, threads);
      auto next = [&](Span* to) {
        return (flags & ENTER && own_qkv(to)) || (flags & ATTEND && (own_items(to) || own_o(to))) || (flags & MLP && (own_gate_up(to) || own_down(to)));
      };
      // What is read next is prefetched across the ends of pieces and of products, and while this thread waits. With several panels queues are
      // used again, and no piece may be taken before its time.
      Ahead following, *ahead = tokens <= MLP_PANEL ? &following : nullptr;
      if (ahead) ahead->follow(next);
      if (flags & ENTER) {
        T* y = norms(x, nullptr, l.norm, l.eps, l.offset, xn, priv, tid, threads, &sum);
        Quantized in = quantized(l.qkv, y, tokens, H, ints, few, barrier, tid, threads);
        gemm_pieces<T, float>(own_qkv, y, in, tokens, l.qkv_bias, qkv, ahead);
        wait(threads, ahead);
        commit_residual(sum, tid);
        heads(qkv, q, tid, threads);
      }
      if (flags & ATTEND) {
        wait(threads, ahead);
        attend(*step, q, (const T*)l.sinks, attn, parts, scratch, tid, threads, own_items, ahead);
        wait(threads, ahead);
        Quantized in = quantized(l.o, attn, tokens, g.heads * g.dv, ints, few, barrier, tid, threads);
        gemm_pieces<T, T>(own_o, attn, in, tokens, l.o_bias, ao, ahead);
        if (l.post_norm && !(flags & MLP)) {
          barrier.wait(threads);
          for (long t = tokens * tid / threads; t < tokens * (tid + 1) / threads; t++)
            norm_row(ao + t * H, (const T*)l.post_norm, ao + t * H, H, l.eps, l.offset);
        }
      }
      if (flags & MLP) mlp(flags & ATTEND ? ao : x, xn, h, priv, temp, ints, few, tid, threads, own_gate_up, own_down, ahead);
    });
  }

  // What a thread attends to.
  Pieces<Attended<T>> items(long tid, long threads) {
    return pieces(attend_pieces, step ? step->items * l.g.kv_heads : 0, Attended<T>{l.g, step}, tid, threads);
  }

  void attend(const Step& st, const T* q, const T* sinks, T* attn, float* parts, float* scratch, long tid, long threads, Pieces<Attended<T>>& own,
              Ahead* ahead) {
    const Geometry& g = l.g;
    long n, covered = st.query_start[st.requests];
    if (tid == 0 && covered < tokens) memset((void*)(attn + covered * g.heads * g.dv), 0, (tokens - covered) * g.heads * g.dv * sizeof(T));
    if (ahead) ahead->at_least(CHUNK / 16 * group_bytes<T>(g));
    while (own.next(&n)) attend_item<T>(g, st, st.plan[n / g.kv_heads], n % g.kv_heads, q, sinks, attn, parts, scratch, ahead);
    if (!st.parts) return;
    wait(threads, ahead);
    for (long i = tid; i < st.items * g.kv_heads; i += threads) {
      const Item& item = st.plan[i / g.kv_heads];
      if (item.spans > 1 && (i / g.kv_heads == 0 || st.plan[i / g.kv_heads - 1].request != item.request))
        merge_item<T>(g, st, item, i % g.kv_heads, q, sinks, attn, parts);
    }
  }

  void mlp(T* add, T* xn, T* h, float* priv, float* temp, char* ints, char* few, long tid, long threads, Pieces<GateUpRows<T>>& own_gate_up,
           Pieces<RowPieces<T>>& own_down, Ahead* ahead) {
    long H = l.hidden, I = l.inner, piece = own_gate_up.span_of.piece;
    const T* bias = (const T*)l.gate_up_bias;
    float* sum;
    if (flags & ATTEND) wait(threads, ahead);
    T* y = norms(add, flags & ATTEND ? l.post_norm : nullptr, l.mlp_norm, l.mlp_eps, l.mlp_offset, xn, priv, tid, threads, &sum);
    for (long p = 0, at; p < tokens; p += MLP_PANEL) {
      long M = tokens - p < MLP_PANEL ? tokens - p : MLP_PANEL, some = rows_at_once(M);
      Quantized in = quantized(l.gate_up, y + p * H, M, H, ints, few, barrier, tid, threads);
      while (own_gate_up.next(&at))
        for (long i = at * piece, i1 = i + piece < I ? i + piece : I; i < i1; i += some) {
          long n = i1 - i < some ? i1 - i : some;
          float *gate = temp, *up = temp + MLP_PANEL * MLP_ROWS;
          multiply<T, float>(l.gate_up, y + p * H, in, M, i, i + n, H, bias, gate, some, {}, {}, ahead);
          multiply<T, float>(l.gate_up, y + p * H, in, M, I + i, I + i + n, H, bias, up, some, {}, {}, ahead);
          for (long m = 0; m < M; m++) act_row<float, T>(gate + m * some, up + m * some, h + m * I + i, n, l.activation);
        }
      wait(threads, ahead);
      if (!ahead) own_gate_up.again();
      if (!ahead && tid == 0) gate_up_pieces.reset();
      if (p == 0) commit_residual(sum, tid);
      in = quantized(l.down, h, M, I, ints, few, barrier, tid, threads);
      gemm_pieces<T, T>(own_down, h, in, M, l.down_bias, out + p * H, ahead);
      barrier.wait(threads);
      if (!ahead) own_down.again();
      if (!ahead && tid == 0) down_pieces.reset();
    }
    if (l.mlp_post_norm)
      for (long t = tokens * tid / threads; t < tokens * (tid + 1) / threads; t++)
        norm_row(out + t * H, (const T*)l.mlp_post_norm, out + t * H, H, l.mlp_eps, l.mlp_offset);
  }
};
