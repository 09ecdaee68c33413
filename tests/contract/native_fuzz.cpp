// Random calls into the native library, for a build with sanitizers: python -m tests.contract.native_fuzz
//
// fuzz SECONDS SEED: every op with odd sizes, empty batches, strides, addresses that no vector divides, NaN, infinities
// and random stored bits, in buffers of exactly the size that the interface asks for. stress SECONDS: the thread pool with
// short steps, several callers and changing numbers of threads; here sums are checked.
#include "../../platforms/cpu/native/native.cpp"

#include <cstdio>
#include <random>
#include <string>

namespace {

void must(bool ok, const char* what) {
  if (!ok) std::fprintf(stderr, "FAILED: %s\n", what), std::abort();
}

std::mt19937_64 random_bits;

int between(int low, int high) { return low + int(random_bits() % uint64_t(high - low + 1)); }
bool chance(int percent) { return between(1, 100) <= percent; }
template <class T>
T one_of(std::initializer_list<T> values) { return *(values.begin() + between(0, int(values.size()) - 1)); }

constexpr size_t kSize[] = {4, 2, 2, 1};  // of each hr_dtype

// Heap memory of exactly `bytes`, at an address that is a multiple of `align` and of nothing larger.
class Memory {
 public:
  explicit Memory(int64_t bytes, size_t align = 64) : bytes_(size_t(bytes)) {
    shift_ = align >= 64 ? 0 : align * size_t(between(0, int(64 / align) - 1));
    void* block = nullptr;
    must(posix_memalign(&block, 64, shift_ + bytes_) == 0, "memory");
    block_ = static_cast<uint8_t*>(block);
    std::memset(block_, 0, shift_ + bytes_);
  }
  Memory(const Memory&) = delete;
  ~Memory() { std::free(block_); }
  uint8_t* data() const { return block_ + shift_; }
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data()); }
  size_t bytes() const { return bytes_; }
  Memory& bits() {
    for (size_t i = 0; i < bytes_; ++i) data()[i] = uint8_t(random_bits());
    return *this;
  }

 private:
  size_t bytes_, shift_ = 0;
  uint8_t* block_;
};

// `count` numbers of a dtype: ordinary ones, and at times some that are not.
void numbers(Memory& memory, int dtype, int64_t count) {
  std::normal_distribution<float> normal;
  const int odd = chance(30) ? 5 : 0;
  for (int64_t i = 0; i < count; ++i) {
    float v = normal(random_bits);
    if (odd && chance(odd)) v = one_of({NAN, INFINITY, -INFINITY, 1e38f, -1e38f, 0.0f, 1e-40f, 65504.0f});
    if (dtype == HR_F32) std::memcpy(memory.data() + i * 4, &v, 4);  // stored weights lie at any address
    else if (dtype == HR_BF16) hr::from_float(v, memory.as<hr::bf16>() + i);
    else hr::from_float(v, memory.as<hr::fp16>() + i);
  }
}

// Runs now and through a tape.
void call(hr_pool* pool, int op, const void* args) {
  must(hr_run(pool, op, args) == 0, "hr_run");
  hr_tape* tape = hr_tape_new();
  must(hr_tape_add(tape, pool, op, args) >= 0, "hr_tape_add");
  hr_tape_run(pool, tape);
  hr_tape_free(tape);
}

constexpr int kFormats[] = {HR_W_F32,  HR_W_BF16, HR_W_F16,  HR_W_Q4_0, HR_W_Q4_1, HR_W_Q5_0, HR_W_Q5_1,
                            HR_W_Q8_0, HR_W_Q2_K, HR_W_Q3_K, HR_W_Q4_K, HR_W_Q5_K, HR_W_Q6_K};

struct Packed {
  int format;
  int64_t n, k;
  Memory data;
  static int64_t width(int format, int most) {
    hr::QuantType t;
    if (hr::quant_type(format, &t)) return int64_t(t.block) * between(1, std::max(1, most / t.block));
    return format == HR_W_BF16 ? 2 * between(1, most / 2) : between(1, most);
  }
  Packed(hr_pool* pool, int format, int64_t n, int64_t k)
      : format(format), n(n), k(k), data(hr_packed_bytes(format, n, k)) {
    hr::QuantType t;
    const int64_t row = hr::quant_type(format, &t) ? k / t.block * t.block_bytes : k * (format == HR_W_F32 ? 4 : 2);
    Memory source(n * row, 1);
    if (chance(50) || row != k * 4) source.bits();
    else numbers(source, HR_F32, n * k);
    must(hr_pack(pool, format, source.data(), row, data.data(), n, k, 0) == 0, "hr_pack");
  }
};

void linear(hr_pool* pool) {
  const int format = kFormats[between(0, 12)];
  const bool half = format == HR_W_F16;
  const bool large = chance(2);  // more than caches are counted on to hold
  const Packed w(pool, format, between(1, large ? 300 : 70), Packed::width(format, large ? 3000 : 600));
  hr::QuantType t;
  const int x_dtype = hr::quant_type(format, &t) || half ? between(0, 2) : between(0, 1);
  const int rows = chance(10) ? 0 : between(1, large ? 300 : chance(30) ? 70 : 9), y_dtype = between(0, 2);
  hr_linear a{};
  a.rows = rows, a.k = int(w.k), a.n = int(w.n), a.format = format, a.x_dtype = x_dtype, a.y_dtype = y_dtype;
  a.x_stride = w.k + between(0, 9), a.y_stride = w.n + between(0, 9), a.prompt = between(0, 1);
  a.softcap = chance(20) ? 30.0f : 0.0f;
  const int64_t x_count = rows ? (rows - 1) * a.x_stride + w.k : 0, y_count = rows ? (rows - 1) * a.y_stride + w.n : 0;
  Memory x(x_count * int64_t(kSize[x_dtype]), kSize[x_dtype]), y(y_count * int64_t(kSize[y_dtype]), kSize[y_dtype]);
  Memory bias(w.n * 4, 4), scratch(hr_linear_scratch(format, rows, a.k));
  numbers(x, x_dtype, x_count);
  a.x = x.data(), a.y = y.data(), a.packed = w.data.data(), a.scratch = scratch.data();
  a.bias = chance(50) ? bias.as<float>() : nullptr;
  call(pool, HR_OP_LINEAR, &a);
}

void embedding(hr_pool* pool) {
  const int format = kFormats[between(0, 12)], dtype = between(0, 2), rows = between(0, 9);
  const Packed w(pool, format, between(1, 70), Packed::width(format, 600));
  Memory ids(rows * 4, 4), y(rows * w.k * int64_t(kSize[dtype]), kSize[dtype]);
  for (int i = 0; i < rows; ++i) ids.as<int32_t>()[i] = chance(20) ? one_of({-1, int(w.n), INT32_MAX, INT32_MIN}) : between(0, int(w.n) - 1);
  const hr_embedding a{ids.as<int32_t>(), w.data.data(), y.data(), w.k, rows, int(w.k), int(w.n), format, dtype, 2.5f};
  call(pool, HR_OP_EMBEDDING, &a);
}

void small_ops(hr_pool* pool) {
  const int dtype = between(0, 2), rows = between(0, 9), inner = between(1, 3), hidden = between(1, 200);
  const size_t size = kSize[dtype];
  const int64_t stride = int64_t(inner) * hidden + between(0, 5), count = rows ? (rows - 1) * stride + inner * hidden : 0;
  Memory x(count * int64_t(size), size), residual(count * int64_t(size), size), y(count * int64_t(size), size);
  Memory weight(hidden * 4, 4);
  numbers(x, dtype, count), numbers(residual, dtype, count), numbers(weight, HR_F32, hidden);
  const hr_rms_norm norm{x.data(), chance(50) ? residual.data() : nullptr, weight.as<float>(), y.data(), stride, stride, stride, rows, inner, hidden, dtype, 1e-6f};
  call(pool, HR_OP_RMS_NORM, &norm);

  const int n = between(1, 1200);
  const int64_t glu_stride = 2 * n + between(0, 5), glu_count = rows ? (rows - 1) * glu_stride + 2 * n : 0;
  Memory gx(glu_count * int64_t(size), size), gy(int64_t(rows) * n * int64_t(size), size);
  numbers(gx, dtype, glu_count);
  const hr_glu glu{gx.data(), gy.data(), glu_stride, n, rows, n, between(0, 2), dtype};
  call(pool, HR_OP_GLU, &glu);

  const int heads = between(1, 4), kv = between(1, 3), width = between(1, 70), rotary = 2 * between(0, width / 2);
  const int64_t each = int64_t(heads + kv) * width, all = rows * each;
  Memory qk(all * int64_t(size), size), positions(rows * 8, 8), table(int64_t(32) * rotary * 4, 4), norms(width * 4, 4);
  numbers(qk, dtype, all), numbers(table, HR_F32, 32 * rotary), numbers(norms, HR_F32, width);
  for (int i = 0; i < rows; ++i) positions.as<int64_t>()[i] = between(0, 31);
  const float* w = chance(50) ? norms.as<float>() : nullptr;
  const hr_rotary rot{qk.data(), qk.data() + int64_t(heads) * width * int64_t(size), positions.as<int64_t>(), table.as<float>(), w, w, each, each, rows, heads, kv, width, rotary, between(0, 1), dtype, 1e-6f};
  call(pool, HR_OP_ROTARY, &rot);
}

void attention(hr_pool* pool) {
  const int dtype = between(0, 2), kv_dtype = between(0, 3), kv_heads = between(1, 3), group = one_of({1, 2, 3, 9, 32});
  const int width = 16 * between(1, 8), size = 16 * between(1, 8), heads = kv_heads * group;
  const int decodes = between(0, 3), prompts = between(decodes ? 0 : 1, 2), requests = decodes + prompts;
  std::vector<int> lengths, fresh;
  for (int i = 0; i < requests; ++i) {
    lengths.push_back(between(1, 300));
    fresh.push_back(i < decodes ? 1 : between(1, std::min(lengths.back(), 80)));
  }
  const int most = 300 / size + 2, blocks = requests * most;
  const int64_t run = int64_t(size) * (width + (kv_dtype == HR_I8 ? 4 : 0)), stride = 2 * kv_heads * run;
  Memory cache(blocks * stride * int64_t(kSize[kv_dtype]));
  if (chance(50)) cache.bits();
  int tokens = 0;
  Memory start((requests + 1) * 4, 4), length(requests * 4, 4), table(int64_t(requests) * most * 4, 4);
  for (int i = 0; i < requests; ++i) {
    start.as<int32_t>()[i] = tokens, length.as<int32_t>()[i] = lengths[size_t(i)];
    tokens += fresh[size_t(i)];
    for (int j = 0; j < most; ++j) table.as<int32_t>()[i * most + j] = i * most + j;
  }
  start.as<int32_t>()[requests] = tokens;
  const size_t element = kSize[dtype];
  const int64_t q_count = int64_t(tokens) * heads * width, k_count = int64_t(tokens) * kv_heads * width;
  Memory q(q_count * int64_t(element), element), k(k_count * int64_t(element), element), v(k_count * int64_t(element), element);
  Memory out(q_count * int64_t(element), element), slots(tokens * 8, 8), sinks(heads * 4, 4);
  numbers(q, dtype, q_count), numbers(k, dtype, k_count), numbers(v, dtype, k_count), numbers(sinks, HR_F32, heads);
  for (int i = 0, t = 0; i < requests; ++i)
    for (int j = 0; j < fresh[size_t(i)]; ++j, ++t) {
      const int at = lengths[size_t(i)] - fresh[size_t(i)] + j;
      slots.as<int64_t>()[t] = chance(5) ? -1 : int64_t(i * most + at / size) * size + at % size;
    }
  const int64_t each = int64_t(kv_heads) * width;
  uint8_t* values = cache.data() + kv_heads * run * int64_t(kSize[kv_dtype]);
  const hr_kv_write write{k.data(), v.data(), cache.data(), values, slots.as<int64_t>(), each, each, stride, tokens, kv_heads, width, size, dtype, kv_dtype};
  call(pool, HR_OP_KV_WRITE, &write);
  std::vector<int32_t> tasks;
  for (int i = decodes; i < requests; ++i)
    for (int f = 0; f < fresh[size_t(i)]; f += std::max(hr::kQueryRows / group, 1)) tasks.push_back(i), tasks.push_back(f);
  hr_attention a{};
  a.q = q.data(), a.k_cache = cache.data(), a.v_cache = values, a.out = out.data();
  a.query_start_loc = start.as<int32_t>(), a.seq_lens = length.as<int32_t>(), a.block_table = table.as<int32_t>();
  a.sinks = chance(30) ? sinks.as<float>() : nullptr;
  a.q_stride = a.out_stride = int64_t(heads) * width, a.block_stride = stride, a.table_stride = most;
  a.num_decode = decodes, a.num_reqs = requests, a.q_heads = heads, a.kv_heads = kv_heads, a.head_dim = width;
  a.block_size = size, a.dtype = dtype, a.kv_dtype = kv_dtype, a.window = chance(40) ? between(1, 100) : 0;
  a.splits = between(1, 5), a.prefill_tasks = int(tasks.size() / 2), a.prefill_list = tasks.data();
  a.scale = 0.1f, a.softcap = chance(30) ? 20.0f : 0.0f;
  Memory scratch(hr_attention_scratch(&a));
  a.scratch = scratch.data();
  call(pool, HR_OP_ATTENTION, &a);
}

void sampling(hr_pool* pool) {
  const int rows = between(0, 4), n = one_of({1, 2, 17, 100, 3000}), k = between(0, std::min(n, 40));
  const int64_t stride = n + between(0, 3), count = rows ? (rows - 1) * stride + n : 0;
  Memory x(count * 4, 4), temperature(rows * 4, 4), top_k(rows * 4, 4), top_p(rows * 4, 4), min_p(rows * 4, 4);
  Memory uniform(rows * 4, 4), ids(rows * 8, 8), own(rows * 4, 4), rank(rows * 8, 8);
  Memory top(int64_t(rows) * k * 4, 4), top_ids(int64_t(rows) * k * 8, 8);
  numbers(x, HR_F32, count);
  if (chance(10)) std::fill_n(x.as<float>(), count, one_of({NAN, -INFINITY, INFINITY, 0.0f}));
  for (int i = 0; i < rows; ++i) {
    temperature.as<float>()[i] = one_of({0.0f, 0.01f, 1.0f, 100.0f});
    top_k.as<int32_t>()[i] = one_of({0, 1, 5, n, INT32_MAX});
    top_p.as<float>()[i] = one_of({1.0f, 0.9f, 1e-9f});
    min_p.as<float>()[i] = one_of({0.0f, 0.1f, 1.0f});
    uniform.as<float>()[i] = one_of({0.0f, 0.5f, 0.99999994f});
  }
  const hr_sample a{x.as<float>(), temperature.as<float>(), top_k.as<int32_t>(), top_p.as<float>(), min_p.as<float>(), uniform.as<float>(), ids.as<int64_t>(), stride, rows, n, 0};
  Memory guarded(rows * 4, 4);
  hr_sample b = a;
  b.ids = guarded.as<int32_t>(), b.guarded = 1;
  call(pool, HR_OP_SAMPLE, &a);
  call(pool, HR_OP_SAMPLE, &b);
  for (int i = 0; i < rows; ++i) {
    const float* row = x.as<float>() + i * stride;
    const bool finite = std::all_of(row, row + n, [](float v) { return std::isfinite(v); });
    must(guarded.as<int32_t>()[i] == (finite ? ids.as<int64_t>()[i] : -1), "the same id, or none of a row that is not finite");
  }
  for (int i = 0; i < rows; ++i) must(ids.as<int64_t>()[i] >= 0 && ids.as<int64_t>()[i] < n, "a sampled id lies in the vocabulary");
  const hr_logprobs l{x.as<float>(), ids.as<int64_t>(), own.as<float>(), rank.as<int64_t>(), top.as<float>(), top_ids.as<int64_t>(), stride, rows, n, k};
  call(pool, HR_OP_LOGPROBS, &l);
  for (int i = 0; i < rows * k; ++i) must(top_ids.as<int64_t>()[i] >= 0 && top_ids.as<int64_t>()[i] < n, "a top id lies in the vocabulary");
}

void experts(hr_pool* pool) {
  const int count = between(1, 9), top_k = between(1, count), rows = chance(10) ? 0 : between(1, 40), dtype = between(0, 2);
  const int format = kFormats[between(0, 12)], down_format = kFormats[between(0, 12)];
  const int64_t hidden = Packed::width(format, 300), inner = Packed::width(down_format, 300);
  std::vector<std::unique_ptr<Packed>> held;
  std::vector<const void*> w13, w2;
  for (int e = 0; e < count; ++e) {
    held.push_back(std::make_unique<Packed>(pool, format, 2 * inner, hidden));
    w13.push_back(held.back()->data.data());
    held.push_back(std::make_unique<Packed>(pool, down_format, hidden, inner));
    w2.push_back(held.back()->data.data());
  }
  Memory logits(int64_t(rows) * count * 4, 4), weights(int64_t(rows) * top_k * 4, 4), ids(int64_t(rows) * top_k * 4, 4);
  numbers(logits, HR_F32, int64_t(rows) * count);
  const hr_route route{logits.as<float>(), weights.as<float>(), ids.as<int32_t>(), count, rows, count, top_k, between(0, 1)};
  call(pool, HR_OP_ROUTE, &route);
  for (int i = 0; i < rows * top_k; ++i) must(ids.as<int32_t>()[i] >= 0 && ids.as<int32_t>()[i] < count, "an expert exists");
  const size_t size = kSize[dtype];
  const int64_t stride = hidden + between(0, 5), numbers_in = rows ? (rows - 1) * stride + hidden : 0;
  Memory x(numbers_in * int64_t(size), size), y(numbers_in * int64_t(size), size);
  numbers(x, dtype, numbers_in);
  hr_experts a{x.data(), weights.as<float>(), ids.as<int32_t>(), w13.data(), w2.data(), y.data(), nullptr, stride, stride, rows, top_k, count, int(hidden), int(inner), format, down_format, between(0, 2), dtype};
  Memory scratch(hr_experts_scratch(&a));
  a.scratch = scratch.data();
  call(pool, HR_OP_EXPERTS, &a);
}

void sums(hr_pool* pool) {
  Memory data(one_of({0, 1, 63, 64, 65, 65536, 200001}), 1);
  data.bits();
  const uint64_t before = hr_checksum(pool, data.data(), int64_t(data.bytes()));
  must(before == hr_checksum(pool, data.data(), int64_t(data.bytes())), "a checksum is that of the bytes");
  if (!data.bytes()) return;
  data.data()[random_bits() % data.bytes()] ^= uint8_t(1 << between(0, 7));
  must(before != hr_checksum(pool, data.data(), int64_t(data.bytes())), "a changed bit changes the checksum");
}

using Clock = std::chrono::steady_clock;

int fuzz(double seconds, uint64_t seed) {
  void (*const all[])(hr_pool*) = {linear, embedding, small_ops, attention, sampling, experts, sums};
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  hr_pool* pools[] = {hr_pool_new(1), hr_pool_new(3)};
  long rounds = 0;
  for (; Clock::now() < end; ++rounds, ++seed) {
    random_bits.seed(seed);
    hr_pool* pool = pools[between(0, 1)];
    all[size_t(rounds) % std::size(all)](pool);
  }
  for (hr_pool* pool : pools) hr_pool_free(pool);
  std::printf("%s: %ld rounds, clean; the next seed is %llu\n", hr_isa(), rounds, static_cast<unsigned long long>(seed));
  return 0;
}

struct Counting {
  std::vector<int>* marks;
};

void mark(const void* p, int chunk, int, hr::Scratch&) { ++(*static_cast<const Counting*>(p)->marks)[size_t(chunk)]; }

int stress(double seconds) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  long runs = 0;
  while (Clock::now() < end) {
    hr::Pool pool(4);
    std::vector<std::thread> callers;
    std::atomic<long> done{0};
    for (int caller = 0; caller < 3; ++caller)
      callers.emplace_back([&, caller] {
        std::minstd_rand local{unsigned(caller + 1)};
        for (int i = 0; i < 200; ++i) {
          std::vector<std::vector<int>> marks;
          std::vector<Counting> jobs;
          std::vector<hr::Step> steps;
          for (int s = 0; s < 40; ++s) marks.emplace_back(1 + local() % 9, 0);
          for (auto& each : marks) jobs.push_back({&each});
          for (size_t s = 0; s < marks.size(); ++s) steps.push_back({mark, &jobs[s], int(marks[s].size())});
          pool.run(steps.data(), int(steps.size()));
          for (const auto& each : marks)
            for (const int m : each) must(m == 1, "each chunk runs once");
          if (i % 17 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // let the others fall asleep
          if (i % 29 == 0) pool.set_active(int(1 + local() % 4));
          ++done;
        }
      });
    for (auto& caller : callers) caller.join();
    runs += done.load();
  }
  std::printf("pool: %ld runs, clean\n", runs);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 10;
  if (what == "fuzz") return fuzz(seconds, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  if (what == "stress") return stress(seconds);
  std::fprintf(stderr, "usage: native_fuzz fuzz|stress SECONDS [SEED]\n");
  return 2;
}
