#include "attended_streams.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "softmax.h"

namespace moeserve {

void AttendStreamsOp::operator()(Team& team) const {
  team.last_phase();
  const int hidden = static_cast<int>(y.cols);
  team.for_units(n, [&](int64_t i) {
    const float* row = x + (rows != nullptr ? rows[i] : i) * streams * hidden;
    float* out = y.f32 + i * hidden;
    float p[kMostAttended];
    for (int s = 0; s < num; ++s) {
      const float* of_stream = row + int64_t{s} * hidden;
      const float mean = k->dot(of_stream, of_stream, hidden) / static_cast<float>(hidden);
      p[s] = k->dot(of_stream, score, hidden) / std::sqrt(mean + eps);
    }
    softmax(p, num);
    std::fill(out, out + hidden, 0.0f);
    for (int s = 0; s < num; ++s) k->axpy(p[s], row + int64_t{s} * hidden, hidden, out);
    k->rms_norm(out, norm, eps, hidden, out);
    if (y.q8 != nullptr) k->quantize(out, hidden, y.codes(i), y.metas(i));
  });
}

void PutStreamOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t t) {
    const float* from = block + t * hidden;
    float* to = x + (t * streams + stream) * hidden;
    if (add) {
      k->axpy(1.0f, from, hidden, to);
    } else {
      std::memcpy(to, from, sizeof(float) * hidden);
    }
  });
}

}  // namespace moeserve
