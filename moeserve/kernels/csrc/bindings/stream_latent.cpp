// Stream's operations of latent attention: argument checks.
#include "ops/latent.h"
#include "stream.h"
#include "stream_checks.h"

namespace moeserve {

void Stream::latent_store(Tensor q, Tensor latent, Tensor norm, float eps, Tensor cos, Tensor sin,
                          Tensor positions, Tensor slots, Tensor keys, int n, int heads, float scale,
                          const Activations& nope, Tensor queries) {
  const int64_t half = tensor_arg(cos, "cos", Element::kFloat32).cols, rotary = 2 * half;
  const int64_t rank = tensor_arg(norm, "norm", Element::kFloat32).size(), width = rank + rotary;
  if (half % 16 != 0) {
    reject("cos", "rows of a multiple of 16, or of none, wanted, not " + std::to_string(half));
  }
  if (rank < 32 || rank % 32 != 0) reject("norm", "elements that 32 divides wanted");
  if (heads < 1 || nope.cols < 32 || nope.cols % 32 != 0) reject("nope", "columns that 32 divides wanted");
  check_activations(nope, "nope", int64_t{n} * heads, nope.cols, false);
  LatentStoreOp op{};
  op.k = &kernels_;
  op.q = rows_arg<float>(q, "q", n, heads * (nope.cols + rotary));
  op.latent = rows_arg<float>(latent, "latent", n, width);
  op.norm = sized_arg<float>(norm, "norm", rank);
  op.eps = eps;
  const Angles angles = angles_arg(cos, sin, positions, n, half);
  op.cos = angles.cos;
  op.sin = angles.sin;
  op.positions = angles.positions;
  op.slots = rows_arg<int32_t>(slots, "slots", n, 1);
  op.pool = rows_arg<uint16_t>(keys, "kv.keys", 0, width);
  check_ids("KV slot", op.slots, n, tensor_arg(keys, "kv.keys", Element::kFloat16).rows);
  op.n = n;
  op.heads = heads;
  op.rank = static_cast<int>(rank);
  op.rotary = static_cast<int>(rotary);
  op.scale = scale;
  op.nope = nope;
  op.queries = rows_arg<float>(queries, "queries", n, heads * width);
  pool_.submit(op);
}

void Stream::linear_by_head(const Activations& x, int n, const Matrix& weights, const Activations& out) {
  const int64_t heads = weights.experts;
  if (weights.rows % kPanelRows != 0) reject("weights", "rows that 32 divides wanted");
  if (weights.order != nullptr) reject("weights", "columns in another order");
  if (out.cols % (heads * kPanelRows) != 0 || out.cols / heads < weights.rows) {
    reject("out", "columns that the heads and 32 divide, and that hold their outputs, wanted");
  }
  check_activations(x, "x", n * heads, weights.cols, weights.integer());
  check_activations(out, "out", n, out.cols, false);
  pool_.submit(HeadLinearOp{&kernels_, x, &weights, n, out});
}

}  // namespace moeserve
