#include "expert_disk/disk_experts.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace moeserve {
namespace {

int most_experts(const std::vector<DiskLayer>& layers) {
  int most = 1;
  for (const DiskLayer& layer : layers) most = std::max(most, layer.experts);
  return most;
}

// Writes zeros into all slots, so that each NUMA node's thread is the first to write the pages of its panels.
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
      read_ahead_(static_cast<int>(layers.size())),
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
    layer.is_held.assign(most, 0);
    for (const int32_t expert : of.pinned) layer.is_pinned[expert] = 1;
    layer.free_slots = layer.owners.size() - of.pinned.size();
    for (size_t i = 0; i < of.parts.size(); ++i) {
      const Matrix* slots = of.parts[i].slots;
      if (i == 1 && slots == of.parts[0].slots) continue;  // experts without a gate
      pool_.submit(ClearOp{slots});
      layer.expert_bytes += static_cast<int64_t>(row_bytes(slots->type, slots->cols)) * slots->rows;
    }
  }
  pool_.wait();
  reader_ = std::make_unique<DiskReader>(
      kernels, paths, threads, [this](const DiskPiece& piece, const char* error) { on_piece(piece, error); });
  bring_pinned();
}

DiskExperts::~DiskExperts() { pool_.wait(); }

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
                            name_of(static_cast<int>(i), missing[0]) + ": " +
                                (error.empty() ? "no read has ended in time" : error));
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
  now.busy_us = reader_->busy_us();
  return now;
}

std::string DiskExperts::name_of(int index, int expert) const {
  const DiskLayer& of = layers_[index].of;
  const int number = of.in_file.empty() ? expert : of.in_file[expert];
  return "expert " + std::to_string(number) + " of layer " + std::to_string(index);
}

int DiskExperts::most_operations(int index) const {
  const Layer& layer = layers_.at(index);
  const size_t free = layer.free_slots - layer.free_slots / 2;  // of the others some may be held
  const size_t each = std::max<size_t>(1, free / 2);
  return std::max<int>(2, static_cast<int>((layer.of.experts + each - 1) / each));
}

int64_t DiskExperts::bytes() const {
  int64_t sum = 0;
  for (const Layer& layer : layers_) sum += layer.of.experts * layer.expert_bytes;
  return sum;
}

void DiskExperts::reserve(int tokens) {
  int64_t most = 0;
  for (const Layer& layer : layers_) {
    if (layer.of.experts > 0) most = std::max(most, layer.of.parts[2].slots->rows);
  }
  sums_.resize(std::max(sums_.size(), static_cast<size_t>(tokens * most)));
}

void DiskExperts::mark_holdable(int index, uint8_t* marks) {
  const std::lock_guard lock(mutex_);
  const Layer& layer = layers_.at(index);
  std::vector<std::pair<float, int>> ready;
  for (int e = 0; e < layer.of.experts; ++e) {
    const bool moves = layer.experts[e].state == State::kReady && !layer.is_pinned[e] && !layer.is_held[e];
    marks[e] = layer.is_pinned[e];
    if (moves) ready.emplace_back(-policy_.score(index, e), e);
  }
  const size_t most = std::min(ready.size(), layer.free_slots / 2 - layer.held_slots);
  std::partial_sort(ready.begin(), ready.begin() + static_cast<ptrdiff_t>(most), ready.end());
  for (size_t i = 0; i < most; ++i) marks[ready[i].second] = 1;
}

int DiskExperts::largest_number(int index) const {
  const DiskLayer& of = layers_.at(index).of;
  return of.in_file.empty() ? of.experts - 1 : *std::max_element(of.in_file.begin(), of.in_file.end());
}

void DiskExperts::mark_absent(int index, uint8_t* marks) {
  const std::lock_guard lock(mutex_);
  const Layer& layer = layers_.at(index);
  for (int e = 0; e < layer.of.experts; ++e) {
    const int number = layer.of.in_file.empty() ? e : layer.of.in_file[e];
    marks[number] = layer.experts[e].state != State::kReady;
  }
}

int DiskExperts::hold(int index, int expert) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_.at(index);
  const Expert& of = layer.experts.at(expert);
  if (of.state != State::kReady) return -1;
  if (layer.is_held[expert] || layer.is_pinned[expert]) return of.slot;
  if (2 * (layer.held_slots + 1) > layer.free_slots) return -1;
  layer.is_held[expert] = 1;
  ++layer.held_slots;
  return of.slot;
}

void DiskExperts::release(int index, int expert) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_.at(index);
  layer.held_slots -= layer.is_held.at(expert);
  layer.is_held[expert] = 0;
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
  int64_t right = 0;
  for (const int32_t expert : layer.absent) right += used[expert];
  read_ahead_.guessed(static_cast<int64_t>(layer.absent.size()), right);
  layer.predicted.clear();
  layer.absent.clear();
  drop_wrong_guesses(index, used);
  policy_.observe_layer(index, used.data());
}

// Cancels reads ahead of experts that are not needed, except pieces being read and experts that are nearly complete.
void DiskExperts::drop_wrong_guesses(int index, const std::vector<uint8_t>& used) {
  Layer& layer = layers_[index];
  for (int e = 0; e < layer.of.experts; ++e) {
    Expert& expert = layer.experts[e];
    if (expert.state != State::kLoading || !expert.is_ahead || used[e]) continue;
    const int dropped = reader_->cancel(index, e);
    if (dropped == 0) continue;
    expert.is_dropped = true;
    expert.is_ahead = false;
    expert.left -= dropped;
    pending_ -= dropped;
    if (expert.left == 0) end_read(layer, expert);
  }
}

void DiskExperts::keep_slots(Layer& layer, const std::vector<int32_t>& need, NeedRange surely) {
  for (size_t i = 0; i < need.size(); ++i) {
    layer.keep[need[i]] = i < surely.begin ? Keep::kNot : i < surely.end ? Keep::kSurely : Keep::kIfPossible;
  }
}

// Starts the reads of absent experts. Returns false if there is no slot for one of them.
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

// Returns a free slot, or the slot of the expert with the lowest score; -1 if none can be taken.
int DiskExperts::take_slot(int index, int expert, bool urgent) {
  Layer& layer = layers_[index];
  const auto free = std::find(layer.owners.begin(), layer.owners.end(), -1);
  if (free != layer.owners.end()) return static_cast<int>(free - layer.owners.begin());
  std::vector<uint8_t> may_go(layer.keep.size(), 0);
  for (int e = 0; e < layer.of.experts; ++e) {
    may_go[e] = layer.experts[e].state == State::kReady && layer.keep[e] == Keep::kNot &&
                !layer.is_pinned[e] && !layer.is_held[e];
  }
  int outgoing = policy_.lowest(index, may_go.data());
  // A guess counts as a use, as in the expert cache.
  if (!urgent && outgoing >= 0 && !(policy_.score(index, expert) + 1 > policy_.score(index, outgoing)))
    return -1;
  if (outgoing < 0 && urgent) {  // of those that this step needs later, the last
    for (int e = layer.of.experts - 1; e >= 0 && outgoing < 0; --e) {
      if (layer.is_pinned[e] || layer.is_held[e]) continue;
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
  const int64_t number = layer.of.in_file.empty() ? expert : layer.of.in_file[expert];
  for (size_t i = 0; i < layer.of.parts.size(); ++i) {
    const DiskPart& part = layer.of.parts[i];
    if (i == 1 && part.slots == layer.of.parts[0].slots) continue;  // experts without a gate
    const Matrix& m = *part.slots;
    const auto stride = static_cast<int64_t>(row_bytes(m.type, m.cols));
    const int64_t each = std::max<int64_t>(1, piece_bytes_ / (stride * kPanelRows));
    for (int64_t panel = 0; panel < m.panels; panel += each) {
      const int64_t row = panel * kPanelRows, panels = std::min(each, m.panels - panel);
      const int64_t rows = std::min(panels * kPanelRows, m.rows - row);
      pieces.push_back({index, expert, part.file, part.offset + number * part.stride + row * stride,
                        rows * stride, &m, slot, panel, panels});
    }
  }
  layer.owners[slot] = expert;
  const int count = static_cast<int>(pieces.size());
  layer.experts[expert] = {State::kLoading, !urgent, false, slot, count, {}};
  if (pending_ == 0) alive_at_ = std::chrono::steady_clock::now();
  pending_ += count;
  reader_->add(std::move(pieces), urgent);
}

// Called when none of its pieces is being read any more.
void DiskExperts::end_read(Layer& layer, Expert& expert) {
  if (expert.error.empty() && !expert.is_dropped) {
    expert.state = State::kReady;
    return;
  }
  std::string why = expert.is_dropped ? "" : std::move(expert.error);
  layer.owners[expert.slot] = -1;
  expert = {};
  expert.error = std::move(why);
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
  if (--expert.left == 0) end_read(layer, expert);
  ++progress_;
  --pending_;
  alive_at_ = std::chrono::steady_clock::now();
  arrived_.notify_all();
}

}  // namespace moeserve
