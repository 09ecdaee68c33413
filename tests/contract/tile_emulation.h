// The tile unit (AMX) in plain C++, for tests on CPUs that have none: forced into a build with -include.
//
// As Intel's manual describes each instruction (tile configuration of palette 1: eight tiles of up to 16 rows of 64 bytes).
// What the hardware would answer with a fault ends the program.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define HR_TILE_EMULATION 1

namespace tile_emulation {

struct Registers {
  bool configured = false;
  uint8_t rows[8], data[8][16][64];
  uint16_t colsb[8];
};
inline thread_local Registers registers;

inline void must(bool ok, const char* what) {
  if (!ok) std::fprintf(stderr, "tile emulation: %s\n", what), std::abort();
}

inline Registers& configured(int tile) {
  must(registers.configured, "a tile is used that was not configured");
  must(tile >= 0 && tile < 8 && registers.rows[tile] && registers.colsb[tile], "a tile of no size is used");
  return registers;
}

inline void load_config(const void* memory) {
  uint8_t config[64];
  std::memcpy(config, memory, 64);
  must(config[0] == 1 && config[1] == 0, "palette 1 from row 0 on is all that is emulated");
  for (int i = 2; i < 16; ++i) must(config[i] == 0, "reserved bytes of the configuration are not zero");
  for (int i = 0; i < 8; ++i) {
    std::memcpy(&registers.colsb[i], config + 16 + 2 * i, 2);
    registers.rows[i] = config[48 + i];
    must(registers.rows[i] <= 16 && registers.colsb[i] <= 64, "a tile is larger than the unit's");
  }
  std::memset(registers.data, 0, sizeof registers.data);
  registers.configured = true;
}

inline void release() { registers.configured = false; }

inline void zero(int tile) { std::memset(configured(tile).data[tile], 0, sizeof registers.data[tile]); }

inline void load(int tile, const void* base, size_t stride) {
  Registers& r = configured(tile);
  zero(tile);
  for (int i = 0; i < r.rows[tile]; ++i)
    std::memcpy(r.data[tile][i], static_cast<const uint8_t*>(base) + size_t(i) * stride, r.colsb[tile]);
}

inline void store(int tile, void* base, size_t stride) {
  const Registers& r = configured(tile);
  for (int i = 0; i < r.rows[tile]; ++i)
    std::memcpy(static_cast<uint8_t*>(base) + size_t(i) * stride, r.data[tile][i], r.colsb[tile]);
}

// Denormals are zeros, before and after each operation.
inline float flushed(float v) { return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0f, v) : v; }

inline float widened(const uint8_t* bf16) {
  uint16_t half;
  std::memcpy(&half, bf16, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float v;
  std::memcpy(&v, &bits, 4);
  return flushed(v);
}

// C[m][n] += (sum over k of the even inputs' products) + (of the odd ones'), each a chain of fused multiply-adds.
inline void dpbf16ps(int c, int a, int b) {
  Registers& r = configured(c);
  configured(a), configured(b);
  must(c != a && c != b && a != b, "a product names a tile twice");
  must(r.rows[c] == r.rows[a] && r.colsb[c] == r.colsb[b] && r.colsb[a] == 4 * r.rows[b], "sizes of a product do not fit");
  const int columns = r.colsb[c] / 4;
  for (int m = 0; m < r.rows[c]; ++m) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < r.colsb[a] / 4; ++k) {
      const float x = widened(r.data[a][m] + 4 * k), y = widened(r.data[a][m] + 4 * k + 2);
      for (int n = 0; n < columns; ++n) {
        even[n] = flushed(std::fma(x, widened(r.data[b][k] + 4 * n), even[n]));
        odd[n] = flushed(std::fma(y, widened(r.data[b][k] + 4 * n + 2), odd[n]));
      }
    }
    for (int n = 0; n < columns; ++n) {
      float sum;
      std::memcpy(&sum, r.data[c][m] + 4 * n, 4);
      sum = flushed(flushed(sum) + flushed(even[n] + odd[n]));
      std::memcpy(r.data[c][m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace tile_emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(memory) tile_emulation::load_config(memory)
#define _tile_release() tile_emulation::release()
#define _tile_zero(tile) tile_emulation::zero(tile)
#define _tile_loadd(tile, base, stride) tile_emulation::load(tile, base, stride)
#define _tile_stored(tile, base, stride) tile_emulation::store(tile, base, stride)
#define _tile_dpbf16ps(c, a, b) tile_emulation::dpbf16ps(c, a, b)
