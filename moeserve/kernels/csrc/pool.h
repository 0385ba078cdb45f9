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
#include <utility>
#include <vector>

namespace moeserve {

class Pool;

// About 50 us: longer than the gap between two operations of a step, shorter than what a sleeping thread costs
// the other processes of a two-core machine when the server is idle.
constexpr int kSpins = 1500;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

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
    for_last_units(n, f);
    barrier();
  }
  // The last for_units of an operation needs no barrier of its own: the stream has one between operations.
  template <class F>
  void for_last_units(int64_t n, F&& f) {
    share(n, 0, threads_, f);
  }

  // The same for `outer` x `panels` pairs, f(o, panel), where memory node i owns the panels of its range
  // (Pool::first_panel): only its own threads work on them. A thread's pairs run panel by panel within an o.
  template <class F>
  void for_panels(int64_t outer, int64_t panels, F&& f) {
    for_last_panels(outer, panels, f);
    barrier();
  }
  template <class F>
  void for_last_panels(int64_t outer, int64_t panels, F&& f);

  // All threads meet. `spins`: how long to look before sleeping; a step that a GPU is in the midst of is worth more
  // than the usual.
  void barrier(int spins = kSpins);
  // The same; who waits calls idle() again and again, a short piece of work at a time.
  template <class F>
  void barrier_doing(F&& idle);

  // The first of this thread's own range in for_panels(outer, panels, f): a pair (o, panel); outer > 0.
  std::pair<int64_t, int64_t> first_pair(int64_t outer, int64_t panels) const;

  // Memory of this thread, at least `bytes`, 64-byte aligned, kept between operations; contents undefined.
  void* scratch(size_t bytes);

 private:
  friend class Pool;
  Team(Pool& pool, int thread, int threads, int node)
      : pool_(pool), thread_(thread), threads_(threads), node_(node) {}
  std::atomic<int64_t>& cursor(int thread);

  // Units 0..n-1 among `count` threads from `first` on, this one being one of them.
  template <class F>
  void share(int64_t n, int first, int count, F&& f) {
    for (int i = 0; i < count; ++i) {
      const int owner = (thread_ - first + i) % count;
      const int64_t begin = n * owner / count, end = n * (owner + 1) / count;
      std::atomic<int64_t>& taken = cursor(first + owner);
      for (int64_t unit; (unit = begin + taken.fetch_add(1, std::memory_order_relaxed)) < end;) f(unit);
    }
    ++phase_;
  }

  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  Pool& pool_;
  int thread_, threads_, node_;
  uint64_t phase_ = 0;  // counts run_units; equal on all threads
  uint64_t phase_at_barrier_ = 0;
  uint32_t barriers_ = 0;  // counts barriers passed; equal on all threads
  std::unique_ptr<void, Free> scratch_;
  size_t scratch_bytes_ = 0;
};

// Where a thread runs.
struct ThreadPlacement {
  int node;               // memory node, counted from 0; a node's threads stand together
  std::vector<int> cpus;  // what it is bound to; empty: not bound
};

// Panels are divided among memory nodes in contiguous ranges: node i of n owns [first_panel(i), first_panel(i + 1)).
constexpr int64_t first_panel(int64_t panels, int node, int nodes) { return panels * node / nodes; }
constexpr int node_of_panel(int64_t panels, int64_t panel, int nodes) {
  return static_cast<int>(((panel + 1) * nodes - 1) / panels);
}

class Pool {
 public:
  explicit Pool(const std::vector<ThreadPlacement>& placements);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return static_cast<int>(teams_.size()); }
  int nodes() const { return static_cast<int>(node_threads_.size()) - 1; }

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
  static constexpr size_t kOpBytes = 320;
  static constexpr int kSlots = 1024;    // submit() waits while so many operations are pending
  static constexpr int kCursorSets = 4;  // most calls of share between two barriers

  struct alignas(64) Slot {
    unsigned char bytes[kOpBytes];
    void (*run)(const void*, Team&);
  };
  struct alignas(64) Cursor {
    std::atomic<int64_t> taken{0};
  };

  Slot& next_slot();
  void publish();
  void thread_main(int thread, const std::vector<int>& cpus);
  // True for the last thread, which has opened the barrier; the others wait while generation_ is `mine`.
  bool arrive(Team& team, bool end_of_op, uint32_t& mine);
  void arrive_and_wait(Team& team, bool end_of_op, int spins);
  void wait_past(uint32_t generation, int spins);

  std::vector<std::unique_ptr<Team>> teams_;
  std::vector<int> node_threads_;  // [nodes + 1]: the first thread of each node
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

template <class F>
void Team::barrier_doing(F&& idle) {
  uint32_t mine;
  if (pool_.arrive(*this, false, mine)) return;
  for (int i = 0; i < kSpins; ++i) {
    if (pool_.generation_.load(std::memory_order_acquire) != mine) return;
    idle();
    relax();
  }
  pool_.wait_past(mine, 0);
}

template <class F>
void Team::for_last_panels(int64_t outer, int64_t panels, F&& f) {
  const int nodes = pool_.nodes();
  const int node = node_;
  const int64_t first = first_panel(panels, node, nodes),
                count = first_panel(panels, node + 1, nodes) - first;
  const int thread0 = pool_.node_threads_[node], threads = pool_.node_threads_[node + 1] - thread0;
  share(outer * count, thread0, threads, [&](int64_t unit) { f(unit / count, first + unit % count); });
}

}  // namespace moeserve
