// The weight formats: GGUF blocks (row-major, as in the file) and panels of 32 rows.
//
// A panel holds 32 consecutive rows of a matrix, block column after block column, in exactly as many bytes as the 32
// GGUF rows. Within a block column (32 rows x kCols columns) the scales of the 32 rows come first. Then follow, for
// each group of 32 columns and each half of 16 rows, the codes as 64-byte vectors [16 rows][4 columns], the order that
// vpdpbusd, vpmaddubsw and AMX read without a shuffle. panel_layout.h gives the offsets, quant_types.h the list of
// types.
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
  bool integer;      // multiplies int8 activations (otherwise float32)
};

// Never fails: an unsupported id gives {nullptr, …}.
const TypeInfo& type_info(int type);

// Sets the entries of a type's codebook: [entries, columns] signed bytes, as gguf-py has them. Until then the type is
// unsupported and type_info has no name for it. Throws std::invalid_argument for a type without a codebook or for
// entries that do not fit (BookLevels below has the limits). The tables belong to the process; only this function writes them, every kernel reads them.
void set_codebook(int type, const int8_t* entries, int64_t count);

// By type: the codebook's entries, 4 columns per word. Columns are magnitudes or, for types that add a delta, 8 times
// the value plus zero(). nullptr before set_codebook.
extern const uint32_t* codebook_words[kMaxType];

// The same entries for kernels with byte permutations: planes of bytes, and what the level numbers in them stand for. A
// level is one of the distinct magnitudes, at most 8 for entries of 4 columns and 4 for entries of 8.
struct BookLevels {
  // Plane p, byte e: the levels of entry e's columns p * columns / 2 and following, the first in the lowest bits, each
  // in 4 bits or, with 8 columns, in 2. The second plane follows the first, `entries` bytes on.
  alignas(64) uint8_t planes[2 * 2048];
  // By level, repeated: zero() plus the magnitude, or a word's byte. With 4 columns, those of 8 levels are followed by
  // those of the same levels with a minus.
  alignas(64) uint8_t codes[64];
  // With 8 columns, for gathers of a whole entry: byte c of word e has entry e's levels of column c (bits 0 and 1) and of
  // column 4 + c (bits 4 and 5). numbers: by level, a word's byte.
  uint32_t pairs[2048];
  uint8_t numbers[16];
};
// By type. nullptr before set_codebook.
extern const BookLevels* codebook_levels[kMaxType];

// Bytes of one row in the file, which is also 1/32 of a panel. cols % block_cols == 0.
inline size_t row_bytes(int type, int64_t cols) {
  const TypeInfo& info = type_info(type);
  return static_cast<size_t>(cols / info.block_cols) * info.block_bytes;
}

// Converts one row of GGUF blocks to float32: the scalar specification of every format, and the embedding look-up.
void dequantize_row(int type, const uint8_t* row, int64_t cols, float* out);

// IEEE half or bfloat16 to float32, exact.
float half_to_float(uint16_t h);
float bfloat_to_float(uint16_t h);

// 2^(e - 128): half of an E8M0 scale, because the code table holds doubled levels.
float half_e8m0(uint8_t e);

// A float of a sign, 4 bits of exponent (bias 7) and 3 of mantissa: a float16 of these bits has 8 less in its exponent. The two
// codes that are not numbers, 0x7f and 0xff, are read as the 480 and -480 that their bits would be.
float e4m3_to_float(uint8_t e);

// Half of an unsigned float of 4 exponent and 3 mantissa bits (bias 7), because the code table holds doubled levels.
float half_ue4m3(uint8_t e);

}  // namespace moeserve
