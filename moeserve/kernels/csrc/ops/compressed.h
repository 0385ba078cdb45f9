// Compressed attention on the CPU pool: what comes before and after attention itself. compressed/reference.py has the
// arithmetic. Rotations take pairs of neighbours among the last `rotary` numbers of a head, in place.
#pragma once

#include "compressed_plan.h"
#include "delta_net.h"
#include "indexer.h"

namespace moeserve {

constexpr int kMostCompressedDim = 1024;  // numbers of an entry, at most

// The angles of the step's rows.
struct TailRotation {
  const float *cos, *sin;    // [angles, rotary / 2]
  const int32_t* positions;  // [n]: the row of cos and sin
  int rotary;
  // Rotates the last `rotary` of x's `dim` numbers by the angles of a position; direction -1 turns them back.
  void rotate(float* x, int dim, int64_t position, float direction = 1.0f) const;
};

// Normalises q's heads (without a weight), scales and rotates them; normalises and rotates the tokens' keys, which are
// their values too, and stores them. Rotates the index queries, if there are any.
struct CompressedStoreOp {
  const Kernels* k;
  float* q;           // [n, heads, dim], in place
  const float* kv;    // [n, dim]
  const float* norm;  // [dim]
  float eps, scale;
  TailRotation angles;
  const CompressedPlan* plan;  // says where the tokens' keys are stored
  uint16_t* keys;              // [rows, dim]
  float* index_q;              // [n, index_heads, index_dim], in place; or nullptr
  int n, heads, dim, index_heads, index_dim;
  void operator()(Team& team) const;
};

// A compressor's weights and sizes. An entry is the sum over a block of `ratio` tokens of softmax(gate + bias) * kv, by
// column. If `overlaps`, tokens of the previous block take part with their first `dim` columns, and tokens of the block
// itself with their last `dim` columns.
struct Compressor {
  const float* bias;  // [ratio, width]
  int ratio, dim;
  bool overlaps;
  int width() const { return overlaps ? 2 * dim : dim; }  // columns of kv and gate
  // A sequence's state: of the entry in progress the greatest gate, the sum of weights and the weighted sum, [3, dim];
  // overlapping then that of the entry after it. A sum of weights of 0: no token yet.
  int64_t state_values() const { return int64_t{3} * width(); }
  // A draft's record: kv, gate, then its place in the block.
  int64_t pending_values() const { return 2 * width() + kPlaceColumns; }
  static constexpr int kPlaceColumns = 32;
  static constexpr int kColumns = 64;  // of a unit of work
  // Adds a token at `place` of its block to `count` columns from `column` on; of a block's last token, writes the entry.
  // state: of the layer, [.., dim]; entry may be kv.
  void add(float* state, int place, const float* kv, const float* gate, int column, int count,
           float* entry) const;
};

// Adds the step's tokens to their sequences' states, and stores the entries of blocks that they complete, normalised and
// rotated by the angles of the block's first position.
struct CompressOp {
  const Kernels* k;
  Compressor of;
  float* kv;          // [n, of.width()]; entries overwrite it
  const float* gate;  // [n, of.width()]
  const float* norm;  // [of.dim]
  float eps;
  TailRotation angles;
  const int32_t* slots;  // [n]
  uint16_t* pool;        // [slots, of.dim]: an entry is in the slot of its block's last token
  float* states;         // this compressor's part of slot 0
  int64_t slot_values;
  StateSequences sequences;
  float* pending;  // [records, of.pending_values()]: drafts, which do not move the state
  int n;
  void operator()(Team& team) const;

 private:
  void add_tokens(int sequence, int column) const;
};

// Moves states on by each sequence's first accepted[i] drafts, which lie in pending from first[i] on.
struct CommitCompressedOp {
  Compressor of;
  float* states;
  int64_t slot_values;
  const float* pending;
  int num;
  const int32_t *slot, *first, *accepted;
  void operator()(Team& team) const;
};

// Scores the index keys of the plan's choosing rows, and writes the entries that they choose to their lists.
struct ChooseEntriesOp {
  const Kernels* k;
  CompressedPlan* plan;
  const float* q;        // [n, heads, dim], rotated
  const float* weights;  // [n, heads]
  const uint16_t* pool;  // [slots, dim]: an entry's index key is in the slot of its block's last token
  int heads, dim;
  void operator()(Team& team) const;

 private:
  void score(Team& team, const KeyChoice::Part& part) const;
  void choose(Team& team, const KeyChoice::Tile& tile, int row) const;
};

// Copies the plan's step keys to their rings.
struct KeepKeysOp {
  const CompressedPlan* plan;
  uint16_t* keys;  // [rows, dim]
  int dim;
  void operator()(Team& team) const;
};

// Rotates attention's output back by the angles of the row's position, so that only relative positions remain; then
// writes its int8 form.
struct RotateBackOp {
  const Kernels* k;
  TailRotation angles;
  int n, heads, dim;
  Activations x;  // [n * any, heads * dim / any]
  void operator()(Team& team) const;
};

}  // namespace moeserve
