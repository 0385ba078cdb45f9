// Stream's operations of LoRA adapters: argument checks.
#include "stream.h"
#include "stream_checks.h"

namespace nb = nanobind;

namespace moeserve {
namespace {

void check_adapters(const int32_t* adapters, const int32_t* rows, int count, const LoraTable* table) {
  for (int i = 0; i < count; ++i) check_ids("adapter", adapters + rows[i], 1, table->adapters());
}

// Returns the table, whose shape must match; nullptr for None.
const LoraTable* table_arg(nb::handle table, const char* name, int64_t cols, int64_t rows, int64_t experts) {
  if (table.is_none()) return nullptr;
  const auto* found = nb::cast<const LoraTable*>(table);
  if (found->cols != cols || found->rows != rows || found->experts != experts) {
    reject(name, "a table of the product's shape wanted");
  }
  return found;
}

}  // namespace

void set_lora_pair(LoraTable& table, int adapter, int64_t expert, nb::handle a, nb::handle b) {
  if (adapter < 0 || adapter >= table.adapters() || expert < 0 || expert >= table.experts) {
    throw std::out_of_range("no such adapter or expert");
  }
  if (a.is_none()) return table.set(adapter, expert, {});
  const int64_t rank = tensor_arg(a, "a", Element::kFloat32).rows;
  if (rank < 1 || rank % kLoraRows != 0) reject("a", "a multiple of 4 rows wanted");
  table.set(adapter, expert,
            {rows_arg<float>(a, "a", rank, table.cols), sized_arg<float>(b, "b", table.panels * rank * 32),
             static_cast<int>(rank)});
}

void Stream::lora(const Activations& x, int n, Tensor rows, Tensor adapters, const nb::list& tables,
                  const nb::list& out, Tensor shrunk) {
  LoraOp op{};
  op.k = &kernels_;
  op.count = static_cast<int>(tables.size());
  if (op.count < 1 || op.count > LoraOp::kMost || out.size() != tables.size()) {
    reject("tables", "one to four, and a tensor of `out` for each, wanted");
  }
  check_activations(x, "x", n, x.cols, false);
  op.x = x.f32;
  op.num_rows = static_cast<int>(tensor_arg(rows, "rows", Element::kInt32).size());
  op.rows = sized_arg<int32_t>(rows, "rows", op.num_rows);
  check_ids("row", op.rows, op.num_rows, n);
  op.adapters = rows_arg<int32_t>(adapters, "adapters", n, 1);
  for (int j = 0; j < op.count; ++j) {
    const int64_t cols = tensor_arg(out[j], "out", Element::kFloat32).cols;
    op.tables[j] = table_arg(tables[j], "tables", x.cols, cols, 1);
    op.out[j] = rows_arg<float>(out[j], "out", n, cols);
    if (op.tables[j] == nullptr) continue;
    check_adapters(op.adapters, op.rows, op.num_rows, op.tables[j]);
    op.stride = std::max(op.stride, op.tables[j]->most_rank());
  }
  const TensorArg room = tensor_arg(shrunk, "shrunk", Element::kFloat32);
  if (room.size() < int64_t{op.count} * op.num_rows * op.stride) reject("shrunk", "it is too small");
  op.shrunk = static_cast<float*>(room.data);
  if (op.stride > 0 && op.num_rows > 0) pool_.submit(op);
}

ExpertLora expert_lora_arg(const nb::object& lora, const ExpertsOp& op) {
  if (lora.is_none()) return {};
  ExpertLora found{};
  const int64_t hidden = op.gate->cols, ff = op.gate->rows, num = op.gate->experts;
  const nb::object gate = lora.attr("gate"), up = lora.attr("up"), down = lora.attr("down");
  found.gate = table_arg(gate, "lora.gate", hidden, ff, num);
  found.up = table_arg(up, "lora.up", hidden, ff, num);
  found.down = table_arg(down, "lora.down", ff, op.down->rows, num);
  const auto* adapters = rows_arg<int32_t>(nb::object(lora.attr("adapters")), "lora.adapters", op.n, 1);
  found.adapters = adapters;
  const int64_t routes = int64_t{op.n} * op.top_k;
  for (const LoraTable* table : {found.gate, found.up, found.down}) {
    if (table == nullptr) continue;
    found.stride = std::max(found.stride, table->most_rank());
    for (int t = 0; t < op.n; ++t) {
      if (adapters[t] >= 0) check_ids("adapter", adapters + t, 1, table->adapters());
    }
  }
  if (found.gate != nullptr || found.up != nullptr) {
    check_activations(op.y, "y", op.n, hidden, false);
  }
  if (found.down != nullptr) check_activations(op.h, "h", routes, ff, false);
  const nb::object shrunk = lora.attr("shrunk");
  const TensorArg room = tensor_arg(shrunk, "lora.shrunk", Element::kFloat32);
  if (room.size() < 2 * routes * found.stride) reject("lora.shrunk", "it is too small");
  found.shrunk = static_cast<float*>(room.data);
  return found.stride > 0 ? found : ExpertLora{};
}

}  // namespace moeserve
