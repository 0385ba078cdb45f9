// Group products without VNNI. A tile is one half of the panel's rows times up to six tokens, so that its sums fit in
// registers and each weight vector is loaded once for all of them.

// A product of a quad is two int16, each the sum of two u8 x s8 products (vpmaddubsw). Products of several
// quads are added in 16 bits before they are widened to 32 (vpmaddwd), as many as cannot overflow. An activation is in
// [-128, 128] and a code, whatever a file's bytes, in [0, kMostCode], so the sum over `quads` quads has a magnitude of
// at most quads * 2 * 128 * kMostCode. It stays below 32,768 for every type:
//   Q2_K, Q3_K                 3, 7     4 quads (of a scale)    3,072, 7,168
//   Q4_0, Q4_1, Q4_K           15       8                       30,720
//   MXFP4                      24       4                       24,576
//   Q5_0, Q5_1, Q5_K           31       4                       31,744
//   Q6_K                       63       2                       32,256
//   Q8_0, IQ4_NL, IQ4_XS       255, 241 8 of each nibble        30,720
//   IQ2_*, IQ3_XXS             86, 124  1                       22,016, 31,744
//   IQ3_S, IQ1_*               30, 18   4                       30,720, 18,432
constexpr int kMostInt16 = 32767;
constexpr int most_sum(int quads, int most_code) { return quads * 2 * 128 * most_code; }
// Returns how many quads' products fit in 16 bits: 8, 4, 2 or 1.
constexpr int quads_in_16_bits(int most_code) {
  int quads = 8;
  while (quads > 1 && most_sum(quads, most_code) > kMostInt16) quads /= 2;
  return quads;
}
static_assert(quads_in_16_bits(15) == 8 && quads_in_16_bits(24) == 4 && quads_in_16_bits(31) == 4 &&
              quads_in_16_bits(63) == 2);

// 8-bit codes would overflow within a single quad: they are multiplied as two nibbles, 16 * high + low.
template <class F>
constexpr bool kNibbles = most_sum(1, F::kMostCode) > kMostInt16;

// Sums over quads From..To-1 the products with the codes that `codes(Quad<Q>)` returns.
template <int MostCode, int From, int To, int N, class Codes>
inline void dot_quads(const Codes& codes, const int8_t* const (&x)[N], VI (&sums)[N]) {
  constexpr int run = std::min(To - From, quads_in_16_bits(MostCode));
  static_assert(most_sum(run, MostCode) <= kMostInt16 && (To - From) % run == 0);
  __m256i lo[N], hi[N];  // not VI: GCC 12 copies an array's structs through memory
  for_quads<From, To>([&](auto quad) {
    constexpr int q = decltype(quad)::value;
    const VB w = codes(quad);
    __m256i w_lo = w.lo, w_hi = w.hi;
    compute_now(w_lo, w_hi);
#pragma GCC unroll 6
    for (int t = 0; t < N; ++t) {
      const __m256i four = broadcast_quad(x[t] + 4 * q).lo;
      const __m256i a = _mm256_maddubs_epi16(w_lo, four), b = _mm256_maddubs_epi16(w_hi, four);
      if constexpr ((q - From) % run == 0) {
        lo[t] = a;
        hi[t] = b;
      } else {
        lo[t] = _mm256_add_epi16(lo[t], a);
        hi[t] = _mm256_add_epi16(hi[t], b);
      }
      compute_now(lo[t], hi[t]);
    }
    if constexpr ((q - From) % run == run - 1) {
      const __m256i one = _mm256_set1_epi16(1);
#pragma GCC unroll 6
      for (int t = 0; t < N; ++t) {
        const __m256i a = _mm256_madd_epi16(lo[t], one), b = _mm256_madd_epi16(hi[t], one);
        sums[t].lo = q - From < run ? a : _mm256_add_epi32(sums[t].lo, a);
        sums[t].hi = q - From < run ? b : _mm256_add_epi32(sums[t].hi, b);
      }
    }
  });
}
inline VB low_nibbles(VB codes) { return and_b(codes, 15); }
inline VB high_nibbles(VB codes) { return and_b(shr_b<4>(codes), 15); }

template <int N>
inline void broadcast_quads(const int8_t* const (&x)[N], int q, __m256i (&four)[N]) {
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) four[t] = broadcast_quad(x[t] + 4 * q).lo;
}

// Adds a quad's products with w to 16-bit sums, or starts them.
template <bool First, int N>
inline void add_products(const VB& w, const __m256i (&four)[N], __m256i (&lo)[N], __m256i (&hi)[N]) {
  __m256i w_lo = w.lo, w_hi = w.hi;
  compute_now(w_lo, w_hi);
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) {
    const __m256i a = _mm256_maddubs_epi16(w_lo, four[t]), b = _mm256_maddubs_epi16(w_hi, four[t]);
    lo[t] = First ? a : _mm256_add_epi16(lo[t], a);
    hi[t] = First ? b : _mm256_add_epi16(hi[t], b);
    compute_now(lo[t], hi[t]);
  }
}

// The sums for 8-bit codes, whose nibbles `low` and `high` return. Both at once, so that each activation is loaded
// once.
template <int From, int To, int N, class Low, class High>
inline void dot_nibbles(const Low& low, const High& high, const int8_t* const (&x)[N], VI (&sums)[N]) {
  static_assert(most_sum(To - From, 15) <= kMostInt16);
  __m256i low_lo[N], low_hi[N], high_lo[N], high_hi[N], four[N];
  for_quads<From, To>([&](auto quad) {
    broadcast_quads(x, quad, four);
    add_products<quad == From>(low(quad), four, low_lo, low_hi);
    add_products<quad == From>(high(quad), four, high_lo, high_hi);
  });
  const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) {
    sums[t] = {_mm256_add_epi32(_mm256_madd_epi16(low_lo[t], one), _mm256_madd_epi16(high_lo[t], sixteen)),
               _mm256_add_epi32(_mm256_madd_epi16(low_hi[t], one), _mm256_madd_epi16(high_hi[t], sixteen))};
  }
}

// The codes of one half's group of 32 columns, unpacked at each use: for few tokens, storing them would cost more.
template <class F>
struct PackedCodes {
  const uint8_t* p;

  template <int From, int To, int N>
  void dot(const int8_t* const (&x)[N], VI (&sums)[N]) const {
    auto codes = [&](auto quad) { return F::template quad<decltype(quad)::value>(p); };
    if constexpr (kNibbles<F>) {
      dot_nibbles<From, To>([&](auto quad) { return low_nibbles(codes(quad)); },
                            [&](auto quad) { return high_nibbles(codes(quad)); }, x, sums);
    } else {
      dot_quads<F::kMostCode, From, To>(codes, x, sums);
    }
  }
};

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

// Pointers to where the group begins in N tokens' activations.
template <int N>
inline void group_of(const void* const* rows, int64_t group, const int8_t* (&x)[N]) {
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) {
    x[t] = static_cast<const int8_t*>(rows[t]) + 32 * group;
    asm("" : "+r"(x[t]));  // keeps the pointers apart: GCC would add them in a vector and extract them again
  }
}

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
// small block's time (docs/results/cpu-engine.md).

// N tokens, few enough for one tile. What both halves need of a token is computed once. Scales are read only when the
// products are summed, because the products need the registers.
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
