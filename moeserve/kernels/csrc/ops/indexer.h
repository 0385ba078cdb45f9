// The indexer of sparse attention, on the CPU pool: stores index keys, scores them, and chooses the keys that each row
// attends to. kernels/indexer/reference.py has the arithmetic.
#pragma once

#include "attention.h"
#include "key_choice.h"
#include "ops.h"

namespace moeserve {

constexpr int kMostIndexDim = 1024;  // numbers of an index key, at most

// Normalises and rotates the rows' index keys and stores them, and rotates their queries. The first `rotary` numbers of
// a head rotate, as halves; pairs of neighbours are first moved half a rotary width apart.
struct IndexStoreOp {
  const Kernels* k;
  float* q;           // [n, heads, dim], in place
  const float* keys;  // [n, dim]
  const float* norm;  // [dim]: LayerNorm's weight and bias
  const float* bias;
  float eps;
  const float* cos;  // [angles, rotary / 2]
  const float* sin;
  const int32_t* positions;  // [n], the row of cos and sin for each row; nullptr: row i uses row i
  const int32_t* slots;      // [n]
  uint16_t* pool;            // [slots, dim] of this layer
  int n, heads, dim, rotary;
  bool in_pairs;
  void operator()(Team& team) const;

 private:
  void rotate(int64_t t, float* x) const;
};

// Scores the index keys of a part of `choice`. q [n, heads, dim]; weights [n, heads], or nullptr: all are 1; pool [slots,
// dim]: a block's index key is in the slot of its last key.
struct IndexScorer {
  const Kernels* k;
  const float *q, *weights;
  const uint16_t* pool;
  int heads, dim;
  void score(Team& team, KeyChoice& choice, const KeyChoice::Part& part) const;
};

// Scores the index keys of the plan's choosing rows, and writes the KV slots of the chosen keys to the plan's lists.
struct ChooseKeysOp {
  AttentionPlan* plan;
  IndexScorer scorer;  // of IndexStoreOp's queries
  void operator()(Team& team) const;

 private:
  void choose(Team& team, const KeyChoice::Tile& tile, int row) const;
};

}  // namespace moeserve
