// The CPU's side of the hand-off: a GPU publishes a layer's rows in shared memory, the pool computes them, and the
// GPU's stream waits for the answer. One operation of the pool serves a whole step, so no thread has to be woken
// between layers and none spins while no step is under way.
//
// The kernel may take a thread's core at any time, so no layer waits for a particular thread. Every thread looks for
// the request. The first one to see it prepares the turn (turn.h), all threads present compute it in phases
// (pool/phase.h), and the first to find it done answers. A late thread skips what is over.
//
// The shared memory, pinned if there is a GPU (moeserve/kernels/handoff/region.py lays it out):
//
//   part            shape                      written by   when
//   request[layer]  u64, a line each           GPU          last thing of publish: the step's number in the low half,
//                                                           rows in the high half, 0: nothing for the CPU, and the
//                                                           GPU does not wait
//   answer[layer]   u32, a line each           GPU, CPU     publish, before its request: 0 (1 if nothing); the CPU: 1
//   and twice, for even and odd layers:
//   activations     [tokens, row]              GPU          publish: rows that have an expert here
//   ids             i32 [tokens, top_k]        GPU          publish: all rows; -1: none
//   weights         f32 [tokens, top_k]        GPU          publish
//   result          f32 [tokens, hidden]       CPU          before the answer
//
// A layer with experts on disk (expert_disk/) takes several turns: first the experts in RAM, then the ones that are
// read meanwhile, or waves. The thread that prepares a turn waits for their reads; the layer is answered after its last
// turn.
//
// Within a layer the two sides strictly alternate: the GPU publishes a layer only when the previous layer's answer has
// come. A layer's rows and result stay unchanged while the next layer is published.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "expert_disk/disk_experts.h"
#include "ops/gather.h"
#include "ops/ops.h"
#include "turn.h"

namespace moeserve {

class Handoff {
 public:
  static constexpr size_t kFlagBytes = 128;  // two lines: the prefetcher takes them in pairs

  struct Layer {
    const Matrix* gate;  // nullptr: no experts on the CPU
    const Matrix* up;
    const Matrix* down;
    int64_t* expert_token_counts;  // as in ExpertsOp
    ExpertOptions options = {};
  };
  struct Slot {
    Activations y;
    const int32_t* ids;
    const float* weights;
    float* result;
  };
  struct Scratch {  // for one ExpertsOp
    Activations h;
    int32_t* starts;
    int32_t* active;
    int32_t* routes;
  };

  Handoff(const Kernels* kernels, Pool& pool, std::vector<Layer> layers, uint8_t* requests, uint8_t* answers,
          const std::array<Slot, 2>& slots, const Scratch& scratch, int max_tokens, int top_k,
          double timeout_s, DiskExperts* disk = nullptr);
  ~Handoff();
  Handoff(const Handoff&) = delete;

  // Queues the pool's part of one step.
  void begin();
  // Returns how many experts' weights the steps have read so far, in the marked layers. Callable at any time.
  int64_t expert_reads(const uint8_t* layers) const;
  size_t layers() const { return layers_.size(); }
  // The first error; empty if there is none.
  std::string error();
  // Gives up the running work: the GPU's waits end, and their results are invalid.
  void abandon(const std::string& why);

 private:
  struct ServeOp {
    Handoff* handoff;
    uint32_t step;
    void operator()(Team& team) const { handoff->serve(team, step); }
  };

  void serve(Team& team, uint32_t step);
  void serve_layer(Team& team, uint32_t step, int place);
  bool prepare_in_time(Team& team, uint32_t step, int place, int turn);
  uint32_t number_of(uint32_t step, int place, int turn) const;
  bool is_asked(int layer, uint32_t step) const;
  Turn prepare(int layer, uint32_t step);
  Turn prepare_rows(int layer, uint32_t rows);
  Turn prepare_next();
  int gather_inputs(Team& team, const ExpertsOp& op) const;
  void answer(int layer);
  void watch();
  void answer_all();
  std::string what_stands_still();
  uint64_t request(int layer) const;
  uint32_t answered(int layer) const;

  const Kernels* kernels_;
  Pool& pool_;
  const std::vector<Layer> layers_;
  uint8_t* requests_;
  uint8_t* answers_;
  const std::array<Slot, 2> slots_;
  const Scratch scratch_;
  Parts parts_;
  Gathered gate_input_, up_input_;  // of matrices whose columns have an order
  const int max_tokens_, top_k_;
  const double timeout_s_;
  DiskExperts* const disk_;   // nullptr: all experts are in RAM
  DiskRun disk_run_;          // of the layer being computed, if its experts are on disk
  std::vector<int32_t> ids_;  // of its rows

  std::vector<int> cpu_layers_;         // layers with experts here, in order; a place is an index
  std::vector<uint32_t> turns_before_;  // [places + 1]: the turns of a step before each place's
  Turns turns_;
  std::vector<std::atomic<int64_t>> reads_;  // experts read so far, by layer; together in a few cache lines

  std::atomic<uint32_t> begun_{0};   // steps begun; written by begin()
  std::atomic<uint32_t> served_{0};  // steps served
  std::atomic<int> awaited_{0};      // the layer being waited for
  std::atomic<uint64_t> progress_{0};
  std::atomic<bool> failed_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string error_;     // under mutex_
  bool closing_ = false;  // under mutex_
  std::thread watchdog_;  // last member: its thread uses the others
};

}  // namespace moeserve
