#include "expert_cache/policy.h"

#include <algorithm>
#include <cmath>

namespace moeserve {
namespace {

constexpr double kKeep = 1.0 - 1.0 / 64;  // of the sums, a step
constexpr double kEvidence =
    4 * ExpertCachePolicy::kWatched;  // watched steps without which nothing is expected
constexpr double kDoubt = 2.0;        // standard deviations that chance may have added
constexpr uint32_t kNever = 0u - 2 * ExpertCachePolicy::kWatched;  // before the first step

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
}

void ExpertCachePolicy::observe(const uint8_t* used) {
  const size_t size = scores_.size();
  for (size_t i = 0; i < size; ++i) scores_[i] = scores_[i] * decay_ + static_cast<float>(used[i]);
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

const std::vector<ExpertMove>& ExpertCachePolicy::choose(const uint8_t* used, int64_t most, bool pays) {
  find_candidates(used);
  if (pays) {
    could_ = candidates_;
    const auto expected = values();
    std::erase_if(candidates_, [&](const Candidate& c) { return expected[c.band] < pays_; });
  }
  // Candidates are by layer, and by rank within it: of equal gains the first.
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

void ExpertCachePolicy::find_candidates(const uint8_t* used) {
  candidates_.clear();
  for (int layer = 0; layer < layers_; ++layer) {
    const int64_t first = static_cast<int64_t>(layer) * experts_;
    coming_.clear();
    going_.clear();
    for (int e = 0; e < experts_; ++e) {
      const int64_t i = first + e;
      if (!movable_[i]) continue;
      if (cached_[i]) {
        if (!used[i]) going_.emplace_back(scores_[i], e);
      } else if (used[i]) {
        coming_.emplace_back(-scores_[i], e);
      }
    }
    const size_t pairs = std::min(coming_.size(), going_.size());
    if (pairs == 0) continue;
    std::sort(coming_.begin(), coming_.end());
    std::partial_sort(going_.begin(), going_.begin() + static_cast<int64_t>(pairs), going_.end());
    for (size_t rank = 0; rank < pairs; ++rank) {
      const float gain = -coming_[rank].first - going_[rank].first;
      if (!(gain > 0.0f)) break;
      const auto band = std::lower_bound(kEdges.begin(), kEdges.end(), gain) - kEdges.begin();
      candidates_.push_back({layer, coming_[rank].second, going_[rank].second, gain, static_cast<int>(band)});
    }
  }
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
