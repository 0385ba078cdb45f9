// Python bindings of the CPU pool: moeserve.kernels._C.Stream. stream.h declares the calls' arguments. The typed
// wrapper moeserve/kernels/cpu_stream.py keeps alive the memory that they point to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "host_array.h"
#include "ops/huge_pages.h"
#include "stream.h"
#include "tensor_arg.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

// See build_attention_plan in kernels/attention/cpu_plan.py.
void build_plan(AttentionPlan& plan, nb::handle rows, nb::handle counts, nb::handle positions,
                nb::handle req_slots, nb::handle slot_table, int heads, int kv_heads, int value_dim,
                int threads, nb::handle ends, int top, int block, int local) {
  const HostInts row(rows, "rows", 1), count(counts, "counts", 1), position(positions, "positions", 1),
      req_slot(req_slots, "req_slots", 1), table(slot_table, "slot_table", 2);
  const int64_t n = row.size(0);
  const std::pair<const char*, const HostInts*> columns[] = {
      {"counts", &count}, {"positions", &position}, {"req_slots", &req_slot}};
  for (const auto& [name, column] : columns) {
    if (column->size(0) == n) continue;
    reject(name, "shape (" + std::to_string(n) + ",) wanted, not (" + std::to_string(column->size(0)) + ",)");
  }
  if (top < 0 || block < 1 || local < 0 || (int64_t{top} + local + 1) * block > INT32_MAX / 2) {
    reject("choice", "0 or more blocks of 1 or more keys wanted");
  }
  if (top > 0 && !ends.is_none()) reject("ends", "None wanted where rows choose their keys");
  const auto build = [&](const int32_t* row_ends, int64_t num_ends) {
    plan.build(static_cast<int>(n), row.data(), count.data(), position.data(), req_slot.data(), table.data(),
               table.size(0), table.size(1), heads, kv_heads, value_dim, threads, row_ends, num_ends,
               ChoiceRule{top, block, local});
  };
  if (ends.is_none()) return build(nullptr, 0);
  const HostInts of_rows(ends, "ends", 1);
  build(of_rows.data(), of_rows.size(0));
}

}  // namespace

void bind_engine(nb::module_& m) {
  using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
  m.attr("PANEL_ROWS") = kPanelRows;
  m.attr("MADV_COLLAPSE") = kMadviseCollapse;
  m.attr("FEW_TOKENS") = kFewTokens;
  m.attr("SOME_TOKENS") = kSomeTokens;
  m.def("quantized_row_bytes", &quantized_row_bytes, "cols"_a);
  m.def(
      "dequantize_row",
      [](int type, Address row, int64_t cols, Address out) {
        if (type_info(type).name == nullptr) reject("type", "not supported, or its codebook was not set");
        dequantize_row(type, at<const uint8_t>(row), cols, at<float>(out));
      },
      "type"_a, "row"_a, "cols"_a, "out"_a, "One row of GGUF blocks to float32; the scalar specification.");

  nb::class_<Matrix>(m, "Matrix")
      .def_ro("type", &Matrix::type)
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols)
      .def_ro("experts", &Matrix::experts)
      .def_ro("bytes", &Matrix::bytes)
      .def_ro("nodes", &Matrix::nodes)
      .def_prop_ro("integer", &Matrix::integer)
      .def_prop_ro("ordered", [](const Matrix& m) { return m.order != nullptr; })
      .def("set_order", &set_order, "order"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("address", [](const Matrix& m) { return reinterpret_cast<Address>(m.begin()); });
  nb::class_<LinearGroup>(m, "LinearGroup")
      .def(nb::init<const std::vector<const Matrix*>&, nb::object>(), "matrices"_a, "biases"_a = nb::none(),
           nb::keep_alive<1, 2>());
  nb::class_<Activations>(m, "Activations")
      .def(
          "__init__",
          [](Activations* a, nb::handle f32, nb::handle q8, int64_t cols) {
            new (a) Activations(make_activations(f32, q8, cols));
          },
          "f32"_a.none(), "q8"_a.none(), "cols"_a)
      .def_ro("rows", &Activations::rows)
      .def_ro("cols", &Activations::cols);
  nb::class_<LoraTable>(m, "LoraTable")
      .def(nb::init<int64_t, int64_t, int64_t, int>(), "cols"_a, "rows"_a, "experts"_a, "adapters"_a)
      .def_ro("cols", &LoraTable::cols)
      .def_ro("rows", &LoraTable::rows)
      .def_ro("experts", &LoraTable::experts)
      .def_prop_ro("most_rank", &LoraTable::most_rank)
      .def("set", &set_lora_pair, "adapter"_a, "expert"_a, "a"_a.none(), "b"_a.none());
  nb::class_<DeltaHeads>(m, "DeltaHeads")
      .def(nb::init<int, int, int, int, int, bool, bool, bool, bool, float>(), "key_heads"_a, "value_heads"_a,
           "key_dim"_a, "value_dim"_a, "taps"_a, "tiled"_a, "kimi"_a, "mamba2"_a = false, "sigmoid"_a = false,
           "bound"_a = 0.0f)
      .def_prop_ro("state_values", &DeltaHeads::state_values);
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<>())
      .def_ro("split", &AttentionPlan::split)
      .def_ro("cuts", &AttentionPlan::cuts)
      .def_ro("slices", &AttentionPlan::slices)
      .def_ro("together", &AttentionPlan::together)
      .def_ro("latent_together", &AttentionPlan::latent_together)
      .def_prop_ro("chooses", [](const AttentionPlan& plan) { return plan.choice.has_choosing(); })
      .def_prop_ro("has_tiles", [](const AttentionPlan& plan) { return !plan.tiles.empty(); })
      .def("build", &build_plan, "rows"_a, "counts"_a, "positions"_a, "req_slots"_a, "slot_table"_a,
           "heads"_a, "kv_heads"_a, "value_dim"_a, "threads"_a, "ends"_a.none() = nb::none(), "top"_a = 0,
           "block"_a = 1, "local"_a = 0)
      .def_prop_ro("chosen", [](const AttentionPlan& plan) {
        const KeyChoice& c = plan.choice;
        std::vector<std::pair<int, std::vector<int32_t>>> rows;
        for (const KeyChoice::Tile& tile : c.tiles) {
          for (int i = 0; i < tile.count * c.heads; ++i) {
            const auto [t, head] = std::div(i, c.heads);
            const int32_t* list = c.list(tile.list + t, head);
            rows.emplace_back(tile.row * c.heads + i,
                              std::vector(list, list + c.list_length(tile.position + t)));
          }
        }
        return rows;
      });

  nb::class_<Pool>(m, "Pool")
      .def_prop_ro("threads", &Pool::threads)
      .def("time_phases", &Pool::time_phases, ReleaseGil(), "room"_a)
      .def("phase_times",
           [](const Pool& pool, int thread) {
             const std::vector<PhaseTime>& times = pool.phase_times(thread);
             return nb::bytes(times.data(), times.size() * sizeof(PhaseTime));
           })
      .def_prop_ro("operation_names", &Pool::operation_names)
      .def_static("phase_ticks", &PhaseClock::now)
      .def_static("phase_ticks_per_second", &PhaseClock::ticks_per_second, ReleaseGil());
  nb::class_<ProductSpeed>(m, "ProductSpeed")
      .def_ro("type", &ProductSpeed::type)
      .def_ro("tokens", &ProductSpeed::tokens)
      .def_ro("form", &ProductSpeed::form)
      .def_ro("speeds", &ProductSpeed::speeds)
      .def_ro("is_known", &ProductSpeed::is_known);
  m.def("copy_ids", &copy_ids, "what"_a, "source"_a, "target"_a, "count"_a);
  nb::class_<RecordedOperations>(m, "RecordedOperations").def(nb::init<>());
  nb::class_<Stream>(m, "Stream")
      .def(nb::init<const std::vector<std::pair<int, std::vector<int>>>&, const std::string&>(), "threads"_a,
           "isa"_a = "")
      .def_prop_ro("isa", &Stream::isa)
      .def_prop_ro("threads", [](Stream& s) { return s.pool().threads(); })
      .def_prop_ro("recomputed", [](Stream& s) { return s.pool().recomputed(); })
      .def_prop_ro("fetched_ahead", [](Stream& s) { return s.pool().fetched_ahead(); })
      .def_prop_ro(
          "pool", [](Stream& s) -> Pool& { return s.pool(); }, nb::rv_policy::reference_internal)
      .def("wait", &Stream::wait, ReleaseGil())
      .def("begin_record", &Stream::begin_record, "record"_a)
      .def("end_record", &Stream::end_record, "record"_a)
      .def("repeat", &Stream::repeat, ReleaseGil(), "record"_a)
      .def("choose_products", &Stream::choose_products, ReleaseGil(), "types"_a, "weight_bytes"_a,
           "least_gain"_a, "known"_a)
      .def("pack", &Stream::pack, ReleaseGil(), "source"_a, "bytes"_a, "type"_a, "rows"_a, "cols"_a,
           "experts"_a)
      .def("slots", &Stream::slots, "type"_a, "rows"_a, "cols"_a, "count"_a)
      .def("view", &Stream::view, "source"_a, "bytes"_a, "type"_a, "rows"_a, "cols"_a, "experts"_a)
      .def("embed", &Stream::embed)
      .def("norm", &Stream::norm, "x"_a, "weight"_a, "eps"_a, "n"_a, "y"_a, "rows"_a.none(), "centered"_a)
      .def("add_norm", &Stream::add_norm)
      .def("softcap", &Stream::softcap)
      .def("gelu_gate", &Stream::gelu_gate, "gate"_a.none(), "up"_a, "column"_a, "n"_a, "out"_a)
      .def("linear", &Stream::linear)
      .def("linear_panels", &Stream::linear_panels)
      .def("rope_store", &Stream::rope_store, "q"_a, "k"_a.none(), "v"_a.none(), "q_norm"_a.none(),
           "k_norm"_a.none(), "eps"_a, "cos"_a, "sin"_a, "positions"_a.none(), "slots"_a, "kv"_a, "n"_a,
           "heads"_a, "kv_heads"_a, "dim"_a, "value_dim"_a, "scale"_a.none(), "v_norm"_a.none(), "v_from_k"_a,
           "v_scale"_a, "norm_after"_a)
      .def("attention", &Stream::attention, "plan"_a, "q"_a, "kv"_a, "out"_a, "heads"_a, "kv_heads"_a,
           "dim"_a, "value_dim"_a, "is_latent"_a, "window"_a, "sinks"_a.none(), "gate"_a.none(),
           "gate_softplus"_a, "score_cap"_a)
      .def("latent_store", &Stream::latent_store, "q"_a, "latent"_a, "norm"_a, "eps"_a, "cos"_a, "sin"_a,
           "positions"_a.none(), "slots"_a, "keys"_a, "n"_a, "heads"_a, "scale"_a, "nope"_a, "queries"_a)
      .def("index_store", &Stream::index_store, "q"_a.none(), "keys"_a, "norm"_a, "bias"_a, "eps"_a, "cos"_a,
           "sin"_a, "positions"_a.none(), "slots"_a, "index_keys"_a, "n"_a, "heads"_a, "in_pairs"_a)
      .def("index_blocks", &Stream::index_blocks, "plan"_a, "q"_a, "keys"_a, "q_norm"_a, "k_norm"_a, "eps"_a,
           "cos"_a, "sin"_a, "first_cos"_a.none(), "first_sin"_a.none(), "index_keys"_a, "heads"_a)
      .def("index_pools", &Stream::index_pools, "plan"_a, "keys"_a, "gates"_a, "norm"_a, "bias"_a, "eps"_a,
           "ape"_a, "index_keys"_a)
      .def("choose_keys", &Stream::choose_keys, "plan"_a, "q"_a, "weights"_a.none(), "index_keys"_a,
           "heads"_a)
      .def("compressed_store", &Stream::compressed_store, "q"_a, "kv"_a, "norm"_a, "eps"_a, "cos"_a, "sin"_a,
           "positions"_a, "plan"_a, "keys"_a, "n"_a, "heads"_a, "scale"_a, "index_q"_a.none(),
           "index_heads"_a)
      .def("compress", &Stream::compress, "kv"_a, "gate"_a, "bias"_a, "norm"_a, "eps"_a, "cos"_a, "sin"_a,
           "positions"_a, "slots"_a, "entries"_a, "states"_a, "first_state"_a, "row"_a, "count"_a, "slot"_a,
           "drafts"_a.none(), "kept"_a.none(), "pending"_a.none(), "n"_a)
      .def("commit_compressed", &Stream::commit_compressed)
      .def("choose_entries", &Stream::choose_entries)
      .def("keep_keys", &Stream::keep_keys)
      .def("rotate_back", &Stream::rotate_back)
      .def("linear_by_head", &Stream::linear_by_head, "x"_a, "n"_a, "weights"_a, "out"_a)
      .def("route", &Stream::route, "logits"_a, "n"_a, "ids"_a, "weights"_a, "scoring"_a, "normalize"_a,
           "scale"_a, "groups"_a, "top_groups"_a, "group_best"_a, "bias"_a.none(), "expert_scale"_a.none(),
           "table"_a.none(), "tokens"_a.none())
      .def("shared_gate", &Stream::shared_gate, "y"_a, "n"_a, "weight"_a.none(), "ids"_a, "weights"_a)
      .def("experts", &Stream::experts, "gate"_a, "up"_a, "down"_a, "y"_a, "n"_a, "ids"_a, "weights"_a,
           "starts"_a, "active"_a, "routes"_a, "h"_a, "expert_token_counts"_a.none(), "x"_a, "activation"_a,
           "limit"_a, "alpha"_a, "weighs_input"_a, "gate_bias"_a.none(), "up_bias"_a.none(),
           "down_bias"_a.none(), "lora"_a.none(), "add"_a, "disk"_a.none())
      .def("lora", &Stream::lora)
      .def("delta_net", &Stream::delta_net, "q"_a, "k"_a.none(), "v"_a.none(), "z"_a, "b"_a, "a"_a.none(),
           "conv"_a, "rate"_a, "dt_bias"_a, "norm"_a, "eps"_a, "heads"_a, "states"_a, "first"_a, "row"_a,
           "count"_a, "slot"_a, "drafts"_a.none(), "kept"_a.none(), "pending"_a.none(), "n"_a, "out"_a)
      .def("mamba2", &Stream::mamba2, "projected"_a, "decays"_a, "conv"_a, "conv_bias"_a.none(), "rate"_a,
           "dt_bias"_a, "skip"_a, "norm"_a.none(), "eps"_a, "heads"_a, "states"_a, "first"_a, "row"_a,
           "count"_a, "slot"_a, "drafts"_a.none(), "kept"_a.none(), "pending"_a.none(), "n"_a, "out"_a)
      .def("short_conv", &Stream::short_conv, "projected"_a, "conv"_a, "states"_a, "first"_a, "row"_a,
           "count"_a, "slot"_a, "drafts"_a.none(), "kept"_a.none(), "pending"_a.none(), "n"_a, "out"_a)
      .def("commit_states", &Stream::commit_states, "heads"_a, "states"_a, "first"_a, "slot"_a, "kept"_a,
           "accepted"_a, "pending"_a)
      .def("copy_states", &Stream::copy_states, "states"_a, "pairs"_a)
      .def("stream_norm", &Stream::stream_norm, "x"_a, "weight"_a, "eps"_a, "n"_a, "y"_a, "rows"_a.none())
      .def("scaled_silu", &Stream::scaled_silu)
      .def("mix_streams", &Stream::mix_streams)
      .def("inject", &Stream::inject)
      .def("read_streams", &Stream::read_streams, "products"_a.none(), "x"_a, "rows"_a.none(),
           "base"_a.none(), "scale"_a.none(), "eps"_a, "iterations"_a, "norm"_a, "norm_eps"_a, "n"_a, "y"_a,
           "weights"_a.none())
      .def("add_streams", &Stream::add_streams)
      .def("attend_streams", &Stream::attend_streams, "x"_a, "rows"_a.none(), "score"_a, "norm"_a, "eps"_a,
           "num"_a, "n"_a, "y"_a)
      .def("put_stream", &Stream::put_stream)
      .def("ngram_gate", &Stream::ngram_gate)
      .def("ngram_conv", &Stream::ngram_conv, "inputs"_a, "factors"_a, "value"_a, "conv"_a, "dilation"_a,
           "states"_a, "first"_a, "row"_a, "count"_a, "slot"_a, "drafts"_a.none(), "kept"_a.none(),
           "pending"_a.none(), "n"_a, "x"_a)
      .def("commit_windows", &Stream::commit_windows)
      .def("read", &Stream::read);
}

}  // namespace moeserve
