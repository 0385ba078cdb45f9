// Which KV rows a step's rows attend to in compressed attention: the tokens of a window, and compressed entries of all
// complete blocks of tokens before, or those that an indexer chooses.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace moeserve {

// A layer's keys have three parts: rows of entries, each in the KV slot of its block's last token; a ring for each
// sequence state, with the keys of its last tokens by position; and rows for keys of the step that would overwrite ring
// keys which are still read.
class CompressedPlan {
 public:
  struct Sequences {
    int num;
    const int32_t *row, *count, *position, *req_slot;
    const int32_t* state_slot;
    const int32_t* slot_table;  // [table_rows, table_stride]
    int64_t table_rows, table_stride;
  };
  // The places of the tokens' keys.
  struct Rings {
    int64_t first;  // row of slot 0's ring
    int rows;       // of a ring, at least the window's
    int64_t num;    // rings; the rows of a step's keys follow
    int64_t row(int64_t slot, int64_t position) const { return first + slot * rows + position % rows; }
    int64_t of_step(int64_t row) const { return first + num * rows + row; }
  };
  // Keys that are copied from a step's rows to their rings once the step's rows have attended.
  struct Copy {
    int32_t from, to;
  };
  struct Options {
    int window;  // tokens that a row attends to, with itself
    int ratio;   // tokens of a block; 0: there are no entries
    int top;     // entries that an indexer chooses; 0: rows attend to all
    Rings rings;
  };
  // heads, parts, dim: as for AttentionPlan's latent attention. Throws std::out_of_range if a read would leave the table or
  // a state slot has no ring.
  void build(const Sequences& sequences, const Options& options, int heads, int parts, int dim, int threads);

  AttentionPlan attention;        // of the rows' lists
  KeyChoice choice;               // of the rows with more entries than are chosen
  std::vector<int32_t> key_rows;  // of each row of the step: where its key is stored
  std::vector<Copy> copies;
  // Where ChooseEntriesOp writes the pool rows of the entries that a row of `choice` has chosen.
  int32_t* chosen(int32_t list) { return lists_.data() + chosen_[list]; }

 private:
  void add_window(const Sequences& s, const Options& options, int sequence, int position);
  void keep_keys(const Sequences& s, const Options& options, int sequence);

  std::vector<int32_t> lists_;    // the pool rows that rows attend to, one row's after the other
  std::vector<int64_t> chosen_;   // offset of each list of `choice` in lists_
  std::vector<int64_t> offsets_;  // of each row's list
};

}  // namespace moeserve
