// One group of 32 columns of a panel for all tokens: exact integer sums, which are then scaled and added to the
// accumulators. Because integers are exact, a token's sums do not depend on the other tokens, the instruction set or
// the order of the quads.

// Returns the zero point's contribution to a group's sums of codes times activations.
template <class F>
inline VI zero_sums(const GroupMeta& meta) {
  return set_i(F::kZero * (meta.sum_lo + meta.sum_hi));
}

// Scales one token's sums of a group by one scale and adds them to its 16 accumulators. zeros: zero_sums.
template <class F>
inline VF added_whole(VI sums, VI zeros, const Scales& s, const GroupMeta& meta, VF acc) {
  if constexpr (F::kZero != 0) sums = sub_i(sums, zeros);
  acc = fma(to_float(sums), mul(s.s, set_f(meta.scale)), acc);
  if constexpr (F::kMin) acc = fnma(s.z, set_f(meta.scaled_sum), acc);
  return acc;
}

// The same for any format, with the zero point. If F::kSplit, `lo` is the sum of the group's columns 0..15 and `hi` of
// columns 16..31; else `lo` is the whole sum.
template <class F>
inline VF added(VI lo, VI hi, const Scales& s, const GroupMeta& meta, VF acc) {
  if constexpr (F::kSplit) {
    if constexpr (F::kZero != 0) {
      lo = sub_i(lo, set_i(F::kZero * meta.sum_lo));
      hi = sub_i(hi, set_i(F::kZero * meta.sum_hi));
    }
    VF sum = fma(to_float(hi), s.s_hi, mul(to_float(lo), s.s));
    if constexpr (F::kMin) {
      sum = fnma(s.z, set_f(static_cast<float>(meta.sum_lo)), sum);
      sum = fnma(s.z_hi, set_f(static_cast<float>(meta.sum_hi)), sum);
    }
    return fma(sum, set_f(meta.scale), acc);
  } else {
    return added_whole<F>(lo, zero_sums<F>(meta), s, meta, acc);
  }
}

// Both with the accumulators in memory, at `out`.
template <class F>
inline void accumulate_whole(VI sums, VI zeros, const Scales& s, const GroupMeta& meta, float* out) {
  store_f(out, added_whole<F>(sums, zeros, s, meta, load_f(out)));
}
template <class F>
inline void accumulate(VI lo, VI hi, const Scales& s, const GroupMeta& meta, float* out) {
  store_f(out, added<F>(lo, hi, s, meta, load_f(out)));
}

// Prefetch distance in the panel. Without prefetching a Zen 5 core read 22 GB/s, with it 35 to 40. Into the second-level
// cache (Panel::to_l2) 4 KB were too near, and 16 KB no better than 8 (docs/results/cpu-kernels.md).
constexpr int kPrefetchBytes = 4096, kPrefetchBytesToL2 = 8192;

// Returns the address `bytes` after `p`: in this panel or, past its end, in the next one.
inline const uint8_t* reading_ahead(const uint8_t* p, const uint8_t* end, const uint8_t* next,
                                    int bytes = kPrefetchBytes) {
  const uint8_t* ahead = p + bytes;
  return ahead >= end && next != nullptr ? next + (ahead - end) : ahead;
}

inline void prefetch(const uint8_t* p, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(p + line);
}
inline void prefetch_to_l2(const uint8_t* p, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(p + line, 0, 2);
}

inline const GroupMeta& meta_of(const void* row, int64_t cols, int64_t group) {
  return reinterpret_cast<const GroupMeta*>(static_cast<const int8_t*>(row) + cols)[group];
}

// Defines group_gemm and panel_gemm, products of a group of 32 codes with rows, for the instruction set.
#include MOESERVE_GROUP_GEMM
