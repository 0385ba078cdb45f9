// moeserve.kernels._C.HostMaps and PromotionTables: see expert_cache/promotions.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "expert_cache/promotions.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

using Map = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Places = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Batch = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>;
static_assert(sizeof(Filling) == 4 * sizeof(int64_t) && sizeof(ExpertMove) == 3 * sizeof(int64_t));

// Reads a batch of fillings from Python and checks every number.
const Filling* fillings(const Numbers& batch, int64_t layers, int64_t experts) {
  if (batch.shape(1) != 4) throw std::invalid_argument("a batch is [fillings, 4]");
  const auto* rows = reinterpret_cast<const Filling*>(batch.data());
  for (size_t i = 0; i < batch.shape(0); ++i) {
    const Filling& f = rows[i];
    if (f.layer < 0 || f.layer >= layers || f.expert < 0 || f.expert >= experts || f.place < 0 || f.slot < 0)
      throw std::invalid_argument("no such filling");
  }
  return rows;
}

class BoundMaps {
 public:
  BoundMaps(const Map& slots, const Map& in_ram, const Places& places)
      : slots_(slots), in_ram_(in_ram), places_(places) {
    for (const size_t d : {0, 1})
      if (slots.shape(d) != in_ram.shape(d) || slots.shape(d) != places.shape(d))
        throw std::invalid_argument("maps of different shapes");
  }

  Batch start(const Numbers& moves) {
    if (moves.shape(1) != 3) throw std::invalid_argument("moves are [moves, 3]");
    const auto* rows = reinterpret_cast<const ExpertMove*>(moves.data());
    const auto layers = static_cast<int64_t>(slots_.shape(0)),
               experts = static_cast<int64_t>(slots_.shape(1));
    auto* data = new std::vector<Filling>();
    nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<Filling>*>(p); });
    const HostMaps maps = native();
    for (size_t i = 0; i < moves.shape(0); ++i) {
      const ExpertMove& m = rows[i];
      if (m.layer < 0 || m.layer >= layers || m.incoming < 0 || m.incoming >= experts || m.outgoing < 0 ||
          m.outgoing >= experts || maps.slots[m.layer * experts + m.outgoing] < 0 ||
          maps.places[m.layer * experts + m.incoming] < 0)
        throw std::invalid_argument("no such move");
      data->push_back(maps.start(m));
    }
    return {data->empty() ? nullptr : &data->front().layer, {data->size(), 4}, owner};
  }

  void land(const Numbers& batch) {
    const auto layers = static_cast<int64_t>(slots_.shape(0)),
               experts = static_cast<int64_t>(slots_.shape(1));
    const Filling* rows = fillings(batch, layers, experts);
    for (size_t i = 0; i < batch.shape(0); ++i) native().land(rows[i]);
  }

 private:
  HostMaps native() {
    return {slots_.data(), in_ram_.data(), places_.data(), static_cast<int64_t>(slots_.shape(1))};
  }

  Map slots_, in_ram_;
  Places places_;
};

class BoundTables {
 public:
  BoundTables(const Rows& host, std::vector<int64_t> kind_starts, const Numbers& source, const Numbers& each,
              const Numbers& offset, const Numbers& kind, const Numbers& target, const Numbers& target_each,
              const Numbers& bias_source, const Numbers& bias_target, const Numbers& bias_each,
              int64_t staging, int64_t staging_bytes, int64_t most, int64_t experts)
      : arrays_{source, each, offset, kind, target, target_each, bias_source, bias_target, bias_each},
        host_(host),
        layers_(static_cast<int64_t>(source.shape(0))),
        most_(most),
        experts_(experts),
        tables_(host_.data(), static_cast<int64_t>(host.shape(0)), static_cast<int64_t>(host.shape(1)),
                std::move(kind_starts),
                {source.data(), each.data(), offset.data(), kind.data(), target.data(), target_each.data(),
                 bias_source.data(), bias_target.data(), bias_each.data(),
                 static_cast<int64_t>(source.shape(1)) / PromotionTables::kMatrices,
                 static_cast<int64_t>(bias_source.shape(1)), staging, staging_bytes, experts}) {}

  void write(const Numbers& batch) {
    const Filling* rows = fillings(batch, layers_, experts_);
    if (static_cast<int64_t>(batch.shape(0)) > most_)
      throw std::invalid_argument("a batch larger than its tables");
    tables_.write(rows, static_cast<int64_t>(batch.shape(0)));
  }

 private:
  std::vector<Numbers> arrays_;  // keep alive the arrays that the tables point to
  Rows host_;
  const int64_t layers_, most_, experts_;
  PromotionTables tables_;
};

}  // namespace

void bind_promotions(nb::module_& m) {
  nb::class_<BoundMaps>(m, "HostMaps", "The host's maps of slots and of places in RAM; see ExpertMaps.")
      .def(nb::init<const Map&, const Map&, const Places&>(), "slots"_a, "in_ram"_a, "places"_a)
      .def("start", &BoundMaps::start, "moves"_a)
      .def("land", &BoundMaps::land, "batch"_a);
  nb::class_<BoundTables>(m, "PromotionTables", "See moeserve.models.loading.promotion_tables.")
      .def(nb::init<const Rows&, std::vector<int64_t>, const Numbers&, const Numbers&, const Numbers&,
                    const Numbers&, const Numbers&, const Numbers&, const Numbers&, const Numbers&,
                    const Numbers&, int64_t, int64_t, int64_t, int64_t>(),
           "host"_a, "kind_starts"_a, nb::kw_only(), "source"_a, "each"_a, "offset"_a, "kind"_a, "target"_a,
           "target_each"_a, "bias_source"_a, "bias_target"_a, "bias_each"_a, "staging"_a, "staging_bytes"_a,
           "most"_a, "experts"_a)
      .def("write", &BoundTables::write, "batch"_a);
}

}  // namespace moeserve
