// Compiled with the flags of this instruction set (CMakeLists.txt).
#define MOESERVE_SIMD "arch/avx512/simd.h"
#define MOESERVE_GROUP_GEMM "arch/shared/group_gemm_by_token.inl"
#define MOESERVE_TOKEN_GROUP [[gnu::always_inline]] inline
#define MOESERVE_TABLE avx512_kernels
#define MOESERVE_ISA_NAME "avx512_vnni"
#include "arch/kernels.inl"
