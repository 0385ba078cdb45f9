// Stream's operations of compressed attention: argument checks.
#include "ops/compressed.h"

#include "state_checks.h"
#include "stream.h"
#include "stream_checks.h"

namespace moeserve {
namespace {

TailRotation angles_of(nanobind::handle cos, nanobind::handle sin, nanobind::handle positions, int n,
                       int64_t dim) {
  const int64_t half = tensor_arg(cos, "cos", Element::kFloat32).cols;
  if (half < 1 || 2 * half > dim) reject("cos", "rows of at most half a head wanted");
  const Angles angles = angles_arg(cos, sin, positions, n, half);
  if (angles.positions == nullptr) reject("positions", "a tensor wanted");
  return {angles.cos, angles.sin, angles.positions, static_cast<int>(2 * half)};
}

void check_dim(const char* name, int64_t dim) {
  if (dim >= 32 && dim <= kMostCompressedDim && dim % 32 == 0) return;
  reject(name, "32 to " + std::to_string(kMostCompressedDim) + " numbers that 32 divides wanted");
}

Compressor compressor_of(nanobind::handle bias, int64_t dim) {
  const TensorArg a = tensor_arg(bias, "bias", Element::kFloat32);
  check_dim("norm", dim);
  if (a.rows < 1 || (a.cols != dim && a.cols != 2 * dim)) reject("bias", "rows of one or two entries wanted");
  return {static_cast<float*>(a.data), static_cast<int>(a.rows), static_cast<int>(dim), a.cols > dim};
}

}  // namespace

void Stream::compressed_store(Tensor q, Tensor kv, Tensor norm, float eps, Tensor cos, Tensor sin,
                              Tensor positions, const CompressedPlan& plan, Tensor keys, int n, int heads,
                              float scale, Tensor index_q, int index_heads) {
  const int64_t dim = tensor_arg(norm, "norm", Element::kFloat32).size();
  const TensorArg pool = tensor_arg(keys, "kv.keys", Element::kFloat16);
  check_dim("norm", dim);
  if (heads < 1) reject("heads", "at least one wanted");
  if (pool.cols != dim) reject("kv.keys", "rows of one key wanted");
  if (static_cast<int64_t>(plan.key_rows.size()) != n) reject("plan", "a plan of the step's rows wanted");
  CompressedStoreOp op{};
  op.k = &kernels_;
  op.q = rows_arg<float>(q, "q", n, heads * dim);
  op.kv = rows_arg<float>(kv, "kv", n, dim);
  op.norm = sized_arg<float>(norm, "norm", dim);
  op.eps = eps;
  op.scale = scale;
  op.angles = angles_of(cos, sin, positions, n, dim);
  op.plan = &plan;
  check_ids("key", plan.key_rows.data(), n, pool.rows);
  op.keys = static_cast<uint16_t*>(pool.data);
  if (!index_q.is_none()) {
    const int64_t width = tensor_arg(index_q, "index_q", Element::kFloat32).cols;
    if (index_heads < 1 || width % index_heads != 0 || width / index_heads < op.angles.rotary) {
      reject("index_q", "whole heads that are at least as wide as the rotation wanted");
    }
    op.index_q = rows_arg<float>(index_q, "index_q", n, width);
    op.index_heads = index_heads;
    op.index_dim = static_cast<int>(width / index_heads);
  }
  op.n = n;
  op.heads = heads;
  op.dim = static_cast<int>(dim);
  pool_.submit(op);
}

void Stream::compress(Tensor kv, Tensor gate, Tensor bias, Tensor norm, float eps, Tensor cos, Tensor sin,
                      Tensor positions, Tensor slots, Tensor entries, Tensor states, int64_t first_state,
                      Tensor row, Tensor count, Tensor slot, Tensor drafts, Tensor kept, Tensor pending,
                      int n) {
  const int64_t dim = tensor_arg(norm, "norm", Element::kFloat32).size();
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  const TensorArg pool = tensor_arg(entries, "entries", Element::kFloat16);
  CompressOp op{};
  op.k = &kernels_;
  op.of = compressor_of(bias, dim);
  op.kv = rows_arg<float>(kv, "kv", n, op.of.width());
  op.gate = rows_arg<float>(gate, "gate", n, op.of.width());
  op.norm = sized_arg<float>(norm, "norm", dim);
  op.eps = eps;
  op.angles = angles_of(cos, sin, positions, n, dim);
  op.slots = rows_arg<int32_t>(slots, "slots", n, 1);
  for (int t = 0; t < n; ++t) {
    if ((op.angles.positions[t] + 1) % op.of.ratio == 0)
      check_ids("an entry's KV slot", op.slots + t, 1, pool.rows);
  }
  if (pool.cols != dim) reject("entries", "slots of one entry wanted");
  op.pool = static_cast<uint16_t*>(pool.data);
  if (first_state < 0 || first_state + op.of.state_values() > all.cols) {
    reject("first", "the layer lies beside the states");
  }
  op.states = static_cast<float*>(all.data) + first_state;
  op.slot_values = all.cols;
  op.sequences = state_sequences_arg(row, count, slot, n, all.rows);
  add_drafts(op.sequences, drafts, kept);
  if (const StateSequences& s = op.sequences; s.drafts != nullptr) {
    op.pending = draft_rows_arg(pending, op.of.pending_values(), s.num, s.drafts, s.first);
  }
  op.n = n;
  pool_.submit(op);
}

void Stream::commit_compressed(Tensor bias, int64_t dim, Tensor states, int64_t first_state, Tensor slot,
                               Tensor kept, Tensor accepted, Tensor pending) {
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  CommitCompressedOp op{};
  op.of = compressor_of(bias, dim);
  if (first_state < 0 || first_state + op.of.state_values() > all.cols) {
    reject("first", "the layer lies beside the states");
  }
  op.states = static_cast<float*>(all.data) + first_state;
  op.slot_values = all.cols;
  op.num = static_cast<int>(tensor_arg(slot, "slot", Element::kInt32).size());
  op.slot = sized_arg<int32_t>(slot, "slot", op.num);
  op.first = sized_arg<int32_t>(kept, "first", op.num);
  op.accepted = sized_arg<int32_t>(accepted, "accepted", op.num);
  check_ids("state slot", op.slot, op.num, all.rows);
  op.pending = draft_rows_arg(pending, op.of.pending_values(), op.num, op.accepted, op.first);
  pool_.submit(op);
}

void Stream::choose_entries(CompressedPlan& plan, Tensor q, Tensor weights, Tensor index_keys, int heads) {
  const int64_t dim = tensor_arg(index_keys, "kv.index_keys", Element::kFloat16).cols;
  check_dim("kv.index_keys", dim);
  if (heads < 1) reject("heads", "at least one wanted");
  const int rows = plan.attention.rows;
  const ChooseEntriesOp op{&kernels_,
                           &plan,
                           rows_arg<float>(q, "q", rows, heads * dim),
                           rows_arg<float>(weights, "weights", rows, heads),
                           rows_arg<uint16_t>(index_keys, "kv.index_keys", 0, dim),
                           heads,
                           static_cast<int>(dim)};
  if (!plan.choice.groups.empty()) pool_.submit(op);
}

void Stream::keep_keys(const CompressedPlan& plan, Tensor keys) {
  const TensorArg all = tensor_arg(keys, "kv.keys", Element::kFloat16);
  for (const CompressedPlan::Copy& copy : plan.copies) {
    check_ids("key", &copy.from, 1, all.rows);
    check_ids("key", &copy.to, 1, all.rows);
  }
  if (plan.copies.empty()) return;
  pool_.submit(KeepKeysOp{&plan, static_cast<uint16_t*>(all.data), static_cast<int>(all.cols)});
}

void Stream::rotate_back(const Activations& x, int n, int heads, int dim, Tensor cos, Tensor sin,
                         Tensor positions) {
  check_dim("dim", dim);
  if (heads < 1 || x.cols % dim != 0 || heads % (x.cols / dim) != 0)
    reject("x", "rows of whole heads wanted");
  check_activations(x, "x", int64_t{n} * heads * dim / x.cols, x.cols, false);
  pool_.submit(RotateBackOp{&kernels_, angles_of(cos, sin, positions, n, dim), n, heads, dim, x});
}

}  // namespace moeserve
