// The sampler's passes over a whole row, part of every ISA's table of kernels (arch/kernels.h).
#pragma once

#include <cstdint>

namespace moeserve {

constexpr int kMaxBlock = 128;   // a power of two
constexpr int kSumBlock = 1024;  // a multiple of 16

// Described in row_passes.inl.
struct RowPasses {
  bool (*scan)(const float* x, int n, float* block_max);
  void (*weigh)(const float* x, int n, double max, double scale, float* w, double* block_sum);
  int (*count_greater)(const float* x, int n, float bound);
};

}  // namespace moeserve
