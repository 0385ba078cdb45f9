// Memory that a thread will read soon. The thread prefetches it into its cache while it waits for others, so that
// memory is not idle at the end of a phase, or in phases that read almost nothing (norms, RoPE, the choice of experts).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace moeserve {

class BytesAhead {
 public:
  static constexpr ptrdiff_t kMost = 1 << 16;  // 256 KB was no better

  BytesAhead() = default;
  // step: bytes from one needed line to the next.
  BytesAhead(const uint8_t* data, ptrdiff_t count, int step = 64)
      : line_(data), end_(data + std::min(count, kMost / 64 * step)), step_(step) {}
  // `bytes` in each of `count` slots, `stride` bytes apart.
  BytesAhead(const uint8_t* base, ptrdiff_t stride, const int32_t* slots, ptrdiff_t count, int bytes)
      : base_(base),
        slots_(slots),
        last_slot_(slots + std::min(count, kMost / bytes)),
        stride_(stride),
        bytes_(bytes) {}

  bool is_empty() const { return line_ >= end_ && slots_ == last_slot_; }

  // Prefetches a few more lines. Returns false when none are left.
  bool fetch() {
    for (int line = 0; line < 8; ++line, line_ += step_) {
      if (line_ >= end_ && !next_slot()) return false;
      __builtin_prefetch(line_, 0, 2);
    }
    return true;
  }

 private:
  bool next_slot() {
    if (slots_ == last_slot_) return false;
    line_ = base_ + *slots_++ * stride_;
    end_ = line_ + bytes_;
    return true;
  }
  const uint8_t *line_ = nullptr, *end_ = nullptr, *base_ = nullptr;
  const int32_t *slots_ = nullptr, *last_slot_ = nullptr;
  ptrdiff_t stride_ = 0;
  int step_ = 64, bytes_ = 0;
};

}  // namespace moeserve
