// The Mamba-2 recurrence of a step's sequences on the CPU pool: mamba2/reference.py has the arithmetic. Prompts too are
// computed token by token, as in delta_net.h: the states are a small part of a token's work, and a chunk's products
// would not be smaller than the steps they replace.
#pragma once

#include "delta_net.h"

namespace moeserve {

// o = C^T S + D x of every head; out = RMSNorm(o * silu(z)) * norm, normalised by groups of heads; without a norm
// out = o * silu(z). b is dt: it becomes
// softplus(dt + dt_bias), by which x is multiplied and, times the rate, the state decays.
struct Mamba2Op : RecurrentOp {
  const float* z;  // [n, value_heads * value_dim], a row every z_stride numbers
  int64_t z_stride;
  const float* skip;  // [value_heads]: D
  void operator()(Team& team) const;

 private:
  void make_gates(int sequence, int head) const;
  void write_out(int64_t row, int group, int groups) const;
};

}  // namespace moeserve
