// How many bytes of guessed experts are worth reading before a layer asks for its own.
//
// Between the end of a layer's reads and the next layer's request the disk is idle for W seconds, in which reading
// guessed experts costs nothing. A read that is still under way when the request comes delays it: by nothing if the
// guess was right (its bytes are needed), by the rest of the read if it was wrong. So guesses get what the disk reads
// in W. A single piece that takes longer, R > W, gains W if it is right, with probability p, and else loses R - W: it
// is read if p W > (1 - p) (R - W), that is if R < W / (1 - p).
//
// Pure: times are arguments, in seconds on any clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moeserve {

class ReadAhead {
 public:
  explicit ReadAhead(int layers) : pauses_(layers) {}

  // Called when a step has a layer's experts and the next layer's were guessed; and when the next layer requests its
  // experts.
  void pause_begins(int layer, double now) { pauses_[layer].began = now; }
  void pause_ends(int layer, double now) {
    Pause& pause = pauses_[layer];
    if (pause.began < 0) return;
    const double seconds = now - pause.began;
    pause.began = -1;
    // If a thread loses its core, a pause becomes many times as long. So the estimate falls fast and rises slowly.
    if (pause.usual < 0) pause.usual = seconds;
    const double longer = std::min(seconds, 2 * pause.usual) - pause.usual;
    pause.usual += longer * (longer < 0 ? kFalls : kRises);
  }
  // Records how many of the guessed experts that were not in RAM were requested (`right`), whether or not they had been
  // read.
  void guessed(int64_t count, int64_t right) {
    if (guessed_ > kMostGuesses) guessed_ /= 2, right_ /= 2;
    guessed_ += static_cast<double>(count);
    right_ += static_cast<double>(right);
  }

  // Returns the bytes of guessed experts to read in the pause after a layer, if the disk reads `rate` bytes per second,
  // in reads of `piece` bytes; 0 without a measured rate or pause.
  int64_t bytes_worth_reading(int layer, double rate, int64_t piece) const {
    const double pause = pauses_[layer].usual;
    if (rate <= 0 || pause <= 0) return 0;
    const double bytes = rate * pause, wrong = 1 - right_ / guessed_;
    if (bytes >= static_cast<double>(piece)) return static_cast<int64_t>(bytes);
    return static_cast<double>(piece) * wrong < bytes ? piece : 0;
  }

 private:
  static constexpr double kFalls = 0.2, kRises = 0.02;  // weights of the newest pause
  static constexpr double kMostGuesses = 1024;          // older ones count half
  struct Pause {
    double began = -1, usual = -1;
  };
  std::vector<Pause> pauses_;       // by layer
  double guessed_ = 2, right_ = 1;  // until more is known, every second guess is right
};

}  // namespace moeserve
