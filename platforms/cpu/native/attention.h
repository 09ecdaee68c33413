// Paged attention. A task is one KV head of one request: all query heads that share it read each key and value once.
//
// Decode: one query token. When there are fewer tasks than threads want, the keys are cut into `splits` ranges whose
// partial results are joined by a second step. Prefill: kQueryBlock query tokens x the group's heads are the rows of
// two matrix products a block of keys, with a running maximum and sum (flash attention).
#pragma once
#include <algorithm>
#include <limits>

#include "ops.h"

namespace hr {

constexpr int kQueryRows = 32;   // rows of a prefill task: query tokens x query heads of the group
constexpr int kKeyTile = 64;     // keys a prefill task handles at a time
constexpr float kMinus = -std::numeric_limits<float>::infinity();

template <class T>
struct Cache {  // strides in elements; see hr_kv_write for the layouts
  const T *k, *v;
  int64_t block_stride, s, d;
  const T* key_block(int64_t block, int head) const { return k + block * block_stride + head * s * d; }
  const T* value_block(int64_t block, int head) const { return v + block * block_stride + head * s * d; }
};

template <class T>
inline Cache<T> cache_of(const hr_attention& a) {
  return {static_cast<const T*>(a.k_cache), static_cast<const T*>(a.v_cache), a.block_stride, a.block_size, a.head_dim};
}

inline int64_t partial_floats(const hr_attention& a) { return a.head_dim + 2; }

// Scores of G query rows against 16 keys that start at `in` of a block: c[g][16].
template <class T>
inline void key_scores(const T* q, int64_t ldq, int rows, const T* keys, int64_t in, int64_t s, int64_t d,
                       float (*c)[kCols]) {
  std::memset(c, 0, sizeof(float) * kCols * size_t(rows));
  constexpr bool kPairs = sizeof(T) == 2;
  const uint8_t* b = reinterpret_cast<const uint8_t*>(keys + in * (kPairs ? 2 : 1));
  mm_rows<kPairs>(q, ldq, b, s * 4, d, c, rows);
}

// One query token, the heads of one group, keys [from, to): running maximum, sum and weighted values.
// acc [G][d], m and l [G]. q: G rows of d.
template <class T>
void decode_range(const hr_attention& a, const Cache<T>& cache, const T* q, const int32_t* table, int head, int group,
                  int64_t from, int64_t to, float* m, float* l, float* acc) {
  const int64_t s = cache.s, d = cache.d;
  alignas(64) float c[8][kCols];
  alignas(64) T p[8][kCols];
  for (int64_t t = from / kCols * kCols; t < to; t += kCols) {
    const int64_t in = t % s;
    const T* keys = cache.key_block(table[t / s], head);
    const T* values = cache.value_block(table[t / s], head);
    const int live = int(std::min<int64_t>(to - t, kCols)), dead = int(std::max<int64_t>(from - t, 0));
    for (int g0 = 0; g0 < group; g0 += 8) {
      const int rows = std::min(group - g0, 8);
      key_scores(q + g0 * d, d, rows, keys, in, s, d, c);
      for (int g = 0; g < rows; ++g) {
        float* row = c[g];
        for (int i = 0; i < kCols; i += W) store(row + i, mul(load(row + i), set1(a.scale)));
        if (a.softcap > 0.0f)
          for (int i = 0; i < kCols; i += W)
            store(row + i, mul(vtanh(mul(load(row + i), set1(1.0f / a.softcap))), set1(a.softcap)));
        for (int i = 0; i < dead; ++i) row[i] = kMinus;
        for (int i = live; i < kCols; ++i) row[i] = kMinus;
        float top = m[g0 + g];
        for (int i = 0; i < kCols; ++i) top = row[i] > top ? row[i] : top;
        const float shrink = m[g0 + g] == kMinus ? 0.0f : std::exp(m[g0 + g] - top);
        vf total = zero();
        for (int i = 0; i < kCols; i += W) {
          const vf e = vexp(sub(load(row + i), set1(top)));
          store(row + i, e);
        }
        for (int i = 0; i < dead; ++i) row[i] = 0.0f;  // vexp(-inf) is tiny, not zero
        for (int i = live; i < kCols; ++i) row[i] = 0.0f;
        for (int i = 0; i < kCols; i += W) {
          total = add(total, load(row + i));
          store(p[g] + i, load(row + i));
        }
        l[g0 + g] = l[g0 + g] * shrink + sum(total);
        m[g0 + g] = top;
        if (shrink != 1.0f) {
          float* out = acc + (g0 + g) * d;
          for (int64_t i = 0; i < d; i += W) store(out + i, mul(load(out + i), set1(shrink)));
        }
      }
      // values: pairs of tokens (bf16) or tokens (float) are rows, 16 sizes at a time are columns
      constexpr bool kPairs = sizeof(T) == 2;
      const int64_t keys_here = kPairs ? (live + 1) / 2 * 2 : live;
      T clean[2 * kCols * 16];  // for an odd tail: the second token of the last pair was never written by this request
      for (int64_t i = 0; i < d; i += kCols) {
        const T* b = kPairs ? values + in / 2 * 2 * d + i * 2 : values + in * d + i;
        int64_t full = keys_here;
        if (kPairs && (live & 1)) {
          const T* last = b + (live - 1) * d;
          for (int j = 0; j < kCols; ++j) {
            clean[2 * j] = last[2 * j];
            std::memset(static_cast<void*>(clean + 2 * j + 1), 0, sizeof(T));
          }
          full = live - 1;
        }
        alignas(64) float o[8][kCols];
        for (int g = 0; g < rows; ++g) std::memcpy(o[g], acc + (g0 + g) * d + i, sizeof o[g]);
        mm_rows<kPairs>(&p[0][0], kCols, reinterpret_cast<const uint8_t*>(b), d * 4, full, o, rows);
        if (full != keys_here)
          mm_rows<kPairs>(&p[0][live - 1], kCols, reinterpret_cast<const uint8_t*>(clean), 64, 2, o, rows);
        for (int g = 0; g < rows; ++g) std::memcpy(acc + (g0 + g) * d + i, o[g], sizeof o[g]);
      }
    }
  }
}

template <class T>
inline void finish_row(const hr_attention& a, const float* acc, float m, float l, int head, T* out) {
  if (a.sinks) {  // one more score without a value
    const float sink = a.sinks[head], top = std::max(m, sink);
    const float shrink = m == kMinus ? 0.0f : std::exp(m - top);
    const vf scale = set1(shrink / (l * shrink + std::exp(sink - top)));
    for (int64_t i = 0; i < a.head_dim; i += W) store(out + i, mul(load(acc + i), scale));
    return;
  }
  const vf scale = set1(l > 0.0f ? 1.0f / l : 0.0f);
  for (int64_t i = 0; i < a.head_dim; i += W) store(out + i, mul(load(acc + i), scale));
}

template <class T>
void run_decode(const void* p, int chunk, int, Scratch& scratch) {
  const hr_attention& a = *static_cast<const hr_attention*>(p);
  const Cache<T> cache = cache_of<T>(a);
  const int group = a.q_heads / a.kv_heads, split = chunk % a.splits;
  const int head = chunk / a.splits % a.kv_heads, req = chunk / a.splits / a.kv_heads;
  const int64_t d = a.head_dim, row = a.query_start_loc[req], length = a.seq_lens[req];
  const int64_t start = a.window > 0 && length > a.window ? length - a.window : 0;
  const int64_t units = (length - start + a.block_size - 1) / a.block_size;
  const int64_t from = start + units * split / a.splits * a.block_size;
  const int64_t to = std::min(length, start + units * (split + 1) / a.splits * a.block_size);
  float* own = reinterpret_cast<float*>(scratch.need(size_t(group) * size_t(d + 2) * 4));
  float *acc = own, *m = own + group * d, *l = m + group;
  std::memset(acc, 0, size_t(group * d) * 4);
  for (int g = 0; g < group; ++g) m[g] = kMinus, l[g] = 0.0f;
  const T* q = static_cast<const T*>(a.q) + row * a.q_stride + head * group * d;
  if (from < to) decode_range(a, cache, q, a.block_table + req * a.table_stride, head, group, from, to, m, l, acc);
  for (int g = 0; g < group; ++g) {
    const int qh = head * group + g;
    if (a.splits == 1) {
      finish_row(a, acc + g * d, m[g], l[g], qh, static_cast<T*>(a.out) + row * a.out_stride + qh * d);
    } else {
      float* part = static_cast<float*>(a.scratch) +
                    ((int64_t(req) * a.q_heads + qh) * a.splits + split) * partial_floats(a);
      std::memcpy(part, acc + g * d, size_t(d) * 4);
      part[d] = m[g];
      part[d + 1] = l[g];
    }
  }
}

template <class T>
void run_join(const void* p, int chunk, int chunks, Scratch& scratch) {
  const hr_attention& a = *static_cast<const hr_attention*>(p);
  const int64_t d = a.head_dim;
  float* acc = reinterpret_cast<float*>(scratch.need(size_t(d) * 4));
  each_row(int64_t(a.num_decode) * a.q_heads, chunk, chunks, [&](int64_t index) {
    const int64_t req = index / a.q_heads, qh = index % a.q_heads;
    const float* parts = static_cast<const float*>(a.scratch) + index * a.splits * partial_floats(a);
    float m = kMinus, l = 0.0f;
    for (int i = 0; i < a.splits; ++i) m = std::max(m, parts[i * partial_floats(a) + d]);
    std::memset(acc, 0, size_t(d) * 4);
    for (int i = 0; i < a.splits; ++i) {
      const float* part = parts + i * partial_floats(a);
      if (part[d] == kMinus) continue;
      const float w = std::exp(part[d] - m);
      l += w * part[d + 1];
      for (int64_t j = 0; j < d; j += W) store(acc + j, fma(load(part + j), set1(w), load(acc + j)));
    }
    finish_row(a, acc, m, l, int(qh), static_cast<T*>(a.out) + int64_t(a.query_start_loc[req]) * a.out_stride + qh * d);
  });
}

// C[rows][n] = A[rows][k] * B for n a multiple of 16; A has kQueryRows readable rows.
template <class T>
inline void tile_product(const T* x, int64_t lda, int rows, const uint8_t* b, int64_t ldb, int64_t panel, int64_t k,
                         int64_t n, float* c, int64_t ldc, bool accumulate) {
#if HR_AMX
  if constexpr (sizeof(T) == 2) {
    if (k % 32 == 0) {
      for (int64_t i = 0; i < n; i += 32) {
        const bool two = i + 32 <= n;
        if (rows > 16) {
          if (two) mm_tiles<2, 2>(x, lda, b + i / 16 * panel, ldb, panel, k, c + i, ldc, accumulate);
          else mm_tiles<2, 1>(x, lda, b + i / 16 * panel, ldb, panel, k, c + i, ldc, accumulate);
        } else {
          if (two) mm_tiles<1, 2>(x, lda, b + i / 16 * panel, ldb, panel, k, c + i, ldc, accumulate);
          else mm_tiles<1, 1>(x, lda, b + i / 16 * panel, ldb, panel, k, c + i, ldc, accumulate);
        }
      }
      return;
    }
  }
#endif
  alignas(64) float part[kQueryRows][kCols];
  for (int64_t i = 0; i < n; i += kCols) {
    for (int r = 0; r < rows; ++r) {
      if (accumulate) std::memcpy(part[r], c + r * ldc + i, sizeof part[r]);
      else std::memset(part[r], 0, sizeof part[r]);
    }
    mm_rows<sizeof(T) == 2>(x, lda, b + i / 16 * panel, ldb, k, part, rows);
    for (int r = 0; r < rows; ++r) std::memcpy(c + r * ldc + i, part[r], sizeof part[r]);
  }
}

struct PrefillState {  // views into a thread's scratch
  float *scores, *acc, *m, *l;
};

// Softmax of one tile of scores: masks, new maximum, shrinks what was summed, leaves probabilities in `prob`.
template <class T>
inline void tile_softmax(const hr_attention& a, PrefillState st, T* prob, int rows, int group, int64_t first_key,
                         int64_t keys, int64_t last_visible0) {
  const int64_t d = a.head_dim;
  for (int r = 0; r < rows; ++r) {
    float* s = st.scores + r * kKeyTile;
    T* out = prob + r * kKeyTile;
    const int64_t last = last_visible0 + r / group;  // rows are token-major: (token, head of the group)
    const int64_t to = std::clamp<int64_t>(last + 1 - first_key, 0, keys);
    const int64_t from = a.window > 0 ? std::clamp<int64_t>(last + 1 - a.window - first_key, 0, to) : 0;
    if (from >= to) {
      std::memset(static_cast<void*>(out), 0, sizeof(T) * kKeyTile);
      continue;
    }
    for (int64_t i = 0; i < kKeyTile; i += W) {
      vf v = mul(load(s + i), set1(a.scale));
      if (a.softcap > 0.0f) v = mul(vtanh(mul(v, set1(1.0f / a.softcap))), set1(a.softcap));
      store(s + i, v);
    }
    for (int64_t i = 0; i < from; ++i) s[i] = kMinus;
    for (int64_t i = to; i < kKeyTile; ++i) s[i] = kMinus;
    vf tops = load(s);
    for (int64_t i = W; i < kKeyTile; i += W) tops = vmax(tops, load(s + i));
    const float top = std::max(st.m[r], hmax(tops));
    const float shrink = st.m[r] == kMinus ? 0.0f : std::exp(st.m[r] - top);
    for (int64_t i = 0; i < kKeyTile; i += W) store(s + i, vexp(sub(load(s + i), set1(top))));
    for (int64_t i = 0; i < from; ++i) s[i] = 0.0f;
    for (int64_t i = to; i < kKeyTile; ++i) s[i] = 0.0f;
    vf total = zero();
    for (int64_t i = 0; i < kKeyTile; i += W) {
      total = add(total, load(s + i));
      store(out + i, load(s + i));
    }
    st.l[r] = st.l[r] * shrink + sum(total);
    st.m[r] = top;
    if (shrink != 1.0f)
      for (int64_t i = 0; i < d; i += W) store(st.acc + r * d + i, mul(load(st.acc + r * d + i), set1(shrink)));
  }
}

template <class T>
void run_prefill(const void* p, int chunk, int, Scratch& scratch) {
  const hr_attention& a = *static_cast<const hr_attention*>(p);
#if HR_AMX
  const Tiles tiles;
#endif
  const Cache<T> cache = cache_of<T>(a);
  constexpr bool kPairs = sizeof(T) == 2;
  const int group = a.q_heads / a.kv_heads, head = chunk % a.kv_heads, task = chunk / a.kv_heads;
  const int req = a.prefill_list[2 * task], first = a.prefill_list[2 * task + 1];
  const int64_t d = a.head_dim, s = cache.s, start = a.query_start_loc[req];
  const int64_t queries = a.query_start_loc[req + 1] - start, length = a.seq_lens[req];
  const int tokens = int(std::min<int64_t>(std::max(kQueryRows / group, 1), queries - first));
  const int rows = tokens * group;  // group <= kQueryRows, checked when the op is planned
  const int32_t* table = a.block_table + req * a.table_stride;
  const int64_t last0 = length - queries + first;  // last key the first query sees
  const size_t q_bytes = sizeof(T) * size_t(kQueryRows * d), p_bytes = sizeof(T) * kQueryRows * kKeyTile;
  uint8_t* base = scratch.need(q_bytes + p_bytes + sizeof(T) * 2 * size_t(d) * kKeyTile +
                               4 * size_t(kQueryRows * (kKeyTile + d + 2)));
  T* q = reinterpret_cast<T*>(base);
  T* prob = reinterpret_cast<T*>(base + q_bytes);
  PrefillState st;
  st.scores = reinterpret_cast<float*>(base + q_bytes + p_bytes + sizeof(T) * 2 * size_t(d) * kKeyTile);
  st.acc = st.scores + kQueryRows * kKeyTile;
  st.m = st.acc + kQueryRows * d;
  st.l = st.m + kQueryRows;
  T* tail = reinterpret_cast<T*>(base + q_bytes + p_bytes);
  for (int r = 0; r < rows; ++r)
    std::memcpy(static_cast<void*>(q + r * d),
                static_cast<const T*>(a.q) + (start + first + r / group) * a.q_stride + (head * group + r % group) * d,
                sizeof(T) * size_t(d));
  std::memset(static_cast<void*>(q + rows * d), 0, sizeof(T) * size_t((kQueryRows - rows) * d));
  std::memset(static_cast<void*>(prob), 0, p_bytes);
  std::memset(st.acc, 0, 4 * size_t(kQueryRows * d));
  for (int r = 0; r < kQueryRows; ++r) st.m[r] = kMinus, st.l[r] = 0.0f;
  const int64_t end = last0 + tokens;  // keys any of these queries sees
  const int64_t begin = a.window > 0 ? std::max<int64_t>(last0 + 1 - a.window, 0) : 0;
  // keys are taken in pieces that never cross a block
  const int64_t step = std::min<int64_t>(kKeyTile, s);
  for (int64_t t = begin / step * step; t < end; t += step) {
    const int64_t block = table[t / s], in = t % s, keys = std::min<int64_t>(step, end - t);
    const uint8_t* kb = reinterpret_cast<const uint8_t*>(cache.key_block(block, head) + in * (kPairs ? 2 : 1));
    tile_product(q, d, rows, kb, s * 4, 64, d, step, st.scores, kKeyTile, false);
    tile_softmax(a, st, prob, rows, group, t, keys, last0);
    const T* v = cache.value_block(block, head) + in * d;
    int64_t used = keys;
    if (kPairs) {
      const int64_t padded = step % 32 == 0 ? (keys + 31) / 32 * 32 : (keys + 1) / 2 * 2;
      if (padded != keys) {  // memory past the last key may hold anything, NaN included: zero times NaN is NaN
        std::memset(static_cast<void*>(tail), 0, sizeof(T) * size_t(padded * d));
        std::memcpy(static_cast<void*>(tail), v, sizeof(T) * size_t(keys / 2 * 2 * d));
        if (keys & 1)
          for (int64_t i = 0; i < d; ++i) tail[(keys - 1) * d + 2 * i] = v[(keys - 1) * d + 2 * i];
        v = tail;
      }
      used = padded;
    }
    tile_product(prob, kKeyTile, rows, reinterpret_cast<const uint8_t*>(v), d * 4, 64, used, d, st.acc, d, true);
  }
  for (int r = 0; r < rows; ++r) {
    const int qh = head * group + r % group;
    finish_row(a, st.acc + r * d, st.m[r], st.l[r], qh,
               static_cast<T*>(a.out) + (start + first + r / group) * a.out_stride + qh * d);
  }
}

inline int plan_attention(const hr_attention& a, int threads, Step* out) {
  int steps = 0;
  const bool wide = a.dtype == HR_F32;
  if (a.num_decode > 0) {
    out[steps++] = {wide ? run_decode<float> : run_decode<bf16>, &a, a.num_decode * a.kv_heads * a.splits};
    if (a.splits > 1)
      out[steps++] = {wide ? run_join<float> : run_join<bf16>, &a,
                      clamp_chunks(std::min<int64_t>(threads, int64_t(a.num_decode) * a.q_heads))};
  }
  if (a.prefill_tasks > 0)
    out[steps++] = {wide ? run_prefill<float> : run_prefill<bf16>, &a, a.prefill_tasks * a.kv_heads};
  return steps;
}

}  // namespace hr
