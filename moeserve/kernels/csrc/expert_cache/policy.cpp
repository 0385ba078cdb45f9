#include "expert_cache/policy.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace moeserve {
namespace {

constexpr double kKeep = 1.0 - 1.0 / 64;  // factor of the decaying sums, per step
constexpr double kEvidence =
    4 * ExpertCachePolicy::kWatched;  // before this number of watched steps, no saving is predicted
constexpr double kDoubt = 2.0;        // standard deviations subtracted as possible luck
constexpr uint32_t kNever = 0u - 2 * ExpertCachePolicy::kWatched;  // before the first step
constexpr int32_t kNone = std::numeric_limits<int32_t>::max();  // instead of a score's bits: not a candidate

// These are free functions because compilers assume that bytes written through members may alias anything.
void find_missed(const uint8_t* used, const uint8_t* movable, const uint8_t* cached, size_t size,
                 uint8_t* missed) {
  for (size_t i = 0; i < size; ++i) missed[i] = used[i] & movable[i] & (cached[i] ^ 1);
}

// Writes the scores, as bits, of cached experts that may be replaced; kNone for all others. Scores are not negative, so
// the order of their bits is their order.
void find_going(const uint8_t* used, const uint8_t* movable, const uint8_t* cached, const float* scores,
                int n, int32_t* going) {
  for (int e = 0; e < n; ++e) {
    const int32_t mask = -static_cast<int32_t>(cached[e] & movable[e] & (used[e] ^ 1));
    going[e] = (std::bit_cast<int32_t>(scores[e]) & mask) | (kNone & ~mask);
  }
}

}  // namespace

ExpertCachePolicy::ExpertCachePolicy(int layers, int experts, const uint8_t* cached, const uint8_t* movable,
                                     float decay, double pays)
    : layers_(layers), experts_(experts), decay_(decay), pays_(pays) {
  const size_t size = static_cast<size_t>(layers) * experts;
  cached_.assign(cached, cached + size);
  movable_.assign(movable, movable + size);
  scores_.assign(size, 0.0f);
  came_.assign(size, kNever);
  went_.assign(size, kNever);
  came_band_.assign(size, 0);
  went_band_.assign(size, 0);
  missed_.assign(size, 0);
  going_.assign(experts, kNone);
}

void ExpertCachePolicy::observe(const uint8_t* used) {
  const size_t size = scores_.size();
  for (size_t i = 0; i < size; ++i) scores_[i] = scores_[i] * decay_ + static_cast<float>(used[i]);
}

void ExpertCachePolicy::observe_layer(int layer, const uint8_t* used) {
  float* scores = scores_.data() + static_cast<size_t>(layer) * experts_;
  for (int e = 0; e < experts_; ++e) scores[e] = scores[e] * decay_ + static_cast<float>(used[e]);
}

void ExpertCachePolicy::forget() {
  std::ranges::fill(scores_, 0.0f);
  std::ranges::fill(came_, step_ + kNever);
  std::ranges::fill(went_, step_ + kNever);
  spared_ = seen_ = watched_ = {};
  could_.clear();
}

int ExpertCachePolicy::lowest(int layer, const uint8_t* may_go) const {
  int found = -1;
  for (int e = 0; e < experts_; ++e) {
    if (may_go[e] && (found < 0 || score(layer, e) < score(layer, found))) found = e;
  }
  return found;
}

void ExpertCachePolicy::learn(const uint8_t* used) {
  ++step_;
  std::array<int64_t, kBands> more{}, fewer{}, watched{};
  for (size_t i = 0; i < scores_.size(); ++i) {
    if (is_watched(came_[i])) {
      ++watched[came_band_[i]];
      more[came_band_[i]] += used[i];
    }
    if (is_watched(went_[i])) fewer[went_band_[i]] += used[i];
  }
  for (int band = 0; band < kBands; ++band) {
    spared_[band] = kKeep * spared_[band] + static_cast<double>(more[band] - fewer[band]);
    seen_[band] = kKeep * seen_[band] + static_cast<double>(more[band] + fewer[band]);
    watched_[band] = kKeep * watched_[band] + static_cast<double>(watched[band]);
  }
  watch();
}

std::array<double, ExpertCachePolicy::kBands> ExpertCachePolicy::values() const {
  std::array<double, kBands> out{};
  for (int band = 0; band < kBands; ++band) {
    if (watched_[band] < kEvidence) continue;
    out[band] = kWatched * (spared_[band] - kDoubt * std::sqrt(seen_[band])) / watched_[band];
  }
  return out;
}

const std::vector<ExpertMove>& ExpertCachePolicy::choose(const uint8_t* used, int64_t most, bool pays,
                                                         const uint8_t* ready) {
  find_candidates(used);
  if (pays) {
    could_ = candidates_;
    const auto expected = values();
    std::erase_if(candidates_, [&](const Candidate& c) { return expected[c.band] < pays_; });
  }
  if (ready != nullptr) {
    std::erase_if(candidates_, [&](const Candidate& c) {
      return ready[static_cast<size_t>(c.layer) * experts_ + static_cast<size_t>(c.incoming)] == 0;
    });
  }
  // Candidates are in order of layer and rank, so that the first wins among equal gains.
  std::stable_sort(candidates_.begin(), candidates_.end(),
                   [](const Candidate& a, const Candidate& b) { return a.gain > b.gain; });
  if (static_cast<int64_t>(candidates_.size()) > most) candidates_.resize(static_cast<size_t>(most));
  std::stable_sort(candidates_.begin(), candidates_.end(),
                   [](const Candidate& a, const Candidate& b) { return a.layer < b.layer; });
  moves_.clear();
  for (const Candidate& c : candidates_) {
    cached_[c.layer * experts_ + c.incoming] = 1;
    cached_[c.layer * experts_ + c.outgoing] = 0;
    moves_.push_back({c.layer, c.incoming, c.outgoing});
  }
  return moves_;
}

// Passes over all experts have no branches; only the few experts that the step missed are handled one by one.
void ExpertCachePolicy::find_candidates(const uint8_t* used) {
  candidates_.clear();
  find_missed(used, movable_.data(), cached_.data(), scores_.size(), missed_.data());
  for (int layer = 0; layer < layers_; ++layer) {
    const int64_t first = static_cast<int64_t>(layer) * experts_;
    coming_.clear();
    const uint8_t *begin = missed_.data() + first, *end = begin + experts_, *at = begin;
    while ((at = static_cast<const uint8_t*>(std::memchr(at, 1, end - at))) != nullptr) {
      const auto expert = static_cast<int>(at++ - begin);
      coming_.emplace_back(-scores_[first + expert], expert);
    }
    if (coming_.empty()) continue;
    std::sort(coming_.begin(), coming_.end());
    find_going(used + first, movable_.data() + first, cached_.data() + first, scores_.data() + first,
               experts_, going_.data());
    for (const auto& [score, incoming] : coming_) {
      const int outgoing = take_lowest();
      if (outgoing < 0) break;
      const float gain = -score - scores_[first + outgoing];
      if (!(gain > 0.0f)) break;
      const auto band = std::lower_bound(kEdges.begin(), kEdges.end(), gain) - kEdges.begin();
      candidates_.push_back({layer, incoming, outgoing, gain, static_cast<int>(band)});
    }
  }
}

int ExpertCachePolicy::take_lowest() {
  int32_t lowest = kNone;
  for (const int32_t score : going_) lowest = std::min(lowest, score);
  if (lowest == kNone) return -1;
  const auto at = std::find(going_.begin(), going_.end(), lowest);
  *at = kNone;
  return static_cast<int>(at - going_.begin());
}

void ExpertCachePolicy::watch() {
  for (const Candidate& c : could_) {
    const int64_t in = c.layer * experts_ + c.incoming, out = c.layer * experts_ + c.outgoing;
    const bool is_known = is_watched(came_[in]) && came_band_[in] >= c.band;
    if (is_known || is_watched(went_[out])) continue;
    came_[in] = went_[out] = step_;
    came_band_[in] = went_band_[out] = static_cast<uint8_t>(c.band);
  }
  could_.clear();
}

}  // namespace moeserve
