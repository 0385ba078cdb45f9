// Compiled with the flags of this instruction set (CMakeLists.txt).
#define MOESERVE_SIMD "arch/avx2/simd.h"
#define MOESERVE_GROUP_GEMM "arch/avx2/group_gemm.inl"
#define MOESERVE_TABLE avx2_kernels
#define MOESERVE_ISA_NAME "avx2"
#include "arch/kernels.inl"
