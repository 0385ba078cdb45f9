// The CPU pool: persistent threads that work through a stream of operations, in order, all together.
//
// submit() only queues; wait() blocks until everything queued is done: as on a GPU stream, so that the caller
// (Python, or later a GPU) can run ahead. Threads spin a little for the next operation, then sleep on a futex:
// an idle server uses no CPU, and on two cores our other processes get theirs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace moeserve {

class Pool;

// A thread's view of the running operation.
class Team {
 public:
  int thread() const { return thread_; }
  int threads() const { return threads_; }

  // Shares units 0..n-1 among the threads and calls f(unit) for each, then waits for all. Each thread walks its
  // own contiguous range (sequential reads), then takes over what slower threads have left. Every thread of the
  // team must make the same calls in the same order.
  template <class F>
  void for_units(int64_t n, F&& f) {
    run_units(n, f);
    barrier();
  }
  // The last for_units of an operation needs no barrier of its own: the stream has one between operations.
  template <class F>
  void for_last_units(int64_t n, F&& f) {
    run_units(n, f);
  }
  void barrier();

  // Memory of this thread, at least `bytes`, 64-byte aligned, kept between operations; contents undefined.
  void* scratch(size_t bytes);

 private:
  friend class Pool;
  Team(Pool& pool, int thread, int threads) : pool_(pool), thread_(thread), threads_(threads) {}
  std::atomic<int64_t>& cursor(int thread);

  template <class F>
  void run_units(int64_t n, F&& f) {
    for (int i = 0; i < threads_; ++i) {
      const int owner = (thread_ + i) % threads_;
      const int64_t begin = n * owner / threads_, end = n * (owner + 1) / threads_;
      std::atomic<int64_t>& taken = cursor(owner);
      for (int64_t unit; (unit = begin + taken.fetch_add(1, std::memory_order_relaxed)) < end;) f(unit);
    }
    ++phase_;
  }

  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  Pool& pool_;
  int thread_, threads_;
  uint64_t phase_ = 0;     // counts run_units; equal on all threads
  uint32_t barriers_ = 0;  // counts barriers passed; equal on all threads
  std::unique_ptr<void, Free> scratch_;
  size_t scratch_bytes_ = 0;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return static_cast<int>(teams_.size()); }

  // Op: trivially copyable, at most kOpBytes, `void operator()(Team&) const`, run by every thread.
  template <class Op>
  void submit(const Op& op) {
    static_assert(std::is_trivially_copyable_v<Op> && sizeof(Op) <= kOpBytes && alignof(Op) <= 64);
    Slot& slot = next_slot();
    std::memcpy(slot.bytes, &op, sizeof op);
    slot.run = [](const void* bytes, Team& team) { (*static_cast<const Op*>(bytes))(team); };
    publish();
  }
  // Returns when all that was submitted is done.
  void wait();

 private:
  friend class Team;
  static constexpr size_t kOpBytes = 256;
  static constexpr int kSlots = 1024;  // submit() waits while so many operations are pending
  static constexpr int kCursorSets = 4;

  struct alignas(64) Slot {
    unsigned char bytes[kOpBytes];
    void (*run)(const void*, Team&);
  };
  struct alignas(64) Cursor {
    std::atomic<int64_t> taken{0};
  };

  Slot& next_slot();
  void publish();
  void thread_main(int thread);
  void arrive_and_wait(Team& team, bool end_of_op);

  std::vector<std::unique_ptr<Team>> teams_;
  std::vector<Slot> slots_;
  std::vector<Cursor> cursors_;  // [kCursorSets][threads]
  // Counters that wrap; compared for equality or by unsigned difference only.
  alignas(64) std::atomic<uint32_t> published_{0};   // operations queued; written by the submitting thread
  alignas(64) std::atomic<uint32_t> completed_{0};   // written by the last thread to finish an operation
  alignas(64) std::atomic<uint32_t> drained_{0};     // times the stream ran empty; what wait() sleeps on
  alignas(64) std::atomic<uint32_t> arrived_{0};     // threads at the barrier
  alignas(64) std::atomic<uint32_t> generation_{0};  // barriers completed
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace moeserve
