// The keys that an indexer chooses for a step's rows: which rows choose, and the lists of the chosen. An attention plan
// has one; rows that choose attend to their list as if it were a sequence of their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moeserve {

// kernels/choice_rule.py.
struct ChoiceRule {
  int top = 0;    // blocks chosen per row; 0: rows attend to all keys
  int block = 1;  // keys of a block
  // 0: a block has one index key, in the slot of its last key. Above 0: every key has one, a block's score is the
  // highest of its keys' scores, a row always attends to its last `local` blocks, and each KV head chooses.
  int local = 0;
  bool by_head() const { return local > 0; }
};

struct KeyChoice {
  static constexpr int kTileTokens = 16;
  static constexpr int kSegment = 1024;  // index keys per unit of work, but at least one block's
  // Scores that are kept at once, unless a single tile has more. Rows beyond are scored afterwards.
  static constexpr int64_t kMostScores = int64_t{1} << 22;

  struct Tile {            // consecutive rows of one sequence that choose
    int32_t row;           // first row in the step
    int32_t count;         // <= kTileTokens
    int32_t position;      // of the first row
    int32_t list;          // of the first row
    const int32_t* slots;  // KV slot of each position of the sequence
    int64_t stride;        // scores of blocks per row and head, in `scores`
    int64_t scores;        // offset of the first row's scores: [count, heads, stride]
  };
  struct Part {  // a tile's work on `segment_blocks` blocks
    int32_t tile, segment;
  };
  struct Group {  // tiles whose scores are in memory together
    int32_t first_tile, end_tile, first_part, end_part;
  };
  struct Rows {  // all rows of one sequence
    int32_t row, count, position;
    const int32_t* slots;
  };

  ChoiceRule rule;
  int heads = 1;          // choices per row: one for all KV heads, or one for each
  bool has_lists = true;  // false: the owner keeps the chosen keys elsewhere

  // A row scores the blocks before its tail: the local blocks, or an incomplete block, to which it always attends.
  int blocks(int position) const {
    return rule.local > 0 ? std::max(0, position / rule.block + 1 - rule.local) : (position + 1) / rule.block;
  }
  // The first position whose row has more blocks than are chosen.
  int first_choosing() const {
    return rule.local > 0 ? (rule.top + rule.local) * rule.block : (rule.top + 1) * rule.block - 1;
  }
  // Number of keys in the list of the row at `position`: the chosen blocks' keys, then the tail's.
  int list_length(int position) const {
    return rule.top * rule.block + position + 1 - blocks(position) * rule.block;
  }
  int list_stride() const {
    return (rule.top + rule.local) * rule.block + (rule.local > 0 ? 0 : rule.block - 1);
  }
  const int32_t* list(int64_t row, int head) const {
    return lists.data() + (row * heads + head) * list_stride();
  }
  int32_t* list(int64_t row, int head) { return lists.data() + (row * heads + head) * list_stride(); }

  // Empties the plan.
  void begin(const ChoiceRule& rule, int kv_heads);
  // Adds a sequence's rows.
  void add(const Rows& sequence);
  // After the last sequence: allocates lists and scores. Lists are valid slots at any time: late threads read them.
  void finish();

  bool has_choosing() const { return !tiles.empty(); }

  // Calls each(row, position, slots, whether the row completes a block of `pooled` positions) for the sequences' rows.
  template <class Team, class Each>
  void for_rows(Team& team, int pooled, const Each& each) const {
    team.for_units(static_cast<int64_t>(sequence_of.size()), [&](int64_t row) {
      if (sequence_of[row] < 0) return;
      const Rows& of = sequences[sequence_of[row]];
      const int position = of.position + static_cast<int>(row) - of.row;
      each(row, position, of.slots, (position + 1) % pooled == 0);
    });
  }

  // Blocks per unit of work.
  int segment_blocks() const { return rule.local > 0 ? std::max(1, kSegment / rule.block) : kSegment; }

  std::vector<Rows> sequences;
  std::vector<int32_t> sequence_of;  // of each row of the step; -1: of none
  std::vector<Tile> tiles;
  std::vector<Part> parts;
  std::vector<Group> groups;
  int num_lists = 0;
  // [num_lists, heads, list_stride], by position: KV slots, or slot * heads + head if each head chooses, which is the
  // number of a head's vector.
  std::vector<int32_t> lists;
  std::vector<float> scores;
};

// Writes the `top` positions with the highest of n scores, in ascending order; of equal scores the first ones. top <= n.
// NaN sorts by its bits: above all numbers, or below if negative.
void choose_highest(const float* scores, int n, int top, int32_t* out);

}  // namespace moeserve
