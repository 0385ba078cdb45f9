// What differs between the integer formats: for each a Format<T> with
//   layout    where things stand in a block column (panel_layout.h)
//   codes     unpacks a group of 32 columns of one half to 8 vectors of unsigned codes, one per quad
//   scales    the group's scales and mins
//   kSplit    scales are per 16 columns     kMin   there is a min     kZero   integer zero point of the codes
//   kWide     codes pass 128, so that 16-bit sums of pairs could saturate (AVX2)

template <Type T>
struct Format;

inline void unpack_nibbles(const uint8_t* p, VB (&w)[8]) {
  for (int i = 0; i < 4; ++i) {
    const VB v = load_b(p + 64 * i);
    w[i] = and_b(v, 0x0f);
    w[i + 4] = and_b(shr_b<4>(v), 0x0f);
  }
}

template <int Q>
inline VB fifth_bit(VB high) {  // bit Q to bit 4
  if constexpr (Q < 4) {
    return and_b(shl_b<4 - Q>(high), 0x10);
  } else {
    return and_b(shr_b<Q - 4>(high), 0x10);
  }
}

inline void unpack_five_bits(const uint8_t* p, VB (&w)[8]) {
  const VB high = load_b(p);
  unpack_nibbles(p + 64, w);
  w[0] = or_b(w[0], fifth_bit<0>(high));
  w[1] = or_b(w[1], fifth_bit<1>(high));
  w[2] = or_b(w[2], fifth_bit<2>(high));
  w[3] = or_b(w[3], fifth_bit<3>(high));
  w[4] = or_b(w[4], fifth_bit<4>(high));
  w[5] = or_b(w[5], fifth_bit<5>(high));
  w[6] = or_b(w[6], fifth_bit<6>(high));
  w[7] = or_b(w[7], fifth_bit<7>(high));
}

inline void unpack_six_bits(const uint8_t* p, VB (&w)[8]) {
  unpack_nibbles(p + 128, w);
  for (int v = 0; v < 2; ++v) {
    const VB high = load_b(p + 64 * v);
    w[4 * v + 0] = or_b(w[4 * v + 0], and_b(shl_b<4>(high), 0x30));
    w[4 * v + 1] = or_b(w[4 * v + 1], and_b(shl_b<2>(high), 0x30));
    w[4 * v + 2] = or_b(w[4 * v + 2], and_b(high, 0x30));
    w[4 * v + 3] = or_b(w[4 * v + 3], and_b(shr_b<2>(high), 0x30));
  }
}

template <int N>
inline VB third_bit(VB high) {  // bit N to bit 2
  if constexpr (N < 2) {
    return and_b(shl_b<2 - N>(high), 4);
  } else {
    return and_b(shr_b<N - 2>(high), 4);
  }
}

inline void unpack_pairs(const uint8_t* p, VB (&w)[8]) {
  for (int v = 0; v < 2; ++v) {
    const VB pairs = load_b(p + 64 * v);
    w[4 * v + 0] = and_b(pairs, 3);
    w[4 * v + 1] = and_b(shr_b<2>(pairs), 3);
    w[4 * v + 2] = and_b(shr_b<4>(pairs), 3);
    w[4 * v + 3] = and_b(shr_b<6>(pairs), 3);
  }
}

inline void unpack_three_bits(const uint8_t* p, VB (&w)[8]) {
  const VB high = load_b(p);
  unpack_pairs(p + 64, w);
  w[0] = or_b(w[0], third_bit<0>(high));
  w[1] = or_b(w[1], third_bit<1>(high));
  w[2] = or_b(w[2], third_bit<2>(high));
  w[3] = or_b(w[3], third_bit<3>(high));
  w[4] = or_b(w[4], third_bit<4>(high));
  w[5] = or_b(w[5], third_bit<5>(high));
  w[6] = or_b(w[6], third_bit<6>(high));
  w[7] = or_b(w[7], third_bit<7>(high));
}

inline void unpack_levels(const uint8_t* p, VB (&w)[8]) {  // IQ4: the level in excess-128
  alignas(16) static constexpr uint8_t kLevels[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                      129, 141, 153, 166, 181, 197, 217, 241};
  unpack_nibbles(p, w);
  for (VB& v : w) v = lookup(kLevels, v);
}

inline void unpack_e2m1(const uint8_t* p, VB (&w)[8]) {  // MXFP4: twice the level, in excess-12
  alignas(16) static constexpr uint8_t kLevels[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                      12, 11, 10, 9,  8,  6,  4,  0};
  unpack_nibbles(p, w);
  for (VB& v : w) v = lookup(kLevels, v);
}

inline VF half_field(const uint8_t* block, int field, int half) {
  return load_half(reinterpret_cast<const uint16_t*>(block + 64 * field) + 16 * half);
}

// The scales of one group for one half of the panel.
struct Scales {
  VF s;     // the group's, or of its columns 0..15
  VF s_hi;  // of its columns 16..31 (kSplit)
  VF z;     // min (kMin), the group's or of its columns 0..15
  VF z_hi;  // of its columns 16..31 (kSplit)
};

// Q4_K and Q5_K: 6-bit scale and min of group g, from the 12 scale bytes of each row.
template <Type T>
struct KFormat {
  static constexpr PanelLayout layout = kLayout<T>;
  static constexpr bool kMin = true, kSplit = false, kWide = false;
  static constexpr int kZero = 0;
  static Scales scales(const uint8_t* block, int g, int half) {
    auto bytes = [&](int j) { return load_u8(block + 128 + 32 * j + 16 * half); };
    VI s, m;
    if (g < 4) {
      s = and_i(bytes(g), 63);
      m = and_i(bytes(g + 4), 63);
    } else {
      const VI low = bytes(g + 4);
      s = or_i(and_i(low, 15), shl_i<4>(shr_i<6>(bytes(g - 4))));
      m = or_i(shr_i<4>(low), shl_i<4>(shr_i<6>(bytes(g))));
    }
    return {mul(half_field(block, 0, half), to_float(s)), zero_f(),
            mul(half_field(block, 1, half), to_float(m)), zero_f()};
  }
};
template <>
struct Format<Type::Q4_K> : KFormat<Type::Q4_K> {
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_nibbles(p, w); }
};
template <>
struct Format<Type::Q5_K> : KFormat<Type::Q5_K> {
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_five_bits(p, w); }
};
template <>
struct Format<Type::Q2_K> {
  static constexpr PanelLayout layout = kLayout<Type::Q2_K>;
  static constexpr bool kMin = true, kSplit = true, kWide = false;
  static constexpr int kZero = 0;
  static Scales scales(const uint8_t* block, int g, int half) {
    const VF d = half_field(block, 0, half), dmin = half_field(block, 1, half);
    const VI lo = load_u8(block + 128 + 64 * g + 16 * half), hi = load_u8(block + 160 + 64 * g + 16 * half);
    auto low = [](VF x, VI b) { return mul(x, to_float(and_i(b, 15))); };
    auto high = [](VF x, VI b) { return mul(x, to_float(shr_i<4>(b))); };
    return {low(d, lo), low(d, hi), high(dmin, lo), high(dmin, hi)};
  }
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_pairs(p, w); }
};
template <>
struct Format<Type::Q3_K> {
  static constexpr PanelLayout layout = kLayout<Type::Q3_K>;
  static constexpr bool kMin = false, kSplit = true, kWide = false;
  static constexpr int kZero = 4;
  static Scales scales(const uint8_t* block, int g, int half) {
    const VF d = half_field(block, 0, half);
    auto bytes = [&](int j) { return load_u8(block + 64 + 32 * j + 16 * half); };
    auto scale = [&](int j) {  // 6 bits: a nibble of byte j % 8, a pair of byte 8 + j % 4
      const VI low = j < 8 ? and_i(bytes(j), 15) : shr_i<4>(bytes(j - 8));
      const VI pairs = bytes(8 + j % 4);
      const VI high = j < 4 ? shl_i<4>(pairs) : j < 8 ? shl_i<2>(pairs) : j < 12 ? pairs : shr_i<2>(pairs);
      return mul(d, to_float(sub_i(or_i(low, and_i(high, 0x30)), set_i(32))));
    };
    return {scale(2 * g), scale(2 * g + 1), zero_f(), zero_f()};
  }
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_three_bits(p, w); }
};
template <>
struct Format<Type::MXFP4> {
  static constexpr PanelLayout layout = kLayout<Type::MXFP4>;
  static constexpr bool kMin = false, kSplit = false, kWide = false;
  static constexpr int kZero = 12;
  static Scales scales(const uint8_t* block, int, int half) {
    alignas(64) float s[16];
    for (int r = 0; r < 16; ++r) s[r] = half_e8m0(block[16 * half + r]);
    return {load_f(s), zero_f(), zero_f(), zero_f()};
  }
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_e2m1(p, w); }
};
template <>
struct Format<Type::Q6_K> {
  static constexpr PanelLayout layout = kLayout<Type::Q6_K>;
  static constexpr bool kMin = false, kSplit = true, kWide = false;
  static constexpr int kZero = 32;
  static Scales scales(const uint8_t* block, int g, int half) {
    const VF d = half_field(block, 0, half);
    auto scale = [&](int j) { return mul(d, to_float(load_i8(block + 64 + 32 * j + 16 * half))); };
    return {scale(2 * g), scale(2 * g + 1), zero_f(), zero_f()};
  }
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_six_bits(p, w); }
};
template <>
struct Format<Type::IQ4_XS> {
  static constexpr PanelLayout layout = kLayout<Type::IQ4_XS>;
  static constexpr bool kMin = false, kSplit = false, kWide = true;
  static constexpr int kZero = 128;
  static Scales scales(const uint8_t* block, int g, int half) {
    auto bytes = [&](int j) { return load_u8(block + 64 + 32 * j + 16 * half); };
    const VI pair = bytes(2 + g / 2), high = bytes(g / 4);
    const VI low = g % 2 ? shr_i<4>(pair) : and_i(pair, 15);
    const VI top = g % 4 == 0   ? shl_i<4>(high)
                   : g % 4 == 1 ? shl_i<2>(high)
                   : g % 4 == 2 ? high
                                : shr_i<2>(high);
    const VI s = sub_i(or_i(low, and_i(top, 0x30)), set_i(32));
    return {mul(half_field(block, 0, half), to_float(s)), zero_f(), zero_f(), zero_f()};
  }
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_levels(p, w); }
};

// The 32-column formats: one float16 scale, perhaps a min.
template <Type T, int Zero>
struct SymmetricFormat {
  static constexpr PanelLayout layout = kLayout<T>;
  static constexpr bool kMin = false, kSplit = false, kWide = Zero == 128;
  static constexpr int kZero = Zero;
  static Scales scales(const uint8_t* block, int, int half) {
    return {half_field(block, 0, half), zero_f(), zero_f(), zero_f()};
  }
};
template <Type T>
struct MinFormat {  // w = d * code + m
  static constexpr PanelLayout layout = kLayout<T>;
  static constexpr bool kMin = true, kSplit = false, kWide = false;
  static constexpr int kZero = 0;
  static Scales scales(const uint8_t* block, int, int half) {
    return {half_field(block, 0, half), zero_f(), sub(zero_f(), half_field(block, 1, half)), zero_f()};
  }
};
template <>
struct Format<Type::Q8_0> : SymmetricFormat<Type::Q8_0, 128> {
  static void codes(const uint8_t* p, VB (&w)[8]) {
    for (int i = 0; i < 8; ++i) w[i] = load_b(p + 64 * i);
  }
};
template <>
struct Format<Type::Q4_0> : SymmetricFormat<Type::Q4_0, 8> {
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_nibbles(p, w); }
};
template <>
struct Format<Type::IQ4_NL> : SymmetricFormat<Type::IQ4_NL, 128> {
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_levels(p, w); }
};
template <>
struct Format<Type::Q5_0> : SymmetricFormat<Type::Q5_0, 16> {
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_five_bits(p, w); }
};
template <>
struct Format<Type::Q4_1> : MinFormat<Type::Q4_1> {
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_nibbles(p, w); }
};
template <>
struct Format<Type::Q5_1> : MinFormat<Type::Q5_1> {
  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_five_bits(p, w); }
};
