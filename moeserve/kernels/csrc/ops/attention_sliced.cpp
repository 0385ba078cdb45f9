// Attention of few queries on many threads, in two passes: first all scores, divided by keys; then softmax and weighted
// sums, divided by columns of the values. So each key and value is read by one thread or few, where dividing by heads
// would leave threads idle or read the same keys several times. A query's arithmetic is that of attention.cpp: the same
// bits.
#include <cstring>

#include "attention_parts.h"

namespace moeserve {
namespace {

constexpr int kChunkBlocks = 2;  // key blocks per unit of the first pass

// The queries of one KV head, token by token, `group` per token.
struct Queries {
  const AttentionPlan::Tile& tile;
  int group, kv_head;
  int count() const { return tile.count * group; }
  int64_t row(int i) const { return tile.row + i / group; }
  int64_t head(int i) const { return int64_t{kv_head} * group + i % group; }
};

Queries queries_of(const AttentionOp& op, int64_t part, int kv_head) {
  return {op.plan->tiles[op.plan->parts[part].tile], op.heads / op.kv_heads, kv_head};
}

// Returns the scores of a part's queries with a block: [queries][32].
float* scores_of(const AttentionOp& op, int64_t part, const Queries& queries, int block) {
  return op.plan->scores.data() + op.plan->parts[part].scores +
         (int64_t{queries.kv_head} * blocks_of(queries.tile, op.plan->parts[part].segment) + block) *
             queries.count() * kKeyBlock;
}

// Collects the cache lines of float16 keys or values: `bytes` from `base` on in each of `count` slots.
Upcoming lines_of(const uint16_t* base, int64_t stride, const int32_t* slots, int count, int bytes,
                  const char** lines) {
  int n = 0;
  for (int key = 0; key < count; ++key) {
    const auto* line = reinterpret_cast<const char*>(base + slots[key] * stride);
    for (int i = 0; i < bytes; i += 64) lines[n++] = line + i;
  }
  return {lines, n};
}

// A thread's buffers, cut from its scratch.
struct Buffers {
  float *block, *scores, *acc, *merged;  // keys [dim][32], or values [32][kValueSlice]
  Softmax *softmax, *merged_softmax;
  const float** queries;
  const char** lines;
  int *first, *end;
  static size_t bytes(size_t q, size_t dim) {
    return sizeof(float) * (kKeyBlock * dim + q * (kChunkBlocks * kKeyBlock + 2 * kValueSlice)) +
           q * (2 * sizeof(Softmax) + sizeof(float*) + 2 * sizeof(int)) +
           sizeof(char*) * kKeyBlock * (dim / 32) + 64;
  }
  Buffers(void* memory, int64_t q, int64_t dim) {
    block = static_cast<float*>(memory);
    scores = block + kKeyBlock * std::max<int64_t>(dim, kValueSlice);
    acc = scores + q * kChunkBlocks * kKeyBlock;
    merged = acc + q * kValueSlice;
    queries = reinterpret_cast<const float**>(merged + q * kValueSlice);
    lines = reinterpret_cast<const char**>(queries + q);
    softmax = reinterpret_cast<Softmax*>(lines + kKeyBlock * (dim / 32));
    merged_softmax = softmax + q;
    first = reinterpret_cast<int*>(merged_softmax + q);
    end = first + q;
  }
};

// Computes the scores of one KV head's queries with the blocks of a chunk.
void score_chunk(const AttentionOp& op, int64_t part, int kv_head, int chunk, Buffers& b, Claim& claim) {
  const Queries queries = queries_of(op, part, kv_head);
  const int segment = op.plan->parts[part].segment, n = queries.count();
  const KeyRange keys = keys_of(op, queries.tile, segment);
  const int chunk0 = segment * AttentionPlan::kSegment + chunk * kChunkBlocks * kKeyBlock;
  const int begin = std::max(chunk0, keys.begin), end = std::min(chunk0 + kChunkBlocks * kKeyBlock, keys.end);
  if (begin >= end) return;
  for (int i = 0; i < n; ++i) b.queries[i] = op.q + (queries.row(i) * op.heads + queries.head(i)) * op.dim;
  const uint16_t* base = op.keys.halves() + int64_t{kv_head} * op.dim;
  for (int key0 = begin; key0 < end; key0 += kKeyBlock) {
    const int count = std::min(kKeyBlock, end - key0);
    const int32_t* slots = queries.tile.slots + key0;
    op.k->gather_keys(base, op.key_stride(), slots, count, op.dim, b.block);
    Upcoming next = lines_of(base, op.key_stride(), slots + count, std::min(kKeyBlock, end - key0 - count),
                             2 * op.dim, b.lines);
    op.k->score_block(b.queries, n, b.block, op.dim, b.scores + (key0 - begin) * n, next);
  }
  if (!claim()) return;
  const int blocks = (end - begin + kKeyBlock - 1) / kKeyBlock;
  cap_scores(op, blocks * n, b.scores);
  const int block = (begin - segment * AttentionPlan::kSegment) / kKeyBlock;
  std::copy_n(b.scores, int64_t{blocks} * n * kKeyBlock, scores_of(op, part, queries, block));
}

// Computes one slice of a part's weighted sums of values: softmax, acc [queries, kValueSlice].
void weigh_slice(const AttentionOp& op, int64_t part, const Queries& queries, int slice, Buffers& b) {
  const int segment = op.plan->parts[part].segment, n = queries.count();
  const KeyRange keys = keys_of(op, queries.tile, segment);
  const uint16_t* base = op.values.halves() + int64_t{queries.kv_head} * op.value_dim + slice * kValueSlice;
  std::fill_n(b.softmax, n, Softmax{-INFINITY, 0.0f});
  std::fill_n(b.acc, n * kValueSlice, 0.0f);
  for (int key0 = keys.begin; key0 < keys.end; key0 += kKeyBlock) {
    const int count = std::min(kKeyBlock, keys.end - key0);
    const int32_t* slots = queries.tile.slots + key0;
    op.k->gather_values(base, op.value_stride(), slots, count, kValueSlice, b.block);
    seen_keys(op, queries.tile, queries.group, key0, count, b.first, b.end);
    const int block = (key0 - segment * AttentionPlan::kSegment) / kKeyBlock;
    std::copy_n(scores_of(op, part, queries, block), int64_t{n} * kKeyBlock, b.scores);
    Upcoming next = lines_of(base, op.value_stride(), slots + count,
                             std::min(kKeyBlock, keys.end - key0 - count), 2 * kValueSlice, b.lines);
    op.k->weigh_block(b.scores, b.first, b.end, n, b.block, kValueSlice, b.softmax, b.acc, next);
  }
}

// Returns a part's [queries][value_dim] sums and their softmax states, in attention.cpp's layout.
float* partial_of(const AttentionOp& op, int64_t part, const Queries& queries) {
  return op.plan->partial.data() + op.plan->parts[part].offset +
         int64_t{queries.kv_head} * queries.count() * (op.value_dim + 2);
}

Softmax* partial_softmax(const AttentionOp& op, int64_t part, const Queries& queries) {
  return reinterpret_cast<Softmax*>(partial_of(op, part, queries) + int64_t{queries.count()} * op.value_dim);
}

void write_slice(const AttentionOp& op, const Queries& queries, int slice, const float* acc,
                 const Softmax* softmax) {
  for (int i = 0; i < queries.count(); ++i) {
    write_head(op, queries.row(i), queries.head(i), slice * kValueSlice, kValueSlice, acc + i * kValueSlice,
               softmax[i]);
  }
}

// Computes a slice of a part: the result if it is the tile's only part, else its share in `partial`.
void attend_slice(const AttentionOp& op, int64_t part, int kv_head, int slice, Buffers& b, Claim& claim) {
  const Queries queries = queries_of(op, part, kv_head);
  if (op.plan->parts[part].segment < first_segment(op, queries.tile)) return;
  weigh_slice(op, part, queries, slice, b);
  if (!claim()) return;
  if (!op.plan->split) return write_slice(op, queries, slice, b.acc, b.softmax);
  float* to = partial_of(op, part, queries) + slice * kValueSlice;
  for (int i = 0; i < queries.count(); ++i)
    std::copy_n(b.acc + i * kValueSlice, kValueSlice, to + int64_t{i} * op.value_dim);
  if (slice == 0) std::copy_n(b.softmax, queries.count(), partial_softmax(op, part, queries));
}

// Merges a slice of all segments of a tile from `partial`.
void merge_slices(const AttentionOp& op, int64_t number, int kv_head, int slice, Buffers& b, Claim& claim) {
  const AttentionPlan::Tile& tile = op.plan->tiles[number];
  const int64_t part0 = op.plan->first_part[number], parts = op.plan->first_part[number + 1] - part0;
  const Queries queries = queries_of(op, part0, kv_head);
  for (int segment = first_segment(op, tile); segment < parts; ++segment) {
    const float* from = partial_of(op, part0 + segment, queries) + slice * kValueSlice;
    const Softmax* softmax = partial_softmax(op, part0 + segment, queries);
    for (int i = 0; i < queries.count(); ++i) {
      float* into = b.merged + i * kValueSlice;
      const float* acc = from + int64_t{i} * op.value_dim;
      if (segment == first_segment(op, tile)) {
        b.merged_softmax[i] = softmax[i];
        std::copy_n(acc, kValueSlice, into);
      } else {
        merge_query(op, tile, i / queries.group, segment, kValueSlice, b.merged_softmax[i], into, softmax[i],
                    acc);
      }
    }
  }
  if (claim()) write_slice(op, queries, slice, b.merged, b.merged_softmax);
}

// Returns the largest number of chunks of any part and KV head; shorter parts have empty chunks.
int64_t chunks_of(const AttentionPlan& plan) {
  int most = 0;
  for (const AttentionPlan::Part& part : plan.parts)
    most = std::max(most, blocks_of(plan.tiles[part.tile], part.segment));
  return (most + kChunkBlocks - 1) / kChunkBlocks;
}

// Returns the memory of some columns of a part's keys or values, from its key number `from` on.
BytesAhead columns_ahead(const AttentionOp& op, int64_t part, const uint16_t* columns, int64_t stride,
                         int count, int from, int keys) {
  const AttentionPlan::Tile& tile = op.plan->tiles[op.plan->parts[part].tile];
  const int first = op.plan->parts[part].segment * AttentionPlan::kSegment + from;
  const int end = std::min(first + keys, tile.end);
  if (first >= end) return {};
  return {reinterpret_cast<const uint8_t*>(columns), 2 * stride, tile.slots + first, end - first, 2 * count};
}

// Returns the memory that a thread reads first in the second pass.
BytesAhead first_values(const AttentionOp& op, const Team& team) {
  const int64_t slices = op.plan->slices, heads = op.kv_heads;
  const auto [unit, count] = team.own_units(static_cast<int64_t>(op.plan->parts.size()) * heads * slices);
  if (count == 0) return {};
  const uint16_t* columns =
      op.values.halves() + unit / slices % heads * op.value_dim + unit % slices * kValueSlice;
  return columns_ahead(op, unit / (heads * slices), columns, op.value_stride(), kValueSlice, 0,
                       AttentionPlan::kSegment);
}

}  // namespace

// Returns the memory that a thread reads first in the first pass.
BytesAhead first_keys(const AttentionOp& op, const Team& team) {
  const int64_t chunks = chunks_of(*op.plan), heads = op.kv_heads;
  const auto [unit, count] = team.own_units(static_cast<int64_t>(op.plan->parts.size()) * heads * chunks);
  if (count == 0) return {};
  constexpr int kKeys = kChunkBlocks * kKeyBlock;
  return columns_ahead(op, unit / (heads * chunks), op.keys.halves() + unit / chunks % heads * op.dim,
                       op.key_stride(), op.dim, static_cast<int>(unit % chunks) * kKeys,
                       static_cast<int>(std::min(count, chunks - unit % chunks)) * kKeys);
}

void attend_sliced(const AttentionOp& op, Team& team) {
  const AttentionPlan& plan = *op.plan;
  const int64_t queries = int64_t{AttentionPlan::kTileTokens} * op.heads / op.kv_heads;
  Buffers b(team.scratch(Buffers::bytes(queries, op.dim)), queries, op.dim);
  const int64_t parts = static_cast<int64_t>(plan.parts.size()), heads = op.kv_heads, slices = plan.slices;
  const int64_t chunks = chunks_of(plan);
  BytesAhead ahead = first_values(op, team);
  team.for_claimed_units(
      parts * heads * chunks,
      [&](int64_t unit, Claim& claim) {
        score_chunk(op, unit / (heads * chunks), static_cast<int>(unit / chunks % heads),
                    static_cast<int>(unit % chunks), b, claim);
      },
      [&] { return ahead.fetch(); });
  if (!plan.split) team.last_phase();
  team.for_claimed_units(parts * heads * slices, [&](int64_t unit, Claim& claim) {
    attend_slice(op, unit / (heads * slices), static_cast<int>(unit / slices % heads),
                 static_cast<int>(unit % slices), b, claim);
  });
  if (!plan.split) return;
  team.last_phase();
  team.for_claimed_units(static_cast<int64_t>(plan.tiles.size()) * heads * slices,
                         [&](int64_t unit, Claim& claim) {
                           merge_slices(op, unit / (heads * slices), static_cast<int>(unit / slices % heads),
                                        static_cast<int>(unit % slices), b, claim);
                         });
}

}  // namespace moeserve
