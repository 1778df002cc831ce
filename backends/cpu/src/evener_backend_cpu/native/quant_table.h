// Products of four-bit weights whose 16 numbers are a table in float32, which no integers hold exactly (NF4 and FP4 of bitsandbytes). The 16-bit
// integers of x become float32 again, which is exact up to the product with their scale; a number of the table is not rounded.
#pragma once
#include "gemm.h"
#include "quant_lanes.h"

// The table of the 256 columns that unit ``u`` is in.
template <class F> INLINE const float* table_of(const char* tile, long u) { return (const float*)(tile + F::at(u / 8 * 8) - F::head_bytes); }

// Sixteen numbers of a table; only the lower four bits of an index count.
struct Table {
#if defined(EVENER_LANES512)
  __m512 all;
  MEMBER explicit Table(const float* p) : all((__m512)load(p)) {}
  MEMBER v16 at(u16x i) const { return (v16)_mm512_permutexvar_ps((__m512i)i, all); }
#elif defined(EVENER_LANES256)
  __m256 low, high;
  MEMBER explicit Table(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
  MEMBER __m256 half(__m256i i) const {
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));  // its sign is the fourth bit
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i), upper);
  }
  MEMBER v16 at(u16x i) const { return {half((__m256i)i.low), half((__m256i)i.high)}; }
#else
  const float* p;
  MEMBER explicit Table(const float* p) : p(p) {}
  MEMBER v16 at(u16x i) const {
    float found[16];
    for (int l = 0; l < 16; l++) found[l] = p[i[l] & 15];
    return load(found);
  }
#endif
};

// As ``quant_tile``: results of one tile for R rows of x, whose integers are ``q`` and whose scales for 32 columns ``scale``.
template <class F, int R>
static __attribute__((noinline)) void table_tile(const char* tile, const int16_t* q, const float* scale, Rows in, long columns, v16 out[R],
                                          Ahead* ahead) {
  v16 f[R], d = splat(0.f), dm = splat(0.f);
  float x[R][UNIT];
  for (int r = 0; r < R; r++) f[r] = splat(0.f);
  for (long u = 0; u < columns / UNIT; u++) {
    head_scales<F>(tile, u, d, dm);
    const Table table(table_of<F>(tile, u));
    const char* quants = tile + F::at(u) + F::scale_bytes;
    if (ahead) ahead->step(F::quant_bytes + F::scale_bytes + F::head_bytes / 8);
    for (int r = 0; r < R; r++) {
      const int16_t* from = q + in[r] * columns + u * UNIT;
      float own = scale[in[r] * (columns / UNIT) + u];
      for (int c = 0; c < UNIT; c++) x[r][c] = (float)from[c] * own;
    }
    v16 a[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) a[r] = splat(0.f);
#pragma GCC unroll 4
    for (int z = 0; z < 4; z++) {
      u16x word = (u16x)load_bits(quants + z * 64);
#pragma GCC unroll 8
      for (int c = 0; c < 8; c++) {  // the even column of a pair in the lower half of a word
        v16 w = table.at(word >> (c % 2 * 16 + c / 2 * 4));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) a[r] = add_product(a[r], w, splat(x[r][z * 8 + c]));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) f[r] = add_product(f[r], a[r], d);
  }
  for (int r = 0; r < R; r++) out[r] = f[r];
}
