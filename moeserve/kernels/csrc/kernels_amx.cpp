// Compiled with this ISA's flags (CMakeLists.txt): AVX-512, and the AMX tile unit for 16 tokens and more.
#define MOESERVE_AVX512
#define MOESERVE_AMX
#define MOESERVE_TABLE amx_kernels
#define MOESERVE_ISA_NAME "amx"
#include "kernels.inl"
