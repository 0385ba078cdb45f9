#include "compressed.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace moeserve {
namespace {

constexpr int kKeyBlock = 32;  // index keys per score_block call

// Columns of an entry in progress.
struct Entry {
  float *most, *weight, *sum;
  Entry(float* state, int dim, int column)
      : most(state + column), weight(state + dim + column), sum(state + 2 * dim + column) {}
  // Adds a token's columns, with the weights exp(gate + bias).
  void add(const float* kv, const float* gate, const float* bias, int count) const {
    for (int i = 0; i < count; ++i) {
      const float g = gate[i] + bias[i];
      if (weight[i] == 0.0f) {
        most[i] = g;
        weight[i] = 1.0f;
        sum[i] = kv[i];
      } else if (g > most[i]) {
        const float factor = std::exp(most[i] - g);
        weight[i] = weight[i] * factor + 1.0f;
        sum[i] = sum[i] * factor + kv[i];
        most[i] = g;
      } else {
        const float factor = std::exp(g - most[i]);
        weight[i] += factor;
        sum[i] += factor * kv[i];
      }
    }
  }
  void clear(int count) const {
    for (float* x : {most, weight, sum}) std::fill(x, x + count, 0.0f);
  }
  void take(const Entry& from, int count) const {
    std::copy_n(from.most, count, most);
    std::copy_n(from.weight, count, weight);
    std::copy_n(from.sum, count, sum);
  }
};

}  // namespace

void TailRotation::rotate(float* x, int dim, int64_t position, float direction) const {
  const int half = rotary / 2;
  const float *c = cos + position * half, *s = sin + position * half;
  float* pair = x + dim - rotary;
  for (int i = 0; i < half; ++i, pair += 2) {
    const float a = pair[0], b = pair[1], turn = direction * s[i];
    pair[0] = a * c[i] - b * turn;
    pair[1] = b * c[i] + a * turn;
  }
}

void CompressedStoreOp::operator()(Team& team) const {
  team.last_phase();
  const int64_t parts = heads + 1;
  team.for_units(n * parts, [&](int64_t unit) {
    const int64_t t = unit / parts, head = unit % parts;
    const int64_t position = angles.positions[t];
    if (head < heads) {
      float* x = q + (t * heads + head) * dim;
      k->scale(scale / std::sqrt(k->dot(x, x, dim) / static_cast<float>(dim) + eps), dim, x);
      angles.rotate(x, dim, position);
      return;
    }
    alignas(64) float key[kMostCompressedDim];
    k->rms_norm(kv + t * dim, norm, eps, dim, key);
    angles.rotate(key, dim, position);
    k->to_half(key, dim, keys + int64_t{plan->key_rows[t]} * dim);
    for (int h = 0; index_q != nullptr && h < index_heads; ++h) {
      angles.rotate(index_q + (t * index_heads + h) * index_dim, index_dim, position);
    }
  });
}

void Compressor::add(float* state, int place, const float* kv, const float* gate, int column, int count,
                     float* entry) const {
  const Entry now(state, dim, column), next(state + 3 * dim, dim, column);
  const float* of_place = bias + int64_t{place} * width() + column;
  const int own = overlaps ? column + dim : column;
  now.add(kv + own, gate + own, of_place + own - column, count);
  if (overlaps) next.add(kv + column, gate + column, of_place, count);
  if (place + 1 < ratio) return;
  for (int i = 0; i < count; ++i) entry[column + i] = now.sum[i] / now.weight[i];
  if (overlaps) now.take(next, count);
  (overlaps ? next : now).clear(count);
}

void CompressOp::add_tokens(int sequence, int column) const {
  const int count = std::min(Compressor::kColumns, of.dim - column), width = of.width();
  const int64_t row0 = sequences.row[sequence];
  const int rows = sequences.count[sequence], sure = sequences.sure(sequence);
  float* state = states + sequences.slot[sequence] * slot_values;
  // Drafts move a copy of these columns on.
  float copy[6 * kMostCompressedDim];
  for (int t = 0; t < rows; ++t) {
    const int64_t row = row0 + t;
    const int place = angles.positions[row] % of.ratio;
    if (t == sure) {
      for (int i = 0; i < 3 * width / of.dim; ++i) {
        std::copy_n(state + int64_t{i} * of.dim + column, count, copy + i * of.dim + column);
      }
      state = copy;
    }
    if (t >= sure) {
      float* record = pending + (int64_t{sequences.first[sequence]} + t - sure) * of.pending_values();
      for (int first = column; first < width; first += of.dim) {
        std::copy_n(kv + row * width + first, count, record + first);
        std::copy_n(gate + row * width + first, count, record + width + first);
      }
      if (column == 0) record[2 * width] = static_cast<float>(place);
    }
    of.add(state, place, kv + row * width, gate + row * width, column, count, kv + row * width);
  }
}

void CompressOp::operator()(Team& team) const {
  const int64_t blocks = (of.dim + Compressor::kColumns - 1) / Compressor::kColumns;
  team.for_units(sequences.num * blocks, [&](int64_t unit) {
    add_tokens(static_cast<int>(unit / blocks), static_cast<int>(unit % blocks) * Compressor::kColumns);
  });
  team.last_phase();
  team.for_units(n, [&](int64_t t) {
    const int64_t next = int64_t{angles.positions[t]} + 1;
    if (next % of.ratio != 0) return;
    alignas(64) float entry[kMostCompressedDim];
    k->rms_norm(kv + t * of.width(), norm, eps, of.dim, entry);
    angles.rotate(entry, of.dim, next - of.ratio);
    k->to_half(entry, of.dim, pool + int64_t{slots[t]} * of.dim);
  });
}

void CommitCompressedOp::operator()(Team& team) const {
  team.last_phase();
  const int64_t blocks = (of.dim + Compressor::kColumns - 1) / Compressor::kColumns;
  team.for_units(num * blocks, [&](int64_t unit) {
    const int64_t sequence = unit / blocks;
    const int column = static_cast<int>(unit % blocks) * Compressor::kColumns;
    const int count = std::min(Compressor::kColumns, of.dim - column);
    float entry[kMostCompressedDim];  // its block's last row has stored it
    for (int i = 0; i < accepted[sequence]; ++i) {
      const float* record = pending + (int64_t{first[sequence]} + i) * of.pending_values();
      of.add(states + slot[sequence] * slot_values, static_cast<int>(record[2 * of.width()]), record,
             record + of.width(), column, count, entry);
    }
  });
}

void ChooseEntriesOp::score(Team& team, const KeyChoice::Part& part) const {
  KeyChoice& choice = plan->choice;
  const KeyChoice::Tile& tile = choice.tiles[part.tile];
  const int queries = tile.count * heads, entries = choice.blocks(tile.position + tile.count - 1);
  const int begin = part.segment * choice.segment_blocks();
  const int end = std::min(entries, begin + choice.segment_blocks());
  auto* gathered = static_cast<float*>(team.scratch(sizeof(float) * kKeyBlock * (dim + queries) +
                                                    sizeof(float*) * static_cast<size_t>(queries) + 64));
  float* scored = gathered + kKeyBlock * dim;
  const auto** rows = reinterpret_cast<const float**>(scored + kKeyBlock * queries);
  for (int i = 0; i < queries; ++i) rows[i] = q + (int64_t{tile.row} * heads + i) * dim;
  for (int entry = begin; entry < end; entry += kKeyBlock) {
    const int count = std::min(kKeyBlock, end - entry);
    int32_t slots[kKeyBlock];
    for (int i = 0; i < count; ++i) slots[i] = tile.slots[(entry + i + 1) * choice.rule.block - 1];
    k->gather_keys(pool, dim, slots, count, dim, gathered);
    Upcoming none{nullptr, 0};
    k->score_block(rows, queries, gathered, dim, scored, none);
    for (int t = 0; t < tile.count; ++t) {
      k->index_scores(scored + static_cast<int64_t>(t) * heads * kKeyBlock,
                      weights + (int64_t{tile.row} + t) * heads, heads,
                      choice.scores.data() + tile.scores + t * tile.stride + entry);
    }
  }
}

void ChooseEntriesOp::choose(Team& team, const KeyChoice::Tile& tile, int row) const {
  const KeyChoice& choice = plan->choice;
  auto* chosen = static_cast<int32_t*>(team.scratch(sizeof(int32_t) * choice.rule.top));
  choose_highest(choice.scores.data() + tile.scores + row * tile.stride, choice.blocks(tile.position + row),
                 choice.rule.top, chosen);
  int32_t* list = plan->chosen(tile.list + row);
  for (int i = 0; i < choice.rule.top; ++i) {
    list[i] = tile.slots[(chosen[i] + 1) * choice.rule.block - 1];
  }
}

void ChooseEntriesOp::operator()(Team& team) const {
  KeyChoice& choice = plan->choice;
  for (const KeyChoice::Group& group : choice.groups) {
    team.for_units(group.end_part - group.first_part,
                   [&](int64_t i) { score(team, choice.parts[group.first_part + i]); });
    if (&group == &choice.groups.back()) team.last_phase();
    team.for_units(int64_t{group.end_tile - group.first_tile} * KeyChoice::kTileTokens, [&](int64_t i) {
      const KeyChoice::Tile& tile = choice.tiles[group.first_tile + i / KeyChoice::kTileTokens];
      const int row = static_cast<int>(i % KeyChoice::kTileTokens);
      if (row < tile.count) choose(team, tile, row);
    });
  }
}

void KeepKeysOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(static_cast<int64_t>(plan->copies.size()), [&](int64_t i) {
    const CompressedPlan::Copy& copy = plan->copies[i];
    std::copy_n(keys + int64_t{copy.from} * dim, dim, keys + int64_t{copy.to} * dim);
  });
}

void RotateBackOp::operator()(Team& team) const {
  team.last_phase();
  const int64_t row_heads = x.cols / dim, per_token = heads / row_heads;
  team.for_units(n * per_token, [&](int64_t row) {
    float* out = x.f32 + row * x.cols;
    for (int64_t h = 0; h < row_heads; ++h) {
      angles.rotate(out + h * dim, dim, angles.positions[row / per_token], -1.0f);
    }
    if (x.q8 != nullptr) k->quantize(out, x.cols, x.codes(row), x.metas(row));
  });
}

}  // namespace moeserve
