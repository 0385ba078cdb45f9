// Panel times activation rows.
//
// Integer formats: a weight is  s * code - z  with an unsigned 8-bit code, a scale s per 32 columns (Q2_K, Q3_K and
// Q6_K: per 16) and either a min z per group or an integer zero point. Per group of 32 columns and token, exactly:
//   dot = sum(code * x) - zero * sum(x)          int32, exact: in whatever order and unit it is summed
//   acc = fma(dot, s * xs, acc)                  float32, xs the activation's scale
//   acc = fnma(z, xs * sum(x), acc)              formats with a min
// so the float32 accumulator of an output sees one fixed order of operations, whatever the number of tokens.
// A weight vector is unpacked once for all tokens of the tile; the tile of accumulators stays in L1.

// How far ahead of the unpacking the panel is fetched. Without it a Zen 5 core read 22 GB/s, with it 35 to 40.
constexpr int kPrefetchBytes = 4096;

// Where reading stands kPrefetchBytes after `p`: further on in the panel or, past its end, in the next one.
inline const uint8_t* reading_ahead(const uint8_t* p, const uint8_t* end, const uint8_t* next) {
  const uint8_t* ahead = p + kPrefetchBytes;
  return ahead >= end && next != nullptr ? next + (ahead - end) : ahead;
}

inline void prefetch(const uint8_t* p, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(p + line);
}

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

template <class F>
inline VI dot(VI acc, VB w, VI x) {
  if constexpr (F::kWide) {
    return dot4_wide(acc, w, x);
  } else {
    return dot4(acc, w, x);
  }
}

// The exact integer sums of one token, one group and one half, zero point not yet subtracted.
template <class F>
struct Dots {
  VI lo;  // of the group's columns 0..15 where F::kSplit, else of all 32
  VI hi;  // of its columns 16..31 (kSplit)
};

// Scales the sums and adds them to the 16 accumulators at `out`.
template <class F>
inline void accumulate(const Dots<F>& d, const Scales& s, const GroupMeta& meta, float* out) {
  if constexpr (F::kSplit) {
    const VI lo = sub_i(d.lo, set_i(F::kZero * meta.sum_lo)), hi = sub_i(d.hi, set_i(F::kZero * meta.sum_hi));
    VF sum = fma(to_float(hi), s.s_hi, mul(to_float(lo), s.s));
    if constexpr (F::kMin) {
      sum = fnma(s.z, set_f(static_cast<float>(meta.sum_lo)), sum);
      sum = fnma(s.z_hi, set_f(static_cast<float>(meta.sum_hi)), sum);
    }
    store_f(out, fma(sum, set_f(meta.scale), load_f(out)));
  } else {
    const VI dot = F::kZero == 0 ? d.lo : sub_i(d.lo, set_i(F::kZero * (meta.sum_lo + meta.sum_hi)));
    VF acc = fma(to_float(dot), mul(s.s, set_f(meta.scale)), load_f(out));
    if constexpr (F::kMin) acc = fnma(s.z, set_f(meta.scaled_sum), acc);
    store_f(out, acc);
  }
}

inline GroupMeta load_meta(const void* row, int64_t cols, int64_t group) {
  GroupMeta meta;
  std::memcpy(&meta, static_cast<const int8_t*>(row) + cols + group * sizeof meta, sizeof meta);
  return meta;
}

// One token, one group: adds to the 32 accumulators at `out`.
template <class F>
inline void token_group(const VB (&w)[2][8], const Scales (&s)[2], const void* row, int64_t cols,
                        int64_t group, float* out) {
  const int8_t* x = static_cast<const int8_t*>(row) + 32 * group;
  Dots<F> d[2] = {{set_i(0), set_i(0)}, {set_i(0), set_i(0)}};
  for (int i = 0; i < 4; ++i) {
    const VI a = broadcast_quad(x + 4 * i), b = broadcast_quad(x + 16 + 4 * i);
    for (Dots<F>* half = d; half < d + 2; ++half) {
      const VB(&weights)[8] = w[half - d];
      half->lo = dot<F>(half->lo, weights[i], a);
      VI& second = F::kSplit ? half->hi : half->lo;
      second = dot<F>(second, weights[i + 4], b);
    }
  }
  const GroupMeta meta = load_meta(row, cols, group);
  accumulate<F>(d[0], s[0], meta, out);
  accumulate<F>(d[1], s[1], meta, out + 16);
}

// One block column for all tokens. `first_group` counts groups of 32 columns from the start of the row; `ahead` is
// fetched meanwhile, a group's worth at a time so that the line fill buffers are never full.
template <class F>
inline void block_gemm(const uint8_t* block, const uint8_t* ahead, int64_t first_group, int64_t cols,
                       const void* const* rows, int n, float* out) {
  constexpr PanelLayout layout = F::layout;
  constexpr int groups = layout.cols / 32;
  for (int g = 0; g < groups; ++g) {
    prefetch(ahead + g * (layout.block_bytes / groups), layout.block_bytes / groups);
    const uint8_t* codes = block + layout.header_bytes + g * layout.group_bytes();
    VB w[2][8];
    F::codes(codes, w[0]);
    F::codes(codes + layout.half_bytes(), w[1]);
    const Scales s[2] = {F::scales(block, g, 0), F::scales(block, g, 1)};
    const int64_t group = first_group + g;
    for (int t = 0; t < n; ++t) token_group<F>(w, s, rows[t], cols, group, out + kPanelRows * t);
  }
}

template <Type T>
void gemm_integer(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
                  float* out) {
  constexpr PanelLayout layout = kLayout<T>;
  constexpr int groups = layout.cols / 32;
  std::memset(out, 0, sizeof(float) * kPanelRows * n);
  if (panel.stride == 0) {
    const uint8_t* end = panel.data + cols / layout.cols * layout.block_bytes;
    for (int64_t b = 0; b < cols / layout.cols; ++b) {
      const uint8_t* block = panel.data + b * layout.block_bytes;
      block_gemm<Format<T>>(block, reading_ahead(block, end, next), b * groups, cols, rows, n, out);
    }
  } else {
    constexpr int source_block = layout.block_bytes / kPanelRows;
    alignas(64) uint8_t block[layout.block_bytes];
    for (int64_t b = 0; b < cols / layout.cols; ++b) {
      const uint8_t* source = panel.data + b * source_block;
      for (int r = 0; r < panel.valid_rows; ++r)
        prefetch(source + r * panel.stride + source_block, source_block);
      pack_block<T>(source, panel.stride, panel.valid_rows, block);
      block_gemm<Format<T>>(block, block, b * groups, cols, rows, n, out);
    }
  }
}

// Float formats: acc = fma(w, x, acc) over the columns in order, accumulators in registers.
struct HalfElement {
  using Stored = uint16_t;
  static constexpr int kBytes = 2;
  static VF load(const uint8_t* p) { return load_half(reinterpret_cast<const uint16_t*>(p)); }
};
struct BfloatElement {
  using Stored = uint16_t;
  static constexpr int kBytes = 2;
  static VF load(const uint8_t* p) { return load_bfloat(reinterpret_cast<const uint16_t*>(p)); }
};
struct FloatElement {
  using Stored = uint32_t;
  static constexpr int kBytes = 4;
  static VF load(const uint8_t* p) { return load_f(reinterpret_cast<const float*>(p)); }
};

// `cols` columns of packed elements, added to the accumulators at `out`.
template <class E, int N>
inline void float_tile(const uint8_t* panel, const uint8_t* ahead, int64_t first_col, int64_t cols,
                       const void* const* rows, float* out) {
  VF acc[N][2];
  for (int t = 0; t < N; ++t) {
    acc[t][0] = load_f(out + kPanelRows * t);
    acc[t][1] = load_f(out + kPanelRows * t + 16);
  }
  for (int64_t c = 0; c < cols; ++c, panel += kPanelRows * E::kBytes) {
    prefetch(ahead + c * kPanelRows * E::kBytes, kPanelRows * E::kBytes);
    const VF w[2] = {E::load(panel), E::load(panel + 16 * E::kBytes)};
    for (int t = 0; t < N; ++t) {
      const VF x = set_f(static_cast<const float*>(rows[t])[first_col + c]);
      acc[t][0] = fma(w[0], x, acc[t][0]);
      acc[t][1] = fma(w[1], x, acc[t][1]);
    }
  }
  for (int t = 0; t < N; ++t) {
    store_f(out + kPanelRows * t, acc[t][0]);
    store_f(out + kPanelRows * t + 16, acc[t][1]);
  }
}

// 64 columns at a time: 4 or 8 KB, which stay in L1 for all tokens.
template <class E>
void gemm_float(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
                float* out) {
  constexpr int64_t kChunk = 64;
  alignas(64) uint8_t packed[kChunk * kPanelRows * E::kBytes];
  std::memset(out, 0, sizeof(float) * kPanelRows * n);
  const uint8_t* end = panel.data + cols * kPanelRows * E::kBytes;
  for (int64_t c = 0; c < cols; c += kChunk) {
    const int64_t count = std::min(kChunk, cols - c);
    const uint8_t* chunk = panel.data + c * kPanelRows * E::kBytes;
    const uint8_t* ahead = reading_ahead(chunk, end, next);
    if (panel.stride != 0) {
      pack_float<typename E::Stored>(panel.data + c * E::kBytes, panel.stride, panel.valid_rows, count,
                                     packed);
      chunk = ahead = packed;
    }
    int t = 0;
    for (; t + 8 <= n; t += 8) float_tile<E, 8>(chunk, ahead, c, count, rows + t, out + kPanelRows * t);
    for (; t + 4 <= n; t += 4) float_tile<E, 4>(chunk, ahead, c, count, rows + t, out + kPanelRows * t);
    for (; t < n; ++t) float_tile<E, 1>(chunk, ahead, c, count, rows + t, out + kPanelRows * t);
  }
}
