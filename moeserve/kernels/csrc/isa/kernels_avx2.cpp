// Compiled with this ISA's flags (CMakeLists.txt).
#define MOESERVE_AVX2
#define MOESERVE_TABLE avx2_kernels
#define MOESERVE_ISA_NAME "avx2"
#include "kernels.inl"
