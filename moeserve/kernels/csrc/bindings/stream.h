// The operations that Python queues on the pool. Every call checks its tensors' element type, contiguity, device and
// sizes. If a check fails, it queues nothing and throws std::invalid_argument (ValueError), with a message that begins
// with the argument's name in cpu_stream.py, or std::out_of_range (IndexError) for an id out of range. `repeat` checks
// nothing anew: its tensors are those of the recorded calls, and `copy_ids` has checked the ids.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/attention.h"
#include "ops/choose.h"
#include "ops/compressed_plan.h"
#include "ops/delta_net.h"
#include "ops/gather.h"
#include "ops/ops.h"

namespace moeserve {

// Weights that share an input: one operation, one pass over the activations (Q, K and V).
struct LinearGroup {
  // One to four matrices; biases: a float32 [rows] tensor or None for each, or None.
  LinearGroup(const std::vector<const Matrix*>& matrices, nanobind::object biases);
  std::vector<const Matrix*> matrices;
  std::vector<const float*> biases;  // nullptr: none
  nanobind::object held;             // keeps alive what `biases` points to
};

// Copies the n ids of `source` to the start of `target`, int32 tensors. Throws std::out_of_range for an id that is not in
// [0, count), named as `what`, and then copies nothing.
void copy_ids(const std::string& what, nanobind::handle source, nanobind::handle target, int64_t count);

// These throw std::invalid_argument.
Activation activation_named(const std::string& name);
void check_options(const ExpertOptions& options);
// order: int32 [experts, cols], kept alive by the caller. Throws std::out_of_range for a column that is not there.
void set_order(Matrix& matrix, nanobind::handle order);
Activations make_activations(nanobind::handle f32, nanobind::handle q8, int64_t cols);

// a, b: float32 tensors in LoraPair's layout, kept alive by the caller; None: no pair.
void set_lora_pair(LoraTable& table, int adapter, int64_t expert, nanobind::handle a, nanobind::handle b);
// disk: a DiskLayer of stream_operands.py, or None. Returns the layer's number of experts; its matrices have `held` of
// them.
int64_t num_experts_arg(const nanobind::object& disk, int64_t held);
// Computes `op`, whose experts are on disk; ids: op.ids.
void run_from_disk(const ExpertsOp& op, int32_t* ids, const nanobind::object& disk);
// lora: an ExpertAdapters of stream_operands.py, or None.
ExpertLora expert_lora_arg(const nanobind::object& lora, const ExpertsOp& op);

// What a step queued, to be queued again: see operation_queue.py.
struct RecordedOperations {
  OperationRecord operations;
  int moves = -1;  // Stream::moves() when the record began; -1: it cannot be repeated
};

class Stream {
 public:
  using Tensor = nanobind::handle;

  // Throws std::invalid_argument for an ISA that this CPU or build lacks, or if nodes are not in order.
  Stream(const std::vector<std::pair<int, std::vector<int>>>& threads, const std::string& isa);

  const char* isa() const { return kernels_.name; }
  const Kernels& kernels() const { return kernels_; }
  Pool& pool() { return pool_; }
  void wait() { pool_.wait(); }

  // stream_record.cpp
  void begin_record(RecordedOperations& record);
  void end_record(RecordedOperations& record);
  // Queues the operations again; returns false, and queues nothing, if memory that they use has moved since.
  bool repeat(const RecordedOperations& record);

  // Only while nothing is queued.
  std::vector<ProductSpeed> choose_products(const std::vector<int>& types, int64_t weight_bytes,
                                            double least_gain, const KnownSpeeds& known) {
    return moeserve::choose_products(pool_, kernels_, types, weight_bytes, least_gain, known);
  }

  // source, bytes: address and size of the GGUF rows.
  std::unique_ptr<Matrix> pack(uintptr_t source, size_t bytes, int type, int64_t rows, int64_t cols,
                               int64_t experts);
  std::unique_ptr<Matrix> view(uintptr_t source, size_t bytes, int type, int64_t rows, int64_t cols,
                               int64_t experts);
  // A packed matrix of `count` experts in untouched memory, which takes no RAM before it is written.
  std::unique_ptr<Matrix> slots(int type, int64_t rows, int64_t cols, int64_t count);

  void embed(uintptr_t table, size_t bytes, int type, Tensor ids, int n, Tensor x, float scale, int copies);
  void norm(Tensor x, Tensor weight, float eps, int n, const Activations& y, Tensor rows, bool centered);
  void add_norm(Tensor source, Tensor weight, float eps, int n, Tensor x, float factor);
  void softcap(Tensor x, int n, float cap);
  void gelu_gate(Tensor gate, Tensor up, int column, int n, const Activations& out);
  void linear(const Activations& x, int n, const LinearGroup& weights, const nanobind::list& out, bool add);
  void linear_panels(const Activations& x, int n, const Matrix& weights, Tensor panels, Tensor out);
  // kv: a KvLayer of stream_operands.py.
  void rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, float eps, Tensor cos,
                  Tensor sin, Tensor positions, Tensor slots, nanobind::object kv, int n, int heads,
                  int kv_heads, int dim, int value_dim, nanobind::object scale, Tensor v_norm, bool v_from_k,
                  float v_scale, bool norm_after);
  void attention(AttentionPlan& plan, Tensor q, nanobind::object kv, const Activations& out, int heads,
                 int kv_heads, int dim, int value_dim, bool is_latent, int window, Tensor sinks, Tensor gate,
                 bool gate_softplus, float score_cap);
  void route(Tensor logits, int n, Tensor ids, Tensor weights, const std::string& scoring, bool normalize,
             float scale, int groups, int top_groups, int group_best, Tensor bias, Tensor expert_scale,
             Tensor table, Tensor tokens);
  void shared_gate(const Activations& y, int n, Tensor weight, Tensor ids, Tensor weights);
  void experts(const Matrix& gate, const Matrix& up, const Matrix& down, const Activations& y, int n,
               Tensor ids, Tensor weights, Tensor starts, Tensor active, Tensor routes, const Activations& h,
               Tensor expert_token_counts, Tensor x, const std::string& activation, float limit, float alpha,
               bool weighs_input, Tensor gate_bias, Tensor up_bias, Tensor down_bias, nanobind::object lora,
               bool add, const nanobind::object& disk);
  // stream_lora.cpp
  void lora(const Activations& x, int n, Tensor rows, Tensor adapters, const nanobind::list& tables,
            const nanobind::list& out, Tensor shrunk);
  // stream_latent.cpp
  void latent_store(Tensor q, Tensor latent, Tensor norm, float eps, Tensor cos, Tensor sin, Tensor positions,
                    Tensor slots, Tensor keys, int n, int heads, float scale, const Activations& nope,
                    Tensor queries);
  void linear_by_head(const Activations& x, int n, const Matrix& weights, const Activations& out);
  // stream_indexer.cpp
  void index_store(Tensor q, Tensor keys, Tensor norm, Tensor bias, float eps, Tensor cos, Tensor sin,
                   Tensor positions, Tensor slots, Tensor index_keys, int n, int heads, bool in_pairs);
  void index_blocks(AttentionPlan& plan, Tensor q, Tensor keys, Tensor q_norm, Tensor k_norm, float eps,
                    Tensor cos, Tensor sin, Tensor first_cos, Tensor first_sin, Tensor index_keys, int heads);
  void index_pools(AttentionPlan& plan, Tensor keys, Tensor gates, Tensor norm, Tensor bias, float eps,
                   Tensor ape, Tensor index_keys);
  void choose_keys(AttentionPlan& plan, Tensor q, Tensor weights, Tensor index_keys, int heads);
  // stream_compressed.cpp
  void compressed_store(Tensor q, Tensor kv, Tensor norm, float eps, Tensor cos, Tensor sin, Tensor positions,
                        const CompressedPlan& plan, Tensor keys, int n, int heads, float scale,
                        Tensor index_q, int index_heads);
  void compress(Tensor kv, Tensor gate, Tensor bias, Tensor norm, float eps, Tensor cos, Tensor sin,
                Tensor positions, Tensor slots, Tensor entries, Tensor states, int64_t first_state,
                Tensor row, Tensor count, Tensor slot, Tensor drafts, Tensor kept, Tensor pending, int n);
  void commit_compressed(Tensor bias, int64_t dim, Tensor states, int64_t first_state, Tensor slot,
                         Tensor kept, Tensor accepted, Tensor pending);
  void choose_entries(CompressedPlan& plan, Tensor q, Tensor weights, Tensor index_keys, int heads);
  void keep_keys(const CompressedPlan& plan, Tensor keys);
  void rotate_back(const Activations& x, int n, int heads, int dim, Tensor cos, Tensor sin, Tensor positions);
  // stream_states.cpp
  void delta_net(Tensor q, Tensor k, Tensor v, Tensor z, Tensor b, Tensor a, Tensor conv, Tensor rate,
                 Tensor dt_bias, Tensor norm, float eps, const DeltaHeads& heads, Tensor states,
                 int64_t first, Tensor row, Tensor count, Tensor slot, Tensor drafts, Tensor kept,
                 Tensor pending, int n, const Activations& out);
  void mamba2(Tensor projected, Tensor decays, Tensor conv, Tensor conv_bias, Tensor rate, Tensor dt_bias,
              Tensor skip, Tensor norm, float eps, const DeltaHeads& heads, Tensor states, int64_t first,
              Tensor row, Tensor count, Tensor slot, Tensor drafts, Tensor kept, Tensor pending, int n,
              const Activations& out);
  void short_conv(Tensor projected, Tensor conv, Tensor states, int64_t first, Tensor row, Tensor count,
                  Tensor slot, Tensor drafts, Tensor kept, Tensor pending, int n, const Activations& out);
  void commit_states(const DeltaHeads& heads, Tensor states, int64_t first, Tensor slot, Tensor kept,
                     Tensor accepted, Tensor pending);
  void copy_states(Tensor states, Tensor pairs);
  // stream_residual.cpp
  void stream_norm(Tensor x, Tensor weight, float eps, int n, const Activations& y, Tensor rows);
  void scaled_silu(Tensor x, float factor, int n, const Activations& out);
  void mix_streams(Tensor gate, const Activations& x, int n, const Activations& out);
  void inject(Tensor block, Tensor weights, int n, Tensor x);
  void read_streams(Tensor products, Tensor x, Tensor rows, Tensor base, Tensor scale, float eps,
                    int iterations, Tensor norm, float norm_eps, int n, const Activations& y, Tensor weights);
  void add_streams(Tensor block, Tensor weights, int n, Tensor x);
  void attend_streams(Tensor x, Tensor rows, Tensor score, Tensor norm, float eps, int num, int n,
                      const Activations& y);
  void put_stream(Tensor block, int stream, bool add, int n, Tensor x);
  void ngram_gate(Tensor x, Tensor key, Tensor value, Tensor query_norm, Tensor key_norm, Tensor conv_norm,
                  float eps, int n, Tensor factors);
  void ngram_conv(Tensor inputs, Tensor factors, Tensor value, Tensor conv, int dilation, Tensor states,
                  int64_t first, Tensor row, Tensor count, Tensor slot, Tensor drafts, Tensor kept,
                  Tensor pending, int n, Tensor x);
  void commit_windows(Tensor states, int64_t first, int kept_rows, Tensor slot, Tensor kept, Tensor accepted,
                      Tensor pending);
  void read(const Matrix& matrix) { pool_.submit(ReadOp{&matrix}); }

 private:
  std::unique_ptr<Matrix> make_matrix(size_t bytes, int type, int64_t rows, int64_t cols, int64_t experts,
                                      const uint8_t* file_rows);

  // Launches the gathering of x's columns in the matrix's order.
  Activations gathered(const Activations& x, int n, const Matrix& matrix);
  // The same for the input of a matrix of experts, by route; no rows if the matrix has no order.
  Activations gathered_by_route(const ExpertsOp& op, const Matrix& matrix, Gathered& room);

  // How often memory that belongs to the stream, and that operations use, may have moved.
  int moves() const { return gathered_.moves() + gathered_up_.moves() + parts_.moves(); }

  Kernels kernels_;
  Gathered gathered_, gathered_up_;
  Parts parts_;  // declared before the pool, whose last operations use it
  Pool pool_;
};

}  // namespace moeserve
