// Byte offsets inside one block column of a panel (32 rows x kCols columns), which follow from a type's row in
// quant_types.h: the halves, then the bytes of scales, then the codes. "x32" is one entry per row.
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
// The header comes once a block column, then, for each group of 32 columns and each half of 16 rows, the vectors of
// 64 bytes. Byte 4*r + c of a vector belongs to row r of the half and column c of a quad (4 columns). A nibble
// vector i holds quad i (columns 4i..4i+3) in its low and quad i+4 (columns 16+4i..) in its high nibbles; a pair
// vector j has bits 2i..2i+1 for quad 4j+i; a bit vector has bit q for quad q. Pairs and bits are the code's top
// bits above nibbles; without nibbles the pairs are its lowest bits, and without pairs the bits are.
//
// Five digits of base 3 fill a byte, and 8 quads are no multiple of 5: trit vectors are not a group's. A half has them for
// all quads of its block column, vector i for quads 5i..5i+4, digits as in TritRun; then comes the other half.
//
// Of a type with a codebook, a half has the indices' low bytes, entry by entry, each x16; then 16 words of 32 bits, a row's
// each; then the high bytes, each x16. No more bytes than the file has: entries are looked up where they are multiplied.
#pragma once

#include "formats.h"

namespace moeserve {

struct PanelLayout {
  int cols;         // columns of a block column: 256 or 32
  int block_bytes;  // 32 x the GGUF block
  int header_bytes;
  int bit_vectors;   // 0 or 1
  int pair_vectors;  // 0 or 2
  int code_vectors;  // 0, 4 (nibbles) or 8 (bytes)
  int book_bytes;    // of each of 16 rows, where there is a codebook
  int trit_vectors;  // of a half's whole block column: 0 or 13
  constexpr int half_bytes() const {
    return 64 * (bit_vectors + pair_vectors + code_vectors) + 16 * book_bytes;
  }
  constexpr int group_bytes() const { return 2 * half_bytes(); }
  constexpr int pair_shift() const { return code_vectors > 0 ? 4 : 0; }  // where a pair stands in its code
  constexpr int bit_shift() const { return code_vectors > 0 ? 4 : pair_vectors > 0 ? 2 : 0; }
};

// Of a quantised type.
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
