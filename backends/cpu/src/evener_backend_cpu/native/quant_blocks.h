// The layout of block-quantized weights in this backend: still quantized, every number of the file's blocks kept, in another order.
//
// A tile is 16 rows, one for each 32-bit lane, so that a product needs no sums across lanes. For each unit of 32 columns it holds the
// scales and then the quants; data shared by 256 columns comes before their first unit. So a product reads a tile from front to back,
// which the processor prefetches (Zen 4, one thread, Q4_1 from memory: 30 GB/s; with the scales after the quants, of a unit or of the
// whole tile, 10). A unit's quants are unsigned (8 bits: signed) and read as pairs of neighbouring columns, pair p in the two halves of
// a lane:
//   8 bits   [pair][lane][2]                    4 bits   [pair / 4][lane] uint32, pair p at bits 4 (p % 4) of each half
//   5 bits   4 bits, then [lane] uint32 with the fifth bit of pair p at bit p of each half
//   6 bits   4 bits, then [pair / 8][lane] uint32, the upper bits of pair p at bits 2 (p % 8) of each half
// Rows that pad the last tile have scale 0.
#pragma once
#include "simd.h"

enum Kind { PLAIN_PART = 0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4, U4_HALF, U4_BRAIN, I8_HALF, I8_BRAIN,
            NVFP4, TABLE4 };

// HALF: w = d (q - offset). AFFINE: w = d q + m. KMIN: w = d s q - m t, d and m for 256 columns, s and t bytes of a group.
// KSIGNED: w = d s (q - offset), s a signed byte. POWER: w = 2^(s - 128) (FP4[q] - offset), s a byte, 255 for NaN.
// ZERO_HALF, ZERO_BRAIN: w = d (q - z), d float16 or bfloat16, z a signed byte.
// FLOAT8: w = d s (FP4[q] - offset), d float32 for 256 columns, s an E4M3 byte of a group.
// TABLE: w = d t[q], t 16 numbers in float32, d float32 for 64 columns: t and then four times d of each lane for 256 columns.
enum Scales { HALF, AFFINE, KMIN, KSIGNED, POWER, ZERO_HALF, ZERO_BRAIN, FLOAT8, TABLE };
constexpr bool has_zero(int scales) { return scales == ZERO_HALF || scales == ZERO_BRAIN; }
constexpr bool has_fp4(int scales) { return scales == POWER || scales == FLOAT8; }
// Scales whose numbers for 256 columns are not in a file's blocks: who packs a part writes them into its tiles (table_packing.py).
constexpr bool has_float_head(int scales) { return scales == FLOAT8 || scales == TABLE; }

// Twice the value of each four-bit float (E2M1), plus 12.
static const int8_t FP4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

static const long LANES = 16, UNIT = 32, SUPER = 256;

template <int KIND> struct BlockFormat;
#define FORM(K, BITS, GROUP, SCALES, OFFSET)                                                                                          \
  template <> struct BlockFormat<K> {                                                                                                        \
    static const int kind = K, bits = BITS, groups = 32 / GROUP, scales = SCALES, offset = OFFSET;                                      \
    static const long quant_bytes = BITS * 64;                                                                                        \
    static const long head_bytes = SCALES == KMIN || SCALES == FLOAT8 ? 64 : SCALES == KSIGNED ? 32 : SCALES == TABLE ? 320 : 0;        \
    static const long scale_bytes = SCALES == HALF ? 32 : SCALES == AFFINE ? 64 : has_zero(SCALES) ? 48 : SCALES == TABLE ? 0 : (SCALES == KMIN ? 32 : 16) * groups; \
    static long at(long unit) { return unit * (quant_bytes + scale_bytes) + (unit / 8 + 1) * head_bytes; }                            \
    static long tile_bytes(long columns) {                                                                                            \
      long n = columns / UNIT * (quant_bytes + scale_bytes) + (columns + SUPER - 1) / SUPER * head_bytes;                               \
      return (n + 63) / 64 * 64;                                                                                                      \
    }                                                                                                                                 \
  };
FORM(Q4_0, 4, 32, HALF, 8)
FORM(Q4_1, 4, 32, AFFINE, 0)
FORM(Q5_0, 5, 32, HALF, 16)
FORM(Q5_1, 5, 32, AFFINE, 0)
FORM(Q8_0, 8, 32, HALF, 0)
FORM(Q2_K, 4, 16, KMIN, 0)
FORM(Q3_K, 4, 16, KSIGNED, 4)
FORM(Q4_K, 4, 32, KMIN, 0)
FORM(Q5_K, 5, 32, KMIN, 0)
FORM(Q6_K, 6, 16, KSIGNED, 32)
FORM(MXFP4, 4, 32, POWER, 12)
FORM(U4_HALF, 4, 32, ZERO_HALF, 0)
FORM(U4_BRAIN, 4, 32, ZERO_BRAIN, 0)
FORM(I8_HALF, 8, 32, ZERO_HALF, 0)
FORM(I8_BRAIN, 8, 32, ZERO_BRAIN, 0)
FORM(NVFP4, 4, 16, FLOAT8, 12)
FORM(TABLE4, 4, 32, TABLE, 0)
#undef FORM

// Calls f(BlockFormat<kind>()).
template <class F> INLINE bool with_block_format(long kind, F f) {
  switch (kind) {
    case Q4_0: f(BlockFormat<Q4_0>()); return true;
    case Q4_1: f(BlockFormat<Q4_1>()); return true;
    case Q5_0: f(BlockFormat<Q5_0>()); return true;
    case Q5_1: f(BlockFormat<Q5_1>()); return true;
    case Q8_0: f(BlockFormat<Q8_0>()); return true;
    case Q2_K: f(BlockFormat<Q2_K>()); return true;
    case Q3_K: f(BlockFormat<Q3_K>()); return true;
    case Q4_K: f(BlockFormat<Q4_K>()); return true;
    case Q5_K: f(BlockFormat<Q5_K>()); return true;
    case Q6_K: f(BlockFormat<Q6_K>()); return true;
    case MXFP4: f(BlockFormat<MXFP4>()); return true;
    case U4_HALF: f(BlockFormat<U4_HALF>()); return true;
    case U4_BRAIN: f(BlockFormat<U4_BRAIN>()); return true;
    case I8_HALF: f(BlockFormat<I8_HALF>()); return true;
    case I8_BRAIN: f(BlockFormat<I8_BRAIN>()); return true;
    case NVFP4: f(BlockFormat<NVFP4>()); return true;
    case TABLE4: f(BlockFormat<TABLE4>()); return true;
  }
  return false;
}

// 32 columns of one row. d and m are float16 bits. Where ``halves``, a byte of q holds columns j and j + 16, and ``fifths`` the fifth bits.
struct Decoded {
  uint8_t q[32];
  uint32_t fifths;
  uint16_t d, m;
  uint8_t s[2], t[2];
};

constexpr bool halves(long kind) { return kind == Q4_0 || kind == Q4_1 || kind == Q5_0 || kind == Q5_1; }
INLINE uint16_t half_bits(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }
INLINE uint32_t word_bits(const uint8_t* p) { return half_bits(p) | (uint32_t)half_bits(p + 2) << 16; }

// Unit ``u`` (of 1 or 8) of the block at p, in the file's layout (ggml-common.h).
INLINE void decode(long kind, const uint8_t* __restrict p, long u, Decoded* __restrict o) {
  uint8_t* __restrict q = o->q;
  auto scales_k4 = [&](const uint8_t* b) {
    o->s[0] = u < 4 ? b[u] & 63 : (b[u + 4] & 15) | (b[u - 4] >> 6) << 4;
    o->t[0] = u < 4 ? b[u + 4] & 63 : b[u + 4] >> 4 | (b[u] >> 6) << 4;
  };
  long n = u / 4, j = u % 4;
  switch (kind) {
    case Q4_0: o->d = half_bits(p), memcpy(q, p + 2, 16); break;  // of these four, q is the halves of bytes
    case Q4_1: o->d = half_bits(p), o->m = half_bits(p + 2), memcpy(q, p + 4, 16); break;
    case Q5_0: o->d = half_bits(p), o->fifths = word_bits(p + 2), memcpy(q, p + 6, 16); break;
    case Q5_1: o->d = half_bits(p), o->m = half_bits(p + 2), o->fifths = word_bits(p + 4), memcpy(q, p + 8, 16); break;
    case Q8_0: o->d = half_bits(p), memcpy(q, p + 2, 32); break;
    case Q2_K:
      for (int l = 0; l < 32; l++) q[l] = p[16 + 32 * n + l] >> (2 * j) & 3;
      for (int g = 0; g < 2; g++) o->s[g] = p[2 * u + g] & 15, o->t[g] = p[2 * u + g] >> 4;
      o->d = half_bits(p + 80), o->m = half_bits(p + 82);
      break;
    case Q3_K:
      for (int l = 0; l < 32; l++) q[l] = (p[32 + 32 * n + l] >> (2 * j) & 3) | (p[l] >> u & 1) << 2;
      for (int g = 0; g < 2; g++) {
        long i = 2 * u + g;
        const uint8_t* b = p + 96;
        int low = i < 8 ? b[i] & 15 : b[i - 8] >> 4, high = b[8 + i % 4] >> (2 * (i / 4)) & 3;
        o->s[g] = (uint8_t)((low | high << 4) - 32);
      }
      o->d = half_bits(p + 108);
      break;
    case Q4_K:
    case Q5_K: {
      const uint8_t* b = p + (kind == Q4_K ? 16 : 48) + u / 2 * 32;
      for (int l = 0; l < 32; l++) q[l] = b[l] >> (u % 2 * 4) & 15;
      if (kind == Q5_K)
        for (int l = 0; l < 32; l++) q[l] |= (p[16 + l] >> u & 1) << 4;
      o->d = half_bits(p), o->m = half_bits(p + 2);
      scales_k4(p + 4);
      break;
    }
    case Q6_K:
      for (int l = 0; l < 32; l++) {
        uint8_t b = p[64 * n + 32 * (j % 2) + l];
        q[l] = (b >> (j / 2 * 4) & 15) | (p[128 + 32 * n + l] >> (2 * j) & 3) << 4;
      }
      for (int g = 0; g < 2; g++) o->s[g] = p[192 + 2 * u + g];
      o->d = half_bits(p + 208);
      break;
    case U4_HALF:  // these four as grouped_packing.py writes them: scale, zero point, numbers
    case U4_BRAIN:
      o->d = half_bits(p), o->s[0] = p[2];
      for (int l = 0; l < 16; l++) q[2 * l] = p[3 + l] & 15, q[2 * l + 1] = p[3 + l] >> 4;
      break;
    case I8_HALF:
    case I8_BRAIN: o->d = half_bits(p), o->s[0] = p[2], memcpy(q, p + 3, 32); break;
    case MXFP4:  // the scale comes first
      o->s[0] = p[0];
      for (int l = 0; l < 16; l++) q[2 * l] = p[1 + l] & 15, q[2 * l + 1] = p[1 + l] >> 4;
      break;
    case NVFP4: o->s[0] = p[0], o->s[1] = p[1], p += 2;  // as table_packing.py writes it: the scales of both groups come first
    case TABLE4:
      for (int l = 0; l < 16; l++) q[2 * l] = p[l] & 15, q[2 * l + 1] = p[l] >> 4;
      break;
  }
}

// Of the bytes 0, 2, 4 and 6 of x, the low BITS bits of each, one after another.
template <int BITS> INLINE uint32_t every_second(uint64_t x) {
  const uint64_t one = (1 << BITS) - 1, two = (1 << 2 * BITS) - 1;
  x &= one * 0x0001000100010001;
  x = (x | x >> (16 - BITS)) & two * 0x0000000100000001;
  return (uint32_t)(x | x >> (32 - 2 * BITS)) & ((1u << 4 * BITS) - 1);
}

// Bits 0, 2, 4, … of x, one after another.
INLINE uint32_t even_bits(uint32_t x) {
  x &= 0x55555555;
  x = (x | x >> 1) & 0x33333333;
  x = (x | x >> 2) & 0x0f0f0f0f;
  x = (x | x >> 4) & 0x00ff00ff;
  return (x | x >> 8) & 0xffff;
}

// Eight bytes, the first in the lowest bits.
INLINE uint64_t eight_bytes(const uint8_t* p) {
  uint64_t x;
  memcpy(&x, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  x = __builtin_bswap64(x);
#endif
  return x;
}

template <class F> INLINE void store_unit(const Decoded& in, long unit, long lane, char* tile) {
  char* scales = tile + F::at(unit);
  uint8_t* q = (uint8_t*)scales + F::scale_bytes;
  if (F::bits == 8) {
    for (int c = 0; c < 32; c++) q[(c / 2 * LANES + lane) * 2 + c % 2] = in.q[c];
  } else {
    uint32_t low[4], fifth = 0, high[2] = {};
    if (halves(F::kind)) fifth = even_bits(in.fifths) | even_bits(in.fifths >> 1) << 16;
    for (int z = 0; z < 4; z++) {  // eight columns: four pairs
      uint64_t x = halves(F::kind) ? eight_bytes(in.q + 8 * (z % 2)) >> (z / 2 * 4) : eight_bytes(in.q + 8 * z);
      low[z] = every_second<4>(x) | every_second<4>(x >> 8) << 16;
      if (F::bits == 5 && !halves(F::kind)) fifth |= (every_second<1>(x >> 4) | every_second<1>(x >> 12) << 16) << 4 * z;
      if (F::bits == 6) high[z / 2] |= (every_second<2>(x >> 4) | every_second<2>(x >> 12) << 16) << 8 * (z % 2);
    }
    for (int z = 0; z < 4; z++) memcpy(q + (z * LANES + lane) * 4, low + z, 4);
    if (F::bits == 5) memcpy(q + (4 * LANES + lane) * 4, &fifth, 4);
    if (F::bits == 6)
      for (int z = 0; z < 2; z++) memcpy(q + ((4 + z) * LANES + lane) * 4, high + z, 4);
  }
  if (F::head_bytes && !has_float_head(F::scales) && unit % 8 == 0) {
    memcpy(scales - F::head_bytes + lane * 2, &in.d, 2);
    if (F::scales == KMIN) memcpy(scales - F::head_bytes + 32 + lane * 2, &in.m, 2);
  }
  if (F::scales == HALF || F::scales == AFFINE || has_zero(F::scales)) memcpy(scales + lane * 2, &in.d, 2);
  if (has_zero(F::scales)) scales[32 + lane] = (char)in.s[0];
  if (F::scales == AFFINE) memcpy(scales + 32 + lane * 2, &in.m, 2);
  if (F::scales == KMIN)
    for (int g = 0; g < F::groups; g++) scales[g * 32 + lane] = (char)in.s[g], scales[g * 32 + 16 + lane] = (char)in.t[g];
  if (F::scales == KSIGNED || F::scales == POWER || F::scales == FLOAT8)
    for (int g = 0; g < F::groups; g++) scales[g * 16 + lane] = (char)in.s[g];
}

// Packs rows of a file's blocks. ``to`` has room for the tiles.
template <class F> static void pack_tile(const uint8_t* from, long row_bytes, long rows, long columns, long first, char* to) {
  long per_block = F::scales == KMIN || F::scales == KSIGNED ? 8 : 1, blocks = columns / UNIT / per_block;
  memset(to, 0, F::tile_bytes(columns));
  for (long lane = 0; lane < LANES && first + lane < rows; lane++)
    for (long unit = 0; unit < columns / UNIT; unit++) {
      Decoded d{};
      decode(F::kind, from + (first + lane) * row_bytes + unit / per_block * (row_bytes / blocks), unit % per_block, &d);
      store_unit<F>(d, unit, lane, to);
    }
}
