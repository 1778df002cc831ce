// y = x wᵀ over a plain row-major weight [rows, columns]. Nothing is packed, so one matrix in memory serves every token count, and a
// tied embedding is stored once. A tile is 4 weight rows by up to 4 tokens; each sum runs along the columns.
#pragma once
#include "ahead.h"
#include "amx.h"
#include "panels.h"
#include "simd.h"
#ifdef EVENER_LANES256
#include "corners.h"
#endif

// Rows that a product reads: those with index at[0], at[1], …, or consecutive rows from ``first`` on.
struct Rows {
  const int32_t* at = nullptr;
  long first = 0;
  MEMBER long operator[](long m) const { return at ? at[m] : first + m; }
  MEMBER Rows from(long m) const { return at ? Rows{at + m, 0} : Rows{nullptr, first + m}; }
};

// ``ROW_BY_ROW``: one weight row after another, as they lie in memory; else all four at once, for which a row of x is loaded only once. Read
// from memory, four rows at a time come half as fast as one (Zen 4: 10 GB/s a thread instead of 20); the sums are the same.
// Inlined with 512-bit lanes: a call that keeps the sums in memory costs 15 % of a prompt. With two registers for sixteen lanes other
// tiles serve most products, and one copy for each T compiles in half the time.
template <class T, int MR, bool ROW_BY_ROW>
#ifdef EVENER_LANES256
__attribute__((noinline))
#else
INLINE
#endif
void tile(const T* const w[4], const T* const x[MR], long K, v4* out, Ahead* ahead = nullptr) {
  constexpr int S = Lanes<T>::step;
  v16 a[4][MR];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < MR; j++) a[i][j] = splat(0.f);
  long k = 0;
  if (ROW_BY_ROW) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const char* later = ahead->take(K * (long)sizeof(T), (const char*)w[i]);
      for (k = 0; k + S <= K; k += S) {
        v16 one = Lanes<T>::raw(w[i] + k);
        __builtin_prefetch(later + k * sizeof(T), 0, 2);
#pragma GCC unroll 4
        for (int j = 0; j < MR; j++) Lanes<T>::dot(a[i][j], one, Lanes<T>::raw(x[j] + k));
      }
    }
  }
  for (; k + S <= K; k += S) {
    v16 w0 = Lanes<T>::raw(w[0] + k), w1 = Lanes<T>::raw(w[1] + k), w2 = Lanes<T>::raw(w[2] + k), w3 = Lanes<T>::raw(w[3] + k);
#pragma GCC unroll 4
    for (int j = 0; j < MR; j++) {
      v16 y = Lanes<T>::raw(x[j] + k);
      Lanes<T>::dot(a[0][j], w0, y);
      Lanes<T>::dot(a[1][j], w1, y);
      Lanes<T>::dot(a[2][j], w2, y);
      Lanes<T>::dot(a[3][j], w3, y);
    }
  }
  if (k < K) {
    T tail[4 + MR][S];
    memset((void*)tail, 0, sizeof tail);
    for (int i = 0; i < 4; i++) memcpy((void*)tail[i], w[i] + k, (K - k) * sizeof(T));
    for (int j = 0; j < MR; j++) memcpy((void*)tail[4 + j], x[j] + k, (K - k) * sizeof(T));
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < MR; j++) Lanes<T>::dot(a[i][j], Lanes<T>::raw(tail[i]), Lanes<T>::raw(tail[4 + j]));
  }
#pragma GCC unroll 4
  for (int j = 0; j < MR; j++) out[j] = sums(a[0][j], a[1][j], a[2][j], a[3][j]);
}

template <class T, class O, int MR, bool ROW_BY_ROW = false>
INLINE void put_tile(const T* const w[4], const T* x, long ldx, Rows in, long K, const T* bias, O* y, long ldy, Rows out, int count,
                     Ahead* ahead = nullptr) {
  v4 sum[MR];
  const T* at[MR];
#pragma GCC unroll 4
  for (int j = 0; j < MR; j++) at[j] = x + in[j] * ldx;
  tile<T, MR, ROW_BY_ROW>(w, at, K, sum, ahead);
  for (int j = 0; j < MR; j++) put_sums(sum[j], bias, y + out[j] * ldy, count);
}

// Prefetches the data of the next tile during this one, spread over its steps.
struct Prefetcher {
  const char *p, *end;
  long each;
  Prefetcher(const void* from, long bytes, long steps) : p((const char*)from), end(p + bytes), each((bytes / 64 + steps - 1) / steps * 64) {}
  MEMBER void step() {
    for (const char* to = p + each < end ? p + each : end; p < to; p += 64) __builtin_prefetch(p, 0, 2);
  }
};

// y[out[m], n - n0] = x[in[m]] · w[n] for weight rows n0 <= n < n1; ``w`` and ``bias`` point to row 0, ``y`` to column n0. ``next``: has these
// rows, and what is used after them.
template <class T, class O>
__attribute__((noinline)) void gemm(const T* x, long ldx, long M, const T* w, long n0, long n1, long K, const T* bias, O* y, long ldy,
                                    Rows in = {}, Rows out = {}, Ahead* next = nullptr) {
  Ahead own(Span{(const char*)(w + n0 * K), (const char*)(w + n1 * K)});
#ifdef EVENER_AMX
  // A product that has no memory for its copies goes on below: its bits differ, as on a processor without tiles.
  if constexpr (sizeof(T) == 2)
    if (M > 0 && !tiles_error() && (M > 16 ? many_rows<O>(x, ldx, M, w, n0, n1, K, bias, y, ldy, in, out)
                                           : few_rows<O>(x, ldx, M, w, n0, n1, K, bias, y, ldy, in, out, next ? *next : own)))
      return;
#endif
#ifdef EVENER_PANELS
  // Without memory for its copies a product goes on below, with the same bits.
  if constexpr (in_panels<T>)
    if (M >= PANEL_LEAST && panel_product<O>(x, ldx, M, w, n0, n1, K, bias, y, ldy, in, out)) return;
#endif
  long panel = 393216 / (K * (long)sizeof(T)) & ~3L;
  if (panel < 32) panel = 32;
#ifdef EVENER_LANES256
  if (panel > PANEL_TOKENS) panel = PANEL_TOKENS;
  const T* at[PANEL_TOKENS];
  v4 sum[PANEL_TOKENS];
#endif
  for (long m0 = 0; m0 < M; m0 += panel) {
    long m1 = m0 + panel < M ? m0 + panel : M;
#ifdef EVENER_LANES256
    for (long m = m0; m < m1; m++) at[m - m0] = x + in[m] * ldx;
#endif
    for (long n = n0; n < n1; n += 4) {
      Prefetcher ahead(w + (n + 4) * K, m0 ? 0 : 4 * K * sizeof(T), M / 4 + 1);
      int count = n1 - n < 4 ? (int)(n1 - n) : 4;
      const T* rows[4];
      for (int i = 0; i < 4; i++) rows[i] = w + (n + (i < count ? i : count - 1)) * K;
      const T* b = bias ? bias + n : nullptr;
      O* to = y + n - n0;
      long m = m0;
      if (M <= 4) {
        if (M == 4) put_tile<T, O, 4, true>(rows, x, ldx, in, K, b, to, ldy, out, count, next ? next : &own);
        if (M == 3) put_tile<T, O, 3, true>(rows, x, ldx, in, K, b, to, ldy, out, count, next ? next : &own);
        if (M == 2) put_tile<T, O, 2, true>(rows, x, ldx, in, K, b, to, ldy, out, count, next ? next : &own);
        if (M == 1) put_tile<T, O, 1, true>(rows, x, ldx, in, K, b, to, ldy, out, count, next ? next : &own);
        continue;
      }
#ifdef EVENER_LANES256
      panel_sums(rows, at, m1 - m0, K, sum, [&] { ahead.step(); });
      for (; m < m1; m++) put_sums(sum[m - m0], b, to + out[m] * ldy, count);
      continue;
#endif
      for (; m + 4 <= m1; m += 4) {
        ahead.step();
        put_tile<T, O, 4>(rows, x, ldx, in.from(m), K, b, to, ldy, out.from(m), count);
      }
      if (m1 - m == 3) put_tile<T, O, 3>(rows, x, ldx, in.from(m), K, b, to, ldy, out.from(m), count);
      if (m1 - m == 2) put_tile<T, O, 2>(rows, x, ldx, in.from(m), K, b, to, ldy, out.from(m), count);
      if (m1 - m == 1) put_tile<T, O, 1>(rows, x, ldx, in.from(m), K, b, to, ldy, out.from(m), count);
    }
  }
}
