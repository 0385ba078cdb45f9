// Which experts a layer's slots in GPU memory hold: moeserve/placement/placement/expert_cache/policy.py, which specifies it, in the time that
// a step's host has. All layers in one call; the same decisions, to the bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moeserve {

// An expert takes the slot of another of its layer.
struct ExpertMove {
  int64_t layer, incoming, outgoing;
};

class ExpertCachePolicy {
 public:
  static constexpr uint32_t kWatched = 32;                                        // steps
  static constexpr std::array<float, 5> kEdges = {0.5f, 0.8f, 1.2f, 1.7f, 2.5f};  // of gains in score
  static constexpr int kBands = kEdges.size() + 1;

  // cached, movable: 0 or 1, [layers, experts].
  ExpertCachePolicy(int layers, int experts, const uint8_t* cached, const uint8_t* movable, float decay,
                    double pays);

  // A step used these experts, [layers, experts].
  void observe(const uint8_t* used);

  // At most `most` moves, those with the greatest gains; they count as done. used: the step's, observed. pays: only moves that
  // are expected to. Sorted by layer.
  const std::vector<ExpertMove>& choose(const uint8_t* used, int64_t most, bool pays);

  // What the step tells of exchanges, made or not: after `choose`, and when there is time.
  void learn(const uint8_t* used);

  // By one layer at a time, for a cache whose misses come at once, in the place of whom its owner chooses by `lowest`: the
  // experts that a step used, [experts].
  void observe_layer(int layer, const uint8_t* used);
  // Who of a layer has the lowest score among those that may go, [experts], of equal ones the first; -1: none may.
  int lowest(int layer, const uint8_t* may_go) const;
  float score(int layer, int expert) const { return scores_[static_cast<std::size_t>(layer) * experts_ + expert]; }

  const uint8_t* cached() const { return cached_.data(); }
  // Reads that a promotion is expected to spare the pool, at least, by the band of its gain.
  std::array<double, kBands> values() const;

 private:
  struct Candidate {
    int64_t layer, incoming, outgoing;
    float gain;
    int band;
  };
  void find_candidates(const uint8_t* used);
  // Takes the entry of going_ with the lowest score, of equal ones the first; -1: none is left.
  int take_lowest();
  void watch();
  bool is_watched(uint32_t since) const { return step_ - since <= kWatched; }

  const int layers_, experts_;
  const float decay_;
  const double pays_;
  std::vector<uint8_t> cached_, movable_;
  std::vector<float> scores_;
  // The step in which an expert could last have come, or gone for one that came; and the band of that.
  std::vector<uint32_t> came_, went_;
  std::vector<uint8_t> came_band_, went_band_;
  uint32_t step_ = 0;
  // Sums that decay: reads spared, reads seen of either expert, and steps for which an exchange was watched.
  std::array<double, kBands> spared_{}, seen_{}, watched_{};
  std::vector<Candidate> candidates_, could_;  // this step's candidates, and the candidates to be watched
  std::vector<uint8_t> missed_;                // [layers, experts]
  std::vector<std::pair<float, int>> coming_;  // of a layer: the score, negative, and the expert
  std::vector<int32_t> going_;                 // of a layer: each expert's score in bits, or kNone
  std::vector<ExpertMove> moves_;
};

}  // namespace moeserve
