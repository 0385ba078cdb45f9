// Low-rank adapters (LoRA, arXiv:2106.09685): out += B A x for the rows that ask for an adapter, each with its own A and B.
// What a row gets depends on no other row of the step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "arch/kernels.h"
#include "pool/pool.h"

namespace moeserve {

// A and B of one product in one adapter, which the caller keeps.
struct LoraPair {
  const float* a = nullptr;  // [rank, cols]
  const float* b = nullptr;  // [panels, rank, 32]: outputs in panels of 32, the last filled up with zeros
  int rank = 0;              // a multiple of 4; 0: the adapter leaves the product as it is
};

// Those of one product, or of one for each expert, by adapter.
class LoraTable {
 public:
  // Throws std::invalid_argument.
  LoraTable(int64_t cols, int64_t rows, int64_t experts, int adapters);
  const int64_t cols, rows, experts, panels;
  int adapters() const { return static_cast<int>(pairs_.size() / experts); }
  int most_rank() const { return most_rank_; }
  const LoraPair& pair(int adapter, int64_t expert) const { return pairs_[adapter * experts + expert]; }
  // Only while nothing is queued.
  void set(int adapter, int64_t expert, const LoraPair& pair);

 private:
  std::vector<LoraPair> pairs_;  // [adapters, experts]
  int most_rank_ = 0;
};

// Four of a pair's rows of A by one input row: what one thread takes at a time.
constexpr int kLoraRows = 4;
inline void shrink(const Kernels& k, const LoraPair& pair, int64_t cols, int part, const float* x,
                   float* out) {
  const int r = part * kLoraRows;
  if (r < pair.rank) k.dot_four(pair.a + r * cols, cols, x, static_cast<int>(cols), out + r);
}
// The 32 outputs of one panel.
inline void expand(const Kernels& k, const LoraPair& pair, int64_t panel, const float* shrunk, float* y) {
  if (pair.rank > 0) k.add_low_rank(shrunk, pair.b + panel * pair.rank * 32, pair.rank, y);
}

// out_j += B_j A_j x for up to four products over the same input. Rows come sorted by adapter, so that one's A and B are
// read by neighbours.
struct LoraOp {
  static constexpr int kMost = 4;
  const Kernels* k;
  const float* x;           // [n, cols]
  const int32_t* rows;      // [num_rows]: the rows that have an adapter
  const int32_t* adapters;  // [n]: each row's
  int num_rows, count;
  int stride;                      // of a row of `shrunk`: the largest rank
  const LoraTable* tables[kMost];  // nullptr: no adapter has this product
  float* out[kMost];               // [n, tables.rows]
  float* shrunk;                   // [count, num_rows, stride]
  void operator()(Team& team) const;
};

// What adapters add to the three products of a mixture of experts; see ExpertsOp.
struct ExpertLora {
  const LoraTable* gate = nullptr;
  const LoraTable* up = nullptr;
  const LoraTable* down = nullptr;
  const int32_t* adapters = nullptr;  // [n]: each row's, -1: none; nullptr: no row has any
  float* shrunk = nullptr;            // [2, routes, stride]
  int stride = 0;
  bool any() const { return adapters != nullptr; }
};

}  // namespace moeserve
