#include <cmath>
#include <cstring>

#include "arch/block_float.h"
#include "arch/in_order.h"
#include "arch/kernels.h"

#if defined(MOESERVE_X86)
#include <cpuid.h>
#elif defined(MOESERVE_NEON)
#include <sys/auxv.h>
#endif

namespace moeserve {

#if !defined(MOESERVE_X86)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx_vnni_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* avx512_vbmi_kernels() { return nullptr; }
const BlockFloatKernels* avx512_block_float() { return nullptr; }
PanelGemm avx2_in_order(int, int) { return nullptr; }
PanelGemm avx_vnni_in_order(int, int) { return nullptr; }
PanelGemm avx512_in_order(int, int) { return nullptr; }
#endif
#if !defined(MOESERVE_NEON)
const Kernels* neon_dotprod_kernels() { return nullptr; }
const Kernels* neon_i8mm_kernels() { return nullptr; }
#endif

namespace {

#if defined(MOESERVE_NEON)
// Bits of Linux's AT_HWCAP and AT_HWCAP2 (asm/hwcap.h), which libcs older than the CPU do not name.
constexpr unsigned long kDotProducts = 1ul << 20, kInt8Matrices = 1ul << 13;
#endif

#if defined(MOESERVE_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
// Compilers' own test of this feature is newer than its instructions. They need no support by the operating system beyond
// AVX2's.
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
bool has_avx512_vbmi() { return has_avx512() && __builtin_cpu_supports("avx512vbmi"); }
#else
bool has_avx2() { return false; }
bool has_avx_vnni() { return false; }
bool has_avx512() { return false; }
bool has_avx512_vbmi() { return false; }
#endif
#if defined(MOESERVE_NEON)
bool has_dot_products() { return (getauxval(AT_HWCAP) & kDotProducts) != 0; }
bool has_int8_matrices() { return has_dot_products() && (getauxval(AT_HWCAP2) & kInt8Matrices) != 0; }
#else
bool has_dot_products() { return false; }
bool has_int8_matrices() { return false; }
#endif
bool has_baseline() { return true; }

// The functions that return tables are compiled for the tables' instructions, too: a CPU that lacks those may not call
// them.
struct Source {
  bool (*runs_here)();
  const Kernels* (*table)();

  const Kernels* found() const { return runs_here() ? table() : nullptr; }
};
// By speed, the best first; plain C++ is the last.
constexpr Source kSources[] = {
    {has_avx512_vbmi, avx512_vbmi_kernels}, {has_avx512, avx512_kernels},
    {has_avx_vnni, avx_vnni_kernels},       {has_avx2, avx2_kernels},
    {has_int8_matrices, neon_i8mm_kernels}, {has_dot_products, neon_dotprod_kernels},
    {has_baseline, plain_kernels}};

// Whether two tables differ in types with codebooks only.
bool are_alike(const Kernels& a, const Kernels& b) {
  constexpr int kind = static_cast<int>(Type::Q8_0);
  return a.gemm[kind] == b.gemm[kind];
}

}  // namespace

const Kernels* select_kernels(const char* name) {
  for (const Source& source : kSources) {
    const Kernels* k = source.found();
    if (k != nullptr && (name == nullptr || std::strcmp(name, k->name) == 0)) return k;
  }
  return nullptr;
}

const Kernels* narrower_kernels(const Kernels& k) {
  bool found = false;  // k may be a copy of a table
  for (const Source& source : kSources) {
    const Kernels* other = source.found();
    if (source.table == plain_kernels || other == nullptr) continue;
    if (found && !are_alike(*other, k)) return other;
    found |= std::strcmp(other->name, k.name) == 0;
  }
  return nullptr;
}

InOrderProduct in_order_product(const Kernels& k, int type, int tokens) {
  const Kernels* avx512 = has_avx512() ? avx512_kernels() : nullptr;
  const Kernels* avx_vnni = has_avx_vnni() ? avx_vnni_kernels() : nullptr;
  const Kernels* avx2 = has_avx2() ? avx2_kernels() : nullptr;
  if (avx512 != nullptr && are_alike(k, *avx512)) return {"avx512_in_order", avx512_in_order(type, tokens)};
  if (avx_vnni != nullptr && are_alike(k, *avx_vnni))
    return {"avx_vnni_in_order", avx_vnni_in_order(type, tokens)};
  if (avx2 != nullptr && are_alike(k, *avx2)) return {"avx2_in_order", avx2_in_order(type, tokens)};
  return {"", nullptr};
}

const BlockFloatKernels* block_float_kernels() { return has_avx512() ? avx512_block_float() : nullptr; }

void merge_segments(const Kernels& k, Softmax& a, float* acc_a, const Softmax& b, const float* acc_b,
                    int dim) {
  const float m = a.max > b.max ? a.max : b.max;
  const float fa = std::exp(a.max - m), fb = std::exp(b.max - m);
  a = {m, a.sum * fa + b.sum * fb};
  k.scale(fa, dim, acc_a);
  k.axpy(fb, acc_b, dim, acc_a);
}

}  // namespace moeserve
