// Group products by sdot, which multiplies four columns of four rows with four activations that it takes from a lane: a
// token's group is two registers, and nothing is broadcast.

#include "arch/neon/signed_codes.inl"

// The codes of one half's group of 32 columns, unpacked at each use.
template <class F>
struct PackedCodes {
  const uint8_t* p;
  template <int Q>
  VB quad() const {
    return signed_codes<F>(F::template quad<Q>(p));
  }
};

// The same, unpacked once and stored.
template <class F>
struct UnpackedCodes {
  alignas(64) uint8_t at[8 * 64];
  explicit UnpackedCodes(const uint8_t* p) {
    F::unpack_group(p, [&](auto quad, const VB& codes) { store_b(at + 64 * quad, signed_codes<F>(codes)); });
  }
  template <int Q>
  VB quad() const {
    return load_b(at + 64 * Q);
  }
};

template <int Q>
inline int32x4_t dot_lane(int32x4_t sum, uint8x16_t codes, const int8x16_t (&x)[2]) {
  return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(codes), x[Q / 4], Q % 4);
}

// Sums over quads From..To-1 the products of 16 rows with N tokens.
template <int From, int To, int N, class Codes>
inline void dot_quads(const Codes& codes, const int8x16_t (&x)[N][2], VI (&sums)[N]) {
  for (VI& s : sums) s = set_i(0);
  for_quads<From, To>([&](auto quad) {
    constexpr int q = decltype(quad)::value;
    const VB w = codes.template quad<q>();
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
      sums[t] = {dot_lane<q>(sums[t].a, w.a, x[t]), dot_lane<q>(sums[t].b, w.b, x[t]),
                 dot_lane<q>(sums[t].c, w.c, x[t]), dot_lane<q>(sums[t].d, w.d, x[t])};
    }
  });
}

// N tokens, one half: adds to each token's 16 accumulators; tokens are kPanelRows apart from `out` on.
template <class F, int N, class Codes>
inline void token_tile(const Codes& codes, const Scales& s, const void* const* rows, int64_t cols,
                       int64_t group, float* out) {
  int8x16_t x[N][2];
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t) {
    const int8_t* from = static_cast<const int8_t*>(rows[t]) + 32 * group;
    x[t][0] = vld1q_s8(from);
    x[t][1] = vld1q_s8(from + 16);
  }
  VI lo[N], hi[N] = {};
  if constexpr (F::kSplit) {
    dot_quads<0, 4>(codes, x, lo);
    dot_quads<4, 8>(codes, x, hi);
  } else {
    dot_quads<0, 8>(codes, x, lo);
  }
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t) {
    accumulate<SignedCodes<F>>(lo[t], hi[t], s, meta_of(rows[t], cols, group), out + kPanelRows * t);
  }
}

// n tokens, in tiles of N tokens and a smaller last one.
template <class F, int N, class Codes>
inline void token_tiles(const Codes& codes, const Scales& s, const void* const* rows, int64_t cols,
                        int64_t group, int n, float* out) {
  for (; n >= N; n -= N, rows += N, out += kPanelRows * N) token_tile<F, N>(codes, s, rows, cols, group, out);
  if constexpr (N > 1) {
    if (n > 0) token_tiles<F, N / 2>(codes, s, rows, cols, group, n, out);
  }
}

// Number of tokens whose sums fit in registers: for types with two sums per token, and for the others.
template <class F>
constexpr int kTile = F::kSplit ? 2 : 4;

template <class F>
inline void sdot_group(const uint8_t* codes, const Scales (&s)[2], const void* const* rows, int64_t cols,
                       int64_t group, int n, float* out) {
  for (int half = 0; half < 2; ++half, codes += F::kHalfBytes, out += 16) {
    if constexpr (!F::type.has_book()) {  // a codebook's quads are looked up together
      if (n <= kTile<F>) {
        token_tiles<F, kTile<F>>(PackedCodes<F>{codes}, s[half], rows, cols, group, n, out);
        continue;
      }
    }
    token_tiles<F, kTile<F>>(UnpackedCodes<F>(codes), s[half], rows, cols, group, n, out);
  }
}

// Computes a whole panel in one loop. Returns false if it must be computed block by block.
template <class F>
inline bool panel_gemm(const uint8_t*, const uint8_t*, const uint8_t*, int64_t, const void* const*, int,
                       float*) {
  return false;
}
