// Products of many rows of x in float32. Rows of weights and of x are widened into panels that fit the caches, and a tile of four rows of weights
// keeps its sums in registers: here those of AVX-512, in half_panels.h those of AVX2. A sum takes the same products in the same order as in
// ``tile`` of gemm.h, so the bits are equal and few rows may take the other way. bfloat16 goes here where the processor has no products of it, or
// slower ones than of float32 (isa.py).
#pragma once
#include "scratch.h"
#include "simd.h"

template <class T, class O> INLINE void put_sums(v4 sum, const T* bias, O* y, int count) {
  for (int i = 0; i < count; i++) put(y + i, bias ? sum[i] + wide(bias[i]) : sum[i]);
}

// Prefetches ``bytes`` of each of some rows, which are ``ld`` bytes apart, spread over ``steps``.
struct NextRows {
  const char* row;
  long ld, rows, bytes, each, done = 0;
  NextRows(const void* from, long ld, long rows, long bytes, long steps)
      : row((const char*)from), ld(ld), rows(rows), bytes(bytes), each((rows * (bytes / 64 + 1) + steps - 1) / steps) {}
  MEMBER void step() {
    for (long i = 0; i < each && rows > 0; i++) {
      __builtin_prefetch(row + done, 0, 2);
      done += 64;
      if (done >= bytes) done = 0, row += ld, rows--;
    }
  }
};

// y = sums + bias.
template <class T, class O> INLINE void put_line(const float* sums, long count, const T* bias, O* y) {
  long i = 0;
  for (; i + 16 <= count; i += 16) store(y + i, bias ? load(sums + i) + load(bias + i) : load(sums + i));
  for (; i < count; i++) put(y + i, bias ? sums[i] + wide(bias[i]) : sums[i]);
}

// Fewer rows do not repay the copies.
static const long PANEL_LEAST = 16;

#if defined(EVENER_LANES256)
#define EVENER_PANELS 1
#include "half_panels.h"
#elif defined(__AVX512F__) && !defined(EVENER_PORTABLE)
#define EVENER_PANELS 1

static const int PANEL_ROWS = 6, PANEL_PARTS = 1, PANEL_WEIGHTS = 64;  // 24 sums
typedef __m512 Register;
INLINE Register from_memory(const float* p) { return _mm512_loadu_ps(p); }
INLINE void to_memory(float* p, Register x) { _mm512_storeu_ps(p, x); }
INLINE Register with_product(Register sum, Register a, Register b) { return _mm512_fmadd_ps(a, b, sum); }
// Rows of gate and up that a thread multiplies before it applies the activation.
static const long GATE_ROWS = PANEL_WEIGHTS;

#ifdef EVENER_DPBF16
template <class T> constexpr bool in_panels = sizeof(T) == 4;
#else
template <class T> constexpr bool in_panels = true;
#endif

// ``count`` columns in float32, then zeros up to ``padded``, a multiple of Lanes<T>::step: of bfloat16 the even ones of each step before the odd
// ones, in which order Lanes<T>::dot takes them.
INLINE void widen(const float* from, long count, long padded, float* to) {
  memcpy(to, from, count * sizeof(float));
  memset(to + count, 0, (padded - count) * sizeof(float));
}
INLINE void widen(const bf16* from, long count, long padded, float* to) {
  constexpr int S = Lanes<bf16>::step;
  bf16 tail[S];
  for (long k = 0; k < padded; k += S) {
    const bf16* at = from + k;
    if (count - k < S) {
      memset((void*)tail, 0, sizeof tail);
      if (count > k) memcpy((void*)tail, at, (count - k) * sizeof(bf16));
      at = tail;
    }
    u16x both = (u16x)load_bits(at);
    store_bits(to + k, (v16)(both << 16));
    store_bits(to + k + 16, (v16)(both & 0xffff0000u));
  }
}

// sum[r][i] += w[i] · x[r] over ``columns`` columns of four rows of weights and R of x, lane by lane; from zero if ``first``. Rows lie ``columns``
// apart.
template <int R> static __attribute__((noinline)) void panel_tile(const float* w, const float* x, long columns, float (*sum)[4][16], bool first) {
  for (int part = 0; part < PANEL_PARTS; part++) {
    const int lane = part * (16 / PANEL_PARTS);
    Register a[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) a[r][i] = first ? Register{} : from_memory(sum[r][i] + lane);
    const float *w0 = w + lane, *w1 = w0 + columns, *w2 = w1 + columns, *w3 = w2 + columns, *at = x + lane;
    for (long k = 0; k < columns; k += 16) {
      Register p0 = from_memory(w0 + k), p1 = from_memory(w1 + k), p2 = from_memory(w2 + k), p3 = from_memory(w3 + k);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        Register y = from_memory(at + r * columns + k);
        a[r][0] = with_product(a[r][0], p0, y);
        a[r][1] = with_product(a[r][1], p1, y);
        a[r][2] = with_product(a[r][2], p2, y);
        a[r][3] = with_product(a[r][3], p3, y);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) to_memory(sum[r][i] + lane, a[r][i]);
  }
}
INLINE void panel_tiles(const float* w, const float* x, long rows, long columns, float (*sum)[4][16], bool first) {
  for (; rows >= PANEL_ROWS; rows -= PANEL_ROWS, x += PANEL_ROWS * columns, sum += PANEL_ROWS) panel_tile<PANEL_ROWS>(w, x, columns, sum, first);
  if (rows == 5) panel_tile<5>(w, x, columns, sum, first);
  if (rows == 4) panel_tile<4>(w, x, columns, sum, first);
  if (rows == 3) panel_tile<3>(w, x, columns, sum, first);
  if (rows == 2) panel_tile<2>(w, x, columns, sum, first);
  if (rows == 1) panel_tile<1>(w, x, columns, sum, first);
}

// As ``gemm`` of gemm.h; false if there is no memory.
template <class O, class T, class Index>
static __attribute__((noinline)) bool panel_product(const T* x, long ldx, long M, const T* w, long n0, long n1, long K, const T* bias, O* y, long ldy, Index in,
                                                    Index out) {
  constexpr long S = Lanes<T>::step, longest = 1024, first_cache = 24576, many = PANEL_WEIGHTS;
  // Columns in equal blocks; so many rows of x that a block of theirs stays in the first cache; the weights' panel and, if there are several
  // blocks, the sums of ``most`` rows of x stay in the second one.
  const long padded = (K + S - 1) / S * S, blocks = (padded + longest - 1) / longest, wide = (padded / S + blocks - 1) / blocks * S;
  long group = first_cache / (wide * 4) / PANEL_ROWS * PANEL_ROWS;
  if (group < PANEL_ROWS) group = PANEL_ROWS;
  const long most = 48 / group ? 48 / group * group : group;
  static thread_local Scratch room;
  const long w_bytes = many * wide * 4, x_bytes = group * wide * 4, sum_bytes = most * many * 64;
  char* base = room.reserve(w_bytes + x_bytes + sum_bytes);
  if (!base) return false;
  float *panel = (float*)base, *rows = (float*)(base + w_bytes);
  float(*sum)[4][16] = (float(*)[4][16])(base + w_bytes + x_bytes), line[many];
  for (long n = n0; n < n1; n += many) {
    const long count = n1 - n < many ? n1 - n : many, quads = (count + 3) / 4;
    for (long m0 = 0; m0 < M; m0 += most) {
      const long some = M - m0 < most ? M - m0 : most;
      for (long k = 0; k < padded; k += wide) {
        const long here = padded - k < wide ? padded - k : wide, given = K - k < here ? K - k : here;
        if (blocks > 1 || m0 == 0)
          for (long i = 0; i < quads * 4; i++) widen(w + (n + (i < count ? i : 0)) * K + k, i < count ? given : 0, here, panel + i * here);
        // What is widened next: the same rows' next columns, their first ones for further rows of x, or the next rows.
        const bool on = k + wide < padded, again = !on && m0 + most < M, over = !on && !again;
        const long least = again && blocks == 1 ? 0 : over ? n1 - n - count : count, from = on ? k + wide : 0;
        NextRows next(w + (over ? n + count : n) * K + from, K * (long)sizeof(T), least < many ? least : many,
                      (K - from < wide ? K - from : wide) * (long)sizeof(T), (some + group - 1) / group * quads);
        for (long g = 0; g < some; g += group) {
          const long these = some - g < group ? some - g : group;
          for (long m = 0; m < these; m++) widen(x + in[m0 + g + m] * ldx + k, given, here, rows + m * here);
          const long after = some - g - these < group ? some - g - these : group;
          for (long q = 0; q < quads; q++) {
            next.step();
            for (long m = q; m < after; m += quads) {
              const char* row = (const char*)(x + in[m0 + g + these + m] * ldx + k);
              for (long b = 0; b < given * (long)sizeof(T); b += 64) __builtin_prefetch(row + b, 0, 2);
            }
            panel_tiles(panel + q * 4 * here, rows, these, here, sum + q * most + g, k == 0);
          }
        }
      }
      for (long m = 0; m < some; m++) {
        for (long q = 0; q < quads; q++) {
          float(*s)[16] = sum[q * most + m];
          v4 four = sums(load(s[0]), load(s[1]), load(s[2]), load(s[3]));
          memcpy(line + 4 * q, &four, sizeof four);
        }
        put_line(line, count, bias ? bias + n : nullptr, y + out[m0 + m] * ldy + (n - n0));
      }
    }
  }
  return true;
}
#endif
