// moeserve.kernels._C.SamplerState: see sampler_state.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>

#include "pool/pool.h"
#include "sampling/sampler_state.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moeserve {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> view(const nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>& a) {
  return {a.data(), a.size()};
}
template <class Array>
auto view(const std::optional<Array>& a) {
  return a ? view(*a) : decltype(view(*a))();
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T> values) {
  auto* data = new std::vector<T>(std::move(values));
  nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {data->data(), {data->size()}, owner};
}

// (token_id, logprob, rank, top_ids, top_logprobs)
nb::tuple to_tuple(int32_t token, const LogprobResult& r) {
  return nb::make_tuple(token, r.logprob, r.rank, std::vector<int32_t>(r.top_ids, r.top_ids + r.num_top),
                        std::vector<double>(r.top_logprobs, r.top_logprobs + r.num_top));
}

// Divides rows among the pool's threads; without a pool, runs them one after another.
struct RowLoop {
  Pool* pool;

  template <class F>
  struct Op {
    F* each;
    int rows;
    void operator()(Team& team) const {
      team.for_units(rows, [&](int64_t row) { (*each)(static_cast<int>(row), team.thread()); });
    }
  };

  template <class F>
  void operator()(int rows, F&& each) const {
    if (pool && rows > 1) {
      pool->submit(Op<std::remove_reference_t<F>>{&each, rows});
      pool->wait();
    } else {
      for (int row = 0; row < rows; ++row) each(row, 0);
    }
  }
};

class Sampler {
 public:
  Sampler(int max_num_seqs, int vocab, Pool* pool, const std::optional<std::string>& isa)
      : rows_{pool}, state_(max_num_seqs, vocab, pool ? pool->threads() : 1, isa ? isa->c_str() : nullptr) {}

  void bind(int slot, uint64_t seed, int64_t min_tokens, int logprobs, const std::optional<Ids>& bias_ids,
            const std::optional<Floats>& bias_values, const std::optional<Ids>& stop_ids,
            const std::optional<Ids>& prompt, const std::optional<Ids>& output, uint32_t order,
            const std::optional<Ids>& dry_breakers, const nb::kwargs& settings) {
    if (logprobs > kMaxTopLogprobs) throw std::invalid_argument("logprobs: at most 20");
    SampleParams p;
    for (const auto& [name, value] : settings) set(p, nb::cast<std::string>(name), value);
    p.order = order;
    p.num_logprobs = logprobs;
    p.seed = seed;
    state_.bind(slot, p, min_tokens, view(bias_ids), view(bias_values), view(stop_ids), view(dry_breakers),
                view(prompt), view(output));
  }

  // {name: (type, default)}
  static nb::dict settings() {
    nb::dict found;
#define MOESERVE_DESCRIBE(type, member, unset) found[#member] = nb::make_tuple(#type, unset);
    MOESERVE_SAMPLER_SETTINGS(MOESERVE_DESCRIBE)
#undef MOESERVE_DESCRIBE
    return found;
  }

  nb::tuple sample(const Logits& logits, const Ids& slots, const std::optional<Bits>& masks,
                   const std::optional<Ids>& mask_of) {
    check(logits, slots.size());
    const SamplerState::Masks allowed = to_masks(slots.size(), masks, mask_of);
    std::vector<SampleResult> results(slots.size());
    {
      nb::gil_scoped_release unlocked;
      state_.sample(logits.data(), logits.stride(0), view(slots), allowed, results.data(), rows_);
    }
    std::vector<int32_t> tokens;
    nb::list logprobs;
    for (const SampleResult& r : results) {
      tokens.push_back(r.token_id);
      logprobs.append(r.logprobs.rank > 0 ? nb::object(to_tuple(r.token_id, r.logprobs)) : nb::none());
    }
    return nb::make_tuple(to_numpy(std::move(tokens)), logprobs);
  }

  nb::list logprobs(const Logits& logits, const Ids& targets, int top_n) {
    check(logits, targets.size());
    state_.check_ids(view(targets));
    if (top_n < 0 || top_n > kMaxTopLogprobs) throw std::invalid_argument("top_n is not in [0, 20]");
    std::vector<LogprobResult> results(targets.size());
    {
      nb::gil_scoped_release unlocked;
      rows_(static_cast<int>(targets.size()), [&](int row, int thread) {
        logprob_row(logits.data() + row * logits.stride(0), state_.vocab(), targets.data()[row], top_n,
                    results[row], state_.scratch(thread));
      });
    }
    nb::list out;
    for (size_t row = 0; row < results.size(); ++row) {
      out.append(results[row].rank > 0 ? nb::object(to_tuple(targets.data()[row], results[row]))
                                       : nb::none());
    }
    return out;
  }

  nb::tuple survivors(const Logits& logits, int slot) {
    check(logits, 1);
    state_.check_slot(slot);
    const Survivors s = filter_row(logits.data(), state_.vocab(), state_.params(slot), state_.scratch(0));
    std::vector<int32_t> ids(s.count);
    for (int i = 0; i < s.count; ++i) ids[i] = s.ids ? s.ids[i] : i;
    return nb::make_tuple(to_numpy(std::move(ids)),
                          to_numpy(std::vector<float>(s.weights, s.weights + s.count)));
  }

 private:
  static void set(SampleParams& p, const std::string& name, nb::handle value) {
#define MOESERVE_SET(type, member, unset) \
  if (name == #member) {                  \
    p.member = nb::cast<type>(value);     \
    return;                               \
  }
    MOESERVE_SAMPLER_SETTINGS(MOESERVE_SET)
#undef MOESERVE_SET
    throw nb::type_error(("there is no sampler setting " + name).c_str());
  }

  void check(const Logits& logits, size_t rows) const {
    if (logits.shape(0) != rows || logits.shape(1) != static_cast<size_t>(state_.vocab()) ||
        logits.stride(1) != 1) {
      throw std::invalid_argument("logits must be float32 [" + std::to_string(rows) + ", " +
                                  std::to_string(state_.vocab()) + "] with contiguous rows");
    }
  }

  static SamplerState::Masks to_masks(size_t rows, const std::optional<Bits>& masks,
                                      const std::optional<Ids>& mask_of) {
    if (masks.has_value() != mask_of.has_value())
      throw std::invalid_argument("masks and mask_of go together");
    if (!masks) return {};
    if (mask_of->size() != rows) throw std::invalid_argument("mask_of: one entry a row");
    for (const int32_t index : view(*mask_of)) {
      if (index >= static_cast<int64_t>(masks->shape(0)))
        throw std::invalid_argument("mask_of: no such mask");
    }
    return {reinterpret_cast<const uint32_t*>(masks->data()), static_cast<int>(masks->shape(1)),
            mask_of->data()};
  }

  RowLoop rows_;
  SamplerState state_;
};

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<Sampler>(m, "SamplerState", "Sampling state by request slot; see moeserve.kernels.sampling.")
      .def(nb::init<int, int, Pool*, const std::optional<std::string>&>(), "max_num_seqs"_a, "vocab"_a,
           "pool"_a = nb::none(), "isa"_a = nb::none(), nb::keep_alive<1, 4>())
      .def("bind", &Sampler::bind, "slot"_a, nb::kw_only(), "seed"_a = 0, "min_tokens"_a = 0,
           "logprobs"_a = -1, "bias_ids"_a = nb::none(), "bias_values"_a = nb::none(),
           "stop_ids"_a = nb::none(), "prompt"_a = nb::none(), "output"_a = nb::none(), "order"_a = 0,
           "dry_breakers"_a = nb::none(), "settings"_a)
      .def_static("settings", &Sampler::settings)
      .def("sample", &Sampler::sample, "logits"_a.noconvert(), "slots"_a, "masks"_a = nb::none(),
           "mask_of"_a = nb::none())
      .def("logprobs", &Sampler::logprobs, "logits"_a.noconvert(), "targets"_a, "top_n"_a)
      .def("survivors", &Sampler::survivors, "logits"_a.noconvert(), "slot"_a);
  m.def("uniform_at", &uniform_at, "seed"_a, "position"_a, "stream"_a = 0);
  m.def(
      "runs_by_lag", [](const Ids& text) { return to_numpy(runs_by_lag(view(text))); }, "text"_a,
      "How many of the text's last tokens stand in it once more, by how much earlier: int32 [len(text)].");
}

}  // namespace moeserve
