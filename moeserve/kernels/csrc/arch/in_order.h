// Products of few tokens that read a packed panel's cache lines strictly one after another and prefetch nothing: the
// CPU's own prefetchers follow such a stream. On two Zen 4 cores they bring a fifth more than prefetch instructions do;
// other CPUs may differ, so ops/choose.h measures.
#pragma once

#include "arch/kernels.h"

namespace moeserve {

// Returns the product of `tokens` rows with packed panels of `type`, used in place of k's own; same bits. nullptr: there is
// none, for computing takes longer than reading, or none beside `k`.
PanelGemm in_order_product(const Kernels& k, int type, int tokens);

// AVX-512's; nullptr: none, or not built for this processor.
PanelGemm avx512_in_order(int type, int tokens);

}  // namespace moeserve
