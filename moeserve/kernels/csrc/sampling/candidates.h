// Finds a row's candidates: a scan gives the maxima of its blocks, from which candidates above a threshold are
// gathered.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "sampling/sampling.h"
#include "sampling/sampling_cut.h"

namespace moeserve {

inline int blocks(int vocab) { return (vocab + kMaxBlock - 1) / kMaxBlock; }

inline float row_max(const Scratch& s, int vocab) {
  return *std::max_element(s.block_max.get(), s.block_max.get() + blocks(vocab));
}

// Fills block_max and `max`. Returns false if the row cannot be sampled: not finite, or only -inf.
inline bool scan(const float* x, int vocab, Scratch& s, float& max) {
  if (!s.passes->scan(x, vocab, s.block_max.get())) return false;
  max = row_max(s, vocab);
  return max > -std::numeric_limits<float>::infinity();
}

inline int argmax(const float* x, int vocab, float max, const Scratch& s) {
  const int block = static_cast<int>(std::find(s.block_max.get(), s.block_max.get() + blocks(vocab), max) -
                                     s.block_max.get());
  return static_cast<int>(std::find(x + block * kMaxBlock, x + vocab, max) - x);
}

// Returns a value that at least k entries of the scanned row reach: the k-th largest block maximum.
inline float reached_by(int k, int vocab, Scratch& s) {
  const int n = blocks(vocab);
  if (k > n) return -std::numeric_limits<float>::infinity();
  float* rank = s.block_rank.get();
  std::memcpy(rank, s.block_max.get(), n * sizeof(float));
  std::nth_element(rank, rank + k - 1, rank + n, std::greater<>());
  return rank[k - 1];
}

// Makes the entries of the scanned row that are >= floor candidates; never -inf. Returns their number.
inline int gather(const float* x, int vocab, double floor, Scratch& s) {
  floor = std::max<double>(floor, std::numeric_limits<float>::lowest());
  int n = 0;
  for (int b = 0; b < blocks(vocab); ++b) {
    if (s.block_max[b] < floor) continue;
    const int end = std::min(vocab, (b + 1) * kMaxBlock);
    for (int i = b * kMaxBlock; i < end; ++i) {
      s.ids[n] = i;
      s.values[n] = x[i];
      n += x[i] >= floor;
    }
  }
  return n;
}

// Drops candidates whose key is past the cut, keeping the order. `keys` may be the values themselves. Returns the
// number that stay.
inline int keep_head(int n, const float* keys, uint32_t top, Cut cut, Scratch& s) {
  int kept = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t d = top - order(keys[i]);
    s.ids[kept] = s.ids[i];
    s.values[kept] = s.values[i];
    kept += d < cut.distance || (d == cut.distance && cut.ties-- > 0);
  }
  return kept;
}

// Leaves the k largest as candidates. The row must have been scanned.
inline int gather_top_k(const float* x, int vocab, int k, double floor, float max, Scratch& s) {
  const int n = gather(x, vocab, std::max<double>(reached_by(k, vocab, s), floor), s);
  if (n <= k) return n;
  const uint32_t top = order(max);
  return keep_head(n, s.values.get(), top, find_cut(s.values.get(), n, top, [](int) { return 1.0; }, k), s);
}

inline double total(const Scratch& s, int n) {
  double sum = 0;
  for (int b = 0; b * kSumBlock < n; ++b) sum += s.block_sum[b];
  return sum;
}

}  // namespace moeserve
