// Products of block-quantized weights of four bits with AMX, for more than 8 rows of x. A unit's quants become bytes, and the rows' 16-bit
// integers a lower byte without sign and an upper one with it: two instructions give the sums of products of 32 columns for 16 rows of x and 16
// of weights. 256 times the upper one and the lower one are the exact sums of ``quant_tile``, and what follows rounds as there: the bits are the
// same, whichever of the two computes a row.
#pragma once
#include "amx.h"
#include "quant_lanes.h"

#if defined(EVENER_AMX) && defined(__AMX_INT8__)
#define EVENER_QUANT_AMX 1
#define TILE_LOWER(to, left, right) asm volatile("tdpbuud %tmm" #right ", %tmm" #left ", %tmm" #to)
#define TILE_UPPER(to, left, right) asm volatile("tdpbsud %tmm" #right ", %tmm" #left ", %tmm" #to)

template <class F> constexpr bool has_tiles() { return F::bits == 4 && F::groups == 1 && F::scales != POWER && F::scales != TABLE; }

// 16 rows of x; what those beyond the last one hold does not matter.
struct Sixteen {
  static const long LINES = 16;
  const char* bytes;  // for each unit [row][64]: lower bytes, then upper ones, in the order of ``unpack``
  const float *scale, *shift;  // for each unit [row]: the scale, and its product with the sum of the integers
  const int32_t* sum;  // for each unit [row]: this sum
  static long size(long columns) { return columns / UNIT * LINES * (64 + 12); }
  static Sixteen at(char* p, long columns) {
    long units = columns / UNIT;
    float* scale = (float*)(p + units * LINES * 64);
    return Sixteen{p, scale, scale + units * LINES, (const int32_t*)(scale + 2 * units * LINES)};
  }
};

// Line 2 i of a unit's bytes has columns 0, 4, 1, 5 of eight columns for each row of weights, line 2 i + 1 columns 2, 6, 3, 7.
INLINE void unpack(const char* quants, char* lines) {
  const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512i w = _mm512_loadu_si512(quants + i * 64);
    _mm512_store_si512(lines + i * 128, _mm512_and_si512(w, low));
    _mm512_store_si512(lines + i * 128 + 64, _mm512_and_si512(_mm512_srli_epi16(w, 4), low));
  }
}

// Puts up to 16 rows of integers side by side. ``q``, ``scale`` and ``sum``: of row m of x, for m = in[0] and so on. Of rows beyond the last one
// only the scales are written.
template <class Index>
static void put_sixteen(const int16_t* q, const float* scale, const int32_t* sum, Index in, long rows, long columns, char* to) {
  const long units = columns / UNIT, lines = Sixteen::LINES;
  float *scales = (float*)(to + units * lines * 64), *shifts = scales + units * lines;
  int32_t* sums = (int32_t*)(shifts + units * lines);
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15));
  const __m512i apart = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  for (long r = 0; r < rows; r++) {
    const int16_t* row = q + in[r] * columns;
    for (long u = 0; u < units; u++) {
      __m512i x = _mm512_loadu_si512(row + u * UNIT);
      _mm512_store_si512(to + (u * lines + r) * 64, _mm512_permutexvar_epi64(apart, _mm512_shuffle_epi8(x, order)));
    }
  }
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (long u = 0; u < units; u += 16) {
    const long some = units - u < 16 ? units - u : 16;
    const uint32_t both = some == 16 ? ~0u : (1u << 2 * some) - 1;
    __m512i in_scales[16], in_sums[16], out_scales[16], out_sums[16];
    for (long r = 0; r < 16; r++) {
      in_scales[r] = in_sums[r] = _mm512_setzero_si512();
      if (r >= rows) continue;
      const int32_t* from = sum + in[r] * 2 * units + 2 * u;
      __m512i low = _mm512_maskz_loadu_epi32((__mmask16)both, from), high = _mm512_maskz_loadu_epi32((__mmask16)(both >> 16), from + 16);
      in_sums[r] = _mm512_add_epi32(_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high));
      in_scales[r] = _mm512_maskz_loadu_epi32((__mmask16)((1u << some) - 1), scale + in[r] * units + u);
    }
    transpose_pairs(in_scales, out_scales);
    transpose_pairs(in_sums, out_sums);
    for (long i = 0; i < some; i++) {
      v16 one = (v16)out_scales[i];
      store(scales + (u + i) * lines, one);
      store(shifts + (u + i) * lines, one * floats_of((i16x)out_sums[i]));
      _mm512_storeu_si512(sums + (u + i) * lines, out_sums[i]);
    }
  }
}

// As ``quant_tile``, for the first R of sixteen rows. The caller has set the shapes of ``Tiles(16, 32, 8)``.
template <class F, int R> static __attribute__((noinline)) void tile_of_sixteen(const char* tile, const Sixteen& x, long columns, v16 out[R], Ahead* ahead) {
  // Several units at a time: a tile that is loaded from what was just stored, and a register from a stored tile, would wait for memory.
  const long many = 4;
  alignas(64) char lines[many][512];
  alignas(64) int32_t lower[many][256], upper[many][256];
  const bool shifted = F::scales == AFFINE || F::scales == KMIN || has_zero(F::scales);
  const long units = columns / UNIT;
  v16 f[R], d = splat(0.f), dm = splat(0.f);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) f[r] = splat(0.f);
  auto multiply = [&](long u, long i) {
    const char* left = x.bytes + u * 1024;
    if (u & 1) {
      TILE_ZERO(2);
      TILE_ZERO(3);
      TILE_LOAD(7, lines[i], 64);
      TILE_LOAD(4, left, 64);
      TILE_LOWER(2, 4, 7);
      TILE_LOAD(5, left + 32, 64);
      TILE_UPPER(3, 5, 7);
      TILE_STORE(2, lower[i], 64);
      TILE_STORE(3, upper[i], 64);
    } else {
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_LOAD(6, lines[i], 64);
      TILE_LOAD(4, left, 64);
      TILE_LOWER(0, 4, 6);
      TILE_LOAD(5, left + 32, 64);
      TILE_UPPER(1, 5, 6);
      TILE_STORE(0, lower[i], 64);
      TILE_STORE(1, upper[i], 64);
    }
  };
  auto add = [&](long u, long i) {
    const char* scales = tile + F::at(u);
    if (F::head_bytes && u % 8 == 0) {
      d = halves(scales - F::head_bytes);
      if (F::scales == KMIN) dm = halves(scales - F::head_bytes + 32);
    }
    v16 s, t = splat(0.f);
    group_scales<F>(scales, 0, d, dm, s, t);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      i16x a = ((i16x)load_bits(upper[i] + r * 16) << 8) + (i16x)load_bits(lower[i] + r * 16);
      if (F::offset) a -= F::offset * x.sum[u * 16 + r];
      f[r] = add_product(f[r], floats_of(a), s * x.scale[u * 16 + r]);
      if (shifted) f[r] = add_product(f[r], t, splat(x.shift[u * 16 + r]));
    }
  };
  for (long u = 0; u < units; u += many) {
    const long some = units - u < many ? units - u : many;
    for (long i = 0; i < some; i++) {
      unpack(tile + F::at(u + i) + F::scale_bytes, lines[i]);
      if (ahead) ahead->step(F::quant_bytes + F::scale_bytes + F::head_bytes / 8);
    }
    for (long i = 0; i < some; i++) multiply(u + i, i);
    for (long i = 0; i < some; i++) add(u + i, i);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) out[r] = f[r];
}
#endif
