// The list of quantization types: a row each, from which names, sizes, panels, packing, dequantisation and the kernels'
// unpacking follow. The same rows as moeserve/quantization/table.py has; tests/kernels/test_quant_types.py holds the two
// together. A new type is a row here; a new way to store scales also a case in `group_scale` (formats.cpp) and in
// `Format<T>::scales` (format_traits.inl), a new code table also its levels below.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moeserve {

// Bytes of a block that hold `bits` bits of every code. They come in runs of `width` bytes: a run holds the lowest
// `bits` bits of each byte for `width` columns, then the next `bits` bits of each for the next `width` columns, ...
struct BitField {
  int at = 0;
  int width = 1;
  int bits = 0;  // 1, 2, 4 or 8; 0: there is no such field
};

// How a block stores its groups' scales s and mins m; a weight is s * (code - offset) - m.
enum class StoredScales : int {
  F16,         // a float16 s
  F16Min,      // float16 s, then float16 -m
  E8M0,        // a byte: s = 2^(byte - 128), to go with a doubled code table
  I8,          // float16 d, a signed byte a group
  NibbleMin,   // float16 d and dmin, a byte a group: scale in the low nibble, min in the high
  SixBitMin,   // float16 d and dmin, 12 bytes: Q4_K's packing of 8 scales and 8 mins
  SixBitQ3K,   // float16 d, 12 bytes: Q3_K's packing of 16 scales, less 32
  SixBitIQ4XS  // float16 d, 6 bytes: IQ4_XS's packing of 8 scales, less 32
};

// What each code of 4 bits stands for, where it is not a number itself.
enum class CodeTable : int { None, IQ4, E2M1 };
inline constexpr int8_t kLevels[][16] = {
    {},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},  // doubled
};
inline constexpr int kExcess[] = {0, 128, 12};  // added to levels, so that kernels multiply unsigned bytes

struct QuantType {
  int block_cols = 1;   // columns of a GGUF block
  int block_bytes = 0;  // bytes of a GGUF block
  BitField low = {};    // the codes' low bits: 2, 4 or 8; none: a float type
  BitField high = {};   // the codes' bits above: 1 or 2
  int offset = 0;       // subtracted from every code
  CodeTable table = CodeTable::None;
  int group = 32;  // columns that share a scale: 16 or 32
  StoredScales scales = StoredScales::F16;
  int halves_at = 0;              // byte of the float16 s or d, which the min's follows at once
  int octets_at = 0, octets = 0;  // bytes of scales, where there are any

  constexpr bool is_float() const { return low.bits == 0; }
  constexpr bool has_min() const {
    return scales == StoredScales::F16Min || scales == StoredScales::NibbleMin ||
           scales == StoredScales::SixBitMin;
  }
  constexpr int halves() const {  // float16 numbers of a block
    return scales == StoredScales::E8M0 ? 0 : has_min() ? 2 : 1;
  }
};

// X(name, ggml's number, {block's columns, bytes, low codes, high codes, offset, table, group's columns, scales}); of the
// fields: first byte, width of a run, bits; of the scales: how they are stored, and where the bytes are if not at 0.
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
  X(MXFP4, 39, {32, 17, {1, 16, 4}, {}, 0, CodeTable::E2M1, 32, StoredScales::E8M0, 0, 0, 1})
// clang-format on

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
