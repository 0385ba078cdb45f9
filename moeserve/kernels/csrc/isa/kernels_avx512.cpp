// Compiled with this ISA's flags (CMakeLists.txt).
#define MOESERVE_AVX512
#define MOESERVE_TABLE avx512_kernels
#define MOESERVE_ISA_NAME "avx512_vnni"
#include "kernels.inl"
