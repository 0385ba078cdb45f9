#include "stream.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "stream_checks.h"

namespace nb = nanobind;

namespace moeserve {
namespace {

const Kernels* require_kernels(const std::string& isa) {
  const Kernels* k = select_kernels(isa.empty() ? nullptr : isa.c_str());
  if (k == nullptr) throw std::invalid_argument("this CPU or this build has no '" + isa + "' kernels");
  return k;
}

std::vector<ThreadPlacement> to_placements(const std::vector<std::pair<int, std::vector<int>>>& pairs) {
  if (pairs.empty()) throw std::invalid_argument("at least one thread");
  std::vector<ThreadPlacement> placements;
  for (const auto& [node, cpus] : pairs) {
    const int expected = placements.empty() ? 0 : placements.back().node;
    if (node != expected && (placements.empty() || node != expected + 1)) {
      throw std::invalid_argument("nodes count from 0, a node's threads side by side");
    }
    placements.push_back({node, cpus});
  }
  return placements;
}

struct KvPools {  // KV cache of one layer: keys and values [slots, kv_heads, head width]
  KvPool keys, values;
  int64_t slots;
};

// kv: a KvLayer of stream_operands.py.
KvPools kv_pools(const nb::object& kv, int64_t width, int64_t value_width) {
  const nb::object keys = kv.attr("keys"), values = kv.attr("values");
  const nb::object key_scales = kv.attr("key_scales"), value_scales = kv.attr("value_scales");
  if (key_scales.is_none()) {
    const int64_t slots = tensor_arg(keys, "kv.keys", Element::kFloat16).rows;
    return {{rows_arg<uint16_t>(keys, "kv.keys", slots, width), nullptr},
            {rows_arg<uint16_t>(values, "kv.values", slots, value_width), nullptr},
            slots};
  }
  if (value_width != width) reject("kv", "8 bits need keys and values of one width");
  const int64_t slots = tensor_arg(keys, "kv.keys", Element::kInt8).rows, groups = width / 32;
  return {{rows_arg<int8_t>(keys, "kv.keys", slots, width),
           rows_arg<uint16_t>(key_scales, "kv.key_scales", slots, groups)},
          {rows_arg<int8_t>(values, "kv.values", slots, width),
           rows_arg<uint16_t>(value_scales, "kv.value_scales", slots, groups)},
          slots};
}

// Accepts [dim], [num * dim] (sets `full`) or None.
const float* head_norm(nb::handle norm, const char* name, int num, int dim, bool& full) {
  full = false;
  if (norm.is_none()) return nullptr;
  const int64_t size = tensor_arg(norm, name, Element::kFloat32).size();
  full = size != dim;
  return sized_arg<float>(norm, name, full ? int64_t{num} * dim : dim);
}

}  // namespace

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "clamped_silu") return Activation::kClampedSilu;
  if (name == "swiglu_oai") return Activation::kSwigluOai;
  if (name == "gelu") return Activation::kGelu;
  if (name == "relu") return Activation::kRelu;
  if (name == "situ") return Activation::kSitu;
  reject("activation", "none of silu, clamped_silu, swiglu_oai, gelu, relu, situ but '" + name + "'");
}

void check_options(const ExpertOptions& options) {
  if (options.weighs_input && (options.gate_bias != nullptr || options.up_bias != nullptr)) {
    reject("weighs_input", "biases of gate and up would be weighed too");
  }
  if (options.activation == Activation::kSitu && !(options.alpha > 0)) {
    reject("alpha", "a number above 0 wanted for situ");
  }
  if (options.activation == Activation::kSwigluOai ? options.limit > 0 : options.limit >= 0) {
    const bool limits = options.activation != Activation::kGelu && options.activation != Activation::kRelu;
    if (options.limit == 0 || limits) return;
  }
  reject("limit", "a number above 0 wanted for swiglu_oai, 0 or more for silu and situ, 0 for gelu and relu");
}

Activations make_activations(nb::handle f32, nb::handle q8, int64_t cols) {
  Activations a{nullptr, nullptr, 0, cols};
  if (!f32.is_none()) {
    a.rows = tensor_arg(f32, "f32", Element::kFloat32).rows;
    a.f32 = rows_arg<float>(f32, "f32", a.rows, cols);
  }
  if (!q8.is_none()) {
    if (cols % 32 != 0) reject("cols", "a multiple of 32 wanted where there is an int8 form");
    const int64_t rows = tensor_arg(q8, "q8", Element::kUint8).rows;
    a.q8 = rows_arg<uint8_t>(q8, "q8", rows, quantized_row_bytes(cols));
    a.rows = f32.is_none() ? rows : std::min(a.rows, rows);
  }
  return a;
}

LinearGroup::LinearGroup(const std::vector<const Matrix*>& matrices_, nb::object biases_)
    : matrices(matrices_), biases(matrices_.size(), nullptr) {
  if (matrices.empty() || matrices.size() > LinearOp::kMost)
    throw std::invalid_argument("one to six matrices");
  if (biases_.is_none()) return;
  held = nb::steal(PySequence_Tuple(biases_.ptr()));  // a copy: the caller may change its list
  if (!held.is_valid()) throw nb::python_error();
  if (nb::len(held) != matrices.size()) reject("biases", "one or None for each matrix wanted");
  for (size_t j = 0; j < matrices.size(); ++j) {
    biases[j] = optional_arg<float>(held[j], "biases", matrices[j]->rows);
  }
}

Stream::Stream(const std::vector<std::pair<int, std::vector<int>>>& threads, const std::string& isa)
    : kernels_(*require_kernels(isa)), pool_(to_placements(threads)) {}

std::unique_ptr<Matrix> Stream::make_matrix(size_t bytes, int type, int64_t rows, int64_t cols,
                                            int64_t experts, const uint8_t* file_rows) {
  if (type_info(type).name == nullptr || cols % type_info(type).block_cols != 0) {
    throw std::invalid_argument("unsupported type or ragged row");
  }
  if (rows < 1 || cols < 1 || experts < 1 || bytes != row_bytes(type, cols) * rows * experts) {
    reject("source", std::to_string(bytes) + " bytes are no " + std::to_string(experts) + " x " +
                         std::to_string(rows) + " rows of " + std::to_string(cols) + " columns");
  }
  return std::make_unique<Matrix>(type, rows, cols, experts, pool_.nodes(), file_rows);
}

std::unique_ptr<Matrix> Stream::pack(uintptr_t source, size_t bytes, int type, int64_t rows, int64_t cols,
                                     int64_t experts) {
  auto m = make_matrix(bytes, type, rows, cols, experts, nullptr);
  pool_.submit(PackOp{&kernels_, reinterpret_cast<const uint8_t*>(source), m.get()});
  pool_.wait();
  return m;
}

std::unique_ptr<Matrix> Stream::view(uintptr_t source, size_t bytes, int type, int64_t rows, int64_t cols,
                                     int64_t experts) {
  return make_matrix(bytes, type, rows, cols, experts, reinterpret_cast<const uint8_t*>(source));
}

void Stream::embed(uintptr_t table, size_t bytes, int type, Tensor ids, int n, Tensor x, float scale,
                   int copies) {
  const int64_t width = tensor_arg(x, "x", Element::kFloat32).cols;
  if (copies < 1 || width % copies != 0) reject("copies", "a divisor of x's columns wanted");
  const int64_t cols = width / copies;
  if (type_info(type).name == nullptr || cols < 1 || cols % type_info(type).block_cols != 0) {
    reject("table", "no rows of " + std::to_string(cols) + " columns in this type");
  }
  const auto* id = rows_arg<int32_t>(ids, "ids", n, 1);
  check_ids("token id", id, n, static_cast<int64_t>(bytes / row_bytes(type, cols)));
  pool_.submit(EmbedOp{reinterpret_cast<const uint8_t*>(table), type, id, n, copies, cols, scale,
                       rows_arg<float>(x, "x", n, width)});
}

void Stream::norm(Tensor x, Tensor weight, float eps, int n, const Activations& y, Tensor rows,
                  bool centered) {
  const TensorArg source = tensor_arg(x, "x", Element::kFloat32);
  if (y.cols % 16 != 0) reject("y", "columns that 16 divides wanted");
  check_activations(y, "y", n, y.cols, false);
  const int32_t* index = nullptr;
  if (!rows.is_none()) {
    index = rows_arg<int32_t>(rows, "rows", n, 1);
    check_ids("row", index, n, source.rows);
  }
  pool_.submit(NormOp{&kernels_, rows_arg<float>(x, "x", index == nullptr ? n : 0, y.cols),
                      sized_arg<float>(weight, "weight", y.cols), eps, centered, index, n, y});
}

void Stream::add_norm(Tensor source, Tensor weight, float eps, int n, Tensor x, float factor) {
  const int64_t cols = tensor_arg(x, "x", Element::kFloat32).cols;
  if (cols % 16 != 0) reject("x", "columns that 16 divides wanted");
  pool_.submit(AddNormOp{&kernels_, rows_arg<float>(source, "source", n, cols),
                         sized_arg<float>(weight, "weight", cols), eps, factor, n, static_cast<int>(cols),
                         rows_arg<float>(x, "x", n, cols)});
}

void Stream::softcap(Tensor x, int n, float cap) {
  const int64_t cols = tensor_arg(x, "x", Element::kFloat32).cols;
  if (cols % 16 != 0) reject("x", "columns that 16 divides wanted");
  if (!(cap > 0)) reject("cap", "a number above 0 wanted");
  pool_.submit(SoftcapOp{&kernels_, cap, n, cols, rows_arg<float>(x, "x", n, cols)});
}

void Stream::gelu_gate(Tensor gate, Tensor up, int column, int n, const Activations& out) {
  const int64_t width = tensor_arg(up, "up", Element::kFloat32).cols;
  if (out.cols % 32 != 0) reject("out", "columns that 32 divides wanted");
  if (column < 0 || column + out.cols > width) reject("column", "the columns are not there");
  check_activations(out, "out", n, out.cols, false);
  pool_.submit(GeluGateOp{&kernels_, gate.is_none() ? nullptr : rows_arg<float>(gate, "gate", n, out.cols),
                          rows_arg<float>(up, "up", n, width) + column, width, n, out});
}

void Stream::linear_panels(const Activations& x, int n, const Matrix& weights, Tensor panels, Tensor out) {
  check_activations(x, "x", n, weights.cols, weights.integer());
  const auto count = static_cast<int>(tensor_arg(panels, "panels", Element::kInt32).size());
  const auto* ids = sized_arg<int32_t>(panels, "panels", count);
  check_ids("panel", ids, count, weights.panels);
  auto* to = rows_arg<float>(out, "out", n, int64_t{kPanelRows} * count);
  const Activations input = weights.order == nullptr ? x : gathered(x, n, weights);
  pool_.submit(PanelsOp{&kernels_, input, n, &weights, ids, count, to});
}

void Stream::rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, float eps, Tensor cos,
                        Tensor sin, Tensor positions, Tensor slots, nb::object layer, int n, int heads,
                        int kv_heads, int dim, int value_dim, nb::object scale, Tensor v_norm, bool v_from_k,
                        float v_scale, bool norm_after) {
  check_heads(heads, kv_heads, dim);
  check_heads(heads, kv_heads, value_dim);
  const int64_t half = tensor_arg(cos, "cos", Element::kFloat32).cols, width = int64_t{kv_heads} * dim;
  const int64_t value_width = int64_t{kv_heads} * value_dim;
  if (half < 16 || half % 16 != 0 || 2 * half > dim) {
    reject("cos", "rows of at most dim / 2 elements, a multiple of 16, wanted, not " + std::to_string(half));
  }
  RopeStoreOp op{};
  op.k = &kernels_;
  op.q = rows_arg<float>(q, "q", n, int64_t{heads} * dim);
  op.key = k.is_none() ? nullptr : rows_arg<float>(k, "k", n, width);
  op.value = k.is_none() ? nullptr : rows_arg<float>(v, "v", n, value_width);
  op.v_norm = optional_arg<float>(v_norm, "v_norm", value_dim);
  if (v_from_k && op.v_norm == nullptr) reject("v_norm", "a norm wanted where v is made from k");
  if (v_from_k && value_dim != dim) reject("heads", "v is made from k, and is of another width");
  op.value_source = v_from_k ? op.key : op.value;
  op.q_norm = head_norm(q_norm, "q_norm", heads, dim, op.full_q_norm);
  op.k_norm = head_norm(k_norm, "k_norm", kv_heads, dim, op.full_k_norm);
  op.eps = eps;
  const Angles angles = angles_arg(cos, sin, positions, n, half);
  op.cos = angles.cos;
  op.sin = angles.sin;
  op.positions = angles.positions;
  op.slots = rows_arg<int32_t>(slots, "slots", n, 1);
  const KvPools kv = kv_pools(layer, width, value_width);
  check_ids("KV slot", op.slots, n, kv.slots);
  op.keys = kv.keys;
  op.values = kv.values;
  op.n = n;
  op.heads = heads;
  op.kv_heads = kv_heads;
  op.dim = dim;
  op.value_dim = value_dim;
  op.v_scale = v_scale;
  op.norm_after = norm_after;
  if (norm_after && (op.full_q_norm || op.full_k_norm))
    reject("q_norm", "behind the rotation, one of a head wanted");
  op.rotary = static_cast<int>(2 * half);
  op.scale = scale.is_none() ? 1.0f / std::sqrt(static_cast<float>(dim)) : nb::cast<float>(scale);
  pool_.submit(op);
}

void Stream::attention(AttentionPlan& plan, Tensor q, nb::object layer, const Activations& out, int heads,
                       int kv_heads, int dim, int value_dim, bool is_latent, int window, Tensor sinks,
                       Tensor gate, bool gate_softplus, float score_cap) {
  check_heads(heads, kv_heads, dim);
  if (value_dim < 32 || value_dim > dim || value_dim % 32 != 0) {
    reject("heads", "a value_dim of at most dim, which 32 divides, wanted");
  }
  if (plan.rows > 0 && (plan.heads != heads || plan.kv_heads != kv_heads || plan.value_dim != value_dim)) {
    reject("plan", "it was built for other heads");
  }
  if (window < 0) reject("window", "0 (none) or more wanted");
  const int64_t width = int64_t{heads} * value_dim;
  const int64_t per_row = is_latent && out.cols == value_dim ? heads : 1;  // rows of out per token
  check_activations(out, "out", plan.rows * per_row, width / per_row, false);
  AttentionOp op{};
  op.k = &kernels_;
  op.plan = &plan;
  op.q = rows_arg<float>(q, "q", plan.rows, int64_t{heads} * dim);
  if (is_latent) {
    op.keys = op.values = {rows_arg<uint16_t>(layer.attr("keys"), "kv.keys", 0, dim), nullptr};
  } else {
    const KvPools kv = kv_pools(layer, int64_t{kv_heads} * dim, int64_t{kv_heads} * value_dim);
    op.keys = kv.keys;
    op.values = kv.values;
  }
  op.out = out;
  op.heads = heads;
  op.kv_heads = kv_heads;
  op.dim = dim;
  op.value_dim = value_dim;
  op.is_latent = is_latent;
  op.window = window;
  op.sinks = optional_arg<float>(sinks, "sinks", heads);
  if (!gate.is_none()) {
    op.gate_by_head = tensor_arg(gate, "gate", Element::kFloat32).cols == heads;
    op.gate = rows_arg<float>(gate, "gate", plan.rows, op.gate_by_head ? heads : width);
  }
  if (gate_softplus && !op.gate_by_head) reject("gate", "softplus needs one gate for each head");
  op.gate_softplus = gate_softplus;
  if (!(score_cap >= 0.0f)) reject("score_cap", "0 (none) or more wanted");
  if (score_cap > 0.0f && (is_latent || op.keys.is_q8()))
    reject("score_cap", "only of a float16 cache with values");
  op.score_cap = score_cap;
  if (plan.by_head == nullptr) return pool_.submit(op);
  if (op.sinks != nullptr || window > 0 || is_latent)
    reject("plan", "heads that choose have no sinks and no window");
  if (!plan.tiles.empty()) pool_.submit(op);
  op.plan = plan.by_head.get();
  op.heads = heads / kv_heads;
  op.kv_heads = 1;
  if (!op.plan->tiles.empty()) pool_.submit(op);
}

void Stream::experts(const Matrix& gate, const Matrix& up, const Matrix& down, const Activations& y, int n,
                     Tensor ids, Tensor weights, Tensor starts, Tensor active, Tensor routes,
                     const Activations& h, Tensor expert_token_counts, Tensor x,
                     const std::string& activation, float limit, float alpha, bool weighs_input,
                     Tensor gate_bias, Tensor up_bias, Tensor down_bias, nb::object lora, bool add,
                     const nb::object& disk) {
  const int64_t held = gate.experts, num = num_experts_arg(disk, held), ff = gate.rows;
  if (ff % kPanelRows != 0) reject("gate", "rows that 32 divides wanted, not " + std::to_string(ff));
  if (up.experts != held || up.rows != ff || up.cols != gate.cols) reject("up", "the shape of gate wanted");
  if (down.experts != held || down.cols != ff) reject("down", "[experts, out, rows of gate] wanted");
  const int64_t top_k = tensor_arg(ids, "routing.ids", Element::kInt32).cols, most_routes = n * top_k;
  check_activations(y, "y", n, gate.cols, gate.integer());
  check_activations(y, "y", n, up.cols, up.integer());
  check_activations(h, "h", most_routes, ff, down.integer());
  ExpertsOp op{};
  op.k = &kernels_;
  op.gate = &gate;
  op.up = &up;
  op.down = &down;
  op.y = y;
  int32_t* const own_ids = rows_arg<int32_t>(ids, "routing.ids", n, top_k);
  op.ids = own_ids;
  op.weights = rows_arg<float>(weights, "routing.weights", n, top_k);
  op.n = n;
  op.top_k = static_cast<int>(top_k);
  op.h = h;
  op.starts = rows_arg<int32_t>(starts, "routing.starts", num + 1, 1);
  op.active = rows_arg<int32_t>(active, "routing.active", num + 1, 1);
  op.routes = rows_arg<int32_t>(routes, "routing.routes", most_routes, 1);
  op.expert_token_counts = optional_arg<int64_t>(expert_token_counts, "expert_token_counts", 2 * num);
  op.x = rows_arg<float>(x, "x", n, down.rows);
  op.add = add;
  op.options = {activation_named(activation),
                limit,
                alpha,
                weighs_input,
                optional_arg<float>(gate_bias, "gate_bias", num * ff),
                optional_arg<float>(up_bias, "up_bias", num * ff),
                optional_arg<float>(down_bias, "down_bias", num * down.rows)};
  check_options(op.options);
  op.lora = expert_lora_arg(lora, op);
  parts_.fit(pool_, static_cast<int>(most_routes), down.rows);
  op.parts = parts_.data();
  if (down.order != nullptr) reject("down", "its order belongs into the rows of gate and up");
  if (!disk.is_none()) {
    if (gate.order != nullptr || up.order != nullptr) reject("disk", "columns in another order");
    return run_from_disk(op, own_ids, disk);
  }
  pool_.submit(SortRoutesOp{op});
  op.gate_input = gathered_by_route(op, gate, gathered_);
  op.up_input = up.order == gate.order && up.integer() == gate.integer()
                    ? op.gate_input
                    : gathered_by_route(op, up, gathered_up_);
  pool_.submit(op);
}

}  // namespace moeserve
