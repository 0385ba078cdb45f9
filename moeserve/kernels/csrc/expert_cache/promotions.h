// Experts being copied into slots: the host's maps, and the tables that the copying kernels read
// (models/loading/promotion_tables.py declares their layout).
#pragma once

#include <cstdint>
#include <vector>

#include "expert_cache/policy.h"

namespace moeserve {

// An expert being copied into a slot of its layer.
struct Filling {
  int64_t layer, expert, place, slot;
};

// int32 [layers, experts] on the host. One of an expert's two entries is -1: its slot, or its place in RAM.
struct HostMaps {
  int32_t* slots;
  int32_t* in_ram;
  const int32_t* places;  // place in RAM of every expert, cached or not
  int64_t experts;

  // The evicted expert loses its slot now; the promoted one gets it in the map when its copy has finished.
  Filling start(const ExpertMove& move) const;
  void land(const Filling& filling) const;
};

// The tables of one batch, in groups of fillings; all tables of a group are in one row.
class PromotionTables {
 public:
  static constexpr int kMatrices = 3;
  static constexpr int kPlanes = 3;  // codes, scales, supers

  // int64 arrays by layer, and matrix and NUMA node (source, each, offset), matrix and plane (target, target_each), or
  // bias (the last three); see PromotionTables in promotion_tables.py.
  struct Geometry {
    const int64_t *source, *each, *offset, *kind, *target, *target_each, *bias_source, *bias_target,
        *bias_each;
    int64_t nodes;                   // NUMA nodes among which each matrix is divided
    int64_t biases;                  // of an expert
    int64_t staging, staging_bytes;  // address and bytes of an expert in the staging buffer
    int64_t experts;                 // experts per layer in the map
  };

  // host: [groups, row]. kind_starts: for each kind of table, where its addresses begin within a row; the last entry is
  // where they end and the map entries begin.
  PromotionTables(int64_t* host, int64_t groups, int64_t row, std::vector<int64_t> kind_starts,
                  const Geometry& geometry);

  // Writes the tables. fillings: in order, at most as many as there is room for; they are divided evenly among the
  // groups.
  void write(const Filling* fillings, int64_t count);

 private:
  void write_group(int64_t* row, const Filling* fillings, int64_t first, int64_t count);

  int64_t* const host_;
  const int64_t groups_, row_;
  const std::vector<int64_t> kind_starts_;
  const Geometry g_;
  std::vector<int64_t> written_;  // number written of each kind, in the current group
};

}  // namespace moeserve
