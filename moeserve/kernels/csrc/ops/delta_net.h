// Gated DeltaNet for a step's sequences on the CPU pool, and copies and commits of its states. delta_net/reference.py
// has the arithmetic. It is computed token by token, for prompts too: a token's result then does not depend on how its
// sequence was divided into steps, and a block of the state's columns stays in L1 between tokens.
#pragma once

#include "ops.h"

namespace moeserve {

// log(1 + exp(x)), which is x for large x.
float softplus(float x);

struct DeltaHeads {
  int key_heads, value_heads, key_dim, value_dim;
  int taps;  // tokens per convolution
  bool tiled;
  // Kimi Delta Attention: each dimension of a key head has its own decay. q, k and v have the same number of heads.
  bool kimi;
  // Mamba-2 (mamba2.h): q and k are C and B of a group, v is a head's x; k (beta * v)^T is added to the state without
  // reading it, and q and k are not normalised.
  bool mamba2;
  bool sigmoid;  // the output's gate is a sigmoid in place of SiLU
  float
      bound;  // Kimi: lower bound of a decay's logarithm, which is then a sigmoid times the bound; 0: no bound
  int64_t channels() const { return int64_t{2} * key_heads * key_dim + int64_t{value_heads} * value_dim; }
  int64_t delta_values() const { return int64_t{value_heads} * key_dim * value_dim; }
  int decays_of_head() const { return kimi ? key_dim : 1; }
  int64_t decays() const { return int64_t{value_heads} * decays_of_head(); }
  int64_t state_values() const { return delta_values() + (taps - 1) * channels(); }
  int key_head(int value_head) const {
    return tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
};

// The sequences of a step: sequence i has rows row[i] .. row[i] + count[i] - 1 and its own state slot. Its last
// drafts[i] rows are drafts. They do not change the state: `pending` keeps their changes instead, from record first[i]
// on.
struct StateSequences {
  int num;
  const int32_t *row, *count, *slot;
  const int32_t *drafts, *first;  // nullptr: no drafts
  int sure(int i) const { return count[i] - (drafts ? drafts[i] : 0); }
};

// One record per draft: its channels before and after the convolution, then beta and decays by value head.
struct PendingStates {
  float* records;
  int64_t record_values;
  static int64_t values(const DeltaHeads& h) { return 2 * h.channels() + h.value_heads + h.decays(); }
  float* record(int64_t i) const { return records + i * record_values; }
};

// What the recurrent layers of a step have in common: the convolution of q, k and v, and the steps of the states.
//
// For each layer, a state slot holds the delta state, [value_heads, value_dim / 32, key_dim, 32], so that a block of
// columns is contiguous, then the convolution's window, [taps - 1, channels].
struct RecurrentOp {
  static constexpr int kColumns = 32;
  const Kernels* k;
  DeltaHeads heads;
  // q, k and v, rows `strides` numbers apart. Replaced by the convolution's output, q and k normalised and q scaled.
  float* qkv[3];
  int64_t strides[3];
  // b and a of head h in row t, at t * gate_stride (a: decay_stride) + h / r * group_stride + h % r with r = value_heads /
  // key_heads. Replaced by beta and the decay. In Kimi Delta Attention a is [n, value_heads, key_dim].
  float *b, *a;
  int gate_stride, decay_stride, group_stride;
  const float* conv;       // [taps, channels]
  const float* conv_bias;  // [channels], or nullptr
  const float* rate;       // [value_heads]: -exp(A_log)
  const float* dt_bias;    // [value_heads], or [value_heads, key_dim]
  const float* norm;       // [value_dim]; Mamba-2: [value_heads * value_dim], or nullptr
  float eps;
  float* states;  // this layer's part of slot 0
  int64_t slot_values;
  StateSequences sequences;  // cover all rows
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
  // Returns the record of row t of a sequence; nullptr if the row is not a draft.
  float* record(int sequence, int t) const {
    const int draft = t - sequences.sure(sequence);
    return draft < 0 ? nullptr : pending.record(int64_t{sequences.first[sequence]} + draft);
  }
  // Heads are numbered through q, k and v. A head's channels are convolved for all tokens of the sequence.
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

// out = RMSNorm(o) * norm * silu(z) for every value head; sigmoid(z) in Kimi Delta Attention.
struct DeltaNetOp : RecurrentOp {
  const float* z;  // [n, value_heads * value_dim]
  void operator()(Team& team) const;

 private:
  void make_gates(int sequence, int head) const;
  void write_out(int64_t row, int head) const;
};

// Advances each sequence's state by its first accepted[i] drafts, with the same bits as if they had been ordinary rows.
struct CommitStatesOp {
  const Kernels* k;
  DeltaHeads heads;
  float* states;  // this layer's part of slot 0
  int64_t slot_values;
  PendingStates pending;
  int num;
  const int32_t *slot, *first, *accepted;
  void operator()(Team& team) const;

 private:
  void move_window(int sequence, int64_t channel, int width) const;
  void step_block(int sequence, int head, int block) const;
};

// For each pair (source, target) in order: copies slot source to slot target; source -1 zeroes the target.
struct CopyStatesOp {
  float* states;  // [slots, slot_values]
  int64_t slot_values;
  const int32_t* pairs;  // [count, 2]
  int count;
  void operator()(Team& team) const;
};

}  // namespace moeserve
