#include "handoff.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace moeserve {
namespace {

using Clock = std::chrono::steady_clock;

// About 1 ms: longer than the GPU's part of a layer of a decode step. Beyond it a step is a prefill's, whose layers
// take the GPU milliseconds: the first thread then dozes between looks, the others sleep.
constexpr int kLayerSpins = 20000;
constexpr auto kDoze = std::chrono::microseconds(50);

constexpr int kFewExperts = 2;  // a panel of so many is still a small piece of work

constexpr auto kPoisonPeriod = std::chrono::milliseconds(1);

template <class T>
std::atomic_ref<T> flag(uint8_t* base, int layer) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(base + layer * Handoff::kFlagBytes));
}

constexpr uint32_t rows_of(uint32_t request) { return request & ~(Handoff::kImmediate | Handoff::kDeferred); }

}  // namespace

Handoff::Handoff(const Kernels* kernels, Pool& pool, std::vector<Layer> layers, uint8_t* requests,
                 uint8_t* answers, const std::array<Slot, 2>& slots, const Scratch& scratch, int max_tokens,
                 int top_k, double timeout_s)
    : kernels_(kernels),
      pool_(pool),
      layers_(std::move(layers)),
      requests_(requests),
      answers_(answers),
      slots_(slots),
      scratch_(scratch),
      max_tokens_(max_tokens),
      top_k_(top_k),
      timeout_s_(timeout_s),
      reads_(layers_.size()),
      watchdog_([this] { watch(); }) {
  for (const Layer& l : layers_) {
    if (l.down != nullptr) parts_.fit(pool_, max_tokens_ * top_k_, l.down->rows);
  }
}

Handoff::~Handoff() {
  if (served_.load() != begun_.load()) abandon("closed while a step was under way");
  pool_.wait();
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  watchdog_.join();
}

void Handoff::begin() {
  const uint32_t step = begun_.fetch_add(1) + 1;
  pool_.submit(ServeOp{this, step});
}

int64_t Handoff::expert_reads(const uint8_t* layers) const {
  int64_t reads = 0;
  for (size_t i = 0; i < reads_.size(); ++i)
    if (layers[i] != 0) reads += reads_[i].load(std::memory_order_relaxed);
  return reads;
}

std::string Handoff::error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Handoff::abandon(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = why;
  }
  failed_.store(true);
  answer_all();
  changed_.notify_all();
}

// Every thread of the pool runs this. A layer has two barriers: one before it, where the others wait while the first
// thread awaits the request and sorts its routes, and one between its two products.
void Handoff::serve(Team& team, uint32_t step) {
  Turn turn{step};
  for (;;) {
    if (team.thread() == 0) more_ = take(turn);
    team.barrier(kLayerSpins);
    if (!more_) break;
    const int layer = answering_;
    op_.compute(team, false);
    // All work is done when the first thread is through: it answers, and nobody waits for a thread that has lost its core.
    const bool is_first = unfinished_.fetch_sub(1, std::memory_order_acq_rel) == team.threads();
    if (is_first && layer >= 0) answer(layer);
  }
  team.barrier();  // all have read more_, which the next step writes
}

// Prepares the step's next work in op_ and answering_; false: the step is over. The first thread only.
bool Handoff::take(Turn& turn) {
  while (unfinished_.load(std::memory_order_acquire) != 0)
    relax();  // the others still read op_ and its scratch
  if (turn.deferred != 0) {
    const uint32_t rows = std::exchange(turn.deferred, 0);
    const int layer = turn.layer - 1;
    turn.added = true;
    answering_ = -1;
    return prepare(layer, slots_[layer % 2].deferred_ids, rows, slots_[turn.layer % 2].result, false);
  }
  while (turn.layer < static_cast<int>(layers_.size())) {
    const int layer = turn.layer++;
    if (layers_[layer].gate == nullptr) continue;
    const uint32_t request = await(layer, turn.step), rows = rows_of(request);
    if (failed_.load()) return false;
    if (rows > static_cast<uint32_t>(max_tokens_)) {
      abandon("layer " + std::to_string(layer) + ": " + std::to_string(rows) + " rows published");
      return false;
    }
    const bool add = std::exchange(turn.added, false);
    if ((request & kDeferred) != 0) turn.deferred = rows;
    if ((request & kImmediate) != 0) {
      answering_ = layer;
      return prepare(layer, slots_[layer % 2].ids, rows, slots_[layer % 2].result, add);
    }
    if (rows > 0) answer(layer);
    if (turn.deferred != 0) return take(turn);
  }
  served_.store(turn.step);
  return false;
}

bool Handoff::prepare(int layer, const int32_t* ids, uint32_t rows, float* out, bool add) {
  const Layer& l = layers_[layer];
  const Slot& slot = slots_[layer % 2];
  op_ = ExpertsOp{kernels_,
                  l.gate,
                  l.up,
                  l.down,
                  slot.y,
                  ids,
                  slot.weights,
                  static_cast<int>(rows),
                  top_k_,
                  scratch_.h,
                  scratch_.starts,
                  scratch_.active,
                  scratch_.routes,
                  l.expert_token_counts,
                  out,
                  add,
                  parts_.data(),
                  l.options};
  if (!op_.sort_routes()) {
    abandon("layer " + std::to_string(layer) + ": an expert was asked for that the CPU does not have");
    return false;
  }
  reads_[layer].fetch_add(scratch_.active[0], std::memory_order_relaxed);
  op_.sums_at_once = scratch_.active[0] <= kFewExperts;
  unfinished_.store(pool_.threads(), std::memory_order_relaxed);
  return true;
}

// The high half of the layer's request in this step; 0 also when all is given up.
uint32_t Handoff::await(int layer, uint32_t step) {
  awaited_.store(layer, std::memory_order_relaxed);
  for (int looks = 0; !failed_.load(std::memory_order_relaxed); ++looks) {
    const uint64_t now = request(layer);
    const auto ahead = static_cast<int32_t>(static_cast<uint32_t>(now) - step);
    if (ahead >= 0) {
      progress_.fetch_add(1, std::memory_order_relaxed);
      // A GPU that is a step further on had nothing for us here: it does not pass a request without its answer.
      return ahead == 0 ? static_cast<uint32_t>(now >> 32) : 0;
    }
    if (looks < kLayerSpins) {
      relax();
    } else {
      std::this_thread::sleep_for(kDoze);
    }
  }
  return 0;
}

void Handoff::answer(int layer) {
  progress_.fetch_add(1, std::memory_order_relaxed);
  flag<uint32_t>(answers_, layer).store(1, std::memory_order_release);
}

uint64_t Handoff::request(int layer) const {
  return flag<uint64_t>(requests_, layer).load(std::memory_order_acquire);
}

uint32_t Handoff::answered(int layer) const {
  return flag<uint32_t>(answers_, layer).load(std::memory_order_acquire);
}

// The watchdog's thread: looks four times in a timeout, at most once a second, whether what is under way still moves.
// Once something has failed, it answers whatever is asked, so that the GPU's stream comes to its end.
void Handoff::watch() {
  const auto timeout = std::chrono::duration<double>(timeout_s_);
  const auto period = std::min(timeout / 4, std::chrono::duration<double>(1.0));
  uint64_t seen = 0;
  Clock::time_point since = Clock::now();
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (failed_.load()) {
      answer_all();
      changed_.wait_for(lock, kPoisonPeriod);
      continue;
    }
    changed_.wait_for(lock, period);
    const uint64_t progress = progress_.load(std::memory_order_relaxed);
    const std::string still = what_stands_still();
    if (still.empty() || progress != seen) {
      seen = progress;
      since = Clock::now();
    } else if (Clock::now() - since >= timeout) {
      lock.unlock();
      abandon(still);
      lock.lock();
    }
  }
}

void Handoff::answer_all() {
  for (size_t layer = 0; layer < layers_.size(); ++layer) flag<uint32_t>(answers_, layer).store(1);
}

// Empty when nothing is under way.
std::string Handoff::what_stands_still() {
  const uint32_t begun = begun_.load(), served = served_.load();
  const std::string seconds = " for " + std::to_string(timeout_s_) + " s";
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const uint64_t r = request(static_cast<int>(layer));
    if (rows_of(r >> 32) == 0 || answered(static_cast<int>(layer)) != 0) continue;
    const std::string where = "layer " + std::to_string(layer);
    if (static_cast<int32_t>(static_cast<uint32_t>(r) - begun) > 0) {
      return "a step was launched without begin(): " + where + " has waited" + seconds;
    }
    return "the CPU pool has not answered " + where + seconds;
  }
  if (begun == served) return "";
  return "the GPU has not published layer " + std::to_string(awaited_.load()) + seconds;
}

}  // namespace moeserve
