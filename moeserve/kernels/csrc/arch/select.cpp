#include <cmath>
#include <cstring>

#include "arch/kernels.h"

namespace moeserve {

#if !defined(MOESERVE_X86)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
#endif

namespace {

bool can_run(const Kernels* k) {
  if (k == nullptr) return false;
#if defined(MOESERVE_X86)
  if (k == avx512_kernels()) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  }
  if (k == avx2_kernels()) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return true;
}

}  // namespace

const Kernels* select_kernels(const char* name) {
  const Kernels* best_first[] = {avx512_kernels(), avx2_kernels(), plain_kernels()};
  for (const Kernels* k : best_first) {
    if (can_run(k) && (name == nullptr || std::strcmp(name, k->name) == 0)) return k;
  }
  return nullptr;
}

const Kernels* narrower_kernels(const Kernels& k) {
  const Kernels* wide = avx512_kernels();
  return wide != nullptr && std::strcmp(k.name, wide->name) == 0 ? select_kernels("avx2") : nullptr;
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
