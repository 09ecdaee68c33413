// y = x w^T + bias for fp16 weights. Panels hold them as they are stored, [k][16] fp16: half the memory traffic of float
// panels. They are widened in registers (VCVTPH2PS), which is exact, and multiplied with float rows of x: no CPU that
// the project runs on has fp16 dot products with float sums.
#pragma once
#include <type_traits>

#include "linear.h"

namespace hr {

// Numbers of one dtype as those of another.
template <class S, class C>
inline void widen(const S* in, C* out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(in + i));
  if constexpr (!std::is_same_v<S, int8_t>)
    for (; i < n; ++i) from_float(to_float(in[i]), out + i);
}

// n numbers of a runtime dtype, from the at-th on, as those of C.
template <class C>
inline void fetch(int dtype, const void* base, int64_t at, C* out, int64_t n) {
  if (dtype == HR_F32) widen(static_cast<const float*>(base) + at, out, n);
  else if (dtype == HR_BF16) widen(static_cast<const bf16*>(base) + at, out, n);
  else widen(static_cast<const fp16*>(base) + at, out, n);
}

// The reverse.
template <class C>
inline void deliver(int dtype, const C* in, void* base, int64_t at, int64_t n) {
  if (dtype == HR_F32) widen(in, static_cast<float*>(base) + at, n);
  else if (dtype == HR_BF16) widen(in, static_cast<bf16*>(base) + at, n);
  else widen(in, static_cast<fp16*>(base) + at, n);
}

template <int R>
inline void half_block(const float* a, int64_t lda, const fp16* b, int64_t k, float (*c)[kCols]) {
  constexpr int H = kCols / W;
  vf acc[R][H];
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h) acc[r][h] = zero();
  for (int64_t i = 0; i < k; ++i)
    for (int h = 0; h < H; ++h) {
      const vf w = load(b + i * kCols + h * W);
      for (int r = 0; r < R; ++r) acc[r][h] = fma(set1(a[r * lda + i]), w, acc[r][h]);
    }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h) store(c[r] + h * W, acc[r][h]);
}

// c[rows][16] = A * B for 1 to 8 rows.
inline void half_rows(const float* a, int64_t lda, const uint8_t* panel, int64_t k, float (*c)[kCols], int rows) {
  const fp16* b = reinterpret_cast<const fp16*>(panel);
  switch (rows) {
    case 1: return half_block<1>(a, lda, b, k, c);
    case 2: return half_block<2>(a, lda, b, k, c);
    case 3: return half_block<3>(a, lda, b, k, c);
    case 4: return half_block<4>(a, lda, b, k, c);
    case 5: return half_block<5>(a, lda, b, k, c);
    case 6: return half_block<6>(a, lda, b, k, c);
    case 7: return half_block<7>(a, lda, b, k, c);
    default: return half_block<8>(a, lda, b, k, c);
  }
}

inline void run_linear_half(const void* p, int chunk, int chunks, Scratch& scratch) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  const int64_t bytes = panel_bytes(a.format, a.k), all = panels(a.n);
  float* x = reinterpret_cast<float*>(scratch.need(size_t(8 * a.k) * 4));
  float c[8][kCols];
  for (int r = 0; r < a.rows; r += 8) {
    const int n = a.rows - r < 8 ? a.rows - r : 8;
    for (int i = 0; i < n; ++i) fetch(a.x_dtype, a.x, (r + i) * a.x_stride, x + i * a.k, a.k);
    for (int64_t panel = all * chunk / chunks; panel < all * (chunk + 1) / chunks; ++panel) {
      half_rows(x, a.k, static_cast<const uint8_t*>(a.packed) + panel * bytes, a.k, c, n);
      for (int i = 0; i < n; ++i) write_row(a, c[i], r + i, panel);
    }
  }
}

inline int plan_linear_half(const hr_linear& a, int threads, Step* out) {
  if (a.rows <= 0) return 0;
  out[0] = {run_linear_half, &a, clamp_chunks(std::min<int64_t>(panels(a.n), threads == 1 ? 1 : threads * 6))};
  return 1;
}

}  // namespace hr
