// How the pool's threads divide one phase of an operation. Each thread has a range of units; when it is done with its
// own, it takes units that other threads have not begun. A phase is over when all its units are done, by any thread: no
// thread waits for one that has no unit in hand, and a late thread finds the phase over and goes on.
//
// Phases are numbered from 1 over the life of a pool, and every counter carries the number of its phase. The first
// thread to touch a counter of an earlier phase restarts it. So nothing is reset between phases, and a late thread can
// neither take nor finish a unit.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moeserve {

// A counter for one phase at a time: the phase in the upper 40 bits, the count in the lower 24.
class PhaseCount {
 public:
  static constexpr int64_t kMost = (int64_t{1} << 24) - 1;

  // Adds one if the count is below `end` (at most kMost) and no later phase has begun. Returns the count before; else
  // -1.
  int64_t add_below(uint64_t phase, int64_t end) {
    uint64_t now = value_.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t ahead = static_cast<int64_t>((now & ~uint64_t{kMost}) - (phase << kBits));
      const int64_t count = ahead == 0 ? static_cast<int64_t>(now & kMost) : 0;
      if (ahead > 0 || count >= end) return -1;
      const uint64_t next = phase << kBits | static_cast<uint64_t>(count + 1);
      if (value_.compare_exchange_weak(now, next, std::memory_order_acq_rel, std::memory_order_relaxed)) {
        return count;
      }
    }
  }

 private:
  static constexpr int kBits = 24;
  std::atomic<uint64_t> value_{0};
};

// The range of units that one thread begins with.
struct alignas(64) WorkRange {
  PhaseCount taken, done;
};

// True for one thread only: the first that claims a unit in this phase. flag: the latest phase in which the unit was
// claimed, a std::atomic<uint64_t> (or what `pool_order.cpp` holds a thread in).
template <class Flag>
bool claim_unit(Flag& flag, uint64_t phase) {
  uint64_t last = flag.load(std::memory_order_relaxed);
  return last < phase && flag.compare_exchange_strong(last, phase, std::memory_order_acq_rel);
}

// Decides which thread may write the results of a unit that several threads may have computed: the first that asks. The
// phase cannot end until that thread has written them; all others must write nothing.
class Claim {
 public:
  // flag: the latest phase in which this unit was claimed; nullptr: only this thread has the unit.
  Claim(std::atomic<uint64_t>* flag, uint64_t phase) : flag_(flag), phase_(phase) {}

  bool operator()() {
    if (!asked_) {
      asked_ = true;
      mine_ = flag_ == nullptr || claim_unit(*flag_, phase_);
    }
    return mine_;
  }

 private:
  std::atomic<uint64_t>* flag_;
  uint64_t phase_;
  bool asked_ = false, mine_ = false;
};

// Decides when a thread without units to begin stops waiting for units that other threads have begun.
class Patience {
 public:
  Patience() : since_(Clock::now()) {}
  // Every unit has been begun, `units` of them by this thread.
  void wait_begins(int64_t units);
  bool is_over() const { return Clock::now() - since_ > limit_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point since_;
  Clock::duration limit_{};
};

}  // namespace moeserve
