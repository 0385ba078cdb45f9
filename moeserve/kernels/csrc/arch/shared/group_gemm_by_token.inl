// Group products token by token, both halves of a panel at once: for instruction sets whose registers hold a group of
// codes. MOESERVE_TOKEN_GROUP: how to inline a token's function.

// One token: adds to the 32 accumulators at `out`. Both halves at once, so that one's products overlap with the
// other's.
template <class F>
MOESERVE_TOKEN_GROUP void token_group(const VB (&w)[2][8], const Scales (&s)[2], const void* row,
                                      int64_t cols, int64_t group, float* out) {
  const int8_t* x = static_cast<const int8_t*>(row) + 32 * group;
  VI lo[2] = {set_i(0), set_i(0)}, hi[2] = {set_i(0), set_i(0)};
  for (int i = 0; i < 4; ++i) {
    const VI a = broadcast_quad(x + 4 * i), b = broadcast_quad(x + 16 + 4 * i);
    for (int half = 0; half < 2; ++half) {
      lo[half] = dot4(lo[half], w[half][i], a);
      VI& second = F::kSplit ? hi[half] : lo[half];
      second = dot4(second, w[half][i + 4], b);
    }
  }
  const GroupMeta meta = meta_of(row, cols, group);
  accumulate<F>(lo[0], hi[0], s[0], meta, out);
  accumulate<F>(lo[1], hi[1], s[1], meta, out + 16);
}

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
  for (int t = 0; t < n; ++t) token_group<F>(w, s, rows[t], cols, group, out + kPanelRows * t);
}

// Computes a whole panel in one loop. Returns false if it must be computed block by block.
template <class F>
inline bool panel_gemm(const uint8_t*, const uint8_t*, const uint8_t*, int64_t, const void* const*, int,
                       float*) {
  return false;
}
