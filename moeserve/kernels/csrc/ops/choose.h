// Chooses the fastest form of products by measurement: another instruction set's, the one that reads in order
// (arch/in_order.h), or the own one that prefetches into the second-level cache (Panel::to_l2).
//
// A product of one token waits for memory, and how fast a core reads depends on more than the width of its registers:
// two Zen 4 cores read Q8_0 a third faster with AVX2's loads than with AVX-512's, which compute eight tokens faster, and
// in order faster still. All give the same bits (tests/kernels/pool/test_isa.py).
#pragma once

#include <map>
#include <vector>

#include "arch/kernels.h"
#include "pool/pool.h"

namespace moeserve {

constexpr int kManyTokens = 8;  // measured for those above kFewTokens, up to kSomeTokens

struct ProductSpeed {
  int type;
  int tokens;                  // kManyTokens: those above kFewTokens, up to kSomeTokens
  const char* form;            // what is used: a table's name, an InOrderProduct's or "prefetch_to_l2"
  std::vector<double> speeds;  // of the other forms, relative to the table's own product
  bool is_known;               // not measured now
};

// By type: the other forms' speeds with 1, 2, ... kFewTokens and kManyTokens tokens, as choose_products has returned
// them.
using KnownSpeeds = std::map<int, std::vector<std::vector<double>>>;

// Measures products of up to kFewTokens and of kManyTokens tokens with packed panels of `types`, on all threads of the
// pool, with weights read from memory. Sets table.chosen to the fastest form where it is at least `least_gain` times as
// fast. Does nothing if there is no other form or the caches hold the weights. Only integer types are measured, and only
// those reached in time (MeasuringTime). Types whose `known` speeds suffice for the choice are not measured again. Returns the
// speeds that decided. From the first number of tokens with which no other product is fast enough, products are compared
// only by where they prefetch into; types with codebooks, which compute for longer than they read, end there.
std::vector<ProductSpeed> choose_products(Pool& pool, Kernels& table, const std::vector<int>& types,
                                          int64_t weight_bytes, double least_gain, const KnownSpeeds& known);

}  // namespace moeserve
