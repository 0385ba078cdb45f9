// Which KV rows a step's rows attend to in compressed attention: the tokens of a window, and compressed entries of all
// complete blocks of tokens before, or those that an indexer chooses.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace moeserve {

// A layer's KV pool has one row for each slot without compression. With it a slot has two: the token's, and the entry of
// the block whose last token has the slot.
class CompressedPlan {
 public:
  struct Sequences {
    int num;
    const int32_t *row, *count, *position, *req_slot;
    const int32_t* slot_table;  // [table_rows, table_stride]
    int64_t table_rows, table_stride;
  };
  struct Options {
    int window;  // tokens that a row attends to, with itself
    int ratio;   // tokens of a block; 0: there are no entries
    int top;     // entries that an indexer chooses; 0: rows attend to all
  };
  // heads, parts, dim: as for AttentionPlan's latent attention. Throws std::out_of_range if a read would leave the table.
  void build(const Sequences& sequences, const Options& options, int heads, int parts, int dim, int threads);

  AttentionPlan attention;  // of the rows' lists
  KeyChoice choice;         // of the rows with more entries than are chosen
  // Where ChooseEntriesOp writes the pool rows of the entries that a row of `choice` has chosen.
  int32_t* chosen(int32_t list) { return lists_.data() + chosen_[list]; }

 private:
  std::vector<int32_t> lists_;    // the pool rows that rows attend to, one row's after the other
  std::vector<int64_t> chosen_;   // offset of each list of `choice` in lists_
  std::vector<int64_t> offsets_;  // of each row's list
};

}  // namespace moeserve
