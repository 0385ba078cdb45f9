// Python bindings of compressed attention's plan: moeserve.kernels._C.CompressedPlan.
#include <nanobind/nanobind.h>

#include "host_array.h"
#include "ops/compressed_plan.h"
#include "tensor_arg.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

// See build_compressed_plan in kernels/compressed/plan.py.
void build_compressed(CompressedPlan& plan, nb::handle rows, nb::handle counts, nb::handle positions,
                      nb::handle req_slots, nb::handle state_slots, nb::handle slot_table, int window,
                      int ratio, int top, int64_t first_ring, int ring_rows, int64_t num_rings, int heads,
                      int parts, int dim, int threads) {
  const HostInts row(rows, "rows", 1), count(counts, "counts", 1), position(positions, "positions", 1),
      req_slot(req_slots, "req_slots", 1), state_slot(state_slots, "state_slots", 1),
      table(slot_table, "slot_table", 2);
  for (const HostInts* column : {&count, &position, &req_slot, &state_slot}) {
    if (column->size(0) != row.size(0)) reject("rows", "columns of one length wanted");
  }
  if (window < 1 || ratio < 0 || top < 0 || (top > 0 && ratio == 0)) {
    reject("window", "a window, and a number of chosen entries only where there are entries wanted");
  }
  if (first_ring < 0 || ring_rows < window || num_rings < 1) {
    reject("rings", "rings of at least a window's rows wanted");
  }
  plan.build({static_cast<int>(row.size(0)), row.data(), count.data(), position.data(), req_slot.data(),
              state_slot.data(), table.data(), table.size(0), table.size(1)},
             {window, ratio, top, {first_ring, ring_rows, num_rings}}, heads, parts, dim, threads);
}

}  // namespace

void bind_compressed(nb::module_& m) {
  nb::class_<CompressedPlan>(m, "CompressedPlan")
      .def(nb::init<>())
      .def_prop_ro(
          "attention", [](CompressedPlan& plan) -> AttentionPlan& { return plan.attention; },
          nb::rv_policy::reference_internal)
      .def_prop_ro("chooses", [](const CompressedPlan& plan) { return plan.choice.has_choosing(); })
      .def_prop_ro("copies_keys", [](const CompressedPlan& plan) { return !plan.copies.empty(); })
      .def_prop_ro("key_rows",
                   [](const CompressedPlan& plan) {
                     nb::list rows;
                     for (const int32_t row : plan.key_rows) rows.append(row);
                     return rows;
                   })
      .def("build", &build_compressed, "rows"_a, "counts"_a, "positions"_a, "req_slots"_a, "state_slots"_a,
           "slot_table"_a, "window"_a, "ratio"_a, "top"_a, "first_ring"_a, "ring_rows"_a, "num_rings"_a,
           "heads"_a, "parts"_a, "dim"_a, "threads"_a);
}

}  // namespace moeserve
