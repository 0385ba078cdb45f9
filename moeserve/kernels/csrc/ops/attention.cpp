// Paged attention, grouped-query or latent, over token-granular slots: who does which piece. The arithmetic is in attention.inl.
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
  int part_heads, dim, value_dim;
  bool is_q8;
  int most_queries() const { return AttentionPlan::kTileTokens * part_heads; }
};

// Online-softmax state of the queries of a tile for some parts of the heads, one part after the other: query i of a part is
// token i / group, head i % group, where `group` is the part's heads.
struct State {
  Softmax* softmax;
  float* acc;  // [queries, value_dim]
  State from(int query, int value_dim) const {
    return {softmax + query, acc + static_cast<int64_t>(query) * value_dim};
  }
  void clear(int queries, int value_dim) {
    std::fill(softmax, softmax + queries, Softmax{-INFINITY, 0.0f});
    std::fill(acc, acc + static_cast<int64_t>(queries) * value_dim, 0.0f);
  }
};

// One thread's buffers, cut from its scratch.
struct Buffers {
  float *keys, *values, *scores;  // of a q8_0 cache, the first two hold codes and scales, which take less
  const float** queries;
  const char** lines;    // of the next block's keys and values
  QueryRow* query_rows;  // the queries as a q8_0 cache wants them
  int *first, *end;      // the keys of a block that each query sees
  State running, segment;
  // A row of float16 has dim / 32 lines, one of codes and scales no more than one besides.
  static size_t most_lines(const Shape& s) { return kBlock * ((s.dim + s.value_dim) / 32 + 2); }
  static size_t bytes(const Shape& s) {
    const size_t q = s.most_queries(), d = s.value_dim;
    return sizeof(float) * (kBlock * (s.dim + d) + q * kBlock + 2 * q * (d + 2)) +
           sizeof(char*) * most_lines(s) +
           q * (sizeof(float*) + 2 * sizeof(int) +
                (s.is_q8 ? sizeof(QueryRow) + query_row_bytes(s.dim) : 0)) +
           64;
  }
  Buffers(void* memory, const Shape& s) {
    const int64_t q = s.most_queries(), d = s.value_dim;
    auto* f = static_cast<float*>(memory);
    keys = f;
    values = keys + kBlock * s.dim;
    scores = values + kBlock * d;
    running.acc = scores + q * kBlock;
    segment.acc = running.acc + q * d;
    running.softmax = reinterpret_cast<Softmax*>(segment.acc + q * d);
    segment.softmax = running.softmax + q;
    queries = reinterpret_cast<const float**>(segment.softmax + q);
    lines = reinterpret_cast<const char**>(queries + q);
    first = reinterpret_cast<int*>(lines + most_lines(s));
    end = first + q;
    if (!s.is_q8) return;
    query_rows = reinterpret_cast<QueryRow*>(end + q);
    auto* codes = reinterpret_cast<int16_t*>(query_rows + q);
    auto* scales = reinterpret_cast<float*>(codes + q * s.dim);
    for (int i = 0; i < q; ++i) query_rows[i] = {codes + i * s.dim, scales + i * (s.dim / 32)};
  }
};

int segments_of(const AttentionPlan::Tile& tile) {
  return (tile.position + tile.count + AttentionPlan::kSegment - 1) / AttentionPlan::kSegment;
}

// The first position that the token at `position` sees.
int first_key(const AttentionOp& op, int position) {
  return op.window > 0 ? std::max(0, position - op.window + 1) : 0;
}

// The first segment that the tile's tokens see; what lies before it is not touched.
int first_segment(const AttentionOp& op, const AttentionPlan::Tile& tile) {
  return first_key(op, tile.position) / AttentionPlan::kSegment;
}

const char** add_lines(const char** to, const void* p, size_t bytes) {
  const auto* line = static_cast<const char*>(p);
  for (size_t i = 0; i < bytes; i += 64) *to++ = line + i;
  return to;
}

// Where keys and values of these slots lie: rows that lie apart are beyond what the CPU foresees. Returns the end.
const char** lines_of(const AttentionOp& op, const int32_t* slots, int count, int kv_head, const char** to) {
  const int64_t stride = op.slot_stride(), offset = op.is_latent ? 0 : kv_head * op.dim;
  for (const KvPool* pool : {&op.keys, &op.values}) {
    if (op.is_latent && pool == &op.values) break;
    for (int key = 0; key < count; ++key) {
      const int64_t at = slots[key] * stride + offset;
      if (pool->is_q8()) {
        to = add_lines(to, pool->codes() + at, op.dim);
        to = add_lines(to, pool->scales + at / 32, 1);
      } else {
        to = add_lines(to, pool->halves() + at, 2 * op.dim);
      }
    }
  }
  return to;
}

// A block of `count` keys of the tile, for `queries` of its queries in `b`.
void attend_halves(const AttentionOp& op, const int32_t* slots, int count, int kv_head, int first_query,
                   int queries, Buffers& b, State state, Upcoming& upcoming) {
  const int64_t stride = op.slot_stride(), offset = op.is_latent ? 0 : kv_head * op.dim;
  op.k->gather_keys(op.keys.halves() + offset, stride, slots, count, op.dim, b.keys);
  op.k->gather_values(op.values.halves() + offset, stride, slots, count, op.value_dim, b.values);
  op.k->attend_block(b.queries + first_query, b.first, b.end, queries, b.keys, b.values, op.dim, op.value_dim,
                     state.softmax, state.acc, b.scores, upcoming);
}

Q8Rows q8_rows(const AttentionOp& op, const KvPool& pool, int kv_head) {
  return {pool.codes() + kv_head * op.dim, pool.scales + kv_head * (op.dim / 32), op.slot_stride()};
}

// The same of a q8_0 cache.
void attend_q8(const AttentionOp& op, const int32_t* slots, int count, int kv_head, int first_query,
               int queries, Buffers& b, State state, Upcoming& upcoming) {
  auto *keys = reinterpret_cast<int16_t*>(b.keys), *values = reinterpret_cast<int16_t*>(b.values);
  float *key_scales = b.keys + kBlock / 2 * op.dim, *value_scales = b.values + kBlock / 2 * op.dim;
  op.k->gather_keys_q8(q8_rows(op, op.keys, kv_head), slots, count, op.dim, keys, key_scales);
  op.k->gather_values_q8(q8_rows(op, op.values, kv_head), slots, count, op.dim, values, value_scales);
  op.k->attend_block_q8(b.query_rows + first_query, b.first, b.end, queries, keys, key_scales, values,
                        value_scales, op.dim, state.softmax, state.acc, b.scores, upcoming);
}

// Parts `part` .. + together - 1. Where they are of several KV heads, a token's keys are read from end to end: as they lie
// in memory, which then foresees the next.
void attend_segment(const AttentionOp& op, const AttentionPlan::Tile& tile, int segment, int part,
                    int together, Buffers& b, State state) {
  const int group = op.part_heads(), queries = tile.count * group;
  for (int i = 0; i < together * queries; ++i) {
    const int64_t row = tile.row + i % queries / group, head = (part + i / queries) * group + i % group;
    b.queries[i] = op.q + (row * op.heads + head) * op.dim;
    if (op.keys.is_q8()) op.k->quantize_query(b.queries[i], op.dim, b.query_rows[i]);
  }
  state.clear(together * queries, op.value_dim);
  const int end = std::min((segment + 1) * AttentionPlan::kSegment, tile.position + tile.count);
  // Blocks begin at multiples of kBlock, whatever the tile: a query's arithmetic does not depend on its neighbours.
  const int begin =
      std::max(segment * AttentionPlan::kSegment, first_key(op, tile.position) / kBlock * kBlock);
  const auto attend = op.keys.is_q8() ? attend_q8 : attend_halves;
  for (int key0 = begin; key0 < end; key0 += kBlock) {
    const int count = std::min(kBlock, end - key0);
    const int32_t* slots = tile.slots + key0;
    for (int i = 0; i < queries; ++i) {
      const int position = tile.position + i / group;
      b.first[i] = std::clamp(first_key(op, position) - key0, 0, kBlock);
      b.end[i] = std::clamp(position + 1 - key0, 0, count);
    }
    for (int p = 0; p < together; ++p) {
      const auto kv_head = [&](int i) { return (part + i) / op.plan->cuts; };
      const char** next = p + 1 < together ? lines_of(op, slots, count, kv_head(p + 1), b.lines)
                                           : lines_of(op, slots + count, std::min(kBlock, end - key0 - count),
                                                      kv_head(0), b.lines);
      Upcoming upcoming{b.lines, static_cast<int>(next - b.lines)};
      attend(op, slots, count, kv_head(p), p * queries, queries, b, state.from(p * queries, op.value_dim),
             upcoming);
    }
  }
}

// Adds a segment to what the tile's queries of `parts` parts have of those before it.
void merge(const AttentionOp& op, const AttentionPlan::Tile& tile, int segment, int parts, State into,
           State from) {
  const int group = op.part_heads(), dim = op.value_dim, queries = tile.count * group;
  for (int i = 0; i < parts * queries; ++i) {
    const int position = tile.position + i % queries / group;
    const int first = first_key(op, position) / AttentionPlan::kSegment;
    if (segment < first || segment > position / AttentionPlan::kSegment) continue;
    if (segment == first) {  // nothing to merge with: its first segment, though not the tile's
      into.softmax[i] = from.softmax[i];
      std::copy_n(from.acc + i * dim, dim, into.acc + i * dim);
      continue;
    }
    merge_segments(*op.k, into.softmax[i], into.acc + i * dim, from.softmax[i], from.acc + i * dim, dim);
  }
}

// What turns the weighted sum of values into their mean: one over the softmax's denominator. A sink is one more logit in
// it, without a value; being the last, it may move the maximum.
float normaliser(const AttentionOp& op, int64_t head, Softmax s) {
  if (op.sinks == nullptr) return 1.0f / s.sum;
  const float m = std::max(s.max, op.sinks[head]);
  const float factor = std::exp(s.max - m);
  return factor / (s.sum * factor + std::exp(op.sinks[head] - m));
}

void write_out(const AttentionOp& op, const AttentionPlan::Tile& tile, int part, int parts, State state) {
  const int group = op.part_heads(), dim = op.value_dim, queries = tile.count * group;
  for (int i = 0; i < parts * queries; ++i) {
    const int64_t row = tile.row + i % queries / group, head = (part + i / queries) * group + i % group;
    const int64_t at = (row * op.heads + head) * dim;
    float* out = op.out.f32 + at;
    std::memcpy(out, state.acc + i * dim, sizeof(float) * dim);
    op.k->scale(normaliser(op, head, state.softmax[i]), dim, out);
    if (op.gate != nullptr) op.k->sigmoid_mul(op.gate + at, dim, out);
    if (op.out.q8 != nullptr) {
      const int64_t out_row = at / op.out.cols, column = at % op.out.cols;
      op.k->quantize(out, dim, op.out.codes(out_row) + column, op.out.metas(out_row) + column / 32);
    }
  }
}

State partial_state(const AttentionOp& op, int64_t index, int part) {
  const AttentionPlan::Part& of = op.plan->parts[index];
  const int64_t queries = static_cast<int64_t>(op.plan->tiles[of.tile].count) * op.part_heads();
  float* p = op.plan->partial.data() + of.offset + part * queries * (op.value_dim + 2);
  return {reinterpret_cast<Softmax*>(p + queries * op.value_dim), p};
}

void copy_state(const AttentionOp& op, int queries, State from, State to) {
  std::copy_n(from.softmax, queries, to.softmax);
  std::copy_n(from.acc, static_cast<int64_t>(queries) * op.value_dim, to.acc);
}

// One segment of a tile, to `partial`.
void attend_part(const AttentionOp& op, int64_t index, int part, int together, Buffers& b, Claim& claim) {
  const auto& [number, segment, offset] = op.plan->parts[index];
  const AttentionPlan::Tile& tile = op.plan->tiles[number];
  if (segment < first_segment(op, tile)) return;
  attend_segment(op, tile, segment, part, together, b, b.segment);
  if (!claim()) return;
  const int queries = tile.count * op.part_heads();
  for (int p = 0; p < together; ++p)
    copy_state(op, queries, b.segment.from(p * queries, op.value_dim), partial_state(op, index, part + p));
}

// All segments of a tile, from `partial`.
void merge_parts(const AttentionOp& op, int64_t number, int part, Buffers& b, Claim& claim) {
  const AttentionPlan::Tile& tile = op.plan->tiles[number];
  const int part0 = op.plan->first_part[number], first = first_segment(op, tile);
  copy_state(op, tile.count * op.part_heads(), partial_state(op, part0 + first, part), b.running);
  for (int segment = first + 1; part0 + segment < op.plan->first_part[number + 1]; ++segment) {
    merge(op, tile, segment, 1, b.running, partial_state(op, part0 + segment, part));
  }
  if (claim()) write_out(op, tile, part, 1, b.running);
}

void attend_tile(const AttentionOp& op, const AttentionPlan::Tile& tile, int part, int together, Buffers& b,
                 Claim& claim) {
  const int first = first_segment(op, tile);
  attend_segment(op, tile, first, part, together, b, b.running);
  for (int segment = first + 1; segment < segments_of(tile); ++segment) {
    attend_segment(op, tile, segment, part, together, b, b.segment);
    merge(op, tile, segment, together, b.running, b.segment);
  }
  if (claim()) write_out(op, tile, part, together, b.running);
}

}  // namespace

void AttentionPlan::build(int sequences, const int32_t* row, const int32_t* count, const int32_t* position,
                          const int32_t* req_slot, const int32_t* slot_table, int64_t table_rows,
                          int64_t table_stride, int heads_, int kv_heads_, int value_dim_, int threads) {
  tiles.clear();
  rows = 0;
  heads = heads_;
  kv_heads = kv_heads_;
  value_dim = value_dim_;
  for (int i = 0; i < sequences; ++i) {
    if (req_slot[i] < 0 || req_slot[i] >= table_rows || position[i] < 0 || row[i] < 0 ||
        int64_t{position[i]} + count[i] > table_stride) {
      throw std::out_of_range("attention: sequence " + std::to_string(i) + " lies beside the slot table");
    }
    rows = std::max(rows, row[i] + count[i]);
    for (int t = 0; t < count[i]; t += kTileTokens) {
      tiles.push_back({row[i] + t, std::min(kTileTokens, count[i] - t), position[i] + t,
                       slot_table + req_slot[i] * table_stride});
    }
  }
  // Enough units without splitting: then a tile's segments are merged on the spot and need no memory. So are those of a
  // single segment: then it is one phase instead of two.
  const auto is_long = [](const Tile& tile) { return segments_of(tile) > 1; };
  const int64_t units = static_cast<int64_t>(tiles.size()) * kv_heads;
  split = units < 4 * threads && std::any_of(tiles.begin(), tiles.end(), is_long);
  parts.clear();
  first_part.assign(1, 0);
  cuts = together = 1;
  if (!split) {
    cut_heads(units, threads);
    return join_heads(units, threads);
  }
  size_t floats = 0;
  for (size_t tile = 0; tile < tiles.size(); ++tile) {
    for (int s = 0; s < segments_of(tiles[tile]); ++s) {
      parts.push_back({static_cast<int32_t>(tile), s, floats});
      floats += static_cast<size_t>(tiles[tile].count) * heads * (value_dim + 2);
    }
    first_part.push_back(static_cast<int32_t>(parts.size()));
  }
  partial.resize(floats);
  cut_heads(static_cast<int64_t>(parts.size()) * kv_heads, threads);
  join_heads(static_cast<int64_t>(parts.size()) * kv_heads, threads);
}

// units: pieces of work without cuts. The kernel takes four queries at once: a part of fewer gains nothing.
void AttentionPlan::cut_heads(int64_t units, int threads) {
  constexpr int kLeastHeads = 4;
  while (units * cuts < threads && heads / kv_heads % (2 * cuts * kLeastHeads) == 0) cuts *= 2;
}

// The same: as many KV heads together as leave enough units, and have room where a tile of kTileTokens has it.
void AttentionPlan::join_heads(int64_t units, int threads) {
  int most = 1;
  for (const Tile& tile : tiles) most = std::max(most, tile.count);
  while (cuts == 1 && kv_heads % (2 * together) == 0 && 2 * together * most <= kTileTokens &&
         units / (2 * together) >= 4 * threads) {
    together *= 2;
  }
}

void AttentionOp::operator()(Team& team) const {
  const Shape shape{part_heads(), dim, value_dim, keys.is_q8()};
  Buffers b(team.scratch(Buffers::bytes(shape)), shape);
  const int parts = this->parts(), together = is_latent ? 1 : plan->together, joined = parts / together;
  if (plan->split) {
    team.for_claimed_units(
        static_cast<int64_t>(plan->parts.size()) * joined, [&](int64_t unit, Claim& claim) {
          attend_part(*this, unit / joined, static_cast<int>(unit % joined) * together, together, b, claim);
        });
    team.for_claimed_units(static_cast<int64_t>(plan->tiles.size()) * parts, [&](int64_t unit, Claim& claim) {
      merge_parts(*this, unit / parts, static_cast<int>(unit % parts), b, claim);
    });
  } else {
    team.for_claimed_units(static_cast<int64_t>(plan->tiles.size()) * joined,
                           [&](int64_t unit, Claim& claim) {
                             attend_tile(*this, plan->tiles[unit / joined],
                                         static_cast<int>(unit % joined) * together, together, b, claim);
                           });
  }
}

}  // namespace moeserve
