// Compiled with the flags of this instruction set (CMakeLists.txt).
#define MOESERVE_IN_ORDER avx2_in_order
#include "arch/avx2/in_order.inl"
