// Paged GQA attention over token-granular slots: who does which piece. The arithmetic is in attention.inl.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ops.h"

namespace moeserve {
namespace {

constexpr int kBlock = 32;  // keys of one attend_block call

struct Shape {
  int heads, kv_heads, dim;
  int group() const { return heads / kv_heads; }
  int most_queries() const { return AttentionPlan::kTileTokens * group(); }
};

// Online-softmax state of the queries of a tile for one KV head: query i is token i / group, head i % group.
struct State {
  Softmax* softmax;
  float* acc;  // [queries, dim]
  void clear(int queries, int dim) {
    std::fill(softmax, softmax + queries, Softmax{-INFINITY, 0.0f});
    std::fill(acc, acc + static_cast<int64_t>(queries) * dim, 0.0f);
  }
};

// One thread's buffers, cut from its scratch.
struct Buffers {
  float *keys, *values, *scores;
  const float** queries;
  int* visible;
  State running, segment;
  static size_t bytes(const Shape& s) {
    const size_t q = s.most_queries(), d = s.dim;
    return sizeof(float) * (2 * kBlock * d + q * kBlock + 2 * q * (d + 2)) +
           q * (sizeof(float*) + sizeof(int)) + 64;
  }
  Buffers(void* memory, const Shape& s) {
    const int64_t q = s.most_queries(), d = s.dim;
    auto* f = static_cast<float*>(memory);
    keys = f;
    values = keys + kBlock * d;
    scores = values + kBlock * d;
    running.acc = scores + q * kBlock;
    segment.acc = running.acc + q * d;
    running.softmax = reinterpret_cast<Softmax*>(segment.acc + q * d);
    segment.softmax = running.softmax + q;
    queries = reinterpret_cast<const float**>(segment.softmax + q);
    visible = reinterpret_cast<int*>(queries + q);
  }
};

int segments_of(const AttentionPlan::Tile& tile) {
  return (tile.position + tile.count + AttentionPlan::kSegment - 1) / AttentionPlan::kSegment;
}

// Queries of the tile that see any key of a segment: those at or after its start. The rest come first.
int first_query(const AttentionPlan::Tile& tile, int segment, int group) {
  return std::clamp(segment * AttentionPlan::kSegment - tile.position, 0, tile.count) * group;
}

void attend_segment(const AttentionOp& op, const AttentionPlan::Tile& tile, int segment, int kv_head,
                    Buffers& b, State state) {
  const Shape s{op.heads, op.kv_heads, op.dim};
  const int64_t stride = static_cast<int64_t>(op.kv_heads) * op.dim;
  const uint16_t* keys = op.key_pool + kv_head * op.dim;
  const uint16_t* values = op.value_pool + kv_head * op.dim;
  const int group = s.group(), queries = tile.count * group;
  for (int i = 0; i < queries; ++i) {
    b.queries[i] =
        op.q +
        ((tile.row + i / group) * static_cast<int64_t>(op.heads) + kv_head * group + i % group) * op.dim;
  }
  state.clear(queries, op.dim);
  const int end = std::min((segment + 1) * AttentionPlan::kSegment, tile.position + tile.count);
  for (int key0 = segment * AttentionPlan::kSegment; key0 < end; key0 += kBlock) {
    const int count = std::min(kBlock, end - key0);
    op.k->gather_keys(keys, stride, tile.slots + key0, count, op.dim, b.keys);
    op.k->gather_values(values, stride, tile.slots + key0, count, op.dim, b.values);
    for (int i = 0; i < queries; ++i)
      b.visible[i] = std::clamp(tile.position + i / group + 1 - key0, 0, count);
    op.k->attend_block(b.queries, b.visible, queries, b.keys, b.values, op.dim, state.softmax, state.acc,
                       b.scores);
  }
}

void merge(const AttentionOp& op, const AttentionPlan::Tile& tile, int segment, State into, State from) {
  const int group = op.heads / op.kv_heads;
  for (int i = first_query(tile, segment, group); i < tile.count * group; ++i) {
    merge_segments(*op.k, into.softmax[i], into.acc + i * op.dim, from.softmax[i], from.acc + i * op.dim,
                   op.dim);
  }
}

void write_out(const AttentionOp& op, const AttentionPlan::Tile& tile, int kv_head, State state) {
  const int group = op.heads / op.kv_heads;
  for (int i = 0; i < tile.count * group; ++i) {
    const int64_t row = tile.row + i / group, head = kv_head * group + i % group;
    float* out = op.out.f32 + row * op.out.cols + head * op.dim;
    std::memcpy(out, state.acc + i * op.dim, sizeof(float) * op.dim);
    op.k->scale(1.0f / state.softmax[i].sum, op.dim, out);
    if (op.out.q8 != nullptr) {
      op.k->quantize(out, op.dim, op.out.codes(row) + head * op.dim, op.out.metas(row) + head * op.dim / 32);
    }
  }
}

State partial_state(const AttentionOp& op, int64_t index, int kv_head) {
  const AttentionPlan::Part& part = op.plan->parts[index];
  const int64_t queries = static_cast<int64_t>(op.plan->tiles[part.tile].count) * (op.heads / op.kv_heads);
  float* p = op.plan->partial.data() + part.offset + kv_head * queries * (op.dim + 2);
  return {reinterpret_cast<Softmax*>(p + queries * op.dim), p};
}

}  // namespace

void AttentionPlan::build(int sequences, const int32_t* row, const int32_t* count, const int32_t* position,
                          const int32_t* req_slot, const int32_t* slot_table, int64_t table_rows,
                          int64_t table_stride, int heads, int kv_heads, int dim, int threads) {
  tiles.clear();
  for (int i = 0; i < sequences; ++i) {
    if (req_slot[i] < 0 || req_slot[i] >= table_rows || position[i] < 0 || row[i] < 0 ||
        int64_t{position[i]} + count[i] > table_stride) {
      throw std::out_of_range("attention: sequence " + std::to_string(i) + " lies beside the slot table");
    }
    for (int t = 0; t < count[i]; t += kTileTokens) {
      tiles.push_back({row[i] + t, std::min(kTileTokens, count[i] - t), position[i] + t,
                       slot_table + req_slot[i] * table_stride});
    }
  }
  // Enough units without splitting: then a tile's segments are merged on the spot and need no memory.
  split = static_cast<int64_t>(tiles.size()) * kv_heads < 4 * threads;
  parts.clear();
  first_part.assign(1, 0);
  if (!split) return;
  size_t floats = 0;
  for (size_t tile = 0; tile < tiles.size(); ++tile) {
    for (int s = 0; s < segments_of(tiles[tile]); ++s) {
      parts.push_back({static_cast<int32_t>(tile), s, floats});
      floats += static_cast<size_t>(tiles[tile].count) * heads * (dim + 2);
    }
    first_part.push_back(static_cast<int32_t>(parts.size()));
  }
  partial.resize(floats);
}

void AttentionOp::operator()(Team& team) const {
  const Shape shape{heads, kv_heads, dim};
  Buffers b(team.scratch(Buffers::bytes(shape)), shape);
  if (plan->split) {
    team.for_units(static_cast<int64_t>(plan->parts.size()) * kv_heads, [&](int64_t unit) {
      const auto& [tile, segment, offset] = plan->parts[unit / kv_heads];
      const int kv_head = static_cast<int>(unit % kv_heads);
      attend_segment(*this, plan->tiles[tile], segment, kv_head, b,
                     partial_state(*this, unit / kv_heads, kv_head));
    });
    team.for_last_units(static_cast<int64_t>(plan->tiles.size()) * kv_heads, [&](int64_t unit) {
      const int64_t tile = unit / kv_heads;
      const int kv_head = static_cast<int>(unit % kv_heads);
      const int first = plan->first_part[tile];
      const State state = partial_state(*this, first, kv_head);
      for (int part = first + 1; part < plan->first_part[tile + 1]; ++part) {
        merge(*this, plan->tiles[tile], part - first, state, partial_state(*this, part, kv_head));
      }
      write_out(*this, plan->tiles[tile], kv_head, state);
    });
  } else {
    team.for_last_units(static_cast<int64_t>(plan->tiles.size()) * kv_heads, [&](int64_t unit) {
      const AttentionPlan::Tile& tile = plan->tiles[unit / kv_heads];
      const int kv_head = static_cast<int>(unit % kv_heads);
      attend_segment(*this, tile, 0, kv_head, b, b.running);
      for (int segment = 1; segment < segments_of(tile); ++segment) {
        attend_segment(*this, tile, segment, kv_head, b, b.segment);
        merge(*this, tile, segment, b.running, b.segment);
      }
      write_out(*this, tile, kv_head, b.running);
    });
  }
}

}  // namespace moeserve
