// The vector types and functions that the kernels use, for AVX2 + FMA + F16C: every 512-bit value is two halves. With
// AVX-VNNI's flag also its products.

#include "arch/x86.h"

constexpr int kSumsInRegisters =
    4;                        // accumulators (VF or VI) of a kernel; each takes two of the 16 registers
constexpr int kRowLanes = 8;  // floats per vector in sampling/row_passes.inl
constexpr bool kGathersPairs = false;

struct VF {
  __m256 lo, hi;
};
struct VI {
  __m256i lo, hi;
};
struct VB {
  __m256i lo, hi;
};

inline VF zero_f() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline VF set_f(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline VF load_f(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_f(float* p, VF a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline VF add(VF a, VF b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline VF sub(VF a, VF b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline VF mul(VF a, VF b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline VF div(VF a, VF b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline VF max(VF a, VF b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline VF min(VF a, VF b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline VF abs(VF a) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, m), _mm256_and_ps(a.hi, m)};
}
inline VF fma(VF a, VF b, VF c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline VF fnma(VF a, VF b, VF c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline VF load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))};
}
inline __m256 bfloat_8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}
inline VF load_bfloat(const uint16_t* p) { return {bfloat_8(p), bfloat_8(p + 8)}; }
inline void store_half(uint16_t* p, VF a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline VF round_even(VF a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 exp2_8(__m256 n) {
  const __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
inline VF exp2_int(VF n) { return {exp2_8(n.lo), exp2_8(n.hi)}; }
inline VF blend_less(VF a, VF b, VF yes, VF no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}

inline VI set_i(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline VI broadcast_quad(const int8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return set_i(x);
}
// Makes GCC compute both values here. Otherwise it moves a chain of additions to where the result is used, and keeps
// all summands in memory.
inline void compute_now(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }
// Loads 32 int16: two per lane.
inline VI load_pairs(const int16_t* p) {
  const auto* v = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
inline VI broadcast_pair(const int16_t* p) { return broadcast_quad(reinterpret_cast<const int8_t*>(p)); }
inline VI dot2(VI acc, VI a, VI pair) {
  acc = {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, pair.lo)),
         _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, pair.hi))};
  compute_now(acc.lo, acc.hi);
  return acc;
}
// Adds to each of 8 sums the products of four codes (unsigned) and four activations (signed).
#if defined(__AVXVNNI__)
constexpr bool kVnni = true;
inline __m256i dot_bytes(__m256i sums, __m256i codes, __m256i x) {
  return _mm256_dpbusd_avx_epi32(sums, codes, x);
}
#else
constexpr bool kVnni = false;
template <class Sums>
Sums dot_bytes(Sums, __m256i, __m256i) = delete;
#endif
// Widens to int16 the first and third of each lane's four int8 (even), or the second and fourth (odd).
inline void store_odd_bytes(int16_t* p, VB a) {
  auto* v = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(v, _mm256_srai_epi16(a.lo, 8));
  _mm256_storeu_si256(v + 1, _mm256_srai_epi16(a.hi, 8));
}
inline void store_even_bytes(int16_t* p, VB a) {
  store_odd_bytes(p, {_mm256_slli_epi16(a.lo, 8), _mm256_slli_epi16(a.hi, 8)});
}
// Interleaves two rows of 16 int8, widened to int16.
inline void store_byte_pairs(int16_t* p, const uint8_t* a, const uint8_t* b) {
  const __m128i x = load_128(a), y = load_128(b);
  auto* v = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(v, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y)));
  _mm256_storeu_si256(v + 1, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y)));
}
inline VF as_float(VI bits) { return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)}; }
inline VF to_float(VI a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline __m128i load_64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline VI load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(load_64(p)), _mm256_cvtepu8_epi32(load_64(p + 8))};
}
inline VI load_i8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(load_64(p)), _mm256_cvtepi8_epi32(load_64(p + 8))};
}
inline VI and_i(VI a, int mask) {
  return {_mm256_and_si256(a.lo, _mm256_set1_epi32(mask)), _mm256_and_si256(a.hi, _mm256_set1_epi32(mask))};
}
inline VI or_i(VI a, VI b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline VI sub_i(VI a, VI b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline VI xor_i(VI a, VI b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline VI load_i(const void* p) {
  const auto* v = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
inline __m256 half_bits_8(__m256i a) {
  return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}
inline VF half_bits(VI a) { return {half_bits_8(a.lo), half_bits_8(a.hi)}; }
inline VI max_i(VI a, VI b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
template <int N>
inline VI shr_i(VI a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
inline VI shl_i(VI a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
inline __m128i narrow_8(__m256 rounded) {
  const __m256i i = _mm256_cvtps_epi32(rounded);
  return _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
}
inline void store_i8(int8_t* p, VF rounded) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(narrow_8(rounded.lo), narrow_8(rounded.hi)));
}
inline void store_i16(int16_t* p, VF a, VF b) {  // stores 32 int16, rounded to even and saturated
  const VF both[2] = {a, b};
  for (int i = 0; i < 2; ++i) {
    const __m256i x = _mm256_packs_epi32(_mm256_cvtps_epi32(both[i].lo), _mm256_cvtps_epi32(both[i].hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + i, _mm256_permute4x64_epi64(x, 0xd8));
  }
}

inline __m256i load_256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline VB load_b(const uint8_t* p) { return {load_256(p), load_256(p + 32)}; }
inline VB and_b(VB a, uint8_t mask) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
inline VB or_b(VB a, VB b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N>
inline VB shr_b(VB a) {
  return {_mm256_srli_epi16(a.lo, N), _mm256_srli_epi16(a.hi, N)};
}
template <int N>
inline VB shl_b(VB a) {
  return {_mm256_slli_epi16(a.lo, N), _mm256_slli_epi16(a.hi, N)};
}
inline VB add_b(VB a, VB b) { return {_mm256_add_epi8(a.lo, b.lo), _mm256_add_epi8(a.hi, b.hi)}; }
// Returns which third of 0..255 each byte is in: 0, 1 or 2.
inline __m256i third_of_256(__m256i bytes) {
  auto at_least = [bytes](int least) {
    return _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8(static_cast<char>(least))), bytes);
  };
  return _mm256_sub_epi8(_mm256_sub_epi8(_mm256_setzero_si256(), at_least(86)), at_least(171));
}
inline VB third_of_256(VB a) { return {third_of_256(a.lo), third_of_256(a.hi)}; }
inline VB as_bytes(VI a) { return {a.lo, a.hi}; }
template <int Byte, int Nibble>
inline __m256i with_signs_32(__m256i bytes, __m256i words, __m256i zero) {
  const __m256i lanes =
      _mm256_set_epi64x(0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000);
  const __m256i spread = _mm256_shuffle_epi8(words, _mm256_add_epi8(lanes, _mm256_set1_epi8(Byte)));
  const __m256i bits = _mm256_set1_epi32(Nibble ? static_cast<int>(0x80402010) : 0x08040201);
  const __m256i minus = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
  return _mm256_add_epi8(zero, _mm256_sign_epi8(bytes, _mm256_or_si256(minus, _mm256_set1_epi8(1))));
}
template <int Byte, int Nibble>
inline VB with_signs(VB bytes, VI words, uint8_t zero) {
  const __m256i z = _mm256_set1_epi8(static_cast<char>(zero));
  return {with_signs_32<Byte, Nibble>(bytes.lo, words.lo, z),
          with_signs_32<Byte, Nibble>(bytes.hi, words.hi, z)};
}
inline VB lookup(const uint8_t* table16, VB index) {
  const __m256i t = _mm256_broadcastsi128_si256(load_128(table16));
  return {_mm256_shuffle_epi8(t, index.lo), _mm256_shuffle_epi8(t, index.hi)};
}
inline void store_b(uint8_t* p, VB a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
// Transposes 8 rows of 32 bytes: 32-bit word v of row r becomes word r of out[v].
inline void transpose_8(const uint8_t* rows, size_t stride, __m256i (&out)[8]) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = load_256(rows + i * stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
    out[i + 4] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
  }
}
// Transposes 16 rows of 64 bytes: 32-bit word v of row r becomes word r of out[v].
inline void transpose_words(const uint8_t* rows, size_t stride, VB (&out)[16]) {
  for (int part = 0; part < 2; ++part) {
    __m256i lo[8], hi[8];
    transpose_8(rows + 32 * part, stride, lo);
    transpose_8(rows + 8 * stride + 32 * part, stride, hi);
    for (int i = 0; i < 8; ++i) out[8 * part + i] = {lo[i], hi[i]};
  }
}

// Adds in the order that arch/plain/simd.h gives.
inline float reduce_add(VF a) { return reduce_8(_mm256_add_ps(a.lo, a.hi)); }
inline float reduce_max(VF a) { return reduce_max_8(_mm256_max_ps(a.lo, a.hi)); }
