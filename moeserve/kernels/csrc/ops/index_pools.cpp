// IndexPoolsOp of indexer.h. kernels/indexer/pools.py has the arithmetic.
#include <algorithm>
#include <cmath>

#include "indexer.h"

namespace moeserve {

// Keeps a token's normalised key and its gate until the block is complete; of the last key of a block only the gate, as
// its slot takes the block's index key.
void IndexPoolsOp::keep(int64_t row, int64_t slot, bool completes) const {
  float* key = keys + row * dim;
  layer_norm(key, norm, bias, eps, dim, key);
  uint16_t* kept = pool + slot * 2 * dim;
  if (!completes) k->to_half(key, dim, kept);
  k->to_half(gates + row * dim, dim, kept + dim);
}

// Makes the index key of the block whose last key this is. The other keys and all gates are read from their slots, even
// those of this step, so that they are rounded alike however the sequence is divided into steps.
void IndexPoolsOp::complete(int64_t row, int position, const int32_t* slots) const {
  alignas(64) float most[kMostIndexDim], sum[kMostIndexDim], total[kMostIndexDim], kept[2 * kMostIndexDim];
  std::fill_n(most, dim, -INFINITY);
  std::fill_n(sum, dim, 0.0f);
  std::fill_n(total, dim, 0.0f);
  const int first = position + 1 - pooled;
  const auto gate = [&](int p) {
    k->from_half(pool + int64_t{slots[p]} * 2 * dim + dim, dim, kept + dim);
    k->axpy(1.0f, ape + int64_t{p - first} * dim, dim, kept + dim);
  };
  for (int p = first; p <= position; ++p) {
    gate(p);
    for (int d = 0; d < dim; ++d) most[d] = std::max(most[d], kept[dim + d]);
  }
  for (int p = first; p <= position; ++p) {
    gate(p);
    const float* key = keys + row * dim;
    if (p < position) {
      k->from_half(pool + int64_t{slots[p]} * 2 * dim, dim, kept);
      key = kept;
    }
    for (int d = 0; d < dim; ++d) {
      const float weight = std::exp(kept[dim + d] - most[d]);
      sum[d] += weight;
      total[d] += weight * key[d];
    }
  }
  for (int d = 0; d < dim; ++d) total[d] /= sum[d];
  k->to_half(total, dim, pool + int64_t{slots[position]} * 2 * dim);
}

void IndexPoolsOp::operator()(Team& team) const {
  const auto for_rows = [&](const auto& each) { plan->choice.for_rows(team, pooled, each); };
  for_rows([&](int64_t row, int position, const int32_t* slots, bool completes) {
    keep(row, slots[position], completes);
  });
  team.last_phase();
  for_rows([&](int64_t row, int position, const int32_t* slots, bool completes) {
    if (completes) complete(row, position, slots);
  });
}

}  // namespace moeserve
