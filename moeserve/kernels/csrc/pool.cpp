#include "pool.h"

#include <chrono>
#include <new>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeserve {
namespace {

// Spins, then sleeps, while `value` is `old`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// A CPU that we may not use (a cpuset changed meanwhile) leaves the thread where the kernel puts it.
void bind_to(const std::vector<int>& cpus) {
#if defined(__linux__)
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)cpus;
#endif
}

// Denormal numbers count as zero in this thread. A recurrent state that decays reaches them, and an operation on one
// takes some hundred cycles.
void flush_denormals() {
#if defined(__x86_64__)
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _mm_setcsr(_mm_getcsr() | 0x40);  // denormals as operands, too
#endif
}

}  // namespace

std::atomic<int64_t>& Team::cursor(int thread) {
  return pool_.cursors_[(phase_ % Pool::kCursorSets) * threads_ + thread].taken;
}

void Team::barrier(int spins) { pool_.arrive_and_wait(*this, false, spins); }

std::pair<int64_t, int64_t> Team::first_pair(int64_t outer, int64_t panels) const {
  const int64_t first = first_panel(panels, node_, pool_.nodes()),
                count = first_panel(panels, node_ + 1, pool_.nodes()) - first;
  const int thread0 = pool_.node_threads_[node_], threads = pool_.node_threads_[node_ + 1] - thread0;
  const int64_t unit = outer * count * (thread_ - thread0) / threads;
  return count == 0 ? std::pair<int64_t, int64_t>(0, first) : std::pair(unit / count, first + unit % count);
}

void* Team::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();  // never two at a time
    scratch_.reset(::operator new(bytes, std::align_val_t(64)));
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

Pool::Pool(const std::vector<ThreadPlacement>& placements)
    : slots_(kSlots), cursors_(kCursorSets * placements.size()) {
  const int threads = static_cast<int>(placements.size());
  for (int i = 0; i < threads; ++i) {
    if (i == 0 || placements[i].node != placements[i - 1].node) node_threads_.push_back(i);
    teams_.emplace_back(new Team(*this, i, threads, placements[i].node));
  }
  node_threads_.push_back(threads);
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this, i, cpus = placements[i].cpus] { thread_main(i, cpus); });
  }
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

void Pool::thread_main(int thread, const std::vector<int>& cpus) {
  bind_to(cpus);
  flush_denormals();
  Team& team = *teams_[thread];
  for (uint32_t next = 0;; ++next) {
    wait_while(published_, next, kSpins);
    if (stop_.load()) return;
    Slot& slot = slots_[next % kSlots];
    slot.run(slot.bytes, team);
    arrive_and_wait(team, true, kSpins);
  }
}

void Pool::arrive_and_wait(Team& team, bool end_of_op, int spins) {
  uint32_t mine;
  if (!arrive(team, end_of_op, mine)) wait_past(mine, spins);
}

void Pool::wait_past(uint32_t generation, int spins) { wait_while(generation_, generation, spins); }

// The last to arrive resets the work cursors of the phases since the barrier before (all threads have left them), and
// opens the barrier.
bool Pool::arrive(Team& team, bool end_of_op, uint32_t& mine) {
  mine = team.barriers_++;
  const uint64_t first_phase = std::exchange(team.phase_at_barrier_, team.phase_);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < static_cast<uint32_t>(threads())) return false;
  for (uint64_t phase = first_phase; phase < team.phase_; ++phase) {
    Cursor* used = &cursors_[phase % kCursorSets * threads()];
    for (int i = 0; i < threads(); ++i) used[i].taken.store(0, std::memory_order_relaxed);
  }
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
  return true;
}

}  // namespace moeserve
