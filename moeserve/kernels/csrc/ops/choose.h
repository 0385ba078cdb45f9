// Chooses the fastest instruction set for products of few tokens, by measurement.
//
// A product of one token waits for memory, and how fast a core reads depends on more than the width of its registers:
// two Zen 4 cores read Q8_0 a third faster with AVX2's loads than with AVX-512's, which compute eight tokens faster.
// All give the same bits (tests/kernels/test_isa.py).
#pragma once

#include <map>
#include <vector>

#include "arch/kernels.h"
#include "pool/pool.h"

namespace moeserve {

struct ProductSpeed {
  int type;
  int tokens;
  const char* isa;  // the table's own, or the other instruction set if it is fast enough
  double speed;     // of the other instruction set, relative to the table's own product
  bool is_known;    // not measured now
};

// By type: the other instruction set's speeds with 1, 2, ... tokens, as choose_products has returned them.
using KnownSpeeds = std::map<int, std::vector<double>>;

// Measures products of up to kFewTokens tokens with packed panels of `types`, on all threads of the pool, with weights
// read from memory. Sets table.few where another instruction set is at least `least_gain` times as fast. Does nothing
// if there is no other instruction set or the caches hold the weights. Only integer types are measured, and only those
// reached within a second. Types whose `known` speeds suffice for the choice are not measured again. Returns the speeds
// that decided, up to the first one of a type that is too low.
std::vector<ProductSpeed> choose_products(Pool& pool, Kernels& table, const std::vector<int>& types,
                                          int64_t weight_bytes, double least_gain, const KnownSpeeds& known);

}  // namespace moeserve
