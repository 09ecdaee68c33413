// Vectors of float for one instruction set: W lanes, loads and stores that convert bf16 and fp16.
// AVX-512 is written by hand; everything else goes through the compiler's own vector extension, which
// becomes AVX2, NEON or plain code as the file is compiled.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#define HR_AVX512 1
#elif defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if (defined(__AMX_TILE__) && defined(__AMX_BF16__)) || HR_TILE_EMULATION
#define HR_AMX 1
#endif

namespace hr {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline float to_float(float v) { return v; }
inline float to_float(bf16 v) {
  uint32_t u = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline float to_float(fp16 v) {
#if defined(__F16C__) || defined(HR_AVX512)
  return _cvtsh_ss(v.bits);
#elif defined(__aarch64__)
  __fp16 h;
  std::memcpy(&h, &v.bits, 2);
  return float(h);
#else
  uint32_t sign = uint32_t(v.bits & 0x8000) << 16, exp = (v.bits >> 10) & 31, man = v.bits & 0x3ff, u;
  if (exp == 31) {
    u = sign | 0x7f800000 | (man << 13);
  } else if (exp) {
    u = sign | ((exp + 112) << 23) | (man << 13);
  } else {  // subnormal: man * 2^-24
    float f = float(man) * 5.9604644775390625e-8f;
    std::memcpy(&u, &f, 4);
    u |= sign;
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
#endif
}
inline void from_float(float v, float* out) { *out = v; }
inline void from_float(float v, bf16* out) {  // round to nearest even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &v, 4);
  if ((u & 0x7fffffff) > 0x7f800000) {
    out->bits = uint16_t((u >> 16) | 0x40);
    return;
  }
  out->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline void from_float(float v, fp16* out) {  // round to nearest even; what is too large becomes infinite
#if defined(__F16C__) || defined(HR_AVX512)
  out->bits = uint16_t(_cvtss_sh(v, 0));
#elif defined(__aarch64__)
  const __fp16 h = __fp16(v);
  std::memcpy(&out->bits, &h, 2);
#else
  uint32_t u;
  std::memcpy(&u, &v, 4);
  const uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) {
    out->bits = uint16_t(sign | 0x7e00);
  } else if (a < 0x38800000) {  // subnormal or zero: steps of 2^-24
    float size;
    std::memcpy(&size, &a, 4);
    out->bits = uint16_t(sign | uint32_t(std::lrint(size * 16777216.0f)));
  } else {
    const uint32_t r = a + 0xfff + (a >> 13 & 1);
    out->bits = uint16_t(sign | (r >= 0x47800000 ? 0x7c00 : (r - 0x38000000) >> 13));
  }
#endif
}

#if HR_AVX512
constexpr int W = 16;
using vf = __m512;
inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float v) { return _mm512_set1_ps(v); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline vf load(const bf16* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline vf load(const fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vf load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline void store(fp16* p, vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256i pack_bf16(vf v) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  __m512i u = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(r);
#endif
}
inline void store(bf16* p, vf v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_bf16(v)); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline float sum(vf v) { return _mm512_reduce_add_ps(v); }
inline float hmax(vf v) { return _mm512_reduce_max_ps(v); }
inline vf vabs(vf v) { return _mm512_abs_ps(v); }
inline vf round_even(vf v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf scale_pow2(vf v, vf n) { return _mm512_scalef_ps(v, n); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline uint32_t first_bits(int n) { return n <= 0 ? 0 : n >= W ? (1u << W) - 1 : (1u << n) - 1; }
inline bool any_equal(vf v, float x) { return _mm512_cmp_ps_mask(v, set1(x), _CMP_EQ_OQ) != 0; }
inline bool any_above(vf v, float limit) { return _mm512_cmp_ps_mask(v, set1(limit), _CMP_GT_OQ) != 0; }
// v where from <= lane < to, elsewhere `other`.
inline vf within(vf v, int from, int to, float other) {
  return _mm512_mask_blend_ps(__mmask16(first_bits(to) & ~first_bits(from)), set1(other), v);
}
#else
constexpr int W = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint16_t vh __attribute__((vector_size(16)));
typedef int8_t vb __attribute__((vector_size(8)));
typedef uint32_t vu __attribute__((vector_size(32)));
inline vf zero() { return vf{}; }
inline vf set1(float v) { return vf{} + v; }
inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vf load(const bf16* p) {
  vh h;
  std::memcpy(&h, p, sizeof h);
  vu u = __builtin_convertvector(h, vu) << 16;
  return (vf)u;
}
inline vf load(const fp16* p) {
#if defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}
inline vf load(const int8_t* p) {
  vb b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, vf);
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline void store(fp16* p, vf v) {
#if defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; ++i) from_float(v[i], p + i);
#endif
}
inline void store(bf16* p, vf v) {
  for (int i = 0; i < W; ++i) from_float(v[i], p + i);
}
inline vf fma(vf a, vf b, vf c) {
#if defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
inline vf add(vf a, vf b) { return a + b; }
inline vf sub(vf a, vf b) { return a - b; }
inline vf mul(vf a, vf b) { return a * b; }
inline vf div(vf a, vf b) { return a / b; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline float sum(vf v) {
  float s = 0;
  for (int i = 0; i < W; ++i) s += v[i];
  return s;
}
inline float hmax(vf v) {
  float m = v[0];
  for (int i = 1; i < W; ++i) m = m > v[i] ? m : v[i];
  return m;
}
inline vf vabs(vf v) { return vmax(v, -v); }
inline vf round_even(vf v) {  // adding 1.5 * 2^23 rounds |v| < 2^22 to nearest even
  vf magic = set1(12582912.0f);
  return (v + magic) - magic;
}
inline bool any_equal(vf v, float x) {
  const vi equal = v == x;
  int32_t any = 0;
  for (int i = 0; i < W; ++i) any |= equal[i];
  return any != 0;
}
inline bool any_above(vf v, float limit) {
  for (int i = 0; i < W; ++i)
    if (v[i] > limit) return true;
  return false;
}
inline vf within(vf v, int from, int to, float other) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (lane >= from) & (lane < to) ? v : set1(other);
}
inline vf scale_pow2(vf v, vf n) {
  vi e = (__builtin_convertvector(n, vi) + 127) << 23;
  return v * (vf)e;
}
#endif

// exp with a relative error below 2e-7 for inputs in the float range; below -87 gives about 0. NaN stays NaN.
inline vf vexp(vf x) {
  x = vmax(set1(-87.0f), vmin(set1(88.0f), x));  // of NaN and a number, both give their second operand
  vf n = round_even(mul(x, set1(1.44269504088896341f)));
  vf r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(mul(r, r), p, add(r, set1(1.0f)));
  return scale_pow2(p, n);
}
// 2^x for x up to 127; minus infinity gives zero, NaN stays NaN. Relative error below 1e-7, of ROUGH below 3e-6.
template <bool ROUGH>
inline vf vexp2(vf x) {
#if HR_AVX512
  const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  vf p = ROUGH ? set1(1.3534166850e-2f) : fma(set1(1.8775765784e-3f), r, set1(8.9893406257e-3f));
  p = fma(p, r, set1(ROUGH ? 5.2011460066e-2f : 5.5826317519e-2f));
  p = fma(p, r, set1(ROUGH ? 2.4144275486e-1f : 2.4015361071e-1f));
  p = fma(p, r, set1(ROUGH ? 6.9300383329e-1f : 6.9315308332e-1f));
  p = fma(p, r, set1(ROUGH ? 1.0000026226f : 0.99999994039f));
  return _mm512_scalef_ps(p, x);
#else
  return x < -126.0f ? zero() : vexp(mul(x, set1(0.69314718056f)));
#endif
}
inline vf vtanh(vf x) {  // (1 - e) / (1 + e) with e = exp(-2 |x|), sign restored
  vf a = vabs(x);
  vf e = vexp(mul(a, set1(-2.0f)));
  vf t = div(sub(set1(1.0f), e), add(set1(1.0f), e));
  float in[W], out[W];
  store(in, x);
  store(out, t);
  for (int i = 0; i < W; ++i) out[i] = std::copysign(out[i], in[i]);
  return load(out);
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hr
