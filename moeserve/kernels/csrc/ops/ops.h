// The operations of a transformer step on the CPU pool. Each is a small copyable struct of pointers that
// Pool::submit queues; buffers belong to the caller and must outlive Pool::wait().
//
// Shapes are row-major; n is the number of tokens of the step. "quantised rows" are described in kernels.h.
#pragma once

#include <algorithm>
#include <vector>

#include "arch/kernels.h"
#include "lora.h"
#include "pool/pool.h"
#include "ops/expert_wave.h"

namespace moeserve {

// A weight matrix, or one per expert: either packed panels in its own memory (anonymous, huge pages requested), or GGUF
// rows in the mapped file, which the caller keeps. Panels are ordered by NUMA node, so that each node's part is
// contiguous; the kernel puts a page on the node of the thread that first writes it.
class Matrix {
 public:
  // Throws std::bad_alloc. With `file_rows` nothing is allocated or packed.
  Matrix(int type, int64_t rows, int64_t cols, int64_t experts, int nodes, const uint8_t* file_rows);
  ~Matrix();
  Matrix(const Matrix&) = delete;

  const int type;
  const int64_t rows, cols, experts;
  const int64_t panels;  // per expert: ceil(rows / 32)
  const size_t panel_bytes;
  const size_t bytes;
  const int nodes;
  // [experts, cols], kept by the caller: stored column j is column order[j] of the input. nullptr: same order.
  const int32_t* order = nullptr;
  bool integer() const { return type_info(type).integer; }
  bool packed() const { return file_rows_ == nullptr; }

  Panel panel(int64_t expert, int64_t p) const {
    if (packed()) return {packed_panel(expert, p), 0, kPanelRows};
    const size_t stride = row_bytes(type, cols);
    return {file_rows_ + (expert * rows + p * kPanelRows) * stride, stride, valid_rows(p)};
  }
  int valid_rows(int64_t p) const {
    return static_cast<int>(std::min<int64_t>(kPanelRows, rows - p * kPanelRows));
  }
  uint8_t* packed_panel(int64_t expert, int64_t p) const {
    const int node = node_of_panel(panels, p, nodes);
    const int64_t first = first_panel(panels, node, nodes),
                  count = first_panel(panels, node + 1, nodes) - first;
    return data_ + (experts * first + expert * count + p - first) * panel_bytes;
  }
  const uint8_t* begin() const { return packed() ? data_ : file_rows_; }
  // Moves packed panels that have been written into huge pages, where the kernel had none then: for weights that are
  // measured with. An older kernel (before Linux 6.1), or one without free huge pages, leaves them where they are.
  void use_huge_pages() const;

 private:
  uint8_t* data_ = nullptr;
  const uint8_t* file_rows_;
};

// Activations of up to `rows` tokens in both forms; nullptr for a form that no consumer needs.
struct Activations {
  float* f32;   // [rows, cols]
  uint8_t* q8;  // [rows, quantized_row_bytes(cols)]
  int64_t rows, cols;
  const void* row(bool integer, int64_t t) const {
    return integer ? static_cast<const void*>(q8 + t * quantized_row_bytes(cols)) : f32 + t * cols;
  }
  int8_t* codes(int64_t t) const { return reinterpret_cast<int8_t*>(q8 + t * quantized_row_bytes(cols)); }
  GroupMeta* metas(int64_t t) const { return reinterpret_cast<GroupMeta*>(codes(t) + cols); }
};

// Packs GGUF rows [.., cols] of `type` into panels of `out`; rows of all experts are consecutive.
struct PackOp {
  const Kernels* k;
  const uint8_t* source;
  const Matrix* out;  // packed
  void operator()(Team& team) const;
};

// x[t] = table[ids[t]] * scale, `copies` times one after another; the table is GGUF rows. Stream::embed has checked the ids.
struct EmbedOp {
  const uint8_t* table;
  int type;
  const int32_t* ids;
  int n, copies;
  int64_t cols;  // of the table
  float scale;
  float* x;  // [n, copies * cols]
  void operator()(Team& team) const;
};

// Up to this many numbers, one thread computes a norm or similar operation as fast as all threads can synchronise.
constexpr int64_t kSmallNumbers = 4096;

// y[i] = rms_norm(x[rows[i]]) * w; rows nullptr: row i. With `centered`, layer_norm.
struct NormOp {
  const Kernels* k;
  const float* x;
  const float* w;
  float eps;
  bool centered;
  const int32_t* rows;
  int n;
  Activations y;
  bool is_small() const { return n == 1 || n * y.cols <= kSmallNumbers; }
  void operator()(Team& team) const;
};

// x[t] = (x[t] + rms_norm(source[t]) * w) * factor.
struct AddNormOp {
  const Kernels* k;
  const float* source;  // [n, cols]
  const float* w;
  float eps;
  float factor;
  int n, cols;
  float* x;  // [n, cols]
  bool is_small() const { return n == 1 || int64_t{n} * cols <= kSmallNumbers; }
  void operator()(Team& team) const;
};

// out[t] = gelu(gate[t]) * up[t], GELU in its tanh form; without a gate, up[t]. Also quantised if out has the int8
// form.
struct GeluGateOp {
  const Kernels* k;
  const float* gate;  // [n, out.cols], or nullptr
  const float* up;    // rows `stride` numbers apart
  int64_t stride;
  int n;
  Activations out;
  bool is_small() const { return n == 1 || n * out.cols <= kSmallNumbers; }
  void operator()(Team& team) const;
};

// x[t] = cap * tanh(x[t] / cap).
struct SoftcapOp {
  const Kernels* k;
  float cap;
  int n;
  int64_t cols;
  float* x;  // [n, cols]
  void operator()(Team& team) const;
};

// Adds `bias` to each of the `tokens` rows of a panel's 32 outputs, of which `valid` exist.
inline void add_bias(const float* bias, int valid, int tokens, float* tile) {
  for (int t = 0; t < tokens; ++t, tile += kPanelRows) {
    for (int r = 0; r < valid; ++r) tile[r] += bias[r];
  }
}

// out_j = x . W_j^T + b_j for up to four matrices with the same input; `add`: adds to out (residual).
struct LinearOp {
  static constexpr int kMost = 6;
  const Kernels* k;
  Activations x;
  int n;
  int count;
  const Matrix* w[kMost];
  const float* bias[kMost];  // [w.rows], or nullptr
  float* out[kMost];         // [n, w.rows]
  bool add;
  void operator()(Team& team) const;
  BytesAhead reads_first(const Team& team) const;

 private:
  // Returns whether a work unit is 16 rows of a panel instead of 32, because there are fewer panels than threads: for a
  // router.
  bool is_halved(const Team& team) const;
  void compute(int j, int64_t panel, int half, Claim& claim) const;
};

// Only some panels of a product: out[t, 32 i + r] = x[t] . row r of panel panels[i], or -infinity after the last row.
// Any thread computes any panel, wherever it is in memory.
struct PanelsOp {
  const Kernels* k;
  Activations x;
  int n;
  const Matrix* w;
  const int32_t* panels;  // [count]
  int count;
  float* out;  // [n, 32 * count]
  void operator()(Team& team) const;
};

// Keys or values of one layer, [slots, kv_heads, head width]: float16, or int8 codes (q8_0) with a float16 scale per 32
// numbers.
struct KvPool {
  void* data;
  uint16_t* scales;  // nullptr: float16
  bool is_q8() const { return scales != nullptr; }
  uint16_t* halves() const { return static_cast<uint16_t*>(data); }
  int8_t* codes() const { return static_cast<int8_t*>(data); }
  // Stores `count` numbers from number `at` of the pool on.
  void store(const Kernels& k, const float* x, int count, int64_t at) const;
};

// Normalises q and k, per head or over all heads; rotates the first `rotary` dimensions of each head; scales q and v;
// stores k and v in the KV pool.
struct RopeStoreOp {
  const Kernels* k;
  float* q;      // [n, heads, dim], in place
  float* key;    // [n, kv_heads, dim], in place; nullptr: only q is rotated, nothing is stored
  float* value;  // [n, kv_heads, value_dim]; changed in place by v_norm or v_scale
  // Input of v_norm: value, or key before its own norm.
  const float* value_source;
  const float* v_norm;  // [value_dim], for each head; nullptr: none
  const float* q_norm;  // [dim], [heads * dim] with full_norm, or nullptr: none
  const float* k_norm;  // likewise
  bool full_q_norm, full_k_norm;
  float eps;
  const float* cos;  // [angles, rotary / 2]
  const float* sin;
  const int32_t* positions;  // [n], the row of cos and sin for each row; nullptr: row i uses row i
  const int32_t* slots;      // [n]
  KvPool keys, values;       // of this layer
  int n, heads, kv_heads, dim, value_dim, rotary;
  bool norm_after;       // q and k are normalised after the rotation
  float scale, v_scale;  // factors of q and of v
  void operator()(Team& team) const;

 private:
  // Normalises and rotates x [num, dim], one token's heads.
  void norm_rotate(float* x, int num, const float* norm, bool full, int64_t angle) const;
};

enum class Scoring : int { kSoftmax, kSigmoid, kSqrtSoftplus, kSoftmaxTopK };

// See routing/options.py.
struct RouterOptions {
  Scoring scoring;
  bool normalize;
  float scale;
  int groups, top_groups, group_best;
};

// Each token's experts, ids and weights [n, top_k], best first, lower ids first among equals, or in the table's order:
// routing/reference.py.
struct RouteOp {
  const float* logits;        // [n, experts]
  const float* bias;          // [experts], or nullptr
  const float* expert_scale;  // [experts], factors of the experts' weights; or nullptr
  // Experts by token id, [vocabulary, top_k], and the rows' token ids: these experts are taken, and only weighed by
  // their scores. nullptr: experts are chosen by score.
  const int32_t *table, *tokens;
  int n, experts, top_k;
  RouterOptions options;
  int32_t* ids;
  float* weights;
  bool is_small() const { return n <= 2; }
  void operator()(Team& team) const;

 private:
  void score(const float* row, float* scores) const;
  void keep_top_groups(float* scores, float* best, int32_t* kept) const;
  void weigh(const float* row, const int32_t* id, float* weight) const;
};

// The routes of an expert that all tokens use: ids 0; weights sigmoid(y . weight), or 1 if weight is nullptr.
struct SharedGateOp {
  const Kernels* k;
  const float* y;       // [n, cols]
  const float* weight;  // [cols], or nullptr
  int n, cols;
  int32_t* ids;    // [n]
  float* weights;  // [n]
  bool is_small() const { return n == 1 || int64_t{n} * cols <= kSmallNumbers; }
  void operator()(Team& team) const;
};

enum class Activation : int { kSilu, kClampedSilu, kSwigluOai, kGelu, kRelu, kSitu };

// Options of a layer's experts.
struct ExpertOptions {
  Activation activation = Activation::kSilu;
  float limit = 0.0f;                // clamp of gates and ups, see experts/reference.py; 0: none
  float alpha = 0.0f;                // for kSwigluOai and kSitu
  bool weighs_input = false;         // a route's weight multiplies the expert's input, not its output
  const float* gate_bias = nullptr;  // [experts, ff]; or nullptr
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;  // [experts, hidden]
};

// x[t] = (or +=) sum over t's experts of weight * down(activation(gate(y), up(y))); the usual activation is silu(gate)
// * up. Each expert's weights are read once per step.
struct ExpertsOp {
  const Kernels* k;
  const Matrix* gate;  // the same matrix as up: experts without a gate, whose product is computed once
  const Matrix* up;
  const Matrix* down;
  Activations y;         // input
  const int32_t* ids;    // [n, top_k]; negative: none
  const float* weights;  // [n, top_k]
  int n, top_k;
  Activations h;  // [n * top_k, ff]: intermediate rows, sorted by expert; quantised or float32 as down needs
  int32_t* starts;  // [experts + 1]: rows of h of each expert
  int32_t* active;  // [experts + 1]: number of experts that have rows, then their ids, ascending
  int32_t* routes;  // [n * top_k]: for each row of h, its index in ids and weights
  // [2, experts], or nullptr: adds each expert's tokens, and 1 to each expert that has any.
  int64_t* expert_token_counts;
  float* x;  // [n, hidden]
  bool add;  // add to x instead of overwriting it
  // [kMostParts, hidden]: in a step of few routes, each route's contribution to x (rows sorted by expert), summed
  // afterwards. Work is then divided by (expert, panel) instead of by panel, into units small enough to balance.
  float* parts;
  ExpertOptions options;
  // For few experts: down's work is divided by panel and summed at once, which saves a phase; same bits.
  bool sums_at_once = false;
  // The most rows of any operation whose routes a late thread may read in this one; 0: at most n.
  int most_rows = 0;
  // Terms of the rows' adapters. If an adapter changes down, h has both forms.
  ExpertLora lora = {};
  // For experts in slots (expert_disk/): the matrices hold slots, `slots` [experts] has each expert's slot, and
  // `experts` is their number; 0: the matrices hold all experts, by id.
  const int32_t* slots = nullptr;
  int experts = 0;
  Wave wave = {};
  // Inputs of gate and up by row of h, gathered in the experts' orders (gather.h); without rows: y is read.
  Activations gate_input = {}, up_input = {};
  static constexpr int kMostParts = 512;
  static constexpr int kMostPhases = 3;  // without adapters
  bool keeps_parts() const { return n * top_k <= kMostParts && !sums_at_once; }
  // After sort_routes() of the same operation.
  void operator()(Team& team) const { compute(team, true); }

  // The two parts of the operation: one thread sorts while the others wait, then all compute. sort_routes returns false
  // if an id is out of range: there are then no routes. is_whole: compute is all of a pool operation. compute returns
  // its number of phases.
  bool sort_routes() const;
  int compute(Team& team, bool is_whole) const;

 private:
  void shrink_inputs(Team& team) const;
  void shrink_intermediates(Team& team) const;
  // Adds the adapters' terms to a panel of a product, for `tokens` rows of h from i0 on; `part`: index in
  // `lora.shrunk`.
  void add_lora(const LoraTable* table, int part, int expert, int64_t panel, int i0, int tokens,
                float* tile) const;
  struct Rows {  // of h
    int begin, end;
  };
  BytesAhead down_first(const Team& team) const;
  // Reads the rows once: a late thread may see the rows of any later layer, with more experts.
  Rows rows_of(int expert) const;
  int active_expert(int64_t rank) const;
  int64_t num_experts() const { return slots != nullptr ? experts : gate->experts; }
  // Returns an expert's place in the matrices. A late thread may ask for an expert that is in no slot of this layer.
  int64_t place_of(int expert) const { return slots != nullptr ? std::max(slots[expert], 0) : expert; }
  int num_active() const { return wave.count < 0 ? active[0] : wave.count; }
  Rows wave_rows() const;                              // of h
  float* begin_sums(Team& team, int64_t panel) const;  // [n, 32]: zeros, or the previous wave's sums
  void activate(float* g, const float* u, int n) const;
  // The factor of the route's output.
  float weight_of(int route) const { return options.weighs_input ? 1.0f : weights[route]; }
  void gate_up(int64_t rank, int64_t panel, Claim& claim) const;
  void down_panel(Team& team, int64_t panel, Claim& claim) const;
  void add_down_bias(int expert, int64_t panel, int tokens, float* tile) const;
  void down_part(int64_t rank, int64_t panel, Claim& claim) const;
  void add_parts(Team& team, int64_t panel, Claim& claim) const;
  void put(int64_t panel, const float* sums) const;
};

struct SortRoutesOp {  // the first part of ExpertsOp
  ExpertsOp experts;
  bool is_small() const { return true; }
  void operator()(Team& team) const {
    team.last_phase();
    team.for_units(1, [this](int64_t) { experts.sort_routes(); });
  }
};

// Buffer for ExpertsOp::parts.
class Parts {
 public:
  float* data() { return rows_.data(); }
  // Grows if `routes` routes of `hidden` outputs need it; then waits for the pool.
  void fit(Pool& pool, int routes, int64_t hidden) {
    const size_t size = static_cast<size_t>(std::min(routes, ExpertsOp::kMostParts)) * hidden;
    if (size <= rows_.size()) return;
    pool.wait();
    rows_.resize(size);
    ++moves_;
  }
  int moves() const { return moves_; }  // how often the memory may have moved

 private:
  std::vector<float> rows_;
  int moves_ = 0;
};

// Reads every byte of the matrix and discards it: the yardstick for decode speed.
struct ReadOp {
  const Matrix* matrix;
  void operator()(Team& team) const;
};

}  // namespace moeserve
