// sampling.h gives the rules.
#include "sampling/filters.h"

#include "sampling/candidates.h"

namespace moeserve {
namespace {

// Temperature, top_k, min_p and top_p; each keeps the first tokens of the same order.
Survivors filter_plain(const float* x, int vocab, float max, const SampleParams& p, Scratch& s) {
  const double scale = M_LOG2E / p.temperature;
  float* weights = s.weights.get();
  double* sums = s.block_sum.get();
  const bool by_rank = p.top_k > 0 && p.top_k < vocab, by_min = p.min_p > 0, by_mass = p.top_p < 1;
  double mass = 0;
  if (!by_rank && !by_min) {
    s.passes->weigh(x, vocab, max, scale, weights, sums);
    if (!by_mass) return {nullptr, weights, vocab};
    mass = total(s, vocab);
  }
  // Tokens below `floor` are dropped: by min_p, or because all tokens with a probability under (1 - top_p) / vocab
  // together have less than 1 - top_p (a hundredth is left for rounding).
  const double smallest = by_min ? p.min_p : by_rank ? 0 : 0.99 * (1 - p.top_p) * mass / vocab;
  const double floor = max + p.temperature * std::log(smallest);
  int n = by_rank ? gather_top_k(x, vocab, p.top_k, floor, max, s) : gather(x, vocab, floor, s);
  s.passes->weigh(s.values.get(), n, max, scale, weights, sums);
  if (by_mass) {
    if (by_rank || by_min) mass = total(s, n);
    const uint32_t top = order(max);
    const auto weight = [weights](int i) { return weights[i]; };
    n = keep_head(n, s.values.get(), top, find_cut(s.values.get(), n, top, weight, p.top_p * mass), s);
    s.passes->weigh(s.values.get(), n, max, scale, weights, sums);
  }
  return {s.ids.get(), weights, n};
}

// The samplers in the request's order. All tokens count until the first sampler drops some.
class Chain {
 public:
  Chain(const float* x, int vocab, float max, const SampleParams& p, Scratch& s)
      : x_(x), vocab_(vocab), max_(max), p_(p), s_(s) {}

  Survivors run() {
    for (uint32_t order = p_.order; order != 0; order >>= 4) step(order & 15);
    if (!gathered_) {
      s_.passes->weigh(x_, vocab_, max_, scale(), s_.weights.get(), s_.block_sum.get());
      return {nullptr, s_.weights.get(), vocab_};
    }
    weigh();
    return {s_.ids.get(), s_.weights.get(), n_};
  }

 private:
  void step(uint32_t sampler) {
    switch (sampler) {
      case kTemperature:
        return temperature();
      case kTopNSigma:
        return top_n_sigma();
      case kTopK:
        return top_k(p_.top_k);
      case kTypicalP:
        return typical_p();
      case kMinP:
        return keep_from(max_ + heat_ * std::log(p_.min_p));
      case kTopP:
        return top_p();
      case kXtc:
        return xtc();
    }
  }

  double scale() const { return M_LOG2E / heat_; }

  void gather_from(double floor) {
    n_ = gather(x_, vocab_, floor, s_);
    gathered_ = true;
  }
  void gather_all() {
    if (!gathered_) gather_from(-INFINITY);
  }
  template <class Term>
  static double sum_of(int n, Term term) {
    constexpr int kLanes = 8;  // independent sums
    double lane[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) lane[j] += term(i + j);
    }
    for (; i < n; ++i) lane[0] += term(i);
    double all = 0;
    for (const double one : lane) all += one;
    return all;
  }
  // Returns the sum of the candidates' weights.
  double weigh() {
    s_.passes->weigh(s_.values.get(), n_, max_, scale(), s_.weights.get(), s_.block_sum.get());
    return total(s_, n_);
  }
  template <class Kept>
  void keep_if(Kept kept) {
    int n = 0;
    for (int i = 0; i < n_; ++i) {
      const bool stays = kept(i);
      s_.ids[n] = s_.ids[i];
      s_.values[n] = s_.values[i];
      n += stays;
    }
    n_ = n;
  }
  void keep_from(double floor) {
    if (!gathered_) return gather_from(floor);
    keep_if([&](int i) { return s_.values[i] >= floor; });
  }

  void temperature() {
    if (p_.temperature == 0) return top_k(1);
    heat_ = p_.temperature;
  }

  void top_k(int k) {
    if (!gathered_) {
      n_ = gather_top_k(x_, vocab_, k, -INFINITY, max_, s_);
      gathered_ = true;
    } else if (n_ > k) {
      const uint32_t top = order(max_);
      const Cut cut = find_cut(s_.values.get(), n_, top, [](int) { return 1.0; }, k);
      n_ = keep_head(n_, s_.values.get(), top, cut, s_);
    }
  }

  void top_p() {
    if (!gathered_) {
      s_.passes->weigh(x_, vocab_, max_, scale(), s_.weights.get(), s_.block_sum.get());
      const double mass = total(s_, vocab_);
      gather_from(max_ + heat_ * std::log(0.99 * (1 - p_.top_p) * mass / vocab_));
      weigh();
      return keep_mass(s_.values.get(), max_, p_.top_p * mass);
    }
    const double mass = weigh();
    keep_mass(s_.values.get(), max_, p_.top_p * mass);
  }

  // Keeps the candidates with the largest keys, until their weights sum to `mass`.
  void keep_mass(const float* keys, float largest, double mass) {
    const uint32_t top = order(largest);
    const auto weight = [this](int i) { return s_.weights[i]; };
    n_ = keep_head(n_, keys, top, find_cut(keys, n_, top, weight, mass), s_);
  }

  // A token's surprise minus the entropy equals the expected logit minus its own, over the temperature: the nearest to
  // that stay.
  void typical_p() {
    const float* x = gathered_ ? s_.values.get() : x_;
    const int n = gathered_ ? n_ : vocab_;
    s_.passes->weigh(x, n, max_, scale(), s_.weights.get(), s_.block_sum.get());
    const double mass = total(s_, n), center = expected(x, n) / mass;
    if (!gathered_) {
      // Tokens down to `floor` have the mass: a hundredth is left for rounding, as in filter_plain. So the tokens that
      // are no farther from `center` than the farthest of these suffice; keys are rounded to float.
      constexpr double kRounding = 1 + 1e-6;
      const double floor = heat_ * std::log(0.99 * (1 - p_.typical_p) * mass / vocab_);
      gather_from(max_ + center - kRounding * std::max(center - floor, -center));
      weigh();
    }
    float* keys = s_.edited.get();
    for (int i = 0; i < n_; ++i) {
      keys[i] = -static_cast<float>(std::fabs((static_cast<double>(s_.values[i]) - max_) - center));
    }
    keep_mass(keys, *std::max_element(keys, keys + n_), p_.typical_p * mass);
    find_max();
  }

  // Returns the sum of the logits less `max_`, each times its weight. -inf, whose weight is 0, counts as the float next to
  // it, without a branch: half of a row may be masked.
  double expected(const float* x, int n) const {
    constexpr uint32_t kMinusInfinity = std::bit_cast<uint32_t>(-std::numeric_limits<float>::infinity());
    const float* weights = s_.weights.get();
    return sum_of(n, [=, max = static_cast<double>(max_)](int i) {
      const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
      return weights[i] * (std::bit_cast<float>(bits - (bits == kMinusInfinity)) - max);
    });
  }

  void top_n_sigma() {
    gather_all();
    const float* v = s_.values.get();
    const double mean = sum_of(n_, [v](int i) { return static_cast<double>(v[i]); }) / n_;
    const double variance = sum_of(n_, [=](int i) { return (v[i] - mean) * (v[i] - mean); }) / n_;
    keep_from(max_ - p_.top_n_sigma * std::sqrt(variance));
  }

  // Drops all tokens that reach the threshold's probability except the last: the lowest logit, the highest id among
  // equals.
  void xtc() {
    gather_all();
    if (p_.xtc_threshold > 0.5 || uniform_at(p_.seed, p_.position, kXtcStream) >= p_.xtc_probability) return;
    const double least = p_.xtc_threshold * weigh();
    int last = -1, count = 0;
    for (int i = 0; i < n_; ++i) {
      if (s_.weights[i] < least) continue;
      ++count;
      if (last < 0 || s_.values[i] <= s_.values[last]) last = i;
    }
    if (count < 2) return;
    const int32_t spared = s_.ids[last];
    keep_if([&](int i) { return s_.weights[i] < least || s_.ids[i] == spared; });
    find_max();
  }

  void find_max() { max_ = *std::max_element(s_.values.get(), s_.values.get() + n_); }

  const float* x_;
  int vocab_;
  float max_;  // of the remaining candidates
  const SampleParams& p_;
  Scratch& s_;
  double heat_ = 1;  // divisor of the logits, once `temperature` has run
  bool gathered_ = false;
  int n_ = 0;  // number of candidates, once gathered
};

}  // namespace

Survivors filter(const float* x, int vocab, float max, const SampleParams& p, Scratch& s) {
  return p.order == 0 ? filter_plain(x, vocab, max, p, s) : Chain(x, vocab, max, p, s).run();
}

}  // namespace moeserve
