// The softmax of a few numbers.
#pragma once

#include <algorithm>
#include <cmath>

namespace moeserve {

inline void softmax(float* x, int n) {
  const float most = *std::max_element(x, x + n);
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - most);
  for (int i = 0; i < n; ++i) x[i] /= sum;
}

}  // namespace moeserve
