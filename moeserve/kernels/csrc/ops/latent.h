// What latent attention (MLA) does around attention itself, on the CPU pool: latent/reference.py has the arithmetic.
#pragma once

#include "ops.h"

namespace moeserve {

// q's parts to where their products want them; a token's latent vector, normalised, and its rotated key to the pool.
// Rotated are pairs of neighbours, which come to stand half a rotary width apart.
struct LatentStoreOp {
  const Kernels* k;
  const float* q;       // [n, heads, nope.cols + rotary]
  const float* latent;  // [n, rank + rotary]
  const float* norm;    // [rank]
  float eps;
  const float* cos;  // [angles, rotary / 2]
  const float* sin;
  const int32_t* positions;  // [n]: which of the angles are a row's; nullptr: row i's are the i-th
  const int32_t* slots;      // [n]
  uint16_t* pool;            // [slots, rank + rotary] of this layer
  int n, heads, rank, rotary;
  float scale;       // of q
  Activations nope;  // [n * heads, ..]: q's first part of each head, scaled
  float* queries;    // [n, heads, rank + rotary]: the last `rotary` of each head are written
  void operator()(Team& team) const;

 private:
  void rotate(int64_t t, float* x) const;
  void store_head(int64_t t, int head) const;
  void store_latent(Team& team, int64_t t) const;
};

// out[t, h] = W_h x[t, h], with a matrix for each head. What lies behind a head's outputs in `out` stays.
struct HeadLinearOp {
  const Kernels* k;
  Activations x;    // [n * heads, w.cols]
  const Matrix* w;  // `experts` are the heads; rows that 32 divides
  int n;
  Activations out;  // [n, heads * any]; the int8 form is written where there is one
  void operator()(Team& team) const;
};

}  // namespace moeserve
