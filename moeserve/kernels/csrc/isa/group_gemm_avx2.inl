// Without VNNI. A tile is a half of the panel's rows by up to four tokens, so that its sums fit in registers and a weight
// vector is loaded once for them.

// A product of a quad is two int16, each the sum of two u8 x s8 products (vpmaddubsw). Products of several
// quads are added in 16 bits before they are widened to 32 (vpmaddwd), as many as cannot overflow: an activation is
// within 128 of 0 and a code, whatever a file's bytes, is between 0 and kMostCode, so that `quads` products are within
// quads * 2 * 128 * kMostCode of 0. That bound is kept below for every type:
//   Q2_K, Q3_K                 3, 7     4 quads (of a scale)    3,072, 7,168
//   Q4_0, Q4_1, Q4_K           15       8                       30,720
//   MXFP4                      24       4                       24,576
//   Q5_0, Q5_1, Q5_K           31       4                       31,744
//   Q6_K                       63       2                       32,256
//   Q8_0, IQ4_NL, IQ4_XS       255, 241 8 of each nibble        30,720
constexpr int kMostInt16 = 32767;
constexpr int most_sum(int quads, int most_code) { return quads * 2 * 128 * most_code; }
// 8, 4, 2 or 1.
constexpr int quads_in_16_bits(int most_code) {
  int quads = 8;
  while (quads > 1 && most_sum(quads, most_code) > kMostInt16) quads /= 2;
  return quads;
}
static_assert(quads_in_16_bits(15) == 8 && quads_in_16_bits(24) == 4 && quads_in_16_bits(31) == 4 &&
              quads_in_16_bits(63) == 2);

// Codes of 8 bits would overflow already within a quad: they are multiplied as two nibbles, 16 * high + low.
template <class F>
constexpr bool kNibbles = most_sum(1, F::kMostCode) > kMostInt16;

// Sums over quads From..To-1 of the quad's codes, which `codes(Quad<Q>)` gives.
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
#pragma GCC unroll 4
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
#pragma GCC unroll 4
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
inline void add_sixteen_fold(const VI (&high)[N], VI (&sums)[N]) {
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t) sums[t] = add_i(sums[t], shl_i<4>(high[t]));
}

// The codes of a group of 32 columns of a half, unpacked where they are used: for so few tokens that storing them
// would cost more.
template <class F>
struct PackedCodes {
  const uint8_t* p;

  template <int From, int To, int N>
  void dot(const int8_t* const (&x)[N], VI (&sums)[N]) const {
    auto codes = [&](auto quad) { return F::template quad<decltype(quad)::value>(p); };
    if constexpr (kNibbles<F>) {
      VI high[N];
      dot_quads<15, From, To>([&](auto quad) { return high_nibbles(codes(quad)); }, x, high);
      dot_quads<15, From, To>([&](auto quad) { return low_nibbles(codes(quad)); }, x, sums);
      add_sixteen_fold(high, sums);
    } else {
      dot_quads<F::kMostCode, From, To>(codes, x, sums);
    }
  }
};

// The same, unpacked once.
template <class F>
struct UnpackedCodes {
  static constexpr int kBytes = 64;
  alignas(64) uint8_t low[8 * kBytes];                      // the codes or, where kNibbles, their low nibbles
  alignas(64) uint8_t high[kNibbles<F> ? 8 * kBytes : 64];  // their high nibbles (kNibbles)

  explicit UnpackedCodes(const uint8_t* p) {
    for_quads<0, 8>([&](auto quad) {
      constexpr int q = decltype(quad)::value;
      const VB codes = F::template quad<q>(p);
      if constexpr (kNibbles<F>) {
        store_b(low + q * kBytes, low_nibbles(codes));
        store_b(high + q * kBytes, high_nibbles(codes));
      } else {
        store_b(low + q * kBytes, codes);
      }
    });
  }

  template <int From, int To, int N>
  void dot(const int8_t* const (&x)[N], VI (&sums)[N]) const {
    constexpr int most = kNibbles<F> ? 15 : F::kMostCode;
    dot_quads<most, From, To>([&](auto quad) { return load_b(low + quad * kBytes); }, x, sums);
    if constexpr (kNibbles<F>) {
      VI sixteenths[N];
      dot_quads<15, From, To>([&](auto quad) { return load_b(high + quad * kBytes); }, x, sixteenths);
      add_sixteen_fold(sixteenths, sums);
    }
  }
};

// Where N tokens' group begins.
template <int N>
inline void group_of(const void* const* rows, int64_t group, const int8_t* (&x)[N]) {
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t) {
    x[t] = static_cast<const int8_t*>(rows[t]) + 32 * group;
    asm("" : "+r"(x[t]));  // else GCC adds the pointers in a vector and takes them out again
  }
}

// N tokens, one half: adds to their 16 accumulators each, kPanelRows apart from `out` on.
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
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t) {
    accumulate<F>(lo[t], hi[t], s, meta_of(rows[t], cols, group), out + kPanelRows * t);
  }
}

template <class F>
[[gnu::always_inline]] inline void half_gemm(const uint8_t* codes, const Scales& s, const void* const* rows,
                                             int64_t cols, int64_t group, int n, float* out) {
  if (n == 1) return token_tile<F, 1>(PackedCodes<F>{codes}, s, rows, cols, group, out);
  if (n == 2) return token_tile<F, 2>(PackedCodes<F>{codes}, s, rows, cols, group, out);
  constexpr int tile = F::kSplit ? 2 : 4;  // two sums a token where the scales are of 16 columns
  const UnpackedCodes<F> w(codes);
  int t = 0;
  for (; t + tile <= n; t += tile) {
    token_tile<F, tile>(w, s, rows + t, cols, group, out + kPanelRows * t);
  }
  for (; t < n; ++t) token_tile<F, 1>(w, s, rows + t, cols, group, out + kPanelRows * t);
}

template <class F>
[[gnu::always_inline]] inline void group_gemm(const uint8_t* codes, const Scales (&s)[2],
                                              const void* const* rows, int64_t cols, int64_t group, int n,
                                              float* out) {
#pragma GCC unroll 1
  for (int half = 0; half < 2; ++half) {
    half_gemm<F>(codes + half * F::layout.half_bytes(), s[half], rows, cols, group, n, out + 16 * half);
  }
}
