// What differs between the integer formats, derived from their rows in quant_types.h: Format<T> has
//   layout    offsets within a block column (panel_layout.h)
//   quad      unpacks the unsigned codes of a quad of columns of one half
//   scales    the group's scales and mins
//   kSplit    scales are per 16 columns     kMin   there is a min     kZero   integer zero point of the codes
//   kMostCode the largest code

template <int Q>
using Quad = std::integral_constant<int, Q>;

// Calls `call` with each quad in turn, as a constant.
template <int From, int To, class Call>
inline void for_quads(const Call& call) {
  if constexpr (From < To) {
    call(Quad<From>{});
    for_quads<From + 1, To>(call);
  }
}

// Moves bits `From`.. of every byte to bits `To`.., then masks the result.
template <int From, int To>
inline VB move_bits(VB bytes, uint8_t mask) {
  if constexpr (From < To) {
    return and_b(shl_b<To - From>(bytes), mask);
  } else if constexpr (From > To) {
    return and_b(shr_b<From - To>(bytes), mask);
  } else {
    return and_b(bytes, mask);
  }
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

// The largest code that any bytes can give: bits from a file are masked to the type's width and table indices to 16
// levels; set_codebook checks a codebook's entries against its `most`.
constexpr int most_code(const QuantType& q) {
  if (q.has_book()) return q.book.zero() + q.book.most + q.book.has_delta();
  if (q.trits.any()) return 2;
  int most = 0;
  for (int code = 0; code < 1 << (q.low.bits + q.high.bits); ++code) {
    const int table = static_cast<int>(q.table);
    most = std::max(most, q.table == CodeTable::None ? code : kLevels[table][code] + kExcess[table]);
  }
  return most;
}

// Returns quad Q's codes from the vectors that hold its nibbles, pairs and bits (panel_layout.h), which the three calls
// return; only those that the type has are called. Codes of less than 8 bits.
template <Type T, int Q, class Nibbles, class Pairs, class Bits>
inline VB codes_of_quad(const Nibbles& nibbles, const Pairs& pairs, const Bits& bits) {
  constexpr QuantType q = kQuantType<T>;
  VB code;
  if constexpr (q.low.bits == 4) {
    code = move_bits<Q / 4 * 4, 0>(nibbles(), 0x0f);
  } else if constexpr (q.low.bits == 2) {
    code = move_bits<Q % 4 * 2, 0>(pairs(), 0x03);
  } else {
    static_assert(q.low.bits == 1);
    code = move_bits<Q, 0>(bits(), 0x01);
  }
  if constexpr (q.high.bits == 2) {
    code = or_b(code, move_bits<Q % 4 * 2, 4>(pairs(), 0x30));
  } else if constexpr (q.high.bits == 1) {
    constexpr int shift = kLayout<T>.bit_shift();
    code = or_b(code, move_bits<Q, shift>(bits(), 1 << shift));
  }
  if constexpr (q.table != CodeTable::None) {
    static constexpr ExcessLevels<q.table> levels;
    code = lookup(levels.at, code);
  }
  return code;
}

// Returns quad Q's codes. p: where the group's vectors begin (panel_layout.h).
template <Type T, int Q>
inline VB unpack_quad(const uint8_t* p) {
  constexpr QuantType q = kQuantType<T>;
  if constexpr (q.low.bits == 8 || q.trits.any()) {
    return load_b(p + 64 * Q);
  } else {
    const uint8_t* pairs = p + 64 * kLayout<T>.bit_vectors;
    const uint8_t* nibbles = pairs + 64 * kLayout<T>.pair_vectors;
    return codes_of_quad<T, Q>([&] { return load_b(nibbles + 64 * (Q % 4)); },
                               [&] { return load_b(pairs + 64 * (Q / 4)); }, [&] { return load_b(p); });
  }
}

// Unpacks the base-3 codes of a block column, one byte each: [groups][2 halves][8 quads][64].
template <Type T>
inline void unpack_trits(const uint8_t* trits, uint8_t* codes) {
  constexpr int quads = kQuantType<T>.block_cols / 4;
  for (int half = 0; half < 2; ++half) {
    for (int first = 0; first < quads; first += 5, trits += 64) {
      VB digits = load_b(trits);
      for (int quad = first; quad < std::min(first + 5, quads); ++quad) {
        store_b(codes + 64 * (quad / 8 * 16 + half * 8 + quad % 8), third_of_256(digits));
        digits = add_b(digits, add_b(digits, digits));
      }
    }
  }
}

inline VF half_field(const uint8_t* block, int field, int half) {
  return load_half(reinterpret_cast<const uint16_t*>(block + 64 * field) + 16 * half);
}

// The scales of one group for one half of the panel.
struct Scales {
  VF s;     // of the group, or of its columns 0..15
  VF s_hi;  // of its columns 16..31 (kSplit)
  VF z;     // min (kMin) of the group, or of its columns 0..15
  VF z_hi;  // of its columns 16..31 (kSplit)
};

// Returns the header's scale byte j of 16 rows.
template <Type T>
inline VI scale_bytes(const uint8_t* block, int j, int half) {
  return load_u8(block + 64 * kQuantType<T>.halves() + 32 * j + 16 * half);
}

// Returns the top two of six bits: pair `place` of `bytes`, moved to bits 4 and 5.
inline VI top_pair(VI bytes, int place) {
  const VI moved = place == 0   ? shl_i<4>(bytes)
                   : place == 1 ? shl_i<2>(bytes)
                   : place == 2 ? bytes
                                : shr_i<2>(bytes);
  return and_i(moved, 0x30);
}

// Returns scale j of a half's rows as integers, for types whose scales are multiples of d.
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

// Q2_K's packing: one byte per 16 columns, with a scale and a min in its nibbles.
template <Type T>
inline Scales nibble_scales_and_mins(const uint8_t* block, int g, int half) {
  const VF d = half_field(block, 0, half), dmin = half_field(block, 1, half);
  const VI lo = scale_bytes<T>(block, 2 * g, half), hi = scale_bytes<T>(block, 2 * g + 1, half);
  auto low = [](VF x, VI b) { return mul(x, to_float(and_i(b, 15))); };
  auto high = [](VF x, VI b) { return mul(x, to_float(shr_i<4>(b))); };
  return {low(d, lo), low(d, hi), high(dmin, lo), high(dmin, hi)};
}

// half_e8m0 of 16 rows. The bits are (e - 1) << 23 or, for the two smallest, which are denormal, (e + 1) << 21: the
// larger of the two as signed integers. A loop over rows, as compilers translate it, took half of a product's time
// (docs/results/cpu-kernels.md).
inline Scales exponent_scales(const uint8_t* block, int half) {
  const VI e = load_u8(block + 16 * half), one = set_i(1);
  return {as_float(max_i(shl_i<23>(sub_i(e, one)), shl_i<21>(sub_i(e, set_i(-1))))), zero_f(), zero_f(),
          zero_f()};
}

// Scales of a codebook type: codebook_traits.inl.
template <Type T>
inline Scales book_scales(const uint8_t* block, int g, int half);
template <Type T>
class GatheredEntries;
template <Type T, template <Type> class Entries, class Put>
inline void unpack_book(const uint8_t* p, const Put& put);

// half_ue4m3 of 16 rows. The smallest eight are denormal, and the pool's threads may treat denormal numbers as zero, so
// they are computed from integers. Bytes 127 and 255 are NaN; ggml reads 127 as 0.
inline VF small_float(VI e) {
  const VI bits = and_i(e, 127);
  const VF code = to_float(bits),
           normal = mul(as_float(sub_i(shl_i<20>(bits), set_i(-(120 << 23)))), set_f(0.5f));
  const VF value = blend_less(code, set_f(8.0f), mul(code, set_f(0x1p-10f)), normal);
  return blend_less(abs(sub(to_float(e), set_f(127.0f))), set_f(0.5f), zero_f(), value);
}

// float32 of 16 rows, whose four bytes lie apart.
template <Type T>
inline VF whole_scales(const uint8_t* block, int half) {
  const VI low = or_i(scale_bytes<T>(block, 0, half), shl_i<8>(scale_bytes<T>(block, 1, half)));
  const VI high = or_i(scale_bytes<T>(block, 2, half), shl_i<8>(scale_bytes<T>(block, 3, half)));
  return as_float(or_i(low, shl_i<16>(high)));
}

template <Type T>
struct Format {
  static constexpr Type kType = T;
  static constexpr QuantType type = kQuantType<T>;
  static constexpr PanelLayout layout = kLayout<T>;
  static constexpr bool kMin = type.has_min(), kSplit = type.group == 16;
  static constexpr int kZero = type.has_book()                 ? type.book.zero()
                               : type.low.bits == 8            ? 128
                               : type.table != CodeTable::None ? kExcess[static_cast<int>(type.table)]
                                                               : type.offset;
  static constexpr int kMostCode = most_code(type);
  // Bytes of a half's codes of one group: in the panel, or as unpack_trits leaves them.
  static constexpr int kHalfBytes = type.trits.any() ? 8 * 64 : layout.half_bytes();
  static_assert(!kSplit || type.scales == StoredScales::NibbleMin || type.octets > 1,
                "one scale for 32 columns");

  template <int Q>
  static VB quad(const uint8_t* p) {
    return unpack_quad<T, Q>(p);
  }

  // Calls put(Quad<Q>, codes) for each of a group's quads.
  template <class Put>
  static void unpack_group(const uint8_t* p, const Put& put) {
    if constexpr (type.has_book()) {
      unpack_book<T, GatheredEntries>(p, put);
    } else {
      for_quads<0, 8>([&](auto q) { put(q, quad<decltype(q)::value>(p)); });
    }
  }

  // Unpacks the base-3 digits of a block column.
  static void unpack(const uint8_t* trits, uint8_t* codes) { unpack_trits<T>(trits, codes); }

  static Scales scales(const uint8_t* block, int g, int half) {
    if constexpr (type.scales == StoredScales::F16) {
      return {half_field(block, 0, half), zero_f(), zero_f(), zero_f()};
    } else if constexpr (type.scales == StoredScales::F16Min) {  // w = d * code + m
      return {half_field(block, 0, half), zero_f(), sub(zero_f(), half_field(block, 1, half)), zero_f()};
    } else if constexpr (type.has_zero()) {
      const VF s = type.scales == StoredScales::BF16Zero
                       ? load_bfloat(reinterpret_cast<const uint16_t*>(block) + 16 * half)
                       : half_field(block, 0, half);
      const VI zero = sub_i(scale_bytes<T>(block, 0, half), set_i(type.low.bits == 8 ? 128 : 0));
      return {s, zero_f(), mul(s, to_float(zero)), zero_f()};
    } else if constexpr (type.scales == StoredScales::E8M0) {
      return exponent_scales(block, half);
    } else if constexpr (type.scales == StoredScales::UE4M3) {
      static_assert(kSplit);
      return {small_float(scale_bytes<T>(block, 2 * g, half)),
              small_float(scale_bytes<T>(block, 2 * g + 1, half)), zero_f(), zero_f()};
    } else if constexpr (type.scales == StoredScales::F32) {
      return {whole_scales<T>(block, half), zero_f(), zero_f(), zero_f()};
    } else if constexpr (type.scales == StoredScales::UE4M3F32) {
      static_assert(kSplit);
      const VF own = whole_scales<T>(block, half);
      return {mul(small_float(scale_bytes<T>(block, 4 + 2 * g, half)), own),
              mul(small_float(scale_bytes<T>(block, 5 + 2 * g, half)), own), zero_f(), zero_f()};
    } else if constexpr (type.has_book()) {
      return book_scales<T>(block, g, half);
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
