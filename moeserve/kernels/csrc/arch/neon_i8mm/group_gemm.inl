// Group products by smmla, which multiplies eight columns of two rows with those of two tokens: for two tokens and more
// half as many instructions as sdot takes. One token is multiplied by sdot.

#include "arch/neon/sdot_group.inl"

// One half's group of 32 columns for smmla: [4 of eight columns][8 pairs of rows][2 rows][8 columns].
template <class F>
struct PairedRows {
  alignas(64) uint8_t at[8 * 64];
  explicit PairedRows(const uint8_t* p) {
    const UnpackedCodes<F> codes(p);
    for (int eight = 0; eight < 4; ++eight) {
      for (int i = 0; i < 4; ++i) {
        auto quad = [&](int q) { return vreinterpretq_u32_u8(vld1q_u8(codes.at + 64 * q + 16 * i)); };
        const uint32x4_t first = quad(2 * eight), second = quad(2 * eight + 1);
        vst1q_u8(at + 128 * eight + 32 * i, vreinterpretq_u8_u32(vzip1q_u32(first, second)));
        vst1q_u8(at + 128 * eight + 32 * i + 16, vreinterpretq_u8_u32(vzip2q_u32(first, second)));
      }
    }
  }
};

// Sums of 16 rows' products with two tokens, over the columns From..To-1 of four times eight. x: [two tokens].
template <int From, int To>
inline void multiply_pairs(const uint8_t* codes, const int8_t* const (&x)[2], VI (&sums)[2]) {
  int32x4_t acc[8];  // of a pair of rows: row 0 token 0, row 0 token 1, row 1 token 0, row 1 token 1
  for (int32x4_t& a : acc) a = vdupq_n_s32(0);
#pragma GCC unroll 4
  for (int eight = From; eight < To; ++eight) {
    const int8x16_t both = vcombine_s8(vld1_s8(x[0] + 8 * eight), vld1_s8(x[1] + 8 * eight));
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; ++pair) {
      const uint8x16_t w = vld1q_u8(codes + 128 * eight + 16 * pair);
      acc[pair] = vmmlaq_s32(acc[pair], vreinterpretq_s8_u8(w), both);
    }
  }
  sums[0] = {vuzp1q_s32(acc[0], acc[1]), vuzp1q_s32(acc[2], acc[3]), vuzp1q_s32(acc[4], acc[5]),
             vuzp1q_s32(acc[6], acc[7])};
  sums[1] = {vuzp2q_s32(acc[0], acc[1]), vuzp2q_s32(acc[2], acc[3]), vuzp2q_s32(acc[4], acc[5]),
             vuzp2q_s32(acc[6], acc[7])};
}

// Two tokens, or one with itself, of which the second result is dropped.
template <class F>
inline void token_pair(const PairedRows<F>& w, const Scales& s, const void* const* rows, int count,
                       int64_t cols, int64_t group, float* out) {
  const void* const both[2] = {rows[0], rows[count - 1]};
  const int8_t* const x[2] = {static_cast<const int8_t*>(both[0]) + 32 * group,
                              static_cast<const int8_t*>(both[1]) + 32 * group};
  VI lo[2], hi[2] = {};
  if constexpr (F::kSplit) {
    multiply_pairs<0, 2>(w.at, x, lo);
    multiply_pairs<2, 4>(w.at, x, hi);
  } else {
    multiply_pairs<0, 4>(w.at, x, lo);
  }
  for (int t = 0; t < count; ++t) {
    accumulate<SignedCodes<F>>(lo[t], hi[t], s, meta_of(both[t], cols, group), out + kPanelRows * t);
  }
}

template <class F>
inline void group_gemm(const uint8_t* codes, const Scales (&s)[2], const void* const* rows, int64_t cols,
                       int64_t group, int n, float* out) {
  if (n == 1) return sdot_group<F>(codes, s, rows, cols, group, n, out);
  for (int half = 0; half < 2; ++half) {
    const PairedRows<F> w(codes + half * F::kHalfBytes);
    for (int t = 0; t < n; t += 2) {
      token_pair<F>(w, s[half], rows + t, std::min(2, n - t), cols, group, out + kPanelRows * t + 16 * half);
    }
  }
}
