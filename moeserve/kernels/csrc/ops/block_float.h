// Products and attention in block floating point (arch/block_float.h) on threads that live as long as a call: they have
// the calling thread's priority, and a call takes milliseconds.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "arch/block_float.h"

namespace moeserve {

// int16 codes, 64-byte aligned.
class Codes {
 public:
  explicit Codes(size_t count);
  int16_t* data() { return data_.get(); }
  const int16_t* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(int16_t* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<int16_t, Free> data_;
};

// A matrix [rows, cols] whose rows are multiplied with activations of `cols` numbers.
class BlockFloatMatrix {
 public:
  BlockFloatMatrix(const BlockFloatKernels& kernels, const float* matrix, int64_t rows, int64_t cols,
                   int threads);
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  // out [n, rows] = x [n, cols] times the matrix, plus `bias` [rows] unless it is nullptr.
  void multiply(const float* x, int64_t n, const float* bias, float* out, int threads) const;

 private:
  const BlockFloatKernels& kernels_;
  int64_t rows_, cols_, blocks_, panels_;
  Codes codes_;                // [panels][cols, rounded up to 2][32][2], block after block
  std::vector<float> scales_;  // [panels][blocks][32]
};

// out [n, heads * dim] = attention among n rows of each head; q, k, v [heads, n, dim], dim even and <= kFloatBlock.
void attend(const BlockFloatKernels& kernels, const float* q, const float* k, const float* v, int64_t heads,
            int64_t n, int dim, float scale, float* out, int threads);

}  // namespace moeserve
