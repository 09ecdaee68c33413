// The library: one translation unit, compiled once for each instruction set (setup.py), chosen at run time.
#include "abi.h"
#include "attention.h"
#include "experts.h"
#include "half.h"
#include "linear.h"
#include "ops.h"
#include "pool.h"
#include "sample.h"

#if HR_AMX && !HR_TILE_EMULATION && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <deque>
#include <memory>

namespace hr {

union Args {
  hr_rms_norm rms_norm;
  hr_linear linear;
  hr_rotary rotary;
  hr_glu glu;
  hr_embedding embedding;
  hr_kv_write kv_write;
  hr_attention attention;
  hr_sample sample;
  hr_route route;
  hr_experts experts;
  hr_logprobs logprobs;
};

constexpr size_t kArgsBytes[] = {sizeof(hr_rms_norm),  sizeof(hr_linear),   sizeof(hr_rotary),    sizeof(hr_glu),
                                 sizeof(hr_embedding), sizeof(hr_kv_write), sizeof(hr_attention), sizeof(hr_sample),
                                 sizeof(hr_route),     sizeof(hr_experts),  sizeof(hr_logprobs)};
constexpr int kOps = int(sizeof kArgsBytes / sizeof kArgsBytes[0]);
constexpr int kMaxSteps = 6;

// Rows are shared when there is enough of them to pay for it.
inline int row_chunks(int64_t rows, int64_t work_per_row, int threads) {
  const int64_t wanted = rows * work_per_row / 4096 + 1;
  return clamp_chunks(std::min<int64_t>({rows, wanted, int64_t(threads) * 4}));
}

inline Step by_dtype(int dtype, RunFn f32, RunFn bf, RunFn f16, const void* args, int chunks) {
  return {dtype == HR_F32 ? f32 : dtype == HR_BF16 ? bf : f16, args, chunks};
}

// Steps of one op over the arguments at `args` (which must stay where they are), or -1 when they make no sense.
int plan(int op, const void* args, int threads, Step* out) {
  switch (op) {
    case HR_OP_RMS_NORM: {
      const auto& a = *static_cast<const hr_rms_norm*>(args);
      if (a.rows <= 0) return 0;
      out[0] = by_dtype(a.dtype, run_rms_norm<float>, run_rms_norm<bf16>, run_rms_norm<fp16>, args,
                        row_chunks(int64_t(a.rows) * a.inner, a.hidden, threads));
      return 1;
    }
    case HR_OP_LINEAR: {
      const auto& a = *static_cast<const hr_linear*>(args);
      return a.format == HR_W_F16 ? plan_linear_half(a, threads, out) : plan_linear(a, threads, out);
    }
    case HR_OP_ROTARY: {
      const auto& a = *static_cast<const hr_rotary*>(args);
      if (a.rows <= 0) return 0;
      const int64_t work = int64_t(a.q_heads + a.k_heads) * a.head_dim;
      out[0] = by_dtype(a.dtype, run_rotary<float>, run_rotary<bf16>, run_rotary<fp16>, args, row_chunks(a.rows, work, threads));
      return 1;
    }
    case HR_OP_GLU: {
      const auto& a = *static_cast<const hr_glu*>(args);
      if (a.rows <= 0) return 0;
      const int64_t pieces = a.rows * ((a.n + kGluPiece - 1) / kGluPiece);
      out[0] = by_dtype(a.dtype, run_glu<float>, run_glu<bf16>, run_glu<fp16>, args, row_chunks(pieces, kGluPiece * 4, threads));
      return 1;
    }
    case HR_OP_EMBEDDING: {
      const auto& a = *static_cast<const hr_embedding*>(args);
      if (a.rows <= 0) return 0;
      out[0] = by_dtype(a.dtype, run_embedding<float>, run_embedding<bf16>, run_embedding<fp16>, args,
                        row_chunks(a.rows, int64_t(a.hidden) * 8, threads));
      return 1;
    }
    case HR_OP_KV_WRITE: {
      const auto& a = *static_cast<const hr_kv_write*>(args);
      if (a.rows <= 0) return 0;
      const int64_t work = int64_t(a.kv_heads) * a.head_dim * 2;
      if (a.head_dim % 16) return -1;
      const RunFn fn = a.dtype == HR_F32    ? kv_write_fn<float>(a)
                       : a.dtype == HR_BF16 ? kv_write_fn<bf16>(a)
                                            : kv_write_fn<fp16>(a);
      out[0] = {fn, args, row_chunks(a.rows, work, threads)};
      return 1;
    }
    case HR_OP_ATTENTION: {
      const auto& a = *static_cast<const hr_attention*>(args);
      if (a.kv_heads <= 0 || a.q_heads % a.kv_heads || a.q_heads / a.kv_heads > kQueryRows || a.head_dim % 16 ||
          a.block_size % 16)
        return -1;
      return plan_attention(a, threads, out);
    }
    case HR_OP_SAMPLE: {
      const auto& a = *static_cast<const hr_sample*>(args);
      if (a.n <= 0) return -1;
      if (a.rows <= 0) return 0;
      out[0] = {run_sample, args, row_chunks(a.rows, a.n, threads)};
      return 1;
    }
    case HR_OP_ROUTE: {
      const auto& a = *static_cast<const hr_route*>(args);
      if (a.experts <= 0 || a.top_k <= 0 || a.top_k > a.experts) return -1;
      if (a.rows <= 0) return 0;
      out[0] = {run_route, args, row_chunks(a.rows, int64_t(a.experts) * a.top_k, threads)};
      return 1;
    }
    case HR_OP_LOGPROBS: {
      const auto& a = *static_cast<const hr_logprobs*>(args);
      if (a.n <= 0 || a.k < 0 || a.k > a.n) return -1;
      if (a.rows <= 0) return 0;
      out[0] = {run_logprobs, args, row_chunks(a.rows, a.n, threads)};
      return 1;
    }
    case HR_OP_EXPERTS: return plan_experts(*static_cast<const hr_experts*>(args), threads, out);
    default: return -1;
  }
}

struct PackJob {
  int format;
  const uint8_t* source;
  int64_t row_bytes, n, k;
  uint8_t* packed;
};

void run_pack(const void* p, int chunk, int chunks, Scratch&) {
  const PackJob& job = *static_cast<const PackJob*>(p);
  const int64_t all = panels(job.n), bytes = panel_bytes(job.format, job.k);
  QuantType t;
  const bool quantized = quant_type(job.format, &t);
  for (int64_t panel = all * chunk / chunks; panel < all * (chunk + 1) / chunks; ++panel) {
    const int64_t row = panel * kCols;
    const int rows = int(std::min<int64_t>(kCols, job.n - row));
    uint8_t* out = job.packed + panel * bytes;
    const uint8_t* in = job.source + row * job.row_bytes;
    if (quantized) {
      pack_panel(job.format, t, in, job.row_bytes, rows, job.k, out);
      continue;
    }
    std::memset(out, 0, size_t(bytes));
    for (int c = 0; c < rows; ++c) {
      const uint8_t* src = in + c * job.row_bytes;
      if (job.format == HR_W_F32) {
        for (int64_t i = 0; i < job.k; ++i) std::memcpy(out + (i * kCols + c) * 4, src + i * 4, 4);
      } else if (job.format == HR_W_F16) {
        for (int64_t i = 0; i < job.k; ++i) std::memcpy(out + (i * kCols + c) * 2, src + i * 2, 2);
      } else {
        for (int64_t i = 0; i + 1 < job.k; i += 2) std::memcpy(out + (i / 2 * kCols + c) * 4, src + i * 2, 4);
      }
    }
  }
}

struct ReadJob {
  const uint8_t* data;
  int64_t bytes;
  volatile float sink;  // so that the reads are not left out
};

void run_read(const void* p, int chunk, int chunks, Scratch&) {
  ReadJob& job = *static_cast<ReadJob*>(const_cast<void*>(p));
  constexpr int64_t kLine = 4 * W * 4;
  const int64_t lines = job.bytes / kLine;
  vf sums[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = lines * chunk / chunks; i < lines * (chunk + 1) / chunks; ++i)
    for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], load(reinterpret_cast<const float*>(job.data + i * kLine) + j * W));
  const float all = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  if (all == 1.0f) job.sink = all;
}

struct ChecksumJob {
  const uint8_t* data;
  int64_t bytes;
  mutable std::atomic<uint64_t> sum;
};

inline uint64_t mixed(uint64_t v) {
  v = (v ^ (v >> 32)) * 0x9fb21c651e98df25ull;
  return v ^ (v >> 29);
}

// Pieces are summed each for itself, with their numbers: so it does not matter which thread takes which.
void run_checksum(const void* p, int chunk, int chunks, Scratch&) {
  const ChecksumJob& job = *static_cast<const ChecksumJob*>(p);
  constexpr int64_t kPiece = 1 << 16;
  const int64_t pieces = (job.bytes + kPiece - 1) / kPiece;
  uint64_t total = 0;
  for (int64_t i = pieces * chunk / chunks; i < pieces * (chunk + 1) / chunks; ++i) {
    const int64_t end = std::min((i + 1) * kPiece, job.bytes);
    uint64_t lanes[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (int64_t at = i * kPiece; at < end; at += 64) {
      uint64_t words[8] = {};
      std::memcpy(words, job.data + at, size_t(std::min<int64_t>(64, end - at)));
      for (int j = 0; j < 8; ++j) lanes[j] = (lanes[j] ^ words[j]) * 0x9e3779b97f4a7c15ull;
    }
    uint64_t piece = mixed(uint64_t(i) + 1);
    for (const uint64_t lane : lanes) piece = mixed(piece ^ lane) + piece;
    total += piece;
  }
  job.sum.fetch_add(total, std::memory_order_relaxed);
}

}  // namespace hr

struct hr_pool {
  hr::Pool pool;
  explicit hr_pool(int threads) : pool(threads) {}
};

struct hr_tape {
  std::deque<hr::Args> args;  // addresses stay while it grows
  std::vector<hr::Step> steps;
  std::vector<int32_t> ops;  // of each step
};

extern "C" {

int32_t hr_abi_version(void) { return HR_ABI_VERSION; }

const char* hr_isa(void) {
#if HR_AMX
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512_bf16";
#elif HR_AVX512
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__aarch64__)
  return "neon";
#else
  return "portable";
#endif
}

hr_pool* hr_pool_new(int32_t threads) {
#if HR_AMX && !HR_TILE_EMULATION && defined(__linux__)
  // The kernel hands out the tile registers' state on request, once for a process (arch_prctl 0x1023, feature 18).
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return nullptr;
#endif
  try {
    return new hr_pool(threads < 1 ? 1 : threads);
  } catch (...) {
    return nullptr;
  }
}
void hr_pool_free(hr_pool* p) { delete p; }
int32_t hr_pool_threads(hr_pool* p) { return p->pool.threads(); }
void hr_pool_active(hr_pool* p, int32_t n) { p->pool.set_active(n); }

int32_t hr_run(hr_pool* p, int32_t op, const void* args) {
  hr::Step steps[hr::kMaxSteps];
  const int n = hr::plan(op, args, p->pool.threads(), steps);
  if (n < 0) return -1;
  p->pool.run(steps, n);
  return 0;
}

hr_tape* hr_tape_new(void) { return new (std::nothrow) hr_tape; }
void hr_tape_free(hr_tape* t) { delete t; }

int32_t hr_tape_add(hr_tape* t, hr_pool* p, int32_t op, const void* args) {
  if (op < 0 || op >= hr::kOps) return -1;
  t->args.emplace_back();
  std::memcpy(static_cast<void*>(&t->args.back()), args, hr::kArgsBytes[op]);
  hr::Step steps[hr::kMaxSteps];
  const int n = hr::plan(op, &t->args.back(), p->pool.threads(), steps);
  if (n < 0) return -1;
  for (int i = 0; i < n; ++i) t->steps.push_back(steps[i]), t->ops.push_back(op);
  return n;
}

int32_t hr_tape_run(hr_pool* p, hr_tape* t) {
  p->pool.run(t->steps.data(), int(t->steps.size()));
  return 0;
}

int32_t hr_tape_profile(hr_pool* p, hr_tape* t, int32_t* ops, int64_t* nanoseconds, int32_t capacity) {
  const int32_t n = int32_t(t->steps.size());
  if (n > capacity) return n;
  for (int32_t i = 0; i < n; ++i) ops[i] = t->ops[size_t(i)], nanoseconds[i] = 0;
  p->pool.run(t->steps.data(), n, nanoseconds);
  return n;
}

int64_t hr_packed_bytes(int32_t format, int64_t n, int64_t k) { return hr::panels(n) * hr::panel_bytes(format, k); }

int32_t hr_pack(hr_pool* p, int32_t format, const void* source, int64_t row_bytes, void* packed, int64_t n, int64_t k,
                int64_t first_row) {
  hr::QuantType t;
  if (hr::quant_type(format, &t) ? k % t.block != 0 : (format != HR_W_F32 && format != HR_W_F16 && (format != HR_W_BF16 || k % 2))) return -1;
  if (first_row % hr::kCols) return -1;
  hr::PackJob job{format, static_cast<const uint8_t*>(source), row_bytes, n, k,
                  static_cast<uint8_t*>(packed) + first_row / hr::kCols * hr::panel_bytes(format, k)};
  const int chunks = hr::clamp_chunks(std::min<int64_t>(hr::panels(n), int64_t(p->pool.threads()) * 8));
  hr::Step step{hr::run_pack, &job, chunks};
  p->pool.run(&step, 1);
  return 0;
}

int64_t hr_read(hr_pool* p, const void* data, int64_t bytes) {
  hr::ReadJob job{static_cast<const uint8_t*>(data), bytes, 0.0f};
  hr::Step step{hr::run_read, &job, hr::clamp_chunks(int64_t(p->pool.threads()) * 8)};
  int64_t nanoseconds = 0;
  p->pool.run(&step, 1, &nanoseconds);
  return nanoseconds;
}

uint64_t hr_checksum(hr_pool* p, const void* data, int64_t bytes) {
  hr::ChecksumJob job{static_cast<const uint8_t*>(data), bytes, {0}};
  hr::Step step{hr::run_checksum, &job, hr::clamp_chunks(std::min<int64_t>(bytes >> 16, p->pool.threads() * 8))};
  p->pool.run(&step, 1);
  return job.sum.load() ^ hr::mixed(uint64_t(bytes));
}

int64_t hr_linear_scratch(int32_t format, int32_t rows, int32_t k) {
  return hr::linear_scratch(format, rows, k);
}

int64_t hr_attention_scratch(const hr_attention* a) {
  return a->splits > 1 ? int64_t(a->num_decode) * a->q_heads * a->splits * hr::partial_floats(*a) * 4 : 0;
}

int64_t hr_experts_scratch(const hr_experts* a) { return hr::ExpertsLayout(*a).bytes; }

}  // extern "C"
