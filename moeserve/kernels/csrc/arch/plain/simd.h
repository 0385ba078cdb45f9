// The vector types and functions that the kernels use, in plain C++ with the compiler's generic vectors: for any CPU,
// and as the readable specification of the other instruction sets.

constexpr int kSumsInRegisters = 8;  // accumulators (VF or VI) of a kernel
constexpr int kRowLanes = 4;         // floats per vector in sampling/row_passes.inl
constexpr bool kGathersPairs = false;

typedef float F16x __attribute__((vector_size(64)));
typedef int32_t I16x __attribute__((vector_size(64)));
typedef uint8_t B64x __attribute__((vector_size(64)));
struct VF {
  F16x v;
};
struct VI {
  I16x v;
};
struct VB {
  B64x v;
};

template <class F>
inline VF each(F f) {
  VF r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline VF zero_f() { return {F16x{}}; }
inline VF set_f(float x) { return {F16x{} + x}; }
inline VF load_f(const float* p) {
  VF r;
  __builtin_memcpy(&r, p, 64);
  return r;
}
inline void store_f(float* p, VF a) { __builtin_memcpy(p, &a, 64); }
inline VF add(VF a, VF b) { return {a.v + b.v}; }
inline VF sub(VF a, VF b) { return {a.v - b.v}; }
inline VF mul(VF a, VF b) { return {a.v * b.v}; }
inline VF div(VF a, VF b) { return {a.v / b.v}; }
inline VF max(VF a, VF b) { return {a.v > b.v ? a.v : b.v}; }
inline VF min(VF a, VF b) { return {a.v < b.v ? a.v : b.v}; }
inline VF abs(VF a) { return {a.v <= 0 ? 0.0f - a.v : a.v}; }  // abs(-0) is +0
inline VF fma(VF a, VF b, VF c) { return {a.v * b.v + c.v}; }
inline VF fnma(VF a, VF b, VF c) { return {c.v - a.v * b.v}; }
inline VF load_half(const uint16_t* p) {
  return each([p](int i) { return half_to_float(p[i]); });
}
inline VF load_bfloat(const uint16_t* p) {
  return each([p](int i) { return bfloat_to_float(p[i]); });
}
inline uint16_t to_half(float f) {  // round to nearest even
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude >= 0x38800000) {                      // normal
    const uint32_t rebased = magnitude - 0x38000000;
    return sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
  }
  if (magnitude < 0x33000000) return sign;                    // below half of the smallest subnormal
  const int shift = 126 - static_cast<int>(magnitude >> 23);  // 14..24
  const uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
  const uint32_t half = 1u << (shift - 1);
  uint32_t r = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1);
  if (rest > half || (rest == half && (r & 1))) ++r;
  return sign | r;
}
inline void store_half(uint16_t* p, VF a) {
  for (int i = 0; i < 16; ++i) p[i] = to_half(a.v[i]);
}
inline VF round_even(VF a) {
  return each([a](int i) { return __builtin_nearbyintf(a.v[i]); });
}
inline VF exp2_int(VF n) {
  return each([n](int i) { return __builtin_ldexpf(1.0f, static_cast<int>(n.v[i])); });
}
inline VF blend_less(VF a, VF b, VF yes, VF no) { return {a.v < b.v ? yes.v : no.v}; }

inline VI set_i(int x) { return {I16x{} + x}; }
inline VI broadcast_quad(const int8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return set_i(x);
}
inline VI dot4(VI acc, VB w, VI x) {
  int8_t q[4];
  const int32_t first = x.v[0];
  __builtin_memcpy(q, &first, 4);
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 4; ++c) acc.v[r] += static_cast<int>(w.v[4 * r + c]) * q[c];
  }
  return acc;
}
// Loads 32 int16: two per lane.
inline VI load_pairs(const int16_t* p) {
  VI r;
  __builtin_memcpy(&r, p, 64);
  return r;
}
inline VI broadcast_pair(const int16_t* p) { return broadcast_quad(reinterpret_cast<const int8_t*>(p)); }
inline VI dot2(VI acc, VI a, VI pair) {
  int16_t x[32], y[32];
  __builtin_memcpy(x, &a, 64);
  __builtin_memcpy(y, &pair, 64);
  for (int i = 0; i < 32; ++i) acc.v[i / 2] += x[i] * y[i];
  return acc;
}
// Widens to int16 the first and third of each lane's four int8 (even), or the second and fourth (odd).
inline void store_even_bytes(int16_t* p, VB a) {
  for (int i = 0; i < 32; ++i) p[i] = static_cast<int8_t>(a.v[2 * i]);
}
inline void store_odd_bytes(int16_t* p, VB a) {
  for (int i = 0; i < 32; ++i) p[i] = static_cast<int8_t>(a.v[2 * i + 1]);
}
// Interleaves two rows of 16 int8, widened to int16.
inline void store_byte_pairs(int16_t* p, const uint8_t* a, const uint8_t* b) {
  for (int i = 0; i < 32; ++i) p[i] = static_cast<int8_t>((i % 2 ? b : a)[i / 2]);
}
inline void store_i16(int16_t* p, VF a,
                      VF b) {  // stores 32 int16, rounded to even and saturated; NaN becomes 0
  for (int i = 0; i < 32; ++i) {
    const float x = __builtin_nearbyintf(i < 16 ? a.v[i] : b.v[i - 16]);
    p[i] = x == x ? static_cast<int16_t>(std::clamp(x, -32768.0f, 32767.0f)) : int16_t{0};
  }
}
inline VF as_float(VI bits) {
  VF r;
  __builtin_memcpy(&r, &bits, 64);
  return r;
}
inline VF to_float(VI a) { return {__builtin_convertvector(a.v, F16x)}; }
inline VI load_u8(const uint8_t* p) {
  VI r;
  for (int i = 0; i < 16; ++i) r.v[i] = p[i];
  return r;
}
inline VI load_i8(const uint8_t* p) {
  VI r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<int8_t>(p[i]);
  return r;
}
inline VI and_i(VI a, int mask) { return {a.v & mask}; }
inline VI or_i(VI a, VI b) { return {a.v | b.v}; }
inline VI sub_i(VI a, VI b) { return {a.v - b.v}; }
inline VI xor_i(VI a, VI b) { return {a.v ^ b.v}; }
inline VI load_i(const void* p) {
  VI r;
  __builtin_memcpy(&r, p, 64);
  return r;
}
// Converts float16 bits in the lanes to float32.
inline VF half_bits(VI a) {
  return each([a](int i) { return half_to_float(static_cast<uint16_t>(a.v[i])); });
}
inline VI max_i(VI a, VI b) { return {a.v > b.v ? a.v : b.v}; }
template <int N>
inline VI shr_i(VI a) {
  return {a.v >> N};
}
template <int N>
inline VI shl_i(VI a) {
  return {a.v << N};
}
inline void store_i8(int8_t* p, VF rounded) {
  for (int i = 0; i < 16; ++i) {
    const float x = rounded.v[i];
    p[i] = static_cast<int8_t>(x > 127    ? 127
                               : x > -128 ? x
                                          : -128);  // NaN becomes -128; a cast would be undefined
  }
}

inline VB load_b(const uint8_t* p) {
  VB r;
  __builtin_memcpy(&r, p, 64);
  return r;
}
inline VB and_b(VB a, uint8_t mask) { return {a.v & mask}; }
inline VB or_b(VB a, VB b) { return {a.v | b.v}; }
template <int N>
inline VB shr_b(VB a) {
  return {a.v >> N};
}
template <int N>
inline VB shl_b(VB a) {
  return {a.v << N};
}
inline VB add_b(VB a, VB b) { return {a.v + b.v}; }
// Returns which third of 0..255 each byte is in: 0, 1 or 2.
inline VB third_of_256(VB a) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] * 3 >> 8);
  return a;
}
inline VB as_bytes(VI a) {
  VB r;
  __builtin_memcpy(&r, &a, 64);
  return r;
}
// Returns for each lane word `index` of the table.
inline VB gather(const uint32_t* table, VI index) {
  for (int i = 0; i < 16; ++i) index.v[i] = static_cast<int32_t>(table[index.v[i]]);
  return as_bytes(index);
}
// Returns for each lane pair `index` of the table's words: its first and its second word.
inline void gather_pairs(const uint32_t* table, VI index, VB& first, VB& second) {
  first = gather(table, shl_i<1>(index));
  second = gather(table + 1, shl_i<1>(index));
}
// Returns `zero` plus or minus each byte of a lane's four: minus where bits 0..3 (Nibble 0) or 4..7 of byte `Byte` of
// the lane's sign word are set.
template <int Byte, int Nibble>
inline VB with_signs(VB bytes, VI words, uint8_t zero) {
  for (int i = 0; i < 64; ++i) {
    const bool minus = words.v[i / 4] >> (8 * Byte + 4 * Nibble + i % 4) & 1;
    bytes.v[i] = static_cast<uint8_t>(minus ? zero - bytes.v[i] : zero + bytes.v[i]);
  }
  return bytes;
}
inline VB lookup(const uint8_t* table16, VB index) {
  VB r;
  for (int i = 0; i < 64; ++i) r.v[i] = table16[index.v[i] & 15];
  return r;
}
inline void store_b(uint8_t* p, VB a) { __builtin_memcpy(p, &a, 64); }
// Transposes 16 rows of 64 bytes: 32-bit word v of row r becomes word r of out[v].
inline void transpose_words(const uint8_t* rows, size_t stride, VB (&out)[16]) {
  for (int v = 0; v < 16; ++v) {
    for (int r = 0; r < 16; ++r)
      __builtin_memcpy(reinterpret_cast<uint8_t*>(&out[v]) + 4 * r, rows + r * stride + 4 * v, 4);
  }
}

// Adds across lanes in one fixed order, the same on every ISA: halves, quarters, pairs, neighbours.
inline float reduce_add(VF a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  }
  return a.v[0];
}
inline float reduce_max(VF a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  }
  return a.v[0];
}
