// Memory that a thread will read soon, fetched into its cache while it waits for others: so that the memory is not idle at
// the end of a phase, nor in the phases that read next to nothing (norms, RoPE, attention, the choice of experts).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace moeserve {

struct BytesAhead {
  static constexpr ptrdiff_t kMost = 1 << 16;  // 256 KB were no better

  BytesAhead() = default;
  BytesAhead(const uint8_t* data, ptrdiff_t count) : begin_(data), end_(data + std::min(count, kMost)) {}

  // A few lines more; false: there are none left.
  bool fetch() {
    for (int line = 0; line < 8 && begin_ < end_; ++line, begin_ += 64) __builtin_prefetch(begin_, 0, 2);
    return begin_ < end_;
  }

 private:
  const uint8_t *begin_ = nullptr, *end_ = nullptr;
};

}  // namespace moeserve
