// A residual whose earlier values blocks attend to, on the CPU pool: streams/attended.py has the arithmetic.
#pragma once

#include "ops.h"

namespace moeserve {

constexpr int kMostAttended = 64;  // streams

// y[i] = RMSNorm(sum over s < num of p[s] * x[rows[i], s]) * norm, with p = the softmax of the products of `score` and
// the streams, each divided by its root mean square.
struct AttendStreamsOp {
  const Kernels* k;
  const float* x;       // [any, streams * y.cols]
  const int32_t* rows;  // [n], or nullptr: all in order
  const float* score;   // [y.cols]
  const float* norm;    // [y.cols]
  float eps;            // of both norms
  int n, streams, num;
  Activations y;  // [n, hidden]
  bool is_small() const { return n * y.cols * num <= kSmallNumbers; }
  void operator()(Team& team) const;
};

// x[t, stream] = block[t], or with `add` x[t, stream] += block[t].
struct PutStreamOp {
  const Kernels* k;
  const float* block;  // [n, hidden]
  int n, streams, hidden, stream;
  bool add;
  float* x;  // [n, streams * hidden]
  bool is_small() const { return int64_t{n} * hidden <= kSmallNumbers; }
  void operator()(Team& team) const;
};

}  // namespace moeserve
