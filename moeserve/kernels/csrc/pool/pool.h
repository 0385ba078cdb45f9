// The CPU pool: persistent threads that work through a stream of operations, in order, all together.
//
// submit() only queues; wait() blocks until everything queued is done: as on a GPU stream, so that the caller
// (Python, or later a GPU) can run ahead. Threads spin a little for the next operation, then sleep on a futex:
// an idle server uses no CPU, and on two cores our other processes get theirs.
//
// An operation consists of phases (phase.h). A core may be taken from a thread at any time, for milliseconds, so a phase
// waits for work, not for threads. Where results can be claimed, not even for the unit that the absent thread has begun:
// the others compute it again, with the same bits, and the absent thread finds its claim refused when it is back. What it
// reads until then may be of any later operation, so it must be memory that is there until wait() returns.
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
#include "phase.h"
#include "phase_times.h"
#include "placement.h"

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

// A thread's view of the running operation. Every thread makes the same calls in the same order, each of which is a phase
// and returns when the phase is over: how often and in which order must not depend on data that operations write.
class Team {
 public:
  int thread() const { return thread_; }
  int threads() const { return threads_; }

  // The next phase is the operation's last: who ends it goes on with the small operations behind it.
  void last_phase() { is_last_ = true; }

  // f(unit) for units 0..n-1, shared among the threads. Each thread walks its own contiguous range (sequential reads),
  // then takes over what others have not begun.
  template <class F>
  void for_units(int64_t n, F&& f) {
    if (alone_) {
      for (int64_t unit = 0; unit < n; ++unit) f(unit);
      return;
    }
    share(all_threads(n), [&f](int64_t unit, Claim&) { f(unit); }, nullptr, no_idle);
  }
  // The same with a claim, f(unit, claim), and something to do for who waits: see for_claimed_panels.
  template <class F>
  void for_claimed_units(int64_t n, F&& f) {
    for_claimed_units(n, f, no_idle);
  }
  template <class F, class Idle>
  void for_claimed_units(int64_t n, F&& f, Idle&& idle) {
    share(all_threads(n), f, flags(n, 0), idle);
  }

  // The same for `outer` x `panels` pairs, f(o, panel), where NUMA node i owns the panels of its range
  // (Pool::first_panel): only its own threads work on them. A thread's pairs run panel by panel within an o.
  template <class F>
  void for_panels(int64_t outer, int64_t panels, F&& f) {
    const int64_t first = node_panels(panels, node_).first, count = node_panels(panels, node_).second;
    const Shares s = by_node([&](int node) { return outer * node_panels(panels, node).second; });
    share(s, [&](int64_t unit, Claim&) { f(unit / count, first + unit % count); }, nullptr, no_idle);
  }

  // The same with a claim as f's last argument. f may then run several times for a unit, at once or long after the phase:
  // it writes nothing that others read unless claim() is true, and what it reads as an index is one for any operation
  // until wait(). Who waits calls idle() again and again, for short pieces of work, until it returns false.
  template <class F, class Idle>
  void for_claimed_panels(int64_t outer, int64_t panels, F&& f, Idle&& idle) {
    const int64_t first = node_panels(panels, node_).first, count = node_panels(panels, node_).second;
    const Shares s = by_node([&](int node) { return outer * node_panels(panels, node).second; });
    share(
        s, [&](int64_t unit, Claim& claim) { f(unit / count, first + unit % count, claim); },
        flags(s.units, node_), idle);
  }
  // The panels of `matrices` matrices one after another, panels(j) of matrix j: f(j, panel, claim).
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

  static bool no_idle() { return false; }  // for who has nothing to do meanwhile

  // Phases without work, in place of those that other threads may have had: a thread that comes late leaves out
  // what is over, and all leave out what no thread has.
  void skip_phases(int count);

  // The first of this thread's own range in for_panels(outer, panels, f): a pair (o, panel).
  std::pair<int64_t, int64_t> first_pair(int64_t outer, int64_t panels) const;
  // Its range in for_claimed_units(n, f): the first unit, and how many.
  std::pair<int64_t, int64_t> own_units(int64_t n) const {
    const int64_t first = n * thread_ / threads_;
    return {first, n * (thread_ + 1) / threads_ - first};
  }
  // What this thread begins with in for_claimed_matrices: `count` panels of matrix j, from `panel` on.
  struct OwnPanels {
    int j;
    int64_t panel, count;
  };
  template <class PanelsOf>
  OwnPanels own_panels(int matrices, PanelsOf&& panels) const;

  // Memory of this thread, at least `bytes`, 64-byte aligned, kept between operations; contents undefined.
  void* scratch(size_t bytes);

 private:
  friend class Pool;
  static constexpr int64_t kMostFlags = int64_t{1} << 14;  // of a node

  // Units 0..units-1 of this node among its threads; `ranges`: how many threads of all nodes begin with any.
  struct Shares {
    int first, count;
    int64_t units, ranges;
  };

  Team(Pool& pool, int thread, int threads, int node)
      : pool_(pool), thread_(thread), threads_(threads), node_(node) {}

  Shares all_threads(int64_t n) const { return {0, threads_, n, std::min<int64_t>(n, threads_)}; }
  template <class UnitsOf>
  Shares by_node(UnitsOf&& units) const;
  std::pair<int64_t, int64_t> node_panels(int64_t panels, int node) const;  // the first, and how many
  // One for each unit, of the node's; nullptr: there are too many.
  std::atomic<uint64_t>* flags(int64_t units, int node) const;
  // Fetches what this thread will read first in one of the next operations.
  void look_ahead();
  // Computes the small operations behind this one by itself.
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
  bool is_last_ = false;                       // it is, or the next one will be, the operation's last
  bool alone_ = false;                         // it is in a small operation that the others skip
  uint32_t op_ = 0;                            // likewise, by the number of its slot
  alignas(64) std::atomic<uint32_t> left_{0};  // operations that this thread is done with
  uint32_t looked_at_ = 0;                     // the last operation whose reading look_ahead() has asked for
  bool found_ = false;                         // whether it reads anything
  BytesAhead ahead_;
  uint16_t operation_ = 0, number_ = 0;  // what runs, and how many phases of it have begun
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

  // Op: trivially copyable, at most kOpBytes, `void operator()(Team&) const`, run by every thread. It may have
  // `BytesAhead reads_first(const Team&) const`: what a thread will read first, known when the operation is queued.
  // `bool is_small() const`: one thread may compute it alone; it then calls for_units() only.
  template <class Op>
  void submit(const Op& op) {
    static_assert(std::is_trivially_copyable_v<Op> && sizeof(Op) <= kOpBytes && alignof(Op) <= 64);
    Slot& slot = next_slot();
    std::memcpy(slot.bytes, &op, sizeof op);
    slot.run = [](const void* bytes, Team& team) { (*static_cast<const Op*>(bytes))(team); };
    slot.operation = operation_number(typeid(Op).name());
    slot.is_small = false;
    if constexpr (requires { op.is_small(); }) slot.is_small = op.is_small();
    slot.is_done.store(false, std::memory_order_relaxed);
    slot.reads_first = nullptr;
    if constexpr (requires(const Team& team) { op.reads_first(team); }) {
      slot.reads_first = [](const void* bytes, const Team& team) {
        return static_cast<const Op*>(bytes)->reads_first(team);
      };
    }
    publish();
  }
  // Units that a thread computed because another, which had begun them, did not finish. At any time.
  uint64_t recomputed() const { return recomputed_.load(std::memory_order_relaxed); }
  // Operations whose weights a thread fetched while it waited in an earlier one. At any time.
  uint64_t fetched_ahead() const { return fetched_ahead_.load(std::memory_order_relaxed); }
  // From now on each thread keeps the times of `room` phases, or of none with 0. The pool is idle.
  void time_phases(size_t room);
  const std::vector<PhaseTime>& phase_times(int thread) const { return teams_[thread]->times_.all(); }
  const std::vector<std::string>& operation_names() const { return operation_names_; }
  // Returns when all that was submitted is done and no thread reads anything of it any more.
  void wait();

 private:
  friend class Team;
  static constexpr size_t kOpBytes = 384;
  static constexpr int kSlots = 1024;  // submit() waits while this many operations are pending

  struct alignas(64) Slot {
    unsigned char bytes[kOpBytes];
    void (*run)(const void*, Team&);
    BytesAhead (*reads_first)(const void*, const Team&);  // or nullptr
    uint16_t operation;                                   // its number in operation_names_
    bool is_small;
    std::atomic<bool> is_done{false};  // by one thread; set before the phase is over in which that was
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
  // The `count` phases up to this one, where those before are over.
  void end(uint64_t phase, int count = 1);
  void wait_for(uint64_t phase);

  std::vector<std::unique_ptr<Team>> teams_;
  std::vector<int> node_threads_;  // [nodes + 1]: the first thread of each node
  std::vector<Slot> slots_;
  std::vector<const char*> operation_types_;  // typeid's names, of operations submitted so far
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

// When a thread that has nothing left to begin stops waiting for those who have begun.
class Patience {
 public:
  Patience() : since_(Clock::now()) {}
  // What was to begin is begun, `units` by this thread.
  void wait_begins(int64_t units);
  bool is_over() const { return Clock::now() - since_ > limit_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point since_;
  Clock::duration limit_{};
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

// Computes what others have begun and not claimed. Everything has been begun.
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
  // `s` may have been made from what operations write. Where that was a later one, this phase is over by now.
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
  for (int i = 0; i < kSpins || flags != nullptr; ++i) {  // it never sleeps before it has helped
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
