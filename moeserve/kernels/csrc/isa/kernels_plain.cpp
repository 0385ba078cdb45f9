// Compiled with this ISA's flags (CMakeLists.txt).
#define MOESERVE_TABLE plain_kernels
#define MOESERVE_ISA_NAME "plain"
#include "kernels.inl"
