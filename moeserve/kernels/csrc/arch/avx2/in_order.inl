// arch/in_order.h for AVX2, and for AVX-VNNI. The including file is compiled with the flags of the instruction set
// (CMakeLists.txt) and defines MOESERVE_IN_ORDER, the function's name.
#include "arch/in_order.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "formats/panel_layout.h"

namespace moeserve {
namespace {

#define MOESERVE_SIMD "arch/avx2/simd.h"
#define MOESERVE_GROUP_GEMM "arch/avx2/quads.inl"
#include "arch/simd.h"
#include "formats/block_codes.inl"
#include "formats/format_traits.inl"
#include "arch/shared/group_gemm.inl"

// The vectors of one half's group, if codes have nibbles: pairs and bits come before these and are loaded first.
template <class F>
struct CodeLines {
  explicit CodeLines(const uint8_t* p) : nibbles(p + 64 * (F::layout.bit_vectors + F::layout.pair_vectors)) {
    if constexpr (F::layout.bit_vectors > 0) load_now(p, bits);
    if constexpr (F::layout.pair_vectors > 0) {
      load_now(p + 64 * F::layout.bit_vectors, pairs[0]);
      load_now(p + 64 * F::layout.bit_vectors + 64, pairs[1]);
    }
  }
  VB line(int i) const { return load_b(nibbles + 64 * i); }
  template <int Q>
  VB codes(const VB& line) const {
    return codes_of_quad<F::kType, Q>([&] { return line; }, [&] { return pairs[Q / 4]; },
                                      [&] { return bits; });
  }

 private:
  static void load_now(const uint8_t* p, VB& vector) {
    vector = load_b(p);
    compute_now(vector.lo, vector.hi);
  }
  const uint8_t* nibbles;
  VB pairs[2], bits;
};

// Calls add(Quad, codes) for all eight quads, so that each line of nibbles is loaded once, for quads i and i + 4.
template <class F, class Add>
inline void for_lines(const CodeLines<F>& lines, const Add& add) {
  for_quads<0, 4>([&](auto quad) {
    constexpr int q = decltype(quad)::value;
    const VB line = lines.line(q);
    add(quad, lines.template codes<q>(line));
    add(Quad<q + 4>{}, lines.template codes<q + 4>(line));
  });
}

// Adds the sums of 16-bit products to sums of 32 bits, or starts them; each sum is multiplied by `factor`.
template <bool First, int N>
inline void widen(const __m256i (&lo)[N], const __m256i (&hi)[N], int16_t factor, VI (&sums)[N]) {
  const __m256i f = _mm256_set1_epi16(factor);
  for (int t = 0; t < N; ++t) {
    const __m256i a = _mm256_madd_epi16(lo[t], f), b = _mm256_madd_epi16(hi[t], f);
    sums[t].lo = First ? a : _mm256_add_epi32(sums[t].lo, a);
    sums[t].hi = First ? b : _mm256_add_epi32(sums[t].hi, b);
  }
}

// Sums of products of all eight quads, if their codes, or these codes' nibbles, fit 16 bits together.
template <class F, int N>
inline void dot_by_lines(const CodeLines<F>& lines, const int8_t* const (&x)[N], VI (&sums)[N]) {
  static_assert(most_sum(8, kNibbles<F> ? 15 : F::kMostCode) <= kMostInt16);
  __m256i low_lo[N], low_hi[N], high_lo[N], high_hi[N], four[N];
  for_lines(lines, [&](auto quad, const VB& codes) {
    constexpr int q = decltype(quad)::value;
    broadcast_quads(x, q, four);
    add_products<q == 0>(kNibbles<F> ? low_nibbles(codes) : codes, four, low_lo, low_hi);
    if constexpr (kNibbles<F>) add_products<q == 0>(high_nibbles(codes), four, high_lo, high_hi);
  });
  widen<true>(low_lo, low_hi, 1, sums);
  if constexpr (kNibbles<F>) widen<false>(high_lo, high_hi, 16, sums);
}

// The same of any codes with VNNI: the sums of quads 0..3 and 4..7 apart, as F::kSplit needs them, which also makes the
// chains of additions shorter.
template <class F, int N>
inline void vnni_by_lines(const CodeLines<F>& lines, const int8_t* const (&x)[N], VI (&lo)[N], VI (&hi)[N]) {
  __m256i sums[2][2][N];
  for (auto& half : sums)
    for (auto& part : half)
      for (auto& sum : part) sum = _mm256_setzero_si256();
  for_lines(lines, [&](auto quad, const VB& codes) {
    add_dots(codes, quad, x, sums[quad / 4][0], sums[quad / 4][1]);
  });
  for (int t = 0; t < N; ++t) {
    lo[t] = {sums[0][0][t], sums[0][1][t]};
    hi[t] = {sums[1][0][t], sums[1][1][t]};
    if constexpr (!F::kSplit) {
      lo[t] = {_mm256_add_epi32(lo[t].lo, hi[t].lo), _mm256_add_epi32(lo[t].hi, hi[t].hi)};
    }
  }
}

// One half's group of any type: the whole sums in `lo` or, if F::kSplit, those of each half of the columns.
template <class F, int N>
inline void half_sums(const uint8_t* p, const int8_t* const (&x)[N], VI (&lo)[N], VI (&hi)[N]) {
  if constexpr (F::type.low.bits != 4) {
    constexpr int end = F::kSplit ? 4 : 8;
    const PackedCodes<F> codes{p};
    codes.template dot<0, end>(x, lo);
    if constexpr (F::kSplit) codes.template dot<4, 8>(x, hi);
  } else if constexpr (kVnni) {
    vnni_by_lines(CodeLines<F>(p), x, lo, hi);
  } else if constexpr (!F::kSplit && (kNibbles<F> || quads_in_16_bits(F::kMostCode) == 8)) {
    dot_by_lines(CodeLines<F>(p), x, lo);
  } else {
    const CodeLines<F> lines(p);
    auto codes = [&](auto quad) {
      constexpr int q = decltype(quad)::value;
      return lines.template codes<q>(lines.line(q % 4));
    };
    dot_quads<F::kMostCode, 0, F::kSplit ? 4 : 8>(codes, x, lo);
    if constexpr (F::kSplit) dot_quads<F::kMostCode, 4, 8>(codes, x, hi);
  }
}

template <class F, int N>
inline void add_half_group(const uint8_t* codes, const Scales& s, const void* const* rows, int64_t cols,
                           int64_t group, int half, VF (&acc)[N][2]) {
  const int8_t* x[N];
  group_of(rows, group, x);
  VI lo[N], hi[N];
  half_sums<F>(codes, x, lo, hi);
  for (int t = 0; t < N; ++t) {
    acc[t][half] = added<F>(lo[t], hi[t], s, meta_of(rows[t], cols, group), acc[t][half]);
  }
}

#include "arch/shared/in_order.inl"

}  // namespace

PanelGemm MOESERVE_IN_ORDER(int type, int tokens) { return product_in_order(type, tokens); }

}  // namespace moeserve
