// Lets threads sleep until they are woken, with a timeout, which std::atomic::wait lacks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace moeserve {

class Wakes {
 public:
  uint32_t now() const { return count_.load(std::memory_order_acquire); }

  // Sleeps for at most `most`, until `wake` is called. Returns at once if it has been called since now() returned
  // `before`.
  void sleep(uint32_t before, std::chrono::microseconds most) {
#if defined(__linux__)
    static_assert(sizeof(count_) == sizeof(uint32_t));
    const timespec time{most.count() / 1'000'000, most.count() % 1'000'000 * 1000};
    sleepers_.fetch_add(1);
    syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, before, &time, nullptr, 0);
    sleepers_.fetch_sub(1);
#else
    (void)before;
    std::this_thread::sleep_for(std::min(most, std::chrono::microseconds(50)));
#endif
  }

  void wake() {
    count_.fetch_add(1);
#if defined(__linux__)
    if (sleepers_.load() != 0) syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
  }

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace moeserve
