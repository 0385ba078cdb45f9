// Python's view of the CPU pool: moeserve.kernels._C.Stream. Addresses are plain integers (Tensor.data_ptr());
// the typed wrapper that checks shapes is moeserve/kernels/cpu_stream.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

// Throws std::out_of_range (IndexError) unless all ids are in [0, count).
void check_ids(const char* what, const int32_t* ids, int n, int64_t count) {
  const auto* bad = std::find_if(ids, ids + n, [count](int32_t id) { return id < 0 || id >= count; });
  if (bad == ids + n) return;
  throw std::out_of_range(std::string(what) + " " + std::to_string(*bad) + " is not in [0, " +
                          std::to_string(count) + ")");
}

// Weights that share an input: one operation, one pass over the activations (Q, K and V).
struct LinearGroup {
  std::vector<const Matrix*> matrices;
};

const Kernels* require_kernels(const std::string& isa) {
  const Kernels* k = select_kernels(isa.empty() ? nullptr : isa.c_str());
  if (k == nullptr) throw std::invalid_argument("this CPU or this build has no '" + isa + "' kernels");
  return k;
}

std::vector<Place> to_places(const std::vector<std::pair<int, std::vector<int>>>& pairs) {
  if (pairs.empty()) throw std::invalid_argument("at least one thread");
  std::vector<Place> places;
  for (const auto& [node, cpus] : pairs) {
    const int expected = places.empty() ? 0 : places.back().node;
    if (node != expected && (places.empty() || node != expected + 1)) {
      throw std::invalid_argument("nodes count from 0, a node's threads side by side");
    }
    places.push_back({node, cpus});
  }
  return places;
}

class Stream {
 public:
  Stream(const std::vector<std::pair<int, std::vector<int>>>& places, const std::string& isa)
      : kernels_(require_kernels(isa)), pool_(to_places(places)) {}

  const char* isa() const { return kernels_->name; }
  Pool& pool() { return pool_; }
  void wait() { pool_.wait(); }

  std::unique_ptr<Matrix> pack(Address source, int type, int64_t rows, int64_t cols, int64_t experts) {
    auto m = make_matrix(type, rows, cols, experts, nullptr);
    pool_.submit(PackOp{kernels_, at<const uint8_t>(source), m.get()});
    pool_.wait();
    return m;
  }
  std::unique_ptr<Matrix> view(Address source, int type, int64_t rows, int64_t cols, int64_t experts) {
    return make_matrix(type, rows, cols, experts, at<const uint8_t>(source));
  }
  void embed(Address table, int type, int64_t rows, Address ids, int n, int64_t cols, Address x) {
    check_ids("token id", at<const int32_t>(ids), n, rows);
    pool_.submit(EmbedOp{at<const uint8_t>(table), type, at<const int32_t>(ids), n, cols, at<float>(x)});
  }
  void norm(Address x, Address w, float eps, Address rows, int n, const Activations& y) {
    pool_.submit(
        NormOp{kernels_, at<const float>(x), at<const float>(w), eps, at<const int32_t>(rows), n, y});
  }
  void linear(const Activations& x, int n, const LinearGroup& group, const std::vector<Address>& out,
              bool add) {
    LinearOp op{kernels_, x, n, static_cast<int>(group.matrices.size()), {}, {}, add};
    for (int j = 0; j < op.count; ++j) {
      op.w[j] = group.matrices[j];
      op.out[j] = at<float>(out[j]);
    }
    pool_.submit(op);
  }
  void rope_store(Address q, Address k, Address v, Address q_norm, Address k_norm, float eps, Address cos,
                  Address sin, Address slots, Address key_pool, Address value_pool, int64_t num_slots, int n,
                  int heads, int kv_heads, int dim) {
    check_ids("KV slot", at<const int32_t>(slots), n, num_slots);
    pool_.submit(RopeStoreOp{kernels_, at<float>(q), at<float>(k), at<const float>(v),
                             at<const float>(q_norm), at<const float>(k_norm), eps, at<const float>(cos),
                             at<const float>(sin), at<const int32_t>(slots), at<uint16_t>(key_pool),
                             at<uint16_t>(value_pool), n, heads, kv_heads, dim});
  }
  void attention(AttentionPlan& plan, Address q, Address key_pool, Address value_pool, const Activations& out,
                 int heads, int kv_heads, int dim) {
    pool_.submit(AttentionOp{kernels_, &plan, at<const float>(q), at<const uint16_t>(key_pool),
                             at<const uint16_t>(value_pool), out, heads, kv_heads, dim});
  }
  void route(Address logits, int n, int experts, int top_k, Address ids, Address weights) {
    pool_.submit(RouteOp{at<const float>(logits), n, experts, top_k, at<int32_t>(ids), at<float>(weights)});
  }
  void experts(const Matrix& gate, const Matrix& up, const Matrix& down, const Activations& y, Address ids,
               Address weights, int n, int top_k, const Activations& h, Address starts, Address active,
               Address routes, Address heat, Address x) {
    parts_.fit(pool_, n * top_k, down.rows);
    pool_.submit(ExpertsOp{kernels_, &gate, &up, &down, y, at<const int32_t>(ids), at<const float>(weights),
                           n, top_k, h, at<int32_t>(starts), at<int32_t>(active), at<int32_t>(routes),
                           at<int64_t>(heat), at<float>(x), true, parts_.data()});
  }
  void read(const Matrix& matrix) { pool_.submit(ReadOp{&matrix}); }

 private:
  std::unique_ptr<Matrix> make_matrix(int type, int64_t rows, int64_t cols, int64_t experts,
                                      const uint8_t* file_rows) {
    if (type_info(type).name == nullptr || cols % type_info(type).block_cols != 0) {
      throw std::invalid_argument("unsupported type or ragged row");
    }
    return std::make_unique<Matrix>(type, rows, cols, experts, pool_.nodes(), file_rows);
  }

  const Kernels* kernels_;
  Parts parts_;  // before the pool, whose last operations use it
  Pool pool_;
};

LinearGroup make_group(const std::vector<const Matrix*>& matrices) {
  if (matrices.empty() || matrices.size() > LinearOp::kMost)
    throw std::invalid_argument("one to three matrices");
  return {matrices};
}

}  // namespace

void bind_engine(nb::module_& m) {
  using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
  m.def("quantized_row_bytes", &quantized_row_bytes, "cols"_a);
  m.def(
      "dequantize_row",
      [](int type, Address row, int64_t cols, Address out) {
        dequantize_row(type, at<const uint8_t>(row), cols, at<float>(out));
      },
      "type"_a, "row"_a, "cols"_a, "out"_a, "One row of GGUF blocks to float32; the scalar specification.");

  nb::class_<Matrix>(m, "Matrix")
      .def_ro("type", &Matrix::type)
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols)
      .def_ro("experts", &Matrix::experts)
      .def_ro("bytes", &Matrix::bytes)
      .def_prop_ro("integer", &Matrix::integer)
      .def_prop_ro("address", [](const Matrix& m) { return reinterpret_cast<Address>(m.begin()); });
  nb::class_<LinearGroup>(m, "LinearGroup")
      .def(
          "__init__",
          [](LinearGroup* g, const std::vector<const Matrix*>& ms) { new (g) LinearGroup(make_group(ms)); },
          "matrices"_a, nb::keep_alive<1, 2>());
  nb::class_<Activations>(m, "Activations")
      .def(
          "__init__",
          [](Activations* a, Address f32, Address q8, int64_t cols) {
            new (a) Activations{at<float>(f32), at<uint8_t>(q8), cols};
          },
          "f32"_a, "q8"_a, "cols"_a)
      .def_ro("cols", &Activations::cols);
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<>())
      .def("build",
           [](AttentionPlan& p, int sequences, Address row, Address count, Address position, Address req_slot,
              Address table, int64_t rows, int64_t stride, int heads, int kv_heads, int dim, int threads) {
             p.build(sequences, at<const int32_t>(row), at<const int32_t>(count), at<const int32_t>(position),
                     at<const int32_t>(req_slot), at<const int32_t>(table), rows, stride, heads, kv_heads,
                     dim, threads);
           });

  nb::class_<Pool>(m, "Pool");
  nb::class_<Stream>(m, "Stream")
      .def(nb::init<const std::vector<std::pair<int, std::vector<int>>>&, const std::string&>(), "places"_a,
           "isa"_a = "")
      .def_prop_ro("isa", &Stream::isa)
      .def_prop_ro("threads", [](Stream& s) { return s.pool().threads(); })
      .def_prop_ro(
          "pool", [](Stream& s) -> Pool& { return s.pool(); }, nb::rv_policy::reference_internal)
      .def("wait", &Stream::wait, ReleaseGil())
      .def("pack", &Stream::pack, ReleaseGil(), "source"_a, "type"_a, "rows"_a, "cols"_a, "experts"_a)
      .def("view", &Stream::view, "source"_a, "type"_a, "rows"_a, "cols"_a, "experts"_a)
      .def("embed", &Stream::embed)
      .def("norm", &Stream::norm)
      .def("linear", &Stream::linear)
      .def("rope_store", &Stream::rope_store)
      .def("attention", &Stream::attention)
      .def("route", &Stream::route)
      .def("experts", &Stream::experts)
      .def("read", &Stream::read);
}

}  // namespace moeserve
