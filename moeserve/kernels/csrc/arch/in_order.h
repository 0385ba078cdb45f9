// Products of few tokens that read a packed panel's cache lines strictly one after another and prefetch nothing: the
// CPU's own prefetchers follow such a stream. On two Zen 4 cores they bring a fifth more than prefetch instructions do;
// other CPUs may differ, so ops/choose.h measures.
#pragma once

#include "arch/kernels.h"

namespace moeserve {

constexpr int kInOrderTokens = 2;  // tokens at most: with more, computing takes longer than reading

// Returns the product for packed panels of `type`, used in place of k's own for 1 to kInOrderTokens tokens; same bits.
// nullptr: there is none for the type, or beside `k`.
PanelGemm in_order_product(const Kernels& k, int type);

// AVX-512's; nullptr: none for the type, or not built for this processor.
PanelGemm avx512_in_order(int type);

}  // namespace moeserve
