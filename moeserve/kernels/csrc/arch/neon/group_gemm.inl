// Group products with sdot alone.

#include "arch/neon/sdot_group.inl"

template <class F>
inline void group_gemm(const uint8_t* codes, const Scales (&s)[2], const void* const* rows, int64_t cols,
                       int64_t group, int n, float* out) {
  sdot_group<F>(codes, s, rows, cols, group, n, out);
}
