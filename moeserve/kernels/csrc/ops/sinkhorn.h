// Hyper-connections whose streams are mixed by a doubly stochastic matrix, on the CPU pool: streams/sinkhorn.py has the
// arithmetic.
#pragma once

#include "ops.h"

namespace moeserve {

constexpr int kMostStreams = 16;

struct SinkhornMix {
  const float* base;   // [streams], or [streams * (2 + streams)]: also of what is added, and of the mix
  const float* scale;  // [1] or [3]
  float eps;
  int iterations;
};

// y[i] = RMSNorm(sum over s of before[s] * x[rows[i], s]) * norm. Writes the weights for adding the block's output and
// for mixing the streams to `weights`.
struct ReadStreamsOp {
  const Kernels* k;
  const float*
      products;  // [n, streams * (2 + streams)] of the normalised residual; [n, streams] without `weights`; or nullptr:
                 // the mean of the streams is read, and `mix` is not
  const float* x;       // [n, streams * y.cols]
  const int32_t* rows;  // [n], or nullptr: all in order
  SinkhornMix mix;
  const float* norm;  // [y.cols]
  float norm_eps;
  int n, streams;
  Activations y;  // [n, hidden]
  float*
      weights;  // [n, streams * (1 + streams)]: what is added, then the mix [from, to]; nullptr: before the head
  bool is_small() const { return n * y.cols * streams <= kSmallNumbers; }
  void operator()(Team& team) const;

 private:
  void find_weights(const float* product, float* out) const;
};

// x[t, s] = weights[t, s] * block[t] + sum over j of mix[t, j, s] * x[t, j], with ReadStreamsOp's weights.
struct AddStreamsOp {
  static constexpr int kColumns = 256;
  const Kernels* k;
  const float* block;    // [n, hidden]
  const float* weights;  // [n, streams * (1 + streams)]
  int n, streams, hidden;
  float* x;
  bool is_small() const { return int64_t{n} * streams * hidden <= kSmallNumbers; }
  void operator()(Team& team) const;
};

}  // namespace moeserve
