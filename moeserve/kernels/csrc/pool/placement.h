// Thread placement, and which NUMA node owns which panels.
#pragma once

#include <cstdint>
#include <vector>

namespace moeserve {

// The placement of one thread.
struct ThreadPlacement {
  int node;               // NUMA node, counted from 0; threads of a node are consecutive
  std::vector<int> cpus;  // the CPUs it is bound to; empty: not bound
};

// Panels are divided among NUMA nodes in contiguous ranges: node i of n owns [first_panel(i), first_panel(i + 1)).
constexpr int64_t first_panel(int64_t panels, int node, int nodes) { return panels * node / nodes; }
constexpr int node_of_panel(int64_t panels, int64_t panel, int nodes) {
  return static_cast<int>(((panel + 1) * nodes - 1) / panels);
}

}  // namespace moeserve
