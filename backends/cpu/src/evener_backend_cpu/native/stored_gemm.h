// y = x wᵀ over a row-major weight [rows, columns] of one byte an element (float8 or int8), read as it is stored, with float32 scales that
// multiply: one for each block of ``high`` rows by ``wide`` columns. An element becomes T without rounding; the products of a block are
// summed in float32 and then scaled.
#pragma once
#include "gemm.h"

// Of Segment::kind, beside those of quant_blocks.h.
enum StoredKind { STORED_E4M3 = 64, STORED_E5M2, STORED_INT8 };

// The scale of element (n, k) is scale[n / high * blocks + k / wide].
struct Stored {
  const uint8_t* weight;
  const float* scale;
  int64_t high, wide, blocks;
};

// Sixteen bytes as integers. GCC converts vectors of bytes one by one.
INLINE u16x bytes_of(const uint8_t* p) {
#if defined(EVENER_LANES256)
  __m128i b = _mm_loadu_si128((const __m128i*)p);
  return {(u16x::Half)_mm256_cvtepu8_epi32(b), (u16x::Half)_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))};
#else
  u16x u;
  for (int i = 0; i < 16; i++) u[i] = p[i];
  return u;
#endif
}

// Sixteen elements in float32. A float8 number below the normal ones is its integer times a power of two.
template <int KIND> INLINE v16 stored16(const uint8_t* p) {
#if defined(__AVX512F__)
  __m128i b = _mm_loadu_si128((const __m128i*)p);
  if (KIND == STORED_INT8) return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
  u16x u = (u16x)_mm512_cvtepu8_epi32(b);
#else
  u16x u = bytes_of(p);
  if (KIND == STORED_INT8) return floats_of((i16x)(u << 24) >> 24);
#endif
  u16x sign = (u & 0x80u) << 24, rest = u & 0x7fu;
  const int mantissa = KIND == STORED_E4M3 ? 3 : 2;
  const uint32_t bias = KIND == STORED_E4M3 ? 120 : 112, last = KIND == STORED_E4M3 ? 0x7e : 0x7b;
  u16x normal = (rest << (23 - mantissa)) + (bias << 23);
  v16 small = floats_of((i16x)rest) * (KIND == STORED_E4M3 ? 0x1p-9f : 0x1p-16f);
  u16x is_small = (u16x)(rest < (1u << mantissa)), above = (u16x)(rest > last);
  u16x bits = (normal & ~is_small) | ((u16x)small & is_small);
  u16x beyond = KIND == STORED_E5M2 ? (u16x)(rest == 0x7cu) & 0x7f800000u : u16x{};  // infinity
  beyond |= (u16x)(rest > (KIND == STORED_E5M2 ? 0x7cu : 0x7eu)) & 0x7fc00000u;
  return (v16)((bits & ~above) | beyond | sign);
}

// As many elements as Lanes<T> reads at a time, as it reads them.
template <int KIND> INLINE v16 stored_lanes(const uint8_t* p, float*) { return stored16<KIND>(p); }
template <int KIND> INLINE v16 stored_lanes(const uint8_t* p, bf16*) {
#ifdef EVENER_DPBF16
  if (KIND != STORED_INT8) {
    const int mantissa = KIND == STORED_E4M3 ? 3 : 2;
    const int top = KIND == STORED_E4M3 ? 0x7e : 0x7b, infinite = KIND == STORED_E4M3 ? 0x100 : 0x7c;
    __m512i u = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)), rest = _mm512_and_si512(u, _mm512_set1_epi16(0x7f));
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(rest, 7 - mantissa), _mm512_set1_epi16((KIND == STORED_E4M3 ? 120 : 112) << 7));
    // bf16 of 0 to 7 times 2^-9, and of 0 to 3 times 2^-16
    const __m512i small = KIND == STORED_E4M3 ? _mm512_set4_epi32(0x3c603c40, 0x3c203c00, 0x3bc03b80, 0x3b000000)
                                              : _mm512_set4_epi32(0, 0, 0x38403800, 0x37800000);
    bits = _mm512_mask_permutexvar_epi16(bits, _mm512_cmplt_epu16_mask(rest, _mm512_set1_epi16(1 << mantissa)), rest, small);
    bits = _mm512_mask_mov_epi16(bits, _mm512_cmpgt_epu16_mask(rest, _mm512_set1_epi16(top)), _mm512_set1_epi16(0x7fc0));
    if (KIND == STORED_E5M2) bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epu16_mask(rest, _mm512_set1_epi16(infinite)), _mm512_set1_epi16(0x7f80));
    return (v16)_mm512_or_si512(bits, _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), u), 8));
  }
  return (v16)(__m512)_mm512_cvtne2ps_pbh((__m512)stored16<KIND>(p + 16), (__m512)stored16<KIND>(p));
#else
  bf16 both[32];
  store(both, stored16<KIND>(p)), store(both + 16, stored16<KIND>(p + 16));
  return Lanes<bf16>::raw(both);
#endif
}

// Four rows of weights: as stored, and already converted. Both give the same numbers.
template <class T, int KIND> struct BytesRows {
  const uint8_t* row[4];
  MEMBER v16 whole(int i, long k) const { return stored_lanes<KIND>(row[i] + k, (T*)nullptr); }
  MEMBER v16 tail(int i, long k, long n) const {
    uint8_t some[32] = {};  // 0 is zero in every format
    memcpy(some, row[i] + k, n);
    return stored_lanes<KIND>(some, (T*)nullptr);
  }
};
template <class T> INLINE v16 first_lanes(const T* p, long n) {
  T some[Lanes<T>::step];
  memset((void*)some, 0, sizeof some);
  memcpy((void*)some, p, n * sizeof(T));
  return Lanes<T>::raw(some);
}
template <class T> struct ConvertedRows {
  const T* row[4];
  MEMBER v16 whole(int i, long k) const { return Lanes<T>::raw(row[i] + k); }
  MEMBER v16 tail(int i, long k, long n) const { return first_lanes(row[i] + k, n); }
};

// Rows FIRST to FIRST + COUNT of four, with MR rows of x. Every sum takes the same steps, whatever the tile.
template <class T, int MR, int COUNT, class W>
INLINE void stored_tile(const W& w, int first, const T* const x[MR], const float* const scale[4], long wide, long K, v16 total[4][MR]) {
  constexpr int S = Lanes<T>::step;
  for (int i = 0; i < COUNT; i++)
    for (int j = 0; j < MR; j++) total[first + i][j] = splat(0.f);
  long block = 0;
  for (long k0 = 0; k0 < K; block++) {
    long end = K - k0 > wide ? k0 + wide : K, k = k0;
    v16 a[COUNT][MR];
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 4
      for (int j = 0; j < MR; j++) a[i][j] = splat(0.f);
    for (; k + S <= end; k += S) {
      v16 y[MR];
#pragma GCC unroll 4
      for (int j = 0; j < MR; j++) y[j] = Lanes<T>::raw(x[j] + k);
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) {
        v16 one = w.whole(first + i, k);
#pragma GCC unroll 4
        for (int j = 0; j < MR; j++) Lanes<T>::dot(a[i][j], one, y[j]);
      }
    }
    if (k < end)
      for (int i = 0; i < COUNT; i++) {
        v16 one = w.tail(first + i, k, end - k);
        for (int j = 0; j < MR; j++) Lanes<T>::dot(a[i][j], one, first_lanes(x[j] + k, end - k));
      }
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 4
      for (int j = 0; j < MR; j++) total[first + i][j] = add_product(total[first + i][j], a[i][j], splat(scale[first + i][block]));
    k0 = end;
  }
}

// Rows that are read from memory come one after another (see ``tile`` in gemm.h), converted ones all at once. Compiled once for each T,
// whatever the outputs' type.
template <class T, int MR, bool ROW_BY_ROW, class W>
__attribute__((noinline)) void stored_sums(const W& w, const float* const scale[4], long wide, const T* const x[MR], long K, v4 sum[MR]) {
  v16 total[4][MR];
  if (ROW_BY_ROW)
    for (int i = 0; i < 4; i++) stored_tile<T, MR, 1>(w, i, x, scale, wide, K, total);
  else stored_tile<T, MR, 4>(w, 0, x, scale, wide, K, total);
  for (int j = 0; j < MR; j++) sum[j] = sums(total[0][j], total[1][j], total[2][j], total[3][j]);
}

template <class T, class O, int MR, bool ROW_BY_ROW, class W>
INLINE void put_stored(const W& w, const float* const scale[4], long wide, const T* x, Rows in, long K, const T* bias, O* y, long ldy, Rows out,
                       int count) {
  const T* at[MR];
  v4 sum[MR];
  for (int j = 0; j < MR; j++) at[j] = x + in[j] * K;
  stored_sums<T, MR, ROW_BY_ROW>(w, scale, wide, at, K, sum);
  for (int j = 0; j < MR; j++) put_sums(sum[j], bias, y + out[j] * ldy, count);
}

template <class T, int KIND> __attribute__((noinline)) void convert_row(const uint8_t* from, long K, T* to) {
  constexpr int S = Lanes<T>::step;
  long k = 0;
  for (; k + S <= K; k += S) {
    v16 v = stored_lanes<KIND>(from + k, (T*)nullptr);
    store_bits(to + k, v);
  }
  if (k == K) return;
  uint8_t some[32] = {};
  memcpy(some, from + k, K - k);
  v16 v = stored_lanes<KIND>(some, (T*)nullptr);
  memcpy((void*)(to + k), &v, (K - k) * sizeof(T));
}

// As ``gemm``. For more than four rows of x, four rows of weights are converted once for a panel of them,
// which stays in the cache.
template <int KIND, class T, class O>
__attribute__((noinline)) void stored_gemm(const Stored& p, const T* x, long M, long n0, long n1, long K, const T* bias, O* y, long ldy, Rows in,
                                           Rows out) {
  static thread_local Scratch memory;
  T* room = M > 4 ? (T*)memory.reserve(4 * K * sizeof(T)) : nullptr;  // without: converted again for every four rows of x
  long panel = 393216 / (K * (long)sizeof(T)) & ~3L;
  if (panel < 32) panel = 32;
#ifdef EVENER_LANES256
  if (panel > PANEL_TOKENS) panel = PANEL_TOKENS;
#endif
  for (long m0 = 0; m0 < M; m0 += panel)
  for (long n = n0; n < n1; n += 4) {
    int count = n1 - n < 4 ? (int)(n1 - n) : 4;
    BytesRows<T, KIND> bytes;
    ConvertedRows<T> converted;
    const float* scale[4];
    for (int i = 0; i < 4; i++) {
      long row = n + (i < count ? i : count - 1);
      bytes.row[i] = p.weight + row * K, scale[i] = p.scale + row / p.high * p.blocks;
      converted.row[i] = room + i * K;
      if (room) convert_row<T, KIND>(bytes.row[i], K, room + i * K);
    }
    const T* b = bias ? bias + (n - n0) : nullptr;
    O* to = y + (n - n0);
    long m = m0, m1 = M - m0 > panel ? m0 + panel : M;
#ifdef EVENER_LANES256
    if (room) {
      const T* at[PANEL_TOKENS];
      v4 sum[PANEL_TOKENS];
      for (long i = 0; i < m1 - m; i++) at[i] = x + in[m + i] * K;
      scaled_panel_sums(converted.row, scale, p.wide, at, m1 - m, K, sum);
      for (long i = 0; i < m1 - m; i++) put_sums(sum[i], b, to + out[m + i] * ldy, count);
      continue;
    }
#endif
    auto rows = [&](auto R) {
      constexpr int MR = decltype(R)::value;
      if (room) put_stored<T, O, MR, false>(converted, scale, p.wide, x, in.from(m), K, b, to, ldy, out.from(m), count);
      else put_stored<T, O, MR, true>(bytes, scale, p.wide, x, in.from(m), K, b, to, ldy, out.from(m), count);
      m += MR;
    };
    while (m + 4 <= m1) rows(std::integral_constant<int, 4>());
    if (m1 - m == 3) rows(std::integral_constant<int, 3>());
    if (m1 - m == 2) rows(std::integral_constant<int, 2>());
    if (m1 - m == 1) rows(std::integral_constant<int, 1>());
  }
}

// Calls f(std::integral_constant<int, kind>()).
template <class F> INLINE bool with_stored_kind(long kind, F f) {
  switch (kind) {
    case STORED_E4M3: f(std::integral_constant<int, STORED_E4M3>()); return true;
    case STORED_E5M2: f(std::integral_constant<int, STORED_E5M2>()); return true;
    case STORED_INT8: f(std::integral_constant<int, STORED_INT8>()); return true;
  }
  return false;
}
