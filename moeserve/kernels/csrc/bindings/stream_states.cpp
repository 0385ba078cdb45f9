// Stream's operations on recurrent states: argument checks.
#include <algorithm>

#include "ops/mamba2.h"
#include "ops/short_conv.h"
#include "state_checks.h"
#include "stream.h"
#include "stream_checks.h"

namespace nb = nanobind;

namespace moeserve {
namespace {

void check_delta_heads(const DeltaHeads& h) {
  if (h.key_heads < 1 || h.value_heads < 1 || h.value_heads % h.key_heads != 0 || h.taps < 2 ||
      h.key_dim < 32 || h.key_dim % 32 != 0 || h.value_dim < 32 || h.value_dim % 32 != 0) {
    reject("heads", "key heads that divide the value heads, dims that 32 divides and two taps wanted");
  }
  if (h.kimi && (h.key_heads != h.value_heads || h.key_dim > kMostKeyDim)) {
    reject("heads", "as many key heads as value heads, and keys of at most 1024 wanted");
  }
  if (h.mamba2 && (h.kimi || h.tiled)) reject("heads", "one form wanted");
  if (!(h.bound <= 0.0f) || (h.bound < 0.0f && !h.kimi))
    reject("heads", "a bound of at most 0, of Kimi's decays, wanted");
}

// The consecutive records that hold the sequences' drafts.
PendingStates pending_states(nb::handle pending, const DeltaHeads& heads, int num, const int32_t* drafts,
                             const int32_t* first) {
  const int64_t values = PendingStates::values(heads);
  return {draft_rows_arg(pending, values, num, drafts, first), values};
}

// The arguments of any recurrent layer besides its products.
void fill_recurrent(RecurrentOp& op, const Kernels* k, const DeltaHeads& heads, int n, const Activations& out,
                    nb::handle conv, nb::handle rate, nb::handle dt_bias, float eps, const TensorArg& states,
                    int64_t first) {
  if (first < 0 || first + heads.state_values() > states.cols)
    reject("first", "the layer lies beside the states");
  check_activations(out, "out", n, int64_t{heads.value_heads} * heads.value_dim, false);
  op.k = k;
  op.heads = heads;
  op.conv = sized_arg<float>(conv, "conv", heads.taps * heads.channels());
  op.rate = sized_arg<float>(rate, "rate", heads.value_heads);
  op.dt_bias = sized_arg<float>(dt_bias, "dt_bias", heads.decays());
  op.eps = eps;
  op.states = static_cast<float*>(states.data) + first;
  op.slot_values = states.cols;
  op.n = n;
  op.out = out;
}

void fill_sequences(RecurrentOp& op, nb::handle row, nb::handle count, nb::handle slot, nb::handle drafts,
                    nb::handle kept, nb::handle pending, int64_t slots) {
  op.sequences = state_sequences_arg(row, count, slot, op.n, slots);
  add_drafts(op.sequences, drafts, kept);
  if (const StateSequences& of = op.sequences; of.drafts != nullptr)
    op.pending = pending_states(pending, op.heads, of.num, of.drafts, of.first);
}

}  // namespace

void Stream::delta_net(Tensor q, Tensor k, Tensor v, Tensor z, Tensor b, Tensor a, Tensor conv, Tensor rate,
                       Tensor dt_bias, Tensor norm, float eps, const DeltaHeads& heads, Tensor states,
                       int64_t first, Tensor row, Tensor count, Tensor slot, Tensor drafts, Tensor kept,
                       Tensor pending, int n, const Activations& out) {
  check_delta_heads(heads);
  if (heads.mamba2) reject("heads", "those of a delta rule wanted");
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  const int64_t width = int64_t{heads.value_heads} * heads.value_dim;
  const int64_t per_key = heads.value_heads / heads.key_heads;
  DeltaNetOp op{};
  fill_recurrent(op, &kernels_, heads, n, out, conv, rate, dt_bias, eps, all, first);
  const int64_t key_width = int64_t{heads.key_heads} * heads.key_dim;
  if (k.is_none()) {  // q holds q, k and v
    op.qkv[0] = rows_arg<float>(q, "qkv", n, heads.channels());
    op.qkv[1] = op.qkv[0] + key_width;
    op.qkv[2] = op.qkv[1] + key_width;
    std::fill(op.strides, op.strides + 3, heads.channels());
  } else {
    op.qkv[0] = rows_arg<float>(q, "q", n, op.strides[0] = key_width);
    op.qkv[1] = rows_arg<float>(k, "k", n, op.strides[1] = key_width);
    op.qkv[2] = rows_arg<float>(v, "v", n, op.strides[2] = width);
  }
  op.z = rows_arg<float>(z, "z", n, width);
  const bool merged = a.is_none();
  op.gate_stride = op.decay_stride = heads.value_heads * (merged ? 2 : 1);
  op.group_stride = static_cast<int>(merged ? 2 * per_key : per_key);
  op.b = rows_arg<float>(b, "b", n, op.gate_stride);
  if (merged && heads.kimi) reject("a", "a tensor of its own wanted");
  op.a = merged ? op.b + per_key : rows_arg<float>(a, "a", n, heads.decays());
  op.norm = sized_arg<float>(norm, "norm", heads.value_dim);
  fill_sequences(op, row, count, slot, drafts, kept, pending, all.rows);
  pool_.submit(op);
}

// projected: z, x, B, C, dt by row.
void Stream::mamba2(Tensor projected, Tensor decays, Tensor conv, Tensor conv_bias, Tensor rate,
                    Tensor dt_bias, Tensor skip, Tensor norm, float eps, const DeltaHeads& heads,
                    Tensor states, int64_t first, Tensor row, Tensor count, Tensor slot, Tensor drafts,
                    Tensor kept, Tensor pending, int n, const Activations& out) {
  check_delta_heads(heads);
  if (!heads.mamba2) reject("heads", "those of Mamba-2 wanted");
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  const int64_t width = int64_t{heads.value_heads} * heads.value_dim;
  const int64_t key_width = int64_t{heads.key_heads} * heads.key_dim;
  const int64_t row_width = width + heads.channels() + heads.value_heads;
  Mamba2Op op{};
  fill_recurrent(op, &kernels_, heads, n, out, conv, rate, dt_bias, eps, all, first);
  float* z = rows_arg<float>(projected, "projected", n, row_width);
  op.z = z;
  op.z_stride = row_width;
  op.qkv[2] = z + width;
  op.qkv[1] = op.qkv[2] + width;
  op.qkv[0] = op.qkv[1] + key_width;
  std::fill(op.strides, op.strides + 3, row_width);
  op.b = op.qkv[0] + key_width;
  op.a = rows_arg<float>(decays, "decays", n, heads.value_heads);
  op.gate_stride = static_cast<int>(row_width);
  op.decay_stride = heads.value_heads;
  op.group_stride = heads.value_heads / heads.key_heads;
  op.conv_bias = optional_arg<float>(conv_bias, "conv_bias", heads.channels());
  op.skip = sized_arg<float>(skip, "skip", heads.value_heads);
  op.norm = optional_arg<float>(norm, "norm", width);
  fill_sequences(op, row, count, slot, drafts, kept, pending, all.rows);
  pool_.submit(op);
}

// projected: b, c, x by row.
void Stream::short_conv(Tensor projected, Tensor conv, Tensor states, int64_t first, Tensor row, Tensor count,
                        Tensor slot, Tensor drafts, Tensor kept, Tensor pending, int n,
                        const Activations& out) {
  const TensorArg taps = tensor_arg(conv, "conv", Element::kFloat32);
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  if (taps.rows < 2 || taps.rows > 16 || taps.cols < 32 || taps.cols % 32 != 0)
    reject("conv", "2 to 16 rows of channels that 32 divides wanted");
  if (first < 0 || first + (taps.rows - 1) * taps.cols > all.cols)
    reject("first", "the layer lies beside the states");
  check_activations(out, "out", n, taps.cols, false);
  ShortConvOp op{};
  op.k = &kernels_;
  op.taps = static_cast<int>(taps.rows);
  op.channels = static_cast<int>(taps.cols);
  op.conv = static_cast<float*>(taps.data);
  op.projected = rows_arg<float>(projected, "projected", n, 3 * taps.cols);
  op.states = static_cast<float*>(all.data) + first;
  op.slot_values = all.cols;
  op.sequences = state_sequences_arg(row, count, slot, n, all.rows);
  add_drafts(op.sequences, drafts, kept);
  if (op.sequences.drafts != nullptr) {
    op.pending =
        draft_rows_arg(pending, taps.cols, op.sequences.num, op.sequences.drafts, op.sequences.first);
  }
  op.n = n;
  op.out = out;
  pool_.submit(op);
}

void Stream::commit_states(const DeltaHeads& heads, Tensor states, int64_t first, Tensor slot, Tensor kept,
                           Tensor accepted, Tensor pending) {
  check_delta_heads(heads);
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  if (first < 0 || first + heads.state_values() > all.cols)
    reject("first", "the layer lies beside the states");
  CommitStatesOp op{};
  op.k = &kernels_;
  op.heads = heads;
  op.states = static_cast<float*>(all.data) + first;
  op.slot_values = all.cols;
  op.num = static_cast<int>(tensor_arg(slot, "slot", Element::kInt32).size());
  op.slot = sized_arg<int32_t>(slot, "slot", op.num);
  op.first = sized_arg<int32_t>(kept, "first", op.num);
  op.accepted = sized_arg<int32_t>(accepted, "accepted", op.num);
  check_ids("state slot", op.slot, op.num, all.rows);
  op.pending = pending_states(pending, heads, op.num, op.accepted, op.first);
  pool_.submit(op);
}

void Stream::copy_states(Tensor states, Tensor pairs) {
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  const TensorArg p = tensor_arg(pairs, "pairs", Element::kInt32);
  const auto* pair = rows_arg<int32_t>(pairs, "pairs", p.rows, 2);
  for (int64_t i = 0; i < p.rows; ++i) {
    if (pair[2 * i] != -1) check_ids("state slot", pair + 2 * i, 1, all.rows);
    check_ids("state slot", pair + 2 * i + 1, 1, all.rows);
  }
  pool_.submit(CopyStatesOp{static_cast<float*>(all.data), all.cols, pair, static_cast<int>(p.rows)});
}

}  // namespace moeserve
