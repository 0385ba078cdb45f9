// Group products of types with codebooks by VBMI's byte permutations: registers hold the codebook's levels, so that one
// instruction looks up 64 bytes, where a gather takes as long as ten of them for 16 words.
//
// The codes of 16 columns come in another order than panel_layout.h's: byte 4 r + b of quad i belongs to row r and
// column 4 b + i. A row's activations are reordered in the same way; integer sums do not depend on the order.

#include "arch/shared/token_group.inl"

struct alignas(64) ByteOrder {
  uint8_t at[64];
};
// Makes a permutation: byte 4 r + b comes from byte `source(r, b)`.
template <class Source>
constexpr ByteOrder byte_order(const Source& source) {
  ByteOrder order{};
  for (int i = 0; i < 64; ++i) order.at[i] = static_cast<uint8_t>(source(i / 4, i % 4));
  return order;
}
// Permutes 16 bytes for each of four entries into 4 bytes for each row.
inline constexpr ByteOrder kByRow = byte_order([](int r, int b) { return 16 * b + r; });
// Permutes the bytes of four entries of 8 columns (first columns, and from byte 64 on last columns) into the bytes of
// entries 0 and 1, and of entries 2 and 3.
inline constexpr ByteOrder kFirstEntries =
    byte_order([](int r, int b) { return 64 * (b % 2) + 4 * r + b / 2; });
inline constexpr ByteOrder kLastEntries =
    byte_order([](int r, int b) { return 64 * (b % 2) + 4 * r + 2 + b / 2; });
// Permutes a row's four bytes, one for 8 columns, into the bytes of columns 0 .. 15, and of columns 16 .. 31.
inline constexpr ByteOrder kFirstBytes = byte_order([](int r, int b) { return 4 * r + b / 2; });
inline constexpr ByteOrder kLastBytes = byte_order([](int r, int b) { return 4 * r + 2 + b / 2; });

inline __m512i order_of(const ByteOrder& order) { return _mm512_load_si512(order.at); }
inline __m512i bytes_of(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }

// The bit shifts, within eight bytes, that bring bits Bits * (From + b) of row r's 32-bit word to byte 4 r + b.
template <int Bits, int From>
inline constexpr ByteOrder kShifts =
    byte_order([](int r, int b) { return 32 * (r % 2) + Bits * (From + b); });

// The eight signs of 8 columns by the first seven: the eighth makes their number even.
struct alignas(64) EvenSigns {
  uint8_t at[128];
  constexpr EvenSigns() : at() {
    for (int sevens = 0; sevens < 128; ++sevens) {
      int odd = 0;
      for (int bit = 0; bit < 7; ++bit) odd ^= sevens >> bit & 1;
      at[sevens] = static_cast<uint8_t>(sevens | odd << 7);
    }
  }
};
inline constexpr EvenSigns kEvenSigns;

// Table by the signs of four columns: the signs of column `first` and the next one, in bits 3 and 7.
struct alignas(64) SignPairs {
  uint8_t at[64];
  constexpr explicit SignPairs(int first) : at() {
    for (int i = 0; i < 64; ++i)
      at[i] = static_cast<uint8_t>((i >> first & 1) << 3 | (i >> first >> 1 & 1) << 7);
  }
};
inline constexpr SignPairs kFirstSigns(0), kLastSigns(2);

// Returns for each byte of `low` and the index bits in `above`, from bit 7 on, the byte of a plane.
template <int Entries, int N>
inline __m512i look_up(const uint8_t* plane, __m512i low, const __mmask64 (&above)[N]) {
  if constexpr (Entries == 128) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(plane), low, _mm512_load_si512(plane + 64));
  } else {
    constexpr int bit = __builtin_ctz(Entries) - 8;
    return _mm512_mask_blend_epi8(above[bit], look_up<Entries / 2>(plane, low, above),
                                  look_up<Entries / 2>(plane + Entries / 2, low, above));
  }
}

// The data of a half's group that its quads share.
template <Type T>
struct BookGroup {
  static constexpr Codebook k = kQuantType<T>.book;
  static constexpr int kHighBits = __builtin_ctz(k.entries) - 8;
  BookParts<T> parts;
  __m512i signs;  // of a row's 32 columns, a bit each; not for types with a delta

  explicit BookGroup(const uint8_t* p) : parts(p) {
    if constexpr (!k.has_delta()) {
      const __m512i word = load_i(parts.word).v;
      signs = k.signs == Signs::Packed7 ? even_signs(shifted<7, 0>(word))
              : k.signs == Signs::High7 ? even_signs(_mm512_srli_epi16(word, 1))
                                        : word;
    }
  }
  static __m512i even_signs(__m512i sevens) {  // a byte's highest bit does not matter
    return _mm512_permutex2var_epi8(_mm512_load_si512(kEvenSigns.at), sevens,
                                    _mm512_load_si512(kEvenSigns.at + 64));
  }

  // Returns bytes whose lowest bits are the high bits of entries From .. From + 3.
  template <int From>
  __m512i high_bytes() const {
    if constexpr (k.signs == Signs::High7) return load_i(parts.word).v;
    if constexpr (k.signs == Signs::DeltaEntry) return shifted<4, From>(high_word());
    return shifted<k.high_bits, From>(high_word());
  }
  __m512i high_word() const {
    VI word = load_u8(parts.high);
    if constexpr (k.high_bytes() == 2) word = or_i(word, shl_i<8>(load_u8(parts.high + 16)));
    return word.v;
  }
  template <int Bits, int From>
  static __m512i shifted(__m512i words) {
    return _mm512_multishift_epi64_epi8(order_of(kShifts<Bits, From>), words);
  }

  // Looks up entries From .. From + 3 of each row in both planes.
  template <int From>
  void entries(const BookLevels& book, __m512i& first, __m512i& second) const {
    const __m512i low = _mm512_permutexvar_epi8(order_of(kByRow), _mm512_loadu_si512(parts.low + 16 * From));
    __mmask64 above[1 + kHighBits];
    above[0] = _mm512_movepi8_mask(low);
    if constexpr (kHighBits > 0) {
      const __m512i bits = high_bytes<From>();
      for (int i = 0; i < kHighBits; ++i) above[1 + i] = _mm512_test_epi8_mask(bits, bytes_of(1 << i));
    }
    first = look_up<k.entries>(book.planes, low, above);
    second = look_up<k.entries>(book.planes + k.entries, low, above);
  }

  // Returns 1 or, if an eighth is subtracted, -1 for each column of columns 0 .. 15 (Half 0) or 16 .. 31.
  template <int Half>
  __m512i deltas() const {
    const __m512i word = high_word();
    __mmask64 minus;
    if constexpr (k.signs == Signs::DeltaGroup) {
      minus = _mm512_test_epi8_mask(_mm512_shuffle_epi8(word, high_byte_everywhere()), bytes_of(0x80));
    } else {
      const __m512i nibbles = shifted<4, 0>(word);
      const ByteOrder& order = Half ? kLastBytes : kFirstBytes;
      minus = _mm512_test_epi8_mask(_mm512_permutexvar_epi8(order_of(order), nibbles), bytes_of(8));
    }
    return _mm512_mask_blend_epi8(minus, bytes_of(1), bytes_of(-1));
  }
  static __m512i high_byte_everywhere() {
    return _mm512_broadcast_i32x4(_mm_set_epi64x(0x0d0d0d0d09090909, 0x0505050501010101));
  }

  // Calls put with the codes of 16 columns' quads, for entries of 8 columns. levels: of quads 0 .. 3, from the lowest
  // bits on.
  template <int Half, class Put>
  void wide_codes(const BookLevels& book, __m512i levels, const Put& put) const {
    const __m512i table = _mm512_load_si512(book.codes);
    __m512i spread, delta;
    if constexpr (k.has_delta()) {
      delta = deltas<Half>();
    } else {
      spread = _mm512_permutexvar_epi8(order_of(Half ? kLastBytes : kFirstBytes), signs);
    }
    for_quads<0, 4>([&](auto quad) {
      constexpr int i = decltype(quad)::value;
      __m512i code = _mm512_permutexvar_epi8(i > 0 ? _mm512_srli_epi16(levels, 2 * i) : levels, table);
      if constexpr (k.has_delta()) {
        code = _mm512_add_epi8(code, delta);
      } else {
        const __m512i bit = _mm512_set1_epi16(static_cast<int16_t>(1 << i | 1 << (12 + i)));
        code = _mm512_mask_sub_epi8(code, _mm512_test_epi8_mask(spread, bit), bytes_of(2 * k.zero()), code);
      }
      put(Quad<4 * Half + i>{}, VB{code});
    });
  }

  // The same for entries of 4 columns. first, second: levels of quads 0 and 1, and of 2 and 3. A sign is the fourth bit
  // of a level.
  template <int Half, class Put>
  void narrow_codes(const BookLevels& book, __m512i first, __m512i second, const Put& put) const {
    const __m512i table = _mm512_load_si512(book.codes), nibbles = shifted<4, 4 * Half>(signs);
    auto two = [&](auto quad, __m512i levels, const SignPairs& pairs) {
      constexpr int i = decltype(quad)::value;
      const __m512i minus = _mm512_permutexvar_epi8(nibbles, _mm512_load_si512(pairs.at));
      levels = _mm512_or_si512(levels, minus);
      put(Quad<i>{}, VB{_mm512_permutexvar_epi8(levels, table)});
      put(Quad<i + 1>{}, VB{_mm512_permutexvar_epi8(_mm512_srli_epi16(levels, 4), table)});
    };
    two(Quad<4 * Half>{}, first, kFirstSigns);
    two(Quad<4 * Half + 2>{}, second, kLastSigns);
  }

  template <class Put>
  void unpack(const Put& put) const {
    const BookLevels& book = *codebook_levels[static_cast<int>(T)];
    __m512i first, second;
    entries<0>(book, first, second);
    if constexpr (k.columns == 8) {
      wide_codes<0>(book, _mm512_permutex2var_epi8(first, order_of(kFirstEntries), second), put);
      wide_codes<1>(book, _mm512_permutex2var_epi8(first, order_of(kLastEntries), second), put);
    } else {
      narrow_codes<0>(book, first, second, put);
      entries<4>(book, first, second);
      narrow_codes<1>(book, first, second, put);
    }
  }
};

// A group's 32 activations in the order of the codes.
struct TurnedActivations {
  alignas(32) int8_t at[32];
  explicit TurnedActivations(const int8_t* x) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0f0b07030e0a0602, 0x0d0905010c080400));
    const __m256i group = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    _mm256_store_si256(reinterpret_cast<__m256i*>(at), _mm256_shuffle_epi8(group, order));
  }
};

template <class F>
inline void group_gemm(const uint8_t* codes, const Scales (&s)[2], const void* const* rows, int64_t cols,
                       int64_t group, int n, float* out) {
  VB w[2][8];
  for (int half = 0; half < 2; ++half) {
    BookGroup<F::kType>(codes + half * F::kHalfBytes).unpack([&](auto quad, VB code) {
      w[half][quad] = code;
    });
  }
  for (int t = 0; t < n; ++t) {
    const TurnedActivations x(static_cast<const int8_t*>(rows[t]) + 32 * group);
    token_group<F>(w, s, x.at, meta_of(rows[t], cols, group), out + kPanelRows * t);
  }
}
