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

namespace moeserve {

// A weight matrix, or one per expert: in panels of its own (anonymous memory, huge pages asked for), or as the GGUF
// rows in the mapped file, which the caller keeps. Panels lie node by node, so that each NUMA node's part is
// contiguous; a page goes to the node whose thread writes it first.
class Matrix {
 public:
  // Throws std::bad_alloc. With `file_rows` nothing is allocated and nothing needs packing.
  Matrix(int type, int64_t rows, int64_t cols, int64_t experts, int nodes, const uint8_t* file_rows);
  ~Matrix();
  Matrix(const Matrix&) = delete;

  const int type;
  const int64_t rows, cols, experts;
  const int64_t panels;  // of one expert: ceil(rows / 32)
  const size_t panel_bytes;
  const size_t bytes;
  const int nodes;
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

 private:
  uint8_t* data_ = nullptr;
  const uint8_t* file_rows_;
};

// Activations of up to `rows` tokens in both forms; a form that no consumer needs is nullptr.
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

// GGUF rows [.., cols] of `type` to panels of `out`, rows of all experts one after the other.
struct PackOp {
  const Kernels* k;
  const uint8_t* source;
  const Matrix* out;  // packed
  void operator()(Team& team) const;
};

// x[t] = table[ids[t]] * scale, the table in GGUF rows. Every id is one of them: Stream::embed has looked.
struct EmbedOp {
  const uint8_t* table;
  int type;
  const int32_t* ids;
  int n;
  int64_t cols;
  float scale;
  float* x;
  void operator()(Team& team) const;
};

// Of a norm and the like: one thread takes as long as all threads take to meet.
constexpr int64_t kSmallNumbers = 4096;

// y[i] = rms_norm(x[rows[i]]) * w; rows nullptr: i.
struct NormOp {
  const Kernels* k;
  const float* x;
  const float* w;
  float eps;
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

// out[t] = gelu(gate[t]) * up[t], by GELU's tanh form; without a gate, up[t]. Quantised too where out has room.
struct GeluGateOp {
  const Kernels* k;
  const float* gate;  // [n, out.cols], or nullptr
  const float* up;    // a row every `stride` numbers
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

// To each of the `tokens` rows of 32 outputs of a panel, of which `valid` exist.
inline void add_bias(const float* bias, int valid, int tokens, float* tile) {
  for (int t = 0; t < tokens; ++t, tile += kPanelRows) {
    for (int r = 0; r < valid; ++r) tile[r] += bias[r];
  }
}

// out_j = x . W_j^T + b_j for up to four matrices over the same input; `add` adds that to what out holds (residual).
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
  // Whether a piece of work is 16 rows of a panel instead of 32, since there are fewer panels than threads: a router's.
  bool is_halved(const Team& team) const;
  void compute(int j, int64_t panel, int half, Claim& claim) const;
};

// The outputs of some panels of a matrix alone: out[t, 32 i + r] = x[t] . row r of panel panels[i]; -infinity behind the last
// row. Panels lie where they lie: any thread computes any of them, whichever NUMA node it is on.
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

// Keys or values of one layer, [slots, kv_heads, width of a head]: float16, or int8 codes (q8_0) with a float16 scale for each 32.
struct KvPool {
  void* data;
  uint16_t* scales;  // nullptr: float16
  bool is_q8() const { return scales != nullptr; }
  uint16_t* halves() const { return static_cast<uint16_t*>(data); }
  int8_t* codes() const { return static_cast<int8_t*>(data); }
  // `count` numbers, the first of which is number `at` of the pool.
  void store(const Kernels& k, const float* x, int count, int64_t at) const;
};

// RMS norm of q and k, per head or over all heads at once; rotation of the first `rotary` dimensions of each head; q and
// v scaled; k and v to the KV pool.
struct RopeStoreOp {
  const Kernels* k;
  float* q;      // [n, heads, dim], in place
  float* key;    // [n, kv_heads, dim], in place; nullptr: q alone is rotated, and nothing stored
  float* value;  // [n, kv_heads, value_dim], in place with v_norm or v_scale
  // What v is made from by v_norm: value, or key as it is before its own norm.
  const float* value_source;
  const float* v_norm;  // [value_dim], by head; or nullptr: none
  const float* q_norm;  // [dim], [heads * dim] with full_norm, or nullptr: none
  const float* k_norm;  // likewise
  bool full_q_norm, full_k_norm;
  float eps;
  const float* cos;  // [angles, rotary / 2]
  const float* sin;
  const int32_t* positions;  // [n]: which of the angles are a row's; nullptr: row i's are the i-th
  const int32_t* slots;      // [n]
  KvPool keys, values;       // of this layer
  int n, heads, kv_heads, dim, value_dim, rotary;
  bool norm_after;       // q and k are normalised behind the rotation
  float scale, v_scale;  // of q and of v
  void operator()(Team& team) const;

 private:
  // x [num, dim]: one token's heads.
  void norm_rotate(float* x, int num, const float* norm, bool full, int64_t angle) const;
};

enum class Scoring : int { kSoftmax, kSigmoid, kSoftmaxTopK };

// See routing/options.py.
struct RouterOptions {
  Scoring scoring;
  bool normalize;
  float scale;
  int groups, top_groups, group_best;
};

// ids, weights [n, top_k] of each token's experts, best first, of equals the lower id: routing/reference.py.
struct RouteOp {
  const float* logits;        // [n, experts]
  const float* bias;          // [experts], or nullptr
  const float* expert_scale;  // [experts]: times an expert's weight; or nullptr
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

// The routes of an expert that every token has: ids 0; weights sigmoid(y . weight), or 1 where weight is nullptr.
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

enum class Activation : int { kSilu, kSwigluOai, kGelu };

// What experts have besides their matrices.
struct ExpertOptions {
  Activation activation = Activation::kSilu;
  float limit = 0.0f;                // where gates and ups are cut, see experts/reference.py; 0: nowhere
  float alpha = 0.0f;                // of kSwigluOai
  bool weighs_input = false;         // a route's weight multiplies what the expert reads, not what it gives
  const float* gate_bias = nullptr;  // [experts, ff] each, or nullptr
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;  // [experts, hidden]
};

// A part of a step's experts, in the order of their ids, where not all fit into slots at once. The sums go on from wave to
// wave in `sums`, so that their bits are those of a single one.
struct Wave {
  int first = 0;          // of the active experts
  int count = -1;         // -1: all
  float* sums = nullptr;  // [n, hidden]; nullptr: this is the only wave
  bool is_first = true, is_last = true;
};

// x[t] = or += sum over t's experts of weight * down(activation(gate(y), up(y))), with silu(gate) * up as the usual
// activation. An expert's weights are read once a step, whoever asks for them.
struct ExpertsOp {
  const Kernels* k;
  const Matrix* gate;
  const Matrix* up;
  const Matrix* down;
  Activations y;         // input
  const int32_t* ids;    // [n, top_k]; below 0: none
  const float* weights;  // [n, top_k]
  int n, top_k;
  Activations h;  // [n * top_k, ff]: intermediate rows, sorted by expert; quantised or float32 as down needs
  int32_t* starts;  // [experts + 1]: rows of h of each expert
  int32_t* active;  // [experts + 1]: how many, then the ids of the experts that have rows, ascending
  int32_t* routes;  // [n * top_k]: row of h -> index into ids and weights
  int64_t* expert_token_counts;  // [2, experts]: adds each expert's tokens, and 1 if it has any; or nullptr
  float* x;                      // [n, hidden]
  bool add;                      // to what x holds
  // [kMostParts, hidden], where a step of few routes puts each one's share of x (rows sorted by expert) before they are
  // added: work is then shared by (expert, panel) instead of by panel, in pieces small enough to even out.
  float* parts;
  ExpertOptions options;
  // Down's work is shared by panel and added at once, a phase less, with the same bits: for few experts.
  bool sums_at_once = false;
  // The most rows of an operation whose routes a thread may find that comes late to this one; 0: no more than n.
  int most_rows = 0;
  // Added to the products of the rows that have adapters. h then has both forms, if down has an adapter.
  ExpertLora lora = {};
  // Of experts in slots (expert_disk/): the matrices have slots, `slots` [experts] says which slot has an expert, and
  // `experts` how many there are; 0: the matrices have all experts, by id.
  const int32_t* slots = nullptr;
  int experts = 0;
  Wave wave = {};
  static constexpr int kMostParts = 512;
  static constexpr int kMostPhases = 3;  // without adapters
  // Behind sort_routes() of the same operation.
  void operator()(Team& team) const { compute(team, true); }

  // The two parts of it: one thread's, which the others wait for, and everyone's. False for an id that is no expert's:
  // then there are no routes at all. is_whole: what is computed is all of an operation of the pool. Returns how many
  // phases it had.
  bool sort_routes() const;
  int compute(Team& team, bool is_whole) const;

 private:
  void shrink_inputs(Team& team) const;
  void shrink_intermediates(Team& team) const;
  // What the adapters of `tokens` rows of h, from i0 on, add to a panel of a product; `part`: which of `lora.shrunk`.
  void add_lora(const LoraTable* table, int part, int expert, int64_t panel, int i0, int tokens,
                float* tile) const;
  struct Rows {  // of h
    int begin, end;
  };
  BytesAhead down_first(const Team& team) const;
  // Read once: a thread that comes late may find any later layer's, of more experts.
  Rows rows_of(int expert) const;
  int active_expert(int64_t rank) const;
  int64_t num_experts() const { return slots != nullptr ? experts : gate->experts; }
  // Where the matrices have an expert. A thread that comes late may ask for one that this layer has in no slot.
  int64_t place_of(int expert) const { return slots != nullptr ? std::max(slots[expert], 0) : expert; }
  int num_active() const { return wave.count < 0 ? active[0] : wave.count; }
  Rows wave_rows() const;  // of h
  float* begin_sums(Team& team, int64_t panel) const;  // [n, 32]: zeros, or what the wave before has left
  void activate(float* g, const float* u, int n) const;
  // Of what the route's expert gives.
  float weight_of(int route) const { return options.weighs_input ? 1.0f : weights[route]; }
  void gate_up(int64_t rank, int64_t panel, Claim& claim) const;
  void down_panel(Team& team, int64_t panel, Claim& claim) const;
  void add_down_bias(int expert, int64_t panel, int tokens, float* tile) const;
  void down_part(int64_t rank, int64_t panel, Claim& claim) const;
  void add_parts(Team& team, int64_t panel, Claim& claim) const;
  void put(int64_t panel, const float* sums) const;
};

// Its first part.
struct SortRoutesOp {
  ExpertsOp experts;
  bool is_small() const { return true; }
  void operator()(Team& team) const {
    team.last_phase();
    team.for_units(1, [this](int64_t) { experts.sort_routes(); });
  }
};

// Room for ExpertsOp::parts, which grows with what is asked of it.
class Parts {
 public:
  float* data() { return rows_.data(); }
  // For the routes of experts of `hidden` outputs; waits for the pool if that takes another buffer.
  void fit(Pool& pool, int routes, int64_t hidden) {
    const size_t size = static_cast<size_t>(std::min(routes, ExpertsOp::kMostParts)) * hidden;
    if (size <= rows_.size()) return;
    pool.wait();
    rows_.resize(size);
  }

 private:
  std::vector<float> rows_;
};

// Reads every byte of the matrix and does nothing with it: the yardstick for decode.
struct ReadOp {
  const Matrix* matrix;
  void operator()(Team& team) const;
};

}  // namespace moeserve
