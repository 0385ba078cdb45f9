// arch/in_order.h for AVX-512. Compiled with the flags of this instruction set (CMakeLists.txt).
#include "arch/in_order.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "formats/panel_layout.h"

namespace moeserve {
namespace {

#define MOESERVE_SIMD "arch/avx512/simd.h"
#define MOESERVE_GROUP_GEMM "arch/shared/group_gemm_by_token.inl"
#define MOESERVE_TOKEN_GROUP [[gnu::always_inline]] inline
#include "arch/simd.h"
#include "formats/block_codes.inl"
#include "formats/format_traits.inl"
#include "arch/shared/group_gemm.inl"

// Adds one token's products with a half's group to its 16 accumulators. x: the group's 32 activations.
template <class F>
inline VF with_group(const VB (&w)[8], const Scales& s, const int8_t* x, const GroupMeta& meta, VF acc) {
  VI lo = set_i(0), hi = set_i(0);
  for (int i = 0; i < 4; ++i) {
    lo = dot4(lo, w[i], broadcast_quad(x + 4 * i));
    hi = dot4(hi, w[i + 4], broadcast_quad(x + 16 + 4 * i));
  }
  return added<F>(F::kSplit ? lo : VI{_mm512_add_epi32(lo.v, hi.v)}, hi, s, meta, acc);
}

template <class F, int N>
inline void add_half_group(const uint8_t* codes, const Scales& s, const void* const* rows, int64_t cols,
                           int64_t group, int half, VF (&acc)[N][2]) {
  VB w[8];
  unpack_half<F>(codes, w);
  for (int t = 0; t < N; ++t) {
    const int8_t* x = static_cast<const int8_t*>(rows[t]) + 32 * group;
    acc[t][half] = with_group<F>(w, s, x, meta_of(rows[t], cols, group), acc[t][half]);
  }
}

#include "arch/shared/in_order.inl"

}  // namespace

PanelGemm avx512_in_order(int type, int tokens) { return product_in_order(type, tokens); }

}  // namespace moeserve
