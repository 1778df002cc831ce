// Panels for the 16 registers of AVX2 (see panels.h). A tile is three rows of x times four rows of weights and half the lanes: twelve sums, the
// three rows and one row of weights fill the registers. A panel has each half of its rows side by side, eight lanes of one row after eight of
// the other, so that a tile reads two streams from front to back.
#pragma once
#include "scratch.h"
#include "simd.h"

static const int PANEL_ROWS = 3, PANEL_QUAD = 4;
static const int PANEL_WEIGHTS = 96;  // at most
// Rows of gate and up that a thread multiplies before it applies the activation: two panels and both results stay in the second cache.
static const long GATE_ROWS = 64;

template <class T> constexpr bool in_panels = true;

// ``count`` columns of one of R rows, then zeros up to ``padded``, a multiple of Lanes<T>::step, in the order in which Lanes<T>::dot takes them.
// ``to``: the place of the row's first eight lanes.
template <int R> INLINE void widen_among(const float* from, long count, long padded, float* to) {
  const long half = padded / 2 * R;
  for (long k = 0; k < padded; k += 16, to += 8 * R) {
    float tail[16] = {};
    const float* at = from + k;
    if (count - k < 16) {
      if (count > k) memcpy(tail, at, (count - k) * sizeof(float));
      at = tail;
    }
    _mm256_storeu_ps(to, _mm256_loadu_ps(at));
    _mm256_storeu_ps(to + half, _mm256_loadu_ps(at + 8));
  }
}
template <int R> INLINE void widen_among(const bf16* from, long count, long padded, float* to) {
  const long half = padded / 2 * R;
  bf16 tail[32];
  for (long k = 0; k < padded; k += 32, to += 16 * R) {
    const bf16* at = from + k;
    if (count - k < 32) {
      memset((void*)tail, 0, sizeof tail);
      if (count > k) memcpy((void*)tail, at, (count - k) * sizeof(bf16));
      at = tail;
    }
    u16x both = (u16x)load_bits(at);
    v16 even = (v16)(both << 16), odd = (v16)(both & 0xffff0000u);
    _mm256_storeu_ps(to, (__m256)even.low);
    _mm256_storeu_ps(to + half, (__m256)even.high);
    _mm256_storeu_ps(to + 8 * R, (__m256)odd.low);
    _mm256_storeu_ps(to + 8 * R + half, (__m256)odd.high);
  }
}
// Rows of x in tiles of three, the last of one or two.
template <class T, class Row> INLINE void widen_tiles(Row row, long rows, long count, long padded, float* to) {
  for (long m = 0; m < rows; m += PANEL_ROWS, to += PANEL_ROWS * padded) {
    const long left = rows - m;
    for (long r = 0; r < PANEL_ROWS && r < left; r++) {
      if (left >= 3) widen_among<3>(row(m + r), count, padded, to + 8 * r);
      if (left == 2) widen_among<2>(row(m + r), count, padded, to + 8 * r);
      if (left == 1) widen_among<1>(row(m + r), count, padded, to + 8 * r);
    }
  }
}

// Keeps GCC from reading memory in each of the products that use it: of 16 reads for 12 products the tile would take a third longer.
INLINE __m256 in_register(const float* from) {
  __m256 x = _mm256_loadu_ps(from);
  __asm__("" : "+x"(x));
  return x;
}

// The sums of four vectors' lanes, where each has the sums of lanes i and i + 8; the same bits as ``sums`` of two_registers.h.
INLINE __m128 sums_of_halves(__m256 a, __m256 b, __m256 c, __m256 d) {
  __m256 ac = _mm256_permute2f128_ps(a, c, 0x20) + _mm256_permute2f128_ps(a, c, 0x31);
  __m256 bd = _mm256_permute2f128_ps(b, d, 0x20) + _mm256_permute2f128_ps(b, d, 0x31);
  __m256 pairs = _mm256_unpacklo_ps(ac, bd) + _mm256_unpackhi_ps(ac, bd);
  __m128 low = _mm256_castps256_ps128(pairs), high = _mm256_extractf128_ps(pairs, 1);
  return _mm_movelh_ps(low, high) + _mm_movehl_ps(high, low);
}

// The products of four rows of weights and R of x over ``columns`` columns, from zero if they are the first, otherwise added to ``sum``; it has
// eight lanes for each half, row and weight. After the last columns the sums of all lanes are in ``line``, rows of it ``ld`` apart.
template <int R>
static __attribute__((noinline)) void panel_tile(const float* w, const float* x, long columns, float* sum, bool first, bool last, float* line, long ld) {
  __m256 a[R][PANEL_QUAD];
  const long half = R * PANEL_QUAD * 8;
  for (int part = 0; part < 2; part++) {
    float* at = sum + part * half;
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < PANEL_QUAD; i++) a[r][i] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(at + (r * PANEL_QUAD + i) * 8);
#pragma GCC unroll 4
    for (long k = 0; k < columns; k += 16, w += 8 * PANEL_QUAD, x += 8 * R) {
      __m256 y[R];
#pragma GCC unroll 3
      for (int r = 0; r < R; r++) y[r] = in_register(x + r * 8);
#pragma GCC unroll 4
      for (int i = 0; i < PANEL_QUAD; i++) {
        __m256 one = in_register(w + i * 8);
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) a[r][i] = _mm256_fmadd_ps(one, y[r], a[r][i]);
      }
    }
    if (part && last) break;
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < PANEL_QUAD; i++) _mm256_storeu_ps(at + (r * PANEL_QUAD + i) * 8, a[r][i]);
  }
  if (!last) return;
#pragma GCC unroll 3
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int i = 0; i < PANEL_QUAD; i++) a[r][i] = _mm256_loadu_ps(sum + (r * PANEL_QUAD + i) * 8) + a[r][i];
    _mm_storeu_ps(line + r * ld, sums_of_halves(a[r][0], a[r][1], a[r][2], a[r][3]));
  }
}

// As ``gemm`` of gemm.h; false if there is no memory.
template <class O, class T, class Index>
static __attribute__((noinline)) bool panel_product(const T* x, long ldx, long M, const T* w, long n0, long n1, long K, const T* bias, O* y, long ldy, Index in,
                                                    Index out) {
  if (n1 <= n0) return true;
  // One block of columns up to 1,536; more are in equal blocks of at most 1,024, whose sums are kept in memory.
  constexpr long S = Lanes<T>::step, whole = 1536, longest = 1024, first_cache = 20480, second_cache = 294912;
  const long padded = (K + S - 1) / S * S, blocks = padded <= whole ? 1 : (padded + longest - 1) / longest;
  const long wide = (padded / S + blocks - 1) / blocks * S;
  // So many rows of x that a block of theirs stays in the first cache; the weights' panel and the sums of ``most`` rows stay in the second one.
  long group = first_cache / (wide * 4) / PANEL_ROWS * PANEL_ROWS;
  if (group < PANEL_ROWS) group = PANEL_ROWS;
  const long most = 48 / group ? 48 / group * group : group;
  // Equal panels.
  long fits = second_cache / (wide * 4) / PANEL_QUAD * PANEL_QUAD;
  if (fits > PANEL_WEIGHTS) fits = PANEL_WEIGHTS;
  const long panels = (n1 - n0 + fits - 1) / fits, many = ((n1 - n0 + panels - 1) / panels + PANEL_QUAD - 1) / PANEL_QUAD * PANEL_QUAD;
  static thread_local Scratch room;
  const long slots = blocks > 1 ? most * many * 16 : PANEL_ROWS * PANEL_QUAD * 16;
  float* panel = (float*)room.reserve((many * wide + group * wide + slots + most * many) * 4);
  if (!panel) return false;
  float *rows = panel + many * wide, *sum = rows + group * wide, *line = sum + slots;
  for (long n = n0; n < n1; n += many) {
    const long count = n1 - n < many ? n1 - n : many, quads = (count + PANEL_QUAD - 1) / PANEL_QUAD;
    for (long m0 = 0; m0 < M; m0 += most) {
      const long some = M - m0 < most ? M - m0 : most;
      for (long k = 0; k < padded; k += wide) {
        const bool first = k == 0, last = k + wide >= padded;
        const long here = last ? padded - k : wide, given = K - k < here ? K - k : here;
        if (blocks > 1 || m0 == 0)
          for (long i = 0; i < quads * PANEL_QUAD; i++)
            widen_among<PANEL_QUAD>(w + (n + (i < count ? i : 0)) * K + k, i < count ? given : 0, here,
                                    panel + i / PANEL_QUAD * PANEL_QUAD * here + i % PANEL_QUAD * 8);
        // What is widened next: the same rows' next columns, their first ones for further rows of x, or the next rows.
        const bool again = last && m0 + most < M, over = last && !again;
        const long least = again && blocks == 1 ? 0 : over ? n1 - n - count : count, from = last ? 0 : k + wide;
        NextRows next(w + (over ? n + count : n) * K + from, K * (long)sizeof(T), least < many ? least : many,
                      (K - from < wide ? K - from : wide) * (long)sizeof(T), (some + group - 1) / group * quads);
        for (long g = 0; g < some; g += group) {
          const long these = some - g < group ? some - g : group, after = some - g - these < group ? some - g - these : group;
          auto row = [&](long m) { return x + in[m0 + g + m] * ldx + k; };
          widen_tiles<T>(row, these, given, here, rows);
          for (long q = 0; q < quads; q++) {
            next.step();
            for (long m = q; m < after; m += quads)
              for (long b = 0; b < given * (long)sizeof(T); b += 64) __builtin_prefetch((const char*)row(these + m) + b, 0, 2);
            const float* four = panel + q * PANEL_QUAD * here;
            for (long m = 0; m < these; m += PANEL_ROWS) {
              const long left = these - m;
              float *slot = blocks > 1 ? sum + (q * most + g + m) * PANEL_QUAD * 16 : sum, *to = line + (g + m) * many + q * PANEL_QUAD;
              if (left >= 3) panel_tile<3>(four, rows + m * here, here, slot, first, last, to, many);
              if (left == 2) panel_tile<2>(four, rows + m * here, here, slot, first, last, to, many);
              if (left == 1) panel_tile<1>(four, rows + m * here, here, slot, first, last, to, many);
            }
          }
        }
      }
      for (long m = 0; m < some; m++) put_line(line + m * many, count, bias ? bias + n : nullptr, y + out[m0 + m] * ldy + (n - n0));
    }
  }
  return true;
}
