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

}  // namespace

void Stream::index_store(Tensor q, Tensor keys, Tensor norm, Tensor bias, float eps, Tensor cos, Tensor sin,
                         Tensor positions, Tensor slots, Tensor index_keys, int n, int heads, bool in_pairs) {
  const int64_t dim = tensor_arg(keys, "keys", Element::kFloat32).cols;
  check_index_dim(dim);
  if (heads < 1) reject("heads", "at least one wanted");
  const int64_t half = tensor_arg(cos, "cos", Element::kFloat32).cols;
  if (half < 16 || half % 16 != 0 || 2 * half > dim) {
    reject("cos", "rows of a multiple of 16, at most half an index key, wanted, not " + std::to_string(half));
  }
  IndexStoreOp op{};
  op.k = &kernels_;
  op.q = rows_arg<float>(q, "q", n, heads * dim);
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

void Stream::choose_keys(AttentionPlan& plan, Tensor q, Tensor weights, Tensor index_keys, int heads) {
  const int64_t dim = tensor_arg(index_keys, "kv.index_keys", Element::kFloat16).cols;
  check_index_dim(dim);
  if (heads < 1) reject("heads", "at least one wanted");
  if (plan.choice.top < 1) reject("plan", "one that was built with a number of keys to choose wanted");
  ChooseKeysOp op{};
  op.plan = &plan;
  op.scorer = {&kernels_,
               rows_arg<float>(q, "q", plan.rows, heads * dim),
               weights.is_none() ? nullptr : rows_arg<float>(weights, "weights", plan.rows, heads),
               rows_arg<uint16_t>(index_keys, "kv.index_keys", 0, dim),
               heads,
               static_cast<int>(dim)};
  if (!plan.choice.groups.empty()) pool_.submit(op);
}

}  // namespace moeserve
