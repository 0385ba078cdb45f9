// The extension module. Each bind_*.cpp and engine.cpp binds its own part.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace moeserve {
void bind_block_float(nb::module_& m);
void bind_compressed(nb::module_& m);
void bind_disk_experts(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_expert_cache(nb::module_& m);
void bind_formats(nb::module_& m);
void bind_handoff(nb::module_& m);
void bind_ngrams(nb::module_& m);
void bind_promotions(nb::module_& m);
void bind_sampling(nb::module_& m);
}  // namespace moeserve

NB_MODULE(_C, m) {
  moeserve::bind_engine(m);
  moeserve::bind_block_float(m);
  moeserve::bind_compressed(m);
  moeserve::bind_disk_experts(m);
  moeserve::bind_expert_cache(m);
  moeserve::bind_formats(m);
  moeserve::bind_handoff(m);
  moeserve::bind_ngrams(m);
  moeserve::bind_promotions(m);
  moeserve::bind_sampling(m);
}
