#include "indexer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace moeserve {
namespace {

constexpr int kKeyBlock = 32;  // keys per score_block call

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  double sum = 0.0, squares = 0.0;
  for (int i = 0; i < n; ++i) sum += x[i];
  const double mean = sum / n;
  for (int i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double inverse = 1.0 / std::sqrt(squares / n + eps);
  for (int i = 0; i < n; ++i) out[i] = static_cast<float>((x[i] - mean) * inverse) * weight[i] + bias[i];
}

}  // namespace

void IndexStoreOp::rotate(int64_t t, float* x) const {
  const int half = rotary / 2;
  if (in_pairs) {
    float odd[kMostIndexDim / 2];
    for (int i = 0; i < half; ++i) {
      odd[i] = x[2 * i + 1];
      x[i] = x[2 * i];
    }
    std::copy_n(odd, half, x + half);
  }
  const int64_t at = (positions == nullptr ? t : positions[t]) * half;
  k->rope(x, cos + at, sin + at, rotary);
}

void IndexStoreOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t t) {
    for (int h = 0; h < heads; ++h) rotate(t, q + (t * heads + h) * dim);
    alignas(64) float key[kMostIndexDim];
    layer_norm(keys + t * dim, norm, bias, eps, dim, key);
    rotate(t, key);
    k->to_half(key, dim, pool + static_cast<int64_t>(slots[t]) * dim);
  });
}

void IndexScorer::score(Team& team, KeyChoice& choice, const KeyChoice::Part& part) const {
  const KeyChoice::Tile& tile = choice.tiles[part.tile];
  const int queries = tile.count * heads, keys = choice.index_keys(tile.position + tile.count - 1);
  const int begin = part.segment * KeyChoice::kSegment, end = std::min(keys, begin + KeyChoice::kSegment);
  auto* gathered = static_cast<float*>(team.scratch(sizeof(float) * kKeyBlock * (dim + queries) +
                                                    sizeof(float*) * static_cast<size_t>(queries) + 64));
  float* scored = gathered + kKeyBlock * dim;
  const auto** rows = reinterpret_cast<const float**>(scored + kKeyBlock * queries);
  for (int i = 0; i < queries; ++i) rows[i] = q + (int64_t{tile.row} * heads + i) * dim;
  for (int key0 = begin; key0 < end; key0 += kKeyBlock) {
    const int count = std::min(kKeyBlock, end - key0);
    int32_t slots[kKeyBlock];
    for (int i = 0; i < count; ++i) slots[i] = tile.slots[(key0 + i + 1) * choice.block - 1];
    k->gather_keys(pool, dim, slots, count, dim, gathered);
    Upcoming none{nullptr, 0};
    k->score_block(rows, queries, gathered, dim, scored, none);
    for (int t = 0; t < tile.count; ++t) {
      const float* of_row = weights == nullptr ? nullptr : weights + (int64_t{tile.row} + t) * heads;
      k->index_scores(scored + static_cast<int64_t>(t) * heads * kKeyBlock, of_row, heads,
                      choice.scores.data() + tile.scores + t * tile.stride + key0);
    }
  }
}

void ChooseKeysOp::choose(Team& team, const KeyChoice::Tile& tile, int row) const {
  KeyChoice& choice = plan->choice;
  const int position = tile.position + row, keys = choice.index_keys(position);
  auto* chosen = static_cast<int32_t*>(team.scratch(sizeof(int32_t) * choice.top));
  choose_highest(choice.scores.data() + tile.scores + row * tile.stride, keys, choice.top, chosen);
  int32_t* list = choice.list(tile.list + row);
  for (int i = 0; i < choice.top; ++i) {
    for (int j = 0; j < choice.block; ++j) *list++ = tile.slots[chosen[i] * choice.block + j];
  }
  for (int key = keys * choice.block; key <= position; ++key) *list++ = tile.slots[key];
}

void ChooseKeysOp::operator()(Team& team) const {
  KeyChoice& choice = plan->choice;
  for (const KeyChoice::Group& group : choice.groups) {
    team.for_units(group.end_part - group.first_part,
                   [&](int64_t i) { scorer.score(team, choice, choice.parts[group.first_part + i]); });
    if (&group == &choice.groups.back()) team.last_phase();
    const int tiles = group.end_tile - group.first_tile;
    team.for_units(int64_t{tiles} * KeyChoice::kTileTokens, [&](int64_t i) {
      const KeyChoice::Tile& tile = choice.tiles[group.first_tile + i / KeyChoice::kTileTokens];
      const int row = static_cast<int>(i % KeyChoice::kTileTokens);
      if (row < tile.count) choose(team, tile, row);
    });
  }
}

}  // namespace moeserve
