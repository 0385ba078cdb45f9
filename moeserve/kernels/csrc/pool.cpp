#include "pool.h"

#include <chrono>
#include <new>

namespace moeserve {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// About 50 us: longer than the gap between two operations of a step, shorter than what a sleeping thread costs
// the other processes of a two-core machine when the server is idle.
constexpr int kSpins = 1500;

// Spins, then sleeps, while `value` is `old`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

std::atomic<int64_t>& Team::cursor(int thread) {
  return pool_.cursors_[(phase_ % Pool::kCursorSets) * threads_ + thread].taken;
}

void Team::barrier() { pool_.arrive_and_wait(*this, false); }

void* Team::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();  // never two at a time
    scratch_.reset(::operator new(bytes, std::align_val_t(64)));
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

Pool::Pool(int threads) : slots_(kSlots), cursors_(static_cast<size_t>(kCursorSets) * threads) {
  for (int i = 0; i < threads; ++i) teams_.emplace_back(new Team(*this, i, threads));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this, i] { thread_main(i); });
}

Pool::~Pool() {
  wait();
  stop_.store(true);
  published_.fetch_add(1);
  published_.notify_all();
  for (std::thread& t : threads_) t.join();
}

Pool::Slot& Pool::next_slot() {
  const uint32_t next = published_.load(std::memory_order_relaxed);
  while (next - completed_.load(std::memory_order_acquire) >= kSlots) {
    std::this_thread::sleep_for(
        std::chrono::microseconds(50));  // a caller a thousand operations ahead can wait
  }
  return slots_[next % kSlots];
}

void Pool::publish() {
  published_.fetch_add(1, std::memory_order_release);
  published_.notify_all();
}

void Pool::wait() {
  const uint32_t target = published_.load(std::memory_order_relaxed);
  for (;;) {
    const uint32_t drained = drained_.load(std::memory_order_acquire);
    if (completed_.load(std::memory_order_acquire) == target) return;
    drained_.wait(drained, std::memory_order_acquire);
  }
}

void Pool::thread_main(int thread) {
  Team& team = *teams_[thread];
  for (uint32_t next = 0;; ++next) {
    wait_while(published_, next);
    if (stop_.load()) return;
    Slot& slot = slots_[next % kSlots];
    slot.run(slot.bytes, team);
    arrive_and_wait(team, true);
  }
}

// The last to arrive resets the work cursors that the phases before this barrier used (all threads have left
// them: a phase's set comes up again kCursorSets phases later), and opens the barrier.
void Pool::arrive_and_wait(Team& team, bool end_of_op) {
  const uint32_t mine = team.barriers_++;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < static_cast<uint32_t>(threads()))
    return wait_while(generation_, mine);
  const size_t used = (team.phase_ + kCursorSets - 1) % kCursorSets;
  for (int i = 0; i < threads(); ++i)
    cursors_[used * threads() + i].taken.store(0, std::memory_order_relaxed);
  arrived_.store(0, std::memory_order_relaxed);
  if (end_of_op) {
    const uint32_t done = completed_.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (done == published_.load(std::memory_order_acquire)) {  // only then can anyone wait for it
      drained_.fetch_add(1, std::memory_order_release);
      drained_.notify_all();
    }
  }
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
}

}  // namespace moeserve
