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

// The largest of each of four vectors, four times over.
inline __m512i largest_of(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_max_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m512i halves = _mm512_max_epi32(all, _mm512_shuffle_i32x4(all, all, 0x4e));
  return _mm512_max_epi32(halves, _mm512_shuffle_i32x4(halves, halves, 0xb1));
}

// Up to four blocks of 32 inputs. What is not finite has no place among the integers: the scale carries it. Absolute
// values are compared as the integers that their bits are, for which a NaN is the largest number.
template <bool FOUR, class T>
inline void quantize_blocks(const T* x, int blocks, const QuantType& t, int8_t* q, float* d, int32_t* zero) {
  const int per_block = 32 / t.group;
  auto at = [&](int i) { return FOUR || i / 2 < blocks ? load(x + i * W) : _mm512_setzero_ps(); };
  const __m512 v0 = at(0), v1 = at(1), v2 = at(2), v3 = at(3), v4 = at(4), v5 = at(5), v6 = at(6), v7 = at(7);
  auto top = [](__m512 a, __m512 b) {
    return _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(b)));
  };
  const __m128i bits = _mm512_castsi512_si128(largest_of(top(v0, v1), top(v2, v3), top(v4, v5), top(v6, v7)));
  const __m128 largest = _mm_castsi128_ps(bits), most = _mm_set1_ps(127.0f);
  const __mmask8 spoilt = _mm_cmpgt_epi32_mask(bits, _mm_set1_epi32(0x7f7fffff));
  const __m512 inverse =
      _mm512_castps128_ps512(_mm_maskz_div_ps(_mm_cmpgt_epi32_mask(bits, _mm_setzero_si128()), most, largest));
  const __m128 scale = _mm_mask_mov_ps(_mm_div_ps(largest, most), spoilt, _mm_set1_ps(__builtin_nanf("")));
  auto whole = [&](__m512 v, int block) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_permutexvar_ps(_mm512_set1_epi32(block), inverse)));
  };
  auto bytes = [&](__m512 a, __m512 b, __m512 c, __m512 e, int half) {  // of two blocks; their sums by four
    const __m512i words = _mm512_packs_epi32(whole(a, 2 * half), whole(b, 2 * half));
    const __m512i packed = _mm512_packs_epi16(words, _mm512_packs_epi32(whole(c, 2 * half + 1), whole(e, 2 * half + 1)));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i out = _mm512_permutexvar_epi32(order, packed);
    if (FOUR || blocks - 2 * half > 1) _mm512_storeu_si512(q + half * 64, out);
    else if (blocks - 2 * half > 0) _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + half * 64), _mm512_castsi512_si256(out));
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), out);
  };
  const __m512i first = bytes(v0, v1, v2, v3, 0), second = bytes(v4, v5, v6, v7, 1);
  const __m512i both = _mm512_add_epi32(_mm512_unpacklo_epi32(first, second), _mm512_unpackhi_epi32(first, second));
  const __m512i lanes = _mm512_add_epi32(both, _mm512_shuffle_epi32(both, _MM_PERM_BADC));  // first, second, ... of 16 inputs
  const __m512i sixteen = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  __m256i sums = _mm512_castsi512_si256(_mm512_permutexvar_epi32(sixteen, lanes));
  __m256 scales = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(scale), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
  if (per_block == 1) {
    sums = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums, sums), 0x08);
    scales = _mm256_castps128_ps256(scale);
  }
  if (t.has_min) sums = _mm256_castps_si256(_mm256_mul_ps(scales, _mm256_cvtepi32_ps(sums)));
  else sums = _mm256_mullo_epi32(sums, _mm256_set1_epi32(-t.zero));
  if constexpr (FOUR) {
    if (per_block == 1) _mm_storeu_si128(reinterpret_cast<__m128i*>(zero), _mm256_castsi256_si128(sums));
    else _mm256_storeu_si256(reinterpret_cast<__m256i*>(zero), sums);
    _mm_storeu_ps(d, scale);
  } else {
    _mm256_mask_storeu_epi32(zero, __mmask8((1 << blocks * per_block) - 1), sums);
    _mm_mask_storeu_ps(d, __mmask8((1 << blocks) - 1), scale);
  }
}

template <class T>
void quantize_bytes(const T* x, int64_t k, const QuantType& t, int8_t* q, float* d, int32_t* zero) {
  int64_t b = k / 32;
  for (; b >= 4; b -= 4, x += 128, q += 128, d += 4, zero += 128 / t.group) quantize_blocks<true>(x, 4, t, q, d, zero);
  if (b > 0) quantize_blocks<false>(x, int(b), t, q, d, zero);
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
