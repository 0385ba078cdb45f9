#include "expert_cache/promotions.h"

#include <algorithm>

namespace moeserve {

Filling HostMaps::start(const ExpertMove& move) const {
  const int64_t first = move.layer * experts;
  const int64_t slot = slots[first + move.outgoing];
  slots[first + move.outgoing] = -1;
  in_ram[first + move.outgoing] = places[first + move.outgoing];
  return {move.layer, move.incoming, places[first + move.incoming], slot};
}

void HostMaps::land(const Filling& filling) const {
  const int64_t at = filling.layer * experts + filling.expert;
  slots[at] = static_cast<int32_t>(filling.slot);
  in_ram[at] = -1;
}

PromotionTables::PromotionTables(int64_t* host, int64_t groups, int64_t row, std::vector<int64_t> kind_starts,
                                 const Geometry& geometry)
    : host_(host), groups_(groups), row_(row), kind_starts_(std::move(kind_starts)), g_(geometry) {}

void PromotionTables::write(const Filling* fillings, int64_t count) {
  for (int64_t group = 0; group < groups_; ++group) {
    const int64_t first = group * count / groups_, last = (group + 1) * count / groups_;
    write_group(host_ + group * row_, fillings, first, last - first);
  }
}

void PromotionTables::write_group(int64_t* row, const Filling* fillings, int64_t first, int64_t count) {
  const int64_t addresses = kind_starts_.front(), entries = kind_starts_.back();
  std::fill(row + addresses, row + entries, 0);
  written_.assign(kind_starts_.size(), 0);
  const int64_t copies = kMatrices * g_.nodes + g_.biases;  // of an expert
  row[0] = copies * count;
  row[entries] = count;
  for (int64_t i = 0; i < count; ++i) {
    const Filling& f = fillings[first + i];
    int64_t* copy = row + 3 * (1 + copies * i);
    for (int64_t m = 0; m < kMatrices; ++m) {
      const int64_t at = f.layer * kMatrices + m;
      const int64_t staging = g_.staging + (first + i) * g_.staging_bytes;
      for (int64_t node = 0; node < g_.nodes; ++node) {
        const int64_t piece = at * g_.nodes + node;
        *copy++ = g_.source[piece] + f.place * g_.each[piece];
        *copy++ = staging + g_.offset[piece];
        *copy++ = g_.each[piece];
      }
      const int64_t kind = g_.kind[at];
      int64_t* address = row + kind_starts_[kind] + 4 * written_[kind]++;
      address[0] = staging + g_.offset[at * g_.nodes];  // the first node's panels are the first
      for (int64_t p = 0; p < kPlanes; ++p)
        address[1 + p] = g_.target[at * kPlanes + p] + f.slot * g_.target_each[at * kPlanes + p];
    }
    for (int64_t b = f.layer * g_.biases; b < (f.layer + 1) * g_.biases; ++b) {
      *copy++ = g_.bias_source[b] + f.expert * g_.bias_each[b];
      *copy++ = g_.bias_target[b] + f.slot * g_.bias_each[b];
      *copy++ = g_.bias_each[b];
    }
    row[entries + 2 + 2 * i] = f.layer * g_.experts + f.expert;
    row[entries + 3 + 2 * i] = f.slot;
  }
}

}  // namespace moeserve
