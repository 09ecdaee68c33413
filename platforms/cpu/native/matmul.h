// Products with weights that lie in panels of 16 columns. bf16 pairs: B[k / 2][16][2]; float: B[k][16].
// `ldb` is the distance of two rows of B in bytes, so the same kernels serve weights (64) and the KV cache.
#pragma once
#include "quant.h"
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HR_AMX 1
#endif

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

// C[R][16 P] (`ldc` floats a row) = or += A[R, 0..k) * B for P panels that lie `panel` bytes apart: each pair of A is
// loaded once for all of them.
template <int R, int P>
inline void block_pairs(const bf16* a, int64_t lda, const uint8_t* b, int64_t ldb, int64_t panel, int64_t k, float* c,
                        int64_t ldc, bool accumulate) {
  __m512 acc[R][P];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < P; ++j)
      acc[r][j] = accumulate ? _mm512_loadu_ps(c + r * ldc + j * kCols) : _mm512_setzero_ps();
  asm volatile("" : "+r"(a) : : "memory");  // see rows_pairs
  const int64_t l = 2 * lda;
  const char *row0 = reinterpret_cast<const char*>(a), *row3 = row0 + 3 * l;
#define HR_ROW(r, place, row)                                       \
  if constexpr (R > r) {                                            \
    __m512bh x;                                                     \
    asm("vpbroadcastd " place ", %0" : "=v"(x) : "r"(row), "r"(l)); \
    for (int j = 0; j < P; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], w[j], x); \
  }
  for (int64_t pairs = k / 2; pairs > 0; --pairs) {
    __m512bh w[P];
    for (int j = 0; j < P; ++j) w[j] = (__m512bh)_mm512_loadu_si512(b + j * panel);
    HR_ROW(0, "(%1)", row0)
    HR_ROW(1, "(%1,%2)", row0)
    HR_ROW(2, "(%1,%2,2)", row0)
    HR_ROW(3, "(%1)", row3)
    HR_ROW(4, "(%1,%2)", row3)
    HR_ROW(5, "(%1,%2,2)", row3)
    b += ldb;
    row0 += 4, row3 += 4;
  }
#undef HR_ROW
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < P; ++j) {
      asm volatile("" : "+v"(acc[r][j]) : : "memory");
      _mm512_storeu_ps(c + r * ldc + j * kCols, acc[r][j]);
    }
}

template <int P>
inline void mm_block(const bf16* a, int64_t lda, int rows, const uint8_t* b, int64_t ldb, int64_t panel, int64_t k,
                     float* c, int64_t ldc, bool accumulate) {
  for (; rows >= kBlockRows; rows -= kBlockRows, a += kBlockRows * lda, c += kBlockRows * ldc)
    block_pairs<kBlockRows, P>(a, lda, b, ldb, panel, k, c, ldc, accumulate);
  switch (rows) {
    case 1: return block_pairs<1, P>(a, lda, b, ldb, panel, k, c, ldc, accumulate);
    case 2: return block_pairs<2, P>(a, lda, b, ldb, panel, k, c, ldc, accumulate);
    case 3: return block_pairs<3, P>(a, lda, b, ldb, panel, k, c, ldc, accumulate);
    case 4: return block_pairs<4, P>(a, lda, b, ldb, panel, k, c, ldc, accumulate);
    case 5: return block_pairs<5, P>(a, lda, b, ldb, panel, k, c, ldc, accumulate);
    default: return;
  }
}
#endif

#if HR_AMX
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// Tiles are set up for the length of a chunk: PyTorch's own library uses them on the same thread, in another shape.
struct Tiles {
  Tiles() {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.colsb[i] = 64, config.rows[i] = 16;
    // GCC's tile intrinsics do not say that they read and write memory: without this the stores above may go
    asm volatile("" ::: "memory");
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// C[32][32] (tiles of 16 x 16, `ldc` floats a row) = or += A[32, k] * B[k, 32]; k a multiple of 32.
// A has 32 readable rows; B's second panel lies `panel` bytes after the first. ROWS and COLS: tiles of 16.
template <int ROWS, int COLS>
inline void mm_tiles(const bf16* a, int64_t lda, const uint8_t* b, int64_t ldb, int64_t panel, int64_t k, float* c,
                     int64_t ldc, bool accumulate) {
  const size_t cs = size_t(ldc) * 4, as = size_t(lda) * 2;
  asm volatile("" ::: "memory");
  if (accumulate) {
    _tile_loadd(0, c, cs);
    if constexpr (COLS > 1) _tile_loadd(1, c + 16, cs);
    if constexpr (ROWS > 1) _tile_loadd(2, c + 16 * ldc, cs);
    if constexpr (ROWS > 1 && COLS > 1) _tile_loadd(3, c + 16 * ldc + 16, cs);
  } else {
    _tile_zero(0);
    if constexpr (COLS > 1) _tile_zero(1);
    if constexpr (ROWS > 1) _tile_zero(2);
    if constexpr (ROWS > 1 && COLS > 1) _tile_zero(3);
  }
  for (int64_t i = 0; i < k; i += 32) {
    const uint8_t* bi = b + i / 2 * ldb;
    _tile_loadd(4, a + i, as);
    _tile_loadd(6, bi, size_t(ldb));
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (COLS > 1) {
      _tile_loadd(7, bi + panel, size_t(ldb));
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (ROWS > 1) {
      _tile_loadd(5, a + 16 * lda + i, as);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (COLS > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, cs);
  if constexpr (COLS > 1) _tile_stored(1, c + 16, cs);
  if constexpr (ROWS > 1) _tile_stored(2, c + 16 * ldc, cs);
  if constexpr (ROWS > 1 && COLS > 1) _tile_stored(3, c + 16 * ldc + 16, cs);
  asm volatile("" ::: "memory");
}

#endif

#if HR_AMX
// One panel's integers as bf16 pairs [k / 2][16][2]: what the tile unit multiplies.
template <int BITS, int GROUP, bool MIN>
void dequant_panel(const uint8_t* panel, const PanelShape& shape, int zero_point, uint8_t* out) {
  const uint8_t* data = panel + shape.data_at;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + shape.scales_at);
  const uint16_t* mins = reinterpret_cast<const uint16_t*>(panel + shape.mins_at);
  const __m512 columns = _mm512_loadu_ps(panel);
  const __m512i nibble = _mm512_set1_epi8(15), low = _mm512_set1_epi32(255);
  const __m512 counting = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  uint16_t order[32];  // 0, 16, 1, 17, ...: columns of the even inputs between those of the odd ones
  for (int i = 0; i < 32; ++i) order[i] = uint16_t(i / 2 + i % 2 * 16);
  const __m512i zip = _mm512_loadu_si512(order);
  constexpr int kGroups = 32 / GROUP, kSteps = 8 / kGroups;
  for (int64_t b = 0; b < shape.blocks; ++b, data += shape.block_bytes) {
    const uint64_t* planes = reinterpret_cast<const uint64_t*>(data + 256);
    for (int g = 0; g < kGroups; ++g) {
      const int64_t at = (b * kGroups + g) * kCols;
      const __m512 d = _mm512_mul_ps(columns, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(scales + at))));
      __m512 m;
      if constexpr (MIN) {
        m = _mm512_mul_ps(columns, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(mins + at))));
      } else {
        m = _mm512_mul_ps(d, _mm512_set1_ps(float(-zero_point)));
      }
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        const int step = g * kSteps + s;
        __m512i w;
        if constexpr (BITS == 8) {
          w = _mm512_loadu_si512(data + step * 64);
        } else {
          w = _mm512_loadu_si512(data + (step & 3) * 64);
          if constexpr (BITS >= 5) {
            w = _mm512_and_si512(step < 4 ? w : _mm512_srli_epi16(w, 4), nibble);
            w = _mm512_mask_add_epi8(w, planes[step], w, _mm512_set1_epi8(16));
            if constexpr (BITS >= 6) w = _mm512_mask_add_epi8(w, planes[8 + step], w, _mm512_set1_epi8(32));
          }
        }
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
          __m512 even, odd;
          if constexpr (BITS == 4) {  // the permutation looks at four bits of its index: mask and conversion in one
            const int shift = 16 * p + (step < 4 ? 0 : 4);
            even = _mm512_permutexvar_ps(_mm512_srli_epi32(w, shift), counting);
            odd = _mm512_permutexvar_ps(_mm512_srli_epi32(w, shift + 8), counting);
          } else {
            even = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(w, 16 * p), low));
            odd = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(w, 16 * p + 8), low));
          }
          const __m512i both =
              (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(odd, d, m), _mm512_fmadd_ps(even, d, m));
          _mm512_storeu_si512(out + ((b * 32 + step * 4 + 2 * p) / 2) * 64, _mm512_permutexvar_epi16(zip, both));
        }
      }
    }
  }
}

inline void dequant_panel(const QuantType& t, const uint8_t* panel, const PanelShape& shape, uint8_t* out) {
  if (t.bits == 4 && t.group == 16)
    return t.has_min ? dequant_panel<4, 16, true>(panel, shape, t.zero, out)
                     : dequant_panel<4, 16, false>(panel, shape, t.zero, out);
  if (t.bits == 4)
    return t.has_min ? dequant_panel<4, 32, true>(panel, shape, t.zero, out)
                     : dequant_panel<4, 32, false>(panel, shape, t.zero, out);
  if (t.bits == 5)
    return t.has_min ? dequant_panel<5, 32, true>(panel, shape, t.zero, out)
                     : dequant_panel<5, 32, false>(panel, shape, t.zero, out);
  if (t.bits == 6) return dequant_panel<6, 16, false>(panel, shape, t.zero, out);
  return dequant_panel<8, 32, false>(panel, shape, t.zero, out);
}
#endif

}  // namespace hr
