// Elements of quantized state: numbers divided by a scale, in one byte. They are those of stored_gemm.h.
#pragma once
#include "stored_gemm.h"

// The element nearest to x, of two equally near the even one; what is too large becomes the largest. NaN becomes 0 in int8.
template <int KIND> INLINE uint8_t element(float x) {
  if (KIND == STORED_INT8) {
    float y = x > 127.f ? 127.f : (x < -127.f ? -127.f : (x == x ? x : 0.f));
    return (uint8_t)(int8_t)((y + 12582912.f) - 12582912.f);
  }
  const int mantissa = KIND == STORED_E4M3 ? 3 : 2;
  const uint32_t bias = KIND == STORED_E4M3 ? 120 : 112;
  const float largest = KIND == STORED_E4M3 ? 448.f : 57344.f, normal = KIND == STORED_E4M3 ? 0x1p-6f : 0x1p-14f;
  uint32_t all, u;
  memcpy(&all, &x, 4);
  float a = x < 0.f ? -x : x;
  a = a > largest ? largest : a;
  memcpy(&u, &a, 4);
  u &= 0x7fffffffu;  // of -0
  uint32_t high = ((u + (1u << (22 - mantissa)) - 1 + ((u >> (23 - mantissa)) & 1)) >> (23 - mantissa)) - (bias << mantissa);
  float units = a * (KIND == STORED_E4M3 ? 0x1p9f : 0x1p16f);
  uint32_t low = (uint32_t)(int32_t)((units < 16.f ? units + 12582912.f : 12582912.f) - 12582912.f);
  uint32_t found = x != x ? 0x7fu : (a < normal ? low : high);
  return (uint8_t)(found | (all >> 24 & 0x80u));
}

// n elements, a multiple of 16 * 4 / sizeof(T), as T in the same order.
template <class T> __attribute__((noinline)) static void widen(long kind, const uint8_t* from, long n, T* to) {
  with_stored_kind(kind, [&](auto k) {
    constexpr long S = Lanes<T>::step;
    for (long i = 0; i < n; i += S) {
      v16 v = stored_lanes<decltype(k)::value>(from + i, (T*)nullptr);
      store_bits(to + i, v);
    }
  });
}
