#include "indexer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace moeserve {
namespace {

constexpr int kKeyBlock = 32;  // keys per score_block call

}  // namespace

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  double sum = 0.0, squares = 0.0;
  for (int i = 0; i < n; ++i) sum += x[i];
  const double mean = sum / n;
  for (int i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double inverse = 1.0 / std::sqrt(squares / n + eps);
  for (int i = 0; i < n; ++i) out[i] = static_cast<float>((x[i] - mean) * inverse) * weight[i] + bias[i];
}

// One thread's buffers, cut from its scratch.
struct ChooseKeysOp::Buffers {
  float *gathered, *scored, *best;  // [dim][32]; [queries][32] each
  const float** queries;
  static size_t bytes(int64_t queries, int dim) {
    return sizeof(float) * kKeyBlock * (dim + 2 * queries) + sizeof(float*) * queries + 64;
  }
  Buffers(void* memory, int64_t count, int dim) {
    gathered = static_cast<float*>(memory);
    scored = gathered + kKeyBlock * dim;
    best = scored + kKeyBlock * count;
    queries = reinterpret_cast<const float**>(best + kKeyBlock * count);
  }
};

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

// Scores `count` index keys, at most kKeyBlock, for the queries: [queries][32] in b.scored.
void ChooseKeysOp::score_keys(const int32_t* slots, int count, int queries, const Buffers& b) const {
  k->gather_keys(pool, stride, slots, count, dim, b.gathered);
  Upcoming none{nullptr, 0};
  k->score_block(b.queries, queries, b.gathered, dim, b.scored, none);
}

// A block's index key is in the slot of its last key.
void ChooseKeysOp::score_blocks(const KeyChoice::Tile& tile, int begin, int end, const Buffers& b) const {
  KeyChoice& choice = plan->choice;
  for (int block0 = begin; block0 < end; block0 += kKeyBlock) {
    const int count = std::min(kKeyBlock, end - block0);
    int32_t slots[kKeyBlock];
    for (int i = 0; i < count; ++i) slots[i] = tile.slots[(block0 + i + 1) * choice.rule.block - 1];
    score_keys(slots, count, tile.count * heads, b);
    for (int t = 0; t < tile.count; ++t) {
      const float* of_row = weights == nullptr ? nullptr : weights + (int64_t{tile.row} + t) * heads;
      k->index_scores(b.scored + static_cast<int64_t>(t) * heads * kKeyBlock, of_row, heads,
                      choice.scores.data() + tile.scores + t * tile.stride + block0);
    }
  }
}

// A block's score is the highest of its keys', for each head.
void ChooseKeysOp::score_by_maximum(const KeyChoice::Tile& tile, int begin, int end, const Buffers& b) const {
  KeyChoice& choice = plan->choice;
  const int queries = tile.count * heads, length = choice.rule.block;
  for (int block = begin; block < end; ++block) {
    std::fill_n(b.best, queries * kKeyBlock, -INFINITY);
    for (int key = 0; key < length; key += kKeyBlock) {
      const int count = std::min(kKeyBlock, length - key);
      score_keys(tile.slots + block * length + key, count, queries, b);
      for (int i = 0; i < queries; ++i) {
        float* best = b.best + i * kKeyBlock;
        const float* scored = b.scored + i * kKeyBlock;
        for (int j = 0; j < count; ++j) best[j] = scored[j] > best[j] ? scored[j] : best[j];
      }
    }
    for (int i = 0; i < queries; ++i) {
      const float* best = b.best + i * kKeyBlock;
      choice.scores[tile.scores + i * tile.stride + block] = *std::max_element(best, best + kKeyBlock);
    }
  }
}

void ChooseKeysOp::score(Team& team, const KeyChoice::Part& part) const {
  const KeyChoice& choice = plan->choice;
  const KeyChoice::Tile& tile = choice.tiles[part.tile];
  const int queries = tile.count * heads;
  Buffers b(team.scratch(Buffers::bytes(queries, dim)), queries, dim);
  for (int i = 0; i < queries; ++i) b.queries[i] = q + (int64_t{tile.row} * heads + i) * dim;
  const int begin = part.segment * choice.segment_blocks();
  const int end = std::min(choice.blocks(tile.position + tile.count - 1), begin + choice.segment_blocks());
  choice.rule.local > 0 ? score_by_maximum(tile, begin, end, b) : score_blocks(tile, begin, end, b);
}

void ChooseKeysOp::choose(Team& team, const KeyChoice::Tile& tile, int row, int head) const {
  KeyChoice& choice = plan->choice;
  const int position = tile.position + row, blocks = choice.blocks(position), top = choice.rule.top;
  auto* chosen = static_cast<int32_t*>(team.scratch(sizeof(int32_t) * top));
  choose_highest(choice.scores.data() + tile.scores + (row * choice.heads + head) * tile.stride, blocks, top,
                 chosen);
  int32_t* list = choice.list(tile.list + row, head);
  const auto add = [&](int begin, int end) {
    for (int key = begin; key < end; ++key) *list++ = tile.slots[key] * choice.heads + head;
  };
  const int length = choice.rule.block;
  for (int i = 0; i < top; ++i) add(chosen[i] * length, (chosen[i] + 1) * length);
  add(blocks * length, position + 1);
}

void ChooseKeysOp::operator()(Team& team) const {
  const KeyChoice& choice = plan->choice;
  for (const KeyChoice::Group& group : choice.groups) {
    team.for_units(group.end_part - group.first_part,
                   [&](int64_t i) { score(team, choice.parts[group.first_part + i]); });
    if (&group == &choice.groups.back()) team.last_phase();
    const int64_t tiles = group.end_tile - group.first_tile, choices = KeyChoice::kTileTokens * choice.heads;
    team.for_units(tiles * choices, [&](int64_t i) {
      const KeyChoice::Tile& tile = choice.tiles[group.first_tile + i / choices];
      const auto [row, head] = std::div(static_cast<int>(i % choices), choice.heads);
      if (row < tile.count) choose(team, tile, row, head);
    });
  }
}

}  // namespace moeserve
