// Divides the work of a gated DeltaNet among threads. The arithmetic is in delta_net.inl.
#include "delta_net.h"

#include <cmath>
#include <cstring>

namespace moeserve {

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

namespace {

// One token's step of a block of columns. decay: one per head, or one per dimension of the head's keys.
void step(const Kernels* k, const DeltaHeads& h, float* state, const float* q, const float* key,
          const float* v, const float* decay, float beta, float* out) {
  if (h.kimi) {
    k->delta_step_by_channel(state, h.key_dim, q, key, v, decay, beta, out);
  } else if (h.mamba2) {
    k->mamba2_step(state, h.key_dim, q, key, v, *decay, beta, out);
  } else {
    k->delta_step(state, h.key_dim, q, key, v, *decay, beta, out);
  }
}

}  // namespace

void RecurrentOp::convolve(Team& team, int sequence, int head) const {
  const DeltaHeads& h = heads;
  const bool is_value = head >= 2 * h.key_heads;
  const int width = is_value ? h.value_dim : h.key_dim;
  const int64_t channels = h.channels();
  const int64_t first =
      is_value ? int64_t{2} * h.key_heads * h.key_dim + int64_t{head - 2 * h.key_heads} * h.value_dim
               : int64_t{head} * h.key_dim;
  float* state = states + sequences.slot[sequence] * slot_values + h.delta_values() + first;
  auto* window = static_cast<float*>(team.scratch(sizeof(float) * (h.taps - 1) * width));
  for (int j = 0; j + 1 < h.taps; ++j)
    std::memcpy(window + j * width, state + j * channels, sizeof(float) * width);
  const float factor = head < h.key_heads ? 1.0f / std::sqrt(static_cast<float>(h.key_dim)) : 1.0f;
  const int which = is_value ? 2 : head / h.key_heads;
  const int64_t within = first - int64_t{which} * h.key_heads * h.key_dim;
  const int sure = sequences.sure(sequence);
  for (int t = 0; t < sequences.count[sequence]; ++t) {
    float* x = part(which, sequences.row[sequence] + t) + within;
    float* kept = record(sequence, t);
    if (kept != nullptr) std::memcpy(kept + first, x, sizeof(float) * width);
    k->conv_silu(window, x, conv + first, channels, conv_bias == nullptr ? nullptr : conv_bias + first,
                 h.taps, width);
    if (!is_value && !h.mamba2) k->l2_normalize(x, factor, width);
    if (kept != nullptr) std::memcpy(kept + channels + first, x, sizeof(float) * width);
    if (t + 1 != sure) continue;
    for (int j = 0; j + 1 < h.taps; ++j)
      std::memcpy(state + j * channels, window + j * width, sizeof(float) * width);
  }
}

void RecurrentOp::keep_gates(int sequence, int t, int head) const {
  float* kept = record(sequence, t);
  if (kept == nullptr) return;
  const int64_t row = sequences.row[sequence] + t, width = heads.decays_of_head();
  float* gates = kept + 2 * heads.channels();
  gates[head] = b[gate(row, head)];
  std::memcpy(gates + heads.value_heads + head * width, decay(row, head), sizeof(float) * width);
}

void DeltaNetOp::make_gates(int sequence, int head) const {
  for (int t = 0; t < sequences.count[sequence]; ++t) {
    const int64_t row = sequences.row[sequence] + t, at = gate(row, head);
    float* decays = decay(row, head);
    b[at] = 1.0f / (1.0f + std::exp(-b[at]));
    if (heads.kimi) {
      const float* bias = dt_bias + int64_t{head} * heads.key_dim;
      if (heads.bound < 0.0f) {
        k->bounded_decays(decays, bias, rate[head], heads.bound, heads.key_dim);
      } else {
        k->channel_decays(decays, bias, rate[head], heads.key_dim);
      }
    } else {
      *decays = std::exp(rate[head] * softplus(*decays + dt_bias[head]));
    }
    keep_gates(sequence, t, head);
  }
}

void RecurrentOp::step_block(Team& team, int sequence, int head, int block) const {
  const DeltaHeads& h = heads;
  float* state = states + sequences.slot[sequence] * slot_values +
                 (int64_t{head} * h.value_dim + block * kColumns) * h.key_dim;
  for (int t = 0; t < sequences.count[sequence]; ++t) {
    if (t == sequences.sure(sequence)) {  // drafts advance a copy
      const size_t bytes = sizeof(float) * h.key_dim * kColumns;
      state = static_cast<float*>(std::memcpy(team.scratch(bytes), state, bytes));
    }
    const int64_t row = sequences.row[sequence] + t, key = int64_t{h.key_head(head)} * h.key_dim;
    const int64_t column = int64_t{head} * h.value_dim + block * kColumns;
    step(k, h, state, part(0, row) + key, part(1, row) + key, part(2, row) + column, decay(row, head),
         b[gate(row, head)], out.f32 + row * out.cols + column);
  }
}

void DeltaNetOp::write_out(int64_t row, int head) const {
  const int64_t first = int64_t{head} * heads.value_dim;
  float* o = out.f32 + row * out.cols + first;
  k->rms_norm(o, norm, eps, heads.value_dim, o);
  if (heads.sigmoid) {
    k->sigmoid_mul(z + row * out.cols + first, heads.value_dim, o);
  } else {
    k->silu_mul(z + row * out.cols + first, o, heads.value_dim, o);
  }
  if (out.q8 != nullptr) k->quantize(o, heads.value_dim, out.codes(row) + first, out.metas(row) + first / 32);
}

void DeltaNetOp::operator()(Team& team) const {
  convolve_and_step(team, [&](int sequence, int head) { make_gates(sequence, head); });
  const int value_heads = heads.value_heads;
  team.for_units(int64_t{n} * value_heads,
                 [&](int64_t unit) { write_out(unit / value_heads, static_cast<int>(unit % value_heads)); });
}

// The new window: the last taps - 1 of the old window's inputs followed by the accepted ones.
void CommitStatesOp::move_window(int sequence, int64_t channel, int width) const {
  const int64_t channels = heads.channels();
  const int kept = heads.taps - 1, moved = accepted[sequence];
  float* window = states + slot[sequence] * slot_values + heads.delta_values() + channel;
  for (int j = 0; j < kept; ++j) {
    const int from = j + moved;
    const float* x = from < kept ? window + from * channels
                                 : pending.record(int64_t{first[sequence]} + from - kept) + channel;
    std::memcpy(window + j * channels, x, sizeof(float) * width);
  }
}

void CommitStatesOp::step_block(int sequence, int head, int block) const {
  const DeltaHeads& h = heads;
  const int64_t channels = h.channels(), key_width = int64_t{h.key_heads} * h.key_dim;
  const int64_t column = int64_t{head} * h.value_dim + block * RecurrentOp::kColumns;
  float* state = states + slot[sequence] * slot_values + column * h.key_dim;
  float unused[RecurrentOp::kColumns];
  for (int t = 0; t < accepted[sequence]; ++t) {
    const float* kept = pending.record(int64_t{first[sequence]} + t);
    const float *q = kept + channels + h.key_head(head) * h.key_dim, *gates = kept + 2 * channels;
    step(k, h, state, q, q + key_width, kept + channels + 2 * key_width + column,
         gates + h.value_heads + int64_t{head} * h.decays_of_head(), gates[head], unused);
  }
}

void CommitStatesOp::operator()(Team& team) const {
  const int value_heads = heads.value_heads, conv_heads = 2 * heads.key_heads + value_heads;
  const int blocks = heads.value_dim / RecurrentOp::kColumns;
  const int64_t keys = int64_t{2} * heads.key_heads * heads.key_dim;
  const int each = conv_heads + value_heads * blocks;
  team.for_units(int64_t{num} * each, [&](int64_t unit) {
    const int sequence = static_cast<int>(unit / each), piece = static_cast<int>(unit % each);
    if (piece >= conv_heads) {
      step_block(sequence, (piece - conv_heads) / blocks, (piece - conv_heads) % blocks);
    } else if (piece >= 2 * heads.key_heads) {
      move_window(sequence, keys + int64_t{piece - 2 * heads.key_heads} * heads.value_dim, heads.value_dim);
    } else {
      move_window(sequence, int64_t{piece} * heads.key_dim, heads.key_dim);
    }
  });
}

void CopyStatesOp::operator()(Team& team) const {
  constexpr int64_t kPiece = 1 << 14;  // numbers per unit
  const int64_t pieces = (slot_values + kPiece - 1) / kPiece;
  for (int i = 0; i < count; ++i) {
    const int32_t source = pairs[2 * i];
    float* target = states + pairs[2 * i + 1] * slot_values;
    team.for_units(pieces, [&](int64_t piece) {
      const int64_t at = piece * kPiece;
      const size_t bytes = sizeof(float) * std::min(kPiece, slot_values - at);
      if (source < 0) {
        std::memset(target + at, 0, bytes);
      } else {
        std::memmove(target + at, states + source * slot_values + at, bytes);
      }
    });
  }
}

}  // namespace moeserve
