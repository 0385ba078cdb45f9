// Compiled with the flags of this instruction set (CMakeLists.txt).
#define MOESERVE_SIMD "arch/plain/simd.h"
#define MOESERVE_GROUP_GEMM "arch/shared/group_gemm_by_token.inl"
// Not inlined: inlined after the unpacking, GCC 12's plain C++ takes up to twice as long.
#define MOESERVE_TOKEN_GROUP [[gnu::noinline]] inline
#define MOESERVE_TABLE plain_kernels
#define MOESERVE_ISA_NAME "plain"
#include "arch/kernels.inl"
