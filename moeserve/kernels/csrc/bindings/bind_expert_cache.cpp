// moeserve.kernels._C.ExpertCachePolicy: see expert_cache/policy.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "expert_cache/policy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

using Mask = nb::ndarray<const bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// For one layer: sets used[i] to whether count i has changed, or to 0 if the layer has no slots. Returns how many it
// set to 1; `before` becomes `now`. Comparing the lower 32 bits suffices, because a step adds fewer than 2^32 tokens to
// a count.
int32_t find_used(const int64_t* now, int n, uint8_t has_slots, uint32_t* before, uint8_t* used) {
  int32_t sum = 0;
  for (int i = 0; i < n; ++i) {
    const auto count = static_cast<uint32_t>(now[i]);
    used[i] = static_cast<uint8_t>(count != before[i]) & has_slots;
    before[i] = count;
    sum += used[i];
  }
  return sum;
}

// Feeds the policy from counters that only increase: a step used the experts whose count has risen.
class CountedPolicy {
 public:
  CountedPolicy(const Mask& cached, const Mask& movable, float decay, double pays)
      : layers_(static_cast<int>(cached.shape(0))),
        experts_(static_cast<int>(cached.shape(1))),
        policy_(layers_, experts_, bytes(cached), bytes(check(movable)), decay, pays),
        before_(size(), 0),
        tokens_(size(), 0),
        used_(size(), 0),
        slots_(layers_, 0),
        has_slots_(layers_, 0) {
    for (size_t i = 0; i < size(); ++i) {
      const size_t layer = i / experts_;
      slots_[layer] += cached.data()[i] && movable.data()[i];
      has_slots_[layer] |= movable.data()[i];
    }
  }

  // Returns the number of experts that the step used.
  int64_t observe(const Counts& counts, bool streamed) {
    const int64_t* now = check(counts).data();
    if (streamed)
      for (size_t i = 0; i < size(); ++i) tokens_[i] = static_cast<uint32_t>(now[i]) - before_[i];
    int64_t wanted = 0;
    for (int layer = 0; layer < layers_; ++layer) {
      const size_t first = static_cast<size_t>(layer) * experts_;
      wanted +=
          find_used(now + first, experts_, has_slots_[layer], before_.data() + first, used_.data() + first);
    }
    if (streamed) keep_hottest();
    policy_.observe(used_.data());
    return wanted;
  }

  nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> choose(int64_t most, bool pays, std::optional<Mask> ready) {
    const uint8_t* which = ready ? bytes(check(*ready)) : nullptr;
    const auto& moves = policy_.choose(used_.data(), most, pays, which);
    auto* data = new std::vector<ExpertMove>(moves);
    nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<ExpertMove>*>(p); });
    static_assert(sizeof(ExpertMove) == 3 * sizeof(int64_t));
    return {data->empty() ? nullptr : &data->front().layer, {data->size(), 3}, owner};
  }

  void learn() { policy_.learn(used_.data()); }

  void adopt(const Mask& cached) { policy_.adopt(bytes(check(cached))); }

  void forget() {
    std::fill(before_.begin(), before_.end(), 0);
    policy_.forget();
  }

  // Returns a copy, [layers, experts].
  nb::ndarray<nb::numpy, float, nb::ndim<2>> scores() const {
    auto* data = new std::vector<float>(policy_.scores(), policy_.scores() + size());
    nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    return {data->data(), {static_cast<size_t>(layers_), static_cast<size_t>(experts_)}, owner};
  }

 private:
  size_t size() const { return static_cast<size_t>(layers_) * experts_; }

  template <class Array>
  const Array& check(const Array& array) const {
    if (static_cast<int>(array.shape(0)) != layers_ || static_cast<int>(array.shape(1)) != experts_)
      throw std::invalid_argument("expert cache: arrays of different shapes");
    return array;
  }

  static const uint8_t* bytes(const Mask& mask) { return reinterpret_cast<const uint8_t*>(mask.data()); }

  // A long prompt uses all experts; then only the most used ones of each layer count as used, as many as the layer has
  // slots.
  void keep_hottest() {
    std::vector<int> order(experts_);
    for (int layer = 0; layer < layers_; ++layer) {
      const int64_t first = static_cast<int64_t>(layer) * experts_;
      for (int e = 0; e < experts_; ++e) order[e] = e;
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return tokens_[first + a] > tokens_[first + b]; });
      for (int rank = slots_[layer]; rank < experts_; ++rank) used_[first + order[rank]] = 0;
    }
  }

  const int layers_, experts_;
  ExpertCachePolicy policy_;
  std::vector<uint32_t> before_, tokens_;  // the previous counts, and the tokens that the last step added
  std::vector<uint8_t> used_;
  std::vector<int> slots_;
  std::vector<uint8_t> has_slots_;
};

}  // namespace

void bind_expert_cache(nb::module_& m) {
  nb::class_<CountedPolicy>(m, "ExpertCachePolicy",
                            "Which experts the slots hold; moeserve/expert_cache specifies it.")
      .def(nb::init<const Mask&, const Mask&, float, double>(), "cached"_a, "movable"_a, "decay"_a, "pays"_a)
      .def("observe", &CountedPolicy::observe, "counts"_a, nb::kw_only(), "streamed"_a)
      .def("choose", &CountedPolicy::choose, "most"_a, nb::kw_only(), "pays"_a, "ready"_a = nb::none())
      .def("learn", &CountedPolicy::learn)
      .def("adopt", &CountedPolicy::adopt, "cached"_a)
      .def("scores", &CountedPolicy::scores)
      .def("forget", &CountedPolicy::forget);
}

}  // namespace moeserve
