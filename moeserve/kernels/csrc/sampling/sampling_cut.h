// The threshold of top-k and top-p: where a head of the candidates ends, without sorting them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>

namespace moeserve {

// Where a head of the candidates ends: those nearer to the maximum stay, and the first `ties` as near.
struct Cut {
  uint32_t distance;
  int ties;
};

// The position of x among all floats, from -inf up; +0 and -0 are one. Distances are differences of it.
inline uint32_t order(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The shortest head of the candidates, in falling order, whose mass (of candidate i, equal among equal
// logits) sums to `target` or more; all of them if none does. A radix search on the distance to the maximum,
// 11 bits at a time.
template <class Mass>
Cut find_cut(const float* values, int n, uint32_t top, Mass mass, double target) {
  constexpr int kBits = 11;
  double bin_mass[1 << kBits];
  int bin_count[1 << kBits];
  double before = 0;  // mass of what is surely in
  uint64_t prefix = 0;
  for (int shift = 2 * kBits;; shift -= kBits) {
    std::fill(std::begin(bin_mass), std::end(bin_mass), 0.0);
    std::fill(std::begin(bin_count), std::end(bin_count), 0);
    for (int i = 0; i < n; ++i) {
      const uint64_t d = top - order(values[i]);
      if (d >> (shift + kBits) != prefix) continue;
      const int bin = d >> shift & ((1 << kBits) - 1);
      bin_mass[bin] += mass(i);
      ++bin_count[bin];
    }
    int last = -1;  // where the head ends: the first bin to reach the target, or else the last one used
    for (int bin = 0; bin < 1 << kBits; ++bin) {
      if (!bin_count[bin]) continue;
      if (last >= 0) before += bin_mass[last];
      last = bin;
      if (before + bin_mass[bin] >= target) break;
    }
    prefix = prefix << kBits | last;
    if (shift > 0) continue;
    const double wanted = std::ceil((target - before) / (bin_mass[last] / bin_count[last]));
    const int ties = wanted < bin_count[last] ? std::max(1, static_cast<int>(wanted)) : bin_count[last];
    return {static_cast<uint32_t>(prefix), ties};
  }
}

}  // namespace moeserve
