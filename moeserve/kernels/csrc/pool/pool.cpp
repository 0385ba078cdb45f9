#include "pool.h"

#include <cxxabi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeserve {
namespace {

// Spins, then sleeps, as long as `value` equals `old`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// If a CPU may not be used (a cpuset has changed meanwhile), the thread stays where the kernel puts it.
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

// Requests the shortest time slices that Linux offers, 0.1 ms (from 6.12 on; older kernels ignore it). The thread's
// share of its core stays the same, but next to other programs a thread that others wait for runs again sooner.
void take_short_slices() {
#if defined(__linux__) && defined(SYS_sched_setattr)
  struct {  // struct sched_attr, which some libcs lack
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.runtime = 100'000;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// Makes this thread treat denormal numbers as zero. A decaying recurrent state reaches them, and an operation on one
// takes some hundred cycles.
void flush_denormals() {
#if defined(__x86_64__)
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _mm_setcsr(_mm_getcsr() | 0x40);  // denormal operands too
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" ::"r"(control | uint64_t{1} << 24));  // FZ: operands and results
#endif
}

}  // namespace

int64_t PhaseClock::now() {
#if defined(__x86_64__)
  return static_cast<int64_t>(__rdtsc());
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}

double PhaseClock::ticks_per_second() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const int64_t from = now();
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const int64_t ticks = now() - from;
  return static_cast<double>(ticks) / std::chrono::duration<double>(Clock::now() - start).count();
}

void Patience::wait_begins(int64_t units) {
  // A running thread finishes its unit within microseconds: half a unit's time on average, two for slow memory.
  constexpr Clock::duration kLeast = std::chrono::microseconds(10), kUsual = std::chrono::microseconds(30);
  const Clock::time_point now = Clock::now();
  limit_ = units == 0 ? kUsual : std::max(kLeast, 2 * (now - since_) / units);
  since_ = now;
}

std::pair<int64_t, int64_t> Team::node_panels(int64_t panels, int node) const {
  const int64_t first = first_panel(panels, node, pool_.nodes());
  return {first, first_panel(panels, node + 1, pool_.nodes()) - first};
}

std::atomic<uint64_t>* Team::flags(int64_t units, int node) const {
  return units > kMostFlags ? nullptr : &pool_.flags_[node * kMostFlags];
}

void Team::look_ahead() {
  constexpr uint32_t kMostOperations = 4;  // the number of small operations between two that read weights
  if (static_cast<int32_t>(looked_at_ - op_) <= 0) {
    looked_at_ = op_;
    found_ = false;
    ahead_ = {};
  }
  if (ahead_.fetch() || found_) return;
  const uint32_t next = looked_at_ + 1, published = pool_.published_.load(std::memory_order_acquire);
  if (next - op_ > kMostOperations || static_cast<int32_t>(published - next) <= 0) return;
  looked_at_ = next;
  const Pool::Slot& slot = pool_.slots_[next % Pool::kSlots];
  if (slot.reads_first == nullptr) return;
  ahead_ = slot.reads_first(slot.bytes, *this);
  found_ = !ahead_.is_empty();
  if (ahead_.fetch()) pool_.fetched_ahead_.fetch_add(1, std::memory_order_relaxed);
}

void Team::run_ahead() {
  const int64_t began = times_.on() ? PhaseClock::now() : 0;
  const uint32_t published = pool_.published_.load(std::memory_order_acquire);
  uint32_t next = op_ + 1;
  alone_ = true;
  for (; static_cast<int32_t>(published - next) > 0; ++next) {
    Pool::Slot& slot = pool_.slots_[next % Pool::kSlots];
    if (!slot.is_small) break;
    slot.run(slot.bytes, *this);
    slot.is_done.store(true, std::memory_order_relaxed);
  }
  alone_ = false;
  if (times_.on() && next != op_ + 1) ahead_ticks_ += PhaseClock::now() - began;
}

std::pair<int64_t, int64_t> Team::first_pair(int64_t outer, int64_t panels) const {
  const auto [first, count] = node_panels(panels, node_);
  const int thread0 = pool_.node_threads_[node_], threads = pool_.node_threads_[node_ + 1] - thread0;
  const int64_t unit = outer * count * (thread_ - thread0) / threads;
  return count == 0 ? std::pair<int64_t, int64_t>(0, first) : std::pair(unit / count, first + unit % count);
}

void Team::skip_phases(int count) {
  if (count == 0) return;
  phase_ += static_cast<uint64_t>(count);
  number_ = static_cast<uint16_t>(number_ + count);
  pool_.end(phase_, count);
}

void* Team::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();  // freed first: never two buffers at a time
    scratch_.reset(::operator new(bytes, std::align_val_t(64)));
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

Pool::Pool(const std::vector<ThreadPlacement>& placements)
    : slots_(kSlots), ranges_(placements.size()), flags_(Team::kMostFlags * (1 + placements.back().node)) {
  const int threads = static_cast<int>(placements.size());
  take_short_slices();  // also for the thread that queues operations, because the pool waits for it
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
  while (!all_left(next - kSlots + 1)) {
    std::this_thread::sleep_for(
        std::chrono::microseconds(50));  // a caller a thousand operations ahead can wait
  }
  return slots_[next % kSlots];
}

void Pool::publish() {
  published_.fetch_add(1, std::memory_order_release);
  published_.notify_all();
}

void Pool::repeat(const OperationRecord& record) {
  for (const Operation& operation : record) {
    Slot& slot = next_slot();
    static_cast<Operation&>(slot) = operation;
    slot.is_done.store(false, std::memory_order_relaxed);
    publish();
  }
}

void Pool::time_phases(size_t room) {
  wait();
  for (const auto& team : teams_) team->times_.start(room);
}

// Called only by the submitting thread. There are only a few types.
uint16_t Pool::operation_number(const char* type_name) {
  for (size_t i = 0; i < operation_types_.size(); ++i) {
    if (operation_types_[i] == type_name) return static_cast<uint16_t>(i);
  }
  operation_types_.push_back(type_name);
  char* readable = abi::__cxa_demangle(type_name, nullptr, nullptr, nullptr);
  operation_names_.emplace_back(readable == nullptr ? type_name : readable);
  std::free(readable);
  return static_cast<uint16_t>(operation_types_.size() - 1);
}

void Pool::wait() {
  const uint32_t target = published_.load(std::memory_order_relaxed);
  for (;;) {
    const uint32_t drained = drained_.load(std::memory_order_acquire);
    if (all_left(target)) return;
    drained_.wait(drained, std::memory_order_acquire);
  }
}

void Pool::thread_main(int thread, const std::vector<int>& cpus) {
  bind_to(cpus);
  take_short_slices();
  flush_denormals();
  Team& team = *teams_[thread];
  for (uint32_t next = 0;; ++next) {
    wait_while(published_, next, kSpins);
    if (stop_.load()) return;
    Slot& slot = slots_[next % kSlots];
    team.op_ = next;
    team.operation_ = slot.number;
    team.number_ = 0;
    if (!slot.is_done.load(std::memory_order_relaxed)) slot.run(slot.bytes, team);
    leave(team);
  }
}

// A thread that reaches the end of the queue checks whether it is the last; only then can wait() return.
void Pool::leave(Team& team) {
  const uint32_t left = team.op_ + 1;
  team.left_.store(left, std::memory_order_seq_cst);
  if (left == published_.load(std::memory_order_acquire) && all_left(left)) {
    drained_.fetch_add(1, std::memory_order_release);
    drained_.notify_all();
  }
}

// Returns whether all threads are done with the first `operations` operations and no longer read anything of them.
bool Pool::all_left(uint32_t operations) const {
  return std::all_of(teams_.begin(), teams_.end(), [&](const std::unique_ptr<Team>& team) {
    return static_cast<int32_t>(team->left_.load(std::memory_order_seq_cst) - operations) >= 0;
  });
}

// Every thread calls this for a phase without units.
void Pool::end(uint64_t phase, int count) {
  uint32_t before = static_cast<uint32_t>(phase) - static_cast<uint32_t>(count);
  if (over_.load(std::memory_order_relaxed) != before) return;
  if (over_.compare_exchange_strong(before, static_cast<uint32_t>(phase), std::memory_order_acq_rel)) {
    over_.notify_all();
  }
}

void Pool::wait_for(uint64_t phase) {
  for (;;) {
    const uint32_t over = over_.load(std::memory_order_acquire);
    if (is_over(phase)) return;
    over_.wait(over, std::memory_order_acquire);
  }
}

}  // namespace moeserve
