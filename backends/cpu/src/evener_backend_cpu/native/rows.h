// Work on single rows: norms, rotation, activations.
#pragma once
#include "simd.h"

// y may be x where they have the same type.
template <class I, class T, class O> INLINE void norm_row(const I* x, const T* w, O* y, long n, float eps, float offset) {
  v16 acc = splat(0.f);
  long i = 0;
  for (; i + 16 <= n; i += 16) {
    v16 v = load(x + i);
    acc += v * v;
  }
  float total = sum16(acc);
  for (; i < n; i++) total += wide(x[i]) * wide(x[i]);
  float r = 1.f / sqrtf(total / (float)n + eps);
  i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, (load(x + i) * r) * (load(w + i) + offset));
  for (; i < n; i++) put(y + i, (wide(x[i]) * r) * (wide(w[i]) + offset));
}

// y = a + b in float32; y may be a.
template <class T> INLINE void add_row(const float* a, const T* b, float* y, long n) {
  long i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, load(a + i) + load(b + i));
  for (; i < n; i++) y[i] = a[i] + wide(b[i]);
}

// Rotates x[0:dim] into y; the rest is copied up to ``size``. y may be x where they have the same type.
template <class I, class T> INLINE void rotate_row(const I* x, T* y, const float* cos_sin, long dim, long size, bool interleaved) {
  long half = dim / 2, i = 0;
  const float *c = cos_sin, *s = cos_sin + half;
  if (interleaved) {
    for (; i < half; i++) {
      float a = wide(x[2 * i]), b = wide(x[2 * i + 1]);
      put(y + 2 * i, a * c[i] - b * s[i]);
      put(y + 2 * i + 1, b * c[i] + a * s[i]);
    }
  } else {
    for (; i + 16 <= half; i += 16) {
      v16 a = load(x + i), b = load(x + half + i), p = load(c + i), q = load(s + i);
      store(y + i, sum_of_products(a, p, -b, q));
      store(y + half + i, sum_of_products(b, p, a, q));
    }
    for (; i < half; i++) {
      float a = wide(x[i]), b = wide(x[half + i]);
      put(y + i, a * c[i] - b * s[i]);
      put(y + half + i, b * c[i] + a * s[i]);
    }
  }
  if ((const void*)y != (const void*)x)
    for (i = dim; i < size; i++) put(y + i, wide(x[i]));
}

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2 };

INLINE v16 activate(v16 x, int kind) {
  if (kind == SILU) return x / (vexp(-x) + 1.f);
  if (kind == GELU_TANH) return x * 0.5f * (vtanh((x + x * x * x * 0.044715f) * 0.7978845608f) + 1.f);
  float y[16];
  store(y, x);
  for (int i = 0; i < 16; i++) y[i] = 0.5f * y[i] * (1.f + erff(y[i] * 0.70710678f));
  return load(y);
}

// y = act(gate) * up.
template <class I, class T> INLINE void act_row(const I* gate, const I* up, T* y, long n, int kind) {
  long i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, activate(load(gate + i), kind) * load(up + i));
  if (i < n) {
    float g[16] = {}, u[16] = {}, r[16];
    for (long j = i; j < n; j++) g[j - i] = wide(gate[j]), u[j - i] = wide(up[j]);
    store(r, activate(load(g), kind) * load(u));
    for (long j = i; j < n; j++) put(y + j, r[j - i]);
  }
}
