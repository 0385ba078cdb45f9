// Experts on disk, some of which are in RAM: each layer's slots hold the experts that the texts use, and experts that a
// step lacks are read before it computes them (docs/explanation/experts-on-disk.md).
//
// An expert is absent (in no slot), loading (it owns a slot that threads write) or ready (its slot is whole and stays as it
// is until another expert takes it). Only ready experts are computed, and no slot that the pool's current wave uses
// changes its owner.
//
// Writers: DiskReader's threads write the slots' panels while the expert is loading. States and owners are written
// under `mutex_`. The thread that calls `next` writes a layer's `table`, for experts that the pool is not computing.
// The thread that calls `begin` and `next` writes everything else.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "expert_cache/policy.h"
#include "expert_disk/disk_reader.h"
#include "expert_disk/read_ahead.h"
#include "ops/ops.h"

namespace moeserve {

// One of a layer's three matrices: the place of its experts in the file, and its slots.
struct DiskPart {
  const Matrix* slots;
  int file;
  int64_t offset, stride;  // of the first expert, and from one to the next
};

struct DiskLayer {
  int experts = 0;  // 0: the layer's experts are not on disk
  // Each expert's number in the file; empty: the same numbers.
  std::vector<int32_t> in_file{};
  std::array<DiskPart, 3> parts{};
  std::vector<int32_t> pinned{};  // experts that are read at the start and stay; fewer than slots
};

// Since the start.
struct DiskCounts {
  int64_t hits = 0, misses = 0;  // experts that steps used, ready when they were asked for or not
  int64_t bytes = 0;             // read
  int64_t waited_us = 0;         // by steps
  int64_t busy_us = 0;           // at least one read was under way
  int64_t predicted = 0, predicted_right = 0;
  int64_t errors = 0;  // experts that could not be read
};

// A range of `DiskRun::need`.
struct NeedRange {
  size_t begin, end;
};

// One layer of one step.
struct DiskRun {
  ExpertsOp op{};  // the next operation
  int layer = 0;
  int32_t* ids = nullptr;           // op.ids
  int64_t* token_counts = nullptr;  // ExpertsOp::expert_token_counts
  std::vector<int32_t> need;        // ids, ascending
  size_t each = 0;                  // experts of an operation
  size_t hits = 0;                  // computed while the others are read
  bool has_waves = false, is_begun = false;
  NeedRange wave{0, 0}, computed{0, 0};
};

// Experts that another layer is expected to use next, [count], the surest first. ids: nullptr: no guess.
struct Guess {
  int layer = 0;
  const int32_t* ids = nullptr;
  int count = 0;
};

class DiskExperts {
 public:
  // Allocates the slots' memory, so that a lack of memory shows here, and reads the pinned experts. `piece_bytes`:
  // approximate bytes of a read. `patience`: seconds in which no pending read ends, after which steps give up on reads.
  // Throws std::system_error for a file that cannot be opened, or a pinned expert that cannot be read.
  DiskExperts(Pool& pool, const Kernels& kernels, const std::vector<std::string>& paths,
              std::vector<DiskLayer> layers, int threads, int64_t piece_bytes, float decay, double patience);
  ~DiskExperts();
  DiskExperts(const DiskExperts&) = delete;

  // Computes a layer's experts: waits for the pool, reads missing experts and queues `op`, or several operations: first
  // the experts in RAM, then the others, or waves if there are fewer slots than experts. `ids`: op.ids, from which the
  // routes of tokens whose experts cannot be read are removed; `take_failures` returns these tokens. Guessed experts
  // are read only while no other reads wait.
  void run(const ExpertsOp& op, int layer, int32_t* ids, const Guess& guess);

  // The same for a caller that computes the operations itself: call `begin` while nothing of the step is being
  // computed, then `next`, which prepares run.op, until it returns false. `wait` returns when the operations so far are
  // computed.
  void begin(DiskRun& run, const ExpertsOp& op, int layer, int32_t* ids, const Guess& guess);
  bool next(DiskRun& run, const std::function<void()>& wait);

  int experts_of(int layer) const { return layers_.at(layer).of.experts; }
  size_t layers() const { return layers_.size(); }
  int64_t bytes() const;  // of all experts in the files
  double patience() const { return patience_.count(); }
  // The most operations that a layer's experts take in a step.
  int most_operations(int layer) const;
  // Allocates buffers for steps of `tokens` tokens, for callers that cannot wait for the pool later.
  void reserve(int tokens);
  // Returns (row of the step, reason) of each token that failed since the last call.
  std::vector<std::pair<int, std::string>> take_failures();
  DiskCounts counts();

  // Call it between steps. Holds the slot of a ready expert until `release`, so that its weights can be copied. Returns
  // the slot; -1 if the expert is not ready or half of the layer's slots are already held.
  int hold(int layer, int expert);
  void release(int layer, int expert);
  // Marks, in [experts_of(layer)], the experts that can be held now, all at once: the ones with the highest scores.
  void mark_holdable(int layer, uint8_t* marks);
  // Marks the experts that are not completely in a slot, by their numbers in the file, [largest number + 1].
  void mark_absent(int layer, uint8_t* marks);
  int largest_number(int layer) const;  // of a layer's experts in the file; -1: it has none on disk

 private:
  enum class State : uint8_t { kAbsent, kLoading, kReady };
  enum class Keep : uint8_t { kNot, kIfPossible, kSurely };  // an expert's slot
  struct Expert {
    State state = State::kAbsent;
    bool is_ahead = false;    // its pieces are not urgent
    bool is_dropped = false;  // it becomes absent when the pieces that are being read have ended
    int32_t slot = -1;
    int left = 0;       // pieces that are not done
    std::string error;  // of the last read
  };
  struct Layer {
    DiskLayer of;
    std::vector<Expert> experts;
    std::vector<int32_t> owners;     // of each slot; -1: free
    std::vector<int32_t> table;      // ExpertsOp::slots
    std::vector<Keep> keep;          // of each expert
    std::vector<uint8_t> is_pinned;  // of each expert
    std::vector<uint8_t> is_held;    // of each expert
    int64_t expert_bytes = 0;        // in the file
    size_t free_slots = 0;           // that no pinned expert has
    size_t held_slots = 0;
    std::vector<int32_t> predicted;  // for the step to come
    std::vector<int32_t> absent;     // those of `predicted` that were absent then
  };

  // With `mutex_` held.
  void count_use(int index, const std::vector<int32_t>& need);
  void drop_wrong_guesses(int index, const std::vector<uint8_t>& used);
  bool request(int index, const int32_t* ids, size_t count, bool urgent);
  int take_slot(int index, int expert, bool urgent);
  void start(int index, int expert, int slot, bool urgent);
  void keep_slots(Layer& layer, const std::vector<int32_t>& need, NeedRange surely);
  void end_read(Layer& layer, Expert& expert);
  std::string name_of(int index, int expert) const;

  void bring_pinned();
  void look_ahead(int index, const Guess& guess);
  bool split(DiskRun& run);
  // Waits until each of the experts is ready or has failed. Returns the failed ones.
  std::vector<int32_t> bring(int index, const std::vector<int32_t>& need, NeedRange wave);
  void fail_tokens(int index, const ExpertsOp& op, int32_t* ids, const std::vector<int32_t>& missing);
  void remove_failed_routes(int32_t* ids, int n, int top_k) const;
  void fill_table(Layer& layer);
  void end(DiskRun& run);
  void on_piece(const DiskPiece& piece, const char* error);

  Pool& pool_;
  std::vector<Layer> layers_;
  ExpertCachePolicy policy_;
  ReadAhead read_ahead_;
  int paused_ = -1;  // the layer behind which the step is, if the next one's experts were guessed
  const int64_t piece_bytes_;
  const std::chrono::duration<double> patience_;
  std::map<int, std::string> failed_;  // tokens of the running step
  std::vector<float> sums_;            // Wave::sums
  DiskRun run_;                        // of `run`

  std::mutex mutex_;
  std::condition_variable arrived_;
  uint64_t progress_ = 0;  // pieces done
  int64_t pending_ = 0;    // pieces that are not done
  // Time when the last piece was done, or when the first piece was requested from an idle disk.
  std::chrono::steady_clock::time_point alive_at_;
  DiskCounts counts_;
  std::unique_ptr<DiskReader> reader_;  // last: its threads use all of the above
};

}  // namespace moeserve
