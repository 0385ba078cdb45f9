// The inputs of matrices whose columns are stored in another order (quantised in act-order): Matrix::order.
#pragma once

#include <vector>

#include "ops.h"

namespace moeserve {

// out[i] = the columns of x[i] in a matrix's order, as float32 or quantised, whichever `out` has.
struct GatherOp {
  const Kernels* k;
  const float* x;        // [n, out.cols]
  const int32_t* order;  // [out.cols]
  int n;
  Activations out;
  bool is_small() const;
  void operator()(Team& team) const;
};

// out[i] = the input of row i of h, its columns in the order of the row's expert. After SortRoutesOp.
struct GatherRoutesOp {
  GatherOp gather;     // x: of the step's rows; order: of expert 0; n: the most routes
  const int32_t* ids;  // [rows, top_k]
  const int32_t* routes;
  const int32_t* routed;  // the number of routes
  int top_k;
  bool is_small() const { return gather.is_small(); }
  void operator()(Team& team) const;
  // Gathers row i of h, if h has that row.
  void row(Team& team, int64_t i) const;
};

// Activations in a matrix's order, in memory that grows on demand. Later operations may reuse it: they run in order.
class Gathered {
 public:
  // Makes room for rows in the form that the matrix reads; waits for the pool if it must reallocate.
  Activations fit(Pool& pool, const Matrix& matrix, int64_t rows) {
    const int64_t cols = matrix.cols;
    const size_t size = rows * (matrix.integer() ? quantized_row_bytes(cols) : cols * sizeof(float));
    if (size > bytes_.size()) {
      pool.wait();
      bytes_.resize(size);
      ++moves_;
    }
    if (matrix.integer()) return {nullptr, bytes_.data(), rows, cols};
    return {reinterpret_cast<float*>(bytes_.data()), nullptr, rows, cols};
  }
  int moves() const { return moves_; }  // how often the memory may have moved

 private:
  std::vector<uint8_t> bytes_;
  int moves_ = 0;
};

}  // namespace moeserve
