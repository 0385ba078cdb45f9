// The gated DeltaNet of a step's sequences on the CPU pool, and what moves their states: delta_net/reference.py has the
// arithmetic. Recurrent, token by token, for prompts too: what a token gives is then independent of how its sequence was
// cut into steps, and the state of a block of columns stays in L1 from one token to the next.
#pragma once

#include "ops.h"

namespace moeserve {

// log(1 + exp(x)), which is x for large x.
float softplus(float x);

struct DeltaHeads {
  int key_heads, value_heads, key_dim, value_dim;
  int taps;  // tokens that the convolution sees
  bool tiled;
  // Kimi Delta Attention: each dimension of a key head decays by itself, and the output's gate is a sigmoid. As many heads
  // of q and k as of v.
  bool kimi;
  // Mamba-2 (mamba2.h): q and k are C and B of a group, v is a head's x; the state takes k (beta * v)^T without reading
  // itself, and q and k are not normalised.
  bool mamba2;
  int64_t channels() const { return int64_t{2} * key_heads * key_dim + int64_t{value_heads} * value_dim; }
  int64_t delta_values() const { return int64_t{value_heads} * key_dim * value_dim; }
  int decays_of_head() const { return kimi ? key_dim : 1; }
  int64_t decays() const { return int64_t{value_heads} * decays_of_head(); }
  int64_t state_values() const { return delta_values() + (taps - 1) * channels(); }
  int key_head(int value_head) const {
    return tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
};

// The sequences of a step: sequence i has rows row[i] .. row[i] + count[i] - 1, and its state in a slot of its own. The
// last drafts[i] of the rows are drafts, which do not move the state: what would move it is kept in `pending` instead,
// from record first[i] on.
struct StateSequences {
  int num;
  const int32_t *row, *count, *slot;
  const int32_t *drafts, *first;  // null: there are no drafts
  int sure(int i) const { return count[i] - (drafts ? drafts[i] : 0); }
};

// Of each draft, a record: its channels before and after the convolution, then beta and decays by value head.
struct PendingStates {
  float* records;
  int64_t record_values;
  static int64_t values(const DeltaHeads& h) { return 2 * h.channels() + h.value_heads + h.decays(); }
  float* record(int64_t i) const { return records + i * record_values; }
};

// What the recurrent layers of a step have in common: the convolution of q, k and v, and the steps of the states.
//
// A state slot holds, for the layer, [value_heads, value_dim / 32, key_dim, 32] numbers of the delta state, so that a
// block of columns is contiguous, then [taps - 1, channels] of the convolution's.
struct RecurrentOp {
  static constexpr int kColumns = 32;
  const Kernels* k;
  DeltaHeads heads;
  // q, k and v, a row every `strides` numbers; they become what the convolution gives, q and k normalised and q scaled.
  float* qkv[3];
  int64_t strides[3];
  // b and a of head h in row t: at t * gate_stride (a: decay_stride) + h / r * group_stride + h % r with r = value_heads
  // / key_heads; they become beta and the decay. In Kimi Delta Attention a is [n, value_heads, key_dim].
  float *b, *a;
  int gate_stride, decay_stride, group_stride;
  const float* conv;       // [taps, channels]
  const float* conv_bias;  // [channels], or nullptr
  const float* rate;       // [value_heads]: -exp(A_log)
  const float* dt_bias;    // [value_heads], or [value_heads, key_dim]
  const float* norm;       // [value_dim]; Mamba-2: [value_heads * value_dim]
  float eps;
  float* states;  // the layer's part of slot 0
  int64_t slot_values;
  StateSequences sequences;  // of all rows
  PendingStates pending;
  int n;
  Activations out;  // [n, value_heads * value_dim]

 protected:
  int64_t gate(int64_t row, int head) const { return row * gate_stride + within_gates(head); }
  float* decay(int64_t row, int head) const {
    return heads.kimi ? a + (row * heads.value_heads + head) * heads.key_dim
                      : a + row * decay_stride + within_gates(head);
  }
  float* part(int which, int64_t row) const { return qkv[which] + row * strides[which]; }
  // Of row t of a sequence; null where it is no draft.
  float* record(int sequence, int t) const {
    const int draft = t - sequences.sure(sequence);
    return draft < 0 ? nullptr : pending.record(int64_t{sequences.first[sequence]} + draft);
  }
  // Heads count through q, k and v; a head's channels are convolved for all tokens of the sequence.
  void convolve(Team& team, int sequence, int head) const;
  // A draft keeps its gates for CommitStatesOp.
  void keep_gates(int sequence, int t, int head) const;
  // Calls make_gates(sequence, head) for each value head beside the convolutions, then moves the states on.
  template <class MakeGates>
  void convolve_and_step(Team& team, const MakeGates& make_gates) const;

 private:
  int within_gates(int head) const {
    const int r = heads.value_heads / heads.key_heads;
    return head / r * group_stride + head % r;
  }
  void step_block(Team& team, int sequence, int head, int block) const;
};

template <class MakeGates>
void RecurrentOp::convolve_and_step(Team& team, const MakeGates& make_gates) const {
  const int value_heads = heads.value_heads, conv_heads = 2 * heads.key_heads + value_heads;
  const int each = conv_heads + value_heads, blocks = heads.value_dim / kColumns;
  team.for_units(int64_t{sequences.num} * each, [&](int64_t unit) {
    const int sequence = static_cast<int>(unit / each), head = static_cast<int>(unit % each);
    if (head < conv_heads) {
      convolve(team, sequence, head);
    } else {
      make_gates(sequence, head - conv_heads);
    }
  });
  team.for_units(int64_t{sequences.num} * value_heads * blocks, [&](int64_t unit) {
    const int64_t head = unit / blocks;
    step_block(team, static_cast<int>(head / value_heads), static_cast<int>(head % value_heads),
               static_cast<int>(unit % blocks));
  });
}

// out = RMSNorm(o) * norm * silu(z) of every value head, in Kimi Delta Attention with sigmoid(z).
struct DeltaNetOp : RecurrentOp {
  const float* z;  // [n, value_heads * value_dim]
  void operator()(Team& team) const;

 private:
  void make_gates(int sequence, int head) const;
  void write_out(int64_t row, int head) const;
};

// Moves the state of each sequence on by its first accepted[i] drafts, with the bits that their rows would have given it.
struct CommitStatesOp {
  const Kernels* k;
  DeltaHeads heads;
  float* states;  // the layer's part of slot 0
  int64_t slot_values;
  PendingStates pending;
  int num;
  const int32_t *slot, *first, *accepted;
  void operator()(Team& team) const;

 private:
  void move_window(int sequence, int64_t channel, int width) const;
  void step_block(int sequence, int head, int block) const;
};

// For each pair (source, target) in order: slot target = slot source, or zeros where source is -1.
struct CopyStatesOp {
  float* states;  // [slots, slot_values]
  int64_t slot_values;
  const int32_t* pairs;  // [count, 2]
  int count;
  void operator()(Team& team) const;
};

}  // namespace moeserve
