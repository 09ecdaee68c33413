// Block-quantized weights: the GGUF block types read one group at a time, and the panel form they are repacked to.
//
// A panel holds 16 output features. Its bytes: 16 column multipliers (float), then for each group of 16 or 32 inputs
// one fp16 scale a column, then (types with a minimum) one fp16 minimum a column, then the integers of all blocks of
// 32 inputs. Within a block the integers lie as the widest unit reads them: vector j holds inputs 4j..4j+3 of each of
// the 16 columns (64 bytes); for 4-bit types inputs 4j+16.. share its high nibbles. The fifth and sixth bit of 5- and
// 6-bit types are bit planes: one 64-bit mask for each vector of 64 bytes.
#pragma once
#include "abi.h"
#include "simd.h"

namespace hr {

constexpr int kCols = 16;  // output features of a panel

struct QuantType {
  int block;        // weights in a GGUF block
  int block_bytes;  // bytes of a GGUF block
  int bits;         // 4, 5, 6 or 8 in the panel
  int group;        // inputs that share a scale: 16 or 32
  bool has_min;
  int zero;         // value of the integer that means 0 (types without a minimum)
};

inline bool quant_type(int format, QuantType* t) {
  switch (format) {
    case HR_W_Q4_0: *t = {32, 18, 4, 32, false, 8}; return true;
    case HR_W_Q4_1: *t = {32, 20, 4, 32, true, 0}; return true;
    case HR_W_Q5_0: *t = {32, 22, 5, 32, false, 16}; return true;
    case HR_W_Q5_1: *t = {32, 24, 5, 32, true, 0}; return true;
    case HR_W_Q8_0: *t = {32, 34, 8, 32, false, 128}; return true;
    case HR_W_Q2_K: *t = {256, 84, 4, 16, true, 0}; return true;
    case HR_W_Q3_K: *t = {256, 110, 4, 16, false, 4}; return true;
    case HR_W_Q4_K: *t = {256, 144, 4, 32, true, 0}; return true;
    case HR_W_Q5_K: *t = {256, 176, 5, 32, true, 0}; return true;
    case HR_W_Q6_K: *t = {256, 210, 6, 16, false, 32}; return true;
    default: return false;
  }
}

struct PanelShape {
  int64_t groups, blocks, scales_at, mins_at, data_at, block_bytes, bytes;
  PanelShape(const QuantType& t, int64_t k) {
    blocks = k / 32;
    groups = k / t.group;
    block_bytes = t.bits == 8 ? 512 : 256 + (t.bits - 4) * 64;
    scales_at = kCols * 4;
    mins_at = scales_at + groups * kCols * 2;
    data_at = (mins_at + (t.has_min ? groups * kCols * 2 : 0) + 63) / 64 * 64;
    bytes = data_at + blocks * block_bytes;
  }
};

inline float half_at(const uint8_t* p) {
  fp16 h;
  std::memcpy(&h.bits, p, 2);
  return to_float(h);
}

inline void k4_scale_min(const uint8_t* s, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *minimum = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
  }
}

// One GGUF block as integers q (0 to 255), a scale and a minimum for each group: w = d * (q - zero) + m.
inline void unpack_block(int format, const uint8_t* b, uint8_t* q, float* d, float* m) {
  switch (format) {
    case HR_W_Q4_0:
    case HR_W_Q4_1: {
      d[0] = half_at(b);
      m[0] = format == HR_W_Q4_1 ? half_at(b + 2) : 0.0f;
      const uint8_t* s = b + (format == HR_W_Q4_1 ? 4 : 2);
      for (int i = 0; i < 16; ++i) q[i] = s[i] & 15, q[i + 16] = s[i] >> 4;
      break;
    }
    case HR_W_Q5_0:
    case HR_W_Q5_1: {
      d[0] = half_at(b);
      m[0] = format == HR_W_Q5_1 ? half_at(b + 2) : 0.0f;
      const uint8_t* s = b + (format == HR_W_Q5_1 ? 4 : 2);
      uint32_t high;
      std::memcpy(&high, s, 4);
      s += 4;
      for (int i = 0; i < 16; ++i) {
        q[i] = uint8_t((s[i] & 15) | (high >> i & 1) << 4);
        q[i + 16] = uint8_t((s[i] >> 4) | (high >> (i + 16) & 1) << 4);
      }
      break;
    }
    case HR_W_Q8_0: {
      d[0] = half_at(b);
      m[0] = 0.0f;
      for (int i = 0; i < 32; ++i) q[i] = uint8_t(b[2 + i] ^ 0x80);
      break;
    }
    case HR_W_Q2_K: {
      float scale = half_at(b + 80), minimum = half_at(b + 82);
      for (int i = 0; i < 16; ++i) d[i] = scale * float(b[i] & 15), m[i] = -minimum * float(b[i] >> 4);
      for (int i = 0; i < 256; ++i)
        q[i] = uint8_t(b[16 + (i / 128) * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3);
      break;
    }
    case HR_W_Q3_K: {
      const uint8_t *mask = b, *low = b + 32, *s = b + 96;
      float scale = half_at(b + 108);
      for (int i = 0; i < 16; ++i) {
        int lo = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
        int hi = s[8 + i % 4] >> (2 * (i / 4)) & 3;
        d[i] = scale * float((lo | hi << 4) - 32);
        m[i] = 0.0f;
      }
      for (int i = 0; i < 256; ++i) {
        int l = low[(i / 128) * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
        q[i] = uint8_t(l | (mask[i % 32] >> (i / 32) & 1) << 2);
      }
      break;
    }
    case HR_W_Q4_K:
    case HR_W_Q5_K: {
      float scale = half_at(b), minimum = half_at(b + 2);
      const uint8_t* high = b + 16;
      const uint8_t* s = b + (format == HR_W_Q5_K ? 48 : 16);
      for (int j = 0; j < 8; ++j) {
        int sc, mn;
        k4_scale_min(b + 4, j, &sc, &mn);
        d[j] = scale * float(sc);
        m[j] = -minimum * float(mn);
        for (int l = 0; l < 32; ++l) {
          int v = j & 1 ? s[j / 2 * 32 + l] >> 4 : s[j / 2 * 32 + l] & 15;
          if (format == HR_W_Q5_K) v |= (high[l] >> j & 1) << 4;
          q[j * 32 + l] = uint8_t(v);
        }
      }
      break;
    }
    case HR_W_Q6_K: {
      const uint8_t *low = b, *high = b + 128;
      float scale = half_at(b + 208);
      for (int i = 0; i < 16; ++i) d[i] = scale * float(int8_t(b[192 + i])), m[i] = 0.0f;
      for (int i = 0; i < 256; ++i) {
        int n = i / 128, part = i % 128 / 32, l = i % 32;
        int nibble = low[n * 64 + l + (part & 1) * 32] >> (part / 2 * 4) & 15;
        q[i] = uint8_t(nibble | (high[n * 32 + l] >> (2 * part) & 3) << 4);
      }
      break;
    }
  }
}

inline uint16_t half_bits(float v) {
#if defined(__F16C__) || HR_AVX512
  return uint16_t(_cvtss_sh(v, 0));
#else
  uint32_t u;
  std::memcpy(&u, &v, 4);
  uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a >= 0x47800000) return uint16_t(sign | 0x7bff);  // clamp: scales are never infinite
  if (a < 0x38800000) {                                 // subnormal or zero
    float scaled;
    std::memcpy(&scaled, &a, 4);
    return uint16_t(sign | uint32_t(std::lrint(scaled * 16777216.0f)));
  }
  a += 0xfff + (a >> 13 & 1);
  return uint16_t(sign | ((a - 0x38000000) >> 13));
#endif
}

// Packs 16 rows (those beyond `rows` as zeros) of K weights into one panel. Products of two scales (the K types) do
// not fit fp16 without loss of range, so each column's scales are divided by a power of two, kept as its multiplier.
inline void pack_panel(int format, const QuantType& t, const uint8_t* src, int64_t row_bytes, int rows, int64_t k,
                       uint8_t* panel) {
  const PanelShape shape(t, k);
  std::memset(panel, 0, size_t(shape.bytes));
  float* columns = reinterpret_cast<float*>(panel);
  uint16_t* scales = reinterpret_cast<uint16_t*>(panel + shape.scales_at);
  uint16_t* mins = reinterpret_cast<uint16_t*>(panel + shape.mins_at);
  const int per_block = t.block / t.group;
  for (int c = 0; c < rows; ++c) {
    const uint8_t* row = src + c * row_bytes;
    float top = 0.0f;
    uint8_t q[256];
    float d[16], m[16];
    if (t.block == 256)
      for (int64_t b = 0; b < k / t.block; ++b) {
        unpack_block(format, row + b * t.block_bytes, q, d, m);
        for (int i = 0; i < per_block; ++i) top = std::fmax(top, std::fmax(std::fabs(d[i]), std::fabs(m[i])));
      }
    const float column = top > 0.0f ? std::ldexp(1.0f, std::ilogb(top) - 12) : 1.0f;  // largest scale near 2^12
    columns[c] = column;
    for (int64_t b = 0; b < k / t.block; ++b) {
      unpack_block(format, row + b * t.block_bytes, q, d, m);
      for (int i = 0; i < per_block; ++i) {
        const int64_t g = b * per_block + i;
        scales[g * kCols + c] = half_bits(d[i] / column);
        if (t.has_min) mins[g * kCols + c] = half_bits(m[i] / column);
      }
      for (int e = 0; e < t.block; ++e) {
        const int64_t index = b * t.block + e;
        uint8_t* data = panel + shape.data_at + index / 32 * shape.block_bytes;
        const int in = int(index % 32), step = in / 4, byte = c * 4 + in % 4;
        if (t.bits == 8) {
          data[step * 64 + byte] = q[e];
          continue;
        }
        data[(step & 3) * 64 + byte] |= uint8_t((q[e] & 15) << (step < 4 ? 0 : 4));
        for (int bit = 4; bit < t.bits; ++bit)
          if (q[e] >> bit & 1) data[256 + (bit - 4) * 64 + step * 8 + byte / 8] |= uint8_t(1 << byte % 8);
      }
    }
  }
}

// Rows of x as int8 with a scale for each 32 inputs: x = d * (q + fine / kFine). The second term is what rounding to
// q left over; few rows use it, for they wait for memory and not for arithmetic. Besides, for each group, what the
// kernels add for the zero point (int32, -zero * sum of q and of fine) and for the minimum (float, sum of x).
//
// `stride` rows lie between each other, so that a kernel reaches all of them from one pointer: four inputs of the
// first, four of the second, ..., and their scales and sums likewise.
constexpr float kFine = 254.0f;
constexpr int kFineRows = 4;  // up to here rows have both terms
constexpr int kRows = 8;      // rows that a kernel takes at once

constexpr int row_stride(int rows) { return rows <= 2 ? rows : rows <= kFineRows ? kFineRows : kRows; }

struct QuantRows {
  int8_t *q, *fine;
  float* d;
  int32_t *zero, *fine_zero;
  float* sum;
  static int64_t bytes(int64_t k, int stride) { return (2 * k + k / 32 * 4 + k / 16 * 12) * stride; }
  QuantRows(void* base, int64_t k, int stride) {
    q = static_cast<int8_t*>(base);
    fine = q + k * stride;
    d = reinterpret_cast<float*>(fine + k * stride);
    zero = reinterpret_cast<int32_t*>(d + k / 32 * stride);
    fine_zero = zero + k / 16 * stride;
    sum = reinterpret_cast<float*>(fine_zero + k / 16 * stride);
  }
};

inline float to_int8(vf whole, int8_t* out, int stride) {  // W numbers, four together; returns their sum, NaN with a NaN
  alignas(16) int8_t v[W];
#if HR_AVX512
  _mm_store_si128(reinterpret_cast<__m128i*>(v), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)));
#else
  for (int j = 0; j < W; ++j) v[j] = int8_t(whole[j]);
#endif
  for (int j = 0; j < W; j += 4) std::memcpy(out + j * stride, v + j, 4);
  return sum(whole);
}

// Blocks [first, last) of 32 inputs of the row x, which becomes row r of `out`.
template <class T>
void quantize_row(const T* x, int64_t first, int64_t last, int group, int zero_point, bool fine, const QuantRows& out,
                  int r, int stride) {
  for (int64_t b = first; b < last; ++b) {
    vf v[32 / W];
    vf top = zero();
    for (int i = 0; i < 32 / W; ++i) {
      v[i] = load(x + b * 32 + i * W);
      top = vmax(top, vabs(v[i]));
    }
    const float largest = hmax(top);
    const float d = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    float sums[2] = {0.0f, 0.0f}, fine_sums[2] = {0.0f, 0.0f}, exact[2] = {0.0f, 0.0f};
    for (int i = 0; i < 32 / W; ++i) {
      const vf scaled = mul(v[i], set1(inverse));
      const vf whole = round_even(scaled);
      const int64_t at = (b * 32 + i * W) * stride + r * 4;
      sums[i * W / 16] += to_int8(whole, out.q + at, stride);
      if (fine) {
        const vf rest = round_even(mul(sub(scaled, whole), set1(kFine)));
        fine_sums[i * W / 16] += to_int8(rest, out.fine + at, stride);
        exact[i * W / 16] += sum(v[i]);
      }
    }
    // a NaN has no place among the integers: the scale carries it
    const float total = sums[0] + sums[1];
    const bool spoilt = total != total;
    out.d[b * stride + r] = spoilt ? total : d;
    if (group == 32) sums[0] += sums[1], fine_sums[0] += fine_sums[1], exact[0] += exact[1];
    for (int h = 0; h < 32 / group; ++h) {
      const int64_t at = (b * (32 / group) + h) * stride + r;
      out.zero[at] = spoilt ? 0 : -zero_point * int(sums[h]);
      out.fine_zero[at] = spoilt ? 0 : -zero_point * int(fine_sums[h]);
      out.sum[at] = fine ? exact[h] : d * float(sums[h]);
    }
  }
}

// R rows of x against one panel: out[r][16]. The integers of a block are unpacked once for all rows. `next`: the panel
// to fetch meanwhile, or null.
#if HR_AVX512 && defined(__AVX512VNNI__)
#if HR_AMX
constexpr bool kManyCores = true;  // machines with tiles: a thread's run of panels is short
#else
constexpr bool kManyCores = false;
#endif
constexpr int64_t kSoon = 4096;  // bytes

// Fetches the integers and scales of a block that lies kSoon bytes on, in this panel or the next (if it is known). Inlined
// by force: GCC takes a function that only fetches for one that does nothing.
template <int BITS, int GROUP, bool MIN>
[[gnu::always_inline]] inline void fetch_near(const uint8_t* panel, const PanelShape& shape, int64_t b,
                                              const uint8_t* next) {
  constexpr int64_t kBytes = BITS == 8 ? 512 : 256 + (BITS - 4) * 64;  // PanelShape::block_bytes
  constexpr int64_t kScales = 32 / GROUP * kCols * 2;
  b += kSoon / kBytes;
  if (b >= shape.blocks) {
    panel = next, b -= shape.blocks;
    if (!panel || b >= shape.blocks) return;
  }
  const char* from = reinterpret_cast<const char*>(panel);
#pragma GCC unroll 8
  for (int64_t at = 0; at < kBytes; at += 64) _mm_prefetch(from + shape.data_at + b * kBytes + at, _MM_HINT_T0);
  _mm_prefetch(from + shape.scales_at + b * kScales, _MM_HINT_T0);
  if (MIN) _mm_prefetch(from + shape.mins_at + b * kScales, _MM_HINT_T0);
}

// acc += w * the four inputs at x, for all columns: one instruction, where the compiler would load first.
inline __m512i dot4(__m512i acc, __m512i w, const int8_t* x) {
  typedef int32_t __attribute__((may_alias)) four;
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const four*>(x)));
  return acc;
}

template <int BITS, int GROUP, bool MIN, int R, bool FINE>
void panel_rows(const uint8_t* panel, const PanelShape& shape, const QuantRows& x, const uint8_t* next,
                float (*out)[kCols]) {
  const uint8_t* data = panel + shape.data_at;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + shape.scales_at);
  const uint16_t* mins = reinterpret_cast<const uint16_t*>(panel + shape.mins_at);
  constexpr int S = FINE ? row_stride(R) : kRows;
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512 total[R];
  for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
  constexpr int kGroups = 32 / GROUP, kSteps = 8 / kGroups;
  const int64_t share = shape.bytes / shape.blocks;
  for (int64_t b = 0; b < shape.blocks; ++b, data += shape.block_bytes) {
    const uint64_t* planes = reinterpret_cast<const uint64_t*>(data + 256);
    // The next panel, as far on as this one: a panel has three streams of a few hundred bytes each, which the
    // hardware's own prefetcher hardly notices.
    if constexpr (kManyCores && R <= 2) {
      fetch_near<BITS, GROUP, MIN>(panel, shape, b, next);
    } else if (next) {
      for (int64_t at = b * share & ~int64_t(63); at < (b + 1) * share; at += 64)
        _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T0);
    }
    for (int g = 0; g < kGroups; ++g) {
      const int64_t index = b * kGroups + g;
      __m512i acc[R], rest[R];
      for (int r = 0; r < R; ++r) {
        acc[r] = _mm512_set1_epi32(MIN ? 0 : x.zero[index * S + r]);
        rest[r] = _mm512_set1_epi32(MIN || !FINE ? 0 : x.fine_zero[index * S + r]);
      }
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        const int step = g * kSteps + s;
        __m512i w;
        if constexpr (BITS == 8) {
          w = _mm512_loadu_si512(data + step * 64);
        } else {
          w = _mm512_loadu_si512(data + (step & 3) * 64);
          w = _mm512_and_si512(step < 4 ? w : _mm512_srli_epi16(w, 4), nibble);
          if constexpr (BITS >= 5) w = _mm512_mask_add_epi8(w, planes[step], w, _mm512_set1_epi8(16));
          if constexpr (BITS >= 6) w = _mm512_mask_add_epi8(w, planes[8 + step], w, _mm512_set1_epi8(32));
        }
        const int64_t at = (b * 8 + step) * 4 * S;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          acc[r] = dot4(acc[r], w, x.q + at + r * 4);
          if constexpr (FINE) rest[r] = dot4(rest[r], w, x.fine + at + r * 4);
        }
      }
      const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + index * kCols)));
      __m512 m;
      if constexpr (MIN)
        m = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(mins + index * kCols)));
      for (int r = 0; r < R; ++r) {
        const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x.d[b * S + r]));
        __m512 product = _mm512_cvtepi32_ps(acc[r]);
        if constexpr (FINE)
          product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(rest[r]), _mm512_set1_ps(1.0f / kFine), product);
        total[r] = _mm512_fmadd_ps(product, scale, total[r]);
        if constexpr (MIN) total[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x.sum[index * S + r]), total[r]);
      }
    }
  }
  const __m512 columns = _mm512_loadu_ps(panel);
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(out[r], _mm512_mul_ps(total[r], columns));
}
#else
// The integers of one step (64 bytes) as they are stored, bit planes added.
template <int BITS>
inline void step_bytes(const uint8_t* data, int step, uint8_t* w) {
  if constexpr (BITS == 8) {
    std::memcpy(w, data + step * 64, 64);
  } else {
    const uint8_t* from = data + (step & 3) * 64;
    const int shift = step < 4 ? 0 : 4;
    for (int i = 0; i < 64; ++i) w[i] = from[i] >> shift & 15;
    for (int bit = 4; bit < BITS; ++bit) {
      const uint8_t* plane = data + 256 + (bit - 4) * 64 + step * 8;
      for (int i = 0; i < 64; ++i) w[i] |= uint8_t((plane[i / 8] >> i % 8 & 1) << bit);
    }
  }
}

// acc[c] += w[4c..4c+3] . x[0..3]
template <int BITS>
inline void dot4(const uint8_t* w, const int8_t* x, int32_t* acc) {
#if defined(__AVX2__)
  int32_t four;
  std::memcpy(&four, x, 4);
  const __m256i xs = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
  for (int h = 0; h < 2; ++h) {
    __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + h * 32));
    __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(acc + h * 8));
    if constexpr (BITS == 8) {  // 255 * 127 * 2 would not fit int16: low and high nibbles apart
      const __m256i nibble = _mm256_set1_epi8(15);
      __m256i lo = _mm256_maddubs_epi16(_mm256_and_si256(v, nibble), xs);
      __m256i hi = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(v, 4), nibble), xs);
      a = _mm256_add_epi32(a, _mm256_madd_epi16(lo, ones));
      a = _mm256_add_epi32(a, _mm256_slli_epi32(_mm256_madd_epi16(hi, ones), 4));
    } else {
      a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(v, xs), ones));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc + h * 8), a);
  }
#else
  for (int c = 0; c < kCols; ++c)
    acc[c] += int(w[4 * c]) * x[0] + int(w[4 * c + 1]) * x[1] + int(w[4 * c + 2]) * x[2] + int(w[4 * c + 3]) * x[3];
#endif
}

template <int BITS, int GROUP, bool MIN, int R, bool FINE>
void panel_rows(const uint8_t* panel, const PanelShape& shape, const QuantRows& x, const uint8_t*,
                float (*out)[kCols]) {
  const uint8_t* data = panel + shape.data_at;
  const fp16* scales = reinterpret_cast<const fp16*>(panel + shape.scales_at);
  const fp16* mins = reinterpret_cast<const fp16*>(panel + shape.mins_at);
  constexpr int S = FINE ? row_stride(R) : kRows;
  constexpr int kGroups = 32 / GROUP, kSteps = 8 / kGroups;
  vf total[R][kCols / W];
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < kCols / W; ++h) total[r][h] = zero();
  for (int64_t b = 0; b < shape.blocks; ++b, data += shape.block_bytes) {
    for (int g = 0; g < kGroups; ++g) {
      const int64_t index = b * kGroups + g;
      alignas(64) int32_t acc[R][kCols], rest[R][kCols];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kCols; ++c) {
          acc[r][c] = MIN ? 0 : x.zero[index * S + r];
          rest[r][c] = MIN || !FINE ? 0 : x.fine_zero[index * S + r];
        }
      for (int s = 0; s < kSteps; ++s) {
        alignas(64) uint8_t w[64];
        step_bytes<BITS>(data, g * kSteps + s, w);
        const int64_t at = (b * 8 + g * kSteps + s) * 4 * S;
        for (int r = 0; r < R; ++r) {
          dot4<BITS>(w, x.q + at + r * 4, acc[r]);
          if constexpr (FINE) dot4<BITS>(w, x.fine + at + r * 4, rest[r]);
        }
      }
      for (int h = 0; h < kCols / W; ++h) {
        const vf d = load(scales + index * kCols + h * W);
        for (int r = 0; r < R; ++r) {
          float a[W];
          for (int i = 0; i < W; ++i) {
            a[i] = float(acc[r][h * W + i]);
            if constexpr (FINE) a[i] += float(rest[r][h * W + i]) / kFine;
          }
          total[r][h] = fma(load(a), mul(d, set1(x.d[b * S + r])), total[r][h]);
          if constexpr (MIN) total[r][h] = fma(load(mins + index * kCols + h * W), set1(x.sum[index * S + r]), total[r][h]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < kCols / W; ++h)
      store(out[r] + h * W, mul(total[r][h], load(reinterpret_cast<const float*>(panel) + h * W)));
}
#endif

using PanelFn = void (*)(const uint8_t*, const PanelShape&, const QuantRows&, const uint8_t* next, float (*)[kCols]);

template <int BITS, int GROUP, bool MIN>
PanelFn panel_fn(int rows, bool fine) {
  switch (rows) {
    case 1: return fine ? panel_rows<BITS, GROUP, MIN, 1, true> : panel_rows<BITS, GROUP, MIN, 1, false>;
    case 2: return fine ? panel_rows<BITS, GROUP, MIN, 2, true> : panel_rows<BITS, GROUP, MIN, 2, false>;
    case 3: return fine ? panel_rows<BITS, GROUP, MIN, 3, true> : panel_rows<BITS, GROUP, MIN, 3, false>;
    case 4: return fine ? panel_rows<BITS, GROUP, MIN, 4, true> : panel_rows<BITS, GROUP, MIN, 4, false>;
    case 5: return panel_rows<BITS, GROUP, MIN, 5, false>;
    case 6: return panel_rows<BITS, GROUP, MIN, 6, false>;
    case 7: return panel_rows<BITS, GROUP, MIN, 7, false>;
    default: return panel_rows<BITS, GROUP, MIN, 8, false>;
  }
}

inline PanelFn panel_fn(const QuantType& t, int rows, bool fine) {
  if (t.bits == 4) {
    if (t.group == 16) return t.has_min ? panel_fn<4, 16, true>(rows, fine) : panel_fn<4, 16, false>(rows, fine);
    return t.has_min ? panel_fn<4, 32, true>(rows, fine) : panel_fn<4, 32, false>(rows, fine);
  }
  if (t.bits == 5) return t.has_min ? panel_fn<5, 32, true>(rows, fine) : panel_fn<5, 32, false>(rows, fine);
  if (t.bits == 6) return panel_fn<6, 16, false>(rows, fine);
  return panel_fn<8, 32, false>(rows, fine);
}

// The b-th block of 32 weights of column c of a panel, for embedding rows.
inline void panel_block(const QuantType& t, const PanelShape& shape, const uint8_t* panel, int c, int64_t b, float* out) {
  const uint8_t* data = panel + shape.data_at + b * shape.block_bytes;
  uint8_t q[32];
  for (int step = 0; step < 8; ++step) {
    uint32_t four;
    std::memcpy(&four, data + (t.bits == 8 ? step : step & 3) * 64 + c * 4, 4);
    if (t.bits < 8) four = four >> (step < 4 ? 0 : 4) & 0x0f0f0f0f;
    for (int bit = 4; bit < t.bits && t.bits < 8; ++bit) {
      const uint32_t plane = data[256 + (bit - 4) * 64 + step * 8 + c / 2] >> c % 2 * 4 & 15;
      four |= (plane * 0x00204081 & 0x01010101) << bit;  // each of four bits in a byte of its own
    }
    std::memcpy(q + step * 4, &four, 4);
  }
  const float column = reinterpret_cast<const float*>(panel)[c];
  for (int g = 0; g < 32 / t.group; ++g) {
    const int64_t at = (b * (32 / t.group) + g) * kCols + c;
    const float d = half_at(panel + shape.scales_at + at * 2);
    const float m = t.has_min ? half_at(panel + shape.mins_at + at * 2) : 0.0f;
    for (int i = g * t.group; i < (g + 1) * t.group; ++i) out[i] = (d * float(q[i] - t.zero) + m) * column;
  }
}

}  // namespace hr
