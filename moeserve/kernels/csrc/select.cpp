#include <cmath>
#include <cstring>

#if defined(MOESERVE_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace moeserve {

#if !defined(MOESERVE_X86)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* amx_kernels() { return nullptr; }
#endif

namespace {

#if defined(MOESERVE_X86)
// AMX needs the CPU (leaf 7: tile unit, int8) and the kernel's leave to use the 8 KB of tile state, given per process.
bool can_use_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kTileAndInt8 = 3u << 24;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (d & kTileAndInt8) == kTileAndInt8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool can_run(const Kernels* k) {
  if (k == nullptr) return false;
#if defined(MOESERVE_X86)
  if (k == amx_kernels() && !can_use_amx()) return false;
  if (k == avx512_kernels() || k == amx_kernels()) {
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
  const Kernels* best_first[] = {amx_kernels(), avx512_kernels(), avx2_kernels(), plain_kernels()};
  for (const Kernels* k : best_first) {
    if (can_run(k) && (name == nullptr || std::strcmp(name, k->name) == 0)) return k;
  }
  return nullptr;
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
