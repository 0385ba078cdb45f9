// Products of few tokens that read a packed panel's cache lines strictly one after another and prefetch nothing of it:
// the CPU's own prefetchers follow such a stream. On two Zen 4 cores they bring a fifth more than prefetch instructions
// do; other CPUs may differ, so ops/choose.h measures.
#pragma once

#include "arch/kernels.h"

namespace moeserve {

struct InOrderProduct {
  const char* name;
  PanelGemm gemm;
};

// Returns the product of `tokens` rows with packed panels of `type` that replaces k's own, with the same bits. Its gemm
// is nullptr if there is none for k, or if computing takes longer than reading. It uses k's instruction set: on a CPU
// with AVX-512, AVX2's version reads no faster.
InOrderProduct in_order_product(const Kernels& k, int type, int tokens);

// The function of an instruction set; nullptr: not available, or not built for this processor.
PanelGemm avx2_in_order(int type, int tokens);
PanelGemm avx_vnni_in_order(int type, int tokens);
PanelGemm avx512_in_order(int type, int tokens);

}  // namespace moeserve
