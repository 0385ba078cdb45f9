// Kernels in block floating point: a block of numbers along the inner dimension has one float32 scale, and each number
// an int16 code. AVX-512 VNNI multiplies int16 at twice float32's rate, and the codes keep more of a number than float16
// does wherever the block's numbers are of similar size.
//
// Blocks are scaled so that the sum of products of two blocks fits into int32 whatever their signs: by Cauchy and Schwarz
// it is at most the product of the two blocks' norms.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

constexpr int kFloatBlock = 128;     // numbers of a block, at most
constexpr int kFloatPanel = 32;      // columns of a packed matrix that are multiplied together
constexpr int kRowGroup = 96;        // rows of a unit of work
constexpr int kKeyBlock = 64;        // keys of a step of the online softmax
constexpr float kBlockNorm = 46300;  // norm of a block's codes: its square is below 2^31, rounding included
constexpr float kValueNorm =
    16300;  // the same of a block of values, which is multiplied by 64 weights up to 2^14
constexpr float kWeightCode = 16384;  // the code of a softmax weight of 1

constexpr size_t kAttendBytes = 96 << 10;  // working memory of `attend`

// The keys and values of a head, packed; see ops/block_float.h.
struct PackedHead {
  const int16_t* keys;        // [keys / 32][dim / 2][32][2]
  const float* key_scales;    // [keys / 32][32]
  const int16_t* values;      // [keys / 64][dim / 16][32 pairs of keys][16][2]
  const float* value_scales;  // [keys / 64][dim, rounded up to 16]
  int64_t count;              // keys; those that fill the last block are zero
  int dim;
};

struct BlockFloatKernels {
  // codes[i] = round(x[i] / scale), for n <= kFloatBlock numbers `stride` floats apart; the norm of the codes is at most
  // `norm`. Returns the scale: 0 if all numbers are (nearly) 0, and NaN, with codes of 0, if one is not finite.
  float (*quantize)(const float* x, int64_t stride, int n, float norm, int16_t* codes);
  // out[r][c] += sum of codes * x_scales[r] * scales[c], for `rows` rows of one block of `pairs` pairs. `x` [rows] rows
  // of kFloatBlock codes. `panel` [pairs][32][2]. `out` [rows][32].
  void (*multiply)(const int16_t* x, const float* x_scales, int rows, const int16_t* panel,
                   const float* scales, int pairs, float* out);
  // out[r][0 .. dim - 1] = attention of `rows` queries, rows of `q` of head.dim numbers, over the head's keys.
  // `scratch`: kAttendBytes, 64-byte aligned.
  void (*attend)(const PackedHead& head, const float* q, int rows, float scale, float* out,
                 int64_t out_stride, void* scratch);
};

// nullptr: this CPU has no AVX-512 VNNI, or the program was built for another processor.
const BlockFloatKernels* block_float_kernels();
// The table itself, for a CPU that has it; nullptr: not built for this processor.
const BlockFloatKernels* avx512_block_float();

}  // namespace moeserve
