// Sampling without sorting the vocabulary. A row's tokens are thrown into buckets by how far they lie below the
// likeliest one; counts and masses of the buckets say in which bucket a wanted place lies, and only that one is sorted.
// The order, the filters and the answer are those of the contract "sample" (platforms/ops.py).
#pragma once
#include <algorithm>
#include <limits>

#include "ops.h"

namespace hr {

constexpr int kBuckets = 2048;
// Tokens this far below the likeliest (in nats) are looked at only when the answer is not among the nearer ones.
constexpr float kNear = 16.0f;

// The lowest id among the largest of x[n]; 0 when nothing is larger than minus infinity. `spoilt`: to become NaN when a
// number is not finite, unchanged otherwise.
template <bool GUARD = false>
inline int32_t argmax(const float* x, int64_t n, float* spoilt = nullptr) {
  vf tops[4] = {set1(x[0]), set1(x[0]), set1(x[0]), set1(x[0])}, poison[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) {
      const vf v = load(x + i + j * W);
      tops[j] = vmax(v, tops[j]);
      if constexpr (GUARD) poison[j] = fma(v, zero(), poison[j]);
    }
  float best = hmax(vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3])));
  float rest = GUARD ? sum(add(add(poison[0], poison[1]), add(poison[2], poison[3]))) : 0.0f;
  for (; i < n; ++i) {
    best = x[i] > best ? x[i] : best;
    if constexpr (GUARD) rest += x[i] * 0.0f;
  }
  if constexpr (GUARD) *spoilt += rest;
  for (i = 0; i + W <= n && !any_equal(load(x + i), best);) i += W;
  for (; i < n; ++i)
    if (x[i] == best) return int32_t(i);
  return 0;
}

// W float64 sums.
struct Sum64 {
  typedef double Doubles __attribute__((vector_size(W * 8)));
  typedef float Floats __attribute__((vector_size(W * 4)));
  Doubles lanes = {};
  void add(vf v) { lanes += __builtin_convertvector((Floats)v, Doubles); }
  double value() const {
    double s = 0;
    for (int i = 0; i < W; ++i) s += lanes[i];
    return s;
  }
};

// One row's tokens in the contract's order: by falling score, equal ones by rising id.
class Ranked {
 public:
  static size_t bytes(int64_t n) { return size_t(n) * 18 + kBuckets * 12 + 6 * 64 + 4 * W; }

  Ranked(const float* x, int64_t n, float temperature, uint8_t* memory) : x_(x), n_(n), temperature_(temperature) {
    keys_ = take<uint64_t>(memory, n);
    scores_ = take<float>(memory, n + W);  // a vector store may run over
    ids_ = take<int32_t>(memory, n);
    bucket_of_ = take<uint16_t>(memory, n);
    mass_ = take<double>(memory, kBuckets);
    count_ = take<int32_t>(memory, kBuckets);
    top_ = x[argmax(x, n)] / temperature;
  }

  bool finite() const { return std::isfinite(top_); }

  // Mass of all tokens, that of the likeliest being 1. NaN when there is a NaN.
  double total() const {
    const vf top = set1(top_), t = set1(temperature_);
    Sum64 sum;
    int64_t i = 0;
    for (; i + W <= n_; i += W) sum.add(mass(top, div(load(x_ + i), t)));
    double rest = 0.0;
    for (; i < n_; ++i) rest += mass(x_[i] / temperature_);
    return sum.value() + rest;
  }

  // Make the tokens within `limit` nats of the likeliest known, and count those with at least `min_p` of its mass.
  void collect(float limit, float min_p) {
    sorted_bucket_ = -1;
    held_ = gather(limit);
    float deepest = 1e-6f;
    for (int64_t i = 0; i < held_; ++i) {
      const float d = top_ - scores_[i];
      if (d > deepest && d < std::numeric_limits<float>::infinity()) deepest = d;
    }
    scale_ = float(kBuckets - 1) / deepest;
    std::memset(mass_, 0, kBuckets * sizeof *mass_);
    std::memset(count_, 0, kBuckets * sizeof *count_);
    likely_ = 0;
    const vf top = set1(top_);
    for (int64_t i = 0; i < held_; i += W) {
      float m[W], s[W] = {};
      const int64_t here = std::min<int64_t>(W, held_ - i);
      std::memcpy(s, scores_ + i, size_t(here) * 4);
      store(m, mass(top, load(s)));
      for (int64_t j = 0; j < here; ++j) {
        const float place = (top_ - s[j]) * scale_;
        const int b = place < float(kBuckets - 1) ? int(place) : kBuckets - 1;
        bucket_of_[i + j] = uint16_t(b);
        mass_[b] += double(m[j]);
        ++count_[b];
        likely_ += m[j] >= min_p;
      }
    }
  }

  int64_t held() const { return held_; }
  int64_t likely() const { return likely_; }

  // The first place (from 1) whose cumulative mass is at least (`above`: more than) `goal`, its token, and the mass.
  // false when no known token reaches it: place and mass are then those of all known ones.
  bool reach(double goal, bool above, int64_t* place, int32_t* id, double* cumulative) {
    int64_t before = 0;
    double sum = 0.0;
    auto there = [&](double m) { return above ? m > goal : m >= goal; };
    for (int b = 0; b < kBuckets; ++b) {
      if (count_[b] && there(sum + mass_[b])) {
        sort(b);
        for (int64_t i = 0; i < count_[b]; ++i) {
          sum += mass(score_of(keys_[i]));
          // sums in another order may end a rounding error short: the bucket's last token is then the one
          if (there(sum) || i + 1 == count_[b]) {
            *place = before + i + 1, *id = int32_t(keys_[i] & 0xffffffffu), *cumulative = sum;
            return true;
          }
        }
      }
      before += count_[b];
      sum += mass_[b];
    }
    *place = before, *cumulative = sum;
    return false;
  }

  // Mass of the first `place` (1 to held()) tokens, and the last of them.
  double mass_until(int64_t place, int32_t* id) {
    double sum = 0.0;
    for (int b = 0; b < kBuckets; ++b) {
      if (place <= count_[b]) {
        sort(b);
        for (int64_t i = 0; i < place; ++i) sum += mass(score_of(keys_[i]));
        *id = int32_t(keys_[place - 1] & 0xffffffffu);
        return sum;
      }
      place -= count_[b];
      sum += mass_[b];
    }
    return sum;
  }

 private:
  template <class T>
  static T* take(uint8_t*& memory, int64_t count) {
    T* piece = reinterpret_cast<T*>(memory);
    memory += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }

  static vf mass(vf top, vf score) { return vexp(sub(score, top)); }
  float mass(float score) const {
    float v[W];
    store(v, mass(set1(top_), set1(score)));
    return v[0];
  }

  // Tokens within `limit`, in rising order of id: how many.
  int64_t gather(float limit) {
    int64_t held = 0, i = 0;
#if HR_AVX512
    const __m512 top = _mm512_set1_ps(top_), t = _mm512_set1_ps(temperature_), far = _mm512_set1_ps(limit);
    __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= n_; i += 16, ids = _mm512_add_epi32(ids, _mm512_set1_epi32(16))) {
      const __m512 score = _mm512_div_ps(_mm512_loadu_ps(x_ + i), t);
      const __mmask16 near = _mm512_cmp_ps_mask(_mm512_sub_ps(top, score), far, _CMP_LE_OQ);
      if (!near) continue;
      _mm512_mask_compressstoreu_ps(scores_ + held, near, score);
      _mm512_mask_compressstoreu_epi32(ids_ + held, near, ids);
      held += __builtin_popcount(near);
    }
#endif
    for (; i < n_; ++i) {
      const float score = x_[i] / temperature_;
      if (top_ - score <= limit) scores_[held] = score, ids_[held++] = int32_t(i);
    }
    return held;
  }

  // Keys that rise as the score falls, then as the id rises.
  static uint64_t key(float score, int32_t id) {
    score += 0.0f;  // minus zero equals zero
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return uint64_t(bits) << 32 | uint32_t(id);
  }
  static float score_of(uint64_t key) {
    uint32_t bits = uint32_t(key >> 32);
    bits = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
  }

  void sort(int bucket) {
    if (bucket == sorted_bucket_) return;
    sorted_bucket_ = bucket;
    int64_t found = 0;
    for (int64_t i = 0; i < held_; ++i)
      if (bucket_of_[i] == bucket) keys_[found++] = key(scores_[i], ids_[i]);
    std::sort(keys_, keys_ + found);
  }

  const float* x_;
  int64_t n_, held_ = 0, likely_ = 0;
  float temperature_, top_, scale_ = 0.0f;
  int sorted_bucket_ = -1;
  uint64_t* keys_;
  float* scores_;
  int32_t* ids_;
  uint16_t* bucket_of_;
  double* mass_;
  int32_t* count_;
};

struct Filters {
  int64_t top_k;
  float top_p, min_p, uniform;
};

// The answer among the tokens within `limit` nats; -1 when it may lie beyond. `total` is the mass of all tokens.
inline int32_t draw(Ranked& row, const Filters& f, int64_t n, float limit, double total) {
  const bool all = limit == std::numeric_limits<float>::infinity(), every = f.top_k <= 0 || f.top_k >= n;
  row.collect(limit, f.min_p);
  if ((!every && row.held() < f.top_k && !all) || (f.min_p > 0.0f && !all && row.likely() == row.held())) return -1;
  int32_t id = 0;
  int64_t kept = every ? n : std::min(f.top_k, row.held()), place;
  double left = every ? total : row.mass_until(kept, &id), reached;
  if (f.top_p < 1.0f) {
    if (!row.reach(double(f.top_p) * left, false, &place, &id, &reached) && !all) return -1;
    kept = std::min(kept, place);
  }
  if (f.min_p > 0.0f) kept = std::min(kept, row.likely());
  kept = std::max<int64_t>(kept, 1);
  if (kept < n) left = row.mass_until(kept, &id);
  const int32_t last = id;
  if (row.reach(double(f.uniform) * left, true, &place, &id, &reached)) return place < kept ? id : kept < n ? last : id;
  if (!all && kept == n) return -1;
  return last;
}

// The largest k numbers of x[n], best first, the lower id first among equals. One pass: a vector without a number that
// exceeds the k-th best so far is left at once, which nearly all are.
inline void largest(const float* x, int64_t n, int k, float* values, int64_t* ids) {
  int held = 0;
  auto offer = [&](int64_t id) {
    const float v = x[id];
    if (held == k && !(v > values[k - 1])) return;
    int at = held < k ? held++ : k - 1;
    for (; at > 0 && v > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = v, ids[at] = id;
  };
  int64_t i = 0;
  for (; i < k; ++i) offer(i);
  for (; i + W <= n; i += W) {
    if (!(hmax(load(x + i)) > values[k - 1])) continue;
    for (int64_t j = 0; j < W; ++j) offer(i + j);
  }
  for (; i < n; ++i) offer(i);
}

inline void run_logprobs(const void* p, int chunk, int chunks, Scratch&) {
  const hr_logprobs& a = *static_cast<const hr_logprobs*>(p);
  each_row(a.rows, chunk, chunks, [&](int64_t r) {
    const float* x = a.x + r * a.x_stride;
    const float peak = x[argmax(x, a.n)], mine = x[a.ids[r]];
    const vf top = set1(peak);
    Sum64 sum;
    int64_t i = 0, above = 0;
    for (; i + W <= a.n; i += W) {
      const vf v = load(x + i);
      sum.add(vexp(sub(v, top)));
      float lanes[W];
      store(lanes, v);
      for (int j = 0; j < W; ++j) above += lanes[j] > mine;
    }
    double total = sum.value();
    for (; i < a.n; ++i) total += std::exp(double(x[i] - peak)), above += x[i] > mine;
    const double norm = double(peak) + std::log(total);
    a.own[r] = float(double(mine) - norm);
    a.rank[r] = above + 1;
    if (a.k <= 0) return;
    float* best = a.top + r * a.k;
    largest(x, a.n, a.k, best, a.top_ids + r * a.k);
    for (int j = 0; j < a.k; ++j) best[j] = float(double(best[j]) - norm);
  });
}

inline int64_t sampled(const hr_sample& a, int64_t r, Scratch& scratch) {
  const float* x = a.x + r * a.x_stride;
  float spoilt = 0.0f;
  if (a.temperature[r] == 0.0f) {
    const int32_t id = a.guarded ? argmax<true>(x, a.n, &spoilt) : argmax(x, a.n);
    return spoilt == 0.0f ? id : -1;
  }
  if (a.guarded && (argmax<true>(x, a.n, &spoilt), spoilt != 0.0f)) return -1;
  Ranked row(x, a.n, a.temperature[r], scratch.need(Ranked::bytes(a.n)));
  const Filters f{a.top_k[r], a.top_p[r], a.min_p[r], a.uniform[r]};
  const double total = f.top_k <= 0 || f.top_k >= a.n ? row.total() : 1.0;
  if (!row.finite() || !std::isfinite(total)) return argmax(x, a.n);
  int32_t id = draw(row, f, a.n, kNear, total);
  if (id < 0) id = draw(row, f, a.n, std::numeric_limits<float>::infinity(), total);
  return id < 0 ? 0 : id;
}

inline void run_sample(const void* p, int chunk, int chunks, Scratch& scratch) {
  const hr_sample& a = *static_cast<const hr_sample*>(p);
  each_row(a.rows, chunk, chunks, [&](int64_t r) {
    const int64_t id = sampled(a, r, scratch);
    if (a.guarded) static_cast<int32_t*>(a.ids)[r] = int32_t(id);
    else static_cast<int64_t*>(a.ids)[r] = id;
  });
}

}  // namespace hr
