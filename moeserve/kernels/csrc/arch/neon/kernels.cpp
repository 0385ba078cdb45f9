// Compiled with the flags of this instruction set (CMakeLists.txt).
#define MOESERVE_SIMD "arch/neon/simd.h"
#define MOESERVE_GROUP_GEMM "arch/neon/group_gemm.inl"
#define MOESERVE_TABLE neon_dotprod_kernels
#define MOESERVE_ISA_NAME "neon_dotprod"
#include "arch/kernels.inl"
