// Checks of a step's sequences and drafts in calls on recurrent states.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "ops/delta_net.h"
#include "stream_checks.h"

namespace moeserve {

// Checks that the sequences cover rows 0 .. n - 1 in order, and that their slots are distinct.
inline StateSequences state_sequences_arg(nanobind::handle row, nanobind::handle count, nanobind::handle slot,
                                          int n, int64_t slots) {
  const int num = static_cast<int>(tensor_arg(count, "count", Element::kInt32).size());
  StateSequences s{num,
                   sized_arg<int32_t>(row, "row", num),
                   sized_arg<int32_t>(count, "count", num),
                   sized_arg<int32_t>(slot, "slot", num),
                   nullptr,
                   nullptr};
  check_ids("state slot", s.slot, num, slots);
  int64_t next = 0;
  for (int i = 0; i < num; ++i) {
    if (s.row[i] != next || s.count[i] < 1) reject("row", "sequences one after another wanted");
    next += s.count[i];
  }
  if (next != n) reject("count", std::to_string(n) + " rows in all wanted, not " + std::to_string(next));
  std::vector<int32_t> sorted(s.slot, s.slot + num);
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    reject("slot", "one of its own for each sequence wanted");
  }
  return s;
}

// drafts: how many of each sequence's last rows are drafts; first: their first record; None: no drafts.
inline void add_drafts(StateSequences& s, nanobind::handle drafts, nanobind::handle first) {
  if (drafts.is_none()) return;
  s.drafts = sized_arg<int32_t>(drafts, "drafts", s.num);
  s.first = sized_arg<int32_t>(first, "first", s.num);
  for (int i = 0; i < s.num; ++i) {
    if (s.sure(i) < 1) reject("drafts", "fewer than the rows wanted");
  }
}

// Checks the records, `values` numbers each, in which the sequences' drafts are kept one after another.
inline float* draft_rows_arg(nanobind::handle pending, int64_t values, int num, const int32_t* drafts,
                             const int32_t* first) {
  const TensorArg all = tensor_arg(pending, "pending", Element::kFloat32);
  if (all.cols != values) reject("pending", "records of another size wanted");
  for (int i = 0; i < num; ++i) {
    if (drafts[i] < 0 || first[i] < 0 || int64_t{first[i]} + drafts[i] > all.rows)
      reject("first", "records that are there wanted");
  }
  return static_cast<float*>(all.data);
}

}  // namespace moeserve
