// Group products without VNNI. A tile is one half of the panel's rows times up to six tokens, so that its sums fit in
// registers and each weight vector is loaded once for all of them.

#include "arch/avx2/quads.inl"
#include "arch/avx2/book_entries.inl"

// The same, unpacked once and stored.
template <class F>
struct UnpackedCodes {
  static constexpr int kBytes = 64;
  alignas(64) uint8_t low[8 * kBytes];                      // the codes or, where kNibbles, their low nibbles
  alignas(64) uint8_t high[kNibbles<F> ? 8 * kBytes : 64];  // their high nibbles (kNibbles)

  explicit UnpackedCodes(const uint8_t* p) {
    auto put = [&](auto quad, const VB& codes) {
      constexpr int q = decltype(quad)::value;
      if constexpr (kNibbles<F>) {
        store_b(low + q * kBytes, low_nibbles(codes));
        store_b(high + q * kBytes, high_nibbles(codes));
      } else {
        store_b(low + q * kBytes, codes);
      }
    };
    if constexpr (F::type.has_book()) {
      unpack_book<F::kType, LoadedEntries>(p, put);
    } else {
      F::unpack_group(p, put);
    }
  }

  template <int From, int To, int N>
  void dot(const int8_t* const (&x)[N], VI (&sums)[N]) const {
    auto lowest = [&](auto quad) { return load_b(low + quad * kBytes); };
    if constexpr (kNibbles<F>) {
      dot_nibbles<From, To>(lowest, [&](auto quad) { return load_b(high + quad * kBytes); }, x, sums);
    } else {
      dot_quads<F::kMostCode, From, To>(lowest, x, sums);
    }
  }
};

#include "arch/avx2/book_products.inl"

// N tokens, one half: adds to each token's 16 accumulators; tokens are kPanelRows apart from `out` on.
template <class F, int N, class Codes>
inline void token_tile(const Codes& w, const Scales& s, const void* const* rows, int64_t cols, int64_t group,
                       float* out) {
  const int8_t* x[N];
  group_of(rows, group, x);
  VI lo[N], hi[N];
  if constexpr (F::kSplit) {
    w.template dot<0, 4>(x, lo);
    w.template dot<4, 8>(x, hi);
  } else {
    w.template dot<0, 8>(x, lo);
  }
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) {
    accumulate<F>(lo[t], hi[t], s, meta_of(rows[t], cols, group), out + kPanelRows * t);
  }
}

// A separate function with everything inlined into it, so that GCC has all registers for the tile's sums.
template <class F, int N, class Codes>
[[gnu::noinline, gnu::flatten]] void token_tile_apart(const Codes& w, const Scales& s,
                                                      const void* const* rows, int64_t cols, int64_t group,
                                                      float* out) {
  token_tile<F, N>(w, s, rows, cols, group, out);
}

// n tokens, in tiles of N tokens and a smaller last one.
template <class F, int N, class Codes>
inline void token_tiles(const Codes& w, const Scales& s, const void* const* rows, int64_t cols, int64_t group,
                        int n, float* out) {
  for (; n >= N; n -= N, rows += N, out += kPanelRows * N) {
    token_tile_apart<F, N>(w, s, rows, cols, group, out);
  }
  if constexpr (N > 1) {
    if (n > 0) token_tiles<F, N == 6 ? 4 : N - 1>(w, s, rows, cols, group, n, out);
  }
}

// Number of tokens whose sums fit in registers: for types with two sums per token, and for the others.
template <class F>
constexpr int kTile = F::kSplit || kNibbles<F> ? 2 : 6;
// Up to this many tokens, unpacking codes again for each tile is faster than storing them: plain nibbles up to eight
// tokens, nibbles with a table up to one tile of four, codebook entries never.
template <class F>
constexpr int kMostUnpackedAgain = F::type.has_book()                       ? 0
                                   : kTile<F> == 2 || F::type.high.bits > 0 ? 2
                                   : F::type.table == CodeTable::None       ? 8
                                                                            : 4;

template <class F>
[[gnu::always_inline]] inline void half_gemm(const uint8_t* codes, const Scales& s, const void* const* rows,
                                             int64_t cols, int64_t group, int n, float* out) {
  if constexpr (kMostUnpackedAgain<F> > 0) {
    if (n == 1) {
      token_tile<F, 1>(PackedCodes<F>{codes}, s, rows, cols, group, out);
      return;
    }
    if (n <= kMostUnpackedAgain<F>) {
      token_tiles<F, std::min(kMostUnpackedAgain<F>, 4)>(PackedCodes<F>{codes}, s, rows, cols, group, n, out);
      return;
    }
  }
  const UnpackedCodes<F> unpacked(codes);
  if (n == 1) {
    token_tile<F, 1>(unpacked, s, rows, cols, group, out);
  } else {
    token_tiles<F, kTile<F>>(unpacked, s, rows, cols, group, n, out);
  }
}

template <class F>
[[gnu::always_inline]] inline void group_gemm(const uint8_t* codes, const Scales (&s)[2],
                                              const void* const* rows, int64_t cols, int64_t group, int n,
                                              float* out) {
#pragma GCC unroll 1
  for (int half = 0; half < 2; ++half) {
    half_gemm<F>(codes + half * F::kHalfBytes, s[half], rows, cols, group, n, out + 16 * half);
  }
}

// Panels of types with blocks of 32 columns are computed in one loop: a call per block would take a third of such a
// small block's time (docs/results/cpu-kernels.md).

// N tokens, few enough for one tile. Values of a token that both halves use are computed once. Scales are read only
// when the products are summed, because the products need the registers.
template <class F, int N>
[[gnu::noinline, gnu::flatten]] void panel_of_few(const uint8_t* panel, const uint8_t* end,
                                                  const uint8_t* next, int64_t cols, const void* const* rows,
                                                  float* out) {
  constexpr PanelLayout layout = F::layout;
  static_assert(layout.cols == 32 && !F::kSplit);
  for (int64_t group = 0; panel < end; ++group, panel += layout.block_bytes) {
    prefetch(reading_ahead(panel, end, next), layout.block_bytes);
    const int8_t* x[N];
    VI zeros[N];
    for (int t = 0; t < N; ++t) {
      x[t] = static_cast<const int8_t*>(rows[t]) + 32 * group;
      zeros[t] = zero_sums<F>(meta_of(rows[t], cols, group));
    }
    for (int half = 0; half < 2; ++half) {
      VI sums[N];
      PackedCodes<F>{panel + layout.header_bytes + half * layout.half_bytes()}.template dot<0, 8>(x, sums);
      const Scales s = F::scales(panel, 0, half);
      for (int t = 0; t < N; ++t) {
        const GroupMeta& meta = meta_of(rows[t], cols, group);
        accumulate_whole<F>(sums[t], zeros[t], s, meta, out + kPanelRows * t + 16 * half);
      }
    }
  }
}

// n tokens, in tiles of N tokens and a smaller last one.
template <class F, int N>
inline void inner_tiles(const UnpackedCodes<F>& w, const Scales& s, const void* const* rows, int64_t cols,
                        int64_t group, int n, float* out) {
#pragma GCC unroll 1
  for (; n >= N; n -= N, rows += N, out += kPanelRows * N) token_tile<F, N>(w, s, rows, cols, group, out);
  if constexpr (N > 1) {
    if (n > 0) inner_tiles<F, N / 2>(w, s, rows, cols, group, n, out);
  }
}

// Any number of tokens.
template <class F>
[[gnu::noinline, gnu::flatten]] void panel_of_many(const uint8_t* panel, const uint8_t* end,
                                                   const uint8_t* next, int64_t cols, const void* const* rows,
                                                   int n, float* out) {
  constexpr PanelLayout layout = F::layout;
  for (int64_t group = 0; panel < end; ++group, panel += layout.block_bytes) {
    prefetch(reading_ahead(panel, end, next), layout.block_bytes);
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {
      const UnpackedCodes<F> w(panel + layout.header_bytes + half * layout.half_bytes());
      const Scales s = F::scales(panel, 0, half);
      inner_tiles<F, kNibbles<F> ? 2 : 4>(w, s, rows, cols, group, n, out + 16 * half);
    }
  }
}

// The product of n tokens, at least N and at most kMostBookTokens.
template <class F, int N>
inline void book_gemm(const uint8_t* panel, const uint8_t* end, const uint8_t* next, int64_t cols,
                      const void* const* rows, int n, float* out) {
  if constexpr (N < kMostBookTokens<F>) {
    if (n > N) return book_gemm<F, N + 1>(panel, end, next, cols, rows, n, out);
  }
  book_panel<F, N>(panel, end, next, cols, rows, out);
}

// Returns false if blocks are larger, unless it is a codebook's and the tokens are few.
template <class F>
inline bool panel_gemm(const uint8_t* panel, const uint8_t* end, const uint8_t* next, int64_t cols,
                       const void* const* rows, int n, float* out) {
  if constexpr (F::type.has_book()) {
    if (n > kMostBookTokens<F>) return false;
    book_gemm<F, 1>(panel, end, next, cols, rows, n, out);
    return true;
  } else if constexpr (F::layout.cols != 32) {
    return false;
  } else {
    switch (n) {
      case 1:
        panel_of_few<F, 1>(panel, end, next, cols, rows, out);
        break;
      case 2:
        panel_of_few<F, 2>(panel, end, next, cols, rows, out);
        break;
      case 3:
        panel_of_few<F, 3>(panel, end, next, cols, rows, out);
        break;
      case 4:
        panel_of_few<F, 4>(panel, end, next, cols, rows, out);
        break;
      default:
        panel_of_many<F>(panel, end, next, cols, rows, n, out);
    }
    return true;
  }
}
