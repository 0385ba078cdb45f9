// The kernels, written once over simd.h and compiled per ISA. The including file defines MOESERVE_TABLE (the
// function that returns the table) and MOESERVE_ISA_NAME.
#include <algorithm>
#include <cmath>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "panel_layout.h"

namespace moeserve {
namespace {

#include "simd.h"
#include "pack.inl"
#include "format_traits.inl"
#include "gemm.inl"
#include "rowwise.inl"
#include "attention.inl"

constexpr Kernels make_table() {
  Kernels k{};
  k.name = MOESERVE_ISA_NAME;
  auto set = [&k](Type type, PackPanel pack, PanelGemm gemm) {
    k.pack[static_cast<int>(type)] = pack;
    k.gemm[static_cast<int>(type)] = gemm;
  };
  set(Type::Q4_0, pack_integer<Type::Q4_0>, gemm_integer<Type::Q4_0>);
  set(Type::Q4_1, pack_integer<Type::Q4_1>, gemm_integer<Type::Q4_1>);
  set(Type::Q5_0, pack_integer<Type::Q5_0>, gemm_integer<Type::Q5_0>);
  set(Type::Q5_1, pack_integer<Type::Q5_1>, gemm_integer<Type::Q5_1>);
  set(Type::Q8_0, pack_integer<Type::Q8_0>, gemm_integer<Type::Q8_0>);
  set(Type::Q2_K, pack_integer<Type::Q2_K>, gemm_integer<Type::Q2_K>);
  set(Type::Q3_K, pack_integer<Type::Q3_K>, gemm_integer<Type::Q3_K>);
  set(Type::Q4_K, pack_integer<Type::Q4_K>, gemm_integer<Type::Q4_K>);
  set(Type::Q5_K, pack_integer<Type::Q5_K>, gemm_integer<Type::Q5_K>);
  set(Type::Q6_K, pack_integer<Type::Q6_K>, gemm_integer<Type::Q6_K>);
  set(Type::IQ4_NL, pack_integer<Type::IQ4_NL>, gemm_integer<Type::IQ4_NL>);
  set(Type::IQ4_XS, pack_integer<Type::IQ4_XS>, gemm_integer<Type::IQ4_XS>);
  set(Type::MXFP4, pack_integer<Type::MXFP4>, gemm_integer<Type::MXFP4>);
  set(Type::F16, pack_float<uint16_t>, gemm_float<HalfElement>);
  set(Type::BF16, pack_float<uint16_t>, gemm_float<BfloatElement>);
  set(Type::F32, pack_float<uint32_t>, gemm_float<FloatElement>);
  k.quantize = quantize;
  k.rms_norm = rms_norm;
  k.rope = rope;
  k.silu_mul = silu_mul;
  k.swiglu_oai = swiglu_oai;
  k.dot = dot;
  k.axpy = axpy;
  k.scale = scale;
  k.to_half = to_half_row;
  k.gather_keys = gather_keys;
  k.gather_values = gather_values;
  k.attend_block = attend_block;
  return k;
}
constexpr Kernels kKernels = make_table();

}  // namespace

const Kernels* MOESERVE_TABLE() { return &kKernels; }

}  // namespace moeserve
