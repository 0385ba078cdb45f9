// What differs between the integer formats, derived from their rows in quant_types.h: Format<T> has
//   layout    where things stand in a block column (panel_layout.h)
//   codes     unpacks a group of 32 columns of one half to 8 vectors of unsigned codes, one per quad
//   scales    the group's scales and mins
//   kSplit    scales are per 16 columns     kMin   there is a min     kZero   integer zero point of the codes
//   kWide     codes pass 128, so that 16-bit sums of pairs could saturate (AVX2)

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

template <CodeTable Table>
struct ExcessLevels {
  alignas(16) uint8_t at[16];
  constexpr ExcessLevels() : at() {
    for (int i = 0; i < 16; ++i) {
      at[i] = static_cast<uint8_t>(kLevels[static_cast<int>(Table)][i] + kExcess[static_cast<int>(Table)]);
    }
  }
};

template <Type T>
inline void unpack_codes(const uint8_t* p, VB (&w)[8]) {
  constexpr QuantType q = kQuantType<T>;
  if constexpr (q.low.bits == 8) {
    for (int i = 0; i < 8; ++i) w[i] = load_b(p + 64 * i);
  } else if constexpr (q.low.bits == 4) {
    if constexpr (q.high.bits == 0) unpack_nibbles(p, w);
    if constexpr (q.high.bits == 1) unpack_five_bits(p, w);
    if constexpr (q.high.bits == 2) unpack_six_bits(p, w);
  } else {
    static_assert(q.low.bits == 2 && q.high.bits <= 1);
    if constexpr (q.high.bits == 0) unpack_pairs(p, w);
    if constexpr (q.high.bits == 1) unpack_three_bits(p, w);
  }
  if constexpr (q.table != CodeTable::None) {
    static constexpr ExcessLevels<q.table> levels;
    for (VB& v : w) v = lookup(levels.at, v);
  }
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

// The header's byte vectors: byte j of 16 rows.
template <Type T>
inline VI scale_bytes(const uint8_t* block, int j, int half) {
  return load_u8(block + 64 * kQuantType<T>.halves() + 32 * j + 16 * half);
}

// The top two of six bits: pair `place` of `bytes`, to bits 4 and 5.
inline VI top_pair(VI bytes, int place) {
  const VI moved = place == 0   ? shl_i<4>(bytes)
                   : place == 1 ? shl_i<2>(bytes)
                   : place == 2 ? bytes
                                : shr_i<2>(bytes);
  return and_i(moved, 0x30);
}

// Scale j of a half's rows as integers, for the types whose scales are multiples of d.
template <Type T>
inline VI integer_scale(const uint8_t* block, int j, int half) {
  constexpr StoredScales stored = kQuantType<T>.scales;
  auto bytes = [&](int i) { return scale_bytes<T>(block, i, half); };
  if constexpr (stored == StoredScales::I8) {
    return load_i8(block + 64 * kQuantType<T>.halves() + 32 * j + 16 * half);
  } else if constexpr (stored ==
                       StoredScales::SixBitQ3K) {  // a nibble of byte j % 8, a pair of byte 8 + j % 4
    const VI low = j < 8 ? and_i(bytes(j), 15) : shr_i<4>(bytes(j - 8));
    return sub_i(or_i(low, top_pair(bytes(8 + j % 4), j / 4)), set_i(32));
  } else {
    static_assert(stored == StoredScales::SixBitIQ4XS);  // a nibble of byte 2 + j / 2, a pair of byte j / 4
    const VI pair = bytes(2 + j / 2);
    const VI low = j % 2 ? shr_i<4>(pair) : and_i(pair, 15);
    return sub_i(or_i(low, top_pair(bytes(j / 4), j % 4)), set_i(32));
  }
}

// Q4_K's packing: 6-bit scale and min of group g, from 12 bytes of each row.
template <Type T>
inline Scales six_bit_scales_and_mins(const uint8_t* block, int g, int half) {
  auto bytes = [&](int j) { return scale_bytes<T>(block, j, half); };
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

// Q2_K's: a scale and a min in the nibbles of a byte for 16 columns.
template <Type T>
inline Scales nibble_scales_and_mins(const uint8_t* block, int g, int half) {
  const VF d = half_field(block, 0, half), dmin = half_field(block, 1, half);
  const VI lo = scale_bytes<T>(block, 2 * g, half), hi = scale_bytes<T>(block, 2 * g + 1, half);
  auto low = [](VF x, VI b) { return mul(x, to_float(and_i(b, 15))); };
  auto high = [](VF x, VI b) { return mul(x, to_float(shr_i<4>(b))); };
  return {low(d, lo), low(d, hi), high(dmin, lo), high(dmin, hi)};
}

// half_e8m0 of 16 rows, written out so that it becomes vector code: called row by row it took a third to half of
// a decode step (docs/results/2026-11-23-families.md).
inline Scales exponent_scales(const uint8_t* block, int half) {
  alignas(64) uint32_t bits[16];
  alignas(64) float s[16];
  for (int r = 0; r < 16; ++r) {
    const uint32_t e = block[16 * half + r];
    bits[r] = e < 2 ? 0x00200000u << e : (e - 1) << 23;
  }
  std::memcpy(s, bits, sizeof s);
  return {load_f(s), zero_f(), zero_f(), zero_f()};
}

template <Type T>
struct Format {
  static constexpr QuantType type = kQuantType<T>;
  static constexpr PanelLayout layout = kLayout<T>;
  static constexpr bool kMin = type.has_min(), kSplit = type.group == 16;
  static constexpr int kZero = type.low.bits == 8              ? 128
                               : type.table != CodeTable::None ? kExcess[static_cast<int>(type.table)]
                                                               : type.offset;
  static constexpr bool kWide = kZero == 128;
  static_assert(!kSplit || type.scales == StoredScales::NibbleMin || type.octets > 1,
                "one scale for 32 columns");

  static void codes(const uint8_t* p, VB (&w)[8]) { unpack_codes<T>(p, w); }

  static Scales scales(const uint8_t* block, int g, int half) {
    if constexpr (type.scales == StoredScales::F16) {
      return {half_field(block, 0, half), zero_f(), zero_f(), zero_f()};
    } else if constexpr (type.scales == StoredScales::F16Min) {  // w = d * code + m
      return {half_field(block, 0, half), zero_f(), sub(zero_f(), half_field(block, 1, half)), zero_f()};
    } else if constexpr (type.scales == StoredScales::E8M0) {
      return exponent_scales(block, half);
    } else if constexpr (type.scales == StoredScales::SixBitMin) {
      static_assert(!kSplit);
      return six_bit_scales_and_mins<T>(block, g, half);
    } else if constexpr (type.scales == StoredScales::NibbleMin) {
      static_assert(kSplit);
      return nibble_scales_and_mins<T>(block, g, half);
    } else {
      const VF d = half_field(block, 0, half);
      auto scale = [&](int j) { return mul(d, to_float(integer_scale<T>(block, j, half))); };
      if constexpr (kSplit) return {scale(2 * g), scale(2 * g + 1), zero_f(), zero_f()};
      return {scale(g), zero_f(), zero_f(), zero_f()};
    }
  }
};
