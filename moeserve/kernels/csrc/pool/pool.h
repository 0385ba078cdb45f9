// The CPU pool: persistent threads that together work through a stream of operations, in order.
//
// submit() only queues; wait() blocks until everything queued is done. As with a GPU stream, the caller can run ahead.
// Threads spin briefly for the next operation, then sleep on a futex: an idle server uses no CPU.
//
// An operation consists of phases (phase.h). The kernel may take a thread's core for milliseconds, so a phase waits for
// work, not for threads. If results can be claimed, it does not even wait for a unit that an absent thread has begun:
// the others compute it again, with the same bits, and when the absent thread returns, its claim is refused. Until then
// that thread may read the inputs of any later operation, so they must stay allocated until wait() returns.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "bytes_ahead.h"
#include "operation.h"
#include "phase.h"
#include "phase_times.h"
#include "placement.h"

namespace moeserve {

class Pool;

// About 50 us: longer than the gap between two operations of a step, and shorter than the time that waking a thread
// costs the other processes of an idle two-core machine.
constexpr int kSpins = 1500;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A thread's view of the running operation. Every thread makes the same calls in the same order. Each call is a phase
// and returns when the phase is over. The number and order of calls must not depend on data that operations write.
class Team {
 public:
  int thread() const { return thread_; }
  int threads() const { return threads_; }

  // The next phase is the operation's last: the thread that ends it continues with the small operations that follow.
  void last_phase() { is_last_ = true; }

  // Calls f(unit) for units 0..n-1, divided among the threads. Each thread processes its own contiguous range
  // (sequential reads), then units that other threads have not begun.
  template <class F>
  void for_units(int64_t n, F&& f) {
    if (alone_) {
      for (int64_t unit = 0; unit < n; ++unit) f(unit);
      return;
    }
    share(all_threads(n), [&f](int64_t unit, Claim&) { f(unit); }, nullptr, no_idle);
  }
  // The same with a claim, f(unit, claim), and a function for waiting threads: see for_claimed_panels.
  template <class F>
  void for_claimed_units(int64_t n, F&& f) {
    for_claimed_units(n, f, no_idle);
  }
  template <class F, class Idle>
  void for_claimed_units(int64_t n, F&& f, Idle&& idle) {
    share(all_threads(n), f, flags(n, 0), idle);
  }

  // The same for `outer` x `panels` pairs, f(o, panel). NUMA node i owns a range of panels (Pool::first_panel), and
  // only its own threads work on them. A thread goes panel by panel within an o.
  template <class F>
  void for_panels(int64_t outer, int64_t panels, F&& f) {
    const int64_t first = node_panels(panels, node_).first, count = node_panels(panels, node_).second;
    const Shares s = by_node([&](int node) { return outer * node_panels(panels, node).second; });
    share(s, [&](int64_t unit, Claim&) { f(unit / count, first + unit % count); }, nullptr, no_idle);
  }

  // The same with a claim as f's last argument. f may then run several times for a unit, at once or long after the
  // phase. It must not write anything that others read unless claim() is true; and what it reads as an index must be
  // valid for any operation until wait(). Waiting threads call idle() repeatedly, for short pieces of work, until it
  // returns false.
  template <class F, class Idle>
  void for_claimed_panels(int64_t outer, int64_t panels, F&& f, Idle&& idle) {
    const int64_t first = node_panels(panels, node_).first, count = node_panels(panels, node_).second;
    const Shares s = by_node([&](int node) { return outer * node_panels(panels, node).second; });
    share(
        s, [&](int64_t unit, Claim& claim) { f(unit / count, first + unit % count, claim); },
        flags(s.units, node_), idle);
  }
  // The panels of several matrices one after another, panels(j) of matrix j: f(j, panel, claim).
  template <class PanelsOf, class F>
  void for_claimed_matrices(int matrices, PanelsOf&& panels, F&& f) {
    const Shares s = by_node([&](int node) {
      int64_t units = 0;
      for (int j = 0; j < matrices; ++j) units += node_panels(panels(j), node).second;
      return units;
    });
    const auto each = [&](int64_t unit, Claim& claim) {
      int j = 0;
      for (int64_t count; unit >= (count = node_panels(panels(j), node_).second); ++j) unit -= count;
      f(j, node_panels(panels(j), node_).first + unit, claim);
    };
    share(s, each, flags(s.units, node_), no_idle);
  }

  static bool no_idle() { return false; }  // for waiting threads that have nothing else to do

  // Counts phases without work, in place of phases that other threads may have run: a late thread skips what is over,
  // and all threads skip what none runs.
  void skip_phases(int count);

  // The first pair (o, panel) of this thread's own range in for_panels(outer, panels, f).
  std::pair<int64_t, int64_t> first_pair(int64_t outer, int64_t panels) const;
  // This thread's own range in for_claimed_units(n, f): first unit, and number.
  std::pair<int64_t, int64_t> own_units(int64_t n) const {
    const int64_t first = n * thread_ / threads_;
    return {first, n * (thread_ + 1) / threads_ - first};
  }
  // This thread's own range in for_claimed_matrices: `count` panels of matrix j, from `panel` on.
  struct OwnPanels {
    int j;
    int64_t panel, count;
  };
  template <class PanelsOf>
  OwnPanels own_panels(int matrices, PanelsOf&& panels) const;

  // This thread's scratch memory, at least `bytes`, 64-byte aligned, kept between operations; contents undefined.
  void* scratch(size_t bytes);

 private:
  friend class Pool;
  static constexpr int64_t kMostFlags = int64_t{1} << 14;  // per node

  // Divides units 0..units-1 of this node among its threads `first` .. first + count - 1. `ranges`: number of threads,
  // on all nodes, whose own range is not empty.
  struct Shares {
    int first, count;
    int64_t units, ranges;
  };

  Team(Pool& pool, int thread, int threads, int node)
      : pool_(pool), thread_(thread), threads_(threads), node_(node) {}

  Shares all_threads(int64_t n) const { return {0, threads_, n, std::min<int64_t>(n, threads_)}; }
  template <class UnitsOf>
  Shares by_node(UnitsOf&& units) const;
  std::pair<int64_t, int64_t> node_panels(int64_t panels,
                                          int node) const;  // the first panel, and their number
  // The node's claim flags, one per unit; nullptr if there are too many units.
  std::atomic<uint64_t>* flags(int64_t units, int node) const;
  // Prefetches what this thread will read first in one of the next operations.
  void look_ahead();
  // Computes the small operations that follow this one, alone.
  void run_ahead();

  template <class F, class Idle>
  void share(const Shares& s, F&& f, std::atomic<uint64_t>* flags, Idle&& idle);
  template <class F, class Idle>
  void share_phase(const Shares& s, F& f, std::atomic<uint64_t>* flags, Idle& idle, PhaseTime* time);
  template <class F>
  void do_unit(const Shares& s, int owner, int64_t begin, int64_t end, int64_t unit, F& f,
               std::atomic<uint64_t>* flags);
  template <class F>
  void help(const Shares& s, F& f, std::atomic<uint64_t>* flags);

  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  Pool& pool_;
  int thread_, threads_, node_;
  uint64_t phase_ = 0;                         // the phase that this thread is in
  bool is_last_ = false;                       // this phase, or the next one, is the operation's last
  bool alone_ = false;                         // in a small operation that the other threads skip
  uint32_t op_ = 0;                            // slot number of the current operation
  alignas(64) std::atomic<uint32_t> left_{0};  // operations that this thread is done with
  uint32_t looked_at_ = 0;  // the last operation for which look_ahead() has asked what it reads first
  bool found_ = false;      // whether that operation reads anything
  BytesAhead ahead_;
  uint16_t operation_ = 0, number_ = 0;  // the running operation, and how many of its phases have begun
  PhaseTimes times_;
  int64_t ahead_ticks_ = 0;
  std::unique_ptr<void, Free> scratch_;
  size_t scratch_bytes_ = 0;
};

class Pool {
 public:
  explicit Pool(const std::vector<ThreadPlacement>& placements);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return static_cast<int>(teams_.size()); }
  int nodes() const { return static_cast<int>(node_threads_.size()) - 1; }

  // Op: trivially copyable, at most Operation::kBytes, with `void operator()(Team&) const`, which every thread runs. Optional:
  // `BytesAhead reads_first(const Team&) const`, what a thread will read first, known when the operation is queued;
  // `bool is_small() const`, true if one thread may compute it alone, in which case it calls only for_units().
  template <class Op>
  void submit(const Op& op) {
    static_assert(std::is_trivially_copyable_v<Op> && sizeof(Op) <= Operation::kBytes && alignof(Op) <= 64);
    Slot& slot = next_slot();
    std::memcpy(slot.bytes, &op, sizeof op);
    slot.run = [](const void* bytes, Team& team) { (*static_cast<const Op*>(bytes))(team); };
    slot.number = operation_number(typeid(Op).name());
    slot.is_small = false;
    if constexpr (requires { op.is_small(); }) slot.is_small = op.is_small();
    slot.is_done.store(false, std::memory_order_relaxed);
    slot.reads_first = nullptr;
    if constexpr (requires(const Team& team) { op.reads_first(team); }) {
      slot.reads_first = [](const void* bytes, const Team& team) {
        return static_cast<const Op*>(bytes)->reads_first(team);
      };
    }
    if (record_ != nullptr) record_->push_back(slot);
    publish();
  }
  // From now on, operations are also added to `record`; nullptr: no longer.
  void record_in(OperationRecord* record) { record_ = record; }
  // Queues the recorded operations again.
  void repeat(const OperationRecord& record);
  // Units that a thread computed again because the thread that had begun them did not finish. Callable at any time.
  uint64_t recomputed() const { return recomputed_.load(std::memory_order_relaxed); }
  // Operations whose weights a thread prefetched while it waited in an earlier one. Callable at any time.
  uint64_t fetched_ahead() const { return fetched_ahead_.load(std::memory_order_relaxed); }
  // Makes each thread record the times of up to `room` phases; 0: none. Call it only while the pool is idle.
  void time_phases(size_t room);
  const std::vector<PhaseTime>& phase_times(int thread) const { return teams_[thread]->times_.all(); }
  const std::vector<std::string>& operation_names() const { return operation_names_; }
  // Returns when everything submitted is done and no thread reads any of its memory.
  void wait();

 private:
  friend class Team;
  static constexpr int kSlots = 1024;  // submit() waits while this many operations are pending

  struct Slot : Operation {
    std::atomic<bool> is_done{
        false};  // one thread has computed it; set before the phase in which it did so is over
  };

  uint16_t operation_number(const char* type_name);
  Slot& next_slot();
  void publish();
  void thread_main(int thread, const std::vector<int>& cpus);
  void leave(Team& team);
  bool all_left(uint32_t operations) const;

  bool is_over(uint64_t phase) const {
    return static_cast<int32_t>(over_.load(std::memory_order_acquire) - static_cast<uint32_t>(phase)) >= 0;
  }
  // Ends the `count` phases up to `phase`; all earlier ones are over.
  void end(uint64_t phase, int count = 1);
  void wait_for(uint64_t phase);

  std::vector<std::unique_ptr<Team>> teams_;
  std::vector<int> node_threads_;  // [nodes + 1]: the first thread of each node
  std::vector<Slot> slots_;
  OperationRecord* record_ = nullptr;         // what submit() adds operations to
  std::vector<const char*> operation_types_;  // typeid names of the operations submitted so far
  std::vector<std::string> operation_names_;  // the same, readable
  std::vector<WorkRange> ranges_;             // [threads]
  std::vector<std::atomic<uint64_t>> flags_;  // [nodes][Team::kMostFlags]: see Claim
  // Counters that wrap; compared for equality or by difference only.
  alignas(64) std::atomic<uint32_t> published_{0};  // operations queued; written by the submitting thread
  alignas(64) std::atomic<uint32_t> drained_{0};    // times the stream ran empty; what wait() sleeps on
  alignas(64) std::atomic<uint32_t> over_{0};       // the last phase that is over
  alignas(64) PhaseCount ranges_done_;              // of the current phase
  std::atomic<uint64_t> recomputed_{0}, fetched_ahead_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

template <class UnitsOf>
Team::Shares Team::by_node(UnitsOf&& units) const {
  const std::vector<int>& first = pool_.node_threads_;
  Shares s{first[node_], first[node_ + 1] - first[node_], units(node_), 0};
  for (int node = 0; node < pool_.nodes(); ++node) {
    s.ranges += std::min<int64_t>(units(node), first[node + 1] - first[node]);
  }
  return s;
}

template <class PanelsOf>
Team::OwnPanels Team::own_panels(int matrices, PanelsOf&& panels) const {
  const std::vector<int>& first = pool_.node_threads_;
  const int threads = first[node_ + 1] - first[node_], thread = thread_ - first[node_];
  int64_t units = 0;
  for (int j = 0; j < matrices; ++j) units += node_panels(panels(j), node_).second;
  int64_t unit = units * thread / threads;
  const int64_t own = units * (thread + 1) / threads - unit;
  for (int j = 0; j < matrices; ++j) {
    const auto [panel, count] = node_panels(panels(j), node_);
    if (unit < count) return {j, panel + unit, std::min(own, count - unit)};
    unit -= count;
  }
  return {0, 0, 0};
}

template <class F>
void Team::do_unit(const Shares& s, int owner, int64_t begin, int64_t end, int64_t unit, F& f,
                   std::atomic<uint64_t>* flags) {
  Claim claim(flags == nullptr ? nullptr : flags + unit, phase_);
  f(unit, claim);
  if (!claim()) return;
  const int64_t size = end - begin;
  if (pool_.ranges_[s.first + owner].done.add_below(phase_, size) != size - 1) return;
  if (pool_.ranges_done_.add_below(phase_, s.ranges) != s.ranges - 1) return;
  if (is_last_) run_ahead();
  pool_.end(phase_);
}

// Computes units that other threads have begun but not claimed. Every unit has been begun.
template <class F>
void Team::help(const Shares& s, F& f, std::atomic<uint64_t>* flags) {
  for (int i = 0; i < s.count; ++i) {
    const int owner = (thread_ - s.first + i) % s.count;
    const int64_t begin = s.units * owner / s.count, end = s.units * (owner + 1) / s.count;
    for (int64_t unit = begin; unit < end && !pool_.is_over(phase_); ++unit) {
      if (flags[unit].load(std::memory_order_relaxed) >= phase_) continue;
      pool_.recomputed_.fetch_add(1, std::memory_order_relaxed);
      do_unit(s, owner, begin, end, unit, f, flags);
    }
  }
}

template <class F, class Idle>
void Team::share(const Shares& s, F&& f, std::atomic<uint64_t>* flags, Idle&& idle) {
  ++phase_;
  ++number_;
  if (!times_.on()) {
    share_phase(s, f, flags, idle, nullptr);
    is_last_ = false;
    return;
  }
  PhaseTime time{phase_, operation_, number_, 0, PhaseClock::now(), 0, 0, 0};
  ahead_ticks_ = 0;
  share_phase(s, f, flags, idle, &time);
  is_last_ = false;
  time.over = PhaseClock::now();
  if (time.begun == 0) time.begun = time.over;
  time.ahead = ahead_ticks_;
  times_.add(time);
}

template <class F, class Idle>
void Team::share_phase(const Shares& s, F& f, std::atomic<uint64_t>* flags, Idle& idle, PhaseTime* time) {
  // `s` may depend on data that operations write. If a later operation wrote it, this phase is over by now.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (pool_.is_over(phase_)) return;
  if (s.ranges == 0) return pool_.end(phase_);
  Patience patience;
  int64_t units = 0;
  for (int i = 0; i < s.count; ++i) {
    const int owner = (thread_ - s.first + i) % s.count;
    const int64_t begin = s.units * owner / s.count, end = s.units * (owner + 1) / s.count;
    if (begin == end) continue;
    if (i > 0 && pool_.is_over(phase_)) return;
    WorkRange& range = pool_.ranges_[s.first + owner];
    for (int64_t taken; (taken = range.taken.add_below(phase_, end - begin)) >= 0; ++units) {
      if (time != nullptr) ++time->units;
      do_unit(s, owner, begin, end, begin + taken, f, flags);
    }
  }
  patience.wait_begins(units);
  if (time != nullptr) {
    time->begun = PhaseClock::now();
  }
  for (int i = 0; i < kSpins || flags != nullptr; ++i) {  // claimed units: help before sleeping
    if (pool_.is_over(phase_)) return;
    if (flags != nullptr && i % 16 == 15 && patience.is_over()) {
      help(s, f, flags);
      flags = nullptr;
    }
    if (!idle()) look_ahead();
    relax();
  }
  pool_.wait_for(phase_);
}

}  // namespace moeserve
