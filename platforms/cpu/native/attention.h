// Paged attention. A task is one KV head of one request: all query heads that share it read each key and value once.
//
// Decode: one query token. When there are fewer tasks than threads want, the keys are cut into `splits` ranges whose
// partial results are joined by a second step. Prefill: kQueryBlock query tokens x the group's heads are the rows of
// two matrix products a block of keys, with a running maximum and sum (flash attention).
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "half.h"
#include "ops.h"

namespace hr {

constexpr int kQueryRows = 32;   // rows of a prefill task: query tokens x query heads of the group
constexpr int64_t kKeyTile = 64; // keys a prefill task handles at a time
constexpr float kMinus = -std::numeric_limits<float>::infinity();

struct Tile {  // rows of B for mm_rows: `ldb` bytes from one to the next
  const uint8_t* data;
  int64_t ldb;
};

// A cache that holds S and is computed with as C (float, or bf16 in pairs). What is held in another form is widened
// into a buffer tile by tile: int8 numbers are exact in bf16, and their scales go to scores and probabilities.
template <class S, class C>
struct Cache {  // strides in elements; see hr_kv_write for the layouts
  static constexpr bool kDirect = std::is_same_v<S, C>, kScaled = std::is_same_v<S, int8_t>;
  static constexpr int kLane = sizeof(C) == 2 ? 2 : 1;
  const S *k, *v;
  int64_t block_stride, s, d;

  explicit Cache(const hr_attention& a)
      : k(static_cast<const S*>(a.k_cache)), v(static_cast<const S*>(a.v_cache)), block_stride(a.block_stride),
        s(a.block_size), d(a.head_dim) {}
  const S* run(const S* cache, int64_t block, int head) const {
    return cache + block * block_stride + head * s * (d + (kScaled ? 4 : 0));
  }
  // n keys from the in-th of a block on as columns, n and `in` multiples of 16; buffer: n * d
  Tile keys(int64_t block, int head, int64_t in, int64_t n, C* buffer) const {
    const S* from = run(k, block, head) + in * kLane;
    if constexpr (kDirect) return {reinterpret_cast<const uint8_t*>(from), s * 4};
    for (int64_t row = 0; row < d / kLane; ++row)
      widen(from + row * s * kLane, buffer + row * n * kLane, n * kLane);
    return {reinterpret_cast<const uint8_t*>(buffer), n * 4};
  }
  // their values as rows; of `live` tokens, and in pairs of the one that shares the last row
  Tile values(int64_t block, int head, int64_t in, int64_t live, C* buffer) const {
    const S* from = run(v, block, head) + in * d;
    if constexpr (kDirect) return {reinterpret_cast<const uint8_t*>(from), d * 4};
    widen(from, buffer, (live + kLane - 1) / kLane * kLane * d);
    return {reinterpret_cast<const uint8_t*>(buffer), d * 4};
  }
  // As much of a block's keys and values as n tokens have, from the in-th token's share on: blocks lie anywhere, so the
  // hardware does not guess the next one.
  void fetch_ahead(int64_t block, int head, int64_t in, int64_t n) const {
    const char* from_k = reinterpret_cast<const char*>(run(k, block, head) + in * d);
    const char* from_v = reinterpret_cast<const char*>(run(v, block, head) + in * d);
    for (int64_t at = 0; at < n * d * int64_t(sizeof(S)); at += 64) __builtin_prefetch(from_k + at), __builtin_prefetch(from_v + at);
  }
  // What scores and probabilities of n tokens are multiplied with: `scale`, and the numbers' own scales. Behind `live`
  // lie zeros, for memory there may hold anything.
  void scales(int64_t block, int head, int64_t in, int64_t live, int64_t n, float scale, float* ks, float* vs) const {
    if constexpr (kScaled) {
      const float* from_k = reinterpret_cast<const float*>(run(k, block, head) + s * d) + in;
      const float* from_v = reinterpret_cast<const float*>(run(v, block, head) + s * d) + in;
      for (int64_t i = 0; i < live; ++i) ks[i] = scale * from_k[i], vs[i] = from_v[i];
      for (int64_t i = live; i < n; ++i) ks[i] = vs[i] = 0.0f;
    } else {
      for (int64_t i = 0; i < n; ++i) ks[i] = scale;
    }
  }
};

inline int64_t partial_floats(const hr_attention& a) { return a.head_dim + 2; }

// One query token, the heads of one group, keys [from, to): running maximum, sum and weighted values.
// acc [G][d], m and l [G]. q: G rows of d. buffer: 32 * d.
template <class S, class C>
void decode_range(const hr_attention& a, const Cache<S, C>& cache, const C* q, C* buffer, const int32_t* table,
                  int head, int group, int64_t from, int64_t to, float* m, float* l, float* acc) {
  constexpr bool kPairs = sizeof(C) == 2;
  const int64_t s = cache.s, d = cache.d;
  alignas(64) float c[8][kCols], ks[kCols], vs[kCols];
  alignas(64) C p[8][kCols];
  for (int64_t t = from / kCols * kCols; t < to; t += kCols) {
    const int64_t in = t % s, block = table[t / s];
    const int live = int(std::min<int64_t>(to - t, kCols)), dead = int(std::max<int64_t>(from - t, 0));
    if (t + s < to) cache.fetch_ahead(table[(t + s) / s], head, in, kCols);
    const Tile keys = cache.keys(block, head, in, kCols, buffer);
    const Tile values = cache.values(block, head, in, live, buffer + kCols * d);
    cache.scales(block, head, in, live, kCols, a.scale, ks, vs);
    for (int g0 = 0; g0 < group; g0 += 8) {
      const int rows = std::min(group - g0, 8);
      std::memset(c, 0, sizeof(float) * kCols * size_t(rows));
      mm_rows<kPairs>(q + g0 * d, d, keys.data, keys.ldb, d, c, rows);
      for (int g = 0; g < rows; ++g) {
        float* row = c[g];
        for (int i = 0; i < kCols; i += W) store(row + i, mul(load(row + i), load(ks + i)));
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
          const vf e = load(row + i);
          total = add(total, e);
          store(p[g] + i, Cache<S, C>::kScaled ? mul(e, load(vs + i)) : e);
        }
        l[g0 + g] = l[g0 + g] * shrink + sum(total);
        m[g0 + g] = top;
        if (shrink != 1.0f) {
          float* out = acc + (g0 + g) * d;
          for (int64_t i = 0; i < d; i += W) store(out + i, mul(load(out + i), set1(shrink)));
        }
      }
      // values: pairs of tokens (bf16) or tokens (float) are rows, 16 sizes at a time are columns
      const int64_t keys_here = kPairs ? (live + 1) / 2 * 2 : live;
      C clean[2 * kCols];  // for an odd tail: the second token of the last pair was never written by this request
      for (int64_t i = 0; i < d; i += kCols) {
        const uint8_t* b = values.data + i * 4;
        int64_t full = keys_here;
        if (kPairs && (live & 1)) {
          const C* last = reinterpret_cast<const C*>(b + live / 2 * values.ldb);
          for (int j = 0; j < kCols; ++j) {
            clean[2 * j] = last[2 * j];
            std::memset(static_cast<void*>(clean + 2 * j + 1), 0, sizeof(C));
          }
          full = live - 1;
        }
        alignas(64) float o[8][kCols];
        for (int g = 0; g < rows; ++g) std::memcpy(o[g], acc + (g0 + g) * d + i, sizeof o[g]);
        mm_rows<kPairs>(&p[0][0], kCols, b, values.ldb, full, o, rows);
        if (full != keys_here)
          mm_rows<kPairs>(&p[0][live - 1], kCols, reinterpret_cast<const uint8_t*>(clean), 64, 2, o, rows);
        for (int g = 0; g < rows; ++g) std::memcpy(acc + (g0 + g) * d + i, o[g], sizeof o[g]);
      }
    }
  }
}

template <class T>
inline void scale_row(const float* acc, float scale, T* out, int64_t d) {
  for (int64_t i = 0; i < d; i += W) store(out + i, mul(load(acc + i), set1(scale)));
}

// A row's sum over its probabilities' sum, at element `at` of the result.
inline void finish_row(const hr_attention& a, const float* acc, float m, float l, int head, int64_t at) {
  float scale = l > 0.0f ? 1.0f / l : 0.0f;
  if (a.sinks) {  // one more score without a value
    const float sink = a.sinks[head], top = std::max(m, sink);
    const float shrink = m == kMinus ? 0.0f : std::exp(m - top);
    scale = shrink / (l * shrink + std::exp(sink - top));
  }
  if (a.dtype == HR_F32) scale_row(acc, scale, static_cast<float*>(a.out) + at, a.head_dim);
  else if (a.dtype == HR_BF16) scale_row(acc, scale, static_cast<bf16*>(a.out) + at, a.head_dim);
  else scale_row(acc, scale, static_cast<fp16*>(a.out) + at, a.head_dim);
}

inline void run_join(const void* p, int chunk, int chunks, Scratch& scratch) {
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
    finish_row(a, acc, m, l, int(qh), int64_t(a.query_start_loc[req]) * a.out_stride + qh * d);
  });
}

// C[rows][n] = A[rows][k] * B for n a multiple of 16; A has kQueryRows readable rows.
template <class T>
inline void tile_product(const T* x, int64_t lda, int rows, const uint8_t* b, int64_t ldb, int64_t panel, int64_t k,
                         int64_t n, float* c, int64_t ldc, bool accumulate) {
#if HR_AMX
  if constexpr (sizeof(T) == 2) {
    if (k % 32 == 0) {
      const TileInput in{reinterpret_cast<const uint8_t*>(x), 2 * lda, 2 * lda * kTile, 64};
      Meanwhile nothing;
      for (int64_t i = 0; i < n; i += 2 * kTile) {
        const TileOutput out{reinterpret_cast<uint8_t*>(c + i), 4 * ldc, 4 * ldc * kTile, 4 * kTile};
        mm_tiles(rows, i + 2 * kTile <= n ? 2 : 1, in, {b + i / kTile * panel, ldb, panel, ldb * kTile}, k / 32, out,
                 accumulate, nothing);
      }
      return;
    }
  }
#endif
  int64_t i = 0;
#if HR_AVX512 && defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2) {
    for (; i + 4 * kCols <= n; i += 4 * kCols)
      mm_block<4>(x, lda, rows, b + i / 16 * panel, ldb, panel, k, c + i, ldc, accumulate);
    for (; i + 2 * kCols <= n; i += 2 * kCols)
      mm_block<2>(x, lda, rows, b + i / 16 * panel, ldb, panel, k, c + i, ldc, accumulate);
  }
#endif
  alignas(64) float part[kQueryRows][kCols];
  for (; i < n; i += kCols) {
    for (int r = 0; r < rows; ++r) {
      if (accumulate) std::memcpy(part[r], c + r * ldc + i, sizeof part[r]);
      else std::memset(part[r], 0, sizeof part[r]);
    }
    mm_rows<sizeof(T) == 2>(x, lda, b + i / 16 * panel, ldb, k, part, rows);
    for (int r = 0; r < rows; ++r) std::memcpy(c + r * ldc + i, part[r], sizeof part[r]);
  }
}

#ifdef HR_BF16_DOTS
#define HR_TILE_ROWS 1
// Scores [R][16 P] (kKeyTile floats a row) of queries x keys: panels of 16 keys that lie anywhere. See block_pairs.
template <int R, int P>
inline void score_rows(const bf16* q, const uint8_t* const* keys, int64_t ldb, int64_t d, float* c) {
  constexpr int64_t ldc = kKeyTile;
  HR_SUMS(HR_SUM_ZERO)
  asm volatile("" : "+r"(q) : : "memory");
  const int64_t l = 2 * d;
  const char *row0 = reinterpret_cast<const char*>(q), *row3 = row0 + 3 * l;
  const uint8_t *k0 = keys[0], *k1 = keys[P > 1 ? 1 : 0], *k2 = keys[P > 2 ? 2 : 0], *k3 = keys[P > 3 ? 3 : 0];
  for (int64_t at = 0; at < d / 2 * ldb; at += ldb) {
    HR_SUM_STEP(k0 + at, k1 + at, k2 + at, k3 + at)
  }
  asm volatile("" : "+v"(c00) : : "memory");
  HR_SUMS(HR_SUM_STORE)
}

struct Values {  // of one tile: pieces of a number of tokens, the same but for the last one
  const uint8_t* data[kKeyTile / kCols];
  int64_t tokens[kKeyTile / kCols];
  int pieces = 0;
};

// C[R][16 P] (ldc floats a row) += probabilities (kKeyTile a row) x values, from a column on.
template <int R, int P>
inline void value_rows(const bf16* prob, const Values& v, int64_t column, int64_t ldc, float* c) {
  HR_SUMS(HR_SUM_LOAD)
  asm volatile("" : "+r"(prob) : : "memory");
  const int64_t l = 2 * kKeyTile;
  const char *row0 = reinterpret_cast<const char*>(prob), *row3 = row0 + 3 * l;
  for (int i = 0; i < v.pieces; ++i) {
    const uint8_t* b = v.data[i] + column * 4;
    for (int64_t pairs = v.tokens[i] / 2; pairs > 0; --pairs, b += ldc * 4) {
      HR_SUM_STEP(b, b + 64, b + 128, b + 192)
    }
  }
  asm volatile("" : "+v"(c00) : : "memory");
  HR_SUMS(HR_SUM_STORE)
}

template <int R>
inline void score_rows(const bf16* q, const uint8_t* const* keys, int panels, int64_t ldb, int64_t d, float* c) {
  if (panels == 4) score_rows<R, 4>(q, keys, ldb, d, c);
  else if (panels == 3) score_rows<R, 3>(q, keys, ldb, d, c);
  else if (panels == 2) score_rows<R, 2>(q, keys, ldb, d, c);
  else score_rows<R, 1>(q, keys, ldb, d, c);
}

template <int R>
inline void value_rows(const bf16* prob, const Values& v, int64_t d, float* c) {
  int64_t i = 0;
  for (; i + 4 * kCols <= d; i += 4 * kCols) value_rows<R, 4>(prob, v, i, d, c + i);
  if (d - i == 3 * kCols) value_rows<R, 3>(prob, v, i, d, c + i);
  else if (d - i == 2 * kCols) value_rows<R, 2>(prob, v, i, d, c + i);
  else if (d - i == kCols) value_rows<R, 1>(prob, v, i, d, c + i);
}

// f<R>(first row) for sets of up to kBlockRows rows
template <class F>
inline void row_sets(int rows, F f) {
  int r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows) f.template operator()<kBlockRows>(r);
  switch (rows - r) {
    case 1: return f.template operator()<1>(r);
    case 2: return f.template operator()<2>(r);
    case 3: return f.template operator()<3>(r);
    case 4: return f.template operator()<4>(r);
    case 5: return f.template operator()<5>(r);
    default: return;
  }
}
#else
#define HR_TILE_ROWS 0
#endif

struct PrefillState {  // views into a thread's scratch; of each row: scores, weighted values, maximum, sums of W lanes
  float *scores, *acc, *m, *l;
};

constexpr float kLog2e = 1.44269504088896341f;
// How far scores may grow beyond the maximum that a row is measured against, before it is measured anew: what was summed
// is then multiplied, and powers of two up to 2^8 are as exact in bf16 as those below one.
constexpr float kGrowth = 8.0f;

// Softmax of a row of W * N scores, of which those in [from, to) count; scores are times log2(e), and so powers of two.
// Adds to the row's sums, leaves probabilities in `out`, times `vs` if given, and returns what the values so far are to
// be multiplied with.
template <int N, class T>
inline float row_softmax(const hr_attention& a, const float* s, T* out, int from, int to, float* m, float* l,
                         const float* ks, const float* vs) {
  const bool part = from > 0 || to < N * W;
  vf v[N], tops = set1(kMinus);
  for (int j = 0; j < N; ++j) {
    v[j] = mul(load(s + j * W), load(ks + j * W));
    if (a.softcap > 0.0f) v[j] = mul(vtanh(mul(v[j], set1(1.0f / a.softcap))), set1(a.softcap * kLog2e));
    // what lies beyond may be NaN: memory there holds anything
    if (part) v[j] = within(v[j], from - j * W, to - j * W, kMinus);
    tops = vmax(tops, v[j]);
  }
  float shrink = 1.0f;
  vf total = load(l);
  if (any_above(tops, *m + kGrowth)) {
    const float top = hmax(tops);
    float powers[W];
    store(powers, vexp2<false>(set1(*m - top)));
    shrink = powers[0];
    total = mul(total, set1(shrink));
    *m = top;
  }
  for (int j = 0; j < N; ++j) {
    const vf e = vexp2<sizeof(T) == 2>(sub(v[j], set1(*m)));
    total = add(total, e);
    store(out + j * W, vs ? mul(e, load(vs + j * W)) : e);
  }
  store(l, total);
  return shrink;
}

// Softmax of one tile of scores, `width` wide of which `keys` count: masks, new maximum, shrinks what was summed, leaves
// probabilities in `prob`. ks, vs: see Cache::scales.
template <class T>
inline void tile_softmax(const hr_attention& a, PrefillState st, T* prob, int rows, int group, int64_t first_key,
                         int64_t keys, int64_t width, int64_t last_visible0, const float* ks, const float* vs) {
  constexpr int N = kCols / W;  // vectors of 16 keys
  const int64_t d = a.head_dim;
  for (int r = 0; r < rows; ++r) {
    const float* s = st.scores + r * kKeyTile;
    T* out = prob + r * kKeyTile;
    const int64_t last = last_visible0 + r / group;  // rows are token-major: (token, head of the group)
    const int to = int(std::clamp<int64_t>(last + 1 - first_key, 0, keys));
    const int from = a.window > 0 ? int(std::clamp<int64_t>(last + 1 - a.window - first_key, 0, to)) : 0;
    if (from >= to) {
      std::memset(static_cast<void*>(out), 0, sizeof(T) * size_t(width));
      continue;
    }
    float shrink, *m = st.m + r, *l = st.l + r * W;
    if (width == 4 * kCols) shrink = row_softmax<4 * N>(a, s, out, from, to, m, l, ks, vs);
    else if (width == 3 * kCols) shrink = row_softmax<3 * N>(a, s, out, from, to, m, l, ks, vs);
    else if (width == 2 * kCols) shrink = row_softmax<2 * N>(a, s, out, from, to, m, l, ks, vs);
    else shrink = row_softmax<N>(a, s, out, from, to, m, l, ks, vs);
    if (shrink != 1.0f)
      for (int64_t i = 0; i < d; i += W) store(st.acc + r * d + i, mul(load(st.acc + r * d + i), set1(shrink)));
  }
}

// Keys taken at a time, which never cross a block: a divisor of the block's, and of 32 where it can be (tiles).
inline int64_t key_step(int64_t block_size) {
  for (const int64_t step : {kKeyTile, int64_t(32), int64_t(48)})
    if (block_size % step == 0) return step;
  return 16;
}

// Values in pairs of tokens, of which `live` count: how many may be multiplied, zeros behind the last one. Memory there
// may hold anything, NaN included, and zero times NaN is NaN. buffer: step * d.
template <class C>
inline int64_t clean_tail(Tile* v, C* buffer, int64_t live, int64_t step, int64_t d, bool tiles) {
  const int64_t padded = step % 32 == 0 && tiles ? (live + 31) / 32 * 32 : (live + 1) / 2 * 2;
  if (padded == live) return live;
  const C* from = reinterpret_cast<const C*>(v->data);
  const int64_t whole = live / 2 * 2 * d, written = (live + 1) / 2 * 2 * d;
  if (from != buffer) std::memcpy(static_cast<void*>(buffer), from, sizeof(C) * size_t(whole));
  if (live & 1)
    for (int64_t i = 0; i < d; ++i) {
      buffer[whole + 2 * i] = from[whole + 2 * i];
      std::memset(static_cast<void*>(buffer + whole + 2 * i + 1), 0, sizeof(C));
    }
  std::memset(static_cast<void*>(buffer + written), 0, sizeof(C) * size_t(padded * d - written));
  v->data = reinterpret_cast<const uint8_t*>(buffer);
  return padded;
}

// Memory of a task of up to `most` rows: queries, probabilities, a tile of keys, one of values, floats.
template <class C>
struct TileMemory {
  C *q, *prob, *key_tile, *value_tile;
  PrefillState st;
  static size_t bytes(int64_t most, int64_t d) {
    return sizeof(C) * size_t(most * (d + kKeyTile) + 2 * d * kKeyTile) + 4 * size_t(most * (kKeyTile + d + 1 + W)) + 64;
  }
  TileMemory(uint8_t* base, int64_t most, int64_t d) {
    q = reinterpret_cast<C*>(base);
    prob = q + most * d;
    key_tile = prob + most * kKeyTile;
    value_tile = key_tile + d * kKeyTile;
    st.scores = reinterpret_cast<float*>(value_tile + d * kKeyTile);
    st.acc = st.scores + most * kKeyTile;
    st.l = st.acc + most * d;
    st.m = st.l + most * W;
    std::memset(static_cast<void*>(prob), 0, sizeof(C) * size_t(most * kKeyTile));
    std::memset(st.acc, 0, 4 * size_t(most * (d + W)));
    for (int64_t r = 0; r < most; ++r) st.m[r] = kMinus;
  }
};

// Rows of queries over keys [begin, end), `begin` a multiple of key_step; last0: the last key that the first row's token
// sees. DECODE: the few rows of one token; the next tile is fetched while one is computed with.
template <bool DECODE, class S, class C>
void attend_tiles(const hr_attention& a, const Cache<S, C>& cache, const TileMemory<C>& mem, const int32_t* table, int head,
                  int rows, int64_t begin, int64_t end, int64_t last0) {
  constexpr bool kPairs = sizeof(C) == 2, kByRows = kPairs && HR_TILE_ROWS && (DECODE || !HR_TILES);
  const int group = a.q_heads / a.kv_heads;
  const PrefillState st = mem.st;
  const int64_t d = a.head_dim, s = cache.s;
  // A tile of keys is one piece or several, each within a block.
  const int64_t step = key_step(s), span = kKeyTile / step * step;
  alignas(64) float ks[kKeyTile], vs[kKeyTile];
  const float scale = a.softcap > 0.0f ? a.scale : a.scale * kLog2e;
  for (int64_t t = begin; t < end; t += span) {
    const int64_t keys = std::min<int64_t>(span, end - t), pieces = (keys + step - 1) / step;
    int64_t width = pieces * step;
    if constexpr (DECODE)
      for (int64_t next = t + span; next < std::min(end, t + 2 * span); next += step)
        cache.fetch_ahead(table[next / s], head, next % s, std::min(step, end - next));
    auto key_piece = [&](int64_t i, C* buffer) {
      const int64_t block = table[(t + i * step) / s], in = (t + i * step) % s;
      cache.scales(block, head, in, std::min<int64_t>(step, keys - i * step), step, scale, ks + i * step, vs + i * step);
      return cache.keys(block, head, in, step, buffer);
    };
    auto value_piece = [&](int64_t i, C* buffer, int64_t* used) {
      const int64_t live = std::min<int64_t>(step, keys - i * step);
      Tile v = cache.values(table[(t + i * step) / s], head, (t + i * step) % s, live, buffer);
      *used = kPairs ? clean_tail(&v, buffer, live, step, d, !kByRows) : live;
      return v;
    };
    if constexpr (kByRows) {
#if HR_TILE_ROWS
      const uint8_t* panels[kKeyTile / kCols];
      int64_t ldb = 0;
      for (int64_t i = 0; i < pieces; ++i) {
        const Tile k = key_piece(i, mem.key_tile + i * step * d);
        for (int64_t j = 0; j < step / kCols; ++j) panels[i * (step / kCols) + j] = k.data + j * 64;
        ldb = k.ldb;
      }
      width = (keys + kCols - 1) / kCols * kCols;
      row_sets(rows, [&]<int R>(int r) {
        score_rows<R>(mem.q + r * d, panels, int(width / kCols), ldb, d, st.scores + r * kKeyTile);
      });
      tile_softmax(a, st, mem.prob, rows, group, t, keys, width, last0, ks, Cache<S, C>::kScaled ? vs : nullptr);
      Values v;
      for (; v.pieces < pieces; ++v.pieces)
        v.data[v.pieces] = value_piece(v.pieces, mem.value_tile + v.pieces * step * d, v.tokens + v.pieces).data;
      row_sets(rows, [&]<int R>(int r) { value_rows<R>(mem.prob + r * kKeyTile, v, d, st.acc + r * d); });
#endif
      continue;
    }
    for (int64_t i = 0; i < pieces; ++i) {
      const Tile k = key_piece(i, mem.key_tile);
      tile_product(mem.q, d, rows, k.data, k.ldb, 64, d, step, st.scores + i * step, kKeyTile, false);
    }
    tile_softmax(a, st, mem.prob, rows, group, t, keys, width, last0, ks, Cache<S, C>::kScaled ? vs : nullptr);
    for (int64_t i = 0; i < pieces; ++i) {
      int64_t used;
      const Tile v = value_piece(i, mem.value_tile, &used);
      tile_product(mem.prob + i * step, kKeyTile, rows, v.data, v.ldb, 64, used, d, st.acc, d, true);
    }
  }
}

template <class S, class C>
void run_prefill(const void* p, int chunk, int, Scratch& scratch) {
  const hr_attention& a = *static_cast<const hr_attention*>(p);
#if HR_AMX
  const Tiles tiles;
#endif
  const Cache<S, C> cache(a);
  const int group = a.q_heads / a.kv_heads, head = chunk / a.prefill_tasks;
  // Head by head, so that keys and values of one stay near; the longest tasks first, so that threads end together.
  const int task = a.prefill_tasks - 1 - chunk % a.prefill_tasks;
  const int req = a.prefill_list[2 * task], first = a.prefill_list[2 * task + 1];
  const int64_t d = a.head_dim, start = a.query_start_loc[req];
  const int64_t queries = a.query_start_loc[req + 1] - start, length = a.seq_lens[req];
  const int tokens = int(std::min<int64_t>(std::max(kQueryRows / group, 1), queries - first));
  const int rows = tokens * group;  // group <= kQueryRows, checked when the op is planned
  const int64_t last0 = length - queries + first;  // last key the first query sees
  const TileMemory<C> mem(scratch.need(TileMemory<C>::bytes(kQueryRows, d)), kQueryRows, d);
  for (int r = 0; r < rows; ++r)
    fetch(a.dtype, a.q, (start + first + r / group) * a.q_stride + (head * group + r % group) * d, mem.q + r * d, d);
  std::memset(static_cast<void*>(mem.q + rows * d), 0, sizeof(C) * size_t((kQueryRows - rows) * d));
  const int64_t step = key_step(a.block_size);
  const int64_t begin = a.window > 0 ? std::max<int64_t>(last0 + 1 - a.window, 0) / step * step : 0;
  attend_tiles<false>(a, cache, mem, a.block_table + req * a.table_stride, head, rows, begin, last0 + tokens, last0);
  for (int r = 0; r < rows; ++r) {
    const int qh = head * group + r % group;
    finish_row(a, mem.st.acc + r * d, mem.st.m[r] / kLog2e, sum(load(mem.st.l + r * W)), qh,
               (start + first + r / group) * a.out_stride + qh * d);
  }
}

// The result of a row, or with `splits` its part of one, which run_join adds up.
inline void finish_split(const hr_attention& a, int req, int split, int qh, const float* acc, float m, float l) {
  const int64_t d = a.head_dim;
  if (a.splits == 1) return finish_row(a, acc, m, l, qh, int64_t(a.query_start_loc[req]) * a.out_stride + qh * d);
  float* part = static_cast<float*>(a.scratch) + ((int64_t(req) * a.q_heads + qh) * a.splits + split) * partial_floats(a);
  std::memcpy(part, acc, size_t(d) * 4);
  part[d] = m;
  part[d + 1] = l;
}

template <class S, class C>
void run_decode(const void* p, int chunk, int, Scratch& scratch) {
  const hr_attention& a = *static_cast<const hr_attention*>(p);
  const Cache<S, C> cache(a);
  const int group = a.q_heads / a.kv_heads, split = chunk % a.splits;
  const int head = chunk / a.splits % a.kv_heads, req = chunk / a.splits / a.kv_heads;
  const int64_t d = a.head_dim, row = a.query_start_loc[req], length = a.seq_lens[req], s = a.block_size;
  const int64_t start = a.window > 0 && length > a.window ? length - a.window : 0, aligned = start / s * s;
  const int64_t units = (length - aligned + s - 1) / s;
  const int64_t from = aligned + units * split / a.splits * s;
  const int64_t to = std::min(length, aligned + units * (split + 1) / a.splits * s);
  const int32_t* table = a.block_table + req * a.table_stride;
  if constexpr (sizeof(C) == 2 && HR_TILE_ROWS) {
    const TileMemory<C> mem(scratch.need(TileMemory<C>::bytes(group, d)), group, d);
    fetch(a.dtype, a.q, row * a.q_stride + head * group * d, mem.q, group * d);
    attend_tiles<true>(a, cache, mem, table, head, group, from, to, length - 1);
    for (int g = 0; g < group; ++g)
      finish_split(a, req, split, head * group + g, mem.st.acc + g * d, mem.st.m[g] / kLog2e, sum(load(mem.st.l + g * W)));
    return;
  }
  // scratch: [acc, m, l of the group][its queries][a tile of keys, one of values]
  const int64_t floats = (group * (d + 2) + 15) / 16 * 16;
  float* own = reinterpret_cast<float*>(scratch.need(size_t(floats) * 4 + sizeof(C) * size_t((group + 2 * kCols) * d)));
  float *acc = own, *m = own + group * d, *l = m + group;
  C* q = reinterpret_cast<C*>(own + floats);
  std::memset(acc, 0, size_t(group * d) * 4);
  for (int g = 0; g < group; ++g) m[g] = kMinus, l[g] = 0.0f;
  fetch(a.dtype, a.q, row * a.q_stride + head * group * d, q, group * d);
  if (from < to)
    decode_range(a, cache, q, q + group * d, table, head, group, std::max(from, start), to, m, l, acc);
  for (int g = 0; g < group; ++g) finish_split(a, req, split, head * group + g, acc + g * d, m[g], l[g]);
}

struct AttentionFns {
  RunFn decode, prefill;
};

template <class S, class C>
constexpr AttentionFns kAttention = {run_decode<S, C>, run_prefill<S, C>};

inline AttentionFns attention_fns(const hr_attention& a) {
  const bool pairs = in_pairs(a.dtype, a.kv_dtype);
  switch (a.kv_dtype) {
    case HR_F32: return kAttention<float, float>;
    case HR_F16: return kAttention<fp16, float>;
    case HR_BF16: return pairs ? kAttention<bf16, bf16> : kAttention<bf16, float>;
    default: return pairs ? kAttention<int8_t, bf16> : kAttention<int8_t, float>;
  }
}

inline int plan_attention(const hr_attention& a, int threads, Step* out) {
  int steps = 0;
  const AttentionFns fns = attention_fns(a);
  if (a.num_decode > 0) {
    out[steps++] = {fns.decode, &a, a.num_decode * a.kv_heads * a.splits};
    if (a.splits > 1)
      out[steps++] = {run_join, &a, clamp_chunks(std::min<int64_t>(threads, int64_t(a.num_decode) * a.q_heads))};
  }
  if (a.prefill_tasks > 0) out[steps++] = {fns.prefill, &a, a.prefill_tasks * a.kv_heads};
  return steps;
}

}  // namespace hr
