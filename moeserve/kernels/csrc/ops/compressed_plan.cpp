#include "compressed_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace moeserve {

void CompressedPlan::build(const Sequences& s, const Options& options, int heads, int parts, int dim,
                           int threads) {
  lists_.clear();
  copies.clear();
  key_rows.clear();
  chosen_.clear();
  offsets_.clear();
  choice.has_lists = false;
  choice.begin({options.top, std::max(options.ratio, 1), 0}, 1);
  std::vector<int32_t> row_of;
  int rows = 0;
  for (int i = 0; i < s.num; ++i) {
    if (s.req_slot[i] < 0 || s.req_slot[i] >= s.table_rows || s.position[i] < 0 || s.row[i] < 0 ||
        int64_t{s.position[i]} + s.count[i] > s.table_stride) {
      throw std::out_of_range("attention: sequence " + std::to_string(i) + " lies beside the slot table");
    }
    if (s.state_slot[i] < 0 || s.state_slot[i] >= options.rings.num) {
      throw std::out_of_range("attention: sequence " + std::to_string(i) + " has no state slot");
    }
    rows = std::max(rows, s.row[i] + s.count[i]);
    key_rows.resize(rows, 0);
    keep_keys(s, options, i);
    const int32_t* slots = s.slot_table + s.req_slot[i] * s.table_stride;
    if (options.ratio > 0) choice.add({s.row[i], s.count[i], s.position[i], slots});
    for (int t = 0; t < s.count[i]; ++t) {
      const int position = s.position[i] + t;
      const int entries = options.ratio > 0 ? (position + 1) / options.ratio : 0;
      offsets_.push_back(static_cast<int64_t>(lists_.size()));
      row_of.push_back(s.row[i] + t);
      if (options.top > 0 && entries > options.top) {
        chosen_.push_back(offsets_.back());
        lists_.resize(lists_.size() + options.top, 0);  // valid rows at any time: late threads read them
      } else {
        for (int e = 1; e <= entries; ++e) lists_.push_back(slots[e * options.ratio - 1]);
      }
      add_window(s, options, i, position);
    }
  }
  choice.finish();
  offsets_.push_back(static_cast<int64_t>(lists_.size()));
  attention.begin(rows, heads, parts, dim);
  for (size_t i = 0; i < row_of.size(); ++i) {
    const int length = static_cast<int>(offsets_[i + 1] - offsets_[i]);
    attention.tiles.push_back({row_of[i], 1, length - 1, length, lists_.data() + offsets_[i], nullptr});
  }
  attention.divide(threads);
}

// Chooses the rows of a sequence's new keys: in its ring, unless they would overwrite keys that its first rows still read.
void CompressedPlan::keep_keys(const Sequences& s, const Options& options, int sequence) {
  const CompressedPlan::Rings& rings = options.rings;
  const int first = s.position[sequence], count = s.count[sequence], row = s.row[sequence];
  const bool fits = count <= rings.rows - options.window + 1;
  for (int t = 0; t < count; ++t) {
    const int64_t in_ring = rings.row(s.state_slot[sequence], first + t);
    key_rows[row + t] = static_cast<int32_t>(fits ? in_ring : rings.of_step(row + t));
    if (!fits && t > count - options.window) {
      copies.push_back({key_rows[row + t], static_cast<int32_t>(in_ring)});
    }
  }
}

// Adds the window of a row to its list.
void CompressedPlan::add_window(const Sequences& s, const Options& options, int sequence, int position) {
  const int first = s.position[sequence];
  for (int p = std::max(0, position - options.window + 1); p <= position; ++p) {
    lists_.push_back(p < first ? static_cast<int32_t>(options.rings.row(s.state_slot[sequence], p))
                               : key_rows[s.row[sequence] + p - first]);
  }
}

}  // namespace moeserve
