// Mixture of experts: the router's choice, and the chosen experts' gated networks over tokens sorted by expert. All
// sizes but the number of experts in use are known when the op is planned, so it can be part of a tape: the steps cut
// what they find into as many parts as they were planned with.
#pragma once
#include <algorithm>

#include "half.h"
#include "ops.h"

namespace hr {

// The K largest of each row, the lower of equals first, and their share of the row's softmax.
inline void run_route(const void* p, int chunk, int chunks, Scratch& scratch) {
  const hr_route& a = *static_cast<const hr_route*>(p);
  uint8_t* taken = scratch.need(size_t(a.experts));
  each_row(a.rows, chunk, chunks, [&](int64_t r) {
    const float* x = a.logits + r * a.logits_stride;
    float* weights = a.weights + r * a.top_k;
    int32_t* ids = a.ids + r * a.top_k;
    std::memset(taken, 0, size_t(a.experts));
    for (int k = 0; k < a.top_k; ++k) {  // a NaN is never larger: such rows choose what comes first
      int best = -1;
      for (int e = 0; e < a.experts; ++e)
        if (!taken[e] && (best < 0 || x[e] > x[best])) best = e;
      ids[k] = best;
      taken[best] = 1;
    }
    float top = x[0], all = 0.0f, chosen = 0.0f;
    for (int e = 1; e < a.experts; ++e) top = x[e] > top ? x[e] : top;
    for (int e = 0; e < a.experts; ++e) all += std::exp(x[e] - top);
    for (int k = 0; k < a.top_k; ++k) chosen += weights[k] = std::exp(x[ids[k]] - top) / all;
    if (a.renormalize)
      for (int k = 0; k < a.top_k; ++k) weights[k] /= chosen;
  });
}

// How rows of activations are held for weights of one format, and multiplied with them: in sets of up to kRows rows of
// one expert, quantized ones between each other (quant.h).
struct RowForm {
  int format;
  int64_t k;
  QuantType t{};
  bool quantized;
  RowForm(int format, int64_t k) : format(format), k(k), quantized(quant_type(format, &t)) {}
  int64_t bytes() const {  // of a row
    return quantized ? QuantRows::bytes(k, 1) : (k * (format == HR_W_BF16 ? 2 : 4) + 63) / 64 * 64;
  }
  static int stride(int count) { return count <= kFineRows ? row_stride(count) : kRows; }
  // Rows that `count` rows of one expert take, with what is left free between them: less than twice as many.
  static int room(int count) { return count <= kFineRows ? row_stride(count) : (count + kRows - 1) / kRows * kRows; }
  // The r-th of an expert's `count` rows, which lie at `rows`.
  void put(int dtype, const void* base, int64_t at, uint8_t* rows, int r, int count, Scratch& scratch) const {
    uint8_t* row = rows + r * bytes();
    if (format == HR_W_BF16) return fetch(dtype, base, at, reinterpret_cast<bf16*>(row), k);
    if (!quantized) return fetch(dtype, base, at, reinterpret_cast<float*>(row), k);
    float* wide = reinterpret_cast<float*>(scratch.need(size_t(k) * 4));
    fetch(dtype, base, at, wide, k);
    quantize_row(wide, 0, k / 32, t.group, t.zero, count <= kFineRows,
                 QuantRows(rows + r / kRows * kRows * bytes(), k, stride(count)), r % kRows, stride(count));
  }
  // c[n][16]: n (1 to kRows) of an expert's `count` rows from the first-th (a multiple of kRows) on, and one panel
  void multiply(uint8_t* rows, int first, int n, int count, const uint8_t* panel, const uint8_t* next,
                float (*c)[kCols]) const {
    uint8_t* set = rows + first * bytes();
    if (quantized) {
      panel_fn(t, n, count <= kFineRows)(panel, PanelShape(t, k), QuantRows(set, k, stride(count)), next, c);
    } else if (format == HR_W_F16) {
      half_rows(reinterpret_cast<const float*>(set), bytes() / 4, panel, k, c, n);
    } else {
      std::memset(c, 0, sizeof(float) * kCols * size_t(n));
      if (format == HR_W_BF16) mm_rows<true>(reinterpret_cast<const bf16*>(set), bytes() / 2, panel, kCols * 4, k, c, n);
      else mm_rows<false>(reinterpret_cast<const float*>(set), bytes() / 4, panel, kCols * 4, k, c, n);
    }
  }
};

// Where things lie in hr_experts::scratch. A slot is one (token, choice), slots of an expert lie together.
struct ExpertsLayout {
  RowForm in, down;
  int64_t slots, place, start, room, active, x, gate_up, h, y, bytes;
  static int64_t padded(int64_t n) { return (n + 63) / 64 * 64; }
  explicit ExpertsLayout(const hr_experts& a)
      : in(a.format, a.hidden), down(a.down_format, a.intermediate), slots(int64_t(a.rows) * a.top_k) {
    const int64_t table = padded((a.experts + 1) * 4);
    place = padded(slots * 4);                              // int32 [slots]: of each choice its slot; before it the reverse
    start = place + padded(slots * 4);                      // int32 [experts + 1]: each expert's first slot
    room = start + table;                                   // int32 [experts]: each expert's first row in x and h
    active = room + table;                                  // int32 [1 + experts]: how many are used, and which
    x = active + table;                                     // rows for gate and up
    gate_up = x + padded(2 * slots * in.bytes());           // float [slots][2 * intermediate]
    h = gate_up + padded(slots * 2 * a.intermediate * 4);   // rows for down
    y = h + padded(2 * slots * down.bytes());               // float [slots][hidden]
    bytes = y + padded(slots * a.hidden * 4);
  }
};

// Choices are numbered token * top_k + k.
struct ExpertsView {
  const hr_experts& a;
  ExpertsLayout at;
  uint8_t* base;
  explicit ExpertsView(const void* p)
      : a(*static_cast<const hr_experts*>(p)), at(a), base(static_cast<uint8_t*>(a.scratch)) {}
  int32_t* ints(int64_t where) const { return reinterpret_cast<int32_t*>(base + where); }
  int32_t* choices() const { return ints(0); }
  int32_t* place() const { return ints(at.place); }
  int32_t* start() const { return ints(at.start); }
  int32_t* room() const { return ints(at.room); }
  int32_t* active() const { return ints(at.active); }
  float* gate_up() const { return reinterpret_cast<float*>(base + at.gate_up); }
  float* y() const { return reinterpret_cast<float*>(base + at.y); }
  int count(int expert) const { return start()[expert + 1] - start()[expert]; }
  uint8_t* rows(int64_t where, const RowForm& form, int expert) const {
    return base + where + room()[expert] * form.bytes();
  }
  // f(expert) for this chunk's share of the experts in use
  template <class F>
  void each_expert(int chunk, int chunks, F f) const {
    each_row(active()[0], chunk, chunks, [&](int64_t i) { f(active()[1 + i]); });
  }
};

inline void run_sort_slots(const void* p, int, int, Scratch&) {
  const ExpertsView v(p);
  int32_t *start = v.start(), *active = v.active();
  std::memset(start, 0, size_t(v.a.experts + 1) * 4);
  for (int64_t i = 0; i < v.at.slots; ++i) ++start[v.a.ids[i] + 1];
  active[0] = 0;
  int32_t room = 0;
  for (int e = 0; e < v.a.experts; ++e) {
    const int count = start[e + 1];
    v.room()[e] = room;
    if (count) active[++active[0]] = e, room += RowForm::room(count);
    start[e + 1] += start[e];
  }
  for (int64_t i = 0; i < v.at.slots; ++i) {  // `start` runs ahead and is put back
    const int32_t slot = start[v.a.ids[i]]++;
    v.place()[i] = slot;
    v.choices()[slot] = int32_t(i);
  }
  for (int e = v.a.experts; e > 0; --e) start[e] = start[e - 1];
  start[0] = 0;
}

inline void run_gather(const void* p, int chunk, int chunks, Scratch& scratch) {
  const ExpertsView v(p);
  v.each_expert(chunk, chunks, [&](int expert) {
    uint8_t* rows = v.rows(v.at.x, v.at.in, expert);
    for (int r = 0; r < v.count(expert); ++r) {
      const int64_t token = v.choices()[v.start()[expert] + r] / v.a.top_k;
      v.at.in.put(v.a.dtype, v.a.x, token * v.a.x_stride, rows, r, v.count(expert), scratch);
    }
  });
}

// The product of every slot's row with its expert's matrix of n rows: out[slot][n].
inline void expert_products(const ExpertsView& v, const RowForm& form, const void* const* matrices, int64_t where,
                            int64_t n, float* out, int chunk, int chunks) {
  const int64_t all = panels(n), work = v.active()[0] * all, bytes = panel_bytes(form.format, form.k);
  for (int64_t i = work * chunk / chunks; i < work * (chunk + 1) / chunks; ++i) {
    const int expert = v.active()[1 + i / all], count = v.count(expert);
    const int64_t panel = i % all, cols = std::min<int64_t>(kCols, n - panel * kCols);
    const uint8_t* w = static_cast<const uint8_t*>(matrices[expert]) + panel * bytes;
    for (int r = 0; r < count; r += kRows) {
      const int rows = std::min(count - r, kRows);
      float c[kRows][kCols];
      form.multiply(v.rows(where, form, expert), r, rows, count, w, r == 0 && panel + 1 < all ? w + bytes : nullptr, c);
      for (int j = 0; j < rows; ++j)
        std::memcpy(out + (v.start()[expert] + r + j) * n + panel * kCols, c[j], size_t(cols) * 4);
    }
  }
}

inline void run_gate_up(const void* p, int chunk, int chunks, Scratch&) {
  const ExpertsView v(p);
  expert_products(v, v.at.in, v.a.w13, v.at.x, 2 * int64_t(v.a.intermediate), v.gate_up(), chunk, chunks);
}

inline void run_expert_act(const void* p, int chunk, int chunks, Scratch& scratch) {
  const ExpertsView v(p);
  const int64_t n = v.a.intermediate;
  v.each_expert(chunk, chunks, [&](int expert) {
    for (int r = 0; r < v.count(expert); ++r) {
      float* gate = v.gate_up() + (v.start()[expert] + r) * 2 * n;
      const float* up = gate + n;
      for (int64_t i = 0; i < n; i += W) {
        const int64_t here = std::min<int64_t>(W, n - i);
        float g[W] = {}, u[W] = {};
        std::memcpy(g, gate + i, size_t(here) * 4);
        std::memcpy(u, up + i, size_t(here) * 4);
        store(g, mul(activate(load(g), v.a.act), load(u)));
        std::memcpy(gate + i, g, size_t(here) * 4);
      }
      v.at.down.put(HR_F32, gate, 0, v.rows(v.at.h, v.at.down, expert), r, v.count(expert), scratch);
    }
  });
}

inline void run_down(const void* p, int chunk, int chunks, Scratch&) {
  const ExpertsView v(p);
  expert_products(v, v.at.down, v.a.w2, v.at.h, v.a.hidden, v.y(), chunk, chunks);
}

inline void run_weighted_sum(const void* p, int chunk, int chunks, Scratch& scratch) {
  const ExpertsView v(p);
  const int64_t hidden = v.a.hidden;
  float* sum = reinterpret_cast<float*>(scratch.need(size_t(hidden) * 4));
  each_row(v.a.rows, chunk, chunks, [&](int64_t t) {
    std::memset(sum, 0, size_t(hidden) * 4);
    for (int k = 0; k < v.a.top_k; ++k) {  // in the order of the choice, whoever else is in the step
      const float* y = v.y() + v.place()[t * v.a.top_k + k] * hidden;
      const float weight = v.a.weights[t * v.a.top_k + k];
      int64_t i = 0;
      for (; i + W <= hidden; i += W) store(sum + i, fma(load(y + i), set1(weight), load(sum + i)));
      for (; i < hidden; ++i) sum[i] += y[i] * weight;
    }
    deliver(v.a.dtype, sum, v.a.y, t * v.a.y_stride, hidden);
  });
}

inline int plan_experts(const hr_experts& a, int threads, Step* out) {
  if (a.rows <= 0) return 0;
  const int64_t slots = int64_t(a.rows) * a.top_k, used = std::min<int64_t>(slots, a.experts);
  auto chunks = [&](int64_t n) { return threads == 1 ? 1 : clamp_chunks(std::min<int64_t>(n, threads * 8)); };
  out[0] = {run_sort_slots, &a, 1};
  out[1] = {run_gather, &a, chunks(used)};
  out[2] = {run_gate_up, &a, chunks(used * panels(2 * int64_t(a.intermediate)))};
  out[3] = {run_expert_act, &a, chunks(used)};
  out[4] = {run_down, &a, chunks(used * panels(a.hidden))};
  out[5] = {run_weighted_sum, &a, chunks(a.rows)};
  return 6;
}

}  // namespace hr
