// The vector types and functions of the instruction set being compiled, and functions that all instruction sets share.
// Included inside `namespace moeserve { namespace {`.

#include MOESERVE_SIMD

// exp(x) for x <= 88, relative error under 2e-7; below -87 (and for -inf) exactly 0.
// Cody-Waite reduction to [-ln2/2, ln2/2] and the degree-6 Taylor tail in Horner form.
inline VF exp_f(VF x) {
  const VF low = set_f(-87.0f);
  const VF clamped = min(max(x, low), set_f(88.0f));
  const VF n = round_even(mul(clamped, set_f(1.44269504f)));
  VF r = fnma(n, set_f(0.693359375f), clamped);
  r = fnma(n, set_f(-2.12194440e-4f), r);
  VF p = set_f(1.0f / 720);
  p = fma(p, r, set_f(1.0f / 120));
  p = fma(p, r, set_f(1.0f / 24));
  p = fma(p, r, set_f(1.0f / 6));
  p = fma(p, r, set_f(0.5f));
  p = fma(p, r, set_f(1.0f));
  p = fma(p, r, set_f(1.0f));
  return blend_less(x, low, zero_f(), mul(p, exp2_int(n)));
}

// tanh(x), relative error under 2e-6; NaN stays NaN. 1 - 2 / (1 + exp(2 x)) would lose digits near 0, where the Taylor
// series up to x^9 is exact to 1e-8.
inline VF tanh_f(VF x) {
  const VF square = mul(x, x), one = set_f(1.0f), two = set_f(2.0f);
  VF p = set_f(62.0f / 2835);
  p = fma(p, square, set_f(-17.0f / 315));
  p = fma(p, square, set_f(2.0f / 15));
  p = fma(p, square, set_f(-1.0f / 3));
  p = fma(p, square, one);
  const VF far = sub(one, div(two, add(one, exp_f(mul(two, x)))));
  return blend_less(set_f(0.25f), abs(x), far, mul(p, x));
}
