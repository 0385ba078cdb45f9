// The sampling state of each request slot between steps, and sampling for a batch of slots.
//
// One writer: the thread that calls bind and sample. Within sample, `for_each_row` decides which threads run the rows;
// they only read the state.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "sampling/dry.h"
#include "sampling/sampling.h"

namespace moeserve {

class SamplerState {
 public:
  // Throws std::invalid_argument for an ISA that this CPU lacks.
  SamplerState(int max_num_seqs, int vocab, int num_threads, const char* isa = nullptr)
      : vocab_(vocab), slots_(max_num_seqs) {
    for (int i = 0; i < num_threads; ++i) scratch_.emplace_back(vocab, isa);
  }

  SamplerState(const SamplerState&) = delete;

  int vocab() const { return vocab_; }
  int num_slots() const { return static_cast<int>(slots_.size()); }
  Scratch& scratch(int thread) { return scratch_[thread]; }

  // Overwrites the slot's state. Of `params` only the numbers are used (not position and the lists). `stop_ids` are
  // masked until `min_tokens` output tokens have come. Throws std::invalid_argument for a slot, id or number out of
  // range and then leaves the slot unchanged.
  void bind(int slot, const SampleParams& params, int64_t min_tokens, std::span<const int32_t> bias_ids,
            std::span<const float> bias_values, std::span<const int32_t> stop_ids,
            std::span<const int32_t> dry_breakers, std::span<const int32_t> prompt,
            std::span<const int32_t> output) {
    check_slot(slot);
    if (!(params.temperature >= 0 && std::isfinite(params.temperature)) || params.min_p > 1 ||
        !(params.repetition_penalty > 0)) {
      throw std::invalid_argument("temperature, min_p or repetition_penalty out of range");
    }
    for (const auto& ids : {bias_ids, stop_ids, prompt, output}) check_ids(ids);
    if (bias_ids.size() != bias_values.size())
      throw std::invalid_argument("logit_bias: ids and values differ");
    Slot& s = slots_[slot];
    s = Slot();
    s.params = params;
    s.min_tokens = min_tokens;
    s.bias_ids.assign(bias_ids.begin(), bias_ids.end());
    s.bias_values.assign(bias_values.begin(), bias_values.end());
    s.stop_ids.assign(stop_ids.begin(), stop_ids.end());
    if (params.repetition_penalty != 1) {
      for (const int32_t id : prompt) see(s, id, 0);
    }
    if (params.dry_multiplier != 0) s.repetition.start(prompt, output, dry_breakers);
    for (const int32_t id : output) note(s, id);
    find_repeats(s);
  }

  // Records an output token. Memory grows only for requests with penalties (by the distinct tokens seen) and with DRY.
  void append(int slot, int32_t token) {
    Slot& s = slots_[slot];
    note(s, token);
    if (s.params.dry_multiplier != 0) s.repetition.append(token);
    find_repeats(s);
  }

  // Returns the arguments of sample_row for the slot's next token; valid until the next bind or append of the slot.
  SampleParams params(int slot) const {
    const Slot& s = slots_[slot];
    SampleParams p = s.params;
    p.position = s.num_output;
    p.bias_ids = s.bias_ids.data();
    p.bias_values = s.bias_values.data();
    p.num_bias = static_cast<int32_t>(s.bias_ids.size());
    p.seen_ids = s.seen_ids.data();
    p.seen_counts = s.seen_counts.data();
    p.num_seen = static_cast<int32_t>(s.seen_ids.size());
    p.repeat_ids = s.repeat_ids.data();
    p.repeat_penalties = s.repeat_penalties.data();
    p.num_repeats = static_cast<int32_t>(s.repeat_ids.size());
    p.masked_ids = s.stop_ids.data();
    p.num_masked = s.num_output < s.min_tokens ? static_cast<int32_t>(s.stop_ids.size()) : 0;
    return p;
  }

  // Bit masks for some rows of a batch: if index[i] >= 0, row i may only sample tokens that mask index[i] allows.
  struct Masks {
    const uint32_t* bits = nullptr;  // [masks, words]
    int words = 0;
    const int32_t* index = nullptr;  // [rows]; nullptr: no row has a mask
  };

  // Samples results[i] from logits + i * row_stride for slots[i], then appends the tokens. Slots must be distinct.
  // for_each_row(n, f) calls f(row, thread) once for every row, with thread < num_threads, and never two calls at a
  // time with the same thread. Throws std::invalid_argument for a slot out of range, before it changes anything.
  template <class ForEachRow>
  void sample(const float* logits, int64_t row_stride, std::span<const int32_t> slots, const Masks& masks,
              SampleResult* results, ForEachRow&& for_each_row) {
    for (const int32_t slot : slots) check_slot(slot);
    for_each_row(static_cast<int>(slots.size()), [&](int row, int thread) {
      SampleParams p = params(slots[row]);
      if (masks.index && masks.index[row] >= 0) {
        p.allowed = masks.bits + static_cast<int64_t>(masks.index[row]) * masks.words;
        p.allowed_words = masks.words;
      }
      sample_row(logits + row * row_stride, vocab_, p, results[row], scratch_[thread]);
    });
    for (size_t row = 0; row < slots.size(); ++row) {
      if (results[row].token_id >= 0) append(slots[row], results[row].token_id);
    }
  }

  void check_slot(int slot) const {
    if (slot < 0 || slot >= num_slots()) {
      throw std::invalid_argument("request slot " + std::to_string(slot) + " is not in [0, " +
                                  std::to_string(num_slots()) + ")");
    }
  }
  void check_ids(std::span<const int32_t> ids) const {
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab_) {
        throw std::invalid_argument("token id " + std::to_string(id) + " is not in [0, " +
                                    std::to_string(vocab_) + ")");
      }
    }
  }

 private:
  struct Slot {
    SampleParams params;
    int64_t min_tokens = 0;
    int64_t num_output = 0;
    std::vector<int32_t> bias_ids, stop_ids;
    std::vector<float> bias_values;
    std::vector<int32_t> seen_ids,
        seen_counts;  // distinct tokens, and how often; only for requests with penalties
    std::unordered_map<int32_t, int32_t> seen_at;  // token -> index in the two
    Repetition repetition;                         // only for requests with DRY, as are the next two
    std::vector<int32_t> repeat_ids;
    std::vector<float> repeat_penalties;
  };

  static void note(Slot& s, int32_t token) {
    ++s.num_output;
    const SampleParams& p = s.params;
    if (p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0) see(s, token, 1);
  }

  static void find_repeats(Slot& s) {
    if (s.params.dry_multiplier != 0) s.repetition.penalties(s.params, s.repeat_ids, s.repeat_penalties);
  }

  static void see(Slot& s, int32_t token, int count) {
    const auto [it, is_new] = s.seen_at.try_emplace(token, static_cast<int32_t>(s.seen_ids.size()));
    if (is_new) {
      s.seen_ids.push_back(token);
      s.seen_counts.push_back(0);
    }
    s.seen_counts[it->second] += count;
  }

  int vocab_;
  std::vector<Slot> slots_;
  std::vector<Scratch> scratch_;  // one per thread
};

}  // namespace moeserve
