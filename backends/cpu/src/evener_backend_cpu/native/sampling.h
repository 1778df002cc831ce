// One id for each row, equal to the reference `sample`, without sorting the vocabulary: scores that a filter can keep are within some
// distance of the largest, so only those few are sorted.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

// ln x for normal positive x, to about 1 unit in the last place (Cephes' logf).
INLINE v16 vlog(v16 x) {
  i16x bits = (i16x)x;
  i16x e = ((bits >> 23) & 255) - 126;
  v16 m = (v16)((bits & 0x7fffff) | 0x3f000000);  // in [0.5, 1)
  i16x small = m < 0.70710678f;
  e += small;  // -1 where true
  m = m + pick(small, m, splat(0.f)) - 1.f;
  v16 z = m * m, n = floats_of(e);
  v16 y = m * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z + n * -2.12194440e-4f - z * 0.5f;
  return m + y + n * 0.693359375f;
}

INLINE u16x hash32(u16x x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
INLINE uint32_t hash32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
INLINE v16 gumbel(uint32_t key, u16x ids) {
  u16x bits = hash32(hash32(ids) ^ key) >> 8;
  v16 u = (floats_of((i16x)bits) + 0.5f) * 5.9604644775390625e-8f;
  u = pick(u > 0.99999994f, splat(0.99999994f), u);
  return -vlog(-vlog(u));
}

// The first id of the largest number of a row; 0 if none is a number.
template <class T> static int32_t largest_of(const T* row, long n) {
  v16 best = splat(-INFINITY);
  long i = 0;
  for (; i + 16 <= n; i += 16) best = vmax(load(row + i), best);
  float top = max16(best);
  for (; i < n; i++) top = wide(row[i]) > top ? wide(row[i]) : top;
  long at = 0;
  while (at < n && !(wide(row[at]) == top)) at++;
  return at < n ? (int32_t)at : 0;
}

struct Candidate {
  float score;
  int32_t id;
};

struct Sampler {
  long n;
  std::vector<float> score;
  std::vector<Candidate> kept;

  // Scores of a row, the first id of the largest and the largest itself. The tail of the last vector is -inf.
  template <class T> float fill(const T* x, float temperature, int32_t* best) {
    score.resize((n + 15) / 16 * 16);
    v16 most = splat(-INFINITY);
    long i = 0;
    for (; i + 16 <= n; i += 16) {
      v16 v = load(x + i) / temperature;
      store(&score[i], v);
      most = vmax(v, most);
    }
    float top = max16(most);
    for (; i < n; i++) {
      score[i] = wide(x[i]) / temperature;
      if (score[i] > top) top = score[i];
    }
    for (; i < (long)score.size(); i++) score[i] = -INFINITY;
    for (i = 0; i < n && score[i] != top;) i++;
    *best = i < n ? (int32_t)i : 0;
    return top;
  }

  // The id with the largest sum of score and noise among all.
  int32_t draw(uint32_t key) const {
    v16 most = splat(-INFINITY);
    i16x at{};
    const u16x first = (u16x)ints_of(lanes());
    for (long from = 0, end; from < (long)score.size(); from = end) {
      end = std::min<long>(from + 64, (long)score.size());
      v16 largest = load(&score[from]);
      for (long i = from + 16; i < end; i += 16) largest = vmax(load(&score[i]), largest);
      if (max16(largest) == -INFINITY) continue;  // a mask forbids them all, and the noise is most of the work
      for (long i = from; i < end; i += 16) {
        u16x ids = first + (uint32_t)i;
        v16 v = load(&score[i]) + gumbel(key, ids);
        i16x more = v > most;
        most = pick(more, v, most);
        at = ((i16x)ids & more) | (at & ~more);
      }
    }
    float top = -INFINITY;
    int32_t id = 0;
    for (int l = 0; l < 16; l++)
      if (most[l] > top || (most[l] == top && at[l] < id)) top = most[l], id = at[l];
    return id;
  }

  void gather(float least) {
    kept.clear();
    for (long i = 0; i < (long)score.size(); i += 16) {
      i16x in = load(&score[i]) >= least;
      bool any = false;
      for (int l = 0; l < 16; l++) any |= in[l] != 0;
      if (!any) continue;
      for (int l = 0; l < 16; l++)
        if (in[l] && i + l < n) kept.push_back(Candidate{score[i + l], (int32_t)(i + l)});
    }
  }
  void sort() {
    std::sort(kept.begin(), kept.end(),
              [](const Candidate& a, const Candidate& b) { return a.score != b.score ? a.score > b.score : a.id < b.id; });
  }

  double mass(float top) const {
    double total = 0;
    for (long i = 0; i < (long)score.size(); i += 16) total += sum16(vexp(load(&score[i]) - top));
    return total;
  }

  // As draw, among the ids that the filters keep.
  int32_t draw_filtered(uint32_t key, float top, int32_t best, long top_k, float top_p, float min_p) {
    bool few = top_k > 0 && top_k < n;
    double total = few ? 0 : mass(top);
    long count = 0;
    // Widen the distance until all ids that may stay are included; ids beyond a filter's bound stay out.
    for (float reach = 4.f;; reach *= 1.5f) {
      bool all = reach > 1000.f;
      gather(all ? -INFINITY : top - reach);
      count = few ? std::min<long>(top_k, (long)kept.size()) : (long)kept.size();
      if (few && !all && (long)kept.size() < top_k) continue;
      sort();
      if (few) {
        total = 0;
        for (long i = 0; i < count; i++) total += vexp1(kept[i].score - top);
      }
      double before = 0;
      long i = 0;
      bool closed = few || all;
      for (; i < count; i++) {
        float p = (float)(vexp1(kept[i].score - top) / total), first = (float)(1. / total);
        float sum = (float)(before + p) - p;
        if ((i > 0 && top_p < 1.f && sum >= top_p) || p < min_p * first) {
          closed = true;
          break;
        }
        before += p;
      }
      if (closed) {
        count = i;
        break;
      }
    }
    float most = -INFINITY;
    int32_t id = best;
    for (long i = 0; i < count; i += 16) {
      uint32_t ids[16] = {};
      long left = std::min<long>(16, count - i);
      for (long l = 0; l < left; l++) ids[l] = (uint32_t)kept[i + l].id;
      v16 noise = gumbel(key, (u16x)load_bits(ids));
      for (long l = 0; l < left; l++)
        if (kept[i + l].score + noise[l] > most) most = kept[i + l].score + noise[l], id = kept[i + l].id;
    }
    return id;
  }

  static double vexp1(float x) { return (double)exp1(x); }
};

template <class T>
static void sample_row(Sampler& s, const T* x, float temperature, long top_k, float top_p, float min_p, int32_t seed, int32_t position, int32_t* id) {
  int32_t best;
  bool is_greedy = temperature <= 0.f;
  float top = s.fill(x, is_greedy ? 1.f : temperature, &best);
  *id = best;
  if (is_greedy || top == -INFINITY) return;
  uint32_t key = hash32(hash32((uint32_t)seed) + (uint32_t)position * 0x9e3779b9u);
  bool filtered = top_k > 0 || top_p < 1.f || min_p > 0.f;
  *id = filtered ? s.draw_filtered(key, top, best, top_k, top_p, min_p) : s.draw(key);
}

// The values of ids whose bit is 0 become -inf.
template <class T> static void mask_row(T* x, const uint32_t* mask, long n) {
  static const uint32_t bit[32] = {1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                   1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
                                   1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
                                   1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};
  const v16 never = splat(-INFINITY);
  long i = 0;
  for (; i + 32 <= n; i += 32) {
    uint32_t word = mask[i / 32];
    if (word == ~0u) continue;
    for (T* at = x + i; at < x + i + 32; at += 16) {
      // Most words of a narrow mask are 0: their values are not even read.
      i16x out = ((u16x)load_bits(bit + (at - x - i)) & word) == 0u;
      store(at, word ? pick(out, never, load(at)) : never);
    }
  }
  for (; i < n; i++)
    if (!(mask[i / 32] & bit[i % 32])) put(x + i, -INFINITY);
}
