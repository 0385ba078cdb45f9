// Paged attention, grouped-query or latent, over token-granular slots: divides the work among threads. The arithmetic
// is in attention.inl.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention_parts.h"

namespace moeserve {
namespace {

struct Shape {
  int part_heads, dim, value_dim;
  bool is_q8;
  int most_queries() const { return AttentionPlan::kTileTokens * part_heads; }
};

// Online-softmax state of a tile's queries for some parts of the heads, one part after the other. Query i of a part is
// token i / group, head i % group; `group` is the number of heads in the part.
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
  float *keys, *values, *scores;  // for a q8_0 cache the first two hold codes and scales, which are smaller
  const float** queries;
  const char** lines;    // of the next block's keys and values
  QueryRow* query_rows;  // the queries, converted for a q8_0 cache
  int *first, *end;      // the range of a block's keys that each query sees
  State running, segment;
  // A float16 row has dim / 32 lines; codes and scales together at most one more.
  static size_t most_lines(const Shape& s) { return kKeyBlock * ((s.dim + s.value_dim) / 32 + 2); }
  static size_t bytes(const Shape& s) {
    const size_t q = s.most_queries(), d = s.value_dim;
    return sizeof(float) * (kKeyBlock * (s.dim + d) + q * kKeyBlock + 2 * q * (d + 2)) +
           sizeof(char*) * most_lines(s) +
           q * (sizeof(float*) + 2 * sizeof(int) +
                (s.is_q8 ? sizeof(QueryRow) + query_row_bytes(s.dim) : 0)) +
           64;
  }
  Buffers(void* memory, const Shape& s) {
    const int64_t q = s.most_queries(), d = s.value_dim;
    auto* f = static_cast<float*>(memory);
    keys = f;
    values = keys + kKeyBlock * s.dim;
    scores = values + kKeyBlock * d;
    running.acc = scores + q * kKeyBlock;
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

const char** add_lines(const char** to, const void* p, size_t bytes) {
  const auto* line = static_cast<const char*>(p);
  for (size_t i = 0; i < bytes; i += 64) *to++ = line + i;
  return to;
}

// Collects the cache lines of these slots' keys and values, which the CPU's prefetcher cannot predict. Returns the end.
const char** lines_of(const AttentionOp& op, const int32_t* slots, int count, int kv_head, const char** to) {
  for (const KvPool* pool : {&op.keys, &op.values}) {
    const bool is_keys = pool == &op.keys;
    if (op.is_latent && !is_keys) break;
    const int dim = is_keys ? op.dim : op.value_dim;
    const int64_t stride = is_keys ? op.key_stride() : op.value_stride();
    const int64_t offset = op.is_latent ? 0 : int64_t{kv_head} * dim;
    for (int key = 0; key < count; ++key) {
      const int64_t at = slots[key] * stride + offset;
      if (pool->is_q8()) {
        to = add_lines(to, pool->codes() + at, dim);
        to = add_lines(to, pool->scales + at / 32, 1);
      } else {
        to = add_lines(to, pool->halves() + at, 2 * dim);
      }
    }
  }
  return to;
}

// Attends a block of `count` keys for `queries` of the tile's queries in `b`; float16 cache.
void attend_halves(const AttentionOp& op, const int32_t* slots, int count, int kv_head, int first_query,
                   int queries, Buffers& b, State state, Upcoming& upcoming) {
  const int64_t head = op.is_latent ? 0 : kv_head;
  op.k->gather_keys(op.keys.halves() + head * op.dim, op.key_stride(), slots, count, op.dim, b.keys);
  op.k->gather_values(op.values.halves() + head * op.value_dim, op.value_stride(), slots, count, op.value_dim,
                      b.values);
  const float** of = b.queries + first_query;
  if (op.score_cap > 0.0f) {
    op.k->score_block(of, queries, b.keys, op.dim, b.scores, upcoming);
    cap_scores(op, queries, b.scores);
    op.k->weigh_block(b.scores, b.first, b.end, queries, b.values, op.value_dim, state.softmax, state.acc,
                      upcoming);
    return;
  }
  op.k->attend_block(of, b.first, b.end, queries, b.keys, b.values, op.dim, op.value_dim, state.softmax,
                     state.acc, b.scores, upcoming);
}

Q8Rows q8_rows(const AttentionOp& op, const KvPool& pool, int kv_head) {
  return {pool.codes() + kv_head * op.dim, pool.scales + kv_head * (op.dim / 32), op.key_stride()};
}

// The same for a q8_0 cache, whose keys and values have the same width.
void attend_q8(const AttentionOp& op, const int32_t* slots, int count, int kv_head, int first_query,
               int queries, Buffers& b, State state, Upcoming& upcoming) {
  auto *keys = reinterpret_cast<int16_t*>(b.keys), *values = reinterpret_cast<int16_t*>(b.values);
  float *key_scales = b.keys + kKeyBlock / 2 * op.dim, *value_scales = b.values + kKeyBlock / 2 * op.dim;
  op.k->gather_keys_q8(q8_rows(op, op.keys, kv_head), slots, count, op.dim, keys, key_scales);
  op.k->gather_values_q8(q8_rows(op, op.values, kv_head), slots, count, op.dim, values, value_scales);
  op.k->attend_block_q8(b.query_rows + first_query, b.first, b.end, queries, keys, key_scales, values,
                        value_scales, op.dim, state.softmax, state.acc, b.scores, upcoming);
}

// Attends parts `part` .. part + together - 1. If these span several KV heads, a token's keys are read from end to end,
// as they are in memory, so that the CPU prefetches the next. The parts of latent attention have the same keys.
void attend_segment(const AttentionOp& op, const AttentionPlan::Tile& tile, int segment, int part,
                    int together, Buffers& b, State state) {
  const int group = op.part_heads(), queries = tile.count * group;
  const int sharing = op.is_latent ? together : 1;  // parts with the same keys
  for (int i = 0; i < together * queries; ++i) {
    const int64_t row = tile.row + i % queries / group, head = (part + i / queries) * group + i % group;
    b.queries[i] = op.q + (row * op.heads + head) * op.dim;
    if (op.keys.is_q8()) op.k->quantize_query(b.queries[i], op.dim, b.query_rows[i]);
  }
  state.clear(together * queries, op.value_dim);
  const auto [begin, end] = keys_of(op, tile, segment);
  const auto attend = op.keys.is_q8() ? attend_q8 : attend_halves;
  for (int key0 = begin; key0 < end; key0 += kKeyBlock) {
    const int count = std::min(kKeyBlock, end - key0);
    const int32_t* slots = tile.slots + key0;
    seen_keys(op, tile, group, key0, count, b.first, b.end);
    for (int i = queries; i < sharing * queries; ++i)
      b.first[i] = b.first[i - queries], b.end[i] = b.end[i - queries];
    for (int p = 0; p < together; p += sharing) {
      const auto kv_head = [&](int i) { return (part + i) / op.plan->cuts; };
      const char** next =
          p + sharing < together
              ? lines_of(op, slots, count, kv_head(p + 1), b.lines)
              : lines_of(op, slots + count, std::min(kKeyBlock, end - key0 - count), kv_head(0), b.lines);
      Upcoming upcoming{b.lines, static_cast<int>(next - b.lines)};
      attend(op, slots, count, kv_head(p), p * queries, sharing * queries, b,
             state.from(p * queries, op.value_dim), upcoming);
    }
  }
}

// Merges a segment into the results that the tile's queries, of `parts` parts, have from the segments before.
void merge(const AttentionOp& op, const AttentionPlan::Tile& tile, int segment, int parts, State into,
           State from) {
  const int group = op.part_heads(), dim = op.value_dim, queries = tile.count * group;
  for (int i = 0; i < parts * queries; ++i) {
    merge_query(op, tile, i % queries / group, segment, dim, into.softmax[i], into.acc + i * dim,
                from.softmax[i], from.acc + i * dim);
  }
}

void write_out(const AttentionOp& op, const AttentionPlan::Tile& tile, int part, int parts, State state) {
  const int group = op.part_heads(), dim = op.value_dim, queries = tile.count * group;
  for (int i = 0; i < parts * queries; ++i) {
    const int64_t row = tile.row + i % queries / group, head = (part + i / queries) * group + i % group;
    write_head(op, row, head, 0, dim, state.acc + i * dim, state.softmax[i]);
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

// Attends one segment of a tile and writes to `partial`.
void attend_part(const AttentionOp& op, int64_t index, int part, int together, Buffers& b, Claim& claim) {
  const int segment = op.plan->parts[index].segment;
  const AttentionPlan::Tile& tile = op.plan->tiles[op.plan->parts[index].tile];
  if (segment < first_segment(op, tile)) return;
  attend_segment(op, tile, segment, part, together, b, b.segment);
  if (!claim()) return;
  const int queries = tile.count * op.part_heads();
  for (int p = 0; p < together; ++p)
    copy_state(op, queries, b.segment.from(p * queries, op.value_dim), partial_state(op, index, part + p));
}

// Merges all segments of a tile from `partial`.
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
                          int64_t table_stride, int heads_, int kv_heads_, int value_dim_, int threads,
                          const int32_t* ends, int64_t num_ends, const ChoiceRule& rule) {
  begin(0, heads_, kv_heads_, value_dim_);
  choice.begin(rule, kv_heads_);
  row_ends.assign(ends, ends + num_ends);
  for (int i = 0; i < sequences; ++i) {
    if (req_slot[i] < 0 || req_slot[i] >= table_rows || position[i] < 0 || row[i] < 0 ||
        int64_t{position[i]} + count[i] > table_stride) {
      throw std::out_of_range("attention: sequence " + std::to_string(i) + " lies beside the slot table");
    }
    rows = std::max(rows, row[i] + count[i]);
    for (int t = 0; !row_ends.empty() && t < count[i]; ++t) {
      if (row[i] + t < num_ends && ends[row[i] + t] > position[i] + t &&
          ends[row[i] + t] <= position[i] + count[i])
        continue;
      throw std::out_of_range("attention: row " + std::to_string(row[i] + t) +
                              " does not see itself, or sees beyond its sequence");
    }
    const int32_t* slots = slot_table + req_slot[i] * table_stride;
    choice.add({row[i], count[i], position[i], slots});
    const int all = rule.top > 0 ? std::clamp(choice.first_choosing() - position[i], 0, count[i]) : count[i];
    add_tiles(row[i], all, position[i], slots);
  }
  choice.finish();
  if (rule.by_head()) {
    if (by_head == nullptr) by_head = std::make_unique<AttentionPlan>();
    by_head->begin(rows * kv_heads, heads / kv_heads, 1, value_dim);
    by_head->add_chosen_tiles(choice);
    by_head->divide(threads);
  } else {
    by_head.reset();
    add_chosen_tiles(choice);
  }
  divide(threads);
}

void AttentionPlan::begin(int rows_, int heads_, int kv_heads_, int value_dim_) {
  tiles.clear();
  rows = rows_;
  heads = heads_;
  kv_heads = kv_heads_;
  value_dim = value_dim_;
}

// Divides the tiles among the threads.
void AttentionPlan::divide(int threads) {
  // With enough units, tiles are not split: their segments are merged at once and need no memory. Nor are tiles of one
  // segment: that takes one phase instead of two.
  const auto is_long = [](const Tile& tile) { return segments_of(tile) > 1; };
  const int64_t units = static_cast<int64_t>(tiles.size()) * kv_heads;
  split = units < 4 * threads && std::any_of(tiles.begin(), tiles.end(), is_long);
  const size_t num_scores = add_parts();
  const int64_t all = static_cast<int64_t>(parts.size()) * kv_heads;
  slices = leaves_threads_idle(all, threads) ? value_dim / kValueSlice : 0;
  if (slices > 0) scores.resize(num_scores);
  cuts = 1;
  cut_heads(split ? all : units, threads);
  join_heads(split ? all : units, threads);
}

// Adds the tiles of one sequence.
void AttentionPlan::add_tiles(int row, int count, int position, const int32_t* slots) {
  for (int t = 0; t < count; t += kTileTokens) {
    const int n = std::min(kTileTokens, count - t);
    Tile tile{row + t, n, position + t, position + t + n, slots, nullptr};
    if (!row_ends.empty()) {
      tile.ends = row_ends.data() + row + t;
      tile.end = *std::max_element(tile.ends, tile.ends + n);
    }
    tiles.push_back(tile);
  }
}

// Adds a tile for each list of chosen keys.
void AttentionPlan::add_chosen_tiles(const KeyChoice& of) {
  for (const KeyChoice::Tile& rows_of : of.tiles) {
    for (int i = 0; i < rows_of.count * of.heads; ++i) {
      const auto [t, head] = std::div(i, of.heads);
      const int length = of.list_length(rows_of.position + t);
      const int32_t* list = of.list(rows_of.list + t, head);
      tiles.push_back({rows_of.row * of.heads + i, 1, length - 1, length, list, nullptr});
    }
  }
}

// Adds a part for each segment or, if tiles are not split, for each tile. Returns the number of scores of all parts.
size_t AttentionPlan::add_parts() {
  parts.clear();
  first_part.assign(1, 0);
  size_t floats = 0, num_scores = 0;
  for (size_t tile = 0; tile < tiles.size(); ++tile) {
    for (int s = 0; s < (split ? segments_of(tiles[tile]) : 1); ++s) {
      parts.push_back({static_cast<int32_t>(tile), s, floats, num_scores});
      const size_t queries = static_cast<size_t>(tiles[tile].count) * heads;
      floats += queries * (value_dim + 2);
      num_scores += queries * blocks_of(tiles[tile], s) * kKeyBlock;
    }
    first_part.push_back(static_cast<int32_t>(parts.size()));
  }
  if (split) partial.resize(floats);
  return num_scores;
}

// Returns whether dividing by heads alone gives too few units, so that threads wait for each other. With one unit or more
// per thread, keys are better read in memory order: 32 units took 15 threads 225 us, by keys and columns 262 us.
bool AttentionPlan::leaves_threads_idle(int64_t units, int threads) {
  if (4 * units >= int64_t{5} * threads) return false;
  const int64_t rounds = (units + threads - 1) / threads;
  return 20 * units < 17 * rounds * threads;
}

// units: work units before cutting. The kernel processes four queries at once, so smaller units gain nothing.
void AttentionPlan::cut_heads(int64_t units, int threads) {
  constexpr int kLeastHeads = 4;
  while (units * cuts < threads && heads / kv_heads % (2 * cuts * kLeastHeads) == 0) cuts *= 2;
}

// Joins KV heads into one unit: as many as leave enough units and as fit in the buffers of a full tile.
void AttentionPlan::join_heads(int64_t units, int threads) {
  int most = 1;
  for (const Tile& tile : tiles) most = std::max(most, tile.count);
  const auto joined = [&](const auto& are_enough) {
    int heads = 1;
    while (cuts == 1 && kv_heads % (2 * heads) == 0 && 2 * heads * most <= kTileTokens &&
           are_enough(units / (2 * heads)))
      heads *= 2;
    return heads;
  };
  together = joined([&](int64_t left) { return left >= 4 * threads; });
  // Gathering takes as long as attending with some eight heads.
  latent_together =
      joined([&](int64_t left) { return left >= 4 * threads || (left >= threads && left % threads == 0); });
}

BytesAhead AttentionOp::reads_first(const Team& team) const {
  return is_sliced() ? first_keys(*this, team) : BytesAhead();
}

void AttentionOp::operator()(Team& team) const {
  if (is_sliced()) return attend_sliced(*this, team);
  const Shape shape{part_heads(), dim, value_dim, keys.is_q8()};
  Buffers b(team.scratch(Buffers::bytes(shape)), shape);
  const int parts = this->parts(), together = is_latent ? plan->latent_together : plan->together,
            joined = parts / together;
  if (plan->split) {
    team.for_claimed_units(
        static_cast<int64_t>(plan->parts.size()) * joined, [&](int64_t unit, Claim& claim) {
          attend_part(*this, unit / joined, static_cast<int>(unit % joined) * together, together, b, claim);
        });
    team.last_phase();
    team.for_claimed_units(static_cast<int64_t>(plan->tiles.size()) * parts, [&](int64_t unit, Claim& claim) {
      merge_parts(*this, unit / parts, static_cast<int>(unit % parts), b, claim);
    });
  } else {
    team.last_phase();
    team.for_claimed_units(static_cast<int64_t>(plan->tiles.size()) * joined,
                           [&](int64_t unit, Claim& claim) {
                             attend_tile(*this, plan->tiles[unit / joined],
                                         static_cast<int>(unit % joined) * together, together, b, claim);
                           });
  }
}

}  // namespace moeserve
