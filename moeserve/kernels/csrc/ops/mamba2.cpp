// Divides a Mamba-2 layer among threads. The arithmetic of a step is in mamba2.inl.
#include "mamba2.h"

#include <cmath>

namespace moeserve {

void Mamba2Op::make_gates(int sequence, int head) const {
  for (int t = 0; t < sequences.count[sequence]; ++t) {
    const int64_t row = sequences.row[sequence] + t;
    float& dt = b[gate(row, head)];
    dt = softplus(dt + dt_bias[head]);
    *decay(row, head) = std::exp(rate[head] * dt);
    keep_gates(sequence, t, head);
  }
}

void Mamba2Op::write_out(int64_t row, int group, int groups) const {
  const int per_group = heads.value_heads / groups, width = per_group * heads.value_dim;
  const int64_t first = int64_t{group} * width;
  float* o = out.f32 + row * out.cols + first;
  for (int i = 0; i < per_group; ++i) {
    const int64_t column = int64_t{i} * heads.value_dim;
    k->axpy(skip[group * per_group + i], part(2, row) + first + column, heads.value_dim, o + column);
  }
  k->silu_mul(z + row * z_stride + first, o, width, o);
  if (norm != nullptr) k->rms_norm(o, norm + first, eps, width, o);
  if (out.q8 != nullptr) k->quantize(o, width, out.codes(row) + first, out.metas(row) + first / 32);
}

void Mamba2Op::operator()(Team& team) const {
  convolve_and_step(team, [&](int sequence, int head) { make_gates(sequence, head); });
  const int groups = norm == nullptr ? heads.value_heads : heads.key_heads;
  team.for_units(int64_t{n} * groups,
                 [&](int64_t unit) { write_out(unit / groups, static_cast<int>(unit % groups), groups); });
}

}  // namespace moeserve
