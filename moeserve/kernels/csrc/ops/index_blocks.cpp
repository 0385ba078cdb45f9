// IndexBlocksOp of indexer.h. kernels/indexer/blocks.py has the arithmetic.
#include <algorithm>

#include "indexer.h"

namespace moeserve {

void IndexBlocksOp::rotate(const float* cosines, const float* sines, int64_t angle, float* x) const {
  const int64_t at = angle * (rotary / 2);
  k->rope(x, cosines + at, sines + at, rotary);
}

void IndexBlocksOp::prepare_queries(int64_t row, int position) const {
  for (int h = 0; h < heads; ++h) {
    float* head = q + (row * heads + h) * dim;
    k->rms_norm(head, q_norm, eps, dim, head);
    rotate(cos, sin, by_row ? row : position, head);
  }
}

// Makes the index key of the block whose last key this is. Earlier keys are read from their slots, even keys of this
// step, so that they are rounded alike however the sequence is divided into steps.
void IndexBlocksOp::complete(int64_t row, int position, const int32_t* slots) const {
  alignas(64) float key[kMostIndexDim], one[kMostIndexDim];
  std::fill_n(key, dim, 0.0f);
  for (int p = position + 1 - pooled; p < position; ++p) {
    k->from_half(pool + int64_t{slots[p]} * dim, dim, one);
    k->axpy(1.0f, one, dim, key);
  }
  k->axpy(1.0f, keys + row * dim, dim, key);
  k->scale(1.0f / static_cast<float>(pooled), dim, key);
  k->rms_norm(key, k_norm, eps, dim, key);
  rotate(first_cos, first_sin, by_row ? row : position + 1 - pooled, key);
  k->to_half(key, dim, pool + int64_t{slots[position]} * dim);
}

void IndexBlocksOp::operator()(Team& team) const {
  const auto for_rows = [&](const auto& each) { plan->choice.for_rows(team, pooled, each); };
  if (pooled == 1) team.last_phase();
  for_rows([&](int64_t row, int position, const int32_t* slots, bool completes) {
    prepare_queries(row, position);
    if (!completes) k->to_half(keys + row * dim, dim, pool + int64_t{slots[position]} * dim);
    if (pooled == 1) complete(row, position, slots);
  });
  if (pooled == 1) return;
  team.last_phase();
  for_rows([&](int64_t row, int position, const int32_t* slots, bool completes) {
    if (completes) complete(row, position, slots);
  });
}

}  // namespace moeserve
