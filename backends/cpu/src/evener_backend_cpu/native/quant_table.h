// Products of four-bit weights whose 16 numbers are a table in float32, which no integers hold exactly (NF4 and FP4 of bitsandbytes). The 16-bit
// integers of x become float32 again, which is exact up to the product with their scale; a number of the table is not rounded.
#pragma once
#include "gemm.h"
#include "quant_lanes.h"
#include "scratch.h"

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

// Many rows of x: the numbers of 256 columns of a tile are looked up once, and stay in the first cache while rows are multiplied. A sum takes the
// same products in the same order as in ``table_tile``.
#ifdef EVENER_LANES256
static const int TABLE_LEAST = 5, TABLE_ROWS = 6;  // 12 sums of half the lanes
#else
static const int TABLE_LEAST = 3, TABLE_ROWS = 12;
#endif

// f[r] gets what columns of some units add. ``w``: sixteen lanes of each column. ``x``: rows of 256. ``scale``: of 64 columns, in lanes.
template <int R> static __attribute__((noinline)) void table_columns(const float* w, const float* x, long units, const float* scale, v16* f) {
  for (long u = 0; u < units; u++, w += UNIT * LANES, x += UNIT) {
    v16 a[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) a[r] = splat(0.f);
    for (int c = 0; c < UNIT; c++) {
      v16 one = load(w + c * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) a[r] = add_product(a[r], one, splat(x[r * SUPER + c]));
    }
    v16 d = load(scale + u / 2 * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) f[r] = add_product(f[r], a[r], d);
  }
}

// Results of one tile, f[rows]. ``x``: [256 columns][row][column], ``w``: room for 256 columns.
template <class F> static __attribute__((noinline)) void table_rows(const char* tile, const float* x, long rows, long columns, float* w, v16* f, Ahead* ahead) {
  const long units = columns / UNIT;
  for (long m = 0; m < rows; m++) f[m] = splat(0.f);
  for (long u = 0; u < units; u += 8, x += rows * SUPER) {
    const float* head = table_of<F>(tile, u);
    const Table table(head);
    const long here = units - u < 8 ? units - u : 8;
    for (long i = 0; i < here * 4; i++) {
      if (ahead && i % 4 == 0) ahead->step(F::quant_bytes + F::head_bytes / 8);
      u16x word = (u16x)load_bits(tile + F::at(u + i / 4) + i % 4 * 64);
#pragma GCC unroll 8
      for (int c = 0; c < 8; c++) store(w + (i * 8 + c) * LANES, table.at(word >> (c % 2 * 16 + c / 2 * 4)));
    }
    long m = 0;
    auto some = [&](auto R) {
      table_columns<decltype(R)::value>(w, x + m * SUPER, here, head + LANES, f + m);
      m += decltype(R)::value;
    };
    while (m + TABLE_ROWS <= rows) some(std::integral_constant<int, TABLE_ROWS>());
    if (TABLE_ROWS > 8 && rows - m >= 8) some(std::integral_constant<int, 8>());
    if (rows - m >= 4) some(std::integral_constant<int, 4>());
    if (rows - m >= 2) some(std::integral_constant<int, 2>());
    if (rows - m == 1) some(std::integral_constant<int, 1>());
  }
}

// As ``gemm_part``; false if there is no memory.
template <class F, class T, class O>
static __attribute__((noinline)) bool table_product(const char* tiles, const int16_t* q, const float* scale, long M, long n0, long n1, long columns,
                                                    const T* bias, O* y, long ldy, Rows in, Rows out, Ahead* ahead) {
  static thread_local Scratch room;
  // So many rows of x stay in the second cache.
  const long spans = (columns + SUPER - 1) / SUPER, size = F::tile_bytes(columns);
  long most = 524288 / (spans * SUPER * 4) / TABLE_ROWS * TABLE_ROWS;
  most = most < 24 ? 24 : most;
  if (most > M) most = M;
  float* w = (float*)room.reserve((SUPER * LANES + most * LANES + most * spans * SUPER) * 4);
  if (!w) return false;
  v16* f = (v16*)(w + SUPER * LANES);
  float* x = w + SUPER * LANES + most * LANES;
  for (long m0 = 0; m0 < M; m0 += most) {
    const long rows = M - m0 < most ? M - m0 : most;
    for (long m = 0; m < rows; m++)
      for (long u = 0; u < columns / UNIT; u++) {
        const int16_t* from = q + in[m0 + m] * columns + u * UNIT;
        const float own = scale[in[m0 + m] * (columns / UNIT) + u];
        float* to = x + (u / 8 * rows + m) * SUPER + u % 8 * UNIT;
        for (int c = 0; c < UNIT; c++) to[c] = (float)from[c] * own;
      }
    for (long n = n0; n < n1;) {
      long skip = n % LANES, count = LANES - skip < n1 - n ? LANES - skip : n1 - n;
      table_rows<F>(tiles + n / LANES * size, x, rows, columns, w, f, m0 ? nullptr : ahead);
      put_rows<T, O>(f, rows, skip, count, bias ? bias + (n - n0) : nullptr, y + (n - n0), ldy, out.from(m0));
      n += count;
    }
  }
  return true;
}
