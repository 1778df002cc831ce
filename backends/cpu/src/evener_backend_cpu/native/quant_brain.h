// Products of bfloat16 rows with four-bit floats and with four-bit numbers of a table, with AMX. 256 columns of two tiles of weights become bfloat16
// at a time and stay in the first cache for many rows of x, which are not rounded. An E2M1 number times its E4M3 scale has six significant bits at
// most, and two with a power of two (MXFP4), so nothing is rounded there either. A float32 number of a table is the sum of two of bfloat16 to 2^-17
// of itself, and takes two products. A sum takes the same products in the same order for any number of rows of x.
#pragma once
#include "amx.h"
#include "quant_table.h"

#ifdef EVENER_AMX
template <class F> constexpr bool has_brain() { return has_fp4(F::scales) || F::scales == TABLE; }

// ``passes``: tiles of a unit, which are added up. ``units``: so many are summed before they are scaled. ``groups``: as many sums are kept together.
// ``tile``: numbers in bfloat16 of the columns of one tile that are used together.
template <class F> struct Brain {
  static const int passes = F::scales == TABLE ? 2 : 1, groups = F::scales == TABLE ? 2 : 1;
  static const long units = F::scales == TABLE ? 2 : 8, step = units * groups, tile = step * passes * 512;
};

static const float ONES[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};  // scales where 256 columns share none

// Both sets of 16 lanes in bfloat16, the first one in the lower halves; their lower halves hold nothing.
INLINE __m512i brain_pairs(__m512 even, __m512 odd) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32((__m512i)even, 16), (__m512i)odd, upper, 0xf8);  // the first, or the second where ``upper``
}

// The numbers of a table in two parts, each twice: indices have five bits, of which the highest is another column's.
struct BrainTable {
  __m512i upper, lower;
  MEMBER void read(const float* numbers) {
    alignas(64) bf16 parts[2][32];
    v16 rest = load(numbers);
    for (int i = 0; i < 2; i++) {
      store(parts[i], rest), store(parts[i] + 16, rest);
      rest -= load(parts[i]);
    }
    upper = _mm512_load_si512(parts[0]), lower = _mm512_load_si512(parts[1]);
  }
};

// Columns of a unit in lines of pairs, a number in each row. ``scales``: what the unit begins with.
INLINE void unpack_table(const char* scales, const BrainTable& table, bf16* to) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    __m512i at = _mm512_srli_epi16(_mm512_loadu_si512(scales + i / 4 * 64), 4 * (i % 4));
    _mm512_store_si512(to + i * 32, _mm512_permutexvar_epi16(at, table.upper));
    _mm512_store_si512(to + i * 32 + 512, _mm512_permutexvar_epi16(at, table.lower));
  }
}
template <class F> static __attribute__((noinline)) void unpack_any_scales(const char* scales, bf16* to) {
  const __m512 twice = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  for (int i = 0; i < 16; i++) {
    v16 s, t;
    group_scales<F>(scales, i / 8 * F::groups / 2, splat(1.f), splat(0.f), s, t);
    __m512i word = _mm512_srl_epi32(_mm512_loadu_si512(scales + F::scale_bytes + i / 4 * 64), _mm_cvtsi32_si128(4 * (i % 4)));
    v16 even = (v16)_mm512_permutexvar_ps(word, twice) * s, odd = (v16)_mm512_permutexvar_ps(_mm512_srli_epi32(word, 16), twice) * s;
    _mm512_store_si512(to + i * 32, brain_pairs((__m512)even, (__m512)odd));
  }
}
// Twice an E2M1 number is 0, or 2^k or 1.5 2^k, k up to 3. Of a scale s above 0 that is a normal number, the bits of s 2^k in bfloat16 are those of s
// and k << 7, and 1.5 s has 64 to 84 more, as the last three bits of an E4M3 scale say; of a power of two 64. A table has ``base`` and k << 7, with 127
// in the bits for what 1.5 adds, and 0 for zero; what ``base`` has more than the bits of s is taken away, but not from zero.
template <class F> INLINE void unpack_fp4(const char* scales, bf16* to) {
  const bool power = F::scales == POWER;
  // The bits of s are those of its byte << ``by``, and ``more``; the byte is from ``least`` to ``most``.
  const int base = power ? 0x7d00 : 0x4400, more = power ? -0x80 : 0x3c00, by = power ? 7 : 4, least = power ? 2 : 8, most = power ? 250 : 0x7e;
  auto two = [](int x) { return x | x << 16; };
  const __m128i* from = (const __m128i*)scales;
  const __m256i bytes = power ? _mm256_castsi128_si256(_mm_loadu_si128(from)) : _mm256_loadu_si256((const __m256i*)from);
  const uint32_t other = _mm256_cmpgt_epu8_mask(_mm256_sub_epi8(bytes, _mm256_set1_epi8((char)least)), _mm256_set1_epi8((char)(most - least)));
  if (power ? other & 0xffff : other) return unpack_any_scales<F>(scales, to);
  const int16_t b = base, s = (int16_t)(base | 0x8000), half = power ? 64 : 127;
#define EIGHT(s) 0, s, s + 128, s + 128 + half, s + 256, s + 256 + half, s + 384, s + 384 + half
  alignas(64) static const int16_t codes[32] = {EIGHT(b), EIGHT(s), EIGHT(b), EIGHT(s)};  // twice, as in ``BrainTable``
#undef EIGHT
  auto kept = [&](int added) { return two(0xff80 | added); };
  const __m512i table = _mm512_load_si512(codes);
  const __m512i halves = _mm512_broadcast_i32x8(_mm256_setr_epi32(kept(64), kept(72), kept(80), kept(84), kept(80), kept(76), kept(72), kept(68)));
  // Byte i of each sixteen into both halves of lane i, above it a zero.
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i spread = _mm512_or_si512(_mm512_or_si512(lane, _mm512_slli_epi32(lane, 16)), _mm512_set1_epi16((short)0x8000));
#pragma GCC unroll 2
  for (int g = 0; g < F::groups; g++) {
    __m512i byte = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(from + g)), spread);
    __m512i keep = _mm512_permutexvar_epi32(byte, halves), away = _mm512_sub_epi16(_mm512_set1_epi16(base - more), _mm512_slli_epi16(byte, by));
#pragma GCC unroll 16
    for (int i = g * 16 / F::groups; i < (g + 1) * 16 / F::groups; i++) {
      __m512i found = _mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(scales + F::scale_bytes + i / 4 * 64), 4 * (i % 4)), table);
      if (!power) found = _mm512_and_si512(found, keep);
      _mm512_store_si512(to + i * 32, _mm512_subs_epu16(found, away));
    }
  }
}
template <class F> INLINE void unpack_brain(const char* scales, const BrainTable& table, bf16* to) {
  if constexpr (F::scales == TABLE) unpack_table(scales, table, to);
  else unpack_fp4<F>(scales, to);
}

// sums[a][w] = 16 rows of x from x[a] on by tile w of weights, over some units of x and of ``pairs``.
template <class F, int A, int W> INLINE void add_brain(const bf16* const x[2], long ld, const bf16* pairs, long units, float* sums) {
  TILE_ZERO(0);
  if (W > 1) TILE_ZERO(1);
  if (A > 1) TILE_ZERO(2);
  if (A > 1 && W > 1) TILE_ZERO(3);
  for (long u = 0; u < units; u++) {
    TILE_LOAD(4, x[0] + u * UNIT, ld * 2);
    if (A > 1) TILE_LOAD(5, x[1] + u * UNIT, ld * 2);
#pragma GCC unroll 2
    for (int p = 0; p < Brain<F>::passes; p++) {
      const bf16* right = pairs + (u * Brain<F>::passes + p) * 512;
      TILE_LOAD(6, right, 64);
      TILE_PRODUCT(0, 4, 6);
      if (A > 1) TILE_PRODUCT(2, 5, 6);
      if (W == 1) continue;
      TILE_LOAD(7, right + Brain<F>::tile, 64);
      TILE_PRODUCT(1, 4, 7);
      if (A > 1) TILE_PRODUCT(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, 64);
  if (W > 1) TILE_STORE(1, sums + 256, 64);
  if (A > 1) TILE_STORE(2, sums + W * 256, 64);
  if (A > 1 && W > 1) TILE_STORE(3, sums + (W + 1) * 256, 64);
}

// Sums that are to be scaled and added to ``kept``: of A x W tiles for each group. It is done while later ones are computed, as a register from a
// tile that was just stored waits for memory.
template <class F, int W> struct BrainSums {
  static const int groups = Brain<F>::groups;
  alignas(64) float sums[2][groups][4 * 256];
  const char* scale[groups][W];
  v16* kept = nullptr;
  long tiles = 0, at = 0, some = 0, rows;  // ``some``: groups
  explicit BrainSums(long rows) : rows(rows) {}
  MEMBER void finish() {
    for (long t = 0; t < tiles; t++) {
      v16 d[groups], *to = kept + t * 16;
      for (int g = 0; g < groups; g++) d[g] = load((const float*)scale[g][t % W]);
      for (long r = 0; r < rows; r++) {
        v16 sum = to[r];
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
          if (g < some) sum = add_product(sum, load(sums[at ^ 1][g] + t * 256 + r * 16), d[g]);
        to[r] = sum;
      }
    }
  }
  // Over ``units`` units from unit ``u`` on, whose scales are in front of ``head``.
  template <int A> MEMBER void add(const bf16* const x[2], long ld, const bf16* pairs, long u, long units, const char* const head[W], v16* to) {
    for (long g = 0; g * Brain<F>::units < units; g++) {
      const long from = g * Brain<F>::units, these = units - from < Brain<F>::units ? units - from : Brain<F>::units;
      const bf16* at_x[2] = {x[0] + from * UNIT, x[1] + from * UNIT};
      add_brain<F, A, W>(at_x, ld, pairs + from * Brain<F>::passes * 512, these, sums[at][g]);
    }
    finish();
    some = (units + Brain<F>::units - 1) / Brain<F>::units;
    for (int g = 0; g < groups; g++)
      for (int w = 0; w < W; w++)
        scale[g][w] = !F::head_bytes ? (const char*)ONES : head[w] + (F::scales == TABLE ? 64 + (u % 8 / 2 + g) * 64 : 0);
    kept = to, tiles = A * W, at ^= 1;
  }
};

// ``rows`` rows of x by W tiles of weights, into kept[sixteen rows][w][row]: those of the last sixteen end with the last row. ``first``: the tiles
// were not used before.
template <class F, int W>
static __attribute__((noinline)) void brain_tiles(const char* tile, const bf16* x, long rows, long K, bf16* pairs, v16* kept, bool first) {
  const long each = F::quant_bytes + F::scale_bytes + F::head_bytes / 8, sixteens = (rows + 15) / 16, units = K / UNIT;
  const long size = F::tile_bytes(K), last = rows < 16 ? 0 : rows - 16;
  BrainSums<F, W> sums(rows < 16 ? rows : 16);
  BrainTable table;
  for (long i = 0; i < sixteens * W * 16; i++) kept[i] = splat(0.f);
  for (long u = 0; u < units; u += Brain<F>::step) {
    const long here = units - u < Brain<F>::step ? units - u : Brain<F>::step, later = u + here;
    const char* head[W];
    for (int w = 0; w < W; w++) {
      const char *own = tile + w * size, *next = later < units ? own + F::at(later) : tile + (W + w) * size + F::head_bytes;
      head[w] = own + F::at(u / 8 * 8) - F::head_bytes;
      if (F::scales == TABLE) table.read((const float*)head[w]);
      for (long i = 0; i < here; i++) {
        for (long b = 0; first && b < each; b += 64) __builtin_prefetch(next + i * each + b, 0, 2);
        unpack_brain<F>(own + F::at(u + i), table, pairs + w * Brain<F>::tile + i * Brain<F>::passes * 512);
      }
    }
    for (long a = 0; a < sixteens; a += 2) {
      auto from = [&](long a) { return x + (a * 16 < last ? a * 16 : last) * K + u * UNIT; };
      const bf16* at[2] = {from(a), from(a + 1)};
      if (a + 1 < sixteens) sums.template add<2>(at, K, pairs, u, here, head, kept + a * W * 16);
      else sums.template add<1>(at, K, pairs, u, here, head, kept + a * W * 16);
    }
  }
  sums.finish();
}

// The same with one tile of weights for up to 16 A rows, which wait for the weights: a unit is unpacked while one before it is multiplied.
template <class F, int A>
static __attribute__((noinline)) void brain_few(const char* tile, const bf16* x, long rows, long K, bf16* pairs, v16* kept, Ahead* ahead) {
  const long late = 2, ring = 4, units = K / UNIT, each = F::quant_bytes + F::scale_bytes + F::head_bytes / 8, sixteen = rows < 16 ? rows : 16;
  const bf16* second = x + (rows - sixteen) * K;
  alignas(64) float sums[2][A * 256];
  BrainTable table;
  v16 d = load(ONES);
  long at = 0;
  for (long r = 0; r < A * 16; r++) kept[r] = splat(0.f);
  auto finish = [&] {
    for (long a = 0; a < A; a++)
      for (long r = a * 16; r < a * 16 + sixteen; r++) kept[r] = add_product(kept[r], load(sums[at ^ 1] + r * 16), d);
  };
  for (long u = 0; u < units + late; u++) {
    if (u < units) {
      if (F::scales == TABLE && u % 8 == 0) table.read(table_of<F>(tile, u));
      if (ahead) ahead->step(each);
      unpack_brain<F>(tile + F::at(u), table, pairs + u % ring * Brain<F>::passes * 512);
    }
    const long done = u - late;
    if (done < 0) continue;
    if (done % Brain<F>::units == 0) {
      TILE_ZERO(0);
      if (A > 1) TILE_ZERO(2);
    }
    TILE_LOAD(4, x + done * UNIT, K * 2);
    if (A > 1) TILE_LOAD(5, second + done * UNIT, K * 2);
#pragma GCC unroll 2
    for (int p = 0; p < Brain<F>::passes; p++) {
      TILE_LOAD(6, pairs + (done % ring * Brain<F>::passes + p) * 512, 64);
      TILE_PRODUCT(0, 4, 6);
      if (A > 1) TILE_PRODUCT(2, 5, 6);
    }
    if ((done + 1) % Brain<F>::units && done + 1 < units) continue;
    TILE_STORE(0, sums[at], 64);
    if (A > 1) TILE_STORE(2, sums[at] + 256, 64);
    if (done >= Brain<F>::units) finish();
    head_scales<F>(tile, done / Brain<F>::units * Brain<F>::units, d, d);
    at ^= 1;
  }
  finish();
}

// As ``gemm_part``; false without tiles.
template <class F, class O, class Index>
static __attribute__((noinline)) bool brain_rows(const char* tiles, const bf16* x, long M, long n0, long n1, long K, const bf16* bias, O* y, long ldy,
                                                 Index in, Index out, Ahead* ahead) {
  static thread_local TileRoom room;
  if (tiles_error()) return false;
  // So many rows of x stay in the second cache.
  long most = (1 << 20) / (K * 2) / 32 * 32;
  most = most < 64 ? 64 : most > COPIED_ROWS ? COPIED_ROWS : most;
  if (most > M) most = M;
  const long size = F::tile_bytes(K), end = (n1 + LANES - 1) / LANES, kept_bytes = (most + 15) / 16 * 2048;
  char* base = (char*)room.reserve(4 * Brain<F>::tile + kept_bytes + (in.at ? most * K * 2 : 0));
  if (!base) {
    for (long m = 0; m < M; m++)
      for (long n = 0; n < n1 - n0; n++) put(y + out[m] * ldy + n, NAN);
    return true;
  }
  bf16 *pairs = (bf16*)base, *copy = (bf16*)(base + 4 * Brain<F>::tile + kept_bytes);
  v16* kept = (v16*)(base + 4 * Brain<F>::tile);
  Ahead own(Span{tiles + n0 / LANES * size, tiles + end * size});
  if (!ahead) ahead = &own;
  for (long m0 = 0; m0 < M; m0 += most) {
    const long rows = M - m0 < most ? M - m0 : most, sixteen = rows < 16 ? rows : 16;
    const bf16* from = in.at ? copy : x + in[m0] * K;
    for (long m = 0; in.at && m < rows; m++) memcpy((void*)(copy + m * K), x + in[m0 + m] * K, K * 2);
    Tiles shapes(16, 64, 16, sixteen);
    // Weights come from memory faster one tile after another.
    const long wide = rows > 32 ? 2 : 1;
    for (long t = n0 / LANES, both; t < end; t += both) {
      both = end - t < wide ? 1 : wide;
      const bool first = m0 == 0;
      if (rows <= 16) brain_few<F, 1>(tiles + t * size, from, rows, K, pairs, kept, m0 ? nullptr : ahead);
      else if (rows <= 32) brain_few<F, 2>(tiles + t * size, from, rows, K, pairs, kept, m0 ? nullptr : ahead);
      else if (both == 2) brain_tiles<F, 2>(tiles + t * size, from, rows, K, pairs, kept, first);
      else brain_tiles<F, 1>(tiles + t * size, from, rows, K, pairs, kept, first);
      for (long w = 0; w < both; w++) {
        const long lane = (t + w) * LANES, n = lane < n0 ? n0 : lane, stop = lane + LANES < n1 ? lane + LANES : n1;
        for (long m = 0; m < rows; m += 16) {
          const long row = m + 16 <= rows ? m : rows - sixteen;
          put_rows<bf16, O>(kept + (m / 16 * both + w) * 16, sixteen, n - lane, stop - n, bias ? bias + (n - n0) : nullptr, y + (n - n0), ldy,
                            out.from(m0 + row));
        }
      }
    }
  }
  return true;
}
#endif
