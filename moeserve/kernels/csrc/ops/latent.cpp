#include "latent.h"

#include <algorithm>
#include <cstring>

namespace moeserve {
namespace {

// De-interleaves pairs: x[2i] to out[i], x[2i + 1] to out[n / 2 + i].
void split_pairs(const float* x, int n, float* out) {
  for (int i = 0; i < n / 2; ++i) {
    out[i] = x[2 * i];
    out[n / 2 + i] = x[2 * i + 1];
  }
}

}  // namespace

void LatentStoreOp::rotate(int64_t t, float* x) const {
  const int64_t at = (positions == nullptr ? t : positions[t]) * (rotary / 2);
  k->rope(x, cos + at, sin + at, rotary);
}

void LatentStoreOp::store_head(int64_t t, int head) const {
  const int64_t row = t * heads + head, width = rank + rotary;
  const float* from = q + row * (nope.cols + rotary);
  float* first = nope.f32 + row * nope.cols;
  std::memcpy(first, from, sizeof(float) * nope.cols);
  k->scale(scale, static_cast<int>(nope.cols), first);
  if (nope.q8 != nullptr) k->quantize(first, nope.cols, nope.codes(row), nope.metas(row));
  float* rotated = queries + row * width + rank;
  split_pairs(from + nope.cols, rotary, rotated);
  rotate(t, rotated);
  k->scale(scale, rotary, rotated);
}

void LatentStoreOp::store_latent(Team& team, int64_t t) const {
  const int width = rank + rotary;
  const float* from = latent + t * width;
  auto* x = static_cast<float*>(team.scratch(width * sizeof(float)));
  k->rms_norm(from, norm, eps, rank, x);
  split_pairs(from + rank, rotary, x + rank);
  rotate(t, x + rank);
  k->to_half(x, width, pool + static_cast<int64_t>(slots[t]) * width);
}

void LatentStoreOp::operator()(Team& team) const {
  const int64_t parts = heads + 1;
  team.for_units(n * parts, [&](int64_t unit) {
    const int64_t t = unit / parts;
    const int part = static_cast<int>(unit % parts);
    if (part < heads) {
      store_head(t, part);
    } else {
      store_latent(team, t);
    }
  });
}

void HeadLinearOp::operator()(Team& team) const {
  const int64_t heads = w->experts, per_head = out.cols / heads;
  team.for_panels(heads, w->panels, [&](int64_t head, int64_t panel) {
    alignas(64) float tile[kMostTokens * kPanelRows];
    const void* rows[kMostTokens];
    const int64_t column = head * per_head + panel * kPanelRows;
    for (int t0 = 0; t0 < n; t0 += kMostTokens) {
      const int tokens = std::min(kMostTokens, n - t0);
      for (int t = 0; t < tokens; ++t) rows[t] = x.row(w->integer(), (t0 + t) * heads + head);
      k->multiply(w->type, w->panel(head, panel), nullptr, w->cols, rows, tokens, tile);
      for (int t = 0; t < tokens; ++t) {
        const float* from = tile + t * kPanelRows;
        std::memcpy(out.f32 + (t0 + t) * out.cols + column, from, sizeof(float) * kPanelRows);
        if (out.q8 != nullptr) {
          k->quantize(from, kPanelRows, out.codes(t0 + t) + column, out.metas(t0 + t) + column / 32);
        }
      }
    }
  });
}

}  // namespace moeserve
