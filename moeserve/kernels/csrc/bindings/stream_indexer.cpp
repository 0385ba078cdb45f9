// Stream's operations of the indexer: argument checks.
#include "ops/indexer.h"

#include "stream.h"
#include "stream_checks.h"

namespace moeserve {
namespace {

void check_index_dim(int64_t dim) {
  if (dim >= 32 && dim <= kMostIndexDim && dim % 32 == 0) return;
  reject("keys", "rows of 32 to " + std::to_string(kMostIndexDim) + " elements that 32 divides wanted");
}

void check_rotary(int64_t half, int64_t dim) {
  if (half >= 16 && half % 16 == 0 && 2 * half <= dim) return;
  reject("cos", "rows of a multiple of 16, at most half an index key, wanted, not " + std::to_string(half));
}

void check_chooses(const AttentionPlan& plan) {
  if (plan.choice.rule.top < 1) reject("plan", "one that was built with a number of keys to choose wanted");
}

// Collects the slots of the rows' keys, and of the earlier keys in the block of each sequence's first row. Returns the
// end of the longest sequence.
int check_slots(const KeyChoice& choice, int pooled, int64_t slots) {
  int positions = 0;
  for (const KeyChoice::Rows& of : choice.sequences) {
    const int first = std::max(0, of.position + 1 - pooled), end = of.position + of.count;
    check_ids("KV slot", of.slots + first, end - first, slots);
    positions = std::max(positions, end);
  }
  return positions;
}

}  // namespace

void Stream::index_store(Tensor q, Tensor keys, Tensor norm, Tensor bias, float eps, Tensor cos, Tensor sin,
                         Tensor positions, Tensor slots, Tensor index_keys, int n, int heads, bool in_pairs) {
  const int64_t dim = tensor_arg(keys, "keys", Element::kFloat32).cols;
  check_index_dim(dim);
  if (q.is_none()) heads = 0;
  if (heads < 1 && !q.is_none()) reject("heads", "at least one wanted");
  const int64_t half = tensor_arg(cos, "cos", Element::kFloat32).cols;
  check_rotary(half, dim);
  IndexStoreOp op{};
  op.k = &kernels_;
  op.q = q.is_none() ? nullptr : rows_arg<float>(q, "q", n, heads * dim);
  op.keys = rows_arg<float>(keys, "keys", n, dim);
  op.norm = sized_arg<float>(norm, "norm", dim);
  op.bias = sized_arg<float>(bias, "bias", dim);
  op.eps = eps;
  const Angles angles = angles_arg(cos, sin, positions, n, half);
  op.cos = angles.cos;
  op.sin = angles.sin;
  op.positions = angles.positions;
  op.slots = rows_arg<int32_t>(slots, "slots", n, 1);
  op.pool = rows_arg<uint16_t>(index_keys, "kv.index_keys", 0, dim);
  check_ids("KV slot", op.slots, n, tensor_arg(index_keys, "kv.index_keys", Element::kFloat16).rows);
  op.n = n;
  op.heads = heads;
  op.dim = static_cast<int>(dim);
  op.rotary = static_cast<int>(2 * half);
  op.in_pairs = in_pairs;
  pool_.submit(op);
}

void Stream::index_blocks(AttentionPlan& plan, Tensor q, Tensor keys, Tensor q_norm, Tensor k_norm, float eps,
                          Tensor cos, Tensor sin, Tensor first_cos, Tensor first_sin, Tensor index_keys,
                          int heads) {
  const int64_t dim = tensor_arg(index_keys, "kv.index_keys", Element::kFloat16).cols;
  check_index_dim(dim);
  if (heads < 1) reject("heads", "at least one wanted");
  check_chooses(plan);
  const KeyChoice& choice = plan.choice;
  const int64_t half = tensor_arg(cos, "cos", Element::kFloat32).cols;
  check_rotary(half, dim);
  const int64_t slots = tensor_arg(index_keys, "kv.index_keys", Element::kFloat16).rows;
  const int pooled = choice.rule.local > 0 ? 1 : choice.rule.block;
  const int positions = check_slots(choice, pooled, slots);
  IndexBlocksOp op{};
  op.k = &kernels_;
  op.plan = &plan;
  op.q = rows_arg<float>(q, "q", plan.rows, heads * dim);
  op.keys = rows_arg<float>(keys, "keys", plan.rows, dim);
  op.q_norm = sized_arg<float>(q_norm, "q_norm", dim);
  op.k_norm = sized_arg<float>(k_norm, "k_norm", dim);
  op.eps = eps;
  op.by_row = !first_cos.is_none();
  const int angles = op.by_row ? plan.rows : positions;
  op.cos = rows_arg<float>(cos, "cos", angles, half);
  op.sin = rows_arg<float>(sin, "sin", angles, half);
  op.first_cos = op.by_row ? rows_arg<float>(first_cos, "first_cos", angles, half) : op.cos;
  op.first_sin = op.by_row ? rows_arg<float>(first_sin, "first_sin", angles, half) : op.sin;
  op.pool = rows_arg<uint16_t>(index_keys, "kv.index_keys", 0, dim);
  op.heads = heads;
  op.dim = static_cast<int>(dim);
  op.rotary = static_cast<int>(2 * half);
  op.pooled = pooled;
  pool_.submit(op);
}

void Stream::index_pools(AttentionPlan& plan, Tensor keys, Tensor gates, Tensor norm, Tensor bias, float eps,
                         Tensor ape, Tensor index_keys) {
  check_chooses(plan);
  const KeyChoice& choice = plan.choice;
  if (choice.rule.local > 0) reject("plan", "one without local blocks wanted");
  const int64_t dim = tensor_arg(keys, "keys", Element::kFloat32).cols;
  check_index_dim(dim);
  check_slots(choice, choice.rule.block, tensor_arg(index_keys, "kv.index_keys", Element::kFloat16).rows);
  IndexPoolsOp op{};
  op.k = &kernels_;
  op.plan = &plan;
  op.keys = rows_arg<float>(keys, "keys", plan.rows, dim);
  op.gates = rows_arg<float>(gates, "gates", plan.rows, dim);
  op.norm = sized_arg<float>(norm, "norm", dim);
  op.bias = sized_arg<float>(bias, "bias", dim);
  op.eps = eps;
  op.ape = sized_arg<float>(ape, "ape", choice.rule.block * dim);
  op.pool = rows_arg<uint16_t>(index_keys, "kv.index_keys", 0, 2 * dim);
  op.dim = static_cast<int>(dim);
  op.pooled = choice.rule.block;
  pool_.submit(op);
}

void Stream::choose_keys(AttentionPlan& plan, Tensor q, Tensor weights, Tensor index_keys, int heads) {
  if (heads < 1) reject("heads", "at least one wanted");
  const int64_t stride = tensor_arg(index_keys, "kv.index_keys", Element::kFloat16).cols;
  // Slots of pooled index keys also hold gates.
  const bool has_gates = tensor_arg(q, "q", Element::kFloat32).cols * 2 == heads * stride;
  const int64_t dim = has_gates ? stride / 2 : stride;
  check_index_dim(dim);
  check_chooses(plan);
  if (plan.choice.rule.by_head() && heads != plan.kv_heads)
    reject("heads", "as many as KV heads, which choose, wanted");
  ChooseKeysOp op{};
  op.k = &kernels_;
  op.plan = &plan;
  op.q = rows_arg<float>(q, "q", plan.rows, heads * dim);
  op.weights = weights.is_none() ? nullptr : rows_arg<float>(weights, "weights", plan.rows, heads);
  op.pool = rows_arg<uint16_t>(index_keys, "kv.index_keys", 0, stride);
  op.stride = stride;
  op.heads = heads;
  op.dim = static_cast<int>(dim);
  if (!plan.choice.groups.empty()) pool_.submit(op);
}

}  // namespace moeserve
