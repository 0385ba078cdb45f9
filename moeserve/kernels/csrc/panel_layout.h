// Byte offsets inside one block column of a panel (32 rows x kCols columns). "x32" is one entry per row.
//
//            header                                                     per group of 32 columns, per half of 16 rows
//   Q4_K     d f16 x32 | dmin f16 x32 | 12 scale bytes, each x32        4 nibble vectors
//   Q5_K     the same                                                   1 vector of fifth bits | 4 nibble vectors
//   Q6_K     d f16 x32 | 16 scales i8, each x32                         2 vectors of top bit pairs | 4 nibble vectors
//   IQ4_XS   d f16 x32 | scales_h lo, hi, 4 scales_l bytes, each x32    4 nibble vectors
//   Q8_0     d f16 x32                                                  8 byte vectors (code + 128)
//   Q4_0, IQ4_NL   d x32        Q4_1   d x32 | m x32                    4 nibble vectors
//   Q5_0     d x32              Q5_1   d x32 | m x32                    1 vector of fifth bits | 4 nibble vectors
//   F16, BF16, F32: no header; for each column the 32 rows' elements.
//
// Nibble vector i holds quad i (columns 4i..4i+3) in its low and quad i+4 (columns 16+4i..) in its high nibbles;
// byte 4*r + c of a vector belongs to row r of the half and column c of the quad. A fifth-bit vector has bit q for
// quad q; a bit-pair vector j has bits 2i..2i+1 for quad 4j+i.
#pragma once

#include "formats.h"

namespace moeserve {

struct PanelLayout {
  int cols;           // columns of a block column: 256 or 32
  int block_bytes;    // 32 x the GGUF block
  int header_bytes;
  int high_vectors;   // fifth bits (1), bit pairs (2) or none, before the nibbles
  int code_vectors;   // 4 (nibbles) or 8 (bytes)
  constexpr int half_bytes() const { return 64 * (high_vectors + code_vectors); }
  constexpr int group_bytes() const { return 2 * half_bytes(); }
};

template <Type T>
constexpr PanelLayout kLayout = {};
template <>
inline constexpr PanelLayout kLayout<Type::Q4_K> = {256, 32 * 144, 512, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q5_K> = {256, 32 * 176, 512, 1, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q6_K> = {256, 32 * 210, 576, 2, 4};
template <>
inline constexpr PanelLayout kLayout<Type::IQ4_XS> = {256, 32 * 136, 256, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q8_0> = {32, 32 * 34, 64, 0, 8};
template <>
inline constexpr PanelLayout kLayout<Type::Q4_0> = {32, 32 * 18, 64, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::IQ4_NL> = {32, 32 * 18, 64, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q4_1> = {32, 32 * 20, 128, 0, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q5_0> = {32, 32 * 22, 64, 1, 4};
template <>
inline constexpr PanelLayout kLayout<Type::Q5_1> = {32, 32 * 24, 128, 1, 4};

template <Type T>
constexpr bool kLayoutAddsUp =
    kLayout<T>.header_bytes + kLayout<T>.cols / 32 * kLayout<T>.group_bytes() == kLayout<T>.block_bytes;
static_assert(kLayoutAddsUp<Type::Q4_K> && kLayoutAddsUp<Type::Q5_K> && kLayoutAddsUp<Type::Q6_K>);
static_assert(kLayoutAddsUp<Type::IQ4_XS> && kLayoutAddsUp<Type::Q8_0> && kLayoutAddsUp<Type::Q4_0>);
static_assert(kLayoutAddsUp<Type::Q4_1> && kLayoutAddsUp<Type::Q5_0> && kLayoutAddsUp<Type::Q5_1>);

}  // namespace moeserve
