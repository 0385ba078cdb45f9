// The weight formats: GGUF's own blocks (row-major, as in the file) and our panels of 32 rows.
//
// A panel holds 32 consecutive rows of a matrix, block column after block column, and has exactly the bytes of
// the 32 GGUF rows it came from. Within a block column (32 rows x kCols columns) the per-block scales of the 32
// rows come first, then, for each group of 32 columns and each half of 16 rows, the codes as 64-byte vectors
// [16 rows][4 columns]: what vpdpbusd, vpmaddubsw and AMX all eat without a shuffle. See panel_layout.h, and quant_types.h for the list.
//
// Source of the GGUF blocks: the ggml quantisation formats as documented by gguf-py (gguf.quants).
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant_types.h"

namespace moeserve {

constexpr int kPanelRows = 32;

struct TypeInfo {
  const char* name;  // nullptr: not supported
  int block_cols;    // columns in a GGUF block
  int block_bytes;   // bytes of a GGUF block
  bool integer;      // takes int8 activations (else float32)
};

// Never fails: an unsupported id gives {nullptr, …}.
const TypeInfo& type_info(int type);

// Sets the entries of a type's codebook, [entries, columns] signed bytes as gguf-py has them. Before that the type is not
// supported: type_info has no name for it. Throws std::invalid_argument for a type without a codebook, or other entries.
// The tables are this process's, written here alone, and read by every kernel.
void set_codebook(int type, const int8_t* entries, int64_t count);

// By type: the entries, 4 columns to a word: magnitudes or, where a delta is added, 8 times the number plus zero(). nullptr
// before set_codebook.
extern const uint32_t* codebook_words[kMaxType];

// Bytes of one row in the file, and so of 1/32 of a panel. cols % block_cols == 0.
inline size_t row_bytes(int type, int64_t cols) {
  const TypeInfo& info = type_info(type);
  return static_cast<size_t>(cols / info.block_cols) * info.block_bytes;
}

// One row of GGUF blocks to float32: the scalar specification of every format, and the embedding lookup.
void dequantize_row(int type, const uint8_t* row, int64_t cols, float* out);

// IEEE half and bfloat16 to float32, exact.
float half_to_float(uint16_t h);
float bfloat_to_float(uint16_t h);

// 2^(e - 128): half of an E8M0 scale, to go with the doubled levels.
float half_e8m0(uint8_t e);

// A float of a sign, 4 bits of exponent (bias 7) and 3 of mantissa: a float16 of these bits has 8 less in its exponent. The two
// codes that are not numbers, 0x7f and 0xff, are read as the 480 and -480 that their bits would be.
float e4m3_to_float(uint8_t e);

// Half of an unsigned float of 4 and 3 bits (bias 7), to go with the doubled levels.
float half_ue4m3(uint8_t e);

}  // namespace moeserve
