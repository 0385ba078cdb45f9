#include "expert_disk/disk_experts.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace moeserve {
namespace {

using Clock = std::chrono::steady_clock;

int64_t micros(Clock::duration d) { return std::chrono::duration_cast<std::chrono::microseconds>(d).count(); }

int most_experts(const std::vector<DiskLayer>& layers) {
  int most = 1;
  for (const DiskLayer& layer : layers) most = std::max(most, layer.experts);
  return most;
}

// Zeros in all slots: the thread of a node writes the pages of its panels first.
struct ClearOp {
  const Matrix* matrix;
  void operator()(Team& team) const {
    team.for_panels(matrix->experts, matrix->panels, [&](int64_t slot, int64_t panel) {
      std::memset(matrix->packed_panel(slot, panel), 0, matrix->panel_bytes);
    });
  }
};

}  // namespace

DiskExperts::DiskExperts(Pool& pool, const Kernels& kernels, const std::vector<std::string>& paths,
                         std::vector<DiskLayer> layers, int threads, int64_t piece_bytes, float decay,
                         double patience)
    : pool_(pool),
      policy_(static_cast<int>(layers.size()), most_experts(layers),
              std::vector<uint8_t>(layers.size() * most_experts(layers), 0).data(),
              std::vector<uint8_t>(layers.size() * most_experts(layers), 1).data(), decay, 0.0),
      piece_bytes_(piece_bytes),
      patience_(patience) {
  const size_t most = static_cast<size_t>(most_experts(layers));
  for (const DiskLayer& of : layers) {
    Layer& layer = layers_.emplace_back();
    layer.of = of;
    if (of.experts == 0) continue;
    layer.experts.resize(of.experts);
    layer.table.assign(of.experts, -1);
    layer.keep.assign(most, Keep::kNot);
    layer.owners.assign(of.parts[0].slots->experts, -1);
    layer.is_pinned.assign(most, 0);
    for (const int32_t expert : of.pinned) layer.is_pinned[expert] = 1;
    layer.free_slots = layer.owners.size() - of.pinned.size();
    for (const DiskPart& part : of.parts) pool_.submit(ClearOp{part.slots});
  }
  pool_.wait();
  reader_ = std::make_unique<DiskReader>(
      kernels, paths, threads, [this](const DiskPiece& piece, const char* error) { on_piece(piece, error); });
  bring_pinned();
}

DiskExperts::~DiskExperts() { pool_.wait(); }

void DiskExperts::run(ExpertsOp op, int index, int32_t* ids, int ahead_layer, const int32_t* ahead,
                      int num_ahead) {
  Layer& layer = layers_[index];
  pool_.wait();
  remove_failed_routes(ids, op.n, op.top_k);
  int64_t* const token_counts = std::exchange(op.expert_token_counts, nullptr);
  op.slots = layer.table.data();
  op.experts = layer.of.experts;
  op.sort_routes();
  const std::vector<int32_t> need(op.active + 1, op.active + 1 + op.active[0]);
  // Pinned experts are ready and take no slot of a wave.
  const auto moving = static_cast<size_t>(
      std::count_if(need.begin(), need.end(), [&](int32_t expert) { return !layer.is_pinned[expert]; }));
  const size_t slots = layer.free_slots;
  const size_t each = moving <= slots ? need.size() : std::max<size_t>(1, slots / 2);
  const bool has_waves = each < need.size();
  if (has_waves) sums_.resize(std::max(sums_.size(), static_cast<size_t>(op.n) * op.down->rows));
  {
    const std::lock_guard lock(mutex_);
    count_use(index, need);
    keep_slots(layer, need, {0, std::min(need.size(), 2 * each)});
    request(index, need.data(), std::min(need.size(), 2 * each), true);
  }
  if (!has_waves) look_ahead(ahead_layer, ahead, num_ahead);

  Part wave{0, 0}, computed{0, 0};
  do {
    wave = {wave.end, std::min(need.size(), wave.end + each)};
    bool has_room = true;
    {
      const std::lock_guard lock(mutex_);
      keep_slots(layer, need, {computed.begin, wave.end});
      has_room = request(index, need.data() + wave.begin, wave.end - wave.begin, true);
    }
    if (!has_room) {  // slots of the wave before are needed
      pool_.wait();
      const std::lock_guard lock(mutex_);
      keep_slots(layer, need, wave);
    }
    const std::vector<int32_t> missing = bring(index, need, wave);
    pool_.wait();
    if (!missing.empty()) {
      fail_tokens(index, op, ids, missing);
      op.sort_routes();
    }
    fill_table(layer);
    if (has_waves) {
      const int32_t *active = op.active + 1, *end = active + op.active[0];
      const int32_t* first = std::lower_bound(active, end, need[wave.begin]);
      const int32_t* behind = std::upper_bound(first, end, need[wave.end - 1]);
      op.wave = {static_cast<int>(first - active), static_cast<int>(behind - first), sums_.data(),
                 wave.begin == 0, wave.end == need.size()};
    }
    pool_.submit(op);
    computed = wave;
    if (wave.end == need.size()) break;
    const std::lock_guard lock(mutex_);
    const size_t next = std::min(need.size(), wave.end + each);
    keep_slots(layer, need, {wave.begin, next});
    request(index, need.data() + wave.end, next - wave.end, true);
  } while (true);

  const std::lock_guard lock(mutex_);
  std::fill(layer.keep.begin(), layer.keep.end(), Keep::kNot);
  for (int rank = 0; token_counts != nullptr && rank < op.active[0]; ++rank) {
    const int expert = op.active[1 + rank];
    token_counts[expert] += op.starts[expert + 1] - op.starts[expert];
    token_counts[op.experts + expert] += 1;
  }
}

// ---------------------------------------------------------------- with the mutex

void DiskExperts::count_use(int index, const std::vector<int32_t>& need) {
  Layer& layer = layers_[index];
  std::vector<uint8_t> used(layer.keep.size(), 0);
  for (const int32_t expert : need) {
    used[expert] = 1;
    ++(layer.experts[expert].state == State::kReady ? counts_.hits : counts_.misses);
  }
  for (const int32_t expert : layer.predicted) counts_.predicted_right += used[expert];
  counts_.predicted += static_cast<int64_t>(layer.predicted.size());
  layer.predicted.clear();
  drop_wrong_guesses(index, used);
  policy_.observe_layer(index, used.data());
}

// Experts that were to be read ahead, are not needed, and of which nothing is read yet.
void DiskExperts::drop_wrong_guesses(int index, const std::vector<uint8_t>& used) {
  Layer& layer = layers_[index];
  for (int e = 0; e < layer.of.experts; ++e) {
    Expert& expert = layer.experts[e];
    if (expert.state != State::kLoading || !expert.is_ahead || used[e]) continue;
    if (!reader_->cancel(index, e, expert.pieces)) continue;
    under_way_ -= expert.pieces;
    if (under_way_ == 0) counts_.busy_us += micros(Clock::now() - busy_since_);
    layer.owners[expert.slot] = -1;
    expert = {};
  }
}

void DiskExperts::keep_slots(Layer& layer, const std::vector<int32_t>& need, Part surely) {
  for (size_t i = 0; i < need.size(); ++i) {
    layer.keep[need[i]] = i < surely.begin ? Keep::kNot : i < surely.end ? Keep::kSurely : Keep::kIfPossible;
  }
}

// Starts the reads of those that are absent. False if some has no slot.
bool DiskExperts::request(int index, const int32_t* ids, size_t count, bool urgent) {
  Layer& layer = layers_[index];
  bool all = true;
  for (size_t i = 0; i < count; ++i) {
    Expert& expert = layer.experts[ids[i]];
    if (expert.state == State::kLoading && expert.is_ahead && urgent) {
      expert.is_ahead = false;
      reader_->hurry(index, ids[i]);
    }
    if (expert.state != State::kAbsent) continue;
    const int slot = take_slot(index, ids[i], urgent);
    if (slot < 0) {
      all = false;
      continue;
    }
    start(index, ids[i], slot, urgent);
  }
  return all;
}

// A free slot, or that of the expert with the lowest score; -1: there is none.
int DiskExperts::take_slot(int index, int expert, bool urgent) {
  Layer& layer = layers_[index];
  const auto free = std::find(layer.owners.begin(), layer.owners.end(), -1);
  if (free != layer.owners.end()) return static_cast<int>(free - layer.owners.begin());
  std::vector<uint8_t> may_go(layer.keep.size(), 0);
  for (int e = 0; e < layer.of.experts; ++e) {
    may_go[e] = layer.experts[e].state == State::kReady && layer.keep[e] == Keep::kNot && !layer.is_pinned[e];
  }
  int outgoing = policy_.lowest(index, may_go.data());
  // A guess counts as a use: the rule of the expert cache's exchanges.
  if (!urgent && outgoing >= 0 && !(policy_.score(index, expert) + 1 > policy_.score(index, outgoing)))
    return -1;
  if (outgoing < 0 && urgent) {  // of those that this step needs later, the last
    for (int e = layer.of.experts - 1; e >= 0 && outgoing < 0; --e) {
      if (layer.is_pinned[e]) continue;
      if (layer.experts[e].state == State::kReady && layer.keep[e] == Keep::kIfPossible) outgoing = e;
    }
  }
  if (outgoing < 0) return -1;
  const int slot = layer.experts[outgoing].slot;
  layer.owners[slot] = -1;
  layer.experts[outgoing] = {};
  return slot;
}

void DiskExperts::start(int index, int expert, int slot, bool urgent) {
  Layer& layer = layers_[index];
  std::vector<DiskPiece> pieces;
  for (size_t i = 0; i < layer.of.parts.size(); ++i) {
    const DiskPart& part = layer.of.parts[i];
    if (i == 1 && part.slots == layer.of.parts[0].slots) continue;  // experts without a gate
    const Matrix& m = *part.slots;
    const auto stride = static_cast<int64_t>(row_bytes(m.type, m.cols));
    const int64_t each = std::max<int64_t>(1, piece_bytes_ / (stride * kPanelRows));
    for (int64_t panel = 0; panel < m.panels; panel += each) {
      const int64_t row = panel * kPanelRows, panels = std::min(each, m.panels - panel);
      const int64_t rows = std::min(panels * kPanelRows, m.rows - row);
      pieces.push_back({index, expert, part.file, part.offset + expert * part.stride + row * stride,
                        rows * stride, &m, slot, panel, panels});
    }
  }
  layer.owners[slot] = expert;
  const int count = static_cast<int>(pieces.size());
  layer.experts[expert] = {State::kLoading, !urgent, slot, count, count, {}};
  if (under_way_ == 0) busy_since_ = Clock::now();
  under_way_ += count;
  reader_->add(std::move(pieces), urgent);
}

// ---------------------------------------------------------------- the step's thread

void DiskExperts::bring_pinned() {
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const std::vector<int32_t>& pinned = layers_[i].of.pinned;
      request(static_cast<int>(i), pinned.data(), pinned.size(), true);
    }
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    const std::vector<int32_t>& pinned = layers_[i].of.pinned;
    const std::vector<int32_t> missing = bring(static_cast<int>(i), pinned, {0, pinned.size()});
    if (missing.empty()) continue;
    const std::string& error = layers_[i].experts[missing[0]].error;
    throw std::system_error(EIO, std::generic_category(),
                            "expert " + std::to_string(missing[0]) + " of layer " + std::to_string(i) + ": " +
                                (error.empty() ? "no read has ended in time" : error));
  }
}

void DiskExperts::look_ahead(int index, const int32_t* ahead, int count) {
  if (ahead == nullptr || layers_[index].of.experts == 0) return;
  Layer& layer = layers_[index];
  std::vector<int32_t>& guess = layer.predicted;
  guess.clear();
  for (int i = 0; i < count; ++i) {
    if (ahead[i] >= 0 && ahead[i] < layer.of.experts) guess.push_back(ahead[i]);
  }
  std::sort(guess.begin(), guess.end());
  guess.erase(std::unique(guess.begin(), guess.end()), guess.end());
  const std::lock_guard lock(mutex_);
  for (const int32_t expert : guess) layer.keep[expert] = Keep::kSurely;
  request(index, guess.data(), guess.size(), false);
  for (const int32_t expert : guess) layer.keep[expert] = Keep::kNot;
}

std::vector<int32_t> DiskExperts::bring(int index, const std::vector<int32_t>& need, Part wave) {
  Layer& layer = layers_[index];
  const Clock::time_point began = Clock::now();
  Clock::time_point last = began;
  std::unique_lock lock(mutex_);
  uint64_t seen = progress_;
  bool is_late = false;
  for (;;) {
    bool waits = false;
    for (size_t i = wave.begin; i < wave.end; ++i) {
      const Expert& expert = layer.experts[need[i]];
      if (expert.state == State::kAbsent && expert.error.empty()) request(index, &need[i], 1, true);
      waits |= expert.state == State::kLoading || (expert.state == State::kAbsent && expert.error.empty());
    }
    if (!waits || is_late) break;
    arrived_.wait_until(lock, last + std::chrono::duration_cast<Clock::duration>(patience_),
                        [&] { return progress_ != seen; });
    is_late = progress_ == seen;
    seen = progress_;
    last = Clock::now();
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
    failed_.try_emplace(i / op.top_k, "expert " + std::to_string(ids[i]) + " of layer " +
                                          std::to_string(index) + " could not be read from disk: " +
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

std::vector<std::pair<int, std::string>> DiskExperts::take_failures() {
  std::vector<std::pair<int, std::string>> out(failed_.begin(), failed_.end());
  failed_.clear();
  return out;
}

DiskCounts DiskExperts::counts() {
  const std::lock_guard lock(mutex_);
  DiskCounts now = counts_;
  if (under_way_ > 0) now.busy_us += micros(Clock::now() - busy_since_);
  return now;
}

// ---------------------------------------------------------------- the reading threads

void DiskExperts::on_piece(const DiskPiece& piece, const char* error) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_[piece.layer];
  Expert& expert = layer.experts[piece.expert];
  if (error == nullptr) {
    counts_.bytes += piece.bytes;
  } else if (expert.error.empty()) {
    expert.error = error;
  }
  if (--under_way_ == 0) counts_.busy_us += micros(Clock::now() - busy_since_);
  if (--expert.left == 0) {
    if (expert.error.empty()) {
      expert.state = State::kReady;
    } else {
      std::string why = std::move(expert.error);
      layer.owners[expert.slot] = -1;
      expert = {};
      expert.error = std::move(why);
    }
  }
  ++progress_;
  arrived_.notify_all();
}

}  // namespace moeserve
