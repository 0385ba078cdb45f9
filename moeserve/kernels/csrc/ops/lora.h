// Low-rank adapters (LoRA, arXiv:2106.09685): out += B A x for rows that use an adapter, each with its own A and B. A
// row's result does not depend on the step's other rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "arch/kernels.h"
#include "pool/pool.h"

namespace moeserve {

// A and B of one product in one adapter; the caller keeps them alive.
struct LoraPair {
  const float* a = nullptr;  // [rank, cols]
  const float* b = nullptr;  // [panels, rank, 32]: panels of 32 outputs, the last one padded with zeros
  int rank = 0;              // a multiple of 4; 0: the adapter does not change this product
};

// The pairs of one product (or of one product per expert) by adapter.
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

// Rows of A per work unit.
constexpr int kLoraRows = 4;
inline void shrink(const Kernels& k, const LoraPair& pair, int64_t cols, int part, const float* x,
                   float* out) {
  const int r = part * kLoraRows;
  if (r < pair.rank) k.dot_four(pair.a + r * cols, cols, x, static_cast<int>(cols), out + r);
}
// Adds the 32 outputs of one panel.
inline void expand(const Kernels& k, const LoraPair& pair, int64_t panel, const float* shrunk, float* y) {
  if (pair.rank > 0) k.add_low_rank(shrunk, pair.b + panel * pair.rank * 32, pair.rank, y);
}

// out_j += B_j A_j x for up to four products with the same input. Rows are sorted by adapter, so that consecutive units
// read the same A and B.
struct LoraOp {
  static constexpr int kMost = 4;
  const Kernels* k;
  const float* x;           // [n, cols]
  const int32_t* rows;      // [num_rows]: the rows that have an adapter
  const int32_t* adapters;  // [n]: adapter of each row
  int num_rows, count;
  int stride;                      // length of a row of `shrunk`: the largest rank
  const LoraTable* tables[kMost];  // nullptr: no adapter changes this product
  float* out[kMost];               // [n, tables.rows]
  float* shrunk;                   // [count, num_rows, stride]
  void operator()(Team& team) const;
};

// The adapters' terms of the three products of a mixture of experts; see ExpertsOp.
struct ExpertLora {
  const LoraTable* gate = nullptr;
  const LoraTable* up = nullptr;
  const LoraTable* down = nullptr;
  const int32_t* adapters = nullptr;  // [n]: adapter of each row, -1: none; nullptr: no row has one
  float* shrunk = nullptr;            // [2, routes, stride]
  int stride = 0;
  bool any() const { return adapters != nullptr; }
};

}  // namespace moeserve
