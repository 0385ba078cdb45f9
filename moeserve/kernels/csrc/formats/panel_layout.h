// Byte offsets within one block column of a panel (32 rows x kCols columns), computed from a type's row in
// quant_types.h: the float16 numbers, then the scale bytes, then the codes. "x32" means one entry per row.
//
//                 header                                                     vectors (see below)
//   Q2_K          d f16 x32 | dmin f16 x32 | 16 scale bytes, each x32        2 pairs
//   Q3_K          d f16 x32 | 12 scale bytes, each x32                       1 bits | 2 pairs
//   Q4_K          d f16 x32 | dmin f16 x32 | 12 scale bytes, each x32        4 nibbles
//   Q5_K          the same                                                   1 bits | 4 nibbles
//   Q6_K          d f16 x32 | 16 scales i8, each x32                         2 pairs | 4 nibbles
//   IQ4_XS        d f16 x32 | scales_h lo, hi, 4 scales_l bytes, each x32    4 nibbles
//   Q8_0          d f16 x32                                                  8 bytes (code + 128)
//   Q4_0, IQ4_NL  d f16 x32                                                  4 nibbles
//   Q4_1          d f16 x32 | m f16 x32                                      4 nibbles
//   Q5_0, Q5_1    as Q4_0, Q4_1                                              1 bits | 4 nibbles
//   MXFP4         exponent byte x32                                          4 nibbles
//   TQ2_0, Q2_0   d f16 x32                                                  2 pairs
//   Q1_0          d f16 x32                                                  1 bits
//   INT4_*, INT8_*  s f16 or bf16 x32 | z byte x32                           4 nibbles, or 8 bytes (code + 128)
//   FP8_*         4 bytes of a float32 s, each x32                           8 bytes (the sign turned round)
//   TQ1_0         d f16 x32                                                  13 trits of a half's block column
//   NVFP4         4 scale bytes, each x32                                    4 nibbles
//   NVFP4_G*      4 bytes of a float32, then a scale byte for each 16 columns, each x32     4 nibbles
//   with a codebook: d f16 x32, scale bytes, each x32                        indices, words, high bytes
//   F16, BF16, F32: no header; for each column the 32 rows' elements.
//
// The header comes once per block column. Then follow, for each group of 32 columns and each half of 16 rows, the
// 64-byte vectors. Byte 4*r + c of a vector belongs to row r of the half and column c of a quad (4 columns). Nibble
// vector i holds quad i (columns 4i..4i+3) in its low nibbles and quad i+4 (columns 16+4i..) in its high nibbles. Bits
// 2i..2i+1 of pair vector j belong to quad 4j+i; bit q of a bit vector belongs to quad q. With nibbles, pairs and bits
// are the codes' top bits; without nibbles, the pairs are the lowest bits; without either, the bits are the whole code.
//
// Base-3 digits: five fill a byte, and 8 quads are not a multiple of 5, so trit vectors do not belong to one group.
// Each half has the trit vectors of all quads of its block column, quads 5i..5i+4 in vector i, digits as in TritRun;
// then follows the other half.
//
// Codebook types: a half has the indices' low bytes, entry by entry, each x16; then 16 words of 32 bits, one per row;
// then the high bytes, each x16. That takes no more bytes than the file; the kernels look entries up when they
// multiply.
#pragma once

#include "formats.h"

namespace moeserve {

struct PanelLayout {
  int cols;         // columns per block column: 256 or 32
  int block_bytes;  // 32 x the GGUF block
  int header_bytes;
  int bit_vectors;   // 0 or 1
  int pair_vectors;  // 0 or 2
  int code_vectors;  // 0, 4 (nibbles) or 8 (bytes)
  int book_bytes;    // bytes per row of codebook data, x16; 0: no codebook
  int trit_vectors;  // vectors per half of the whole block column: 0 or 13
  constexpr int half_bytes() const {
    return 64 * (bit_vectors + pair_vectors + code_vectors) + 16 * book_bytes;
  }
  constexpr int group_bytes() const { return 2 * half_bytes(); }
  constexpr int pair_shift() const {
    return code_vectors > 0 ? 4 : 0;
  }  // position of a pair's bits within the code
  constexpr int bit_shift() const { return code_vectors > 0 ? 4 : pair_vectors > 0 ? 2 : 0; }
};

// Returns the layout for a quantised type.
constexpr PanelLayout panel_layout(const QuantType& q) {
  if (q.has_book()) {
    return {q.block_cols,
            kPanelRows * q.block_bytes,
            kPanelRows * (2 * q.halves() + q.octets),
            0,
            0,
            0,
            q.book.low_bytes() + q.book.word_bytes() + q.book.high_bytes(),
            0};
  }
  return {q.block_cols,
          kPanelRows * q.block_bytes,
          kPanelRows * (2 * q.halves() + q.octets),
          q.low.bits == 1 || q.high.bits == 1 ? 1 : 0,
          q.low.bits == 2 || q.high.bits == 2 ? 2 : 0,
          q.low.bits < 4 ? 0 : q.low.bits,
          0,
          q.trits.any() ? (q.block_cols / 4 + 4) / 5 : 0};
}
template <Type T>
constexpr PanelLayout kLayout = panel_layout(kQuantType<T>);

template <Type T>
constexpr bool kLayoutAddsUp = kLayout<T>.header_bytes + kLayout<T>.cols / 32 * kLayout<T>.group_bytes() +
                                   2 * 64 * kLayout<T>.trit_vectors ==
                               kLayout<T>.block_bytes;
#define MOESERVE_CHECK(name, number, ...) \
  static_assert(kQuantType<Type::name>.is_float() || kLayoutAddsUp<Type::name>, #name);
MOESERVE_QUANT_TYPES(MOESERVE_CHECK)
#undef MOESERVE_CHECK

}  // namespace moeserve
