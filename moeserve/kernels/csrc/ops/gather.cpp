#include "gather.h"

namespace moeserve {
namespace {

// Gathers one row of GatherOp.
void gather_row(const GatherOp& op, Team& team, const float* x, const int32_t* order, int64_t to) {
  const int64_t cols = op.out.cols;
  float* row = op.out.f32 != nullptr ? op.out.f32 + to * cols
                                     : static_cast<float*>(team.scratch(sizeof(float) * cols));
  for (int64_t j = 0; j < cols; ++j) row[j] = x[order[j]];
  if (op.out.q8 != nullptr) op.k->quantize(row, cols, op.out.codes(to), op.out.metas(to));
}

}  // namespace

bool GatherOp::is_small() const { return n == 1 || n * out.cols <= kSmallNumbers; }

void GatherOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t t) { gather_row(*this, team, x + t * out.cols, order, t); });
}

void GatherRoutesOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(gather.n, [&](int64_t i) { row(team, i); });
}

void GatherRoutesOp::row(Team& team, int64_t i) const {
  if (i >= *routed) return;
  const int64_t cols = gather.out.cols;
  const int route = routes[i];
  gather_row(gather, team, gather.x + route / top_k * cols, gather.order + ids[route] * cols, i);
}

}  // namespace moeserve
