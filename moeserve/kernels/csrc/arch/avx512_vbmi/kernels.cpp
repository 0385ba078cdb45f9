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

// With more tokens the look-up matters less than that activations are turned round for each panel.
template <Type T>
constexpr int kMostTurned = kQuantType<T>.book.entries > 1024 ? 8 : 32;

template <Type T>
void gemm_book(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
               float* out) {
  const PanelGemm gemm = n <= kMostTurned<T> ? gemm_integer<T> : avx512_kernels()->gemm[static_cast<int>(T)];
  gemm(panel, next, cols, rows, n, out);
}

template <Type T>
void set_product(Kernels& k) {
  if constexpr (kQuantType<T>.has_book()) k.gemm[static_cast<int>(T)] = gemm_book<T>;
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
