// Products with weights that lie in panels of 16 columns. bf16 pairs: B[k / 2][16][2]; float: B[k][16].
// `ldb` is the distance of two rows of B in bytes, so the same kernels serve weights (64) and the KV cache.
#pragma once
#include "quant.h"
#include "simd.h"

namespace hr {

// c[r] += A[r, 0..k) * B for R rows through float arithmetic: for machines without bf16 dot products and for float A.
template <int R, class TA>
inline void rows_expand(const TA* a, int64_t lda, const uint8_t* b, int64_t ldb, int64_t k, float (*c)[kCols]) {
  constexpr int H = kCols / W;
  vf acc[R][H];
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h) acc[r][h] = load(c[r] + h * W);
  for (int64_t p = 0; p < k / 2; ++p) {
    const uint32_t* row = reinterpret_cast<const uint32_t*>(b + p * ldb);
    for (int h = 0; h < H; ++h) {
#if HR_AVX512
      const __m512i w = _mm512_loadu_si512(row);
      const vf lo = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
      const vf hi = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u))));
#else
      vu w;
      std::memcpy(&w, row + h * W, sizeof w);
      const vf lo = (vf)(w << 16), hi = (vf)(w & 0xffff0000u);
#endif
      for (int r = 0; r < R; ++r) {
        acc[r][h] = fma(set1(to_float(a[r * lda + 2 * p])), lo, acc[r][h]);
        acc[r][h] = fma(set1(to_float(a[r * lda + 2 * p + 1])), hi, acc[r][h]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h) store(c[r] + h * W, acc[r][h]);
}

#if HR_AVX512 && defined(__AVX512BF16__)
// acc + w * the pair of row R, `at` bytes on, for all columns. Eight rows, `lda` bytes apart, are reached from three
// pointers: one register for each row is more than there are, and a compiler that computes addresses anew is half as
// fast. What is read is not said to the compiler: see rows_pairs.
template <int R, int at>
inline __m512 dot2(__m512 acc, __m512bh w, const char* row0, const char* row3, const char* row6, int64_t lda) {
#define HR_DOT(place, row)                                   \
  asm("vdpbf16ps %c4" place "%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "r"(row), "r"(lda), "i"(at))
  if constexpr (R == 0) HR_DOT("(%2)", row0);
  if constexpr (R == 1) HR_DOT("(%2,%3)", row0);
  if constexpr (R == 2) HR_DOT("(%2,%3,2)", row0);
  if constexpr (R == 3) HR_DOT("(%2)", row3);
  if constexpr (R == 4) HR_DOT("(%2,%3,4)", row0);
  if constexpr (R == 5) HR_DOT("(%2,%3,2)", row3);
  if constexpr (R == 6) HR_DOT("(%2)", row6);
  if constexpr (R == 7) HR_DOT("(%2,%3,4)", row3);
#undef HR_DOT
  return acc;
}
#endif

constexpr int kAhead = 4096;  // bytes

// The same with bf16 dot products where the machine has them.
template <int R>
inline void rows_pairs(const bf16* a, int64_t lda, const uint8_t* b, int64_t ldb, int64_t k, float (*c)[kCols]) {
#if HR_AVX512 && defined(__AVX512BF16__)
  constexpr int U = R <= 4 ? 4 : 2;  // sums of their own for every second or fourth pair hide the latency
  __m512 acc[R][U];
  for (int r = 0; r < R; ++r) {
    acc[r][0] = _mm512_loadu_ps(c[r]);
    for (int u = 1; u < U; ++u) acc[r][u] = _mm512_setzero_ps();
  }
  // What was written before is in memory before the products read it, for they depend on this statement; and nothing
  // is written over it before the last one, on which they depend.
  asm volatile("" : "+r"(a) : : "memory");
  const int64_t l = 2 * lda;
  const char *row0 = reinterpret_cast<const char*>(a), *row3 = row0 + 3 * l, *row6 = row0 + 6 * l;
  const bool weights = ldb == kCols * 4;  // a stream: fetched further ahead than the hardware dares while it computes
// indices that are constants before anything is optimized keep the sums in registers
#define HR_ROW(r, u) \
  if constexpr (R > r) acc[r][u] = dot2<r, 4 * u>(acc[r][u], w, row0, row3, row6, l)
#define HR_STEP(u)                                                                                              \
  if constexpr (U > u) {                                                                                        \
    const __m512bh w = (__m512bh)_mm512_loadu_si512(b + u * ldb);                                               \
    if (weights) _mm_prefetch(reinterpret_cast<const char*>(b + u * ldb + kAhead), _MM_HINT_T0);                \
    HR_ROW(0, u); HR_ROW(1, u); HR_ROW(2, u); HR_ROW(3, u); HR_ROW(4, u); HR_ROW(5, u); HR_ROW(6, u); HR_ROW(7, u); \
  }
  int64_t pairs = k / 2;
  for (; pairs >= U; pairs -= U) {
    HR_STEP(0)
    HR_STEP(1)
    HR_STEP(2)
    HR_STEP(3)
    b += U * ldb;
    row0 += 4 * U, row3 += 4 * U, row6 += 4 * U;
  }
  for (; pairs > 0; --pairs) {
    HR_STEP(0)
    b += ldb;
    row0 += 4, row3 += 4, row6 += 4;
  }
#undef HR_STEP
#undef HR_ROW
  for (int r = 0; r < R; ++r) {
    for (int u = 1; u < U; ++u) acc[r][0] = _mm512_add_ps(acc[r][0], acc[r][u]);
    asm volatile("" : "+v"(acc[r][0]) : : "memory");
    _mm512_storeu_ps(c[r], acc[r][0]);
  }
#else
  rows_expand<R>(a, lda, b, ldb, k, c);
#endif
}

template <int R, class TA>
inline void rows_float(const TA* a, int64_t lda, const uint8_t* b, int64_t ldb, int64_t k, float (*c)[kCols]) {
  constexpr int H = kCols / W;
  vf acc[R][H];
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h) acc[r][h] = load(c[r] + h * W);
  for (int64_t i = 0; i < k; ++i) {
    const float* row = reinterpret_cast<const float*>(b + i * ldb);
    for (int h = 0; h < H; ++h) {
      const vf w = load(row + h * W);
      for (int r = 0; r < R; ++r) acc[r][h] = fma(set1(to_float(a[r * lda + i])), w, acc[r][h]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h) store(c[r] + h * W, acc[r][h]);
}

// c[rows][16] += A * B; PAIRS: B holds bf16 pairs, else floats.
template <bool PAIRS, int R, class TA>
inline void rows_block(const TA* a, int64_t lda, const uint8_t* b, int64_t ldb, int64_t k, float (*c)[kCols]) {
  if constexpr (!PAIRS) {
    rows_float<R>(a, lda, b, ldb, k, c);
  } else if constexpr (sizeof(TA) == 2) {
    rows_pairs<R>(a, lda, b, ldb, k, c);
  } else {
    rows_expand<R>(a, lda, b, ldb, k, c);
  }
}

template <bool PAIRS, class TA>
inline void mm_rows(const TA* a, int64_t lda, const uint8_t* b, int64_t ldb, int64_t k, float (*c)[kCols], int rows) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) rows_block<PAIRS, 8>(a + r * lda, lda, b, ldb, k, c + r);
  switch (rows - r) {
    case 1: rows_block<PAIRS, 1>(a + r * lda, lda, b, ldb, k, c + r); break;
    case 2: rows_block<PAIRS, 2>(a + r * lda, lda, b, ldb, k, c + r); break;
    case 3: rows_block<PAIRS, 3>(a + r * lda, lda, b, ldb, k, c + r); break;
    case 4: rows_block<PAIRS, 4>(a + r * lda, lda, b, ldb, k, c + r); break;
    case 5: rows_block<PAIRS, 5>(a + r * lda, lda, b, ldb, k, c + r); break;
    case 6: rows_block<PAIRS, 6>(a + r * lda, lda, b, ldb, k, c + r); break;
    case 7: rows_block<PAIRS, 7>(a + r * lda, lda, b, ldb, k, c + r); break;
    default: break;
  }
}

#if HR_AVX512 && defined(__AVX512BF16__)
#define HR_BF16_DOTS 1
constexpr int kWideCols = 4, kBlockRows = 6;  // panels and rows whose sums fill the registers

// Products of up to 6 rows with up to 4 panels of pairs, a step at a time, for functions with R rows and P panels. Rows lie
// `l` bytes apart, from row0 and row3 on; each pair of a row is loaded once for all panels, by instructions of which the
// compiler does not know what they read. The sums have names, for GCC keeps an array of them in memory around the loop.
#define HR_SUMS(M)                                                                                 \
  M(0, 0) M(0, 1) M(0, 2) M(0, 3) M(1, 0) M(1, 1) M(1, 2) M(1, 3) M(2, 0) M(2, 1) M(2, 2) M(2, 3) \
  M(3, 0) M(3, 1) M(3, 2) M(3, 3) M(4, 0) M(4, 1) M(4, 2) M(4, 3) M(5, 0) M(5, 1) M(5, 2) M(5, 3)
#define HR_SUM_ZERO(r, j) __m512 c##r##j = _mm512_setzero_ps();
#define HR_SUM_LOAD(r, j) __m512 c##r##j = R > r && P > j ? _mm512_loadu_ps(c + r * ldc + j * kCols) : _mm512_setzero_ps();
#define HR_SUM_STORE(r, j) \
  if constexpr (R > r && P > j) _mm512_storeu_ps(c + r * ldc + j * kCols, c##r##j);
#define HR_SUM_DOT(r, j) \
  if constexpr (P > j) c##r##j = _mm512_dpbf16_ps(c##r##j, w##j, x);
#define HR_SUM_ROW(r, place, row)                                       \
  if constexpr (R > r) {                                            \
    __m512bh x;                                                     \
    asm("vpbroadcastd " place ", %0" : "=v"(x) : "r"(row), "r"(l)); \
    HR_SUM_DOT(r, 0) HR_SUM_DOT(r, 1) HR_SUM_DOT(r, 2) HR_SUM_DOT(r, 3)             \
  }
#define HR_SUM_STEP(b0, b1, b2, b3)                                                                                        \
  const __m512bh w0 = (__m512bh)_mm512_loadu_si512(b0), w1 = P > 1 ? (__m512bh)_mm512_loadu_si512(b1) : w0;            \
  const __m512bh w2 = P > 2 ? (__m512bh)_mm512_loadu_si512(b2) : w0, w3 = P > 3 ? (__m512bh)_mm512_loadu_si512(b3) : w0; \
  HR_SUM_ROW(0, "(%1)", row0)                                                                                              \
  HR_SUM_ROW(1, "(%1,%2)", row0)                                                                                           \
  HR_SUM_ROW(2, "(%1,%2,2)", row0)                                                                                         \
  HR_SUM_ROW(3, "(%1)", row3)                                                                                              \
  HR_SUM_ROW(4, "(%1,%2)", row3)                                                                                           \
  HR_SUM_ROW(5, "(%1,%2,2)", row3)                                                                                         \
  row0 += 4, row3 += 4;

// C[R][16 P] (`ldc` floats a row) = or += A[R, 0..k) * B for P panels that lie `panel` bytes apart. With each pair, AHEAD lines
// from `next` on are fetched.
template <int R, int P, int AHEAD>
inline void block_pairs(const bf16* a, int64_t lda, const uint8_t* b, int64_t ldb, int64_t panel, int64_t k, float* c,
                        int64_t ldc, bool accumulate, const uint8_t* next) {
  HR_SUMS(HR_SUM_ZERO)
#define HR_SUM_AGAIN(r, j) \
  if constexpr (R > r && P > j) c##r##j = _mm512_loadu_ps(c + r * ldc + j * kCols);
  if (accumulate) {
    HR_SUMS(HR_SUM_AGAIN)
  }
#undef HR_SUM_AGAIN
  asm volatile("" : "+r"(a) : : "memory");  // see rows_pairs
  const int64_t l = 2 * lda;
  const char *row0 = reinterpret_cast<const char*>(a), *row3 = row0 + 3 * l;
  for (int64_t pairs = k / 2; pairs > 0; --pairs, b += ldb) {
    for (int i = 0; i < AHEAD; ++i, next += 64) _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
    HR_SUM_STEP(b, b + panel, b + 2 * panel, b + 3 * panel)
  }
  asm volatile("" : "+v"(c00) : : "memory");
  HR_SUMS(HR_SUM_STORE)
}

template <int P, int AHEAD = 0>
inline void mm_block(const bf16* a, int64_t lda, int rows, const uint8_t* b, int64_t ldb, int64_t panel, int64_t k,
                     float* c, int64_t ldc, bool accumulate, const uint8_t* next = nullptr) {
  for (; rows >= kBlockRows; rows -= kBlockRows, a += kBlockRows * lda, c += kBlockRows * ldc)
    block_pairs<kBlockRows, P, AHEAD>(a, lda, b, ldb, panel, k, c, ldc, accumulate, next);
  switch (rows) {
    case 1: return block_pairs<1, P, AHEAD>(a, lda, b, ldb, panel, k, c, ldc, accumulate, next);
    case 2: return block_pairs<2, P, AHEAD>(a, lda, b, ldb, panel, k, c, ldc, accumulate, next);
    case 3: return block_pairs<3, P, AHEAD>(a, lda, b, ldb, panel, k, c, ldc, accumulate, next);
    case 4: return block_pairs<4, P, AHEAD>(a, lda, b, ldb, panel, k, c, ldc, accumulate, next);
    case 5: return block_pairs<5, P, AHEAD>(a, lda, b, ldb, panel, k, c, ldc, accumulate, next);
    default: return;
  }
}
#endif

}  // namespace hr
