// The kernels, written once in the vector types of simd.h and compiled per ISA. The including file defines
// MOESERVE_TABLE (the function that returns the table), MOESERVE_ISA_NAME, MOESERVE_SIMD (the file with the vector
// types) and MOESERVE_GROUP_GEMM.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "arch/kernels.h"
#include "formats/panel_layout.h"

namespace moeserve {
namespace {

#include "arch/simd.h"
#include "formats/block_codes.inl"
#include "formats/pack.inl"
#include "formats/format_traits.inl"
#include "formats/codebook_traits.inl"
#include "arch/shared/group_gemm.inl"
#include "arch/shared/gemm.inl"
#include "arch/shared/gemm_e4m3.inl"
#include "arch/shared/gemm_panel.inl"
#include "arch/shared/rowwise.inl"
#include "arch/shared/attention.inl"
#include "arch/shared/attention_q8.inl"
#include "arch/shared/indexer.inl"
#include "arch/shared/delta_net.inl"
#include "arch/shared/mamba2.inl"
#include "arch/shared/lora.inl"
namespace row_passes {
#include "sampling/row_passes.inl"
}

constexpr Kernels make_table() {
  Kernels k{};
  k.name = MOESERVE_ISA_NAME;
#define MOESERVE_SET(name, number, ...)    \
  k.pack[number] = pack_panel<Type::name>; \
  k.gemm[number] = gemm_panel<Type::name>;
  MOESERVE_QUANT_TYPES(MOESERVE_SET)
#undef MOESERVE_SET
  k.gemm_f32_half = gemm_f32_half;
  k.quantize = quantize;
  k.rms_norm = rms_norm;
  k.layer_norm = layer_norm;
  k.rope = rope;
  k.silu_mul = silu_mul;
  k.clamped_silu_mul = clamped_silu_mul;
  k.swiglu_oai = swiglu_oai;
  k.gelu_mul = gelu_mul;
  k.relu_mul = relu_mul;
  k.situ_mul = situ_mul;
  k.softcap = softcap;
  k.sigmoid_mul = sigmoid_mul;
  k.conv_silu = conv_silu;
  k.gated_conv = gated_conv;
  k.l2_normalize = l2_normalize;
  k.delta_step = delta_step;
  k.delta_step_by_channel = delta_step_by_channel;
  k.channel_decays = channel_decays;
  k.bounded_decays = bounded_decays;
  k.mamba2_step = mamba2_step;
  k.dot = dot;
  k.axpy = axpy;
  k.dot_four = dot_four;
  k.add_low_rank = add_low_rank;
  k.scale = scale;
  k.to_half = to_half_row;
  k.from_half = from_half_row;
  k.gather_keys = gather_keys;
  k.gather_values = gather_values;
  k.attend_block = attend_block;
  k.score_block = score_block;
  k.weigh_block = weigh_block;
  k.index_scores = index_scores;
  k.quantize_kv = quantize_kv;
  k.quantize_query = quantize_query;
  k.gather_keys_q8 = gather_keys_q8;
  k.gather_values_q8 = gather_values_q8;
  k.attend_block_q8 = attend_block_q8;
  k.rows = {row_passes::scan_row, row_passes::weigh_row, row_passes::count_greater};
  return k;
}
constexpr Kernels kKernels = make_table();

}  // namespace

const Kernels* MOESERVE_TABLE() { return &kKernels; }

}  // namespace moeserve
