// Sixteen 32-bit lanes in two registers of AVX2. GCC splits a vector type of 64 bytes into two as well, but keeps every variable of it in
// memory; the members of a small class stay in registers. The operators are those of GCC's vector types.
#pragma once
#include <immintrin.h>

#include <cstdint>

#define MEMBER inline __attribute__((always_inline))
#define INLINE static MEMBER

template <class E> struct Sixteen {
  typedef E Half __attribute__((vector_size(32)));
  typedef E Unaligned __attribute__((vector_size(32), aligned(1), may_alias));
  Half low, high;
  Sixteen() = default;
  MEMBER Sixteen(E x) : low(Half{x, x, x, x, x, x, x, x}), high(low) {}
  MEMBER Sixteen(Half low, Half high) : low(low), high(high) {}
  // The same bits.
  template <class F> MEMBER explicit Sixteen(Sixteen<F> other) : low((Half)other.low), high((Half)other.high) {}
  static MEMBER Sixteen from(const void* p) { return {*(const Unaligned*)p, *((const Unaligned*)p + 1)}; }
  MEMBER void to(void* p) const { *(Unaligned*)p = low, *((Unaligned*)p + 1) = high; }
  MEMBER E operator[](int i) const { return i < 8 ? low[i] : high[i - 8]; }

  MEMBER Sixteen operator-() const { return {-low, -high}; }
  MEMBER Sixteen operator~() const { return {~low, ~high}; }
#define OPERATOR(OP)                                                                                             \
  friend MEMBER Sixteen operator OP(Sixteen a, Sixteen b) { return {a.low OP b.low, a.high OP b.high}; }          \
  MEMBER Sixteen& operator OP##=(Sixteen b) { return *this = *this OP b; }
  OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(^) OPERATOR(<<) OPERATOR(>>)
#undef OPERATOR
// -1 in the lanes where it is true, else 0.
#define COMPARISON(OP) \
  friend MEMBER Sixteen<int32_t> operator OP(Sixteen a, Sixteen b) { return {a.low OP b.low, a.high OP b.high}; }
  COMPARISON(==) COMPARISON(!=) COMPARISON(<) COMPARISON(>) COMPARISON(<=) COMPARISON(>=)
#undef COMPARISON
};

typedef Sixteen<float> v16;
typedef Sixteen<uint32_t> u16x;
typedef Sixteen<int32_t> i16x;

INLINE v16 lanes() { return {v16::Half{0, 1, 2, 3, 4, 5, 6, 7}, v16::Half{8, 9, 10, 11, 12, 13, 14, 15}}; }
INLINE v16 floats_of(i16x x) { return {_mm256_cvtepi32_ps((__m256i)x.low), _mm256_cvtepi32_ps((__m256i)x.high)}; }
INLINE i16x ints_of(v16 x) { return {(i16x::Half)_mm256_cvttps_epi32(x.low), (i16x::Half)_mm256_cvttps_epi32(x.high)}; }
// Without a rounding between; elsewhere the compiler chooses, and for some processors it keeps chains of sums apart from their products.
INLINE v16 add_product(v16 sum, v16 a, v16 b) { return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)}; }
// a x + b y; only the second product is rounded.
INLINE v16 sum_of_products(v16 a, v16 x, v16 b, v16 y) { return add_product(b * y, a, x); }

INLINE u16x widened(const uint16_t* p) {
  auto half = [](const uint16_t* p) { return (u16x::Half)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); };
  return {half(p), half(p + 8)};
}
// The lower 16 bits of every lane.
INLINE void store_lower(uint16_t* p, u16x x) {
  x &= 0xffffu;
  __m256i mixed = _mm256_packus_epi32((__m256i)x.low, (__m256i)x.high);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}

// ``mask``: a comparison's.
INLINE v16 pick(i16x mask, v16 a, v16 b) {
  return {_mm256_blendv_ps(b.low, a.low, (__m256)mask.low), _mm256_blendv_ps(b.high, a.high, (__m256)mask.high)};
}
INLINE v16 vmax(v16 a, v16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE float max16(v16 a) {
  __m256 m = _mm256_max_ps(a.low, a.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// Of each vector the sums of lanes i, i + 4, i + 8 and i + 12.
INLINE __m128 four_sums(v16 a) {
  __m256 s = a.low + a.high;
  return _mm256_castps256_ps128(s) + _mm256_extractf128_ps(s, 1);
}
INLINE float sum16(v16 a) {
  __m128 s = four_sums(a);
  s += _mm_movehl_ps(s, s);
  return s[0] + s[1];
}
INLINE int32_t sum16(i16x a) {
  __m256i s = (__m256i)(a.low + a.high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
// The sums of four vectors' lanes, each as sum16 adds them.
INLINE __m128 sums(v16 a, v16 b, v16 c, v16 d) {
  __m128 w = four_sums(a), x = four_sums(b), y = four_sums(c), z = four_sums(d);
  _MM_TRANSPOSE4_PS(w, x, y, z);
  return (w + y) + (x + z);
}
