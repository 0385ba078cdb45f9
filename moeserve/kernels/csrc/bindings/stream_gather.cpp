// Products whose matrices may have their columns in another order.
#include "ops/gather.h"
#include "stream.h"
#include "stream_checks.h"

namespace nb = nanobind;

namespace moeserve {

void set_order(Matrix& matrix, nb::handle order) {
  const int64_t size = matrix.experts * matrix.cols;
  const auto* columns = sized_arg<int32_t>(order, "order", size);
  if (size > INT32_MAX) reject("order", "too many columns");
  check_ids("column", columns, static_cast<int>(size), matrix.cols);
  matrix.order = columns;
}

Activations Stream::gathered(const Activations& x, int n, const Matrix& matrix) {
  check_activations(x, "x", n, matrix.cols, false);
  const Activations room = gathered_.fit(pool_, matrix, n);
  pool_.submit(GatherOp{&kernels_, x.f32, matrix.order, n, room});
  return room;
}

Activations Stream::gathered_by_route(const ExpertsOp& op, const Matrix& matrix, Gathered& room) {
  if (matrix.order == nullptr) return {};
  check_activations(op.y, "y", op.n, matrix.cols, false);
  const int most = op.n * op.top_k;
  const Activations out = room.fit(pool_, matrix, most);
  const int32_t* routed = op.starts + op.gate->experts;
  pool_.submit(
      GatherRoutesOp{{&kernels_, op.y.f32, matrix.order, most, out}, op.ids, op.routes, routed, op.top_k});
  return out;
}

void Stream::linear(const Activations& x, int n, const LinearGroup& weights, const nb::list& out, bool add) {
  const auto count = static_cast<int>(weights.matrices.size());
  if (out.size() != weights.matrices.size()) reject("out", "one tensor for each matrix wanted");
  float* outputs[LinearOp::kMost];
  for (int j = 0; j < count; ++j) {
    const Matrix& m = *weights.matrices[j];
    check_activations(x, "x", n, m.cols, m.integer());
    outputs[j] = rows_arg<float>(out[j], "out", n, m.rows);
  }
  // One operation for all matrices with the same order, which are nearly always all matrices.
  bool is_launched[LinearOp::kMost] = {};
  for (int first = 0; first < count; ++first) {
    if (is_launched[first]) continue;
    const Matrix& leading = *weights.matrices[first];
    LinearOp op{&kernels_, x, n, 0, {}, {}, {}, add};
    for (int j = first; j < count; ++j) {
      const Matrix& m = *weights.matrices[j];
      const bool is_alike =
          m.order == leading.order && (m.order == nullptr || m.integer() == leading.integer());
      if (is_launched[j] || !is_alike) continue;
      is_launched[j] = true;
      op.w[op.count] = &m;
      op.bias[op.count] = weights.biases[j];
      op.out[op.count++] = outputs[j];
    }
    if (leading.order != nullptr) op.x = gathered(x, n, leading);
    pool_.submit(op);
  }
}

}  // namespace moeserve
