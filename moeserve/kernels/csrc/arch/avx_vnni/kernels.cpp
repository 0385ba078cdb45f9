// AVX2's table with other products of int8 activations: AVX-VNNI, which CPUs without AVX-512 have, too. Compiled with the
// flags of this instruction set (CMakeLists.txt).
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "arch/kernels.h"
#include "formats/panel_layout.h"

namespace moeserve {
namespace {

#define MOESERVE_SIMD "arch/avx2/simd.h"
#define MOESERVE_GROUP_GEMM "arch/avx2/group_gemm.inl"
#include "arch/simd.h"
#include "formats/block_codes.inl"
#include "formats/pack.inl"
#include "formats/format_traits.inl"
#include "formats/codebook_traits.inl"
#include "arch/shared/group_gemm.inl"
#include "arch/shared/gemm.inl"

template <Type T>
void set_product(Kernels& k) {
  if constexpr (!kQuantType<T>.takes_floats()) k.gemm[static_cast<int>(T)] = gemm_integer<T>;
}

Kernels make_table() {
  Kernels k = *avx2_kernels();
  k.name = "avx_vnni";
#define MOESERVE_SET(name, number, ...) set_product<Type::name>(k);
  MOESERVE_QUANT_TYPES(MOESERVE_SET)
#undef MOESERVE_SET
  return k;
}

}  // namespace

const Kernels* avx_vnni_kernels() {
  static const Kernels table = make_table();
  return &table;
}

}  // namespace moeserve
