// LFM2's short convolution of a step's sequences on the CPU pool: short_conv/reference.py has the arithmetic. Token by token
// within a block of channels, for prompts too, so that a token's result does not depend on how its sequence was divided.
#pragma once

#include "delta_net.h"

namespace moeserve {

// out = c * conv(b * x), causal and for each channel by itself. A sequence's state is its last taps - 1 inputs b * x, the
// oldest first: [taps - 1, channels].
struct ShortConvOp {
  static constexpr int kColumns = 64;
  const Kernels* k;
  float* projected;   // [n, 3 * channels]: b, c, x; x is overwritten
  const float* conv;  // [taps, channels]
  int taps, channels;
  float* states;  // this layer's part of slot 0
  int64_t slot_values;
  StateSequences sequences;  // cover all rows
  float* pending;            // [records, channels]: the inputs of drafts, which do not move the state
  int n;
  Activations out;  // [n, channels]
  void operator()(Team& team) const;

 private:
  void convolve(Team& team, int sequence, int first, int width) const;
};

}  // namespace moeserve
