// AVX-512's table with other products for types with codebooks. Compiled with the flags of this instruction set
// (CMakeLists.txt).
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "arch/kernels.h"
#include "formats/panel_layout.h"

namespace moeserve {
namespace {

#define MOESERVE_SIMD "arch/avx512/simd.h"
#define MOESERVE_GROUP_GEMM "arch/avx512_vbmi/group_gemm.inl"
#define MOESERVE_TOKEN_GROUP [[gnu::always_inline]] inline
#include "arch/simd.h"
#include "formats/block_codes.inl"
#include "formats/pack.inl"
#include "formats/format_traits.inl"
#include "formats/codebook_traits.inl"
#include "arch/shared/group_gemm.inl"
#include "arch/shared/gemm.inl"

// With more tokens, look-ups save less than reordering the activations for each panel costs. 2,048 entries take
// 32 permutations and as many blends, longer than gathers.
constexpr int most_turned(const Codebook& k) {
  return k.columns == 4 ? 32 : k.entries > 1024 ? 0 : k.entries > 512 ? 8 : 16;
}

template <Type T>
void gemm_book(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
               float* out) {
  const PanelGemm gemm =
      n <= most_turned(kQuantType<T>.book) ? gemm_integer<T> : avx512_kernels()->gemm[static_cast<int>(T)];
  gemm(panel, next, cols, rows, n, out);
}

template <Type T>
void set_product(Kernels& k) {
  if constexpr (most_turned(kQuantType<T>.book) > 0 && kQuantType<T>.has_book())
    k.gemm[static_cast<int>(T)] = gemm_book<T>;
}

Kernels make_table() {
  Kernels k = *avx512_kernels();
  k.name = "avx512_vbmi";
#define MOESERVE_SET(name, number, ...) set_product<Type::name>(k);
  MOESERVE_QUANT_TYPES(MOESERVE_SET)
#undef MOESERVE_SET
  return k;
}

}  // namespace

const Kernels* avx512_vbmi_kernels() {
  static const Kernels table = make_table();
  return &table;
}

}  // namespace moeserve
