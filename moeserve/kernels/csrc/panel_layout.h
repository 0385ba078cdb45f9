// Byte offsets inside one block column of a panel (32 rows x kCols columns). "x32" is one entry per row.
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
//   F16, BF16, F32: no header; for each column the 32 rows' elements.
//
// The header comes once a block column, then, for each group of 32 columns and each half of 16 rows, the vectors of
// 64 bytes. Byte 4*r + c of a vector belongs to row r of the half and column c of a quad (4 columns). A nibble
// vector i holds quad i (columns 4i..4i+3) in its low and quad i+4 (columns 16+4i..) in its high nibbles; a pair
// vector j has bits 2i..2i+1 for quad 4j+i; a bit vector has bit q for quad q. Pairs and bits are the code's top
// bits above nibbles; without nibbles the pairs are its lowest bits.
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
  constexpr int half_bytes() const { return 64 * (bit_vectors + pair_vectors + code_vectors); }
  constexpr int group_bytes() const { return 2 * half_bytes(); }
  constexpr int pair_shift() const { return code_vectors > 0 ? 4 : 0; }  // where a pair stands in its code
  constexpr int bit_shift() const { return code_vectors > 0 ? 4 : 2; }
};

template <Type T>
constexpr PanelLayout kLayout = {};
template <>
inline constexpr PanelLayout kLayout<Type::Q2_K> = {256, 32 * 84, 640, 0, 2, 0};
template <>
inline constexpr PanelLayout kLayout<Type::Q3_K> = {256, 32 * 110, 448, 1, 2, 0};
template <>
inline constexpr PanelLayout kLayout<Type::Q4_K> = {256, 32 * 144, 512, 0, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q5_K> = {256, 32 * 176, 512, 1, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q6_K> = {256, 32 * 210, 576, 0, 2, 4};
template <>
inline constexpr PanelLayout kLayout<Type::IQ4_XS> = {256, 32 * 136, 256, 0, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q8_0> = {32, 32 * 34, 64, 0, 0, 8};
template <>
inline constexpr PanelLayout kLayout<Type::Q4_0> = {32, 32 * 18, 64, 0, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::IQ4_NL> = {32, 32 * 18, 64, 0, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::MXFP4> = {32, 32 * 17, 32, 0, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q4_1> = {32, 32 * 20, 128, 0, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q5_0> = {32, 32 * 22, 64, 1, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q5_1> = {32, 32 * 24, 128, 1, 0, 4};

template <Type T>
constexpr bool kLayoutAddsUp =
    kLayout<T>.header_bytes + kLayout<T>.cols / 32 * kLayout<T>.group_bytes() == kLayout<T>.block_bytes;
static_assert(kLayoutAddsUp<Type::Q4_K> && kLayoutAddsUp<Type::Q5_K> && kLayoutAddsUp<Type::Q6_K>);
static_assert(kLayoutAddsUp<Type::IQ4_XS> && kLayoutAddsUp<Type::Q8_0> && kLayoutAddsUp<Type::Q4_0>);
static_assert(kLayoutAddsUp<Type::Q2_K> && kLayoutAddsUp<Type::Q3_K> && kLayoutAddsUp<Type::MXFP4>);
static_assert(kLayoutAddsUp<Type::Q4_1> && kLayoutAddsUp<Type::Q5_0> && kLayoutAddsUp<Type::Q5_1>);

}  // namespace moeserve
