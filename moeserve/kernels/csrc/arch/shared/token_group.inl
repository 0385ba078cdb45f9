// A token's products with a group whose codes are in registers. MOESERVE_TOKEN_GROUP: how to inline them.

// One token: adds to the 32 accumulators at `out`. Both halves at once, so that one's products overlap with the
// other's. x: the group's 32 activations, a quad's four beside each other.
template <class F>
MOESERVE_TOKEN_GROUP void token_group(const VB (&w)[2][8], const Scales (&s)[2], const int8_t* x,
                                      GroupMeta meta, float* out) {
  VI lo[2] = {set_i(0), set_i(0)}, hi[2] = {set_i(0), set_i(0)};
  for (int i = 0; i < 4; ++i) {
    const VI a = broadcast_quad(x + 4 * i), b = broadcast_quad(x + 16 + 4 * i);
    for (int half = 0; half < 2; ++half) {
      lo[half] = dot4(lo[half], w[half][i], a);
      VI& second = F::kSplit ? hi[half] : lo[half];
      second = dot4(second, w[half][i + 4], b);
    }
  }
  accumulate<F>(lo[0], hi[0], s[0], meta, out);
  accumulate<F>(lo[1], hi[1], s[1], meta, out + 16);
}

// Computes a whole panel in one loop. Returns false if it must be computed block by block.
template <class F>
inline bool panel_gemm(const uint8_t*, const uint8_t*, const uint8_t*, int64_t, const void* const*, int,
                       float*) {
  return false;
}
