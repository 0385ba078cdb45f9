// Integer products of a group of 32 columns: with AVX-VNNI (kVnni) sums of 32 bits, and without it as follows.

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
constexpr bool kNibbles = !kVnni && most_sum(1, F::kMostCode) > kMostInt16;

// Adds a quad's products with w to N tokens' sums.
template <int N>
inline void add_dots(const VB& w, int quad, const int8_t* const (&x)[N], __m256i (&lo)[N], __m256i (&hi)[N]) {
  __m256i w_lo = w.lo, w_hi = w.hi;
  compute_now(w_lo, w_hi);
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) {
    const __m256i four = broadcast_quad(x[t] + 4 * quad).lo;
    lo[t] = dot_bytes(lo[t], w_lo, four);
    hi[t] = dot_bytes(hi[t], w_hi, four);
  }
}
template <int From, int To, int N, class Codes>
inline void vnni_quads(const Codes& codes, const int8_t* const (&x)[N], VI (&sums)[N]) {
  __m256i lo[N], hi[N];
  for (int t = 0; t < N; ++t) lo[t] = hi[t] = _mm256_setzero_si256();
  for_quads<From, To>([&](auto quad) { add_dots(codes(quad), quad, x, lo, hi); });
  for (int t = 0; t < N; ++t) sums[t] = {lo[t], hi[t]};
}

template <int MostCode, int From, int To, int N, class Codes>
inline void quads_by_16_bits(const Codes& codes, const int8_t* const (&x)[N], VI (&sums)[N]) {
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
// Sums over quads From..To-1 the products with the codes that `codes(Quad<Q>)` returns.
template <int MostCode, int From, int To, int N, class Codes>
inline void dot_quads(const Codes& codes, const int8_t* const (&x)[N], VI (&sums)[N]) {
  if constexpr (kVnni) {
    vnni_quads<From, To>(codes, x, sums);
  } else {
    quads_by_16_bits<MostCode, From, To>(codes, x, sums);
  }
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

// Pointers to where the group begins in N tokens' activations.
template <int N>
inline void group_of(const void* const* rows, int64_t group, const int8_t* (&x)[N]) {
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) {
    x[t] = static_cast<const int8_t*>(rows[t]) + 32 * group;
    asm("" : "+r"(x[t]));  // keeps the pointers apart: GCC would add them in a vector and extract them again
  }
}
