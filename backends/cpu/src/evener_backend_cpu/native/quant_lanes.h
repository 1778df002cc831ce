// Sixteen lanes of block-quantized weights, one for each row of a tile: reading scales and quants, and products with activations in 16-bit
// integers. With AVX-512 and AVX2 by their instructions; elsewhere by vector types.
#pragma once
#include "quant_blocks.h"
#include "stored_gemm.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(EVENER_PORTABLE)
#define EVENER_LANES512 1
#endif

// PRODUCT_ROWS: rows of x at a time, what fits the registers. CHAINS: sums of products side by side.
#ifdef EVENER_LANES256
static const int PRODUCT_ROWS = 4, CHAINS = 1;
#else
static const int PRODUCT_ROWS = 8, CHAINS = 4;
#endif

// Sixteen float16 numbers.
INLINE v16 halves(const char* p) {
#if defined(EVENER_LANES256)
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16)))};
#elif defined(__AVX512F__)
  return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  v16 out;
  for (int i = 0; i < 16; i++) {
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    float f;
    uint32_t bits = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
    memcpy(&f, &bits, 4);
    if (rest < 0x400) f = (float)rest * 5.9604645e-8f;
    memcpy(&bits, &f, 4);
    bits |= sign;
    memcpy(&f, &bits, 4);
    out[i] = f;
  }
  return out;
#endif
}

// Sixteen bytes, int8 or uint8.
template <class B> INLINE v16 bytes16(const char* p) {
#if defined(EVENER_LANES256) || defined(__AVX512F__)
  __m128i b = _mm_loadu_si128((const __m128i*)p);
  const bool is_signed = (B)-1 < 0;
#endif
#if defined(EVENER_LANES256)
  auto eight = [=](__m128i b) { return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b)); };
  return {eight(b), eight(_mm_srli_si128(b, 8))};
#elif defined(__AVX512F__)
  return (v16)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
#else
  float out[16];
  for (int i = 0; i < 16; i++) out[i] = (float)((const B*)p)[i];
  return load(out);
#endif
}

// 2^(s - 128) of bytes s; 255 is NaN.
INLINE v16 powers(const char* p) {
#ifdef EVENER_LANES256
  __m128i b = _mm_loadu_si128((const __m128i*)p);
  auto eight = [](__m128i s) {
    __m256i e = _mm256_cvtepu8_epi32(s), last = _mm256_cmpeq_epi32(e, _mm256_set1_epi32(255));
    __m256i odd = _mm256_and_si256(_mm256_or_si256(_mm256_cmpeq_epi32(e, _mm256_setzero_si256()), last), _mm256_set1_epi32(0x400000));
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(e, 23), odd)), _mm256_set1_ps(0.5f));
  };
  return {eight(b), eight(_mm_srli_si128(b, 8))};
#else
  u16x e;
  for (int i = 0; i < 16; i++) e[i] = (uint8_t)p[i];
  u16x odd = (u16x)((e == 0u) | (e == 255u)) & 0x400000u;  // below the normal numbers, and above infinity
  return (v16)(e << 23 | odd) * 0.5f;
#endif
}

// Pairs of neighbouring columns of sixteen rows.
struct Pair {
#if defined(EVENER_LANES512)
  __m512i both;
  MEMBER void dot(i16x& a, const int16_t* x) const {
    int32_t two;
    memcpy(&two, x, 4);
#ifdef __AVX512VNNI__
    a = (i16x)_mm512_dpwssd_epi32((__m512i)a, both, _mm512_set1_epi32(two));
#else
    a += (i16x)_mm512_madd_epi16(both, _mm512_set1_epi32(two));
#endif
  }
#elif defined(EVENER_LANES256)
  __m256i low, high;
  MEMBER void dot(i16x& a, const int16_t* x) const {
    int32_t two;
    memcpy(&two, x, 4);
    __m256i all = _mm256_set1_epi32(two);
    a.low += (i16x::Half)_mm256_madd_epi16(low, all), a.high += (i16x::Half)_mm256_madd_epi16(high, all);
  }
#else
  i16x one, two;
  MEMBER void dot(i16x& a, const int16_t* x) const { a += one * (int32_t)x[0] + two * (int32_t)x[1]; }
#endif
};

// The quants of a unit (see quant_blocks.h).
template <class F> struct Unit {
  const char* p;
  static constexpr bool six = F::bits == 6;
  // Of pair i: where its word with the upper bits is, and at which bit they begin.
  static constexpr int upper_word(int i) { return 256 + (six ? i / 8 * 64 : 0); }
  static constexpr int upper_bit(int i) { return six ? 2 * (i % 8) : i; }
#if defined(EVENER_LANES512)
  // Of four pairs: the word with their lower bits, and that with their upper ones.
  struct Words {
    __m512i low, high;
  };
  static MEMBER __m512i word(const char* p) {
    __m512i w = _mm512_loadu_si512(p);
    asm("" : "+v"(w));  // else GCC reads it again for each pair, and most words lie in two lines of the cache
    return w;
  }
  MEMBER Words words(int four) const {
    Words w{};
    if (F::bits < 8) w.low = word(p + four * 64);
    if (F::bits == 5 || six) w.high = word(p + upper_word(four * 4));
    return w;
  }
  MEMBER Pair pair(int i, const Words& w) const {
    if (F::bits == 8) return Pair{_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(p + i * 32)))};
    __m512i low = _mm512_srli_epi16(w.low, 4 * (i % 4));
    if (has_fp4(F::scales)) {
      __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)FP4));
      return Pair{_mm512_maskz_shuffle_epi8(0x5555555555555555, table, _mm512_and_si512(low, _mm512_set1_epi16(15)))};
    }
    if (F::bits == 4) return Pair{_mm512_and_si512(low, _mm512_set1_epi16(15))};
    int at = upper_bit(i);
    __m512i high = w.high;
    high = at < 4 ? _mm512_slli_epi16(high, 4 - at) : _mm512_srli_epi16(high, at - 4);
    // bits of ``low`` where the mask is set, else those of ``high``
    __m512i mixed = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca);
    return Pair{_mm512_and_si512(mixed, _mm512_set1_epi16((1 << F::bits) - 1))};
  }
#elif defined(EVENER_LANES256)
  struct Words {};
  MEMBER Words words(int) const { return {}; }
  MEMBER Pair pair(int i, Words) const { return Pair{half(i, 0), half(i, 1)}; }
  // Rows 8 h to 8 h + 7.
  MEMBER __m256i half(int i, int h) const {
    if (F::bits == 8) return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + i * 32 + h * 16)));
    auto word = [&](int at) { return _mm256_loadu_si256((const __m256i*)(p + at + h * 32)); };
    __m256i low = _mm256_and_si256(_mm256_srli_epi16(word(i / 4 * 64), 4 * (i % 4)), _mm256_set1_epi16(15));
    if (has_fp4(F::scales)) {
      __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)FP4));
      return _mm256_shuffle_epi8(table, _mm256_or_si256(low, _mm256_set1_epi16((short)0x8000)));  // the upper bytes become 0
    }
    if (F::bits == 4) return low;
    int at = upper_bit(i);
    __m256i high = word(upper_word(i));
    high = at < 4 ? _mm256_slli_epi16(high, 4 - at) : _mm256_srli_epi16(high, at - 4);
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi16((1 << F::bits) - 16)));
  }
#else
  struct Words {};
  MEMBER Words words(int) const { return {}; }
  static MEMBER u16x word(const char* p) { return (u16x)load_bits(p); }
  MEMBER Pair pair(int i, Words) const {
    Pair r;
    if (F::bits == 8) {
      for (int l = 0; l < 16; l++) r.one[l] = (int8_t)p[i * 32 + 2 * l], r.two[l] = (int8_t)p[i * 32 + 2 * l + 1];
      return r;
    }
    u16x w = word(p + i / 4 * 64) >> (4 * (i % 4));
    u16x a = w & 15u, b = w >> 16 & 15u;
    if (F::bits > 4) {
      u16x h = word(p + upper_word(i)) >> upper_bit(i);
      const uint32_t mask = six ? 3 : 1;
      a |= (h & mask) << 4, b |= (h >> 16 & mask) << 4;
    }
    if (has_fp4(F::scales))
      for (int l = 0; l < 16; l++) a[l] = FP4[a[l]], b[l] = FP4[b[l]];
    r.one = (i16x)a, r.two = (i16x)b;
    return r;
  }
#endif
};

// The numbers that columns of unit ``u`` and others share, for each lane, from where they are: d and dm keep those of the units before.
template <class F> INLINE void head_scales(const char* tile, long u, v16& d, v16& dm) {
  if (!F::head_bytes || (F::scales != TABLE && u % 8)) return;
  const char* head = tile + F::at(u / 8 * 8) - F::head_bytes;
  if (F::scales == FLOAT8) d = load((const float*)head);
  else if (F::scales == TABLE) d = load((const float*)head + 16 + u % 8 / 2 * 16);
  else d = halves(head);
  if (F::scales == KMIN) dm = halves(head + 32);
}

// w = s (q - offset) + t in group g of a unit, for each lane. d and dm: the scales that 256 columns share. t stays as it is without such terms.
template <class F> INLINE void group_scales(const char* scales, int g, v16 d, v16 dm, v16& s, v16& t) {
  if (F::scales == HALF) s = halves(scales);
  if (F::scales == AFFINE) s = halves(scales), t = halves(scales + 32);
  if (F::scales == KMIN) s = d * bytes16<uint8_t>(scales + g * 32), t = -dm * bytes16<uint8_t>(scales + g * 32 + 16);
  if (F::scales == KSIGNED) s = d * bytes16<int8_t>(scales + g * 16);
  if (F::scales == POWER) s = powers(scales);
  if (F::scales == FLOAT8) s = d * stored16<STORED_E4M3>((const uint8_t*)scales + g * 16);
  if (F::scales == TABLE) s = d;
  if (F::scales == ZERO_HALF) s = halves(scales);
  if (F::scales == ZERO_BRAIN) s = load((const bf16*)scales);
  if (has_zero(F::scales)) t = -s * bytes16<int8_t>(scales + 32);
}

// Sums of ``rows`` rows, a tile's lanes from ``skip`` on; ``bias`` and ``y`` point to the first of them.
template <class T, class O>
static __attribute__((noinline)) void put_rows(const v16* f, long rows, long skip, long count, const T* bias, O* y, long ldy, Rows out) {
  for (long r = 0; r < rows; r++) {
    O* to = y + out[r] * ldy;
    if (count == LANES && !bias) store(to, f[r]);
    else
      for (long i = 0; i < count; i++) put(to + i, bias ? f[r][skip + i] + wide(bias[i]) : f[r][skip + i]);
  }
}
