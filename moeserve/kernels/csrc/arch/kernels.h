// The table of compute kernels of one ISA. Each `kernels.cpp` of arch/plain, arch/avx2, arch/avx512, arch/neon and
// arch/neon_i8mm compiles kernels.inl with its own flags and provides one table; select_kernels() chooses at run time.
//
// Batch invariance: each kernel computes an output element by one fixed sequence of operations, which does not depend
// on how many tokens, rows or threads take part.
#pragma once

#include <algorithm>

#include "formats/formats.h"
#include "sampling/row_passes.h"

namespace moeserve {

// A quantised activation row: `cols` int8 codes, then a GroupMeta for each 32 columns. 1.5 bytes per column.
struct GroupMeta {
  float scale;       // x = scale * code
  float scaled_sum;  // scale * (sum_lo + sum_hi)
  int32_t sum_lo;    // sum of the codes of columns 0..15 of the group
  int32_t sum_hi;    // the same for columns 16..31
};
constexpr size_t quantized_row_bytes(int64_t cols) { return cols + cols / 32 * sizeof(GroupMeta); }

constexpr int kMostKeyDim = 1024;  // key dimensions per head of Kimi Delta Attention, at most

// Tokens per call of a panel kernel, at most. The accumulators (64 x 32 floats, 8 KB) stay in L1, and a weight vector
// is unpacked once for all tokens.
constexpr int kMostTokens = 64;

// For each number of tokens up to kFewTokens a product has a form of its own: reading weights from memory, a narrower
// instruction set can be faster (ops/choose.h). Larger numbers share one, up to kSomeTokens: with more, computing takes
// far longer than reading, and all use the table's own product.
constexpr int kFewTokens = 4, kSomeTokens = 16;

// 32 rows of a weight matrix: a packed panel, or (in-place mode) GGUF rows as they are in the file.
struct Panel {
  const uint8_t* data;
  size_t stride;   // 0: a packed panel; else bytes from one GGUF row to the next
  int valid_rows;  // GGUF rows only: number of the 32 rows that exist
  // Integer types' packed panels: what is read next is prefetched into the second-level cache, from further ahead,
  // instead of the first. A core can await more lines there, but those that are in it already stay there.
  bool to_l2 = false;
};

// out[t][0..31] = panel (32 rows x cols) times activation row t; both forms of a panel give the same bits. `rows` are
// quantised rows for integer formats, float32 rows for F16, BF16 and F32. n <= kMostTokens. `next`: memory that will be
// read after this panel, for prefetching (nullptr: the memory that follows the panel).
using PanelGemm = void (*)(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows,
                           int n, float* out);

// Packs 32 GGUF rows, `stride` bytes apart, into one panel. Rows from `valid_rows` on are written as zeros.
using PackPanel = void (*)(const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel);

// Softmax state of one query head's attention, merged block by block and segment by segment.
struct Softmax {
  float max;
  float sum;
};

// A query vector for int8 keys: x = scale * code, with one scale per 32 columns. The middle two of each 4 codes are
// swapped, to match the order in which key codes are unpacked.
struct QueryRow {
  int16_t* codes;
  float* scales;
};
constexpr size_t query_row_bytes(int64_t dim) { return 2 * dim + dim / 32 * sizeof(float); }

// Keys or values of one KV head in a q8_0 cache, slot by slot.
struct Q8Rows {
  const int8_t* codes;
  const uint16_t* scales;
  int64_t stride;  // of codes, from one slot to the next; scales' is a 32nd of it
};

// Cache lines that will be needed after this block. The kernels prefetch a few of them between products, because only a
// limited number of requests can be outstanding: a burst would stall.
struct Upcoming {
  const char* const* lines;
  int count;
  int at = 0, together = 1;
  // Distributes the remaining lines over the next `calls` calls of `ask`.
  void spread(int calls) { together = (count - at + calls - 1) / std::max(calls, 1); }
  void ask() {
    for (int i = 0; i < together && at < count; ++i) __builtin_prefetch(lines[at++]);
  }
};

// A form of the products with packed panels.
struct Product {
  PanelGemm gemm;
  bool to_l2;  // Panel::to_l2
};

struct Kernels {
  const char* name;
  PanelGemm gemm[kMaxType];  // nullptr: type not supported
  PackPanel pack[kMaxType];
  // Used instead of `gemm` for packed panels and up to kSomeTokens tokens, by the number of tokens less one; the last
  // for all above kFewTokens. Same bits. A gemm of nullptr: use `gemm`.
  Product chosen[kMaxType][kFewTokens + 1];

  void multiply(int type, Panel panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
                float* out) const {
    const Product& product = chosen[type][std::min(n, kFewTokens + 1) - 1];
    const bool is_chosen = panel.stride == 0 && n <= kSomeTokens && product.gemm != nullptr;
    panel.to_l2 = is_chosen && product.to_l2;
    (is_chosen ? product.gemm : gemm[type])(panel, next, cols, rows, n, out);
  }

  // out[t][0..15] = 16 rows of a packed F32 panel, starting at `half`, times activation row t; out [n][32].
  void (*gemm_f32_half)(const uint8_t* half, int64_t cols, const void* const* rows, int n, float* out);
  // Quantises n numbers, n % 32 == 0, to n codes and n / 32 metas.
  void (*quantize)(const float* x, int64_t n, int8_t* codes, GroupMeta* metas);
  // y = x / rms(x) * w. n % 16 == 0. y may be x.
  void (*rms_norm)(const float* x, const float* w, float eps, int n, float* y);
  // The same of x less its mean.
  void (*layer_norm)(const float* x, const float* w, float eps, int n, float* y);
  // NeoX-style rotation of one head: pairs (i, i + n/2). cos and sin have n/2 entries. n % 32 == 0.
  void (*rope)(float* head, const float* cos, const float* sin, int n);
  // out[i] = silu(gate[i]) * up[i], n % 16 == 0.
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  // out[i] = min(silu(gate[i]), most_silu) * u, with u = up[i] clamped to [-most_up, most_up]. n % 16 == 0.
  void (*clamped_silu_mul)(const float* gate, const float* up, int n, float most_silu, float most_up,
                           float* out);
  // out[i] = (u + 1) * g * sigmoid(alpha * g) with g = min(gate[i], limit), u = up[i] clamped to [-limit, limit]. n %
  // 16 == 0.
  void (*swiglu_oai)(const float* gate, const float* up, int n, float limit, float alpha, float* out);
  // out[i] = gelu(gate[i]) * up[i], with the tanh approximation of GELU; n % 16 == 0.
  void (*gelu_mul)(const float* gate, const float* up, int n, float* out);
  void (*relu_mul)(const float* gate, const float* up, int n, float* out);
  // out[i] = beta * tanh(gate[i] / beta) * sigmoid(gate[i]) * u, with u = most * tanh(up[i] / most); most 0: u = up[i].
  // n % 16 == 0.
  void (*situ_mul)(const float* gate, const float* up, int n, float beta, float most, float* out);
  // x[i] = cap * tanh(x[i] / cap), n % 16 == 0.
  void (*softcap)(float cap, int n, float* x);
  // x *= sigmoid(gate), n % 16 == 0.
  void (*sigmoid_mul)(const float* gate, int n, float* x);
  // See delta_net.inl.
  void (*conv_silu)(float* window, float* x, const float* w, int64_t stride, const float* bias, int taps,
                    int n);
  void (*gated_conv)(float* window, const float* b, const float* c, float* x, const float* w, int64_t stride,
                     int taps, int n, float* out);
  void (*l2_normalize)(float* x, float factor, int n);
  void (*delta_step)(float* state, int key_dim, const float* q, const float* k, const float* v, float decay,
                     float beta, float* out);
  void (*delta_step_by_channel)(float* state, int key_dim, const float* q, const float* k, const float* v,
                                const float* decay, float beta, float* out);
  // See mamba2.inl.
  void (*mamba2_step)(float* state, int key_dim, const float* q, const float* k, const float* v, float decay,
                      float dt, float* out);
  void (*channel_decays)(float* a, const float* bias, float rate, int n);
  void (*bounded_decays)(float* a, const float* bias, float rate, float bound, int n);
  // sum of a[i] * b[i], n % 16 == 0.
  float (*dot)(const float* a, const float* b, int n);
  // y += w * x, n % 16 == 0.
  void (*axpy)(float w, const float* x, int n, float* y);
  void (*scale)(float w, int n, float* x);
  // See lora.inl.
  void (*dot_four)(const float* a, int64_t stride, const float* x, int n, float* out);
  void (*add_low_rank)(const float* s, const float* b, int rank, float* y);
  // n % 16 == 0.
  void (*to_half)(const float* x, int n, uint16_t* y);
  void (*from_half)(const uint16_t* x, int n, float* y);
  // Gathers 32 keys (or values) of one KV head as float32: keys transposed, [dim][32]; values [32][dim]. Entries from
  // `count` on are zero.
  void (*gather_keys)(const uint16_t* base, int64_t stride, const int32_t* slots, int count, int dim,
                      float* out);
  void (*gather_values)(const uint16_t* base, int64_t stride, const int32_t* slots, int count, int dim,
                        float* out);
  // Attends one block of 32 keys for `n` query vectors. Query i sees the block's keys first[i] .. end[i] - 1; queries
  // with end[i] <= first[i] are skipped. Online softmax: updates state[i] and acc + i * value_dim. scratch: n * 32
  // floats.
  void (*attend_block)(const float* const* queries, const int* first, const int* end, int n,
                       const float* keys, const float* values, int dim, int value_dim, Softmax* state,
                       float* acc, float* scratch, Upcoming& upcoming);
  // The two halves of attend_block. `scored` [n][32] is overwritten; values [32][value_dim] may be some of a head's
  // columns.
  void (*score_block)(const float* const* queries, int n, const float* keys, int dim, float* out,
                      Upcoming& upcoming);
  void (*weigh_block)(float* scored, const int* first, const int* end, int n, const float* values,
                      int value_dim, Softmax* state, float* acc, Upcoming& upcoming);
  // See indexer.inl.
  void (*index_scores)(const float* scored, const float* weights, int heads, float* out);

  // Attention over a q8_0 cache (attention_q8.inl): int8 codes with a float16 scale for each 32 numbers of a head. n %
  // 32 == 0. Codes are in [-127, 127]; a group with a number that is not finite gets the scale NaN.
  void (*quantize_kv)(const float* x, int n, int8_t* codes, uint16_t* scales);
  void (*quantize_query)(const float* x, int dim, QueryRow row);
  // Gathers 32 keys as pairs of columns, [dim / 2][32 keys][2], and their scales [dim / 32][32].
  void (*gather_keys_q8)(const Q8Rows& rows, const int32_t* slots, int count, int dim, int16_t* codes,
                         float* scales);
  // Gathers 32 values as pairs of keys, [16][dim][2], and their scales [dim / 32][32].
  void (*gather_values_q8)(const Q8Rows& rows, const int32_t* slots, int count, int dim, int16_t* codes,
                           float* scales);
  void (*attend_block_q8)(const QueryRow* queries, const int* first, const int* end, int n,
                          const int16_t* keys, const float* key_scales, const int16_t* values,
                          const float* value_scales, int dim, Softmax* state, float* acc, float* scratch,
                          Upcoming& upcoming);

  RowPasses rows;  // for the sampler
};

// Merges segment b into segment a (online softmax over segments, in order).
void merge_segments(const Kernels& k, Softmax& a, float* acc_a, const Softmax& b, const float* acc_b,
                    int dim);

const Kernels* plain_kernels();
// nullptr if they are not built for this processor. Only a CPU with a table's instructions may call its function.
const Kernels* avx2_kernels();
const Kernels* avx_vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vbmi_kernels();
const Kernels* neon_dotprod_kernels();
const Kernels* neon_i8mm_kernels();

// The table of the next narrower instruction set that multiplies all types differently, if both use vectors and this
// CPU can run it; else nullptr.
const Kernels* narrower_kernels(const Kernels& k);

// The best table this CPU can run, or the one named ("plain", "avx2", "avx_vnni", "avx512_vnni", "avx512_vbmi", "neon_dotprod",
// "neon_i8mm").
// nullptr if the name is unknown or the CPU cannot run it.
const Kernels* select_kernels(const char* name_or_null);

}  // namespace moeserve
