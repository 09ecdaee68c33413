// y = x w^T + bias for float, bf16 and block-quantized panels; one row, few rows and many rows are separate paths.
#pragma once
#include <algorithm>

#include "abi.h"
#include "amx.h"
#include "matmul8.h"
#include "pool.h"

namespace hr {

constexpr int kOwnRows = kFineRows;  // up to here every thread quantizes x for itself: cheaper than one more step
constexpr int kFewRowsChunks = 6;  // chunks of few rows for each thread
constexpr int kFewThreads = 4;     // up to so many, a chunk is often followed by one of the same thread
// Rows from which the tile unit is faster than row kernels; quantized panels are made bf16 for it first, which is also
// the more exact way: steps that read prompts take it from kTileRows on, decode steps of many streams when it pays.
constexpr int kTileRows = 5, kTileRowsQuantized = 24;
// Without tiles, rows from which four bf16 panels are taken together; and up to where memory limits them.
constexpr int kWideRows = 16, kMemoryRows = 64;
// The same for two quantized panels, which are unpacked for it: the results are the same to the last bit.
constexpr int kWideRowsQuantized = 24;

#if HR_AMX
#define HR_TILES 1
#else
#define HR_TILES 0
#endif

inline int64_t panels(int64_t n) { return (n + kCols - 1) / kCols; }

inline int64_t panel_bytes(int format, int64_t k) {
  QuantType t{};
  if (quant_type(format, &t)) return PanelShape(t, k).bytes;
  return k * kCols * (format == HR_W_F32 ? 4 : 2);
}

inline float soft_capped(float v, float cap) { return cap * std::tanh(v / cap); }

template <class TY>
inline void write_row(const hr_linear& a, const float* c, int64_t row, int64_t panel) {
  TY* y = static_cast<TY*>(a.y) + row * a.y_stride + panel * kCols;
  const int64_t n = a.n - panel * kCols < kCols ? a.n - panel * kCols : kCols;
  if (n == kCols && !a.bias && a.softcap <= 0.0f) {
    for (int i = 0; i < kCols; i += W) store(y + i, load(c + i));
    return;
  }
  float v[kCols];
  for (int i = 0; i < kCols; ++i) v[i] = c[i];
  if (a.bias)
    for (int i = 0; i < n; ++i) v[i] += a.bias[panel * kCols + i];
  if (a.softcap > 0.0f)
    for (int i = 0; i < n; ++i) v[i] = soft_capped(v[i], a.softcap);
  if (n == kCols) {
    for (int i = 0; i < kCols; i += W) store(y + i, load(v + i));
  } else {
    for (int i = 0; i < n; ++i) from_float(v[i], y + i);
  }
}

inline void write_row(const hr_linear& a, const float* c, int64_t row, int64_t panel) {
  if (a.y_dtype == HR_F32) write_row<float>(a, c, row, panel);
  else if (a.y_dtype == HR_BF16) write_row<bf16>(a, c, row, panel);
  else write_row<fp16>(a, c, row, panel);
}

// Both terms of x. Few rows of a prompt are multiplied as many are, for what a prompt becomes must not depend on how much
// of it was cached; tiles are as exact as both terms.
inline bool is_fine(const hr_linear& a) { return a.rows <= kFineRows && (HR_TILES || !a.prompt); }

// Rows of x lie in the scratch memory in sets of as many as a kernel takes, few rows in one smaller set.
inline int set_rows(const hr_linear& a) { return is_fine(a) ? row_stride(a.rows) : kRows; }

inline int64_t linear_scratch(int format, int64_t rows, int64_t k) {
  QuantType t{};
  const bool quantized = quant_type(format, &t);
  const int64_t sets = (rows + kRows - 1) / kRows;
  int64_t bytes = quantized ? sets * QuantRows::bytes(k, kRows) : 0;  // more than ByteRows takes
#if HR_AMX
  if (quantized || format == HR_W_BF16) bytes = std::max(bytes, PackedTiles::bytes(rows, k));
#endif
  return bytes;
}

// Blocks [first, last) of 32 inputs of all rows in one set.
inline void quantize(const hr_linear& a, const QuantType& t, int set, int64_t first, int64_t last, void* out) {
  const bool fine = is_fine(a);
  const int stride = set_rows(a);
  const QuantRows rows(out, a.k, stride);
  for (int r = 0; r < stride && set * stride + r < a.rows; ++r) {
    const int64_t at = int64_t(set * stride + r) * a.x_stride;
    if (a.x_dtype == HR_F32)
      quantize_row(static_cast<const float*>(a.x) + at, first, last, t.group, t.zero, fine, rows, r, stride);
    else if (a.x_dtype == HR_F16)
      quantize_row(static_cast<const fp16*>(a.x) + at, first, last, t.group, t.zero, fine, rows, r, stride);
    else
      quantize_row(static_cast<const bf16*>(a.x) + at, first, last, t.group, t.zero, fine, rows, r, stride);
  }
}

// A chunk is a run of blocks, counted through all sets: two threads never write between each other's rows.
inline void run_quantize(const void* p, int chunk, int chunks, Scratch&) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  QuantType t{};
  quant_type(a.format, &t);
  const int stride = set_rows(a);
  const int64_t blocks = a.k / 32, sets = (a.rows + stride - 1) / stride;
  const int64_t end = sets * blocks * (chunk + 1) / chunks;
  for (int64_t at = sets * blocks * chunk / chunks; at < end;) {
    const int64_t set = at / blocks, first = at % blocks;
    const int64_t last = end - set * blocks < blocks ? end - set * blocks : blocks;
    quantize(a, t, int(set), first, last,
             static_cast<uint8_t*>(a.scratch) + set * QuantRows::bytes(a.k, stride));
    at += last - first;
  }
}

inline void run_linear_int8(const void* p, int chunk, int chunks, Scratch& scratch) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  QuantType t{};
  quant_type(a.format, &t);
  const PanelShape shape(t, a.k);
  const int stride = set_rows(a);
  const int64_t bytes = QuantRows::bytes(a.k, stride), all = panels(a.n);
  uint8_t* rows = static_cast<uint8_t*>(a.scratch);
  if (a.rows <= kOwnRows) {
    rows = scratch.need(size_t(bytes));
    if (scratch.tag != scratch.step) {
      quantize(a, t, 0, 0, a.k / 32, rows);
      scratch.tag = scratch.step;
    }
  }
  float c[kRows][kCols];
  const int64_t end = all * (chunk + 1) / chunks;
  for (int64_t panel = all * chunk / chunks; panel < end; ++panel) {
    const uint8_t* w = static_cast<const uint8_t*>(a.packed) + panel * shape.bytes;
    // behind a chunk lies another thread's, if there are many
    const uint8_t* next = panel + 1 < end || chunks <= kFewThreads * kFewRowsChunks ? w + shape.bytes : nullptr;
    for (int r = 0; r < a.rows; r += stride) {
      const int n = a.rows - r < stride ? a.rows - r : stride;
      const QuantRows x(rows + r / stride * bytes, a.k, stride);
      panel_fn(t, n, is_fine(a))(w, shape, x, r == 0 ? next : nullptr, c);
      for (int i = 0; i < n; ++i) write_row(a, c[i], r + i, panel);
    }
  }
}

template <bool PAIRS, class TX>
void run_linear_rows(const void* p, int chunk, int chunks, Scratch&) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  const int64_t bytes = panel_bytes(a.format, a.k), all = panels(a.n), ldb = kCols * 4;
  float c[8][kCols];
  for (int64_t panel = all * chunk / chunks; panel < all * (chunk + 1) / chunks; ++panel) {
    const uint8_t* w = static_cast<const uint8_t*>(a.packed) + panel * bytes;
    for (int r = 0; r < a.rows; r += 8) {
      const int n = a.rows - r < 8 ? a.rows - r : 8;
      std::memset(c, 0, sizeof c);
      mm_rows<PAIRS>(static_cast<const TX*>(a.x) + r * a.x_stride, a.x_stride, w, ldb, a.k, c, n);
      for (int i = 0; i < n; ++i) write_row(a, c[i], r + i, panel);
    }
  }
}

#if HR_BF16_DOTS
// Many rows, four panels of bf16 at a time.
inline void run_linear_wide(const void* p, int chunk, int chunks, Scratch&) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  const int64_t all = panels(a.n), sets = (all + kWideCols - 1) / kWideCols, bytes = panel_bytes(a.format, a.k);
  const bf16* x = static_cast<const bf16*>(a.x);
  const int64_t last = sets * (chunk + 1) / chunks;
  const bool plain = a.y_dtype == HR_BF16 && !a.bias && a.softcap <= 0.0f && a.n % kCols == 0;
  for (int64_t set = sets * chunk / chunks; set < last; ++set) {
    const int64_t first = set * kWideCols;
    const int cols = int(all - first < kWideCols ? all - first : kWideCols);
    const uint8_t* w = static_cast<const uint8_t*>(a.packed) + first * bytes;
    if (cols == kWideCols) {
      float c[kBlockRows][kWideCols * kCols];
      const int64_t blocks = (a.rows + kBlockRows - 1) / kBlockRows;
      const uint8_t* next = w + kWideCols * bytes;
      for (int64_t r = 0, block = 0; r < a.rows; r += kBlockRows, ++block) {
        const int n = int(std::min<int64_t>(a.rows - r, kBlockRows));
        // The next panels come meanwhile, some with each block of rows: not all at once, faster than memory delivers.
        const int64_t left = blocks - block;
        const int64_t lines = set + 1 < last ? kWideCols * left / blocks - kWideCols * (left - 1) / blocks : 0;
        const auto multiply = lines > 1 ? mm_block<kWideCols, 2> : lines > 0 ? mm_block<kWideCols, 1> : mm_block<kWideCols, 0>;
        multiply(x + r * a.x_stride, a.x_stride, n, w, kCols * 4, bytes, a.k, c[0], kWideCols * kCols, false, next);
        next += lines * a.k / 2 * 64;
        for (int i = 0; i < n; ++i) {
          bf16* y = static_cast<bf16*>(a.y) + (r + i) * a.y_stride + first * kCols;
          for (int j = 0; j < cols; ++j)
            if (plain) store(y + j * kCols, load(c[i] + j * kCols));
            else write_row(a, c[i] + j * kCols, r + i, first + j);
        }
      }
      continue;
    }
    float c[kRows][kCols];
    for (int j = 0; j < cols; ++j)
      for (int r = 0; r < a.rows; r += kRows) {
        const int n = a.rows - r < kRows ? a.rows - r : kRows;
        std::memset(c, 0, sizeof c);
        mm_rows<true>(x + r * a.x_stride, a.x_stride, w + j * bytes, kCols * 4, a.k, c, n);
        for (int i = 0; i < n; ++i) write_row(a, c[i], r + i, first + j);
      }
  }
}
#endif

#if HR_MATMUL8
inline void run_quantize_bytes(const void* p, int chunk, int chunks, Scratch&) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  QuantType t{};
  quant_type(a.format, &t);
  const ByteRows out(a.scratch, a.rows, a.k);
  const int64_t rows = a.rows;
  for (int64_t r = rows * chunk / chunks; r < rows * (chunk + 1) / chunks; ++r) {
    const int64_t at = r * a.x_stride;
    int8_t* q = out.q + r * a.k;
    float* d = out.d + r * (a.k / 32);
    int32_t* zero = out.zero + r * (a.k / t.group);
    if (a.x_dtype == HR_F32) quantize_bytes(static_cast<const float*>(a.x) + at, a.k, t, q, d, zero);
    else if (a.x_dtype == HR_F16) quantize_bytes(static_cast<const fp16*>(a.x) + at, a.k, t, q, d, zero);
    else quantize_bytes(static_cast<const bf16*>(a.x) + at, a.k, t, q, d, zero);
  }
}

// How many times the rows are cut, so that threads end together where there are few panels.
inline int64_t row_cuts(const hr_linear& a, int64_t pairs, int threads) {
  const int64_t wanted = threads == 1 ? 1 : (6 * threads + pairs - 1) / pairs, most = (a.rows + 127) / 128;
  return wanted < most ? wanted : most;
}

// Many rows, two quantized panels at a time. A chunk is a pair of panels and a cut of the rows.
inline void run_linear_pairs(const void* p, int chunk, int chunks, Scratch& scratch) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  QuantType t{};
  quant_type(a.format, &t);
  const PanelShape shape(t, a.k);
  const ByteRows x(a.scratch, a.rows, a.k);
  const int64_t all = panels(a.n), pairs = (all + kPair - 1) / kPair, cuts = chunks / pairs;
  const int64_t first = chunk / cuts * kPair, cut = chunk % cuts, rows = a.rows;
  const int cols = int(all - first < kPair ? all - first : kPair);
  const int64_t wide = a.k * kCols, floats = shape.groups * kCols;
  // scratch: [bytes of two panels][their scales][their minimums]
  uint8_t* b = scratch.need(size_t(kPair * (wide + 8 * floats)));
  float *d = reinterpret_cast<float*>(b + kPair * wide), *m = d + kPair * floats;
  const uint8_t* w = static_cast<const uint8_t*>(a.packed) + first * shape.bytes;
  for (int j = 0; j < cols; ++j)
    unpack_panel(t, w + j * shape.bytes, shape, b + j * wide, d + j * floats, m + j * floats);
  float c[kPairRows][kPair * kCols];
  const int64_t end = rows * (cut + 1) / cuts;
  const bool plain = a.y_dtype == HR_BF16 && !a.bias && a.softcap <= 0.0f && (first + cols) * kCols <= a.n;
  for (int64_t r = rows * cut / cuts; r < end; r += kPairRows) {
    const int count = int(end - r < kPairRows ? end - r : kPairRows);
    mm_pair(t, x, r, count, cols, b, d, m, a.k, c);
    for (int j = 0; j < cols; ++j) {
      const vf columns = load(reinterpret_cast<const float*>(w + j * shape.bytes));
      bf16* y = static_cast<bf16*>(a.y) + r * a.y_stride + (first + j) * kCols;
      for (int i = 0; i < count; ++i, y += a.y_stride) {
        const vf v = mul(load(c[i] + j * kCols), columns);
        if (plain) {
          store(y, v);
        } else {
          store(c[i] + j * kCols, v);
          write_row(a, c[i] + j * kCols, r + i, first + j);
        }
      }
    }
  }
}
#endif

#if HR_AMX
inline bool takes_tiles(const hr_linear& a, bool quantized) {
  return a.rows >= (quantized && !a.prompt ? kTileRowsQuantized : kTileRows) && a.x_dtype == HR_BF16 && a.k % 32 == 0 &&
         (quantized || a.format == HR_W_BF16);
}

// A chunk is a run of pairs of tiles, depth by depth.
inline void run_pack_tiles(const void* p, int chunk, int chunks, Scratch&) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  const PackedTiles x(a.rows, a.k);
  const int64_t all = x.pairs() * x.depths();
  for (int64_t at = all * chunk / chunks; at < all * (chunk + 1) / chunks; ++at)
    x.pack(static_cast<const bf16*>(a.x), a.x_stride, at / x.depths(), at % x.depths(), static_cast<uint8_t*>(a.scratch));
}

// 1 to 32 rows of y from tiles that lie one behind the other: [rows / 16][cols][16][16].
inline void write_tiles(const hr_linear& a, const float* c, int64_t row, int64_t rows, int64_t panel, int cols) {
  const bool plain = a.y_dtype == HR_BF16 && !a.bias && a.softcap <= 0.0f && (panel + 2) * kCols <= a.n && cols == 2;
  for (int64_t i = 0; i < rows; ++i) {
    const float* from = c + i / kTile * cols * kTile * kTile + i % kTile * kTile;
    if (plain) {
      bf16* y = static_cast<bf16*>(a.y) + (row + i) * a.y_stride + panel * kCols;
      _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kTile * kTile), _mm512_loadu_ps(from)));
      continue;
    }
    for (int j = 0; j < cols; ++j) write_row(a, from + j * kTile * kTile, row + i, panel + j);
  }
}

// What a chunk of run_linear_tiles works on: a block of rows and pairs of panels [first, last), of which kDepth inputs are
// taken at a time. The depths of a pair follow each other, as they lie, until x of that many would leave the second cache:
// then all pairs have their turn before the next.
struct TileTask {
  const hr_linear& a;
  PackedTiles x;
  int64_t row, rows, first, last, widest, panel_bytes, near;  // near: depths that follow each other
  struct Unit {
    int64_t pair, depth, panel, count;  // pair: from the task's first on; count: inputs
    int cols;
  };
  TileTask(const hr_linear& a, int chunk, int chunks) : a(a), x(a.rows, a.k), panel_bytes(hr::panel_bytes(a.format, a.k)) {
    const int64_t groups = chunks / x.blocks, pairs = (panels(a.n) + 1) / 2;
    const int64_t group = chunk % groups;  // a thread's next chunk is likely one of the same rows
    row = chunk / groups * x.block_rows;
    rows = x.rows_from(row, x.block_rows);
    first = pairs * group / groups, last = pairs * (group + 1) / groups, widest = (pairs + groups - 1) / groups;
    near = row_pairs() == 1 ? x.depths() : std::min(kDepths, x.depths());
  }
  int64_t row_pairs() const { return (rows + 2 * kTile - 1) / (2 * kTile); }
  int64_t units() const { return (last - first) * x.depths(); }
  bool at_once() const { return near == x.depths(); }  // a pair is done before the next
  Unit unit(int64_t at) const {
    const int64_t turn = (last - first) * near, before = at / turn * near, here = std::min(near, x.depths() - before);
    const int64_t pair = at % turn / here, depth = before + at % turn % here;
    const int64_t panel = (first + pair) * 2;
    return {pair, depth, panel, x.depth(depth), panel + 1 < panels(a.n) ? 2 : 1};
  }
  const uint8_t* weights(const Unit& u, int j) const {
    return static_cast<const uint8_t*>(a.packed) + (u.panel + j) * panel_bytes;
  }
};

// Lets `meanwhile` fetch a unit's weights in `steps` steps. shape: of quantized panels, or null.
inline void fetch_unit(const TileTask& task, const PanelShape* shape, int64_t at, int64_t steps, Meanwhile* meanwhile) {
  if (at >= task.units()) return;
  const TileTask::Unit u = task.unit(at);
  const int64_t block = shape ? shape->block_bytes : kTileBytes, bytes = u.count / 32 * block;
  for (int j = 0; j < u.cols; ++j) {
    meanwhile->at[j] = task.weights(u, j) + (shape ? shape->data_at : 0) + u.depth * kDepth / 32 * block;
    meanwhile->end[j] = meanwhile->at[j] + bytes;
  }
  meanwhile->lines = bytes / 64 / steps + 1;
}

inline Expand expand_unit(const TileTask& task, const QuantType* t, const PanelShape* shape, int64_t at, uint8_t* out) {
  const TileTask::Unit u = task.unit(at);
  const int64_t count = u.count / 32;
  return {t, shape, {task.weights(u, 0), task.weights(u, u.cols - 1)}, u.depth * kDepth / 32, count, count * u.cols,
          {out, out + kDepth * kCols * 2}};
}

// Several pairs of panels against a block of rows. Two panels' inputs of one depth are multiplied with all rows; meanwhile
// the next are fetched and, if they are quantized, expanded. The sums wait in memory for the next depth.
inline void run_linear_tiles(const void* p, int chunk, int chunks, Scratch& scratch) {
  const hr_linear& a = *static_cast<const hr_linear*>(p);
  const Tiles tiles;
  QuantType t{};
  const bool quantized = quant_type(a.format, &t), own = a.rows <= kOwnPack;
  const PanelShape shape(quantized ? t : QuantType{32, 0, 8, 32, false, 0}, a.k);
  const TileTask task(a, chunk, chunks);
  const PackedTiles& x = task.x;
  const int64_t row_pairs = task.row_pairs(), sums = 4 * kTileBytes * row_pairs;
  // scratch: [x in tiles, if it is one's own][two panels expanded, twice][sums of a pair, or of all]
  const int64_t x_bytes = own ? PackedTiles::bytes(a.rows, a.k) : 0, wide = kDepth * kCols * 2;
  uint8_t* base = scratch.need(size_t(x_bytes + 4 * wide + sums * (task.at_once() ? 1 : task.widest)));
  uint8_t *expanded = base + x_bytes, *c = expanded + 4 * wide;
  const uint8_t* packed = own ? base : static_cast<const uint8_t*>(a.scratch);
  if (own && scratch.tag != scratch.step) {
    for (int64_t i = 0; i < x.depths(); ++i) x.pack(static_cast<const bf16*>(a.x), a.x_stride, 0, i, base);
    scratch.tag = scratch.step;
  }
  Expand next;
  for (int64_t at = 0; at < task.units(); ++at) {
    const TileTask::Unit u = task.unit(at);
    Meanwhile meanwhile;
    meanwhile.steps = row_pairs * (u.count / 32);
    fetch_unit(task, quantized ? &shape : nullptr, at + 1 + quantized, meanwhile.steps, &meanwhile);
    TileInput b{task.weights(u, 0) + u.depth * wide, 64, task.panel_bytes, kTileBytes};
    if (quantized) {
      b.at = expanded + at % 2 * 2 * wide, b.tile = wide;
      if (at == 0) {
        next = expand_unit(task, &t, &shape, 0, expanded);
        for (int64_t i = 0; i < next.all; ++i) next.one(i);
      }
      if (at + 1 < task.units()) {
        next = expand_unit(task, &t, &shape, at + 1, expanded + (at + 1) % 2 * 2 * wide);
        meanwhile.blocks = &next;
      }
    }
    for (int64_t r = 0; r < row_pairs; ++r) {
      const int64_t number = task.row / (2 * kTile) + r, live = std::min<int64_t>(task.rows - r * 2 * kTile, 2 * kTile);
      const TileInput in{packed + x.at(number, u.depth), 64, kTileBytes, x.count(number) / kTile * kTileBytes};
      const TileOutput out{c + (task.at_once() ? 0 : u.pair) * sums + r * 4 * kTileBytes, 64, u.cols * kTileBytes, kTileBytes};
      mm_tiles(live, u.cols, in, b, u.count / 32, out, u.depth > 0, meanwhile);
      if (u.depth + 1 == x.depths())
        write_tiles(a, reinterpret_cast<float*>(out.at), task.row + r * 2 * kTile, live, u.panel, u.cols);
    }
    meanwhile.finish();
  }
}

// Chunks of run_linear_tiles. All rows of a block are read for each, so they are wide: few for a thread, and where sums
// have to wait, one.
inline int64_t tile_chunks(const hr_linear& a, int threads) {
  const PackedTiles x(a.rows, a.k);
  const int64_t pairs = (panels(a.n) + 1) / 2;
  if (a.rows <= kOwnPack) return threads == 1 ? 1 : std::min<int64_t>(pairs, threads * 6);
  const bool at_once = x.depths() <= kDepths;
  const int64_t wanted = threads * (at_once || x.blocks == 1 ? 3 : 1);
  const int64_t fewest = at_once ? 1 : (pairs + kTilePairs - 1) / kTilePairs;
  return x.blocks * std::clamp<int64_t>((wanted + x.blocks - 1) / x.blocks, fewest, pairs);
}
#endif

inline int clamp_chunks(int64_t n) { return n < 1 ? 1 : n > 65535 ? 65535 : int(n); }

// The steps of one linear; at most two.
inline int plan_linear(const hr_linear& a, int threads, Step* out) {
  if (a.rows <= 0) return 0;
  QuantType t{};
  const bool quantized = quant_type(a.format, &t);
#if HR_AMX
  if (takes_tiles(a, quantized)) {
    const int64_t chunks = tile_chunks(a, threads);
    if (chunks <= 65535) {
      int steps = 0;
      const PackedTiles x(a.rows, a.k);
      if (a.rows > kOwnPack) out[steps++] = {run_pack_tiles, &a, clamp_chunks(std::min<int64_t>(x.pairs() * x.depths(), threads))};
      out[steps++] = {run_linear_tiles, &a, int(chunks)};
      return steps;
    }
  }
#endif
  // Few rows: large chunks, for the memory is read in long runs. More rows: small ones, so that threads end together.
  const int64_t n = panels(a.n), wanted = threads * (a.rows <= kOwnRows ? kFewRowsChunks : 16);
  const int chunks = threads == 1 ? 1 : clamp_chunks(n < wanted ? n : wanted);
#if HR_BF16_DOTS
  if (a.rows >= kWideRows && a.x_dtype == HR_BF16 && a.format == HR_W_BF16) {
    const int64_t sets = (n + kWideCols - 1) / kWideCols;
    const int64_t most = a.rows < kMemoryRows ? threads * kFewRowsChunks : wanted;
    out[0] = {run_linear_wide, &a, threads == 1 ? 1 : clamp_chunks(sets < most ? sets : most)};
    return 1;
  }
#endif
#if HR_MATMUL8
  if (quantized && a.rows >= kWideRowsQuantized) {
    const int64_t pairs = (n + kPair - 1) / kPair, all = pairs * row_cuts(a, pairs, threads);
    if (all <= 65535) {
      out[0] = {run_quantize_bytes, &a, threads};
      out[1] = {run_linear_pairs, &a, int(all)};
      return 2;
    }
  }
#endif
  if (quantized) {
    int steps = 0;
    if (a.rows > kOwnRows) out[steps++] = {run_quantize, &a, threads};
    out[steps++] = {run_linear_int8, &a, chunks};
    return steps;
  }
  const bool floats = a.x_dtype == HR_F32;
  RunFn fn = a.format == HR_W_F32 ? (floats ? run_linear_rows<false, float> : run_linear_rows<false, bf16>)
                                  : (floats ? run_linear_rows<true, float> : run_linear_rows<true, bf16>);
  out[0] = {fn, &a, chunks};
  return 1;
}

}  // namespace hr
