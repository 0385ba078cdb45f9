// Compiled with the flags of this instruction set (CMakeLists.txt).
#define MOESERVE_SIMD "arch/neon/simd.h"
#define MOESERVE_GROUP_GEMM "arch/neon_i8mm/group_gemm.inl"
#define MOESERVE_TABLE neon_i8mm_kernels
#define MOESERVE_ISA_NAME "neon_i8mm"
#include "arch/kernels.inl"
