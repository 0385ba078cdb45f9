// Records, to show where a step's time goes, when a thread entered each phase, ran out of units to begin, and found the
// phase over.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace moeserve {

// One phase of one thread; times in ticks (PhaseClock). 48 bytes, the layout of PHASE_TIMES in kernels/phase_times.py.
struct PhaseTime {
  uint64_t phase;              // counted over the life of the pool
  uint16_t operation, number;  // the running operation (Pool::operation_names), and the phase's number in it
  uint32_t units;              // computed by this thread
  int64_t entered, begun, over;  // begun: when no unit was left to begin
  int64_t ahead;                 // ticks before `over` that it spent on the small operations after this one
};
static_assert(sizeof(PhaseTime) == 48);

// Ticks of this CPU's counter, which all cores share.
struct PhaseClock {
  static int64_t now();
  static double ticks_per_second();  // takes 10 ms
};

// One thread's records, up to a given number; later ones are dropped. While off it costs a phase one check, while on
// three clock reads.
class PhaseTimes {
 public:
  // Only while the pool is idle. room 0: off.
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
