// Chooses the next token from one row of logits.
//
// One thread handles a row, and the result depends only on the arguments. So rows may run on any threads in any order,
// and a request samples the same tokens alone and in a batch. Nothing here throws or allocates, except Scratch's
// constructor.
//
// The rules, in processing order (vLLM's and Hugging Face's semantics):
//   logit_bias       added to the logits it names
//   penalties        repetition, over prompt and output: a logit > 0 is divided by it, another multiplied;
//                    then frequency * count and presence, subtracted for output tokens (OpenAI)
//   DRY              subtracted from tokens that would continue a repetition (dry.h)
//   masks            the caller names tokens that must not come (stop tokens before min_tokens), and those that
//                    may come (a grammar's)
//   samplers         in the order that the request asks for, or in this one:
//     temperature    0 is greedy: the largest logit, of equal ones the lowest id
//     top_n_sigma    logits within n standard deviations of the largest
//     top_k          the k largest
//     typical_p      of the tokens whose surprise is nearest to the entropy, the shortest head whose probabilities
//                    sum to >= typical_p
//     min_p          probability >= min_p * the largest probability
//     top_p          the shortest head whose probabilities sum to >= top_p
//     xtc            as often as xtc_probability says, tokens with probability >= xtc_threshold are left out, but
//                    for the last of them
//   draw             inverse CDF in id order, with the uniform number that (seed, position) names
//
// The samplers see the tokens in one total order, by falling logit and then by rising id: of equal logits at a
// threshold, those with the lowest ids stay. Probabilities are those of what is left, renormalised, under the
// temperature where that has been applied. (So top_k and min_p commute, and it does not matter that vLLM applies min_p
// first.)
//
// A row with a NaN or +inf, or with nothing but -inf, is not sampled: token_id kNotFinite. -inf masks a token. Nor is a
// row in which the masks allow no token: kNoneAllowed.
//
// Weights have a relative error of 1.2e-7 and are summed in double. If top_p falls that close to a token's border, the
// token may be kept or dropped, but always the same way.
#pragma once

#include <cstdint>
#include <memory>

#include "sampling/row_passes.h"

namespace moeserve {

constexpr int kMaxTopLogprobs = 20;

// Instead of a token.
constexpr int32_t kNotFinite = -1;
constexpr int32_t kNoneAllowed = -2;

// The settings declared in moeserve/sampling/parameters.py: type, name and default.
#define MOESERVE_SAMPLER_SETTINGS(X) \
  X(float, temperature, 1.0f)        \
  X(int32_t, top_k, 0)               \
  X(double, top_p, 1.0)              \
  X(double, min_p, 0.0)              \
  X(float, presence_penalty, 0.0f)   \
  X(float, frequency_penalty, 0.0f)  \
  X(float, repetition_penalty, 1.0f) \
  X(float, dry_multiplier, 0.0f)     \
  X(float, dry_base, 1.75f)          \
  X(int32_t, dry_allowed_length, 2)  \
  X(int32_t, dry_penalty_last_n, -1) \
  X(double, top_n_sigma, 0.0)        \
  X(double, typical_p, 1.0)          \
  X(double, xtc_probability, 0.0)    \
  X(double, xtc_threshold, 0.1)

// The elements of a sampler order: four bits per sampler, as in moeserve/sampling/order.py.
enum SamplerCode : uint32_t {
  kTemperature = 1,
  kTopNSigma,
  kTopK,
  kTypicalP,
  kMinP,
  kTopP,
  kXtc,
};

// Pointers are borrowed for the call; a token occurs at most once in each list; every id is in [0, vocab).
struct SampleParams {
#define MOESERVE_MEMBER(type, name, value) type name = value;
  MOESERVE_SAMPLER_SETTINGS(MOESERVE_MEMBER)
#undef MOESERVE_MEMBER
  uint32_t order = 0;  // samplers that have an effect, the first in the lowest bits; 0: temperature, top_k,
                       // min_p, top_p, some of which may have no effect
  int32_t num_logprobs = -1;  // -1: no logprobs; N: the chosen token's and the N largest, N <= 20
  uint64_t seed = 0;
  uint64_t position = 0;  // index of the output token that is drawn
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  int32_t num_bias = 0;
  const int32_t* seen_ids = nullptr;     // tokens of prompt and output
  const int32_t* seen_counts = nullptr;  // how often in the output; 0: in the prompt only
  int32_t num_seen = 0;
  const int32_t* repeat_ids = nullptr;  // tokens that would continue a repetition
  const float* repeat_penalties = nullptr;
  int32_t num_repeats = 0;
  const int32_t* masked_ids = nullptr;
  int32_t num_masked = 0;
  const uint32_t* allowed =
      nullptr;                // one bit per token, from the lowest bit; nullptr: every token is allowed
  int32_t allowed_words = 0;  // tokens beyond the last word are not allowed
};

// From the raw logits: natural-log softmax before bias, penalties and temperature; error under 1e-6.
struct LogprobResult {
  double logprob = 0;
  int32_t rank =
      0;  // 1 + the number of larger logits; 0: the row was not finite and the other fields are invalid
  int32_t num_top = 0;
  int32_t top_ids[kMaxTopLogprobs];  // by falling logprob, equal ones by rising id
  double top_logprobs[kMaxTopLogprobs];
};

struct SampleResult {
  int32_t token_id = kNotFinite;
  LogprobResult logprobs;  // valid if num_logprobs >= 0 and token_id >= 0
};

// One thread's working memory: about 16 bytes of address space per vocabulary entry; pages are touched only when a
// request needs them. `isa`: a name for select_kernels; nullptr: the best that this CPU has. All give the same bits.
// Throws std::invalid_argument for an ISA that is unknown or that this CPU lacks.
class Scratch {
 public:
  explicit Scratch(int vocab, const char* isa = nullptr);

  const RowPasses* passes;
  std::unique_ptr<float[]> edited;      // [vocab] logits after bias, penalties and masks
  std::unique_ptr<float[]> block_max;   // [blocks], of the last scanned row
  std::unique_ptr<float[]> block_rank;  // [blocks], a copy to partition
  std::unique_ptr<double[]> block_sum;  // [blocks], sums of weights
  std::unique_ptr<int32_t[]> ids;       // [vocab], candidates, ascending
  std::unique_ptr<float[]> values;      // [vocab] their logits
  std::unique_ptr<float[]> weights;     // [vocab, rounded up], their weights; the largest logit's is 1
};

// The tokens that the filters keep; borrowed from the Scratch until its next use.
struct Survivors {
  const int32_t* ids = nullptr;    // ascending; nullptr: every token
  const float* weights = nullptr;  // relative to the most likely token's; divide by their sum
  int32_t count = 0;               // 0: the row was not finite
};

void sample_row(const float* logits, int vocab, const SampleParams& p, SampleResult& r,
                Scratch& scratch) noexcept;

// Computes the logprob of a given (prompt) token; 0 <= target < vocab, 0 <= top_n <= 20.
void logprob_row(const float* logits, int vocab, int target, int top_n, LogprobResult& r,
                 Scratch& scratch) noexcept;

// sample_row without the draw. If params.order is 0, temperature must be > 0.
Survivors filter_row(const float* logits, int vocab, const SampleParams& p, Scratch& scratch) noexcept;

// Names the random numbers of an output token.
enum Stream : uint64_t { kDrawStream = 0, kXtcStream = 1 };

// Uniform in [0, 1), a multiple of 2^-53: the top bits of the first word of Philox4x64-10 (Salmon et al.,
// "Parallel Random Numbers: As Easy as 1, 2, 3", SC11) with key {seed, 0} and counter {position, stream, 0, 0}.
double uniform_at(uint64_t seed, uint64_t position, uint64_t stream) noexcept;

}  // namespace moeserve
