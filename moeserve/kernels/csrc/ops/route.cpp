// The router's choice of experts; routing/reference.py specifies it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops.h"

namespace moeserve {
namespace {

constexpr float kSigmoidEps = 1e-20f;  // reference.py's SIGMOID_EPS

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Beyond 20, softplus(x) is x in float32.
float sqrt_softplus(float x) { return std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x))); }

// Finds the k largest of n values, largest first, lower index first among equals. NaN has no order, but in any case
// `ids` are k different valid indices, because they address memory.
void largest(const float* values, int n, int k, int32_t* ids) {
  int found = 0;
  for (int i = 0; i < n; ++i) {
    if (found == k && !(values[i] > values[ids[k - 1]])) continue;
    int at = found == k ? k - 1 : found++;
    for (; at > 0 && values[i] > values[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = i;
  }
}

void softmax(const float* x, int n, float* out) {
  const float most = *std::max_element(x, x + n);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += out[i] = std::exp(x[i] - most);
  for (int i = 0; i < n; ++i) out[i] = static_cast<float>(out[i] / sum);
}

}  // namespace

void RouteOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t t) {
    const float* row = logits + t * experts;
    int32_t* id = ids + t * top_k;
    if (table != nullptr) {
      std::copy_n(table + int64_t{tokens[t]} * top_k, top_k, id);
      return weigh(row, id, weights + t * top_k);
    }
    const float* choosing = row;
    // Scores increase with their logits, so without bias and groups the logits alone give the same choice.
    if (bias != nullptr || options.groups > 1) {
      auto* scores = static_cast<float*>(team.scratch((experts + 2 * options.groups) * sizeof(float)));
      score(row, scores);
      if (options.groups > 1) {
        float* best = scores + experts;
        keep_top_groups(scores, best, reinterpret_cast<int32_t*>(best + options.groups));
      }
      choosing = scores;
    }
    largest(choosing, experts, top_k, id);
    weigh(row, id, weights + t * top_k);
  });
}

// Computes scores [experts] from the logits `row`, with the bias.
void RouteOp::score(const float* row, float* scores) const {
  switch (options.scoring) {
    case Scoring::kSoftmax:
      softmax(row, experts, scores);
      break;
    case Scoring::kSigmoid:
      std::transform(row, row + experts, scores, sigmoid);
      break;
    case Scoring::kSqrtSoftplus:
      std::transform(row, row + experts, scores, sqrt_softplus);
      break;
    case Scoring::kSoftmaxTopK:
      std::copy_n(row, experts, scores);
      break;
  }
  if (bias == nullptr) return;
  for (int e = 0; e < experts; ++e) scores[e] += bias[e];
}

// Sets the scores of all other groups to -inf. best, kept: scratch, [groups] each.
void RouteOp::keep_top_groups(float* scores, float* best, int32_t* kept) const {
  const int size = experts / options.groups;
  for (int g = 0; g < options.groups; ++g) {
    int32_t two[2];
    const int count = std::min(options.group_best, size);
    largest(scores + g * size, size, count, two);
    best[g] = scores[g * size + two[0]] + (count > 1 ? scores[g * size + two[1]] : 0.0f);
  }
  largest(best, options.groups, options.top_groups, kept);
  std::sort(kept, kept + options.top_groups);
  for (int g = 0; g < options.groups; ++g) {
    if (std::binary_search(kept, kept + options.top_groups, g)) continue;
    std::fill_n(scores + g * size, size, -std::numeric_limits<float>::infinity());
  }
}

// A softmax over all experts, renormalised over the chosen ones, equals a softmax over the chosen ones.
void RouteOp::weigh(const float* row, const int32_t* id, float* weight) const {
  const bool by_root = options.scoring == Scoring::kSqrtSoftplus;
  const bool is_alone =
      by_root || options.scoring == Scoring::kSigmoid;  // a score depends on its own logit only
  const bool over_all = options.scoring == Scoring::kSoftmax && !options.normalize;
  float most = over_all ? *std::max_element(row, row + experts) : row[id[0]];
  for (int j = 1; j < top_k; ++j) most = std::max(most, row[id[j]]);
  for (int j = 0; j < top_k; ++j) {
    const float logit = row[id[j]];
    weight[j] = by_root ? sqrt_softplus(logit) : is_alone ? sigmoid(logit) : std::exp(logit - most);
  }
  float sum = 1.0f;
  if (over_all) {
    double all = 0;
    for (int e = 0; e < experts; ++e) all += std::exp(row[e] - most);
    sum = static_cast<float>(all);
  } else if (!is_alone || options.normalize) {
    sum = is_alone ? kSigmoidEps : 0.0f;
    for (int j = 0; j < top_k; ++j) sum += weight[j];
  }
  for (int j = 0; j < top_k; ++j) {
    weight[j] = weight[j] / sum * options.scale;
    if (expert_scale != nullptr) weight[j] *= expert_scale[id[j]];
  }
}

void SharedGateOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t t) {
    ids[t] = 0;
    weights[t] = weight == nullptr ? 1.0f : sigmoid(k->dot(y + t * cols, weight, cols));
  });
}

}  // namespace moeserve
