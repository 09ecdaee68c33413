// A thread pool that runs a list of steps. Each step is cut into chunks; threads claim chunks with one atomic word,
// so a thread that the system has put aside holds up the others only if it stopped inside a chunk, never because it
// has not arrived. Threads spin for a bounded time and then sleep: an idle pool costs nothing.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "simd.h"

namespace hr {

// Memory of one thread, 64-byte aligned, kept between chunks. `tag` lets a chunk reuse what an earlier chunk of the
// same step computed in this thread.
struct Scratch {
  uint8_t* data = nullptr;
  size_t size = 0;
  uint64_t tag = ~uint64_t(0);
  uint64_t step = 0;  // number of the step that runs now
  ~Scratch() { std::free(data); }
  uint8_t* need(size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = static_cast<uint8_t*>(std::aligned_alloc(64, size));
      if (!data) throw std::bad_alloc();
      tag = ~uint64_t(0);
    }
    return data;
  }
};

using RunFn = void (*)(const void* args, int chunk, int chunks, Scratch& scratch);

struct Step {
  RunFn run;
  const void* args;
  int chunks;  // 1 to 65535
};

class Pool {
 public:
  explicit Pool(int threads) : scratch_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    stop_.store(true);
    set_active(threads());
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& t : workers_) t.join();
  }
  int threads() const { return int(workers_.size()) + 1; }
  void set_active(int n) {
    active_.store(n, std::memory_order_seq_cst);
    active_.notify_all();
  }

  // Runs the steps in order; returns when all are done. Callers take turns (weights are packed by several threads).
  // `times`, when given, receives the nanoseconds of each step (the steps then run one by one).
  void run(const Step* steps, int n, int64_t* times = nullptr) {
    const std::lock_guard<std::mutex> turn(turn_);
    if (times) {
      for (int i = 0; i < n; ++i) {
        auto t0 = std::chrono::steady_clock::now();
        go(steps + i, 1);
        times[i] += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - t0).count();
      }
      return;
    }
    const bool watched = n >= kLong && threads() > 1;
    const auto from = std::chrono::steady_clock::now();
    waited_ = 0;
    go(steps, n);
    if (watched) adapt(steps, std::chrono::steady_clock::now() - from);
  }

 private:
  // Another program on one of our cores makes the system put a thread aside in the middle of a chunk, and the others
  // wait for it. When that happens in many runs of a tape, one thread fewer is tried for a few of them, and kept for a
  // while if they end sooner: short interruptions (a server's own threads) cost less than the thread would.
  void adapt(const Step* steps, std::chrono::nanoseconds took) {
    if (resting_ > 0 && --resting_ == 0) {
      if (fewer_) set_fewer(false);
      start_window(steps);
      return;
    }
    if (steps != tape_) {  // runs of unlike length say nothing about each other
      if (trying_) set_fewer(false);
      start_window(steps);
    }
    if (resting_ > 0) return;
    total_ += took.count();
    held_up_ += waited_ * kHeldUp > took.count();
    if (++runs_ < (trying_ ? kTrial : kWindow)) return;
    const int64_t mean = total_ / runs_;
    if (trying_) {
      if (mean >= full_) set_fewer(false);
      trying_ = false;
      resting_ = kRest;
    } else if (held_up_ * 3 > kWindow) {
      full_ = mean;
      set_fewer(true);
      trying_ = true;
    }
    start_window(steps);
  }

  void start_window(const Step* steps) {
    tape_ = steps;
    total_ = 0;
    runs_ = held_up_ = 0;
  }

  void set_fewer(bool fewer) {
    fewer_ = fewer;
    trying_ = false;
    set_active(threads() - fewer);
  }

  // ticket: step number (28 bits) | chunks of that step (16) | next chunk (20: threads that come late count on)
  static constexpr uint32_t kSteps = (1u << 28) - 1;
  static uint64_t make(uint32_t seq, int chunks) { return uint64_t(seq & kSteps) << 36 | uint64_t(chunks) << 20; }
  static int next_of(uint64_t ticket) { return int(ticket & 0xfffff); }
  static int chunks_of(uint64_t ticket) { return int(ticket >> 20 & 0xffff); }

  void go(const Step* steps, int n) {
    if (n <= 0) return;
    steps_ = steps;
    count_ = n;
    base_ = seq_;
    seq_ += uint32_t(n);
    done_.store(0, std::memory_order_relaxed);
    total_steps_ += uint64_t(n);
    const uint32_t last = (seq_ - 1) & kSteps;
    running_.store(true, std::memory_order_relaxed);
    ticket_.store(make(base_, steps[0].chunks), std::memory_order_seq_cst);
    if (steps[0].chunks > 1) wake();
    int spins = 0;
    while (finished_.load(std::memory_order_acquire) != last) {
      if (claim(scratch_[0])) {
        spins = 0;
      } else if (++spins < kSpins) {
        cpu_pause();
      } else {  // somebody holds a chunk and does not run: give the core away
        if (finished_.load(std::memory_order_acquire) != last && !has_work()) {
          const auto from = std::chrono::steady_clock::now();
          std::this_thread::yield();
          waited_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - from).count();
        }
        spins = kSpins / 2;
      }
    }
    running_.store(false, std::memory_order_relaxed);
  }

  // Those that fell asleep, if any: at the start of a run and when a long step ended, which others slept through.
  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    wake_.fetch_add(1, std::memory_order_seq_cst);
    wake_.notify_all();
  }

  bool has_work() const {
    const uint64_t t = ticket_.load(std::memory_order_seq_cst);
    return next_of(t) < chunks_of(t);
  }

  // One chunk of the current step, if there is one. Claims are one addition, which no other claim makes fail. From then
  // on the step cannot end before this chunk does, so steps_ and base_ are stable.
  bool claim(Scratch& scratch) {
    uint64_t t = ticket_.load(std::memory_order_acquire);
    if (next_of(t) >= chunks_of(t)) return false;
    t = ticket_.fetch_add(1, std::memory_order_acq_rel);
    const int chunk = next_of(t), chunks = chunks_of(t);
    if (chunk >= chunks) return false;
    const uint32_t seq = uint32_t(t >> 36), index = (seq - base_) & kSteps;
    const Step& step = steps_[index];
    scratch.step = total_steps_ - uint64_t(count_) + index;
    step.run(step.args, chunk, chunks, scratch);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) {
      if (int(index) + 1 < count_) {
        done_.store(0, std::memory_order_relaxed);
        const int next = steps_[index + 1].chunks;
        ticket_.store(make(seq + 1, next), std::memory_order_seq_cst);
        if (next > 1) wake();
      } else {
        finished_.store(seq, std::memory_order_release);
      }
    }
    return true;
  }

  void work(int index) {
    int spins = 0;
    for (;;) {
      const uint32_t seen = wake_.load(std::memory_order_seq_cst);  // before `stop_`: a wake-up in between is not slept through
      if (stop_.load(std::memory_order_seq_cst)) return;
      const int active = active_.load(std::memory_order_seq_cst);
      if (index >= active) {
        active_.wait(active);
        continue;
      }
      if (claim(scratch_[index])) {
        spins = 0;
        continue;
      }
      if (++spins < (running_.load(std::memory_order_relaxed) ? kSpinsRunning : kSpins)) {
        cpu_pause();
        continue;
      }
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (!has_work()) wake_.wait(seen);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      spins = 0;
    }
  }

  static constexpr int kSpins = 1000;         // tens of microseconds, by the length of the CPU's pause
  static constexpr int kSpinsRunning = 5000;  // while a run goes on: its next step is near
  static constexpr int kLong = 32;            // steps of a run that is worth watching
  static constexpr int kWindow = 32;          // runs looked at together
  static constexpr int kTrial = 8;            // runs with one thread fewer that decide
  static constexpr int kRest = 256;           // runs until that is decided anew
  static constexpr int64_t kHeldUp = 4;       // a run that waited for more than a quarter of its time was held up

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<uint32_t> finished_{~0u};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int> active_{1 << 30};
  std::atomic<bool> stop_{false}, running_{false};
  std::mutex turn_;
  int64_t waited_ = 0;  // nanoseconds of the current run that the caller gave its core away
  // of adapt: the window of one tape, its mean with all threads, and what was decided
  const Step* tape_ = nullptr;
  int64_t total_ = 0, full_ = 0;
  int runs_ = 0, held_up_ = 0, resting_ = 0;
  bool trying_ = false, fewer_ = false;
  const Step* steps_ = nullptr;
  int count_ = 0;
  uint32_t base_ = 0, seq_ = 0;
  uint64_t total_steps_ = 0;  // never the same number twice, unlike seq_
  std::vector<Scratch> scratch_;
  std::vector<std::thread> workers_;
};

}  // namespace hr
