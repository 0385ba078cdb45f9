// A residual of several streams (hyper-connections), and the n-gram embeddings that are added to it:
// kernels/streams/reference.py and kernels/ngrams/reference.py have the arithmetic. A row has `streams` streams of
// `hidden` numbers, one after another.
#pragma once

#include "delta_net.h"

namespace moeserve {

// y[i, s] = rms_norm(x[rows[i], s]) * w[s]; rows nullptr: i.
struct StreamNormOp {
  const Kernels* k;
  const float* x;
  const float* w;  // [streams, hidden]
  float eps;
  const int32_t* rows;
  int n, streams, hidden;
  Activations y;  // [n, streams * hidden]
  bool is_small() const { return n * y.cols <= kSmallNumbers; }
  void operator()(Team& team) const;
};

// out[t] = silu(x[t] * factor), also quantised if out has the int8 form. x is overwritten.
struct ScaledSiluOp {
  const Kernels* k;
  float* x;
  float factor;
  int n;
  Activations out;
  bool is_small() const { return n * out.cols <= kSmallNumbers; }
  void operator()(Team& team) const;
};

// out[t] = mean over s of sigmoid(gate[t, s]) * x[t, s].
struct MixStreamsOp {
  static constexpr int kColumns = 256;
  const Kernels* k;
  const float *gate, *x;  // [n, streams * hidden]
  int n, streams;
  Activations out;  // [n, hidden]
  bool is_small() const { return n * out.cols * streams <= kSmallNumbers; }
  void operator()(Team& team) const;
};

// x[t, s] += 2 sigmoid(weights[t, s] / streams) * block[t].
struct InjectOp {
  const Kernels* k;
  const float* block;    // [n, hidden]
  const float* weights;  // [n, streams]
  int n, streams, hidden;
  float* x;
  bool is_small() const { return int64_t{n} * streams * hidden <= kSmallNumbers; }
  void operator()(Team& team) const;
};

// The gates of a token's n-gram value into each stream: factors[t, s] = sigmoid(root(key . query / sqrt(hidden))) with
// root(g) = sign(g) sqrt(|g|). key is overwritten by the norm of factors[t, s] * value[t].
struct NgramGateOp {
  const Kernels* k;
  const float* x;                                  // [n, streams * hidden]: what query is the norm of
  float* key;                                      // [n, streams * hidden]
  const float* value;                              // [n, hidden]
  const float *query_norm, *key_norm, *conv_norm;  // [streams, hidden]
  float eps;
  int n, streams, hidden;
  float* factors;  // [n, streams]
  void operator()(Team& team) const;
};

// x[t, s] += factors[t, s] * value[t] + silu(conv(inputs)[t, s]) with a causal depthwise convolution whose taps lie `dilation`
// tokens apart. A sequence's state is its last (taps - 1) * dilation inputs, the oldest first.
struct NgramConvOp {
  static constexpr int kColumns = 32;
  const Kernels* k;
  const float* inputs;   // [n, channels], NgramGateOp's key
  const float* factors;  // [n, streams]
  const float* value;    // [n, hidden]
  const float* conv;     // [taps, channels]
  int taps, dilation, streams, hidden;
  float* states;  // the layer's part of slot 0
  int64_t slot_values;
  StateSequences sequences;
  float* pending;  // [records, channels]: the inputs of drafts, which do not move the state
  float* x;        // [n, channels]
  int64_t channels() const { return int64_t{streams} * hidden; }
  int kept() const { return (taps - 1) * dilation; }
  void operator()(Team& team) const;

 private:
  void convolve(int sequence, int64_t channel) const;
};

// Advances states that are windows of inputs (NgramConvOp's, ShortConvOp's) by each sequence's first accepted[i]
// drafts, whose inputs are in pending from first[i] on.
struct CommitWindowsOp {
  float* states;
  int64_t slot_values, channels;
  int kept;
  const float* pending;
  int num;
  const int32_t *slot, *first, *accepted;
  void operator()(Team& team) const;
};

}  // namespace moeserve
