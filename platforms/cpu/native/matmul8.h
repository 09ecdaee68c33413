// Many rows against block-quantized panels, in 8-bit integers: what panel_rows (quant.h) computes, to the last bit. Here
// two panels are unpacked to bytes once for all rows, and rows lie one after the other, so that little is left beside
// the products.
#pragma once
#include "matmul.h"

#if HR_AVX512 && defined(__AVX512VNNI__)
#define HR_MATMUL8 1

namespace hr {

constexpr int kPair = 2, kPairRows = 6;  // panels and rows whose sums fill the registers

// x: integers [rows][k], scales [rows][k / 32], and for each group what the zero point adds (int32) or, for types with
// a minimum, the sum of x (float) [rows][groups].
struct ByteRows {
  int8_t* q;
  float* d;
  int32_t* zero;
  static int64_t bytes(int64_t rows, int64_t k) { return rows * ((k + 63) / 64 * 64 + k / 32 * 4 + k / 16 * 4); }
  ByteRows(void* base, int64_t rows, int64_t k) {
    q = static_cast<int8_t*>(base);
    d = reinterpret_cast<float*>(q + rows * ((k + 63) / 64 * 64));
    zero = reinterpret_cast<int32_t*>(d + rows * (k / 32));
  }
};

// A NaN has no place among the integers: the scale carries it.
template <class T>
void quantize_bytes(const T* x, int64_t k, const QuantType& t, int8_t* q, float* d, int32_t* zero) {
  for (int64_t b = 0; b < k / 32; ++b, x += 32, q += 32) {
    const vf first = load(x), second = load(x + W);
    const float largest = hmax(vmax(vabs(first), vabs(second)));
    const vf inverse = set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    const vf whole[2] = {round_even(mul(first, inverse)), round_even(mul(second, inverse))};
    float sums[2];
    for (int h = 0; h < 2; ++h) {
      sums[h] = sum(whole[h]);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q + h * W), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole[h])));
    }
    const float total = sums[0] + sums[1];
    const bool spoilt = total != total;
    d[b] = spoilt ? total : largest / 127.0f;
    if (t.group == 32) sums[0] += sums[1];
    for (int h = 0; h < 32 / t.group; ++h, ++zero) {
      const float scaled = d[b] * sums[h];
      if (t.has_min) std::memcpy(zero, &scaled, 4);
      else *zero = spoilt ? 0 : -t.zero * int(sums[h]);
    }
  }
}

// One panel's integers as bytes [k / 4][16][4], its scales and minimums as floats [groups][16].
template <int BITS>
void unpack_panel(const QuantType& t, const uint8_t* panel, const PanelShape& shape, uint8_t* out, float* d, float* m) {
  const uint8_t* data = panel + shape.data_at;
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int64_t b = 0; b < shape.blocks; ++b, data += shape.block_bytes) {
    const uint64_t* planes = reinterpret_cast<const uint64_t*>(data + 256);
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step, out += 64) {
      __m512i w;
      if constexpr (BITS == 8) {
        w = _mm512_loadu_si512(data + step * 64);
      } else {
        w = _mm512_loadu_si512(data + (step & 3) * 64);
        w = _mm512_and_si512(step < 4 ? w : _mm512_srli_epi16(w, 4), nibble);
        if constexpr (BITS >= 5) w = _mm512_mask_add_epi8(w, planes[step], w, _mm512_set1_epi8(16));
        if constexpr (BITS >= 6) w = _mm512_mask_add_epi8(w, planes[8 + step], w, _mm512_set1_epi8(32));
      }
      _mm512_storeu_si512(out, w);
    }
  }
  const fp16* scales = reinterpret_cast<const fp16*>(panel + shape.scales_at);
  const fp16* mins = reinterpret_cast<const fp16*>(panel + shape.mins_at);
  for (int64_t at = 0; at < shape.groups * kCols; at += W) {
    store(d + at, load(scales + at));
    if (t.has_min) store(m + at, load(mins + at));
  }
}

inline void unpack_panel(const QuantType& t, const uint8_t* panel, const PanelShape& shape, uint8_t* out, float* d, float* m) {
  if (t.bits == 4) return unpack_panel<4>(t, panel, shape, out, d, m);
  if (t.bits == 5) return unpack_panel<5>(t, panel, shape, out, d, m);
  if (t.bits == 6) return unpack_panel<6>(t, panel, shape, out, d, m);
  return unpack_panel<8>(t, panel, shape, out, d, m);
}

// c[R][16 P] = R rows of x from `row` on * P unpacked panels, which lie one behind the other, as do their scales and their
// minimums. Each four inputs of a row are loaded once for all panels; see block_pairs. The sums have names: GCC keeps an
// array of them in memory.
template <int R, int P, int GROUP, bool MIN>
void pair_rows(const ByteRows& x, int64_t row, int64_t k, const uint8_t* b, const float* d, const float* m,
               float (*c)[kPair * kCols]) {
  const int64_t groups = k / GROUP;
  const float *xd = x.d + row * (k / 32), *x_sum = reinterpret_cast<const float*>(x.zero) + row * groups;
  const int32_t* zero = x.zero + row * groups;
#define HR_ALL(M) M(0, 0) M(0, 1) M(1, 0) M(1, 1) M(2, 0) M(2, 1) M(3, 0) M(3, 1) M(4, 0) M(4, 1) M(5, 0) M(5, 1)
#define HR_NAME(r, j) __m512 t##r##j = _mm512_setzero_ps();
#define HR_START(r, j) \
  __m512i a##r##j{};   \
  if constexpr (R > r && P > j && !MIN) a##r##j = _mm512_set1_epi32(zero[r * groups]);
#define HR_ROW(r, place, row)                                                          \
  if constexpr (R > r) {                                                               \
    __m512i v;                                                                         \
    asm("vpbroadcastd " place ", %0" : "=v"(v) : "r"(row), "r"(k));                    \
    asm("vpdpbusd %2, %1, %0" : "+v"(a##r##0) : "v"(w0), "v"(v));                      \
    if constexpr (P > 1) asm("vpdpbusd %2, %1, %0" : "+v"(a##r##1) : "v"(w1), "v"(v)); \
  }
#define HR_ADD(r, j)                                                                                   \
  if constexpr (R > r && P > j) {                                                                      \
    const __m512 scale = _mm512_mul_ps(d##j, _mm512_set1_ps(xd[r * (k / 32)]));                        \
    t##r##j = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a##r##j), scale, t##r##j);                            \
    if constexpr (MIN) t##r##j = _mm512_fmadd_ps(m##j, _mm512_set1_ps(x_sum[r * groups]), t##r##j);    \
  }
#define HR_END(r, j) \
  if constexpr (R > r && P > j) _mm512_storeu_ps(c[r] + j * kCols, t##r##j);
  HR_ALL(HR_NAME)
  const char *row0 = reinterpret_cast<const char*>(x.q + row * k), *row3 = row0 + 3 * k;
  asm volatile("" : "+r"(row0) : : "memory");  // what is read below is not said to the compiler
  for (int64_t g = 0; g < groups; ++g) {
    HR_ALL(HR_START)
#pragma GCC unroll 8
    for (int i = 0; i < GROUP / 4; ++i) {
      const __m512i w0 = _mm512_loadu_si512(b + i * 64);
      const __m512i w1 = P > 1 ? _mm512_loadu_si512(b + k * kCols + i * 64) : w0;
      HR_ROW(0, "(%1)", row0)
      HR_ROW(1, "(%1,%2)", row0)
      HR_ROW(2, "(%1,%2,2)", row0)
      HR_ROW(3, "(%1)", row3)
      HR_ROW(4, "(%1,%2)", row3)
      HR_ROW(5, "(%1,%2,2)", row3)
      row0 += 4, row3 += 4;
    }
    const __m512 d0 = _mm512_loadu_ps(d), d1 = P > 1 ? _mm512_loadu_ps(d + groups * kCols) : d0;
    const __m512 m0 = MIN ? _mm512_loadu_ps(m) : d0, m1 = MIN && P > 1 ? _mm512_loadu_ps(m + groups * kCols) : m0;
    HR_ALL(HR_ADD)
    b += GROUP * kCols, d += kCols, m += kCols, ++zero, ++x_sum;
    if (GROUP == 32 || g % 2) ++xd;
  }
  asm volatile("" : "+v"(t00) : : "memory");
  HR_ALL(HR_END)
#undef HR_ALL
#undef HR_NAME
#undef HR_START
#undef HR_ROW
#undef HR_ADD
#undef HR_END
}

template <int P, int GROUP, bool MIN>
inline auto pair_fn(int rows) {
  switch (rows) {
    case 1: return pair_rows<1, P, GROUP, MIN>;
    case 2: return pair_rows<2, P, GROUP, MIN>;
    case 3: return pair_rows<3, P, GROUP, MIN>;
    case 4: return pair_rows<4, P, GROUP, MIN>;
    case 5: return pair_rows<5, P, GROUP, MIN>;
    default: return pair_rows<6, P, GROUP, MIN>;
  }
}

template <int P>
inline auto pair_fn(const QuantType& t, int rows) {
  if (t.group == 16) return t.has_min ? pair_fn<P, 16, true>(rows) : pair_fn<P, 16, false>(rows);
  return t.has_min ? pair_fn<P, 32, true>(rows) : pair_fn<P, 32, false>(rows);
}

// Two panels unpacked: `b` bytes, `d` and `m` floats. Without the columns' multipliers, which the caller applies.
inline void mm_pair(const QuantType& t, const ByteRows& x, int64_t row, int rows, int cols, const uint8_t* b,
                    const float* d, const float* m, int64_t k, float (*c)[kPair * kCols]) {
  (cols > 1 ? pair_fn<2>(t, rows) : pair_fn<1>(t, rows))(x, row, k, b, d, m, c);
}

}  // namespace hr
#endif
