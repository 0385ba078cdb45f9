// The list of quantization types, for the test that compares it with Python's table.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "formats/formats.h"

namespace nb = nanobind;

namespace moeserve {
namespace {

struct Row {
  const char* name;
  int number;
  QuantType type;
};

std::vector<Row> rows() {
  return {
#define MOESERVE_ROW(name, number, ...) {#name, number, kQuantType<Type::name>},
      MOESERVE_QUANT_TYPES(MOESERVE_ROW)
#undef MOESERVE_ROW
  };
}

nb::tuple to_tuple(const BitField& field) { return nb::make_tuple(field.at, field.width, field.bits); }

nb::tuple to_tuple(const ByteRun& run) { return nb::make_tuple(run.at, run.group, run.step); }

nb::tuple book(const Codebook& k) {
  const auto numbers = nb::make_tuple(k.entries, k.columns, k.most, k.high_bits, static_cast<int>(k.signs),
                                      static_cast<int>(k.scales), k.eighths);
  return nb::make_tuple(numbers, to_tuple(k.low), to_tuple(k.word), to_tuple(k.high));
}

nb::list trits(const QuantType& type) {
  nb::list runs;
  for (const TritRun& run : type.trits.runs) {
    if (run.width > 0) runs.append(nb::make_tuple(run.at, run.width, run.digits));
  }
  return runs;
}

std::vector<int> levels(const QuantType& type) {
  if (type.table == CodeTable::None) return {};
  const int8_t* first = kLevels[static_cast<int>(type.table)];
  return {first, first + type.levels()};
}

}  // namespace

void bind_formats(nb::module_& m) {
  nb::class_<Row>(m, "QuantType")
      .def_ro("name", &Row::name)
      .def_ro("number", &Row::number)
      .def_prop_ro("block_columns", [](const Row& r) { return r.type.block_cols; })
      .def_prop_ro("block_bytes", [](const Row& r) { return r.type.block_bytes; })
      .def_prop_ro("is_quantised", [](const Row& r) { return !r.type.is_float(); })
      .def_prop_ro("low", [](const Row& r) { return to_tuple(r.type.low); })
      .def_prop_ro("high", [](const Row& r) { return to_tuple(r.type.high); })
      .def_prop_ro("group", [](const Row& r) { return r.type.group; })
      .def_prop_ro("stored_scales", [](const Row& r) { return static_cast<int>(r.type.scales); })
      .def_prop_ro("halves_at", [](const Row& r) { return r.type.halves_at; })
      .def_prop_ro("octets_at", [](const Row& r) { return r.type.octets_at; })
      .def_prop_ro("octets", [](const Row& r) { return r.type.octets; })
      .def_prop_ro("offset", [](const Row& r) { return r.type.offset; })
      .def_prop_ro("e4m3", [](const Row& r) { return r.type.e4m3; })
      .def_prop_ro("book", [](const Row& r) { return book(r.type.book); })
      .def_prop_ro("trits", [](const Row& r) { return trits(r.type); })
      .def_prop_ro("levels", [](const Row& r) { return levels(r.type); });
  m.def("quant_types", &rows);
  m.def("set_codebook",
        [](int type, nb::ndarray<const int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> entries) {
          set_codebook(type, entries.data(), static_cast<int64_t>(entries.size()));
        });
}

}  // namespace moeserve
