#include "key_choice.h"

#include <algorithm>
#include <cstring>

namespace moeserve {
namespace {

// Maps a float to an integer of the same order.
uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Among the scores whose bits above `shift + width` equal those of `prefix`, finds the digit of the `rank`-th highest,
// counted from 1, and reduces `rank` by the number of higher ones.
uint32_t digit_of(const float* scores, int n, uint32_t prefix, int shift, int width, int& rank) {
  int counts[1 << 11] = {};
  const uint32_t mask = (1u << width) - 1;
  const int above = shift + width;
  for (int i = 0; i < n; ++i) {
    const uint32_t key = ordered(scores[i]);
    if (above < 32 && key >> above != prefix) continue;
    ++counts[key >> shift & mask];
  }
  uint32_t digit = mask;
  for (; counts[digit] < rank; --digit) rank -= counts[digit];
  return digit;
}

}  // namespace

void KeyChoice::begin(const ChoiceRule& rule_, int kv_heads) {
  rule = rule_;
  heads = rule.by_head() ? kv_heads : 1;
  sequences.clear();
  sequence_of.clear();
  tiles.clear();
  num_lists = 0;
}

void KeyChoice::add(const Rows& sequence) {
  if (rule.top == 0) return;
  const size_t end = static_cast<size_t>(sequence.row) + sequence.count;
  if (sequence_of.size() < end) sequence_of.resize(end, -1);
  std::fill_n(sequence_of.begin() + sequence.row, sequence.count, static_cast<int32_t>(sequences.size()));
  sequences.push_back(sequence);
  const int first = std::max(0, first_choosing() - sequence.position);
  for (int t = first; t < sequence.count; t += kTileTokens) {
    const int n = std::min(kTileTokens, sequence.count - t);
    const int64_t scored = blocks(sequence.position + t + n - 1);
    tiles.push_back(
        {sequence.row + t, n, sequence.position + t, num_lists, sequence.slots, (scored + 31) / 32 * 32, 0});
    num_lists += n;
  }
}

void KeyChoice::finish() {
  parts.clear();
  groups.clear();
  int64_t most = 0, held = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(tiles.size()); ++i) {
    Tile& tile = tiles[i];
    const int64_t needed = tile.count * heads * tile.stride;
    if (groups.empty() || held + needed > kMostScores) {
      const auto part = static_cast<int32_t>(parts.size());
      groups.push_back({i, i, part, part});
      held = 0;
    }
    tile.scores = held;
    held += needed;
    most = std::max(most, held);
    for (int64_t s = 0; s * segment_blocks() < tile.stride; ++s)
      parts.push_back({i, static_cast<int32_t>(s)});
    groups.back().end_tile = i + 1;
    groups.back().end_part = static_cast<int32_t>(parts.size());
  }
  if (has_lists) lists.assign(static_cast<size_t>(num_lists) * heads * list_stride(), 0);
  scores.resize(static_cast<size_t>(most));
}

void choose_highest(const float* scores, int n, int top, int32_t* out) {
  int rank = top;
  uint32_t prefix = digit_of(scores, n, 0, 21, 11, rank);
  prefix = prefix << 11 | digit_of(scores, n, prefix, 10, 11, rank);
  prefix = prefix << 10 | digit_of(scores, n, prefix, 0, 10, rank);
  for (int i = 0; i < n; ++i) {
    const uint32_t key = ordered(scores[i]);
    if (key > prefix || (key == prefix && rank-- > 0)) *out++ = i;
  }
}

}  // namespace moeserve
