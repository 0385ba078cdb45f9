// Chooses which experts each layer's slots in GPU memory hold. moeserve/placement/expert_cache/policy.py is the
// specification; this class takes the same decisions, bit for bit, for all layers in one call, fast enough to run
// between steps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moeserve {

// Expert `incoming` takes the slot of expert `outgoing`, of the same layer.
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

  // Records that a step used these experts: 0 or 1, [layers, experts].
  void observe(const uint8_t* used);

  // Returns at most `most` moves, those with the greatest gains, sorted by layer; they count as done. used: as passed
  // to `observe` for this step. pays: only moves that are expected to save reads.
  // ready: 0 or 1, [layers, experts]: those that can be promoted now; nullptr: all.
  const std::vector<ExpertMove>& choose(const uint8_t* used, int64_t most, bool pays,
                                        const uint8_t* ready = nullptr);

  // Learns from the step what past moves, made or only considered, have saved. Call it after `choose`, when there is
  // time.
  void learn(const uint8_t* used);

  // Takes over exchanges that others have made. cached: 0 or 1, [layers, experts]: what the slots hold now.
  void adopt(const uint8_t* cached) { cached_.assign(cached, cached + cached_.size()); }

  // Forgets all use of experts so far; the slots keep theirs.
  void forget();

  // Like `observe`, for one layer, for a cache that loads missing experts at once; its owner chooses the experts to
  // replace by `lowest`. used: the experts that a step used, [experts].
  void observe_layer(int layer, const uint8_t* used);
  // Returns the expert with the lowest score among the layer's experts that may be replaced, [experts]; the first of
  // equal ones; -1 if none may.
  int lowest(int layer, const uint8_t* may_go) const;
  float score(int layer, int expert) const {
    return scores_[static_cast<std::size_t>(layer) * experts_ + expert];
  }

  const float* scores() const { return scores_.data(); }  // [layers, experts]
  const uint8_t* cached() const { return cached_.data(); }
  // The reads that a promotion is expected to save the pool, a lower bound, by band of gain.
  std::array<double, kBands> values() const;

 private:
  struct Candidate {
    int64_t layer, incoming, outgoing;
    float gain;
    int band;
  };
  void find_candidates(const uint8_t* used);
  // Removes the entry of going_ with the lowest score, the first among equals. Returns -1 if none is left.
  int take_lowest();
  void watch();
  bool is_watched(uint32_t since) const { return step_ - since <= kWatched; }

  const int layers_, experts_;
  const float decay_;
  const double pays_;
  std::vector<uint8_t> cached_, movable_;
  std::vector<float> scores_;
  // By expert: the step in which it could last have been promoted or evicted, and the band of that move.
  std::vector<uint32_t> came_, went_;
  std::vector<uint8_t> came_band_, went_band_;
  uint32_t step_ = 0;
  // Decaying sums: reads saved, reads of either expert, and steps in which a move was watched.
  std::array<double, kBands> spared_{}, seen_{}, watched_{};
  std::vector<Candidate> candidates_, could_;  // this step's candidates, and the candidates to be watched
  std::vector<uint8_t> missed_;                // [layers, experts]
  std::vector<std::pair<float, int>> coming_;  // of a layer: negative score, and expert
  std::vector<int32_t> going_;                 // of a layer: each expert's score in bits, or kNone
  std::vector<ExpertMove> moves_;
};

}  // namespace moeserve
