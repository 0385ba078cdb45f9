// A step's side of experts on disk: which experts a layer needs, in which order they are computed, and the wait for them.
#include <algorithm>
#include <utility>

#include "expert_disk/disk_experts.h"

namespace moeserve {
namespace {

using Clock = std::chrono::steady_clock;

int64_t micros(Clock::duration d) { return std::chrono::duration_cast<std::chrono::microseconds>(d).count(); }

double seconds_now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

}  // namespace

void DiskExperts::run(const ExpertsOp& op, int layer, int32_t* ids, const Guess& guess) {
  pool_.wait();
  begin(run_, op, layer, ids, guess);
  for (bool has_more = true; has_more;) {
    has_more = next(run_, [this] { pool_.wait(); });
    pool_.submit(run_.op);
  }
}

void DiskExperts::begin(DiskRun& run, const ExpertsOp& op, int index, int32_t* ids, const Guess& guess) {
  Layer& layer = layers_[index];
  remove_failed_routes(ids, op.n, op.top_k);
  run.op = op;
  run.layer = index;
  run.ids = ids;
  run.token_counts = std::exchange(run.op.expert_token_counts, nullptr);
  run.op.slots = layer.table.data();
  run.op.experts = layer.of.experts;
  run.op.sort_routes();
  run.need.assign(op.active + 1, op.active + 1 + op.active[0]);
  run.wave = run.computed = {0, 0};
  run.hits = 0;
  run.is_begun = false;
  // Pinned and held experts are ready and take no slot of a wave.
  const auto moving =
      static_cast<size_t>(std::count_if(run.need.begin(), run.need.end(), [&](int32_t expert) {
        return !layer.is_pinned[expert] && !layer.is_held[expert];
      }));
  const size_t slots = layer.free_slots - layer.held_slots;
  run.each = moving <= slots ? run.need.size() : std::max<size_t>(1, slots / 2);
  run.has_waves = run.each < run.need.size();
  if (run.has_waves) sums_.resize(std::max(sums_.size(), static_cast<size_t>(op.n) * op.down->rows));
  if (paused_ >= 0) read_ahead_.pause_ends(std::exchange(paused_, -1), seconds_now());
  {
    const std::lock_guard lock(mutex_);
    const size_t first = std::min(run.need.size(), 2 * run.each);
    count_use(index, run.need);
    keep_slots(layer, run.need, {0, first});
    request(index, run.need.data(), first, true);
  }
  if (run.has_waves || guess.ids == nullptr || layers_[guess.layer].of.experts == 0) return;
  look_ahead(index, guess);
  paused_ = index;
}

bool DiskExperts::next(DiskRun& run, const std::function<void()>& wait) {
  Layer& layer = layers_[run.layer];
  const std::vector<int32_t>& need = run.need;
  if (split(run)) return true;
  NeedRange& wave = run.wave;
  wave = {wave.end, std::min(need.size(), wave.end + run.each)};
  bool has_room = true;
  {
    const std::lock_guard lock(mutex_);
    keep_slots(layer, need, {run.computed.begin, wave.end});
    has_room = request(run.layer, need.data() + wave.begin, wave.end - wave.begin, true);
  }
  if (!has_room) {  // slots of the wave before are needed
    wait();
    const std::lock_guard lock(mutex_);
    keep_slots(layer, need, wave);
  }
  const std::vector<int32_t> missing = bring(run.layer, need, wave);
  if (run.has_waves || !missing.empty()) wait();
  if (!missing.empty()) {
    fail_tokens(run.layer, run.op, run.ids, missing);
    run.op.sort_routes();
    run.hits = 0;  // the products so far are in the places of other routes
  }
  fill_table(layer);
  run.op.wave = {};
  if (run.hits > 0) {
    run.op.wave.first = static_cast<int>(run.hits);
    run.op.wave.count = static_cast<int>(need.size() - run.hits);
    run.op.wave.adds_all = true;
  } else if (run.has_waves) {
    const int32_t *active = run.op.active + 1, *last = active + run.op.active[0];
    const int32_t* first = std::lower_bound(active, last, need[wave.begin]);
    const int32_t* behind = std::upper_bound(first, last, need[wave.end - 1]);
    run.op.wave.first = static_cast<int>(first - active);
    run.op.wave.count = static_cast<int>(behind - first);
    run.op.wave.sums = sums_.data();
    run.op.wave.is_first = wave.begin == 0;
    run.op.wave.is_last = wave.end == need.size();
  }
  run.computed = wave;
  if (wave.end == need.size()) {
    end(run);
    return false;
  }
  const std::lock_guard lock(mutex_);
  const size_t ahead = std::min(need.size(), wave.end + run.each);
  keep_slots(layer, need, {wave.begin, ahead});
  request(run.layer, need.data() + wave.end, ahead - wave.end, true);
  return true;
}

// In a step of few routes in which only some experts are ready: prepares their products, to be computed while the
// others are read.
bool DiskExperts::split(DiskRun& run) {
  ExpertsOp& op = run.op;
  if (std::exchange(run.is_begun, true) || run.has_waves || !op.keeps_parts() || op.lora.any() ||
      op.lora.down != nullptr)
    return false;
  Layer& layer = layers_[run.layer];
  int32_t *first = op.active + 1, *last = first + op.active[0], *behind = first;
  {
    const std::lock_guard lock(mutex_);
    behind = std::stable_partition(
        first, last, [&](int32_t expert) { return layer.experts[expert].state == State::kReady; });
  }
  if (behind == first || behind == last) return false;
  run.hits = static_cast<size_t>(behind - first);
  fill_table(layer);
  op.wave = {};
  op.wave.count = static_cast<int>(run.hits);
  op.wave.only_products = true;
  return true;
}

void DiskExperts::end(DiskRun& run) {
  if (paused_ >= 0) read_ahead_.pause_begins(paused_, seconds_now());
  Layer& layer = layers_[run.layer];
  {
    const std::lock_guard lock(mutex_);
    std::fill(layer.keep.begin(), layer.keep.end(), Keep::kNot);
  }
  const ExpertsOp& op = run.op;
  for (int rank = 0; run.token_counts != nullptr && rank < op.active[0]; ++rank) {
    const int expert = op.active[1 + rank];
    run.token_counts[expert] += op.starts[expert + 1] - op.starts[expert];
    run.token_counts[op.experts + expert] += 1;
  }
}

// Requests the experts that another layer is expected to use, as far as reading them pays.
void DiskExperts::look_ahead(int index, const Guess& guess) {
  Layer& layer = layers_[guess.layer];
  std::vector<int32_t>& ids = layer.predicted;
  ids.clear();
  for (int i = 0; i < guess.count; ++i) {
    const int32_t expert = guess.ids[i];
    if (expert < 0 || expert >= layer.of.experts) continue;
    if (std::find(ids.begin(), ids.end(), expert) == ids.end()) ids.push_back(expert);
  }
  const int64_t piece = std::min(piece_bytes_, layer.expert_bytes);
  int64_t left = read_ahead_.bytes_worth_reading(index, reader_->bytes_per_s(), piece);
  const std::lock_guard lock(mutex_);
  layer.absent.clear();
  for (const int32_t expert : ids) {
    layer.keep[expert] = Keep::kSurely;
    if (layer.experts[expert].state == State::kAbsent) layer.absent.push_back(expert);
  }
  for (const int32_t expert : layer.absent) {
    if (left <= 0) break;
    request(guess.layer, &expert, 1, false);
    left -= layer.expert_bytes;
  }
  for (const int32_t expert : ids) layer.keep[expert] = Keep::kNot;
}

std::vector<int32_t> DiskExperts::bring(int index, const std::vector<int32_t>& need, NeedRange wave) {
  Layer& layer = layers_[index];
  const Clock::time_point began = Clock::now();
  std::unique_lock lock(mutex_);
  uint64_t seen = progress_;
  bool is_late = false;
  const auto patience = std::chrono::duration_cast<Clock::duration>(patience_);
  // A disk that did not answer for long may work again, so one step waits for it briefly.
  const Clock::time_point least = failed_.empty() ? began + patience / 10 : began;
  for (;;) {
    bool waits = false;
    for (size_t i = wave.begin; i < wave.end; ++i) {
      const Expert& expert = layer.experts[need[i]];
      if (expert.state == State::kAbsent && expert.error.empty()) request(index, &need[i], 1, true);
      waits |= expert.state == State::kLoading || (expert.state == State::kAbsent && expert.error.empty());
    }
    if (!waits || is_late) break;
    // Counted from the disk's last answer, so that a hanging disk delays a step once, not at each layer.
    arrived_.wait_until(lock, std::max(least, alive_at_ + patience), [&] { return progress_ != seen; });
    is_late = progress_ == seen;
    seen = progress_;
  }
  std::vector<int32_t> missing;
  for (size_t i = wave.begin; i < wave.end; ++i) {
    if (layer.experts[need[i]].state != State::kReady) missing.push_back(need[i]);
  }
  counts_.waited_us += micros(Clock::now() - began);
  return missing;
}

// While the pool is idle.
void DiskExperts::fail_tokens(int index, const ExpertsOp& op, int32_t* ids,
                              const std::vector<int32_t>& missing) {
  Layer& layer = layers_[index];
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < op.n * op.top_k; ++i) {
    if (ids[i] < 0 || !std::binary_search(missing.begin(), missing.end(), ids[i])) continue;
    const std::string& error = layer.experts[ids[i]].error;
    failed_.try_emplace(i / op.top_k, name_of(index, ids[i]) + " could not be read from disk: " +
                                          (error.empty() ? "no read has ended in time" : error));
  }
  counts_.errors += static_cast<int64_t>(missing.size());
  // The next step that needs it reads it again.
  for (const int32_t expert : missing) layer.experts[expert].error.clear();
  remove_failed_routes(ids, op.n, op.top_k);
}

void DiskExperts::remove_failed_routes(int32_t* ids, int n, int top_k) const {
  for (const auto& [token, error] : failed_) {
    if (token < n) std::fill_n(ids + static_cast<int64_t>(token) * top_k, top_k, -1);
  }
}

void DiskExperts::fill_table(Layer& layer) {
  const std::lock_guard lock(mutex_);
  for (int e = 0; e < layer.of.experts; ++e) {
    const Expert& expert = layer.experts[e];
    layer.table[e] = expert.state == State::kReady ? expert.slot : -1;
  }
}

}  // namespace moeserve
