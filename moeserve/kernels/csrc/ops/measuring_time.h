// How long products are measured at a start (ops/choose.h).
#pragma once

#include <chrono>

namespace moeserve {

// Is over after a second of each thread's CPU time, or five by the clock. On a machine whose cores other programs use, a
// second by the clock is over before the second type is measured, which then keeps a form that may be slow.
class MeasuringTime {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr double kMostOfThread = 1.0;  // seconds
  static constexpr std::chrono::seconds kMost{5};

  MeasuringTime(int threads, Clock::time_point now) : threads_(threads), began_(now) {}

  // seconds: of CPU time, all threads' together.
  void spend(double seconds) { spent_ += seconds; }
  bool is_over(Clock::time_point now) const {
    return spent_ > kMostOfThread * threads_ || now - began_ > kMost;
  }

 private:
  int threads_;
  Clock::time_point began_;
  double spent_ = 0;
};

}  // namespace moeserve
