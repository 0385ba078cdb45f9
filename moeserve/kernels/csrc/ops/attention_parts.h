// Code shared by the two ways of dividing attention among threads (attention.cpp, attention_sliced.cpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention.h"

namespace moeserve {

constexpr int kKeyBlock = 32;  // keys per attend_block call
constexpr int kValueSlice =
    32;  // columns of a head's values per slice; also the columns that share a q8_0 scale

inline int segments_of(const AttentionPlan::Tile& tile) {
  return (tile.end + AttentionPlan::kSegment - 1) / AttentionPlan::kSegment;
}

// Returns the number of key blocks of a tile in a segment.
inline int blocks_of(const AttentionPlan::Tile& tile, int segment) {
  const int keys = tile.end - segment * AttentionPlan::kSegment;
  return (std::min(keys, AttentionPlan::kSegment) + kKeyBlock - 1) / kKeyBlock;
}

// Returns the first position that the token at `position` sees.
inline int first_key(const AttentionOp& op, int position) {
  return op.window > 0 ? std::max(0, position - op.window + 1) : 0;
}

// Returns the first segment that the tile's tokens see; earlier ones are not read.
inline int first_segment(const AttentionOp& op, const AttentionPlan::Tile& tile) {
  return first_key(op, tile.position) / AttentionPlan::kSegment;
}

// The keys of a segment that a tile sees, in blocks that begin at multiples of kKeyBlock for every tile, so that a
// query's arithmetic does not depend on its neighbours.
struct KeyRange {
  int begin, end;
};
inline KeyRange keys_of(const AttentionOp& op, const AttentionPlan::Tile& tile, int segment) {
  return {std::max(segment * AttentionPlan::kSegment, first_key(op, tile.position) / kKeyBlock * kKeyBlock),
          std::min((segment + 1) * AttentionPlan::kSegment, tile.end)};
}

// Computes which keys of the block at key0 each query of the tile sees: first[i] .. end[i] - 1. Query i belongs to
// token i / group.
inline void seen_keys(const AttentionOp& op, const AttentionPlan::Tile& tile, int group, int key0, int count,
                      int* first, int* end) {
  for (int i = 0; i < tile.count * group; ++i) {
    const int position = tile.position + i / group;
    first[i] = std::clamp(first_key(op, position) - key0, 0, kKeyBlock);
    end[i] = std::clamp(tile.end_of(i / group) - key0, 0, count);
  }
}

// Caps the scores of n queries with a block's keys, [n][kKeyBlock], if the model has a cap.
inline void cap_scores(const AttentionOp& op, int n, float* scores) {
  if (op.score_cap > 0.0f) op.k->softcap(op.score_cap, n * kKeyBlock, scores);
}

// Returns the factor that turns the weighted sum of values into their mean: 1 / the softmax's denominator. A sink is an
// additional logit without a value; it is added last and may raise the maximum.
inline float normaliser(const AttentionOp& op, int64_t head, Softmax s) {
  if (op.sinks == nullptr) return 1.0f / s.sum;
  const float m = std::max(s.max, op.sinks[head]);
  const float factor = std::exp(s.max - m);
  return factor / (s.sum * factor + std::exp(op.sinks[head] - m));
}

// Merges a segment, of `dim` numbers, into the results that a query of the tile's token `token` has from the segments
// before.
inline void merge_query(const AttentionOp& op, const AttentionPlan::Tile& tile, int token, int segment,
                        int dim, Softmax& into, float* into_acc, const Softmax& from, const float* from_acc) {
  const int first = first_key(op, tile.position + token) / AttentionPlan::kSegment;
  if (segment < first || segment > (tile.end_of(token) - 1) / AttentionPlan::kSegment) return;
  if (segment == first) {  // nothing to merge with: this query's first segment, though not the tile's
    into = from;
    std::copy_n(from_acc, dim, into_acc);
    return;
  }
  merge_segments(*op.k, into, into_acc, from, from_acc, dim);
}

// Returns the factor that a head's gate applies to its result.
inline float head_factor(const AttentionOp& op, float gate) {
  if (!op.gate_softplus) return 1.0f / (1.0f + std::exp(-gate));
  return gate > 20.0f ? gate : std::log1p(std::exp(gate));
}

// Writes `dim` numbers of a head's result, from column `from` on.
inline void write_head(const AttentionOp& op, int64_t row, int64_t head, int from, int dim, const float* acc,
                       Softmax softmax) {
  const int64_t at = (row * op.heads + head) * op.value_dim + from;
  float* out = op.out.f32 + at;
  std::copy_n(acc, dim, out);
  op.k->scale(normaliser(op, head, softmax), dim, out);
  if (op.gate != nullptr && op.gate_by_head) {
    op.k->scale(head_factor(op, op.gate[row * op.heads + head]), dim, out);
  } else if (op.gate != nullptr) {
    op.k->sigmoid_mul(op.gate + at, dim, out);
  }
  if (op.out.q8 != nullptr) {
    const int64_t out_row = at / op.out.cols, column = at % op.out.cols;
    op.k->quantize(out, dim, op.out.codes(out_row) + column, op.out.metas(out_row) + column / 32);
  }
}

// attention_sliced.cpp
void attend_sliced(const AttentionOp& op, Team& team);
BytesAhead first_keys(const AttentionOp& op, const Team& team);

}  // namespace moeserve
