// Group products token by token, both halves of a panel at once: for instruction sets whose registers hold a group of
// codes.

#include "arch/shared/token_group.inl"

template <class F>
inline void unpack_half(const uint8_t* p, VB (&w)[8]) {
  F::unpack_group(p, [&](auto quad, const VB& codes) { w[quad] = codes; });
}

template <class F>
inline void group_gemm(const uint8_t* codes, const Scales (&s)[2], const void* const* rows, int64_t cols,
                       int64_t group, int n, float* out) {
  VB w[2][8];
  unpack_half<F>(codes, w[0]);
  unpack_half<F>(codes + F::kHalfBytes, w[1]);
  for (int t = 0; t < n; ++t) {
    const int8_t* x = static_cast<const int8_t*>(rows[t]) + 32 * group;
    token_group<F>(w, s, x, meta_of(rows[t], cols, group), out + kPanelRows * t);
  }
}
