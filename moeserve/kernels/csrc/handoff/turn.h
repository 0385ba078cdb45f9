// Turns: pieces of work that the pool computes for a GPU, one after another. One thread prepares a turn for all threads
// that take part. Turns are numbered from 1 over the life of a hand-off; the numbers wrap.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "ops/ops.h"
#include "wakes.h"

namespace moeserve {

struct Turn {
  ExpertsOp op{};
  int32_t has_work = 0;  // 0: nothing to compute
  int32_t is_last = 1;   // of its layer in this step
};

// Raises `latest` to `number`. Returns false if it is already there or beyond.
inline bool advance(std::atomic<uint32_t>& latest, uint32_t number) {
  uint32_t before = latest.load(std::memory_order_acquire);
  while (static_cast<int32_t>(number - before) > 0) {
    if (latest.compare_exchange_weak(before, number, std::memory_order_acq_rel)) return true;
  }
  return false;
}

class Turns {
 public:
  // Returns whether this turn, or a later one, has been prepared.
  bool is_ready(uint32_t number) const {
    return static_cast<int32_t>(ready_.load(std::memory_order_acquire) - number) >= 0;
  }
  // Returns true to exactly one thread, which then prepares the turn. Callers have seen all earlier turns end.
  bool claim(uint32_t number) { return advance(claimed_, number); }
  void publish(uint32_t number, const Turn& turn) {
    std::atomic_thread_fence(
        std::memory_order_release);  // a reader that sees any of the words also sees the claim
    const Words words = std::bit_cast<Words>(turn);
    for (size_t i = 0; i < words.size(); ++i) words_[i].store(words[i], std::memory_order_relaxed);
    ready_.store(number, std::memory_order_release);
    wakes_.wake();
  }
  // Copies the published turn. Returns false if a later turn has been claimed.
  bool read(uint32_t number, Turn* turn) const {
    Words words;
    for (size_t i = 0; i < words.size(); ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (claimed_.load(std::memory_order_relaxed) != number) return false;
    *turn = std::bit_cast<Turn>(words);
    return true;
  }
  // Returns true to exactly one thread, which then answers. All results of the turn must be complete.
  bool end(uint32_t number) { return advance(ended_, number); }

  // for threads that sleep until a turn is published or given up
  Wakes& wakes() { return wakes_; }

 private:
  static_assert(std::is_trivially_copyable_v<Turn> && sizeof(Turn) % sizeof(uint64_t) == 0);
  using Words = std::array<uint64_t, sizeof(Turn) / sizeof(uint64_t)>;

  alignas(64) std::atomic<uint32_t> claimed_{0};
  alignas(64) std::atomic<uint32_t> ready_{0};
  alignas(64) std::atomic<uint32_t> ended_{0};
  alignas(64) Wakes wakes_;
  alignas(64) std::array<std::atomic<uint64_t>, std::tuple_size_v<Words>> words_{};
};

}  // namespace moeserve
