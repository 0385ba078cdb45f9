// The indexer of sparse attention, on the CPU pool: stores index keys, scores them, and chooses the keys that each row
// attends to. kernels/indexer/reference.py has the arithmetic.
#pragma once

#include "attention.h"
#include "key_choice.h"
#include "ops.h"

namespace moeserve {

constexpr int kMostIndexDim = 1024;  // numbers of an index key, at most

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out);

// Normalises and rotates the rows' index keys and stores them, and rotates their queries. The first `rotary` numbers of
// a head rotate, as halves; pairs of neighbours are first moved half a rotary width apart.
struct IndexStoreOp {
  const Kernels* k;
  float* q;           // [n, heads, dim], in place; nullptr with 0 heads: none
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

// Normalises, rotates and stores the index keys of blocks of a plan's keys, and normalises and rotates the rows' queries.
// Norms are RMSNorms; the first `rotary` numbers of a head rotate, as halves. A block's index key is the mean of its
// keys, rotated as at its first position, in the slot of its last key. Until the block is complete, its slots hold the
// unchanged keys.
struct IndexBlocksOp {
  const Kernels* k;
  const AttentionPlan* plan;
  float* q;             // [n, heads, dim], in place
  const float* keys;    // [n, dim]
  const float* q_norm;  // [dim] each
  const float* k_norm;
  float eps;
  // Angles of queries, and of the first keys of the rows' blocks: [positions, rotary / 2], or by row.
  const float* cos;
  const float* sin;
  const float* first_cos;
  const float* first_sin;
  bool by_row;
  uint16_t* pool;  // [slots, dim] of this layer
  int heads, dim, rotary;
  int pooled;  // keys of a block; 1: each key has an index key of its own
  void operator()(Team& team) const;

 private:
  void rotate(const float* cosines, const float* sines, int64_t angle, float* x) const;
  void prepare_queries(int64_t row, int position) const;
  void complete(int64_t row, int position, const int32_t* slots) const;
};

// Stores the rows' keys and gates, and the index key of each block that the rows complete: a weighted mean of its
// normalised keys, in the first half of its last key's slot. A slot holds a token's key and gate.
struct IndexPoolsOp {
  const Kernels* k;
  const AttentionPlan* plan;
  float* keys;         // [n, dim]; normalised in place
  const float* gates;  // [n, dim]
  const float* norm;   // [dim]: LayerNorm's weight and bias
  const float* bias;
  float eps;
  const float* ape;  // [pooled, dim]: what is added to the gates, by place in the block
  uint16_t* pool;    // [slots, 2 * dim] of this layer
  int dim;
  int pooled;  // keys of a block
  void operator()(Team& team) const;

 private:
  void keep(int64_t row, int64_t slot, bool completes) const;
  void complete(int64_t row, int position, const int32_t* slots) const;
};

// Scores the index keys of the plan's choosing rows, and writes the KV slots of the chosen keys to the plan's lists.
struct ChooseKeysOp {
  const Kernels* k;
  AttentionPlan* plan;
  const float* q;        // [n, heads, dim], from IndexStoreOp
  const float* weights;  // [n, heads]; nullptr: all are 1
  const uint16_t* pool;  // [slots, stride]: index keys are the first `dim` numbers
  int64_t stride;
  int heads, dim;  // of the queries; if each KV head chooses, as many
  void operator()(Team& team) const;

 private:
  struct Buffers;
  void score(Team& team, const KeyChoice::Part& part) const;
  void score_blocks(const KeyChoice::Tile& tile, int begin, int end, const Buffers& b) const;
  void score_by_maximum(const KeyChoice::Tile& tile, int begin, int end, const Buffers& b) const;
  void score_keys(const int32_t* slots, int count, int queries, const Buffers& b) const;
  void choose(Team& team, const KeyChoice::Tile& tile, int row, int head) const;
};

}  // namespace moeserve
