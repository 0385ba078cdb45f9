// Paged attention, grouped-query or latent, on the CPU pool.
#pragma once

#include <memory>
#include <vector>

#include "key_choice.h"
#include "ops.h"

namespace moeserve {

// A step's rows, as attention needs them. The submitting thread builds one per step.
class AttentionPlan {
 public:
  static constexpr int kTileTokens = 16;
  // Contexts are attended in segments of this many keys, each with its own softmax, merged in order. It is fixed, so
  // that results do not depend on how a step is divided among threads.
  static constexpr int kSegment = 1024;

  struct Tile {            // consecutive tokens of one sequence
    int32_t row;           // first row in the step
    int32_t count;         // <= kTileTokens
    int32_t position;      // of the first token
    int32_t end;           // one past the last key that any of its tokens sees
    const int32_t* slots;  // KV slot of each position of the sequence
    const int32_t* ends;   // the same per token; nullptr: a token sees itself and all before it
    int end_of(int token) const { return ends == nullptr ? position + token + 1 : ends[token]; }
  };
  struct Part {  // a tile's work on one segment
    int32_t tile, segment;
    size_t offset;  // offset of its results in `partial`: [kv_heads * cuts, queries, value_dim + 2]
    size_t scores;  // offset of its scores, if sliced: [kv_heads, blocks, queries, 32]
  };

  // Sequence i has rows row[i] .. row[i]+count[i]-1, starting at position[i]; slot_table [table_rows, table_stride].
  // ends: [num_ends], how many of its sequence's keys each row of the step sees, or nullptr for causal attention. A row
  // sees at least its own key, and none after its sequence's last row. Throws std::out_of_range if a read would leave
  // the table, or an end is out of this range. rule: of `choice`; if rows choose, there are no ends, and ChooseKeysOp must
  // run before each attention that is to have chosen keys of its own.
  void build(int sequences, const int32_t* row, const int32_t* count, const int32_t* position,
             const int32_t* req_slot, const int32_t* slot_table, int64_t table_rows, int64_t table_stride,
             int heads, int kv_heads, int value_dim, int threads, const int32_t* ends = nullptr,
             int64_t num_ends = 0, const ChoiceRule& rule = {});

  // Instead of `build`: begins a plan without tiles; the caller adds them to `tiles`, then calls `divide`.
  void begin(int rows, int heads, int kv_heads, int value_dim);
  // Divides the tiles among threads.
  void divide(int threads);

  int rows = 0;  // the step has at least this many rows
  int heads = 0, kv_heads = 0, value_dim = 0;
  std::vector<Tile> tiles;
  bool split = false;  // few tiles with long contexts: different threads take a tile's segments
  // Number of parts that the heads of each KV head are cut into, if there are fewer work units than threads. Each part
  // gathers the keys again.
  int cuts = 1;
  int together = 1;  // KV heads per unit
  // The same in latent attention, where the heads' parts of a unit gather their common keys once.
  int latent_together = 1;
  // Number of slices that the columns of values are cut into, if attention is divided by keys and then by columns
  // (attention_sliced.cpp); 0: divided by heads.
  int slices = 0;
  std::vector<Part> parts;          // by tile, then segment; one per tile if not split
  std::vector<int32_t> first_part;  // [tiles + 1]
  std::vector<float> partial;       // only if split
  std::vector<float> scores;        // only if sliced
  KeyChoice choice;
  // If each KV head chooses: the plan of the rows that do, in which a row and head is a row with one KV head, and the
  // numbers of the heads' vectors are slots. `tiles` then has only the other rows.
  std::unique_ptr<AttentionPlan> by_head;

 private:
  std::vector<int32_t> row_ends;  // a copy of `ends`
  void add_tiles(int row, int count, int position, const int32_t* slots);
  void add_chosen_tiles(const KeyChoice& of);
  size_t add_parts();
  static bool leaves_threads_idle(int64_t units, int threads);
  void cut_heads(int64_t units, int threads);
  void join_heads(int64_t units, int threads);
};

// Attention of the plan's rows, causal unless the plan has ends. A block of keys that overlaps the window is read as a
// whole, so up to 31 keys before the window must be finite.
struct AttentionOp {
  const Kernels* k;
  AttentionPlan* plan;
  const float* q;       // [n, heads, dim], scaled
  KvPool keys, values;  // [slots, kv_heads, dim] and [slots, kv_heads, value_dim]
  Activations out;      // [n, heads * value_dim], or [n * heads, value_dim]
  int heads, kv_heads, dim, value_dim;
  // Keys and values are one pool, [slots, dim]: all heads read the same key, and its first value_dim numbers are its
  // value. kv_heads is then the number of parts that the heads are cut into for the threads.
  bool is_latent;
  int window;  // 0: none; else a position sees itself and the window - 1 positions before it
  const float*
      gate;  // [n, heads, value_dim], or by_head [n, heads]: out is multiplied by its sigmoid; or nullptr
  bool gate_by_head;
  bool gate_softplus;  // softplus instead of sigmoid, by head
  const float* sinks;  // [heads]: an additional logit in each softmax's denominator; or nullptr
  float score_cap;     // c: scores become c * tanh(score / c); 0: they stay. Not with a q8_0 cache.
  int64_t key_stride() const { return is_latent ? dim : int64_t{kv_heads} * dim; }
  int64_t value_stride() const { return is_latent ? dim : int64_t{kv_heads} * value_dim; }
  // Number of parts of the heads, each within one KV head, and of heads per part.
  int parts() const { return kv_heads * plan->cuts; }
  int part_heads() const { return heads / parts(); }
  bool is_sliced() const { return plan->slices > 0 && !is_latent && !keys.is_q8(); }
  void operator()(Team& team) const;
  BytesAhead reads_first(const Team& team) const;
};

}  // namespace moeserve
