// Fails at the first wrong answer of MeasuringTime; tests/kernels/pool/test_measuring_time.py builds and runs it.
#include "ops/measuring_time.h"

#include <cstdio>

using moeserve::MeasuringTime;

namespace {

int failures = 0;
void expect(bool is_right, const char* what) {
  if (is_right) return;
  std::puts(what);
  ++failures;
}

}  // namespace

int main() {
  using std::chrono::milliseconds;
  const MeasuringTime::Clock::time_point start{};
  MeasuringTime busy(2, start);
  busy.spend(0.3);
  expect(!busy.is_over(start + milliseconds(3000)), "a busy machine: three seconds, 0.15 of each thread's");
  expect(busy.is_over(start + milliseconds(5001)), "five seconds are the most");
  MeasuringTime idle(2, start);
  idle.spend(1.9);
  expect(!idle.is_over(start + milliseconds(950)), "an idle machine before its second is over");
  idle.spend(0.2);
  expect(idle.is_over(start + milliseconds(1050)), "an idle machine after a second");
  return failures;
}
