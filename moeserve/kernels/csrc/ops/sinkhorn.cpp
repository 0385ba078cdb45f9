#include "sinkhorn.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "softmax.h"

namespace moeserve {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Divides `n` numbers, `stride` apart, by their sum.
void normalise(float* x, int n, int stride, float eps) {
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += x[i * stride];
  for (int i = 0; i < n; ++i) x[i * stride] /= sum + eps;
}

}  // namespace

void ReadStreamsOp::find_weights(const float* product, float* out) const {
  const float *base = mix.base + streams, *of_mix = product + 2 * streams;
  for (int s = 0; s < streams; ++s) {
    out[s] = 2.0f * sigmoid(product[streams + s] * mix.scale[1] + base[s]);
  }
  float* m = out + streams;
  for (int i = 0; i < streams * streams; ++i) m[i] = of_mix[i] * mix.scale[2] + base[streams + i];
  for (int j = 0; j < streams; ++j) softmax(m + j * streams, streams);
  for (int i = 0; i < streams * streams; ++i) m[i] += mix.eps;
  for (int round = 0; round < mix.iterations; ++round) {
    for (int j = 0; round > 0 && j < streams; ++j) normalise(m + j * streams, streams, 1, mix.eps);
    for (int s = 0; s < streams; ++s) normalise(m + s, streams, streams, mix.eps);
  }
}

void ReadStreamsOp::operator()(Team& team) const {
  team.last_phase();
  const int hidden = static_cast<int>(y.cols);
  const int num = weights == nullptr ? streams : streams * (2 + streams);
  team.for_units(n, [&](int64_t i) {
    const float* product = products == nullptr ? nullptr : products + i * num;
    const float* row = x + (rows != nullptr ? rows[i] : i) * streams * hidden;
    float* out = y.f32 + i * hidden;
    std::fill(out, out + hidden, 0.0f);
    for (int s = 0; s < streams; ++s) {
      const float before = products == nullptr ? 1.0f / static_cast<float>(streams)
                                               : sigmoid(product[s] * mix.scale[0] + mix.base[s]) + mix.eps;
      k->axpy(before, row + s * hidden, hidden, out);
    }
    k->rms_norm(out, norm, norm_eps, hidden, out);
    if (y.q8 != nullptr) k->quantize(out, hidden, y.codes(i), y.metas(i));
    if (weights != nullptr) find_weights(product, weights + i * streams * (1 + streams));
  });
}

void AddStreamsOp::operator()(Team& team) const {
  team.last_phase();
  const int64_t blocks = (hidden + kColumns - 1) / kColumns;
  team.for_units(n * blocks, [&](int64_t unit) {
    const int64_t t = unit / blocks, first = unit % blocks * kColumns;
    const int width = static_cast<int>(std::min<int64_t>(kColumns, hidden - first));
    alignas(64) float old[kMostStreams][kColumns];
    float* row = x + t * streams * hidden + first;
    for (int s = 0; s < streams; ++s) std::memcpy(old[s], row + int64_t{s} * hidden, sizeof(float) * width);
    const float *added = weights + t * streams * (1 + streams), *m = added + streams;
    for (int s = 0; s < streams; ++s) {
      float* out = row + int64_t{s} * hidden;
      std::fill(out, out + width, 0.0f);
      for (int j = 0; j < streams; ++j) k->axpy(m[j * streams + s], old[j], width, out);
      k->axpy(added[s], block + t * hidden + first, width, out);
    }
  });
}

}  // namespace moeserve
