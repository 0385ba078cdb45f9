// The keys that an indexer chooses for a step's rows: which rows choose, and the lists of the chosen. An attention plan
// has one; rows that choose attend to their list as if it were a sequence of their own.
#pragma once

#include <cstdint>
#include <vector>

namespace moeserve {

struct KeyChoice {
  static constexpr int kTileTokens = 16;
  static constexpr int kSegment = 1024;  // index keys per unit of work
  // Scores that are kept at once, unless a single tile has more. Rows beyond are scored afterwards.
  static constexpr int64_t kMostScores = int64_t{1} << 22;

  struct Tile {            // consecutive rows of one sequence that choose
    int32_t row;           // first row in the step
    int32_t count;         // <= kTileTokens
    int32_t position;      // of the first row
    int32_t list;          // of the first row
    const int32_t* slots;  // KV slot of each position of the sequence
    int64_t stride;        // scores per row, in `scores`
    int64_t scores;        // offset of the first row's scores
  };
  struct Part {  // a tile's work on one segment of index keys
    int32_t tile, segment;
  };
  struct Group {  // tiles whose scores are in memory together
    int32_t first_tile, end_tile, first_part, end_part;
  };
  struct Rows {  // all rows of one sequence
    int32_t row, count, position;
    const int32_t* slots;
  };

  int top = 0;    // index keys chosen per row; 0: rows attend to all keys
  int block = 1;  // consecutive keys that share an index key
  bool has_lists = true;  // false: the owner keeps the chosen keys elsewhere

  // Complete blocks before the end of the row at `position`, each of which has an index key.
  int index_keys(int position) const { return (position + 1) / block; }
  // The first position whose row has more index keys than are chosen.
  int first_choosing() const { return (top + 1) * block - 1; }
  // Keys of the list of the row at `position`: the chosen blocks', then those of the incomplete block.
  int list_length(int position) const { return top * block + (position + 1) % block; }
  int list_stride() const { return top * block + block - 1; }
  int32_t* list(int64_t i) { return lists.data() + i * list_stride(); }

  void clear();
  // Adds a sequence's rows.
  void add(const Rows& sequence);
  // After the last sequence: allocates lists and scores. Lists are valid slots at any time: late threads read them.
  void finish();

  std::vector<Rows> sequences;
  std::vector<Tile> tiles;
  std::vector<Part> parts;
  std::vector<Group> groups;
  int num_lists = 0;
  std::vector<int32_t> lists;  // [num_lists, list_stride]: KV slots, by position
  std::vector<float> scores;
};

// Writes the `top` positions with the highest of n scores, in ascending order; of equal scores the first ones. top <= n.
// NaN sorts by its bits: above all numbers, or below if negative.
void choose_highest(const float* scores, int n, int top, int32_t* out);

}  // namespace moeserve
