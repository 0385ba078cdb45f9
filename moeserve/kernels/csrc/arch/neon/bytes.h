// The part of simd.h that works on 64 bytes: codes of weights, their tables and signs, and transposition.

inline VB load_b(const uint8_t* p) {
  return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}
inline void store_b(uint8_t* p, VB a) {
  vst1q_u8(p, a.a);
  vst1q_u8(p + 16, a.b);
  vst1q_u8(p + 32, a.c);
  vst1q_u8(p + 48, a.d);
}
inline VB and_b(VB a, uint8_t mask) {
  return map<VB>([m = vdupq_n_u8(mask)](uint8x16_t x) { return vandq_u8(x, m); }, a);
}
inline VB or_b(VB a, VB b) {
  return map<VB>([](uint8x16_t x, uint8x16_t y) { return vorrq_u8(x, y); }, a, b);
}
template <int N>
inline VB shr_b(VB a) {
  if constexpr (N == 0) {
    return a;
  } else {
    return map<VB>([](uint8x16_t x) { return vshrq_n_u8(x, N); }, a);
  }
}
template <int N>
inline VB shl_b(VB a) {
  return map<VB>([](uint8x16_t x) { return vshlq_n_u8(x, N); }, a);
}
inline VB add_b(VB a, VB b) {
  return map<VB>([](uint8x16_t x, uint8x16_t y) { return vaddq_u8(x, y); }, a, b);
}
// Returns which third of 0..255 each byte is in: 0, 1 or 2.
inline VB third_of_256(VB a) {
  auto third = [](uint8x16_t x) {
    return vsubq_u8(vsubq_u8(vdupq_n_u8(0), vcgeq_u8(x, vdupq_n_u8(86))), vcgeq_u8(x, vdupq_n_u8(171)));
  };
  return map<VB>(third, a);
}
inline VB as_bytes(VI a) {
  return map<VB>([](int32x4_t x) { return vreinterpretq_u8_s32(x); }, a);
}
// Returns for each lane word `index` of the table.
inline VB gather(const uint32_t* table, VI index) {
  alignas(16) uint32_t at[16];
  store_b(reinterpret_cast<uint8_t*>(at), as_bytes(index));
  for (uint32_t& x : at) x = table[x];
  return load_b(reinterpret_cast<const uint8_t*>(at));
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
  const uint32x4_t lanes = {0x00000000, 0x04040404, 0x08080808, 0x0c0c0c0c};
  const uint8x16_t place = vaddq_u8(vreinterpretq_u8_u32(lanes), vdupq_n_u8(Byte));
  const uint8x16_t bits = vreinterpretq_u8_u32(vdupq_n_u32(Nibble ? 0x80402010 : 0x08040201));
  const uint8x16_t z = vdupq_n_u8(zero);
  auto sign = [&](uint8x16_t x, int32x4_t word) {
    const uint8x16_t minus = vtstq_u8(vqtbl1q_u8(vreinterpretq_u8_s32(word), place), bits);
    return vbslq_u8(minus, vsubq_u8(z, x), vaddq_u8(z, x));
  };
  return map<VB>(sign, bytes, words);
}
inline VB lookup(const uint8_t* table16, VB index) {
  return map<VB>([t = vld1q_u8(table16)](uint8x16_t x) { return vqtbl1q_u8(t, x); }, index);
}
// Transposes 4 rows of 16 bytes: 32-bit word v of row r becomes word r of out[v].
inline void transpose_4(const uint8_t* rows, size_t stride, uint8x16_t (&out)[4]) {
  auto row = [&](int r) { return vreinterpretq_u32_u8(vld1q_u8(rows + r * stride)); };
  const uint32x4_t r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
  auto even = [](uint32x4_t x, uint32x4_t y) { return vreinterpretq_u64_u32(vtrn1q_u32(x, y)); };
  auto odd = [](uint32x4_t x, uint32x4_t y) { return vreinterpretq_u64_u32(vtrn2q_u32(x, y)); };
  out[0] = vreinterpretq_u8_u64(vtrn1q_u64(even(r0, r1), even(r2, r3)));
  out[1] = vreinterpretq_u8_u64(vtrn1q_u64(odd(r0, r1), odd(r2, r3)));
  out[2] = vreinterpretq_u8_u64(vtrn2q_u64(even(r0, r1), even(r2, r3)));
  out[3] = vreinterpretq_u8_u64(vtrn2q_u64(odd(r0, r1), odd(r2, r3)));
}
// Transposes 16 rows of 64 bytes: 32-bit word v of row r becomes word r of out[v].
inline void transpose_words(const uint8_t* rows, size_t stride, VB (&out)[16]) {
  for (int part = 0; part < 4; ++part, rows += 16) {
    uint8x16_t a[4], b[4], c[4], d[4];
    transpose_4(rows, stride, a);
    transpose_4(rows + 4 * stride, stride, b);
    transpose_4(rows + 8 * stride, stride, c);
    transpose_4(rows + 12 * stride, stride, d);
    for (int v = 0; v < 4; ++v) out[4 * part + v] = {a[v], b[v], c[v], d[v]};
  }
}
