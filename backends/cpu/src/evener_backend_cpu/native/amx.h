// Products of bfloat16 rows with AMX, whose tile registers hold 16 rows of 64 bytes. One instruction adds 16 x 16 sums of 32 products.
// An element's sum takes 32 columns after another, and within them the order of the instruction, which is the same for both operands: so the
// few rows of x that follow weights from memory and the many of a prompt get the same bits, though the operands change places.
#pragma once
#if defined(__AMX_BF16__) && defined(__linux__) && !defined(EVENER_PORTABLE)
#define EVENER_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "ahead.h"
#include "simd.h"

// GCC's own intrinsics for reading a tile do not say that they read memory, so what was written before may come too late.
#define TILE_LOAD(to, from, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #to ::"r"(from), "r"((long)(stride)) : "memory")
#define TILE_STORE(from, to, stride) asm volatile("tilestored %%tmm" #from ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define TILE_ZERO(to) asm volatile("tilezero %tmm" #to)
#define TILE_PRODUCT(to, left, right) asm volatile("tdpbf16ps %tmm" #right ", %tmm" #left ", %tmm" #to)

static const long TILE_LINES = 16, TILE_COLUMNS = 32;
// Rows of x that are copied at a time, where they are. A thread keeps the memory, and putting the weights into pairs again takes little time
// beside so many products.
static const long COPIED_ROWS = 512;

// 0, or the error with which the system refuses this process the tile registers, for which it must be asked (arch_prctl ARCH_REQ_XCOMP_PERM,
// XTILEDATA).
static int tiles_error() {
  static const int error = syscall(SYS_arch_prctl, 0x1023, 18) ? errno : 0;
  return error;
}

// The shapes of the tile registers from here to the end of the block. Not _tile_loadconfig: GCC takes most of its operand for unused.
class Tiles {
  struct alignas(64) Config {
    uint8_t palette, start, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };

 public:
  // Registers 0 to 3: sums, ``rows`` rows for ``columns`` columns; 4 and 5: the left operand, as many rows; 6 and 7: the right one, 16 pairs of
  // ``columns``. 4 and 5 have ``left`` bytes in a row, 6 and 7 ``right`` rows.
  explicit Tiles(long columns, long left = 64, long right = 16, long rows = 16) {
    Config c{};
    c.palette = 1;
    for (int i = 0; i < 8; i++) {
      c.rows[i] = (uint8_t)(i > 5 ? right : rows);
      c.bytes[i] = (uint16_t)(i == 4 || i == 5 ? left : 4 * columns);
    }
    asm volatile("ldtilecfg %0" ::"m"(c));
  }
  ~Tiles() { asm volatile("tilerelease"); }
};

// Transposes 16 x 16 pairs of numbers: out[i] has pair i of each of the rows.
INLINE void transpose_pairs(const __m512i in[16], __m512i out[16]) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    out[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
    out[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
    out[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
  }
}

// Pairs of columns k to k + 31 of ``count`` rows, side by side in lines of ``width`` pairs; zeros beyond the last column and row.
template <class Row> INLINE void pack_pairs(Row row, long count, long width, long k, long K, bf16* to) {
  __m512i in[16], out[16];
  __mmask32 mask = K - k >= TILE_COLUMNS ? ~0u : (1u << (K - k)) - 1;
  for (long i = 0; i < 16; i++) in[i] = i < count ? _mm512_maskz_loadu_epi16(mask, row(i) + k) : _mm512_setzero_si512();
  transpose_pairs(in, out);
  for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(to + i * 2 * width, (__mmask16)((1u << width) - 1), out[i]);
}

// Memory that a thread keeps for its next product.
class TileRoom {
  char* p = nullptr;
  long size = 0;

 public:
  ~TileRoom() { free(p); }
  bf16* reserve(long bytes) {
    if (bytes > size) {
      free(p);
      size = (bytes + 4095) / 4096 * 4096;
      p = (char*)aligned_alloc(64, size);
      if (!p) size = 0;
    }
    return (bf16*)p;
  }
};

template <class O> INLINE void put_row(const float* sums, long count, const bf16* bias, O* y) {
  if (count == 16 && !bias) return store(y, load(sums));
  for (long i = 0; i < count; i++) put(y + i, bias ? sums[i] + wide(bias[i]) : sums[i]);
}

// 16 C tokens, as rows of 64-byte steps, by one block of weights in pairs.
template <int C> INLINE void add_tokens(const bf16* const x[C], long ld, const bf16* pairs, long steps, float* sums) {
  TILE_ZERO(0);
  if (C > 1) TILE_ZERO(1);
  if (C > 2) TILE_ZERO(2);
  if (C > 3) TILE_ZERO(3);
  for (long s = 0; s < steps; s++) {
    TILE_LOAD(6, pairs + s * 512, 64);
    TILE_LOAD(4, x[0] + s * TILE_COLUMNS, ld * 2);
    TILE_PRODUCT(0, 4, 6);
    if (C > 1) {
      TILE_LOAD(5, x[C > 1] + s * TILE_COLUMNS, ld * 2);
      TILE_PRODUCT(1, 5, 6);
    }
    if (C > 2) {
      TILE_LOAD(4, x[C > 2 ? 2 : 0] + s * TILE_COLUMNS, ld * 2);
      TILE_PRODUCT(2, 4, 6);
    }
    if (C > 3) {
      TILE_LOAD(5, x[C > 3 ? 3 : 0] + s * TILE_COLUMNS, ld * 2);
      TILE_PRODUCT(3, 5, 6);
    }
  }
  TILE_STORE(0, sums, 64);
  if (C > 1) TILE_STORE(1, sums + 256, 64);
  if (C > 2) TILE_STORE(2, sums + 512, 64);
  if (C > 3) TILE_STORE(3, sums + 768, 64);
}

// 16 C tokens by two blocks of weights: each value read from x is used twice.
template <int C> INLINE void add_tokens_twice(const bf16* const x[C], long ld, const bf16* pairs, long steps, float* sums) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  if (C > 1) TILE_ZERO(2);
  if (C > 1) TILE_ZERO(3);
  for (long s = 0; s < steps; s++) {
    TILE_LOAD(4, x[0] + s * TILE_COLUMNS, ld * 2);
    TILE_LOAD(6, pairs + s * 512, 64);
    TILE_PRODUCT(0, 4, 6);
    TILE_LOAD(7, pairs + (steps + s) * 512, 64);
    TILE_PRODUCT(1, 4, 7);
    if (C > 1) {
      TILE_LOAD(5, x[C > 1] + s * TILE_COLUMNS, ld * 2);
      TILE_PRODUCT(2, 5, 6);
      TILE_PRODUCT(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, 64);
  TILE_STORE(1, sums + 256, 64);
  if (C > 1) TILE_STORE(2, sums + 512, 64);
  if (C > 1) TILE_STORE(3, sums + 768, 64);
}

// 16 or 32 rows of weights are put into pairs, for all of x.
template <class O, class Index>
static bool panel_rows(const bf16* x, long ldx, long M, const bf16* w, long n0, long n1, long K, const bf16* bias, O* y, long ldy, Index in, Index out) {
  static thread_local TileRoom room;
  const long steps = (K + TILE_COLUMNS - 1) / TILE_COLUMNS, wide = steps * TILE_COLUMNS, tiles = (M + TILE_LINES - 1) / TILE_LINES;
  // Tiles are read from x where they lie, but not across its end, and not rows that are apart.
  const long direct = in.at || wide != K ? 0 : M / TILE_LINES;
  bf16* pairs = room.reserve(steps * 2048 + (tiles - direct) * TILE_LINES * wide * 2);
  if (!pairs) return false;
  bf16* copy = pairs + steps * 1024;
  for (long m = direct * TILE_LINES; m < tiles * TILE_LINES; m++) {
    bf16* to = copy + (m - direct * TILE_LINES) * wide;
    long given = m < M ? K : 0;
    if (given) memcpy((void*)to, x + in[m] * ldx, K * 2);
    memset((void*)(to + given), 0, (wide - given) * 2);
  }
  alignas(64) float sums[4 * 256];
  Tiles shapes(16);
  for (long n = n0; n < n1;) {
    long rows = n1 - n < 32 ? n1 - n : 32, blocks = rows > 16 ? 2 : 1;
    for (long b = 0; b < blocks; b++)
      for (long s = 0; s < steps; s++)
        pack_pairs([&](long i) { return w + (n + 16 * b + i) * K; }, rows - 16 * b < 16 ? rows - 16 * b : 16, 16, s * TILE_COLUMNS, K,
                   pairs + (b * steps + s) * 512);
    for (long t = 0; t < tiles;) {
      bool here = t < direct;
      long some = (here ? direct : tiles) - t, ld = here ? ldx : wide;
      if (some > 4 / blocks) some = 4 / blocks;
      const bf16* at[4];
      for (long c = 0; c < some; c++) at[c] = here ? x + in[(t + c) * TILE_LINES] * ldx : copy + (t + c - direct) * TILE_LINES * wide;
      if (blocks == 2) {
        if (some == 2) add_tokens_twice<2>(at, ld, pairs, steps, sums);
        if (some == 1) add_tokens_twice<1>(at, ld, pairs, steps, sums);
      } else {
        if (some == 4) add_tokens<4>(at, ld, pairs, steps, sums);
        if (some == 3) add_tokens<3>(at, ld, pairs, steps, sums);
        if (some == 2) add_tokens<2>(at, ld, pairs, steps, sums);
        if (some == 1) add_tokens<1>(at, ld, pairs, steps, sums);
      }
      long end = (t + some) * TILE_LINES < M ? (t + some) * TILE_LINES : M;
      for (long m = t * TILE_LINES; m < end; m++)
        for (long b = 0; b < blocks; b++) {
          const float* from = sums + ((m / TILE_LINES - t) * blocks + b) * 256 + m % TILE_LINES * 16;
          put_row(from, rows - 16 * b < 16 ? rows - 16 * b : 16, bias ? bias + n + 16 * b : nullptr, y + out[m] * ldy + (n + 16 * b - n0));
        }
      t += some;
    }
    n += rows;
  }
  return true;
}

// More than 16 rows of x. False if there is no memory for copies.
template <class O, class Index>
static bool many_rows(const bf16* x, long ldx, long M, const bf16* w, long n0, long n1, long K, const bf16* bias, O* y, long ldy, Index in, Index out) {
  const long most = in.at || K % TILE_COLUMNS ? COPIED_ROWS : M;
  for (long m = 0; m < M; m += most)
    if (!panel_rows<O>(x, ldx, M - m < most ? M - m : most, w, n0, n1, K, bias, y, ldy, in.from(m), out.from(m))) return false;
  return true;
}

// Up to 16 rows of x, in pairs: weights are read as they lie in memory, those of the next block are fetched during this one.
template <class O, class Index>
static bool few_rows(const bf16* x, long ldx, long M, const bf16* w, long n0, long n1, long K, const bf16* bias, O* y, long ldy, Index in, Index out,
                     Ahead& ahead) {
  static thread_local TileRoom room;
  const long whole = K / TILE_COLUMNS, steps = (K + TILE_COLUMNS - 1) / TILE_COLUMNS;
  const bool direct = M == 1 && whole == steps;
  bf16* pairs = room.reserve(steps * TILE_COLUMNS * M * 2 + 1024);
  if (!pairs) return false;
  bf16* edge = pairs + steps * TILE_COLUMNS * M;  // 16 rows of the last columns, or of the last rows
  edge = (bf16*)(((uintptr_t)edge + 63) & ~(uintptr_t)63);
  const bf16* right = pairs;
  if (direct) right = x + in[0] * ldx;
  else
    for (long s = 0; s < steps; s++)
      pack_pairs([&](long m) { return x + in[m] * ldx; }, M, M, s * TILE_COLUMNS, K, pairs + s * TILE_COLUMNS * M);
  alignas(64) float sums[256], turned[16];
  ahead.at_least(32 * K);
  Tiles shapes(M);
  for (long n = n0; n < n1; n += 16) {
    const bf16* rows = w + n * K;
    long count = n1 - n < 16 ? n1 - n : 16;
    TILE_ZERO(0);
    for (long s = 0; s < steps; s++) {
      ahead.step(s < whole ? count * 64 : count * (K * 2 - s * 64));
      if (count == 16 && s < whole) TILE_LOAD(4, rows + s * TILE_COLUMNS, K * 2);
      else {
        __mmask32 mask = s < whole ? ~0u : (1u << (K - s * TILE_COLUMNS)) - 1;
        for (long i = 0; i < 16; i++)
          _mm512_store_si512(edge + i * 32, i < count ? _mm512_maskz_loadu_epi16(mask, rows + i * K + s * TILE_COLUMNS) : _mm512_setzero_si512());
        TILE_LOAD(4, edge, 64);
      }
      TILE_LOAD(6, right + s * TILE_COLUMNS * M, 4 * M);
      TILE_PRODUCT(0, 4, 6);
    }
    TILE_STORE(0, sums, 4 * M);
    for (long m = 0; m < M; m++) {
      for (long i = 0; i < 16; i++) turned[i] = sums[i * M + m];
      put_row(turned, count, bias ? bias + n : nullptr, y + out[m] * ldy + (n - n0));
    }
  }
  return true;
}
#endif
