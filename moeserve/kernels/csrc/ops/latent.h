// The steps before and after attention in latent attention (MLA), on the CPU pool; latent/reference.py has the
// arithmetic.
#pragma once

#include "ops.h"

namespace moeserve {

// Copies q's parts to the inputs of their products, and a token's normalised latent vector and rotated key to the pool.
// Rotation takes pairs of neighbours and writes them half a rotary width apart.
struct LatentStoreOp {
  const Kernels* k;
  const float* q;       // [n, heads, nope.cols + rotary]
  const float* latent;  // [n, rank + rotary]
  const float* norm;    // [rank]
  float eps;
  const float* cos;  // [angles, rotary / 2]
  const float* sin;
  const int32_t* positions;  // [n], the row of cos and sin for each row; nullptr: row i uses row i
  const int32_t* slots;      // [n]
  uint16_t* pool;            // [slots, rank + rotary] of this layer
  int n, heads, rank, rotary;
  float scale;       // of q
  Activations nope;  // [n * heads, ..]: the non-rotary part of q, scaled
  float* queries;    // [n, heads, rank + rotary]: only the last `rotary` numbers of each head are written
  void operator()(Team& team) const;

 private:
  void rotate(int64_t t, float* x) const;
  void store_head(int64_t t, int head) const;
  void store_latent(Team& team, int64_t t) const;
};

// out[t, h] = W_h x[t, h], with one matrix per head. In `out`, numbers after a head's outputs stay unchanged.
struct HeadLinearOp {
  const Kernels* k;
  Activations x;    // [n * heads, w.cols]
  const Matrix* w;  // one expert per head; rows % 32 == 0
  int n;
  Activations out;  // [n, heads * any]; the int8 form is written if it exists
  void operator()(Team& team) const;
};

}  // namespace moeserve
