// Experts on their way into slots: the maps' changes on the host, and what the kernels that fill slots read
// (models/loading/promotion_tables.py has the tables' form).
#pragma once

#include <cstdint>
#include <vector>

#include "expert_cache/policy.h"

namespace moeserve {

// Into a slot of its layer.
struct Filling {
  int64_t layer, expert, place, slot;
};

// int32 [layers, experts] on the host, one of an expert's two entries is -1: its slot, and its place in RAM.
struct HostMaps {
  int32_t* slots;
  int32_t* in_ram;
  const int32_t* places;  // of all experts, cached or not
  int64_t experts;

  // Who goes loses its slot to who comes, which gets it when it has arrived.
  Filling start(const ExpertMove& move) const;
  void land(const Filling& filling) const;
};

// Of one batch, in groups of fillings; all tables of a group lie in one row.
class PromotionTables {
 public:
  static constexpr int kMatrices = 3;
  static constexpr int kPlanes = 3;  // codes, scales, supers

  // int64 arrays by layer and matrix, and by plane behind that; see PromotionTables in promotion_tables.py.
  struct Geometry {
    const int64_t *source, *each, *offset, *kind, *target, *target_each;
    int64_t staging, staging_bytes;  // of an expert
    int64_t experts;                 // of a layer of the map
  };

  // host: [groups, row]. kind_starts: where in a row each kind's addresses begin, and their end: the entries' beginning.
  PromotionTables(int64_t* host, int64_t groups, int64_t row, std::vector<int64_t> kind_starts,
                  const Geometry& geometry);

  // fillings: no more than there is room for, in order; they are divided among the groups evenly.
  void write(const Filling* fillings, int64_t count);

 private:
  void write_group(int64_t* row, const Filling* fillings, int64_t first, int64_t count);

  int64_t* const host_;
  const int64_t groups_, row_;
  const std::vector<int64_t> kind_starts_;
  const Geometry g_;
  std::vector<int64_t> written_;  // of each kind, of a group
};

}  // namespace moeserve
