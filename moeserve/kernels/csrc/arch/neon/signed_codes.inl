// Codes for instructions that multiply signed bytes (sdot, smmla). Codes up to 127 are that already; 8-bit codes are
// moved down by 128, and so is their zero point. The sum less the zero point's contribution is the same integer.

template <class F>
constexpr int kCodeShift = F::kMostCode > 127 ? 128 : 0;

template <class F>
inline VB signed_codes(VB codes) {
  if constexpr (kCodeShift<F> == 0) return codes;
  return map<VB>([](uint8x16_t x) { return veorq_u8(x, vdupq_n_u8(kCodeShift<F>)); }, codes);
}

// The format as `accumulate` sees it.
template <class F>
struct SignedCodes : F {
  static constexpr int kZero = F::kZero - kCodeShift<F>;
};
