// Sixteen float32 lanes on any instruction set: vector types of GCC and clang, with AVX-512 if the compiler may use it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(EVENER_PORTABLE)
#define EVENER_DPBF16 1
#endif

#define MEMBER inline __attribute__((always_inline))
#define INLINE static MEMBER

typedef float v16 __attribute__((vector_size(64)));
typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t u16x __attribute__((vector_size(64)));
typedef int32_t i16x __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16xu __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t h16u __attribute__((vector_size(32), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

INLINE v16 splat(float x) { return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE v16 lanes() { return v16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

INLINE float wide(float x) { return x; }
INLINE float wide(bf16 x) {
  uint32_t u = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE v16 load(const float* p) { return *(const v16u*)p; }
INLINE v16 load(const bf16* p) {
  u16x u = __builtin_convertvector((h16)(*(const h16u*)p), u16x) << 16;
  return (v16)u;
}
INLINE void store(float* p, v16 x) { *(v16u*)p = x; }
INLINE void store(bf16* p, v16 x) {
#ifdef EVENER_DPBF16
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  u16x u = (u16x)x;
  u16x r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u16x nan = (u16x)(x != x);
  r = (r & ~nan) | (nan & 0x7fc0);
  *(h16u*)p = (h16u)__builtin_convertvector(r, h16);
#endif
}
// The value after a store and a load in T.
template <class T> INLINE v16 rounded(v16 x) {
  if (sizeof(T) == 4) return x;
  T tmp[16];
  store(tmp, x);
  return load(tmp);
}
template <class T> INLINE float rounded1(float x) {
  T tmp;
  put(&tmp, x);
  return wide(tmp);
}

INLINE v16 pick(i16x mask, v16 a, v16 b) { return (v16)(((i16x)a & mask) | ((i16x)b & ~mask)); }
INLINE v16 vmax(v16 a, v16 b) { return pick(a > b, a, b); }

INLINE float sum16(v16 a) {
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = a[i] + a[i + 8];
  for (int i = 0; i < 4; i++) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}
INLINE float max16(v16 a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a);
#else
  float m = a[0];
  for (int i = 1; i < 16; i++) m = a[i] > m ? a[i] : m;
  return m;
#endif
}

// e^x to about 1 unit in the last place; exactly 0 below -87.3, as for masked scores.
INLINE v16 vexp(v16 x) {
  const v16 lo = splat(-87.3f), hi = splat(88.7f);
  v16 y = pick(x < lo, lo, pick(x > hi, hi, x));
  const v16 magic = splat(12582912.f);
  v16 n = (y * 1.44269504f + magic) - magic;
  v16 r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  v16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  i16x e = (__builtin_convertvector(n, i16x) + 127) << 23;
  return pick(x < lo, splat(0.f), p * (v16)e);
}
INLINE float exp1(float x) { return vexp(splat(x))[0]; }
INLINE v16 vtanh(v16 x) { return 1.f - 2.f / (vexp(x * 2.f) + 1.f); }

// One 64-byte load of T and the product of two of them added to 16 partial sums. Every product of two rows goes through these in
// the same order, whatever the tile, so a result does not depend on other rows.
template <class T> struct Lanes;
template <> struct Lanes<float> {
  static constexpr int step = 16;
  static MEMBER v16 raw(const float* p) { return load(p); }
  static MEMBER void dot(v16& a, v16 x, v16 y) { a += x * y; }
};
template <> struct Lanes<bf16> {
  static constexpr int step = 32;
  static MEMBER v16 raw(const bf16* p) { return (v16)(*(const u16xu*)p); }
  static MEMBER void dot(v16& a, v16 x, v16 y) {
#ifdef EVENER_DPBF16
    a = (v16)_mm512_dpbf16_ps((__m512)a, (__m512bh)(__m512)x, (__m512bh)(__m512)y);
#else
    u16x u = (u16x)x, w = (u16x)y;
    a += (v16)(u << 16) * (v16)(w << 16);
    a += (v16)(u & 0xffff0000u) * (v16)(w & 0xffff0000u);
#endif
  }
};

// The sums of four vectors' lanes.
INLINE v4 sums(v16 a, v16 b, v16 c, v16 d) {
#if defined(__AVX512DQ__) && !defined(EVENER_PORTABLE)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512 r = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(r), _mm512_extractf32x8_ps(r, 1));
  return (v4)_mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
#else
  return v4{sum16(a), sum16(b), sum16(c), sum16(d)};
#endif
}
