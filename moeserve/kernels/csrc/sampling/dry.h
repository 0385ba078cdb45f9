// DRY: penalises tokens that would continue a repetition in a request's text; updated token by token (Weidmann,
// text-generation-webui #5677).
//
// If the last tokens of the text also occur `lag` tokens earlier, the run is their number. The token that followed that
// earlier occurrence would lengthen the repetition. From runs of allowed_length on, its logit is lowered by multiplier
// * base^(run - allowed_length), unless it is a breaker. Runs are counted within the last penalty_last_n tokens and not
// across the last breaker.
//
// One writer: the owner of the slot.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sampling/sampling.h"

namespace moeserve {

// Returns a text's runs by lag: runs[lag] for 0 < lag < size; runs[0] is the size. The Z algorithm, over the reversed
// text.
inline std::vector<int32_t> runs_by_lag(std::span<const int32_t> text) {
  const int n = static_cast<int>(text.size());
  const auto at = [&](int i) { return text[n - 1 - i]; };
  std::vector<int32_t> runs(n);
  if (n > 0) runs[0] = n;
  for (int lag = 1, begin = 0, end = 0; lag < n; ++lag) {  // [begin, end): the match that reaches farthest
    int run = lag < end ? std::min(runs[lag - begin], end - lag) : 0;
    while (lag + run < n && at(run) == at(lag + run)) ++run;
    runs[lag] = run;
    if (lag + run > end) begin = lag, end = lag + run;
  }
  return runs;
}

class Repetition {
 public:
  // `breakers` are token sequences, each terminated by -1.
  void start(std::span<const int32_t> prompt, std::span<const int32_t> output,
             std::span<const int32_t> breakers) {
    tokens_.assign(prompt.begin(), prompt.end());
    tokens_.insert(tokens_.end(), output.begin(), output.end());
    runs_ = runs_by_lag(tokens_);
    for (size_t i = 0; i < breakers.size();) {
      const auto end = std::find(breakers.begin() + i, breakers.end(), -1);
      const std::vector<int32_t> sequence(breakers.begin() + i, end);
      if (!sequence.empty()) breakers_.emplace(sequence.back(), sequence);
      i = end - breakers.begin() + 1;
    }
    unbroken_ = tokens_.size();
    for (size_t size = tokens_.size(); size > 0; --size) {
      if (!ends_in_breaker(size)) continue;
      unbroken_ = tokens_.size() - size;
      break;
    }
  }

  void append(int32_t token) {
    tokens_.push_back(token);
    const int n = static_cast<int>(tokens_.size());
    runs_.push_back(0);
    runs_[0] = n;
    const int32_t* last = tokens_.data() + n - 1;
    for (int lag = 1; lag < n; ++lag) runs_[lag] = last[-lag] == token ? runs_[lag] + 1 : 0;
    unbroken_ = ends_in_breaker(n) ? 0 : unbroken_ + 1;
  }

  // Fills in the tokens to penalise, each once, and the amounts.
  void penalties(const SampleParams& p, std::vector<int32_t>& ids, std::vector<float>& amounts) const {
    ids.clear();
    amounts.clear();
    const int n = static_cast<int>(tokens_.size());
    const int window = p.dry_penalty_last_n < 0 ? n : std::min<int>(n, p.dry_penalty_last_n);
    const int limit = static_cast<int>(std::min<size_t>(unbroken_, n));
    if (window <= p.dry_allowed_length || limit < p.dry_allowed_length) return;
    std::unordered_map<int32_t, int> longest;
    for (int lag = 1; lag < window; ++lag) {
      const int run = std::min({runs_[lag], limit, window - lag});
      if (run < p.dry_allowed_length) continue;
      int& most = longest[tokens_[n - lag]];
      most = std::max(most, run);
    }
    for (const auto& [token, run] : longest) {
      if (is_breaker(token)) continue;
      ids.push_back(token);
      const double amount = p.dry_multiplier * std::pow<double>(p.dry_base, run - p.dry_allowed_length);
      amounts.push_back(static_cast<float>(std::min<double>(amount, FLT_MAX)));
    }
  }

 private:
  bool is_breaker(int32_t token) const {
    const auto [first, last] = breakers_.equal_range(token);
    return std::any_of(first, last, [](const auto& entry) { return entry.second.size() == 1; });
  }

  bool ends_in_breaker(size_t size) const {
    const auto [first, last] = breakers_.equal_range(tokens_[size - 1]);
    return std::any_of(first, last, [&](const auto& entry) {
      const std::vector<int32_t>& sequence = entry.second;
      return sequence.size() <= size &&
             std::equal(sequence.begin(), sequence.end(), tokens_.begin() + (size - sequence.size()));
    });
  }

  std::vector<int32_t> tokens_;  // prompt and output
  std::vector<int32_t> runs_;    // by lag
  size_t unbroken_ = 0;          // number of tokens after the last breaker
  std::unordered_multimap<int32_t, std::vector<int32_t>> breakers_;  // by their last token
};

}  // namespace moeserve
