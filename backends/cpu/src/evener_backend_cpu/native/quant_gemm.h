// y = x wᵀ over block-quantized weights. Activations are rounded to 16-bit integers with a float32 scale for 32 columns: a unit's sum of
// products is exact in int32, and the error against float32 products is below the rounding of bfloat16 inputs and outputs.
// (Eight-bit activations would halve the arithmetic; decode waits for memory anyway, and their error is 250 times as large.)
#pragma once
#include <type_traits>

#include "gemm.h"
#include "quant_amx.h"
#include "quant_brain.h"
#include "quant_lanes.h"
#include "quant_table.h"
#include "stored_gemm.h"

// A part of a matrix: rows first <= n < first + rows. ``data``: rows if plain, a Stored of such kinds, else tiles.
struct Segment {
  int64_t kind, first, rows;
  const void* data;
};
// A part of kind ORDERED: tiles of the kind ``form`` over ``columns``, column i of which is column order[i] of the matrix, or zeros if that
// is -1 (act-order: columns sorted by group, each group in whole units). The rows of x are gathered for it.
static const long ORDERED = 128;
struct Ordered {
  const void* tiles;
  const int32_t* order;
  int64_t columns, form;
};
// The parts of a matrix in order.
struct Blocks {
  int64_t count;
  const Segment* segments;
};
// A matrix: plain and row-major, or in blocks.
struct Matrix {
  const void* plain;
  const Blocks* blocks;
};

// Whether some part multiplies rows of integers.
INLINE bool needs_integers(const Matrix& w) {
  for (long i = 0; w.blocks && i < w.blocks->count; i++)
    if (w.blocks->segments[i].kind != PLAIN_PART && w.blocks->segments[i].kind < STORED_E4M3) return true;
  return false;
}

// Whether a product with rows of T does. ``needs_integers`` says it for any rows.
template <class T> INLINE bool takes_integers(const Matrix& w) {
#ifdef EVENER_AMX
  if (sizeof(T) == 2 && w.blocks && !tiles_error()) {
    for (long i = 0; i < w.blocks->count; i++) {
      const long kind = w.blocks->segments[i].kind;
      bool integers = kind != PLAIN_PART && kind < STORED_E4M3;
      with_block_format(kind, [&](auto form) { integers &= !has_brain<decltype(form)>(); });
      if (integers) return true;
    }
    return false;
  }
#endif
  return needs_integers(w);
}

// Rows as integers: x[m, c] = scale[m, c / 32] * q[m, c]; ``sum`` adds q over 16 columns.
struct Quantized {
  int16_t* q;
  float* scale;
  int32_t* sum;
  static long bytes(long rows, long columns) { return rows * (columns * 2 + columns / 32 * 4 + columns / 16 * 4) + 192; }
  static Quantized at(char* p, long rows, long columns) {
    auto up = [](char* a) { return (char*)(((uintptr_t)a + 63) & ~(uintptr_t)63); };
    Quantized r;
    r.q = (int16_t*)up(p);
    r.scale = (float*)up((char*)(r.q + rows * columns));
    r.sum = (int32_t*)up((char*)(r.scale + rows * (columns / 32)));
    return r;
  }
};

template <class T> static void quantize_row(const T* x, long columns, int16_t* q, float* scale, int32_t* sum) {
  const v16 magic = splat(12582912.f);
  for (long u = 0; u < columns / UNIT; u++) {
    v16 a = load(x + u * UNIT), b = load(x + u * UNIT + 16);
    v16 bad = (a + b) * 0.f;  // NaN stays NaN: it goes into the scale
    v16 top = vmax((v16)((u16x)a & 0x7fffffffu), (v16)((u16x)b & 0x7fffffffu));
    float most = max16(top);
    float back = most > 0.f ? 32767.f / most : 0.f;
    if (!(back <= 3.4e38f)) back = 0.f, most = 0.f;  // too small for a scale
    i16x i = ints_of((a * back + magic) - magic), j = ints_of((b * back + magic) - magic);
    store_lower((uint16_t*)(q + u * UNIT), (u16x)i), store_lower((uint16_t*)(q + u * UNIT + 16), (u16x)j);
    scale[u] = most * (1.f / 32767.f) + sum16(bad);
    sum[2 * u] = sum16(i), sum[2 * u + 1] = sum16(j);
  }
}

template <class T> static void quantize_rows(const T* x, long ldx, long from, long to, long columns, const Quantized& out) {
  for (long m = from; m < to; m++)
    quantize_row(x + m * ldx, columns, out.q + m * columns, out.scale + m * (columns / 32), out.sum + m * (columns / 16));
}

// Results of one tile for R rows of x, [R, 16]. ``ahead``: the tile is not in a cache yet.
template <class F, int R> static __attribute__((noinline)) void quant_tile(const char* tile, const Quantized& x, Rows in, long columns, v16 out[R],
                                                                      Ahead* ahead) {
  // A product waits for the one before it that adds to the same sum, so few rows have several sums, which are exact in any order.
  const int sums_of_row = CHAINS / R > 1 ? CHAINS / R : 1;
  const long each = F::quant_bytes + F::scale_bytes, units = columns / UNIT;
  const int16_t* q[R];
  const float* xs[R];
  const int32_t* sums[R];
  v16 f[R];
  for (int r = 0; r < R; r++) {
    long m = in[r];
    q[r] = x.q + m * columns, xs[r] = x.scale + m * (columns / 32), sums[r] = x.sum + m * (columns / 16);
    f[r] = splat(0.f);
  }
  const bool shifted = F::scales == AFFINE || F::scales == KMIN || has_zero(F::scales);
  v16 d = splat(0.f), dm = splat(0.f);
  for (long first = 0; first < units; first += 8) {
    const long here = units - first < 8 ? units - first : 8;
    // No function is called for each unit: it would cost the registers of d, dm and f.
    const char* next = ahead ? ahead->take(here * each + F::head_bytes, tile) : nullptr;
    for (long u = first; u < first + here; u++, next += each) {
      const char* scales = tile + F::at(u);
      head_scales<F>(tile, u, d, dm);
      const Unit<F> unit{scales + F::scale_bytes};
      if (ahead)
        for (long at = 0; at < each; at += 64) __builtin_prefetch(next + at, 0, 2);
#pragma GCC unroll 2
      for (int g = 0; g < F::groups; g++) {
        v16 s, t = splat(0.f);
        group_scales<F>(scales, g, d, dm, s, t);
        i16x a[R][sums_of_row];
        float total[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const int32_t* at = sums[r] + 2 * u + g;
          int32_t sum = F::groups == 1 ? at[0] + at[1] : at[0];
          a[r][0] = i16x{} + (F::offset ? -F::offset * sum : 0);
#pragma GCC unroll 8
          for (int k = 1; k < sums_of_row; k++) a[r][k] = i16x{};
          total[r] = (float)sum;
        }
        const int pairs = 16 / F::groups;
#pragma GCC unroll 4
        for (int i = g * pairs; i < (g + 1) * pairs; i += 4) {
          const auto words = unit.words(i / 4);
#pragma GCC unroll 4
          for (int j = 0; j < 4; j++) {
            Pair w = unit.pair(i + j, words);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) w.dot(a[r][j % sums_of_row], q[r] + u * UNIT + 2 * (i + j));
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
          for (int k = 1; k < sums_of_row; k++) a[r][0] += a[r][k];
          float scale = xs[r][u];
          f[r] = add_product(f[r], floats_of(a[r][0]), s * scale);
          if (shifted) f[r] = add_product(f[r], t, splat(scale * total[r]));
        }
      }
    }
  }
  for (int r = 0; r < R; r++) out[r] = f[r];
}

template <class F, class T, class O, int R>
INLINE void put_quant(const char* tile, const Quantized& x, Rows in, long columns, long skip, long count, const T* bias, O* y, long ldy, Rows out,
                      Ahead* ahead) {
  v16 f[R];
  if constexpr (F::scales == TABLE) table_tile<F, R>(tile, x.q, x.scale, in, columns, f, ahead);
  else quant_tile<F, R>(tile, x, in, columns, f, ahead);
  put_rows<T, O>(f, R, skip, count, bias, y, ldy, out);
}

#ifdef EVENER_QUANT_AMX
// As ``gemm_part``, for all rows of x but up to 8 after whole sixteens, which take less time without tiles; how many it took. None if there are no
// tiles, or no memory.
template <class F, class T, class O>
static __attribute__((noinline)) long rows_in_tiles(const char* tiles, const Quantized& x, long M, long n0, long n1, long columns, const T* bias, O* y,
                                             long ldy, Rows in, Rows out, Ahead* ahead) {
  static thread_local TileRoom room;
  const long rest = M % Sixteen::LINES, taken = rest <= 8 ? M - rest : M, size = F::tile_bytes(columns), each = Sixteen::size(columns);
  if (!taken || tiles_error()) return 0;
  char* panel = (char*)room.reserve((taken + 15) / 16 * each);
  if (!panel) return 0;
  for (long m = 0; m < taken; m += 16)
    put_sixteen(x.q, x.scale, x.sum, in.from(m), taken - m < 16 ? taken - m : 16, columns, panel + m / 16 * each);
  Tiles shapes(16, 32, 8);
  for (long n = n0; n < n1;) {
    long skip = n % LANES, count = LANES - skip < n1 - n ? LANES - skip : n1 - n;
    const char* tile = tiles + n / LANES * size;
    const T* b = bias ? bias + (n - n0) : nullptr;
    for (long m = 0; m < taken; m += 16) {
      Sixteen rows = Sixteen::at(panel + m / 16 * each, columns);
      long some = taken - m < 16 ? taken - m : 16;
      v16 f[16];
      Ahead* first = m ? nullptr : ahead;
      if (some > 12) tile_of_sixteen<F, 16>(tile, rows, columns, f, first);
      else tile_of_sixteen<F, 12>(tile, rows, columns, f, first);
      put_rows<T, O>(f, some, skip, count, b, y + (n - n0), ldy, out.from(m));
    }
    n += count;
  }
  return taken;
}
#endif

// Rows n0 <= n < n1 of one part; ``bias`` and ``y`` point to n0. ``next``: as for ``gemm``.
template <class F, class T, class O>
__attribute__((noinline)) void gemm_part(const char* tiles, const Quantized& x, long M, long n0, long n1, long columns, const T* bias, O* y,
                                         long ldy, Rows in, Rows out, Ahead* next = nullptr) {
  long panel = 393216 / (columns * 2) & ~7L, size = F::tile_bytes(columns);
  Ahead own(Span{tiles + n0 / LANES * size, tiles + (n1 + LANES - 1) / LANES * size});
  if (!next) next = &own;
  // Without memory a product of a table goes on below, with the same bits.
  if constexpr (F::scales == TABLE)
    if (M >= TABLE_LEAST && table_product<F, T, O>(tiles, x.q, x.scale, M, n0, n1, columns, bias, y, ldy, in, out, next)) return;
  if (panel < 32) panel = 32;
  for (long m0 = 0; m0 < M; m0 += panel) {
    long m1 = m0 + panel < M ? m0 + panel : M, first = m0;
#ifdef EVENER_QUANT_AMX
    if constexpr (has_tiles<F>())
      first += rows_in_tiles<F, T, O>(tiles, x, m1 - m0, n0, n1, columns, bias, y, ldy, in.from(m0), out.from(m0), m0 ? nullptr : next);
#endif
    for (long n = n0; n < n1 && first < m1;) {
      long skip = n % LANES, count = LANES - skip < n1 - n ? LANES - skip : n1 - n, m = first;
      const char* tile = tiles + n / LANES * size;
      const T* b = bias ? bias + (n - n0) : nullptr;
      O* to = y + (n - n0);
      auto rows = [&](auto R) {
        put_quant<F, T, O, decltype(R)::value>(tile, x, in.from(m), columns, skip, count, b, to, ldy, out.from(m),
                                                m ? nullptr : next);
        m += decltype(R)::value;
      };
      while (m + PRODUCT_ROWS <= m1) rows(std::integral_constant<int, PRODUCT_ROWS>());
      if (PRODUCT_ROWS > 4 && m1 - m >= 4) rows(std::integral_constant<int, 4>());
      if (PRODUCT_ROWS > 4 && m1 - m == 3) rows(std::integral_constant<int, 3>());  // of a few requests, often those of one expert
      if (m1 - m >= 2) rows(std::integral_constant<int, 2>());
      if (m1 - m == 1) rows(std::integral_constant<int, 1>());
      n += count;
    }
  }
}

// Rows of a part whose columns are in another order. Every thread gathers the rows of x for its own piece of the part.
template <class T, class O>
__attribute__((noinline)) void multiply_ordered(const Ordered& w, const T* x, long M, long n0, long n1, long K, const T* bias, O* y, long ldy,
                                                Rows in, Rows out) {
  static thread_local Scratch scratch;
  const long most = 256;
  long panel = M < most ? M : most, ints = Quantized::bytes(panel, w.columns);
  char* base = scratch.reserve(ints + w.columns * (long)sizeof(T) + 64);
  if (!base) {
    for (long m = 0; m < M; m++)
      for (long n = 0; n < n1 - n0; n++) put(y + out[m] * ldy + n, NAN);
    return;
  }
  T* row = (T*)(base + (ints + 63) / 64 * 64);
  Quantized q = Quantized::at(base, panel, w.columns);
  for (long m0 = 0; m0 < M; m0 += panel) {
    long some = M - m0 < panel ? M - m0 : panel;
    for (long m = 0; m < some; m++) {
      const T* from = x + in[m0 + m] * K;
      for (long i = 0; i < w.columns; i++) {
        if (w.order[i] >= 0) row[i] = from[w.order[i]];
        else put(row + i, 0.f);
      }
      quantize_row(row, w.columns, q.q + m * w.columns, q.scale + m * (w.columns / UNIT), q.sum + m * (w.columns / 16));
    }
    with_block_format(w.form, [&](auto form) {
      gemm_part<decltype(form), T, O>((const char*)w.tiles, q, some, n0, n1, w.columns, bias, y, ldy, Rows{}, out.from(m0));
    });
  }
}

// The memory of rows n0 <= n < n1 of a matrix of elements of ``size`` bytes; of those in its part that n0 is in. Nothing where it is not read in
// this order.
INLINE Span span_of(const Matrix& w, long n0, long n1, long K, long size) {
  if (!w.blocks) return Span{(const char*)w.plain + n0 * K * size, (const char*)w.plain + n1 * K * size};
  Span found{};
  for (long i = 0; i < w.blocks->count; i++) {
    const Segment& s = w.blocks->segments[i];
    if (n0 < s.first || n0 >= s.first + s.rows) continue;
    long from = n0 - s.first, to = (n1 < s.first + s.rows ? n1 - s.first : s.rows);
    const char* p = (const char*)s.data;
    if (s.kind == PLAIN_PART) found = Span{p + from * K * size, p + to * K * size};
    else if (s.kind < STORED_E4M3)
      with_block_format(s.kind, [&](auto form) {
        long each = decltype(form)::tile_bytes(K);
        found = Span{p + from / LANES * each, p + (to + LANES - 1) / LANES * each};
      });
  }
  return found;
}

// The k-th span of rows n0 <= n < n1, one for each part; whether there is one.
INLINE bool span_at(const Matrix& w, long n0, long n1, long k, long K, long size, Span* to) {
  for (; w.blocks && k > 0 && n0 < n1; k--) {
    long end = n1;
    for (long i = 0; i < w.blocks->count; i++) {
      const long first = w.blocks->segments[i].first;
      if (first > n0 && first < end) end = first;
    }
    n0 = end;
  }
  if (n0 >= n1 || k > 0) return false;
  *to = span_of(w, n0, n1, K, size);
  return true;
}

// As ``gemm``, over a matrix of either kind; ``q`` are the rows of x as integers, for parts in blocks.
template <class T, class O>
__attribute__((noinline)) void multiply(const Matrix& w, const T* x, const Quantized& q, long M, long n0, long n1, long K, const T* bias, O* y, long ldy,
                     Rows in = {}, Rows out = {}, Ahead* next = nullptr) {
  if (!w.blocks) return gemm<T, O>(x, K, M, (const T*)w.plain, n0, n1, K, bias, y, ldy, in, out, next);
  for (long i = 0; i < w.blocks->count; i++) {
    const Segment& s = w.blocks->segments[i];
    long from = n0 > s.first ? n0 : s.first, to = n1 < s.first + s.rows ? n1 : s.first + s.rows;
    if (from >= to) continue;
    O* at = y + (from - n0);
    if (s.kind == PLAIN_PART) {
      gemm<T, O>(x, K, M, (const T*)s.data, from - s.first, to - s.first, K, bias ? bias + s.first : nullptr, at, ldy, in, out, next);
      continue;
    }
    const T* b = bias ? bias + from : nullptr;
    if (s.kind == ORDERED) {
      multiply_ordered<T, O>(*(const Ordered*)s.data, x, M, from - s.first, to - s.first, K, b, at, ldy, in, out);
      continue;
    }
    bool stored = with_stored_kind(s.kind, [&](auto kind) {
      stored_gemm<decltype(kind)::value, T, O>(*(const Stored*)s.data, x, M, from - s.first, to - s.first, K, b, at, ldy, in, out);
    });
    if (!stored) with_block_format(s.kind, [&](auto form) {
      using F = decltype(form);
#ifdef EVENER_AMX
      if constexpr (sizeof(T) == 2 && has_brain<F>())
        if (brain_rows<F, O>((const char*)s.data, x, M, from - s.first, to - s.first, K, b, at, ldy, in, out, next)) return;
#endif
      gemm_part<F, T, O>((const char*)s.data, q, M, from - s.first, to - s.first, K, b, at, ldy, in, out, next);
    });
  }
}
