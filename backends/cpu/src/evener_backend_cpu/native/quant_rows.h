// Single rows of block-quantized matrices as numbers, for a token embedding that stays in blocks.
#pragma once
#include "quant_gemm.h"

// Column c of a unit in one lane: the number that is multiplied by the scale.
template <class F> INLINE int quant_at(const uint8_t* q, long lane, int c) {
  if (F::bits == 8) return (int8_t)q[(c / 2 * LANES + lane) * 2 + c % 2];
  int pair = c / 2, half = c % 2 * 16;
  auto word = [&](int at) {
    uint32_t w;
    memcpy(&w, q + (at * LANES + lane) * 4, 4);
    return w;
  };
  int low = word(pair / 4) >> (4 * (pair % 4) + half) & 15;
  if (has_fp4(F::scales)) return FP4[low];
  if (F::bits == 5) low |= (word(4) >> (pair + half) & 1) << 4;
  if (F::bits == 6) low |= (word(4 + pair / 8) >> (2 * (pair % 8) + half) & 3) << 4;
  return low;
}

// y[c] = factor * the number of column c, which is rounded to T before. A product of s and q has more than 24 bits for no format that adds t
// to it, so the sum is rounded once, with and without a fused multiplication.
template <class F, class T> static __attribute__((noinline)) void quant_row(const char* tile, long lane, long columns, float factor, T* y) {
  const bool shifted = F::scales == AFFINE || F::scales == KMIN || has_zero(F::scales);
  v16 d = splat(0.f), dm = splat(0.f);
  for (long u = 0; u < columns / UNIT; u++) {
    const char* scales = tile + F::at(u);
    head_scales<F>(tile, u, d, dm);
    const uint8_t* q = (const uint8_t*)scales + F::scale_bytes;
    for (int g = 0; g < F::groups; g++) {
      v16 s, t = splat(0.f);
      group_scales<F>(scales, g, d, dm, s, t);
      float own = s[lane], shift = t[lane];
      for (int c = g * 32 / F::groups; c < (g + 1) * 32 / F::groups; c++) {
        int quant = quant_at<F>(q, lane, c);
        float number = own * (F::scales == TABLE ? table_of<F>(tile, u)[quant] : (float)(quant - F::offset));
        if (shifted) number += shift;
        put(y + u * UNIT + c, factor == 1.f ? number : rounded1<T>(number) * factor);
      }
    }
  }
}

// Row ``row`` of a matrix whose parts are all in blocks.
template <class T> static void quant_row_of(const Blocks& w, long row, long columns, float factor, T* y) {
  long i = 0;
  while (row >= w.segments[i].first + w.segments[i].rows) i++;
  const Segment& s = w.segments[i];
  long at = row - s.first;
  with_block_format(s.kind, [&](auto form) {
    using F = decltype(form);
    quant_row<F, T>((const char*)s.data + at / LANES * F::tile_bytes(columns), at % LANES, columns, factor, y);
  });
}
