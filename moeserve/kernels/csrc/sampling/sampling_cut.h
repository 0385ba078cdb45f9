// The threshold of top-k and top-p: finds where a head of the candidates ends without sorting them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>

namespace moeserve {

// The end of a head of the candidates: candidates nearer to the maximum stay, and the first `ties` at the same
// distance.
struct Cut {
  uint32_t distance;
  int ties;
};

// Returns the rank of x among all floats, counted from -inf; +0 and -0 are equal. Distances are differences of ranks.
inline uint32_t order(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Finds the shortest head of the candidates, in falling order, whose mass sums to `target` or more; all candidates if
// their mass is less. mass(i): of candidate i, equal for equal logits. A radix search on the distance to the maximum,
// 11 bits at a time.
template <class Mass>
Cut find_cut(const float* values, int n, uint32_t top, Mass mass, double target) {
  constexpr int kBits = 11;
  double bin_mass[1 << kBits];
  int bin_count[1 << kBits];
  double before = 0;  // mass of candidates certainly in the head
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
    int last =
        -1;  // last bin of the head: the first to reach the target, or else the last one that is not empty
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
