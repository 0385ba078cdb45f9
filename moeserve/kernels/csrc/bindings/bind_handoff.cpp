// Python bindings of the hand-off. Addresses are plain integers; moeserve/kernels/handoff declares the shapes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "handoff/handoff.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

Handoff::Slot make_slot(const Activations& y, Address ids, Address weights, Address result) {
  return {y, at<const int32_t>(ids), at<const float>(weights), at<float>(result)};
}

using Mask = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t expert_reads(const Handoff& handoff, const Mask& layers) {
  if (layers.size() != handoff.layers())
    throw std::invalid_argument("layers: one entry for each layer wanted");
  return handoff.expert_reads(reinterpret_cast<const uint8_t*>(layers.data()));
}

}  // namespace

void bind_handoff(nb::module_& m) {
  using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<Handoff::Layer>(m, "HandoffLayer")
      .def(
          "__init__",
          [](Handoff::Layer* l, const Matrix* gate, const Matrix* up, const Matrix* down,
             Address expert_token_counts, const std::string& activation, float limit, float alpha,
             Address gate_bias, Address up_bias, Address down_bias) {
            const ExpertOptions options{activation_named(activation),
                                        limit,
                                        alpha,
                                        false,
                                        at<const float>(gate_bias),
                                        at<const float>(up_bias),
                                        at<const float>(down_bias)};
            check_options(options);
            new (l) Handoff::Layer{gate, up, down, at<int64_t>(expert_token_counts), options};
          },
          "gate"_a.none(), "up"_a.none(), "down"_a.none(), "expert_token_counts"_a, "activation"_a = "silu",
          "limit"_a = 0.0f, "alpha"_a = 0.0f, "gate_bias"_a = 0, "up_bias"_a = 0, "down_bias"_a = 0);
  nb::class_<Handoff::Slot>(m, "HandoffSlot")
      .def(
          "__init__",
          [](Handoff::Slot* s, const Activations& y, Address ids, Address weights, Address result) {
            new (s) Handoff::Slot(make_slot(y, ids, weights, result));
          },
          "y"_a, "ids"_a, "weights"_a, "result"_a);
  nb::class_<Handoff> handoff(m, "Handoff");
  handoff
      .def(
          "__init__",
          [](Handoff* self, Stream& stream, const std::vector<Handoff::Layer>& layers, Address requests,
             Address answers, const Handoff::Slot& even, const Handoff::Slot& odd, const Activations& h,
             Address starts, Address active, Address routes, int max_tokens, int top_k, double timeout_s,
             DiskExperts* disk) {
            new (self)
                Handoff(&stream.kernels(), stream.pool(), layers, at<uint8_t>(requests), at<uint8_t>(answers),
                        {even, odd}, {h, at<int32_t>(starts), at<int32_t>(active), at<int32_t>(routes)},
                        max_tokens, top_k, timeout_s, disk);
          },
          "stream"_a, "layers"_a, "requests"_a, "answers"_a, "even"_a, "odd"_a, "h"_a, "starts"_a, "active"_a,
          "routes"_a, "max_tokens"_a, "top_k"_a, "timeout_s"_a, "disk"_a.none() = nb::none(),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 15>())
      .def("begin", &Handoff::begin, ReleaseGil())
      .def("expert_reads", &expert_reads, "layers"_a.noconvert())
      .def("error", &Handoff::error)
      .def("abandon", &Handoff::abandon, ReleaseGil(), "why"_a);
  handoff.attr("FLAG_BYTES") = Handoff::kFlagBytes;
}

}  // namespace moeserve
