// sampling.h gives the rules. No pass sorts the vocabulary: one scan finds the maxima of blocks of the row, which give
// a lower bound for every threshold, and only blocks that reach it are read again.
#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "arch/kernels.h"
#include "sampling/candidates.h"
#include "sampling/filters.h"

namespace moeserve {

namespace {

const RowPasses* find_passes(const char* isa) {
  if (const Kernels* kernels = select_kernels(isa)) return &kernels->rows;
  throw std::invalid_argument("this CPU lacks the instruction set asked for");
}

// ---------------------------------------------------------------- logprobs

struct LogSoftmax {
  float max;
  double log_sum;  // of exp(x - max)
  double operator()(float x) const { return (static_cast<double>(x) - max) - log_sum; }
};

// The row must have been scanned. Overwrites the scratch except block_max.
LogSoftmax log_softmax(const float* x, int vocab, float max, Scratch& s) {
  s.passes->weigh(x, vocab, max, M_LOG2E, s.weights.get(), s.block_sum.get());
  return {max, std::log(total(s, vocab))};
}

void fill_top(const float* x, int vocab, int top_n, const LogSoftmax& log_softmax, LogprobResult& r,
              Scratch& s) {
  r.num_top = 0;
  if (top_n == 0) return;
  const int n = gather_top_k(x, vocab, std::min(top_n, vocab), -INFINITY, log_softmax.max, s);
  int order[kMaxTopLogprobs];
  for (int i = 0; i < n; ++i) order[i] = i;
  std::sort(order, order + n, [&s](int a, int b) {
    return s.values[a] > s.values[b] || (s.values[a] == s.values[b] && a < b);
  });
  r.num_top = n;
  for (int i = 0; i < n; ++i) {
    r.top_ids[i] = s.ids[order[i]];
    r.top_logprobs[i] = log_softmax(s.values[order[i]]);
  }
}

void fill_chosen(const float* x, int vocab, int token, const LogSoftmax& log_softmax, LogprobResult& r,
                 Scratch& s) {
  r.logprob = log_softmax(x[token]);
  r.rank = 1 + s.passes->count_greater(x, vocab, x[token]);
}

// ---------------------------------------------------------------- bias, penalties, masks

bool edits(const SampleParams& p) {
  return p.num_bias || p.num_seen || p.num_repeats || p.num_masked || p.allowed;
}

// Sets values whose bit is not set to -inf.
void keep_allowed(float* x, int vocab, const uint32_t* allowed, int words) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  const int covered = std::min<int64_t>(vocab, int64_t{32} * words);
  for (int begin = 0; begin < covered; begin += 32) {
    const uint32_t bits = allowed[begin / 32];
    const int end = std::min(begin + 32, covered);
    if (bits == ~0u) continue;
    if (bits == 0) {
      std::fill(x + begin, x + end, kNever);
      continue;
    }
    for (int i = begin; i < end; ++i) {
      if (!(bits >> (i - begin) & 1)) x[i] = kNever;
    }
  }
  std::fill(x + covered, x + vocab, kNever);
}

// Returns the row after bias, penalties and masks; nullptr if a mask would hide a value that is not finite.
const float* edit(const float* logits, int vocab, const SampleParams& p, Scratch& s) {
  float* x = s.edited.get();
  std::memcpy(x, logits, vocab * sizeof(float));
  for (int i = 0; i < p.num_bias; ++i) x[p.bias_ids[i]] += p.bias_values[i];
  for (int i = 0; i < p.num_seen; ++i) {
    float& v = x[p.seen_ids[i]];
    v = v > 0 ? v / p.repetition_penalty : v * p.repetition_penalty;
    const float count = static_cast<float>(p.seen_counts[i]);
    v -= p.frequency_penalty * count;
    if (count > 0) v -= p.presence_penalty;
  }
  for (int i = 0; i < p.num_repeats; ++i) x[p.repeat_ids[i]] -= p.repeat_penalties[i];
  for (int i = 0; i < p.num_masked; ++i) {
    float& v = x[p.masked_ids[i]];
    if (!(v < std::numeric_limits<float>::infinity())) return nullptr;
    v = -std::numeric_limits<float>::infinity();
  }
  if (p.allowed) {
    if (!s.passes->scan(x, vocab, s.block_max.get())) return nullptr;
    keep_allowed(x, vocab, p.allowed, p.allowed_words);
  }
  return x;
}

// For a row that `scan` rejects after the edits: returns whether the masks alone are the reason.
bool all_masked(const float* logits, const float* edited, int vocab, Scratch& s) {
  float max;
  return s.passes->scan(edited, vocab, s.block_max.get()) && scan(logits, vocab, s, max);
}

// Returns the first survivor at which the running sum of the weights exceeds u times their total.
int draw(const Survivors& from, double u, const Scratch& s) {
  double left = u * total(s, from.count);
  int block = -1;  // the last block tried: by rounding, `left` may lie beyond the total
  for (int b = 0; b * kSumBlock < from.count; ++b) {
    if (s.block_sum[b] == 0) continue;
    if (block >= 0) left -= s.block_sum[block];
    block = b;
    if (left < s.block_sum[b]) break;
  }
  const int end = std::min(from.count, (block + 1) * kSumBlock);
  int chosen = -1;
  for (int i = block * kSumBlock; i < end; ++i) {
    if (from.weights[i] == 0) continue;
    chosen = i;
    left -= from.weights[i];
    if (left < 0) break;
  }
  return from.ids ? from.ids[chosen] : chosen;
}

}  // namespace

Scratch::Scratch(int vocab, const char* isa)
    : passes(find_passes(isa)),
      edited(new float[vocab]),
      block_max(new float[blocks(vocab)]),
      block_rank(new float[blocks(vocab)]),
      block_sum(new double[blocks(vocab)]),
      ids(new int32_t[vocab]),
      values(new float[vocab]),
      weights(new float[vocab + 16]) {}

void sample_row(const float* logits, int vocab, const SampleParams& p, SampleResult& r, Scratch& s) noexcept {
  r.token_id = kNotFinite;
  r.logprobs.rank = 0;
  float max = 0;
  const bool wants_logprobs = p.num_logprobs >= 0;
  LogSoftmax raw{};
  if (wants_logprobs) {
    if (!scan(logits, vocab, s, max)) return;
    raw = log_softmax(logits, vocab, max, s);
    fill_top(logits, vocab, p.num_logprobs, raw, r.logprobs, s);
  }
  const float* x = edits(p) ? edit(logits, vocab, p, s) : logits;
  if (!x) return;
  if ((x != logits || !wants_logprobs) && !scan(x, vocab, s, max)) {
    if (x != logits && all_masked(logits, x, vocab, s)) r.token_id = kNoneAllowed;
    return;
  }
  if (p.temperature == 0 && (p.order & 15) <= kTemperature) {
    r.token_id = argmax(x, vocab, max, s);
  } else {
    r.token_id = draw(filter(x, vocab, max, p, s), uniform_at(p.seed, p.position, kDrawStream), s);
  }
  if (wants_logprobs) fill_chosen(logits, vocab, r.token_id, raw, r.logprobs, s);
}

void logprob_row(const float* logits, int vocab, int target, int top_n, LogprobResult& r,
                 Scratch& s) noexcept {
  r.rank = 0;
  float max;
  if (!scan(logits, vocab, s, max)) return;
  const LogSoftmax raw = log_softmax(logits, vocab, max, s);
  fill_top(logits, vocab, top_n, raw, r, s);
  fill_chosen(logits, vocab, target, raw, r, s);
}

Survivors filter_row(const float* logits, int vocab, const SampleParams& p, Scratch& s) noexcept {
  const float* x = edits(p) ? edit(logits, vocab, p, s) : logits;
  float max;
  if (!x || !scan(x, vocab, s, max)) return {};
  return filter(x, vocab, max, p, s);
}

double uniform_at(uint64_t seed, uint64_t position, uint64_t stream) noexcept {
  uint64_t c[4] = {position, stream, 0, 0};
  uint64_t key[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    const auto a = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * c[0];
    const auto b = static_cast<unsigned __int128>(0xCA5A826395121157u) * c[2];
    const uint64_t next[4] = {static_cast<uint64_t>(b >> 64) ^ c[1] ^ key[0], static_cast<uint64_t>(b),
                              static_cast<uint64_t>(a >> 64) ^ c[3] ^ key[1], static_cast<uint64_t>(a)};
    std::copy(std::begin(next), std::end(next), c);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  return static_cast<double>(c[0] >> 11) * 0x1p-53;
}

}  // namespace moeserve
