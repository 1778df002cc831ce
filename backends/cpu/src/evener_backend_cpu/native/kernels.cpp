// The functions that Python calls. Pointers are addresses of contiguous tensors; sizes are int64. Each function first checks what it was
// given and returns a Result; those whose name ends in ``scratch`` or ``bytes`` return a number of bytes.
#include "answer.h"
#include "quant_rows.h"
#include "sampling.h"
#include "screened.h"

static Scratch& scratch() {
  static thread_local Scratch s;
  return s;
}

template <class T>
static int run_layer(const Layer* l, const Step* step, int64_t tokens, void* x, void* stream, void* out, const void* positions,
                     int64_t positions64, int64_t flags, int64_t threads) {
  PASS(check_layer<T>(l, step, tokens, x, stream, out, positions, positions64, flags, threads));
  if (!tokens) return DONE;
  Sizes s = Sizes::of<T>(*l, tokens, step ? step->parts : 0, threads);
  char* base = scratch().reserve(s.total);
  if (!base) return 1;
  Run<T> run{*l, step, tokens, (T*)x, (float*)stream, (T*)out, positions, positions64, flags, {}, {}, {}, {}, {}, {}};
  run(base, s);
  return 0;
}

template <class T> static int run_experts(const Experts* e, int64_t tokens, T* x, float* stream, int64_t threads) {
  PASS(check_experts(e, tokens, x, stream, threads));
  if (!tokens) return DONE;
  ExpertSizes s = ExpertSizes::of<T>(*e, tokens, threads);
  char* base = scratch().reserve(s.total);
  if (!base) return 1;
  ExpertRun<T> run{*e, tokens, x, stream, {}, {}, {}, {}};
  run(base, s);
  return 0;
}

template <class T>
static int run_routed(const Experts* e, int64_t tokens, const T* x, const int32_t* ids, const float* weights, T* y, int64_t threads) {
  PASS(check_routed(e, tokens, x, ids, weights, y, threads));
  if (!tokens) return DONE;
  ExpertSizes s = ExpertSizes::of<T>(*e, tokens, threads);
  char* base = scratch().reserve(s.total + tokens * e->top * sizeof(int32_t));
  if (!base) return 1;
  int32_t* slots = (int32_t*)(base + s.total);
  for (long i = 0; i < tokens * e->top; i++) {
    long copies = e->copies[ids[i]];
    slots[i] = e->slot_of[ids[i] * e->copy_columns + (copies > 1 && e->copy_columns > 1 ? i / e->top % copies : 0)];
  }
  ExpertRun<T> run{*e, tokens, y, nullptr, {}, {}, {}, {}};
  routed(run, base, s, x, slots, weights);
  return 0;
}

template <class T> static int run_aside(const Routed& r) {
  return run_routed<T>(r.e, r.tokens, (const T*)r.x, r.ids, r.weights, (T*)r.y, r.threads);
}

template <class T, class O>
static int linear(const T* x, int64_t M, const T* plain, const Blocks* blocks, const T* bias, int64_t N, int64_t K, O* y, int64_t threads) {
  Matrix w{plain, blocks};
  PASS(check_linear(x, M, w, N, K, y, threads));
  if (!M) return DONE;
  bool integers = needs_integers(w);
  long all = integers ? Sizes::up(Quantized::bytes(M, K)) : 0, few = integers ? Sizes::up(Quantized::bytes(FEW, K)) : 0;
  char* base = integers ? scratch().reserve(all + few * threads) : nullptr;
  if (integers && !base) return 1;
  WorkQueue queue;
  Barrier barrier;
  Pool::run(threads, [&](long tid, long n) {
    Quantized in = quantized(w, x, M, K, base, base + all + few * tid, barrier, tid, n);
    gemm_parallel<T, O>(queue, n, x, in, M, w, bias, N, K, y);
  });
  return 0;
}

// Rows ``ids`` of a matrix in blocks, times ``factor``.
template <class T>
static int rows_of(const void* ids, int64_t ids64, int64_t M, const Blocks* blocks, int64_t N, int64_t K, float factor, T* y, int64_t threads) {
  PASS(check_rows_of(ids, ids64, M, blocks, N, K, y, threads));
  Pool::each(M * K > 32768 ? threads : 1, M, [&](long m) { quant_row_of(*blocks, index_at(ids, m, ids64), K, factor, y + m * K); });
  return DONE;
}

template <class T>
static int attend(const Geometry* g, const Step* step, const T* q, const T* sinks, T* out, int64_t threads) {
  PASS(check_attend<T>(g, step, q, out, threads));
  if (!step->tokens) return DONE;
  Layer l{};
  l.g = *g;
  Sizes s = Sizes::of<T>(l, 0, step->parts, threads);
  char* base = scratch().reserve(s.total);
  if (!base) return 1;
  Run<T> run{l, step, step->tokens, nullptr, nullptr, nullptr, nullptr, 0, 0, {}, {}, {}, {}, {}, {}};
  Pool::run(threads, [&](long tid, long n) {
    char* mine = base + s.priv + tid * s.priv_bytes + Sizes::up(2 * MLP_PANEL * MLP_ROWS * 4);
    auto own = run.items(tid, n);
    Ahead ahead;
    ahead.follow(own);
    run.attend(*step, q, sinks, out, (float*)(base + s.parts), (float*)mine, tid, n, own, &ahead);
  });
  return 0;
}

template <class T>
static int write(const Geometry* g, const Step* s, const T* k, int64_t ldk, const T* v, int64_t ldv, int64_t threads) {
  PASS(check_write<T>(g, s, k, ldk, v, ldv, threads));
  Pool::each(s->tokens > 64 ? threads : 1, s->tokens, [&](long t) {
    long slot = index_at(s->slots, t, s->slots64);
    for (long h = 0; h < g->kv_heads; h++) {
      write_key<T>(*g, slot, h, k + t * ldk + h * g->d);
      write_value<T>(*g, slot, h, v + t * ldv + h * g->dv);
    }
  });
  return DONE;
}

// With ``stream``: stream += x first.
template <class T>
static int norm(const T* x, int64_t ldx, float* stream, const T* w, T* y, int64_t rows, int64_t n, float eps, float offset, int64_t threads) {
  PASS(check_rows(x, ldx, y, rows, n, threads));
  PASS(check_pointer("the norm", w));
  Pool::each(rows * n > 65536 ? threads : 1, rows, [&](long r) {
    const T* in = x + r * ldx;
    if (!stream) return norm_row(in, w, y + r * n, n, eps, offset);
    float* sum = stream + r * n;
    add_row(sum, in, sum, n);
    norm_row(sum, w, y + r * n, n, eps, offset);
  });
  return DONE;
}

template <class T>
static int rotary(const void* positions, int64_t is64, T* q, int64_t ldq, int64_t heads, T* k, int64_t ldk, int64_t kv_heads, int64_t tokens,
                  int64_t d, int64_t dim, int64_t interleaved, const float* cos_sin, int64_t rows, int64_t threads) {
  PASS(check_rotary(positions, is64, q, ldq, heads, k, ldk, kv_heads, tokens, d, dim, cos_sin, rows, threads));
  Pool::each(tokens * (heads + kv_heads) * d > 65536 ? threads : 1, tokens, [&](long t) {
    const float* at = cos_sin + index_at(positions, t, is64) * dim;
    for (long h = 0; h < heads; h++) rotate_row(q + t * ldq + h * d, q + t * ldq + h * d, at, dim, d, interleaved);
    for (long h = 0; h < kv_heads; h++) rotate_row(k + t * ldk + h * d, k + t * ldk + h * d, at, dim, d, interleaved);
  });
  return DONE;
}

template <class T> static int act(const T* x, T* y, int64_t rows, int64_t inner, int64_t kind, int64_t threads) {
  PASS(check_rows(x, inner, y, rows, inner, threads));
  PASS(check_size("the activation", kind, SILU, GELU_TANH));
  Pool::each(rows * inner > 32768 ? threads : 1, rows, [&](long r) {
    const T* gate = x + r * 2 * inner;
    act_row<T, T>(gate, gate + inner, y + r * inner, inner, (int)kind);
  });
  return DONE;
}

// y[t] = the sum over k of weights[t, k] * x[t, k], in float32, in the order of k.
template <class T>
static int mix(const T* x, const float* weights, T* y, int64_t rows, int64_t top, int64_t n, int64_t threads) {
  PASS(check_size("the number of experts of a token", top, 1, MOST_ROWS));
  PASS(check_size("the width", n, 1, MOST_COLUMNS));
  PASS(check_rows(x, top * n, y, rows, n, threads));
  if (rows) PASS(check_pointer("the weights", weights));
  Pool::each(rows * top * n > 32768 ? threads : 1, rows, [&](long r) {
    const T* own = x + r * top * n;
    const float* w = weights + r * top;
    long i = 0;
    for (; i + 16 <= n; i += 16) {
      v16 sum = splat(0);
      for (long k = 0; k < top; k++) sum = sum + load(own + k * n + i) * splat(w[k]);
      store(y + r * n + i, sum);
    }
    for (; i < n; i++) {
      float sum = 0;
      for (long k = 0; k < top; k++) sum += wide(own[k * n + i]) * w[k];
      put(y + r * n + i, sum);
    }
  });
  return DONE;
}

template <class T> static int greedy(const T* x, int64_t rows, int64_t n, int32_t* ids) {
  PASS(check_rows(x, n, ids, rows, n, 1));
  for (long r = 0; r < rows; r++) ids[r] = largest_of(x + r * n, n);
  return DONE;
}

template <class T>
static int sample(const T* x, int64_t rows, int64_t n, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
                  const int32_t* seed, const int32_t* position, int32_t* ids, int64_t threads) {
  PASS(check_rows(x, n, ids, rows, n, threads));
  for (const void* each : {(const void*)temperature, (const void*)top_k, (const void*)top_p, (const void*)min_p, (const void*)seed, (const void*)position})
    PASS(rows ? check_pointer("a sampling parameter", each) : DONE);
  Pool::each(rows > 1 ? threads : 1, rows, [&](long r) {
    static thread_local Sampler sampler;
    sampler.n = n;
    sample_row<T>(sampler, x + r * n, temperature[r], top_k[r], top_p[r], min_p[r], seed[r], position[r], ids + r);
  });
  return DONE;
}

template <class T> static int mask(T* x, int64_t rows, int64_t n, const uint32_t* words, int64_t threads) {
  PASS(check_rows(x, n, x, rows, n, threads));
  PASS(rows ? check_pointer("the mask", words) : DONE);
  Pool::each(rows > 1 ? threads : 1, rows, [&](long r) { mask_row(x + r * n, words + r * ((n + 31) / 32), n); });
  return DONE;
}

template <class T>
static int products(const T* x, int64_t tokens, const int32_t* slots, int64_t top, int64_t count, const Matrix* w, const T* bias, int64_t N,
                    int64_t K, T* y, int64_t threads) {
  PASS(check_grouped(x, tokens, slots, top, count, w, N, K, y, threads));
  return tokens ? grouped(x, tokens, slots, top, count, w, bias, N, K, y, threads, scratch()) : DONE;
}

extern "C" {
#define EXPORT(T, S)                                                                                                                   \
  int evener_layer_##S(const Layer* l, const Step* s, int64_t n, void* x, void* stream, void* out, const void* pos, int64_t p64,        \
                       int64_t flags, int64_t threads) {                                                                               \
    return run_layer<T>(l, s, n, x, stream, out, pos, p64, flags, threads);                                                            \
  }                                                                                                                                    \
  int64_t evener_scratch_##S(const Layer* l, int64_t tokens, int64_t parts, int64_t threads) {                                         \
    return Sizes::of<T>(*l, tokens, parts, threads).total;                                                                             \
  }                                                                                                                                    \
  int evener_linear_##S(const T* x, int64_t M, const T* w, const Blocks* blocks, const T* b, int64_t N, int64_t K, T* y, int64_t threads) {\
    return linear(x, M, w, blocks, b, N, K, y, threads);                                                                               \
  }                                                                                                                                    \
  int evener_linear_wide_##S(const T* x, int64_t M, const T* w, const Blocks* blocks, const T* b, int64_t N, int64_t K, float* y,      \
                             int64_t threads) {                                                                                        \
    return linear(x, M, w, blocks, b, N, K, y, threads);                                                                               \
  }                                                                                                                                    \
  int evener_rows_of_##S(const void* ids, int64_t i64, int64_t M, const Blocks* blocks, int64_t N, int64_t K, float factor, T* y,       \
                         int64_t threads) {                                                                                            \
    return rows_of(ids, i64, M, blocks, N, K, factor, y, threads);                                                                      \
  }                                                                                                                                    \
  int evener_experts_##S(const Experts* e, int64_t tokens, T* x, float* stream, int64_t threads) {                                      \
    return run_experts<T>(e, tokens, x, stream, threads);                                                                              \
  }                                                                                                                                    \
  int evener_routed_##S(const Experts* e, int64_t tokens, const T* x, const int32_t* ids, const float* weights, T* y, int64_t threads) { \
    return run_routed<T>(e, tokens, x, ids, weights, y, threads);                                                                       \
  }                                                                                                                                    \
  int evener_routed_aside_##S(Aside* aside, const Experts* e, int64_t tokens, const T* x, const int32_t* ids, const float* weights, T* y,  \
                              int64_t threads, int32_t* word) {                                                                        \
    PASS(check_pointer("the thread", aside));                                                                                          \
    return aside->begin(run_aside<T>, {e, tokens, x, ids, weights, y, threads}, word);                                                  \
  }                                                                                                                                    \
  int evener_answer_##S(const Asked* asked, int64_t count, int64_t rows, int64_t threads, Waiting* waiting, Answered* spent) {             \
    return answer(run_aside<T>, asked, count, rows, threads, waiting, spent);                                                           \
  }                                                                                                                                    \
  int64_t evener_experts_scratch_##S(const Experts* e, int64_t tokens, int64_t threads) {                                              \
    return ExpertSizes::of<T>(*e, tokens, threads).total;                                                                              \
  }                                                                                                                                    \
  int evener_grouped_##S(const T* x, int64_t tokens, const int32_t* slots, int64_t top, int64_t count, const Matrix* w, const T* b,     \
                         int64_t N, int64_t K, T* y, int64_t threads) {                                                                \
    return products(x, tokens, slots, top, count, w, b, N, K, y, threads);                                                   \
  }                                                                                                                                    \
  int evener_attend_##S(const Geometry* g, const Step* s, const T* q, const T* sinks, T* out, int64_t threads) {                       \
    return attend<T>(g, s, q, sinks, out, threads);                                                                                    \
  }                                                                                                                                    \
  int evener_write_##S(const Geometry* g, const Step* s, const T* k, int64_t ldk, const T* v, int64_t ldv, int64_t threads) {         \
    return write<T>(g, s, k, ldk, v, ldv, threads);                                                                                           \
  }                                                                                                                                    \
  int evener_norm_##S(const T* x, int64_t ldx, float* stream, const T* w, T* y, int64_t rows, int64_t n, float eps, float offset,     \
                       int64_t threads) {                                                                                              \
    return norm<T>(x, ldx, stream, w, y, rows, n, eps, offset, threads);                                                                      \
  }                                                                                                                                    \
  int evener_rotary_##S(const void* pos, int64_t p64, T* q, int64_t ldq, int64_t heads, T* k, int64_t ldk, int64_t kv, int64_t n,     \
                         int64_t d, int64_t dim, int64_t inter, const float* table, int64_t rows, int64_t threads) {                                 \
    return rotary<T>(pos, p64, q, ldq, heads, k, ldk, kv, n, d, dim, inter, table, rows, threads);                                                  \
  }                                                                                                                                    \
  int evener_act_##S(const T* x, T* y, int64_t rows, int64_t inner, int64_t kind, int64_t threads) {                                  \
    return act<T>(x, y, rows, inner, kind, threads);                                                                                          \
  }                                                                                                                                    \
  int evener_mix_##S(const T* x, const float* weights, T* y, int64_t rows, int64_t top, int64_t n, int64_t threads) {                 \
    return mix<T>(x, weights, y, rows, top, n, threads);                                                                              \
  }                                                                                                                                   \
  int evener_greedy_##S(const T* x, int64_t rows, int64_t n, int32_t* ids) { return greedy<T>(x, rows, n, ids); }                            \
  int evener_sample_##S(const T* x, int64_t rows, int64_t n, const float* temperature, const int32_t* top_k, const float* top_p,             \
                         const float* min_p, const int32_t* seed, const int32_t* position, int32_t* ids, int64_t threads) {            \
    return sample<T>(x, rows, n, temperature, top_k, top_p, min_p, seed, position, ids, threads);                                                    \
  }                                                                                                                                    \
  int evener_mask_##S(T* x, int64_t rows, int64_t n, const uint32_t* words, int64_t threads) { return mask<T>(x, rows, n, words, threads); }
EXPORT(float, f32)
EXPORT(bf16, bf16)

int64_t evener_largest_scratch(int64_t rows, int64_t columns, int64_t threads) { return SearchRoom(rows, columns, threads).total; }
int evener_largest(const Screened* s, const float* x, const float* norm, const bf16* bias, float eps, float offset, float certainty, int64_t few,
                   int32_t* id, int64_t* candidates, int64_t threads, float factor, float cap) {
  return largest(s, x, norm, bias, eps, offset, certainty, few, id, candidates, threads, factor, cap, scratch());
}
int evener_code_rows(const Screened* s, const bf16* from, int64_t threads) {
  PASS(check_screened(s, threads));
  return code_rows(*s, from, threads);
}

Aside* evener_aside_make() { return Aside::make(); }
int evener_aside_end(Aside* aside, int64_t* nanoseconds) {
  PASS(check_pointer("the thread", aside));
  PASS(check_pointer("the time", nanoseconds));
  return aside->end(nanoseconds);
}
void evener_aside_close(Aside* aside) { aside->close(); }

int64_t evener_tile_bytes(int64_t kind, int64_t columns) {
  int64_t n = 0;
  with_block_format(kind, [&](auto form) { n = decltype(form)::tile_bytes(columns); });
  return n;
}
int evener_pack(int64_t kind, const uint8_t* from, int64_t row_bytes, int64_t rows, int64_t columns, char* to, int64_t threads) {
  PASS(check_pack(kind, from, row_bytes, rows, columns, to, threads));
  with_block_format(kind, [&](auto form) {
    typedef decltype(form) F;
    Pool::each(threads, (rows + LANES - 1) / LANES,
               [&](long t) { pack_tile<F>(from, row_bytes, rows, columns, t * LANES, to + t * F::tile_bytes(columns)); });
  });
  return DONE;
}

// Sets the step's items and parts; its plan has ``room`` for so many items.
int evener_plan(const Geometry* g, Step* s, int64_t room) {
  PASS(check_pointer("the geometry", g));
  PASS(check_pointer("the step", s));
  PASS(check_heads(*g));
  PASS(check_size("the number of tokens", s->tokens, 0, MOST_TOKENS));
  PASS(check_size("the number of columns of the block table", s->table_columns, 0, MOST_TOKENS));
  PASS(check_requests(s->query_start, s->kv_lens, s->requests, s->tokens, s->table_columns * g->block));
  PASS(check_pointer("the plan", s->plan));
  s->checked = 0;
  s->items = make_plan(*g, s->query_start, s->kv_lens, s->requests, (Item*)s->plan, room, &s->parts);
  REQUIRE(s->items >= 0, "the plan has no room for more than %ld items", (long)room);
  return DONE;
}

const char* evener_problem() { return problem_text(); }

// The error with which the system refuses the tile registers that these kernels were compiled for; else 0.
int evener_tiles_error() {
#ifdef EVENER_AMX
  return tiles_error();
#else
  return 0;
#endif
}
}
