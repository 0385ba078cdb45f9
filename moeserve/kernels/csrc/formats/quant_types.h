// The list of quantization types, one row each. Names, sizes, panels, packing, dequantisation and the kernels'
// unpacking all follow from it. moeserve/quantization/table.py has the same rows; tests/kernels/quantization/test_quant_types.py
// compares the two. A new type is a row here. A new way to store scales also needs a case in `group_scale`
// (formats.cpp) and in `Format<T>::scales` (format_traits.inl); a new code table also needs its levels below.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moeserve {

// Bytes of a block that hold `bits` bits of every code, in runs of `width` bytes. A run holds, for `width` columns, the
// code's bits in the lowest `bits` bits of each byte, then for the next `width` columns in the next `bits` bits, and so
// on.
struct BitField {
  int at = 0;
  int width = 1;
  int bits = 0;  // 1, 2, 4 or 8; 0: no such field
};

// Bytes of a block that hold a base-3 digit of every code, most significant digit first. A run's bytes hold the first
// digits of `width` columns, then the second digits of the next `width`, and so on. A byte is ceil(n * 256 / 243),
// where n is the number formed by its five digits (with four digits, the fifth is 0). So its first digit is the third
// of 0..255 that it lies in, and the next digit is the same of 3 * byte.
struct TritRun {
  int at = 0;
  int width = 0;   // 0: no such run
  int digits = 0;  // per byte: 4 or 5
};
struct Trits {
  TritRun runs[3] = {};
  constexpr bool any() const { return runs[0].width > 0; }
};

// How a block stores its groups' scales s and mins m; a weight is s * (code - offset) - m.
enum class StoredScales : int {
  F16,          // a float16 s
  F16Min,       // float16 s, then float16 -m
  E8M0,         // a byte: s = 2^(byte - 128), because the code table is doubled
  I8,           // float16 d, a signed byte per group
  NibbleMin,    // float16 d and dmin, a byte per group: scale in the low nibble, min in the high
  SixBitMin,    // float16 d and dmin, 12 bytes: Q4_K's packing of 8 scales and 8 mins
  SixBitQ3K,    // float16 d, 12 bytes: Q3_K's packing of 16 scales, biased by 32
  SixBitIQ4XS,  // float16 d, 6 bytes: IQ4_XS's packing of 8 scales, biased by 32
  UE4M3,        // a byte: an unsigned float of 4 and 3 bits, halved because the code table is doubled
  F16Zero,      // a float16 s and a byte z, both 8-bit codes and z biased by 128: m = s * z
  BF16Zero,     // the same with a bfloat16 s
  F32,          // a float32 s, in the four bytes of scales
  UE4M3F32,     // a float32 that is the same for all of a row, then a byte as UE4M3's; s is their product
  Book          // see Codebook::scales
};

// The values of 4-bit or 1-bit codes that are indices into a table.
enum class CodeTable : int { None, IQ4, E2M1, Sign };
inline constexpr int8_t kLevels[][16] = {
    {},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},  // doubled
    {-1, 1},
};
inline constexpr int kExcess[] = {0, 128, 12,
                                  1};  // added to the levels, so that kernels multiply unsigned bytes

// Bytes of a block that belong to the entries of a codebook: for a group of 32 columns, the first at `at` + group *
// `group`, the next ones `step` bytes apart.
struct ByteRun {
  int at = 0;
  int group = 0;
  int step = 1;
};

// Where the signs of a codebook's entries are, eight columns at a time.
enum class Signs : int {
  Packed7,  // seven bits per 8 columns, from the group word's lowest bit on; the eighth makes the parity even
  High7,  // byte e of the word, whose lowest bit is the index's ninth; the eighth sign makes the parity even
  Bytes,  // byte e of the word
  DeltaGroup,  // no signs: an eighth is added to all columns, or subtracted if bit 15 of the high bytes is set
  DeltaEntry   // no signs: the same per entry, by bit 3 of its nibble of the high bytes
};

// Where the scales n of a codebook type are; a weight is d * (2 n + 1) * unit * (the code's value).
enum class BookScales : int {
  WordTop,    // the word's highest 4 bits; per 32 columns
  Nibbles32,  // nibbles of the scale bytes; per 32 columns
  Nibbles16,  // nibbles of the scale bytes; per 16 columns
  HighTop3,   // bits 12 to 14 of the high bytes; per 32 columns
  Threes  // 3 bits per 16 columns, four to a 16-bit word of the scale bytes; the words' highest 4 bits form d
};

// A type whose codes are indices into a grid of vectors; gguf-py has the entries by the type's name.
struct Codebook {
  int entries = 0;  // a power of two; 0: no codebook
  int columns = 8;  // per entry: 4 or 8
  int most = 0;     // largest magnitude in an entry; in 8 times an entry, if a delta is added
  ByteRun low;      // the indices' low bytes
  ByteRun word;     // four bytes per group; group 0: none
  ByteRun high;     // bytes with the indices' high bits; group 0: none
  int high_bits = 0;
  Signs signs = Signs::Bytes;
  BookScales scales = BookScales::Nibbles16;
  int eighths = 1;  // unit = eighths / 8

  constexpr int low_bytes() const { return 32 / columns; }  // per row and group
  constexpr int word_bytes() const { return word.group ? 4 : 0; }
  constexpr int high_bytes() const { return high.group; }
  constexpr bool has_delta() const { return signs == Signs::DeltaGroup || signs == Signs::DeltaEntry; }
  constexpr int zero() const {
    return has_delta() ? most + 1 : most;
  }  // added to the values, so that codes are unsigned
};

struct QuantType {
  int block_cols = 1;   // columns per GGUF block
  int block_bytes = 0;  // bytes per GGUF block
  BitField low = {};   // the codes' low bits: 1, 2, 4 or 8; none for float types, codebooks and base-3 digits
  BitField high = {};  // the codes' upper bits: 1 or 2
  int offset = 0;      // subtracted from every code
  CodeTable table = CodeTable::None;
  int group = 32;  // columns that share a scale: 16 or 32
  StoredScales scales = StoredScales::F16;
  int halves_at = 0;              // byte of the float16 s or d; the min's follows it
  int octets_at = 0, octets = 0;  // scale bytes, if any: first byte, and number
  Codebook book = {};
  Trits trits = {};
  bool e4m3 = false;  // codes of 8 bits are floats: a sign, 4 bits of exponent (bias 7), 3 of mantissa

  constexpr bool has_book() const { return book.entries > 0; }
  constexpr bool is_float() const { return low.bits == 0 && !has_book() && !trits.any(); }
  constexpr bool takes_floats() const { return is_float() || e4m3; }  // activations; else int8
  constexpr int levels() const { return table == CodeTable::None ? 0 : 1 << low.bits; }
  constexpr bool has_min() const {
    return scales == StoredScales::F16Min || scales == StoredScales::NibbleMin ||
           scales == StoredScales::SixBitMin || has_zero();
  }
  constexpr bool has_zero() const {
    return scales == StoredScales::F16Zero || scales == StoredScales::BF16Zero;
  }
  constexpr bool has_octets_only() const {
    return scales == StoredScales::E8M0 || scales == StoredScales::UE4M3 || scales == StoredScales::F32 ||
           scales == StoredScales::UE4M3F32;
  }
  constexpr int halves() const {  // number of float16 numbers per block
    if (has_octets_only()) return 0;
    if (has_book() && book.scales == BookScales::Threes) return 0;
    return has_min() && !has_zero() ? 2 : 1;
  }
};

// X(name, ggml's number, {columns per block, bytes, low codes, high codes, offset, table, columns per group, scales}).
// Fields: first byte, width of a run, bits. Scales: how they are stored, and where the bytes are if not at 0.
// clang-format off
#define MOESERVE_QUANT_TYPES(X)                                                                                   \
  X(F32, 0, {1, 4})                                                                                               \
  X(F16, 1, {1, 2})                                                                                               \
  X(BF16, 30, {1, 2})                                                                                             \
  X(Q4_0, 2, {32, 18, {2, 16, 4}, {}, 8, CodeTable::None, 32, StoredScales::F16})                                 \
  X(Q4_1, 3, {32, 20, {4, 16, 4}, {}, 0, CodeTable::None, 32, StoredScales::F16Min})                              \
  X(Q5_0, 6, {32, 22, {6, 16, 4}, {2, 1, 1}, 16, CodeTable::None, 32, StoredScales::F16})                         \
  X(Q5_1, 7, {32, 24, {8, 16, 4}, {4, 1, 1}, 0, CodeTable::None, 32, StoredScales::F16Min})                       \
  X(Q8_0, 8, {32, 34, {2, 32, 8}, {}, 0, CodeTable::None, 32, StoredScales::F16})                                 \
  X(Q2_K, 10, {256, 84, {16, 32, 2}, {}, 0, CodeTable::None, 16, StoredScales::NibbleMin, 80, 0, 16})             \
  X(Q3_K, 11, {256, 110, {32, 32, 2}, {0, 32, 1}, 4, CodeTable::None, 16, StoredScales::SixBitQ3K, 108, 96, 12})  \
  X(Q4_K, 12, {256, 144, {16, 32, 4}, {}, 0, CodeTable::None, 32, StoredScales::SixBitMin, 0, 4, 12})             \
  X(Q5_K, 13, {256, 176, {48, 32, 4}, {16, 32, 1}, 0, CodeTable::None, 32, StoredScales::SixBitMin, 0, 4, 12})    \
  X(Q6_K, 14, {256, 210, {0, 64, 4}, {128, 32, 2}, 32, CodeTable::None, 16, StoredScales::I8, 208, 192, 16})      \
  X(IQ4_NL, 20, {32, 18, {2, 16, 4}, {}, 0, CodeTable::IQ4, 32, StoredScales::F16})                               \
  X(IQ4_XS, 23, {256, 136, {8, 16, 4}, {}, 0, CodeTable::IQ4, 32, StoredScales::SixBitIQ4XS, 0, 2, 6})            \
  X(MXFP4, 39, {32, 17, {1, 16, 4}, {}, 0, CodeTable::E2M1, 32, StoredScales::E8M0, 0, 0, 1})                     \
  X(TQ2_0, 35, {256, 66, {0, 32, 2}, {}, 1, CodeTable::None, 32, StoredScales::F16, 64})                          \
  X(TQ1_0, 34, trit_type(256, 54, 1, 52, {{{0, 32, 5}, {32, 16, 5}, {48, 4, 4}}}))                                \
  X(Q2_0, 42, {64, 18, {2, 1, 2}, {}, 1, CodeTable::None, 32, StoredScales::F16})                                 \
  X(Q1_0, 41, {128, 18, {2, 1, 1}, {}, 0, CodeTable::Sign, 32, StoredScales::F16})                                \
  X(NVFP4, 40, {64, 36, {4, 8, 4}, {}, 0, CodeTable::E2M1, 16, StoredScales::UE4M3, 0, 0, 4})                     \
  X(INT4_G32, 240, zero_type(32, 4, StoredScales::F16Zero))                                                       \
  X(INT4_G64, 241, zero_type(64, 4, StoredScales::F16Zero))                                                       \
  X(INT4_G128, 242, zero_type(128, 4, StoredScales::F16Zero))                                                     \
  X(INT8_G32, 243, zero_type(32, 8, StoredScales::F16Zero))                                                       \
  X(INT8_G128, 244, zero_type(128, 8, StoredScales::F16Zero))                                                     \
  X(INT4_G32_BF16, 245, zero_type(32, 4, StoredScales::BF16Zero))                                                 \
  X(INT4_G64_BF16, 246, zero_type(64, 4, StoredScales::BF16Zero))                                                 \
  X(INT4_G128_BF16, 247, zero_type(128, 4, StoredScales::BF16Zero))                                               \
  X(INT8_G32_BF16, 248, zero_type(32, 8, StoredScales::BF16Zero))                                                 \
  X(INT8_G128_BF16, 249, zero_type(128, 8, StoredScales::BF16Zero))                                               \
  X(INT2_G32, 180, zero_type(32, 2, StoredScales::F16Zero))                                                       \
  X(INT2_G64, 181, zero_type(64, 2, StoredScales::F16Zero))                                                       \
  X(INT2_G128, 182, zero_type(128, 2, StoredScales::F16Zero))                                                     \
  X(INT3_G32, 183, zero_type(32, 3, StoredScales::F16Zero))                                                       \
  X(INT3_G64, 184, zero_type(64, 3, StoredScales::F16Zero))                                                       \
  X(INT3_G128, 185, zero_type(128, 3, StoredScales::F16Zero))                                                     \
  X(FP8_G32, 250, fp8_type(32))                                                                                   \
  X(FP8_G64, 251, fp8_type(64))                                                                                   \
  X(FP8_G128, 252, fp8_type(128))                                                                                 \
  X(NVFP4_G64, 253, scaled_nvfp4_type(64))                                                                        \
  X(NVFP4_G128, 254, scaled_nvfp4_type(128))                                                                      \
  X(NVFP4_G256, 255, scaled_nvfp4_type(256))                                                                      \
  X(IQ2_XXS, 16, book_type(66, 32, 0, 0, 0, {256, 8, 43, {2, 8}, {6, 8}, {}, 0, Signs::Packed7, BookScales::WordTop})) \
  X(IQ2_XS, 17, book_type(74, 16, 0, 66, 8, {512, 8, 43, {2, 8, 2}, {3, 8, 2}, {}, 1, Signs::High7, BookScales::Nibbles16})) \
  X(IQ2_S, 22, book_type(82, 16, 0, 74, 8, {1024, 8, 43, {2, 4}, {34, 4}, {66, 1}, 2, Signs::Bytes, BookScales::Nibbles16})) \
  X(IQ3_XXS, 18, book_type(98, 32, 0, 0, 0, {256, 4, 62, {2, 8}, {66, 4}, {}, 0, Signs::Packed7, BookScales::WordTop, 2})) \
  X(IQ3_S, 21, book_type(110, 32, 0, 106, 4, {512, 4, 15, {2, 8}, {74, 4}, {66, 1}, 1, Signs::Bytes, BookScales::Nibbles32, 8})) \
  X(IQ1_S, 19, book_type(50, 32, 0, 0, 0, {2048, 8, 8, {2, 4}, {}, {34, 2}, 3, Signs::DeltaGroup, BookScales::HighTop3})) \
  X(IQ1_M, 29, book_type(56, 16, 0, 48, 8, {2048, 8, 8, {0, 4}, {}, {32, 2}, 3, Signs::DeltaEntry, BookScales::Threes}))
// clang-format on

constexpr QuantType book_type(int bytes, int group, int halves_at, int octets_at, int octets,
                              const Codebook& book) {
  QuantType q;
  q.block_cols = 256;
  q.block_bytes = bytes;
  q.group = group;
  q.scales = StoredScales::Book;
  q.halves_at = halves_at;
  q.octets_at = octets_at;
  q.octets = octets;
  q.book = book;
  return q;
}

// Types of Hugging Face folders: s, z, then the codes of `cols` columns in order, 8-bit codes biased by 128; codes of 3
// bits as the low two bits of all columns, then the high ones.
constexpr QuantType zero_type(int cols, int bits, StoredScales scales) {
  QuantType q;
  q.block_cols = cols;
  q.block_bytes = 3 + cols * bits / 8;
  q.low = {3, bits == 8 ? cols : 1, bits == 3 ? 2 : bits};
  if (bits == 3) q.high = {3 + cols / 4, 1, 1};
  q.scales = scales;
  q.octets_at = 2;
  q.octets = 1;
  return q;
}

// The same with a float32 s and codes of e4m3.
constexpr QuantType fp8_type(int cols) {
  QuantType q;
  q.block_cols = cols;
  q.block_bytes = 4 + cols;
  q.low = {4, cols, 8};
  q.scales = StoredScales::F32;
  q.octets = 4;
  q.e4m3 = true;
  return q;
}

// NVFP4 with the matrix's own scale before the groups'; codes in their order.
constexpr QuantType scaled_nvfp4_type(int cols) {
  QuantType q;
  q.block_cols = cols;
  q.octets = 4 + cols / 16;
  q.block_bytes = q.octets + cols / 2;
  q.low = {q.octets, 1, 4};
  q.table = CodeTable::E2M1;
  q.group = 16;
  q.scales = StoredScales::UE4M3F32;
  return q;
}

constexpr QuantType trit_type(int cols, int bytes, int offset, int halves_at, const Trits& trits) {
  QuantType q;
  q.block_cols = cols;
  q.block_bytes = bytes;
  q.offset = offset;
  q.halves_at = halves_at;
  q.trits = trits;
  return q;
}

enum class Type : int {
#define MOESERVE_ENTRY(name, number, ...) name = number,
  MOESERVE_QUANT_TYPES(MOESERVE_ENTRY)
#undef MOESERVE_ENTRY
};

template <Type T>
inline constexpr QuantType kQuantType = {};
#define MOESERVE_ROW(name, number, ...) \
  template <>                           \
  inline constexpr QuantType kQuantType<Type::name> = __VA_ARGS__;
MOESERVE_QUANT_TYPES(MOESERVE_ROW)
#undef MOESERVE_ROW

#define MOESERVE_NUMBER(name, number, ...) number,
constexpr int kMaxType = 1 + std::max({MOESERVE_QUANT_TYPES(MOESERVE_NUMBER) 0});
#undef MOESERVE_NUMBER

}  // namespace moeserve
