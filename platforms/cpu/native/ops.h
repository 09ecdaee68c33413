// The small ops between the matrix products: norm, rotary embedding, gated activations, embedding, KV write.
#pragma once
#include <limits>
#include <type_traits>

#include "linear.h"

namespace hr {

inline int64_t first_row(int64_t rows, int chunk, int chunks) { return rows * chunk / chunks; }

template <class F>
inline void each_row(int64_t rows, int chunk, int chunks, F f) {
  for (int64_t r = first_row(rows, chunk, chunks); r < first_row(rows, chunk + 1, chunks); ++r) f(r);
}

// out = v * weight / sqrt(mean(v^2) + eps); n is a multiple of W or the tail is done one by one.
template <class T>
inline void normalize(const T* in, const float* weight, T* out, int n, float eps) {
  vf squares = zero();
  float total = 0.0f;
  int i = 0;
  for (; i + W <= n; i += W) {
    const vf v = load(in + i);
    squares = fma(v, v, squares);
  }
  for (; i < n; ++i) total += to_float(in[i]) * to_float(in[i]);
  const float inverse = 1.0f / std::sqrt((total + sum(squares)) / float(n) + eps);
  const vf scale = set1(inverse);
  for (i = 0; i + W <= n; i += W) store(out + i, mul(mul(load(in + i), scale), load(weight + i)));
  for (; i < n; ++i) from_float(to_float(in[i]) * inverse * weight[i], out + i);
}

template <class T>
void run_rms_norm(const void* p, int chunk, int chunks, Scratch&) {
  const hr_rms_norm& a = *static_cast<const hr_rms_norm*>(p);
  each_row(int64_t(a.rows) * a.inner, chunk, chunks, [&](int64_t index) {
    const int64_t r = index / a.inner, within = index % a.inner * a.hidden;
    const T* x = static_cast<const T*>(a.x) + r * a.x_stride + within;
    T* y = static_cast<T*>(a.y) + r * a.y_stride + within;
    if (a.residual) {
      T* res = static_cast<T*>(a.residual) + r * a.residual_stride + within;
      int i = 0;
      for (; i + W <= a.hidden; i += W) store(res + i, add(load(res + i), load(x + i)));
      for (; i < a.hidden; ++i) from_float(to_float(res[i]) + to_float(x[i]), res + i);
      x = res;
    }
    normalize(x, a.weight, y, a.hidden, a.eps);
  });
}

template <class T>
inline void rotate(T* head, const float* cs, int rotary, bool neox) {
  const int half = rotary / 2;
  const float *cosine = cs, *sine = cs + half;
  if (neox) {
    int i = 0;
    for (; i + W <= half; i += W) {
      const vf a = load(head + i), b = load(head + half + i), c = load(cosine + i), s = load(sine + i);
      store(head + i, sub(mul(a, c), mul(b, s)));
      store(head + half + i, fma(b, c, mul(a, s)));
    }
    for (; i < half; ++i) {
      const float a = to_float(head[i]), b = to_float(head[half + i]);
      from_float(a * cosine[i] - b * sine[i], head + i);
      from_float(b * cosine[i] + a * sine[i], head + half + i);
    }
  } else {
    for (int i = 0; i < half; ++i) {
      const float a = to_float(head[2 * i]), b = to_float(head[2 * i + 1]);
      from_float(a * cosine[i] - b * sine[i], head + 2 * i);
      from_float(b * cosine[i] + a * sine[i], head + 2 * i + 1);
    }
  }
}

template <class T>
void run_rotary(const void* p, int chunk, int chunks, Scratch&) {
  const hr_rotary& a = *static_cast<const hr_rotary*>(p);
  each_row(a.rows, chunk, chunks, [&](int64_t r) {
    const float* cs = a.cos_sin + a.positions[r] * a.rotary_dim;
    T* q = static_cast<T*>(a.q) + r * a.q_stride;
    T* k = static_cast<T*>(a.k) + r * a.k_stride;
    for (int h = 0; h < a.q_heads + a.k_heads; ++h) {
      T* head = h < a.q_heads ? q + h * a.head_dim : k + (h - a.q_heads) * a.head_dim;
      const float* weight = h < a.q_heads ? a.q_norm : a.k_norm;
      if (weight) normalize(head, weight, head, a.head_dim, a.eps);
      rotate(head, cs, a.rotary_dim, a.is_neox != 0);
    }
  });
}

inline vf activate(vf x, int act) {
  if (act == 0) return div(x, add(set1(1.0f), vexp(sub(zero(), x))));
  if (act == 1) {
    const vf inner = mul(set1(0.7978845608028654f), fma(mul(mul(x, x), x), set1(0.044715f), x));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), vtanh(inner)));
  }
  float v[W];
  store(v, x);
  for (int i = 0; i < W; ++i) v[i] = 0.5f * v[i] * (1.0f + std::erf(v[i] * 0.70710678118654752f));
  return load(v);
}

// Work is cut into pieces of kGluPiece columns so that one long row is shared too.
constexpr int kGluPiece = 512;

template <class T>
void run_glu(const void* p, int chunk, int chunks, Scratch&) {
  const hr_glu& a = *static_cast<const hr_glu*>(p);
  const int64_t pieces = (a.n + kGluPiece - 1) / kGluPiece;
  each_row(a.rows * pieces, chunk, chunks, [&](int64_t index) {
    const int64_t r = index / pieces, from = index % pieces * kGluPiece;
    const int64_t to = from + kGluPiece < a.n ? from + kGluPiece : a.n;
    const T* gate = static_cast<const T*>(a.x) + r * a.x_stride;
    const T* up = gate + a.n;
    T* y = static_cast<T*>(a.y) + r * a.y_stride;
    int64_t i = from;
    for (; i + W <= to; i += W) store(y + i, mul(activate(load(gate + i), a.act), load(up + i)));
    if (i < to) {
      float g[W] = {}, u[W] = {};
      for (int64_t j = i; j < to; ++j) g[j - i] = to_float(gate[j]), u[j - i] = to_float(up[j]);
      store(g, mul(activate(load(g), a.act), load(u)));
      for (int64_t j = i; j < to; ++j) from_float(g[j - i], y + j);
    }
  });
}

template <class T>
void run_embedding(const void* p, int chunk, int chunks, Scratch&) {
  const hr_embedding& a = *static_cast<const hr_embedding*>(p);
  QuantType t;
  const bool quantized = quant_type(a.format, &t);
  const PanelShape shape(quantized ? t : QuantType{32, 34, 8, 32, false, 128}, a.hidden);
  const int64_t bytes = panel_bytes(a.format, a.hidden);
  each_row(a.rows, chunk, chunks, [&](int64_t r) {
    T* y = static_cast<T*>(a.y) + r * a.y_stride;
    const int32_t id = a.ids[r];
    if (id < 0 || id >= a.vocab) {
      for (int i = 0; i < a.hidden; ++i) from_float(0.0f, y + i);
      return;
    }
    const uint8_t* panel = static_cast<const uint8_t*>(a.packed) + id / kCols * bytes;
    const int c = id % kCols;
    if (quantized) {
      float v[32];
      for (int i = 0; i < a.hidden; i += 32) {
        panel_block(t, shape, panel, c, i / 32, v);
        for (int j = 0; j < 32; j += W) store(y + i + j, mul(load(v + j), set1(a.scale)));
      }
      return;
    }
    for (int i = 0; i < a.hidden; ++i) {
      float v;
      if (a.format == HR_W_F16) v = to_float(reinterpret_cast<const fp16*>(panel)[i * kCols + c]);
      else if (a.format == HR_W_F32) v = reinterpret_cast<const float*>(panel)[i * kCols + c];
      else v = to_float(reinterpret_cast<const bf16*>(panel)[i / 2 * 2 * kCols + c * 2 + i % 2]);
      from_float(v * a.scale, y + i);
    }
  });
}

// Whether a cache lies in pairs; see hr_kv_write.
inline bool in_pairs(int dtype, int kv_dtype) { return dtype == HR_BF16 && (kv_dtype == HR_BF16 || kv_dtype == HR_I8); }

// One row of d numbers as the cache holds them; d a multiple of 16.
template <class T, class S>
inline void cache_row(const T* in, int64_t d, S* out, float*) {
  for (int64_t i = 0; i < d; i += W) store(out + i, load(in + i));
}

template <class T>
inline void cache_row(const T* in, int64_t d, int8_t* out, float* scale) {
  vf tops = zero(), poison = zero();  // NaN from a number that is not finite on
  for (int64_t i = 0; i < d; i += W) {
    const vf v = load(in + i);
    tops = vmax(tops, vabs(v));
    poison = fma(v, zero(), poison);
  }
  const float spoilt = sum(poison), largest = hmax(tops), by = largest / 127.0f;
  *scale = spoilt == 0.0f ? by : std::numeric_limits<float>::quiet_NaN();
  if (spoilt != 0.0f || by == 0.0f) {
    std::memset(out, 0, size_t(d));
    return;
  }
  for (int64_t i = 0; i < d; i += W) {
    float whole[W];
    store(whole, round_even(div(load(in + i), set1(by))));
    for (int j = 0; j < W; ++j) out[i + j] = int8_t(whole[j]);
  }
}

// A row into the first or the second place of each pair; the other belongs to a token that another thread may write. d a
// multiple of 16.
template <class S>
inline void put_between(const S* row, int64_t place, S* pairs, int64_t d) {
#if HR_AVX512 && defined(__AVX512BW__)
  if constexpr (sizeof(S) == 2) {
    const __mmask32 lanes = place ? 0xaaaaaaaa : 0x55555555;
    for (int64_t i = 0; i < d; i += 16) {
      const __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i)));
      _mm512_mask_storeu_epi16(pairs + 2 * i, lanes, _mm512_slli_epi32(v, unsigned(place) * 16));
    }
    return;
  }
#endif
  for (int64_t i = 0; i < d; ++i) pairs[2 * i + place] = row[i];
}

template <class T, class S, bool PAIRS>
void run_kv_write(const void* p, int chunk, int chunks, Scratch& scratch) {
  const hr_kv_write& a = *static_cast<const hr_kv_write*>(p);
  constexpr bool kScaled = std::is_same_v<S, int8_t>;
  constexpr int64_t kLane = PAIRS ? 2 : 1;
  const int64_t s = a.block_size, d = a.head_dim, run = s * (d + (kScaled ? 4 : 0));
  S* row = reinterpret_cast<S*>(scratch.need(sizeof(S) * size_t(d)));
  each_row(a.rows, chunk, chunks, [&](int64_t r) {
    if (a.slots[r] < 0) return;
    const int64_t block = a.slots[r] / s, in = a.slots[r] % s;
    for (int h = 0; h < a.kv_heads; ++h) {
      S* kc = static_cast<S*>(a.k_cache) + block * a.block_stride + h * run;
      S* vc = static_cast<S*>(a.v_cache) + block * a.block_stride + h * run;
      float* scales[2] = {nullptr, nullptr};
      if constexpr (kScaled) {
        scales[0] = reinterpret_cast<float*>(kc + s * d) + in;
        scales[1] = reinterpret_cast<float*>(vc + s * d) + in;
      }
      cache_row(static_cast<const T*>(a.k) + r * a.k_stride + h * d, d, row, scales[0]);
      S* to = kc + in * kLane;
      for (int64_t i = 0; i < d; i += kLane) std::memcpy(static_cast<void*>(to + i * s), row + i, sizeof(S) * kLane);
      cache_row(static_cast<const T*>(a.v) + r * a.v_stride + h * d, d, row, scales[1]);
      to = vc + in / kLane * kLane * d;
      if constexpr (PAIRS) {
        put_between(row, in % kLane, to, d);
      } else {
        std::memcpy(static_cast<void*>(to), row, sizeof(S) * size_t(d));
      }
    }
  });
}

template <class T>
RunFn kv_write_fn(const hr_kv_write& a) {
  switch (a.kv_dtype) {
    case HR_F32: return run_kv_write<T, float, false>;
    case HR_F16: return run_kv_write<T, fp16, false>;
    case HR_BF16: return run_kv_write<T, bf16, std::is_same_v<T, bf16>>;
    default: return run_kv_write<T, int8_t, std::is_same_v<T, bf16>>;
  }
}

}  // namespace hr
