#pragma once

namespace moeserve {

// Part of a step's experts, in ascending order of their ids, when they do not all fit into slots at once. Each wave
// continues the sums of the previous one, so that the bits equal a single operation's.
struct Wave {
  int first = 0;          // of the active experts
  int count = -1;         // -1: all
  float* sums = nullptr;  // [n, hidden]; nullptr: this is the only wave
  bool is_first = true, is_last = true;
  // Two waves of a step whose products are kept by route (ExpertsOp::keeps_parts), in any order of the experts: the first
  // makes its products, the second makes its own and adds up those of both, in ascending order of the experts.
  bool only_products = false, adds_all = false;
};

}  // namespace moeserve
