#include <cmath>
#include <cstring>

#include "arch/block_float.h"
#include "arch/in_order.h"
#include "arch/kernels.h"

#if defined(MOESERVE_NEON)
#include <sys/auxv.h>
#endif

namespace moeserve {

#if !defined(MOESERVE_X86)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* avx512_vbmi_kernels() { return nullptr; }
const BlockFloatKernels* block_float_kernels() { return nullptr; }
PanelGemm avx2_in_order(int, int) { return nullptr; }
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

bool can_run(const Kernels* k) {
  if (k == nullptr) return false;
#if defined(MOESERVE_X86)
  if (k == avx512_vbmi_kernels()) {
    return can_run(avx512_kernels()) && __builtin_cpu_supports("avx512vbmi");
  }
  if (k == avx512_kernels()) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  }
  if (k == avx2_kernels()) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#elif defined(MOESERVE_NEON)
  if (k == plain_kernels()) return true;
  if ((getauxval(AT_HWCAP) & kDotProducts) == 0) return false;
  return k == neon_dotprod_kernels() || (getauxval(AT_HWCAP2) & kInt8Matrices) != 0;
#endif
  return true;
}

// By speed, the best first; plain C++ is the last.
using Source = const Kernels* (*)();
constexpr Source kSources[] = {avx512_vbmi_kernels, avx512_kernels,       avx2_kernels,
                               neon_i8mm_kernels,   neon_dotprod_kernels, plain_kernels};

// Whether two tables differ in types with codebooks only.
bool are_alike(const Kernels& a, const Kernels& b) {
  constexpr int kind = static_cast<int>(Type::Q8_0);
  return a.gemm[kind] == b.gemm[kind];
}

}  // namespace

const Kernels* select_kernels(const char* name) {
  for (const Source source : kSources) {
    const Kernels* k = source();
    if (can_run(k) && (name == nullptr || std::strcmp(name, k->name) == 0)) return k;
  }
  return nullptr;
}

const Kernels* narrower_kernels(const Kernels& k) {
  bool found = false;  // k may be a copy of a table
  for (const Source source : kSources) {
    const Kernels* other = source();
    if (source == plain_kernels || other == nullptr) continue;
    if (found && can_run(other) && !are_alike(*other, k)) return other;
    found |= std::strcmp(other->name, k.name) == 0;
  }
  return nullptr;
}

InOrderProduct in_order_product(const Kernels& k, int type, int tokens) {
  const Kernels *avx512 = avx512_kernels(), *avx2 = avx2_kernels();
  if (avx512 != nullptr && are_alike(k, *avx512)) return {"avx512_in_order", avx512_in_order(type, tokens)};
  if (avx2 != nullptr && are_alike(k, *avx2)) return {"avx2_in_order", avx2_in_order(type, tokens)};
  return {"", nullptr};
}

void merge_segments(const Kernels& k, Softmax& a, float* acc_a, const Softmax& b, const float* acc_b,
                    int dim) {
  const float m = a.max > b.max ? a.max : b.max;
  const float fa = std::exp(a.max - m), fb = std::exp(b.max - m);
  a = {m, a.sum * fa + b.sum * fb};
  k.scale(fa, dim, acc_a);
  k.axpy(fb, acc_b, dim, acc_a);
}

}  // namespace moeserve
