// moeserve.kernels._C.NgramTable: see ngram_table.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "ngrams/ngram_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pairs = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Part = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int64_t>;
using File = std::tuple<int, int64_t, int64_t, int64_t, int64_t>;
using Heads = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, int64_t>;
using Form = std::tuple<int, int64_t, int64_t, int64_t, float>;

std::shared_ptr<NgramTable> make(const std::vector<Part>& parts, const std::vector<File>& files,
                                 const Heads& heads, const Form& form, int64_t cached) {
  std::vector<RowPart> of_parts;
  for (const auto& [at, rows, stride, factor, modulus] : parts) {
    of_parts.push_back({reinterpret_cast<const uint8_t*>(at), rows, stride, factor, modulus});
  }
  std::vector<OpenFile> of_files;
  for (const auto& [fd, device, inode, bytes, changed_ns] : files) {
    of_files.push_back({fd, device, inode, bytes, changed_ns});
  }
  const auto& [multipliers, rows, offsets, end] = heads;
  const auto& [type, cols, bytes, block, scale] = form;
  return std::make_shared<NgramTable>(std::move(of_parts), std::move(of_files),
                                      NgramHeads{multipliers, rows, offsets, end},
                                      RowForm{type, cols, bytes, block, scale}, cached);
}

void check(const NgramTable& table, int64_t tokens, const Pairs& previous) {
  if (static_cast<int64_t>(previous.shape(0)) != tokens ||
      static_cast<int64_t>(previous.shape(1)) != table.before()) {
    throw std::invalid_argument("previous: [" + std::to_string(tokens) + ", " +
                                std::to_string(table.before()) + "] wanted");
  }
}

void take(NgramTable& table, const Ids& tokens, const Pairs& previous, const Bytes& out) {
  const int64_t n = static_cast<int64_t>(tokens.shape(0));
  check(table, n, previous);
  if (static_cast<int64_t>(out.shape(0)) != n * table.heads() ||
      static_cast<int64_t>(out.shape(1)) != table.form().bytes) {
    throw std::invalid_argument("out: rows of all heads wanted");
  }
  const int64_t number = table.begin();
  const nb::gil_scoped_release release;
  table.take(number, tokens.data(), previous.data(), n, out.data());
}

uintptr_t job(std::shared_ptr<NgramTable> table, uintptr_t tokens, const Pairs& previous, uintptr_t out) {
  const int64_t n = static_cast<int64_t>(previous.shape(0));
  check(*table, n, previous);
  return reinterpret_cast<uintptr_t>(new NgramJob{
      table,
      table->begin(),
      reinterpret_cast<const int32_t*>(tokens),
      {previous.data(), previous.data() + previous.size()},
      n,
      reinterpret_cast<float*>(out),
  });
}

}  // namespace

void bind_ngrams(nb::module_& m) {
  m.attr("NGRAM_JOB") = reinterpret_cast<uintptr_t>(&moeserve_ngram_job);
  m.def(
      "run_ngram_job", [](uintptr_t job) { moeserve_ngram_job(reinterpret_cast<void*>(job)); }, "job"_a,
      nb::call_guard<nb::gil_scoped_release>());
  nb::class_<NgramTable>(m, "NgramTable")
      .def_static("make", &make, "parts"_a, "files"_a, "heads"_a, "form"_a, "cached"_a)
      .def("take", &take, "tokens"_a, "previous"_a, "out"_a)
      .def("job", &job, "tokens"_a, "previous"_a, "out"_a)
      .def("take_failures", &NgramTable::take_failures, "but"_a)
      .def("take_counts", &NgramTable::take_counts);
}

}  // namespace moeserve
