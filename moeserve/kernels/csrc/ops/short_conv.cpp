// Divides a short convolution among threads. A token's step is in delta_net.inl.
#include "short_conv.h"

#include <algorithm>
#include <cstring>

namespace moeserve {

void ShortConvOp::convolve(Team& team, int sequence, int first, int width) const {
  float* state = states + sequences.slot[sequence] * slot_values + first;
  const size_t bytes = sizeof(float) * width;
  auto* window = static_cast<float*>(team.scratch(bytes * (taps - 1)));
  for (int j = 0; j + 1 < taps; ++j) std::memcpy(window + j * width, state + int64_t{j} * channels, bytes);
  const int sure = sequences.sure(sequence);
  for (int t = 0; t < sequences.count[sequence]; ++t) {
    const int64_t row = sequences.row[sequence] + t;
    float* b = projected + row * 3 * channels + first;
    float *c = b + channels, *x = c + channels, *o = out.f32 + row * out.cols + first;
    k->gated_conv(window, b, c, x, conv + first, channels, taps, width, o);
    if (t >= sure) {
      const int64_t draft = int64_t{sequences.first[sequence]} + t - sure;
      std::memcpy(pending + draft * channels + first, x, bytes);
    }
    if (out.q8 != nullptr) k->quantize(o, width, out.codes(row) + first, out.metas(row) + first / 32);
    if (t + 1 != sure) continue;
    for (int j = 0; j + 1 < taps; ++j) std::memcpy(state + int64_t{j} * channels, window + j * width, bytes);
  }
}

void ShortConvOp::operator()(Team& team) const {
  team.last_phase();
  const int blocks = (channels + kColumns - 1) / kColumns;
  team.for_units(int64_t{sequences.num} * blocks, [&](int64_t unit) {
    const int first = static_cast<int>(unit % blocks) * kColumns;
    convolve(team, static_cast<int>(unit / blocks), first, std::min(kColumns, channels - first));
  });
}

}  // namespace moeserve
