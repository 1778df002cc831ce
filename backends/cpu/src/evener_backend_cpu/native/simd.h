// Sixteen float32 lanes on any instruction set: two registers of AVX2 (two_registers.h), else vector types of GCC and clang, with AVX-512 if the
// compiler may use it.
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
#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__) && !defined(__AVX512F__) && !defined(EVENER_PORTABLE)
#define EVENER_LANES256 1
#endif

typedef float v4 __attribute__((vector_size(16)));

#ifdef EVENER_LANES256
#include "two_registers.h"
INLINE v16 splat(float x) { return x; }
INLINE v16 load_bits(const void* p) { return v16::from(p); }
INLINE void store_bits(void* p, v16 x) { x.to(p); }
#else
#include "vector_types.h"
#endif

struct bf16 {
  uint16_t bits;
};

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

INLINE v16 load(const float* p) { return load_bits(p); }
INLINE v16 load(const bf16* p) { return (v16)(widened((const uint16_t*)p) << 16); }
INLINE void store(float* p, v16 x) { store_bits(p, x); }
INLINE void store(bf16* p, v16 x) {
#ifdef EVENER_DPBF16
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  u16x u = (u16x)x;
  u16x r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u16x nan = (u16x)(x != x);
  r = (r & ~nan) | (nan & 0x7fc0);
  store_lower((uint16_t*)p, r);
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
  i16x e = (ints_of(n) + 127) << 23;
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
  static MEMBER void dot(v16& a, v16 x, v16 y) { a = add_product(a, x, y); }
};
template <> struct Lanes<bf16> {
  static constexpr int step = 32;
  static MEMBER v16 raw(const bf16* p) { return load_bits(p); }
  static MEMBER void dot(v16& a, v16 x, v16 y) {
#ifdef EVENER_DPBF16
    a = (v16)_mm512_dpbf16_ps((__m512)a, (__m512bh)(__m512)x, (__m512bh)(__m512)y);
#else
    u16x u = (u16x)x, w = (u16x)y;
    a = add_product(a, (v16)(u << 16), (v16)(w << 16));
    a = add_product(a, (v16)(u & 0xffff0000u), (v16)(w & 0xffff0000u));
#endif
  }
};
