// Picks the vector vocabulary for the translation unit's ISA and adds what all three share.
// Included inside `namespace moeserve { namespace {`.

#if defined(MOESERVE_AVX512)
#include "simd_avx512.h"
#elif defined(MOESERVE_AVX2)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif

#if !defined(MOESERVE_AVX2)
inline VI dot4_wide(VI acc, VB w, VI x) { return dot4(acc, w, x); }
#endif

// Sums and maxima across lanes go through memory in one fixed order, the same on every ISA.
inline float reduce_add(VF a) {
  alignas(64) float x[16];
  store_f(x, a);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  }
  return x[0];
}
inline float reduce_max(VF a) {
  alignas(64) float x[16];
  store_f(x, a);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  }
  return x[0];
}

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
