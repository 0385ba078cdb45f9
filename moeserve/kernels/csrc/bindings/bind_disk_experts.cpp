// moeserve.kernels._C.DiskExperts: see expert_disk/disk_experts.h. The typed wrapper is moeserve/kernels/disk_experts.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "expert_disk/disk_experts.h"
#include "stream.h"
#include "tensor_arg.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

constexpr int kMostThreads = 256;

using Marks = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// (matrix, file, offset, stride) of a tuple.
DiskPart disk_part(const nb::tuple& part, size_t files, int experts) {
  const DiskPart out{nb::cast<const Matrix*>(part[0]), nb::cast<int>(part[1]), nb::cast<int64_t>(part[2]),
                     nb::cast<int64_t>(part[3])};
  const auto bytes = static_cast<int64_t>(row_bytes(out.slots->type, out.slots->cols)) * out.slots->rows;
  if (!out.slots->packed() || out.slots->experts > experts)
    reject("layers", "slots, no more than experts, wanted");
  if (out.file < 0 || static_cast<size_t>(out.file) >= files) reject("layers", "no such file");
  if (out.offset < 0 || out.stride < bytes) reject("layers", "experts that overlap in the file");
  return out;
}

// layers: one entry per layer: None, or (number of experts, three parts, pinned experts, each expert's number in the
// file, or an empty list).
std::vector<DiskLayer> disk_layers(const nb::list& layers, size_t files) {
  std::vector<DiskLayer> out;
  for (const nb::handle layer : layers) {
    DiskLayer& made = out.emplace_back();
    if (layer.is_none()) continue;
    const auto given = nb::cast<nb::tuple>(layer);
    const auto parts = nb::cast<nb::list>(given[1]);
    made.experts = nb::cast<int>(given[0]);
    made.pinned = nb::cast<std::vector<int32_t>>(given[2]);
    made.in_file = nb::cast<std::vector<int32_t>>(given[3]);
    if (!made.in_file.empty() && made.in_file.size() != static_cast<size_t>(made.experts))
      reject("layers", "a number for each expert wanted");
    for (const int32_t number : made.in_file) {
      if (number < 0) reject("layers", "numbers of experts from 0 on wanted");
    }
    if (made.experts < 1 || parts.size() != made.parts.size())
      reject("layers", "three parts of experts wanted");
    for (size_t i = 0; i < made.parts.size(); ++i) {
      made.parts[i] = disk_part(nb::cast<nb::tuple>(parts[i]), files, made.experts);
      if (made.parts[i].slots->experts != made.parts[0].slots->experts)
        reject("layers", "as many slots each wanted");
    }
    for (size_t i = 0; i < made.pinned.size(); ++i) {
      const int before = i == 0 ? -1 : made.pinned[i - 1];
      if (made.pinned[i] <= before || made.pinned[i] >= made.experts)
        reject("layers", "pinned experts in ascending order wanted");
    }
    if (static_cast<int64_t>(made.pinned.size()) >= made.parts[0].slots->experts)
      reject("layers", "fewer pinned experts than slots wanted");
  }
  return out;
}

void make_disk_experts(DiskExperts* at, Stream& stream, const std::vector<std::string>& paths,
                       const nb::list& layers, int threads, int64_t piece_bytes, float decay,
                       double patience) {
  if (threads < 1 || threads > kMostThreads) reject("threads", "1 to " + std::to_string(kMostThreads));
  if (piece_bytes < 1) reject("piece_bytes", "1 or more wanted");
  std::vector<DiskLayer> made = disk_layers(layers, paths.size());
  const nb::gil_scoped_release release;
  try {
    new (at) DiskExperts(stream.pool(), stream.kernels(), paths, std::move(made), threads, piece_bytes, decay,
                         patience);
  } catch (const std::system_error& error) {
    const nb::gil_scoped_acquire acquire;
    errno = error.code().value();
    PyErr_SetString(PyExc_OSError, error.what());
    throw nb::python_error();
  }
}

}  // namespace

int64_t num_experts_arg(const nb::object& disk, int64_t held) {
  return disk.is_none() ? held : nb::cast<int64_t>(disk.attr("num_experts"));
}

void run_from_disk(const ExpertsOp& op, int32_t* ids, const nb::object& disk) {
  auto& experts = nb::cast<DiskExperts&>(disk.attr("native"));
  const int layer = nb::cast<int>(disk.attr("layer"));
  if (experts.experts_of(layer) != num_experts_arg(disk, 0)) reject("disk", "another number of experts");
  const nb::object ahead = disk.attr("ahead");
  Guess guess;
  if (!ahead.is_none()) {
    const TensorArg a = tensor_arg(ahead, "disk.ahead", Element::kInt32);
    guess.ids = rows_arg<int32_t>(ahead, "disk.ahead", op.n, a.cols);
    guess.count = static_cast<int>(op.n * a.cols);
    guess.layer = nb::cast<int>(disk.attr("ahead_layer"));
    experts.experts_of(guess.layer);  // throws for a layer without experts on disk
  }
  const nb::gil_scoped_release release;
  experts.run(op, layer, ids, guess);
}

std::unique_ptr<Matrix> Stream::slots(int type, int64_t rows, int64_t cols, int64_t count) {
  return make_matrix(row_bytes(type, cols) * rows * count, type, rows, cols, count, nullptr);
}

void bind_disk_experts(nb::module_& m) {
  nb::class_<DiskCounts>(m, "DiskCounts")
      .def_ro("hits", &DiskCounts::hits)
      .def_ro("misses", &DiskCounts::misses)
      .def_ro("bytes", &DiskCounts::bytes)
      .def_ro("waited_us", &DiskCounts::waited_us)
      .def_ro("busy_us", &DiskCounts::busy_us)
      .def_ro("predicted", &DiskCounts::predicted)
      .def_ro("predicted_right", &DiskCounts::predicted_right)
      .def_ro("errors", &DiskCounts::errors);
  nb::class_<DiskExperts>(m, "DiskExperts")
      .def("__init__", &make_disk_experts, "stream"_a, "paths"_a, "layers"_a, "threads"_a, "piece_bytes"_a,
           "decay"_a, "patience"_a, nb::keep_alive<1, 2>())
      .def("take_failures", &DiskExperts::take_failures)
      .def("counts", &DiskExperts::counts)
      .def("hold", &DiskExperts::hold, "layer"_a, "expert"_a)
      .def("release", &DiskExperts::release, "layer"_a, "expert"_a)
      .def(
          "mark_holdable",
          [](DiskExperts& disk, int layer, const Marks& marks) {
            if (marks.size() < static_cast<size_t>(disk.experts_of(layer)))
              reject("marks", "one for each expert wanted");
            disk.mark_holdable(layer, reinterpret_cast<uint8_t*>(marks.data()));
          },
          "layer"_a, "marks"_a.noconvert())
      .def(
          "mark_absent",
          [](DiskExperts& disk, int layer, const Marks& marks) {
            if (static_cast<int64_t>(marks.size()) <= disk.largest_number(layer))
              reject("marks", "one for each expert of the file wanted");
            disk.mark_absent(layer, reinterpret_cast<uint8_t*>(marks.data()));
          },
          "layer"_a, "marks"_a.noconvert())
      .def_prop_ro("bytes", &DiskExperts::bytes)
      .def_prop_ro("patience", &DiskExperts::patience);
  nb::class_<ReadAhead>(m, "ReadAhead")
      .def(nb::init<int>(), "layers"_a)
      .def("pause_begins", &ReadAhead::pause_begins, "layer"_a, "now"_a)
      .def("pause_ends", &ReadAhead::pause_ends, "layer"_a, "now"_a)
      .def("guessed", &ReadAhead::guessed, "count"_a, "right"_a)
      .def("bytes_worth_reading", &ReadAhead::bytes_worth_reading, "layer"_a, "rate"_a, "piece"_a);
}

}  // namespace moeserve
