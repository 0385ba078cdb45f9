// Which instruction set's product is the fastest here, by measurement.
//
// A product of one token waits for the memory, and how a core gets most of it depends on more than the width of its
// registers: two Zen 4 cores read Q8_0 a third faster with AVX2's loads than with AVX-512's, which compute eight tokens
// faster. All give the same bits (tests/kernels/test_isa.py).
#pragma once

#include <vector>

#include "arch/kernels.h"
#include "pool/pool.h"

namespace moeserve {

struct ProductChoice {
  int type;
  int tokens;
  const char* isa;
  double speed;  // as a multiple of the speed of the table's own product
};

// Measures the products of packed panels of `types` (integer ones; others keep their own) and up to kFewTokens tokens,
// with all threads of the pool and from memory, and sets table.few where another instruction set is at least `least_gain`
// times as fast. Nothing is measured where there is no other, nor for weights that the caches hold; types that do not
// come to their turn within a second keep their own. Returns what was set.
std::vector<ProductChoice> choose_products(Pool& pool, Kernels& table, const std::vector<int>& types,
                                           int64_t weight_bytes, double least_gain);

}  // namespace moeserve
