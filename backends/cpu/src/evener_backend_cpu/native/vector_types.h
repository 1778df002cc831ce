// Sixteen 32-bit lanes as vector types of GCC and clang, with AVX-512 if the compiler may use it.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define MEMBER inline __attribute__((always_inline))
#define INLINE static MEMBER

typedef float v16 __attribute__((vector_size(64)));
typedef uint32_t u16x __attribute__((vector_size(64)));
typedef int32_t i16x __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef float v16u __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t h16u __attribute__((vector_size(32), aligned(2), may_alias));

INLINE v16 splat(float x) { return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE v16 lanes() { return v16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE v16 load_bits(const void* p) { return *(const v16u*)p; }
INLINE void store_bits(void* p, v16 x) { *(v16u*)p = x; }
INLINE v16 floats_of(i16x x) { return __builtin_convertvector(x, v16); }
INLINE i16x ints_of(v16 x) { return __builtin_convertvector(x, i16x); }
// Without a rounding between, if the processor can. A compiler that chooses may choose otherwise for another tile (GCC 13 keeps chains of
// sums apart from their products for some processors), and a row's result would depend on the number of rows.
INLINE v16 add_product(v16 sum, v16 a, v16 b) {
#ifdef __AVX512F__
  return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  return sum + a * b;
#endif
}
// a x + b y; only the second product is rounded, if the processor can.
INLINE v16 sum_of_products(v16 a, v16 x, v16 b, v16 y) { return add_product(b * y, a, x); }
INLINE u16x widened(const uint16_t* p) { return __builtin_convertvector((h16)(*(const h16u*)p), u16x); }
// The lower 16 bits of every lane.
INLINE void store_lower(uint16_t* p, u16x x) { *(h16u*)p = (h16u)__builtin_convertvector(x, h16); }

// ``mask``: a comparison's.
INLINE v16 pick(i16x mask, v16 a, v16 b) { return (v16)(((i16x)a & mask) | ((i16x)b & ~mask)); }
INLINE v16 vmax(v16 a, v16 b) {
#ifdef __AVX512F__
  return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return pick(a > b, a, b);
#endif
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
INLINE float sum16(v16 a) {
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = a[i] + a[i + 8];
  for (int i = 0; i < 4; i++) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}
INLINE int32_t sum16(i16x a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)a);
#else
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += a[i];
  return s;
#endif
}
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
