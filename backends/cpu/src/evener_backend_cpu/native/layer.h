// A decoder layer, or a part of it, as one parallel region: threads divide the rows of weights and synchronize at barriers.
#pragma once
#include <atomic>
#include <cstdlib>

#include "attention.h"
#include "pool.h"
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
  if (threads == 1) return total;
  long p = (total / (threads * 6) + unit - 1) / unit * unit;
  return p > unit ? p : unit;
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
  WorkQueue qkv_queue, attend_queue, o_queue, gate_up_queue, down_queue;

  T* norms(T* add, const void* post, const void* weight, float eps, float offset, T* xn, float* priv, long tid, long threads, float** sum) {
    return norm_rows(stream, tokens, l.hidden, add, Norm{post, l.eps, l.offset}, Norm{weight, eps, offset}, xn, priv, barrier, tid, threads, sum);
  }

  void commit_residual(float* sum, long tid) {
    if (sum && tid == 0) memcpy((void*)stream, sum, tokens * l.hidden * sizeof(float));
  }

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
      if (flags & ENTER) {
        T* y = norms(x, nullptr, l.norm, l.eps, l.offset, xn, priv, tid, threads, &sum);
        Quantized in = quantized(l.qkv, y, tokens, H, ints, few, barrier, tid, threads);
        gemm_parallel<T, float>(qkv_queue, threads, y, in, tokens, l.qkv, l.qkv_bias, width, H, qkv);
        barrier.wait(threads);
        commit_residual(sum, tid);
        heads(qkv, q, tid, threads);
      }
      if (flags & ATTEND) {
        barrier.wait(threads);
        attend(*step, q, (const T*)l.sinks, attn, parts, scratch, tid, threads);
        barrier.wait(threads);
        Quantized in = quantized(l.o, attn, tokens, g.heads * g.dv, ints, few, barrier, tid, threads);
        gemm_parallel<T, T>(o_queue, threads, attn, in, tokens, l.o, l.o_bias, H, g.heads * g.dv, ao);
        if (l.post_norm && !(flags & MLP)) {
          barrier.wait(threads);
          for (long t = tokens * tid / threads; t < tokens * (tid + 1) / threads; t++)
            norm_row(ao + t * H, (const T*)l.post_norm, ao + t * H, H, l.eps, l.offset);
        }
      }
      if (flags & MLP) mlp(flags & ATTEND ? ao : x, xn, h, priv, temp, ints, few, tid, threads);
    });
  }

  void attend(const Step& st, const T* q, const T* sinks, T* attn, float* parts, float* scratch, long tid, long threads) {
    const Geometry& g = l.g;
    long n0, n1, covered = st.query_start[st.requests];
    if (tid == 0 && covered < tokens) memset((void*)(attn + covered * g.heads * g.dv), 0, (tokens - covered) * g.heads * g.dv * sizeof(T));
    while (attend_queue.take(st.items * g.kv_heads, 1, &n0, &n1))
      attend_item<T>(g, st, st.plan[n0 / g.kv_heads], n0 % g.kv_heads, q, sinks, attn, parts, scratch);
    if (!st.parts) return;
    barrier.wait(threads);
    for (long i = tid; i < st.items * g.kv_heads; i += threads) {
      const Item& item = st.plan[i / g.kv_heads];
      if (item.spans > 1 && (i / g.kv_heads == 0 || st.plan[i / g.kv_heads - 1].request != item.request))
        merge_item<T>(g, st, item, i % g.kv_heads, q, sinks, attn, parts);
    }
  }

  void mlp(T* add, T* xn, T* h, float* priv, float* temp, char* ints, char* few, long tid, long threads) {
    long H = l.hidden, I = l.inner;
    const T* bias = (const T*)l.gate_up_bias;
    float* sum;
    if (flags & ATTEND) barrier.wait(threads);
    T* y = norms(add, flags & ATTEND ? l.post_norm : nullptr, l.mlp_norm, l.mlp_eps, l.mlp_offset, xn, priv, tid, threads, &sum);
    for (long p = 0; p < tokens; p += MLP_PANEL) {
      long M = tokens - p < MLP_PANEL ? tokens - p : MLP_PANEL, i0, i1;
      // For a few tokens, threads take long runs of rows of each half: weights come from memory, and every run starts slowly.
      long piece = piece_of(I, threads, 16), some = M <= FEW ? MLP_PANEL * MLP_ROWS / FEW : MLP_ROWS;
      Quantized in = quantized(l.gate_up, y + p * H, M, H, ints, few, barrier, tid, threads);
      while (gate_up_queue.take(I, piece, &i0, &i1))
        for (long i = i0; i < i1; i += some) {
          long n = i1 - i < some ? i1 - i : some;
          float *gate = temp, *up = temp + MLP_PANEL * MLP_ROWS;
          multiply<T, float>(l.gate_up, y + p * H, in, M, i, i + n, H, bias, gate, some);
          multiply<T, float>(l.gate_up, y + p * H, in, M, I + i, I + i + n, H, bias, up, some);
          for (long m = 0; m < M; m++) act_row<float, T>(gate + m * some, up + m * some, h + m * I + i, n, l.activation);
        }
      barrier.wait(threads);
      if (tid == 0) gate_up_queue.reset();
      if (p == 0) commit_residual(sum, tid);
      in = quantized(l.down, h, M, I, ints, few, barrier, tid, threads);
      gemm_parallel<T, T>(down_queue, threads, h, in, M, l.down, l.down_bias, H, I, out + p * H);
      barrier.wait(threads);
      if (tid == 0) down_queue.reset();
    }
    if (l.mlp_post_norm)
      for (long t = tokens * tid / threads; t < tokens * (tid + 1) / threads; t++)
        norm_row(out + t * H, (const T*)l.mlp_post_norm, out + t * H, H, l.mlp_eps, l.mlp_offset);
  }
};
