// The tile unit (AMX): products of 16 x 16 numbers, 32 inputs at a time, out of memory that lies as it reads it.
//
// A tile is 16 rows of 64 bytes. Tiles of x are packed one behind the other, so that loading one reads 1 KB in a row: 16
// rows that lie 4,096 bytes apart share one set of the first cache, which has fewer places. Weights lie in tiles as they
// are (matmul.h). Four sums are kept at a time, so that each tile that was loaded serves two products, which is what the
// second cache can keep up with.
#pragma once
#include "matmul.h"

#if HR_AMX

namespace hr {

constexpr int kTile = 16;  // rows, and columns of the result
constexpr int64_t kTileBytes = 1024;
// What stays near: of two panels so many inputs in the first cache, for all rows of a block; of the block as many times
// so many inputs in the second, for all panels of a chunk. From the third, each of 16 busy cores of an Emerald Rapids gets
// a few GB/s: x that is read from there again for every second pair of panels held the unit to a seventh of its peak.
constexpr int64_t kDepth = 512, kDepths = 4, kRowBlock = 256;
constexpr int64_t kTilePairs = 8;  // pairs of panels whose sums wait in the second cache, at most
constexpr int64_t kOwnPack = 32;   // rows up to which every thread packs x for itself: cheaper than one more step

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

// Where tiles lie, in bytes: from one row of a tile to the next, from one of two tiles to the other, from 32 inputs to the
// next 32.
struct TileInput {
  const uint8_t* at;
  int64_t row, tile, step;
};
struct TileOutput {
  uint8_t* at;
  int64_t row, down, right;
};

// What a thread does while the tile unit multiplies, a share of it in each of `steps` steps: lines of two panels that are
// wanted soon are fetched, so that no load waits behind many, and blocks of 32 inputs of the next two are expanded.
struct Meanwhile {
  const uint8_t *at[2] = {}, *end[2] = {};
  const struct Expand* blocks = nullptr;
  int64_t steps = 1, lines = 0, due = 0, done = 0;  // lines: of a panel, in each step; due: blocks * steps
  inline void step();
  inline void finish();
};

// C = or += A * B for ROWS x COLS tiles and 32 * steps inputs.
template <int ROWS, int COLS>
inline void mm_tiles(const TileInput& a, const TileInput& b, int64_t steps, const TileOutput& c, bool accumulate,
                     Meanwhile& meanwhile) {
  uint8_t *c0 = c.at, *c1 = c0 + c.right, *c2 = c0 + c.down, *c3 = c2 + c.right;
  const size_t ar = size_t(a.row), br = size_t(b.row), cr = size_t(c.row);
  asm volatile("" ::: "memory");
  if (accumulate) {
    _tile_loadd(0, c0, cr);
    if constexpr (COLS > 1) _tile_loadd(1, c1, cr);
    if constexpr (ROWS > 1) _tile_loadd(2, c2, cr);
    if constexpr (ROWS > 1 && COLS > 1) _tile_loadd(3, c3, cr);
  } else {
    _tile_zero(0);
    if constexpr (COLS > 1) _tile_zero(1);
    if constexpr (ROWS > 1) _tile_zero(2);
    if constexpr (ROWS > 1 && COLS > 1) _tile_zero(3);
  }
  const uint8_t *a0 = a.at, *b0 = b.at;
  for (int64_t i = 0; i < steps; ++i, a0 += a.step, b0 += b.step) {
    const uint8_t *a1 = a0 + a.tile, *b1 = b0 + b.tile;
    _tile_loadd(6, b0, br);
    _tile_loadd(4, a0, ar);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (COLS > 1) {
      _tile_loadd(7, b1, br);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (ROWS > 1) {
      _tile_loadd(5, a1, ar);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (COLS > 1) _tile_dpbf16ps(3, 5, 7);
    }
    meanwhile.step();
  }
  _tile_stored(0, c0, cr);
  if constexpr (COLS > 1) _tile_stored(1, c1, cr);
  if constexpr (ROWS > 1) _tile_stored(2, c2, cr);
  if constexpr (ROWS > 1 && COLS > 1) _tile_stored(3, c3, cr);
  asm volatile("" ::: "memory");
}

// The same for 1 to 32 rows, and columns of one tile or two.
inline void mm_tiles(int64_t rows, int cols, const TileInput& a, const TileInput& b, int64_t steps, const TileOutput& c,
                     bool accumulate, Meanwhile& meanwhile) {
  if (rows > kTile) {
    if (cols > 1) mm_tiles<2, 2>(a, b, steps, c, accumulate, meanwhile);
    else mm_tiles<2, 1>(a, b, steps, c, accumulate, meanwhile);
  } else {
    if (cols > 1) mm_tiles<1, 2>(a, b, steps, c, accumulate, meanwhile);
    else mm_tiles<1, 1>(a, b, steps, c, accumulate, meanwhile);
  }
}

// x in tiles. Blocks of rows lie one behind the other, of equal size, a multiple of 32 and at most kRowBlock; in a block
// kDepth inputs of all rows, then the next; in those, pairs of tiles of 16 rows (the last may be one tile), 32 inputs of
// both, then the next.
struct PackedTiles {
  int64_t rows, k, blocks, block_rows;
  PackedTiles(int64_t rows, int64_t k)
      : rows(rows), k(k), blocks((rows + kRowBlock - 1) / kRowBlock),
        block_rows(((rows + blocks - 1) / blocks + 2 * kTile - 1) / (2 * kTile) * (2 * kTile)) {}
  static int64_t padded(int64_t rows) { return (rows + kTile - 1) / kTile * kTile; }
  static int64_t bytes(int64_t rows, int64_t k) { return padded(rows) * k * 2; }
  int64_t pairs() const { return (rows + 2 * kTile - 1) / (2 * kTile); }
  int64_t depths() const { return (k + kDepth - 1) / kDepth; }
  int64_t depth(int64_t i) const { return k - i * kDepth < kDepth ? k - i * kDepth : kDepth; }
  int64_t rows_from(int64_t row, int64_t most) const { return rows - row < most ? rows - row : most; }
  int64_t count(int64_t pair) const { return padded(rows_from(pair * 2 * kTile, 2 * kTile)); }  // rows, with padding
  int64_t at(int64_t pair, int64_t i) const {  // where the i-th depth of a pair lies
    const int64_t row = pair * 2 * kTile, block = row / block_rows * block_rows;
    return 2 * (block * k + padded(rows_from(block, block_rows)) * i * kDepth + (row - block) * depth(i));
  }
  void pack(const bf16* x, int64_t stride, int64_t pair, int64_t i, uint8_t* out) const {
    const int64_t tiles = count(pair) / kTile, steps = depth(i) / 32, first = pair * 2 * kTile;
    out += at(pair, i);
    for (int64_t r = 0; r < tiles * kTile; ++r) {
      uint8_t* to = out + r / kTile * kTileBytes + r % kTile * 64;
      const bf16* from = x + (first + r) * stride + i * kDepth;
      for (int64_t s = 0; s < steps; ++s, to += tiles * kTileBytes)
        _mm512_store_si512(to, first + r < rows ? _mm512_loadu_si512(from + s * 32) : _mm512_setzero_si512());
    }
  }
};

// 0, 16, 1, 17, ...: columns of the even inputs between those of the odd ones
alignas(64) constexpr uint16_t kZip[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Blocks [first, last) of one panel's integers as bf16 pairs [k / 2][16][2]: what the tile unit multiplies. Its int8
// products take half as long, but sums of 32 inputs would leave the tiles before their scales can be applied: 16 stores,
// and for each of 16 rows a conversion and a product, which is several times what bf16 takes longer.
template <int BITS, int GROUP, bool MIN>
void dequant_panel(const uint8_t* panel, const PanelShape& shape, int zero_point, int64_t first, int64_t last,
                   uint8_t* out) {
  const uint8_t* data = panel + shape.data_at + first * shape.block_bytes;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + shape.scales_at);
  const uint16_t* mins = reinterpret_cast<const uint16_t*>(panel + shape.mins_at);
  const __m512 columns = _mm512_loadu_ps(panel);
  const __m512i nibble = _mm512_set1_epi8(15), low = _mm512_set1_epi32(255);
  const __m512 counting = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i zip = _mm512_load_si512(kZip);
  constexpr int kGroups = 32 / GROUP, kSteps = 8 / kGroups;
  for (int64_t b = first; b < last; ++b, data += shape.block_bytes) {
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
          _mm512_storeu_si512(out + (((b - first) * 32 + step * 4 + 2 * p) / 2) * 64, _mm512_permutexvar_epi16(zip, both));
        }
      }
    }
  }
}

inline void dequant_panel(const QuantType& t, const uint8_t* panel, const PanelShape& shape, int64_t first, int64_t last,
                          uint8_t* out) {
  if (t.bits == 4 && t.group == 16)
    return t.has_min ? dequant_panel<4, 16, true>(panel, shape, t.zero, first, last, out)
                     : dequant_panel<4, 16, false>(panel, shape, t.zero, first, last, out);
  if (t.bits == 4)
    return t.has_min ? dequant_panel<4, 32, true>(panel, shape, t.zero, first, last, out)
                     : dequant_panel<4, 32, false>(panel, shape, t.zero, first, last, out);
  if (t.bits == 5)
    return t.has_min ? dequant_panel<5, 32, true>(panel, shape, t.zero, first, last, out)
                     : dequant_panel<5, 32, false>(panel, shape, t.zero, first, last, out);
  if (t.bits == 6) return dequant_panel<6, 16, false>(panel, shape, t.zero, first, last, out);
  return dequant_panel<8, 32, false>(panel, shape, t.zero, first, last, out);
}

// Blocks of 32 inputs of two panels, from the first-th on `count` of each, that are to become bf16 pairs at `out`.
struct Expand {
  const QuantType* t;
  const PanelShape* shape;
  const uint8_t* panel[2];
  int64_t first, count, all;
  uint8_t* out[2];
  void one(int64_t i) const {
    const int64_t j = i / count, b = i % count;
    dequant_panel(*t, panel[j], *shape, first + b, first + b + 1, out[j] + b * kTileBytes);
  }
};

inline void Meanwhile::step() {
  for (int i = 0; i < 2; ++i)
    for (int64_t n = 0; n < lines && at[i] < end[i]; ++n, at[i] += 64)
      _mm_prefetch(reinterpret_cast<const char*>(at[i]), _MM_HINT_T1);
  if (!blocks) return;
  for (due += blocks->all; due >= steps && done < blocks->all; due -= steps) blocks->one(done++);
}

inline void Meanwhile::finish() {
  for (; blocks && done < blocks->all; ++done) blocks->one(done);
}

}  // namespace hr
#endif
