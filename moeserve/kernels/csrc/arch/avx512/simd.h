// The vector types and functions that the kernels use, for AVX-512 (F, BW, DQ, VL, VNNI). arch/simd.h includes it
// inside an anonymous namespace, so each ISA's translation unit has its own copy and the linker cannot merge them.

#include "arch/x86.h"

constexpr int kSumsInRegisters = 16;  // accumulators (VF or VI) of a kernel
constexpr int kRowLanes = 16;         // floats per vector in sampling/row_passes.inl
constexpr bool kGathersPairs = true;  // a codebook's entry of 8 columns is gathered as one word of levels

struct VF {  // 16 float32
  __m512 v;
};
struct VI {  // 16 int32
  __m512i v;
};
struct VB {  // 64 bytes
  __m512i v;
};

inline VF zero_f() { return {_mm512_setzero_ps()}; }
inline VF set_f(float x) { return {_mm512_set1_ps(x)}; }
inline VF load_f(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_f(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
inline VF add(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
inline VF sub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline VF mul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline VF div(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
inline VF max(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }
inline VF min(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }
inline VF abs(VF a) { return {_mm512_abs_ps(a.v)}; }
inline VF fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a*b + c
inline VF fnma(VF a, VF b, VF c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a*b
inline VF load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline VF load_bfloat(const uint16_t* p) {
  const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
inline void store_half(uint16_t* p, VF a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline VF round_even(VF a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for integral n in [-126, 127].
inline VF exp2_int(VF n) {
  const __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(i, 23))};
}
inline VF blend_less(VF a, VF b, VF yes, VF no) {  // a < b ? yes : no
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}

inline VI set_i(int x) { return {_mm512_set1_epi32(x)}; }
inline VI broadcast_quad(const int8_t* p) {  // broadcasts 4 activations to every lane
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
inline VI dot4(VI acc, VB weights, VI quad) { return {_mm512_dpbusd_epi32(acc.v, weights.v, quad.v)}; }
// Loads 32 int16: two per lane.
inline VI load_pairs(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
inline VI broadcast_pair(const int16_t* p) { return broadcast_quad(reinterpret_cast<const int8_t*>(p)); }
inline VI dot2(VI acc, VI a, VI pair) { return {_mm512_dpwssd_epi32(acc.v, a.v, pair.v)}; }
// Widens to int16 the first and third of each lane's four int8 (even), or the second and fourth (odd).
inline void store_even_bytes(int16_t* p, VB a) {
  _mm512_storeu_si512(p, _mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8));
}
inline void store_odd_bytes(int16_t* p, VB a) { _mm512_storeu_si512(p, _mm512_srai_epi16(a.v, 8)); }
// Interleaves two rows of 16 int8, widened to int16.
inline void store_byte_pairs(int16_t* p, const uint8_t* a, const uint8_t* b) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
  const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
  const __m256i pairs = _mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y));
  _mm512_storeu_si512(p, _mm512_cvtepi8_epi16(pairs));
}
inline void store_i16(int16_t* p, VF a, VF b) {  // stores 32 int16, rounded to even and saturated
  auto* v = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(v, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v)));
  _mm256_storeu_si256(v + 1, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(b.v)));
}
inline VF as_float(VI bits) { return {_mm512_castsi512_ps(bits.v)}; }
inline VF to_float(VI a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline VI load_u8(const uint8_t* p) {  // widens 16 bytes to 16 lanes
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline VI load_i8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline VI and_i(VI a, int mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(mask))}; }
inline VI or_i(VI a, VI b) { return {_mm512_or_si512(a.v, b.v)}; }
inline VI sub_i(VI a, VI b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline VI xor_i(VI a, VI b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline VI load_i(const void* p) { return {_mm512_loadu_si512(p)}; }
inline VF half_bits(VI a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }
inline VI max_i(VI a, VI b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N>
inline VI shr_i(VI a) {
  return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
inline VI shl_i(VI a) {
  return {_mm512_slli_epi32(a.v, N)};
}
// Stores 16 lanes in [-128, 127] as 16 bytes.
inline void store_i8(int8_t* p, VF rounded) {
  const __m128i b = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(rounded.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), b);
}

inline VB load_b(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline VB and_b(VB a, uint8_t mask) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(mask)))};
}
inline VB or_b(VB a, VB b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>  // bits that cross a byte boundary are garbage: mask the result
inline VB shr_b(VB a) {
  return {_mm512_srli_epi16(a.v, N)};
}
template <int N>
inline VB shl_b(VB a) {
  return {_mm512_slli_epi16(a.v, N)};
}
inline VB add_b(VB a, VB b) { return {_mm512_add_epi8(a.v, b.v)}; }
// Returns which third of 0..255 each byte is in: 0, 1 or 2.
inline VB third_of_256(VB a) {
  auto at_least = [a](int least) {
    return _mm512_cmpge_epu8_mask(a.v, _mm512_set1_epi8(static_cast<char>(least)));
  };
  const __m512i one = _mm512_set1_epi8(1);
  return {_mm512_mask_add_epi8(_mm512_maskz_mov_epi8(at_least(86), one), at_least(171), one, one)};
}
inline VB as_bytes(VI a) { return {a.v}; }
inline VB gather(const uint32_t* table, VI index) { return {_mm512_i32gather_epi32(index.v, table, 4)}; }
template <int Byte, int Nibble>
inline VB with_signs(VB bytes, VI words, uint8_t zero) {
  const __m512i lanes = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0c0c0c08080808, 0x0404040400000000));
  const __m512i spread = _mm512_shuffle_epi8(words.v, _mm512_add_epi8(lanes, _mm512_set1_epi8(Byte)));
  const __m512i bits = _mm512_set1_epi32(Nibble ? static_cast<int>(0x80402010) : 0x08040201);
  const __m512i z = _mm512_set1_epi8(static_cast<char>(zero));
  const __mmask64 minus = _mm512_test_epi8_mask(spread, bits);
  return {_mm512_mask_sub_epi8(_mm512_add_epi8(z, bytes.v), minus, z, bytes.v)};
}
inline VB lookup(const uint8_t* table16, VB index) {
  const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table16)));
  return {_mm512_shuffle_epi8(t, index.v)};
}
inline void store_b(uint8_t* p, VB a) { _mm512_storeu_si512(p, a.v); }
// Transposes 16 rows of 64 bytes: 32-bit word v of row r becomes word r of out[v].
inline void transpose_words(const uint8_t* rows, size_t stride, VB (&out)[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // 128-bit lanes: rows 0-3, 4-7, 8-11, 12-15 of words i, i+4, i+8, i+12
    const __m512i lo01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88),
                  hi01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    const __m512i lo23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const __m512i hi23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    out[i].v = _mm512_shuffle_i32x4(lo01, lo23, 0x88);
    out[i + 8].v = _mm512_shuffle_i32x4(lo01, lo23, 0xdd);
    out[i + 4].v = _mm512_shuffle_i32x4(hi01, hi23, 0x88);
    out[i + 12].v = _mm512_shuffle_i32x4(hi01, hi23, 0xdd);
  }
}

// Adds in the order that arch/plain/simd.h gives.
inline __m256 upper_half(VF a) { return _mm512_extractf32x8_ps(a.v, 1); }
inline float reduce_add(VF a) { return reduce_8(_mm256_add_ps(_mm512_castps512_ps256(a.v), upper_half(a))); }
inline float reduce_max(VF a) {
  return reduce_max_8(_mm256_max_ps(_mm512_castps512_ps256(a.v), upper_half(a)));
}
