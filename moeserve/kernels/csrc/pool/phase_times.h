// When a thread came to each phase, had nothing left to begin, and found the phase over: where a step's time goes.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace moeserve {

// Of one phase, by one thread; times in ticks (PhaseClock). 48 bytes, as PHASE_TIMES of kernels/phase_times.py has them.
struct PhaseTime {
  uint64_t phase;                // counted over the life of the pool
  uint16_t operation, number;    // what runs (Pool::operation_names), and which of its phases
  uint32_t units;                // that this thread computed
  int64_t entered, begun, over;  // begun: nothing was left to begin
  int64_t ahead;                 // ticks, before that, of the small operations behind this one
};
static_assert(sizeof(PhaseTime) == 48);

// Ticks of this CPU's counter, which all cores share.
struct PhaseClock {
  static int64_t now();
  static double ticks_per_second();  // takes 10 ms
};

// One thread's, as many as have room; the rest are not kept. Costs a phase nothing but a look while it is off, and three
// reads of the clock while it is on.
class PhaseTimes {
 public:
  // While the pool is idle. 0: off.
  void start(size_t room) {
    times_.clear();
    times_.reserve(room);
    room_ = room;
  }
  bool on() const { return times_.size() < room_; }
  void add(const PhaseTime& time) { times_.push_back(time); }
  const std::vector<PhaseTime>& all() const { return times_; }

 private:
  std::vector<PhaseTime> times_;
  size_t room_ = 0;
};

}  // namespace moeserve
