#include "streams.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace moeserve {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Advances a state's rows by `moved` inputs; source(i) is the i-th input after the state.
template <class Source>
void move_on(float* state, int64_t stride, int kept, int moved, int width, Source&& source) {
  for (int j = 0; j < kept; ++j) {
    const int from = j + moved;
    std::memcpy(state + j * stride, from < kept ? state + from * stride : source(from - kept),
                sizeof(float) * width);
  }
}

}  // namespace

void StreamNormOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(int64_t{n} * streams, [&](int64_t unit) {
    const int64_t i = unit / streams, first = unit % streams * hidden;
    const float* row = x + (rows != nullptr ? rows[i] : i) * y.cols + first;
    float* out = y.f32 + i * y.cols + first;
    k->rms_norm(row, w + first, eps, hidden, out);
    if (y.q8 != nullptr) k->quantize(out, hidden, y.codes(i) + first, y.metas(i) + first / 32);
  });
}

void ScaledSiluOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t t) {
    const int cols = static_cast<int>(out.cols);
    float *from = x + t * cols, *row = out.f32 + t * cols;
    for (int i = 0; i < cols; ++i) row[i] = from[i] * factor;
    std::memcpy(from, row, sizeof(float) * cols);
    k->sigmoid_mul(from, cols, row);
    if (out.q8 != nullptr) k->quantize(row, cols, out.codes(t), out.metas(t));
  });
}

void MixStreamsOp::operator()(Team& team) const {
  team.last_phase();
  const int64_t hidden = out.cols, blocks = (hidden + kColumns - 1) / kColumns;
  team.for_units(n * blocks, [&](int64_t unit) {
    const int64_t t = unit / blocks, first = unit % blocks * kColumns;
    const int width = static_cast<int>(std::min<int64_t>(kColumns, hidden - first));
    alignas(64) float part[kColumns];
    float* sum = out.f32 + t * hidden + first;
    std::fill(sum, sum + width, 0.0f);
    for (int s = 0; s < streams; ++s) {
      const int64_t at = (t * streams + s) * hidden + first;
      std::memcpy(part, x + at, sizeof(float) * width);
      k->sigmoid_mul(gate + at, width, part);
      k->axpy(1.0f / static_cast<float>(streams), part, width, sum);
    }
    if (out.q8 != nullptr) k->quantize(sum, width, out.codes(t) + first, out.metas(t) + first / 32);
  });
}

void InjectOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(int64_t{n} * streams, [&](int64_t unit) {
    const float weight = 2.0f * sigmoid(weights[unit] / static_cast<float>(streams));
    k->axpy(weight, block + unit / streams * hidden, hidden, x + unit * hidden);
  });
}

void NgramGateOp::operator()(Team& team) const {
  team.last_phase();
  auto* query = static_cast<float*>(team.scratch(sizeof(float) * hidden));
  team.for_units(int64_t{n} * streams, [&](int64_t unit) {
    const int64_t first = unit % streams * hidden;
    float* mine = key + unit * hidden;
    k->rms_norm(x + unit * hidden, query_norm + first, eps, hidden, query);
    k->rms_norm(mine, key_norm + first, eps, hidden, mine);
    const float gate = k->dot(mine, query, hidden) / std::sqrt(static_cast<float>(hidden));
    const float root = std::copysign(std::sqrt(std::max(std::fabs(gate), 1e-6f)), gate);
    const float factor = sigmoid(gate == 0.0f ? 0.0f : root);
    factors[unit] = factor;
    std::memcpy(mine, value + unit / streams * hidden, sizeof(float) * hidden);
    k->scale(factor, hidden, mine);
    k->rms_norm(mine, conv_norm + first, eps, hidden, mine);
  });
}

void NgramConvOp::convolve(int sequence, int64_t channel) const {
  float* state = states + sequences.slot[sequence] * slot_values + channel;
  const int64_t row0 = sequences.row[sequence];
  const int count = sequences.count[sequence], sure = sequences.sure(sequence);
  // The t-th input of the step, or one before it for t < 0.
  const auto input = [&](int t) {
    return t < 0 ? state + (kept() + t) * channels() : inputs + (row0 + t) * channels() + channel;
  };
  alignas(64) float window[15 * kColumns], sum[kColumns];
  for (int t = 0; t < count; ++t) {
    for (int j = 0; j + 1 < taps; ++j) {
      std::memcpy(window + j * kColumns, input(t - (taps - 1 - j) * dilation), sizeof(float) * kColumns);
    }
    std::memcpy(sum, input(t), sizeof(float) * kColumns);
    if (t >= sure) {
      std::memcpy(pending + (int64_t{sequences.first[sequence]} + t - sure) * channels() + channel, sum,
                  sizeof sum);
    }
    k->conv_silu(window, sum, conv + channel, channels(), nullptr, taps, kColumns);
    const int64_t row = row0 + t;
    float* out = x + row * channels() + channel;
    k->axpy(factors[row * streams + channel / hidden], value + row * hidden + channel % hidden, kColumns,
            out);
    k->axpy(1.0f, sum, kColumns, out);
  }
  move_on(state, channels(), kept(), sure, kColumns, input);
}

void NgramConvOp::operator()(Team& team) const {
  team.last_phase();
  const int64_t blocks = channels() / kColumns;
  team.for_units(sequences.num * blocks,
                 [&](int64_t unit) { convolve(static_cast<int>(unit / blocks), unit % blocks * kColumns); });
}

void CommitWindowsOp::operator()(Team& team) const {
  team.last_phase();
  const int64_t blocks = channels / NgramConvOp::kColumns;
  team.for_units(num * blocks, [&](int64_t unit) {
    const int64_t sequence = unit / blocks, channel = unit % blocks * NgramConvOp::kColumns;
    move_on(states + slot[sequence] * slot_values + channel, channels, kept, accepted[sequence],
            NgramConvOp::kColumns,
            [&](int i) { return pending + (first[sequence] + i) * channels + channel; });
  });
}

}  // namespace moeserve
