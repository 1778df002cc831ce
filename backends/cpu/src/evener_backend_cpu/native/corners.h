// Products of four rows of weights with a panel of rows of x, for the 16 registers of AVX2. A corner is 2 x 4 of them, and half the lanes: its
// eight accumulators stay in registers. Columns come in blocks, so that the four rows stay in the first cache. A sum takes the same
// steps as in ``tile`` of gemm.h.
#pragma once
#include "simd.h"

static const int CORNER_ROWS = 2, CORNER_TOKENS = 4, PANEL_TOKENS = 96;

// Eight lanes of what Lanes<T>::dot multiplies at once, in its order.
template <class T> struct HalfLanes;
template <> struct HalfLanes<float> {
  static constexpr int parts = 1;
  template <int PART> static MEMBER __m256 part(const float* p) { return _mm256_loadu_ps(p); }
};
template <> struct HalfLanes<bf16> {
  static constexpr int parts = 2;
  template <int PART> static MEMBER __m256 part(const bf16* p) {
    __m256i both = _mm256_loadu_si256((const __m256i*)p);
    return (__m256)(PART ? _mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(both, 16));
  }
};

template <class T, int C, int PART> INLINE void add_part(const T* const w[CORNER_ROWS], const T* const x[C], long k, __m256 (&a)[CORNER_ROWS][C]) {
  __m256 y[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) y[c] = HalfLanes<T>::template part<PART>(x[c] + k);
#pragma GCC unroll 4
  for (int i = 0; i < CORNER_ROWS; i++) {
    __m256 one = HalfLanes<T>::template part<PART>(w[i] + k);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) a[i][c] = _mm256_fmadd_ps(one, y[c], a[i][c]);
  }
}

// sum[c][i] += the products of w[i] and x[c] over K columns, a multiple of Lanes<T>::step.
template <class T, int C>
__attribute__((noinline, noclone)) void corner(const T* const* rows, const T* const* tokens, long first, long K, v16 (*sum)[4]) {
  const T *w[CORNER_ROWS], *x[C];
  for (int i = 0; i < CORNER_ROWS; i++) w[i] = rows[i] + first;
  for (int c = 0; c < C; c++) x[c] = tokens[c] + first;
  for (int half = 0; half < 2; half++) {
    __m256 a[CORNER_ROWS][C];
#pragma GCC unroll 4
    for (int i = 0; i < CORNER_ROWS; i++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) a[i][c] = _mm256_loadu_ps((const float*)&sum[c][i] + 8 * half);
    for (long k = half * Lanes<T>::step / 2; k < K; k += Lanes<T>::step) {
      add_part<T, C, 0>(w, x, k, a);
      if (HalfLanes<T>::parts == 2) add_part<T, C, HalfLanes<T>::parts - 1>(w, x, k, a);
    }
#pragma GCC unroll 4
    for (int i = 0; i < CORNER_ROWS; i++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) _mm256_storeu_ps((float*)&sum[c][i] + 8 * half, a[i][c]);
  }
}
template <class T> INLINE void any_corner(const T* const* w, const T* const* x, long count, long first, long K, v16 (*sum)[4]) {
  if (count >= 4) corner<T, 4>(w, x, first, K, sum);
  if (count == 3) corner<T, 3>(w, x, first, K, sum);
  if (count == 2) corner<T, 2>(w, x, first, K, sum);
  if (count == 1) corner<T, 1>(w, x, first, K, sum);
}

// sum[m][i] += the products of w[i] and x[m] over the columns ``first`` to ``end``. ``before`` is called once for each corner.
template <class T, class Before>
INLINE void add_products(const T* const w[4], const T* const* x, long M, long first, long end, v16 (*sum)[4], Before before) {
  constexpr long S = Lanes<T>::step, block = 2048 / sizeof(T);
  long whole = first + (end - first) / S * S, left = end - whole;
  for (long k = first; k < whole; k += block)
    for (long m = 0; m < M; m += CORNER_TOKENS) {
      before();
      for (int i = 0; i < 4; i += CORNER_ROWS) any_corner<T>(w + i, x + m, M - m, k, whole - k < block ? whole - k : block, (v16(*)[4])&sum[m][i]);
    }
  if (!left) return;
  T tail[4 + CORNER_TOKENS][S];
  const T* at[4 + CORNER_TOKENS];
  memset((void*)tail, 0, sizeof tail);
  for (int i = 0; i < 4 + CORNER_TOKENS; i++) at[i] = tail[i];
  for (int i = 0; i < 4; i++) memcpy((void*)tail[i], w[i] + whole, left * sizeof(T));
  for (long m = 0; m < M; m += CORNER_TOKENS) {
    for (int c = 0; c < CORNER_TOKENS && m + c < M; c++) memcpy((void*)tail[4 + c], x[m + c] + whole, left * sizeof(T));
    for (int i = 0; i < 4; i += CORNER_ROWS) any_corner<T>(at + i, at + 4, M - m, 0, S, (v16(*)[4])&sum[m][i]);
  }
}

// out[m] = the products of w[0:4] and x[m], for M <= PANEL_TOKENS.
template <class T, class Before>
__attribute__((noinline)) void panel_sums(const T* const w[4], const T* const* x, long M, long K, v4* out, Before before) {
  v16 sum[PANEL_TOKENS][4];
  memset((void*)sum, 0, M * sizeof sum[0]);
  add_products(w, x, M, 0, K, sum, before);
  for (long m = 0; m < M; m++) out[m] = sums(sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
}

// As panel_sums, with the products of ``wide`` columns times their scale.
template <class T>
__attribute__((noinline)) void scaled_panel_sums(const T* const w[4], const float* const scale[4], long wide, const T* const* x, long M, long K, v4* out) {
  v16 sum[PANEL_TOKENS][4], total[PANEL_TOKENS][4];
  memset((void*)total, 0, M * sizeof total[0]);
  long block = 0;
  for (long k = 0, end; k < K; k = end, block++) {
    end = K - k > wide ? k + wide : K;
    memset((void*)sum, 0, M * sizeof sum[0]);
    add_products(w, x, M, k, end, sum, [] {});
    for (long m = 0; m < M; m++)
      for (int i = 0; i < 4; i++) total[m][i] = add_product(total[m][i], sum[m][i], scale[i][block]);
  }
  for (long m = 0; m < M; m++) out[m] = sums(total[m][0], total[m][1], total[m][2], total[m][3]);
}
