// Picks the vector vocabulary for the translation unit's ISA and adds what all three share.
// Included inside `namespace moeserve { namespace {`.

#if defined(MOESERVE_AVX512) || defined(MOESERVE_AVX2)
// Across lanes in one fixed order, the same on every ISA: halves, quarters, pairs, neighbours.
inline float reduce_8(__m256 a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float reduce_max_8(__m256 a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
#endif

#if defined(MOESERVE_AVX512)
#include "simd_avx512.h"
#elif defined(MOESERVE_AVX2)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif

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
