#include "handoff.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace moeserve {
namespace {

using Clock = std::chrono::steady_clock;

// About 1 ms: longer than the GPU's part of a layer in a decode step. A longer wait means a prefill step, whose layers
// take the GPU milliseconds. From then on the first thread sleeps briefly between looks. The other threads sleep until
// it has found a request, and now and then look themselves, in case it has lost its core.
constexpr int kLayerSpins = 20000;
// The first thread polls the request continuously. The others poll whether it has found one, and look at the request
// itself only this seldom: the GPU's write must invalidate every cached copy of the line.
constexpr int kLooksApart = 32;
constexpr auto kDoze = std::chrono::microseconds(50), kSleep = std::chrono::microseconds(2000);

constexpr int kFewExperts = 2;  // a work unit of one panel stays small with this many experts

constexpr int kGatherPhases = 1;

bool is_on_disk(const DiskExperts* disk, int layer) { return disk != nullptr && disk->experts_of(layer) > 0; }

constexpr auto kPoisonPeriod = std::chrono::milliseconds(1);

template <class T>
std::atomic_ref<T> flag(uint8_t* base, int layer) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(base + layer * Handoff::kFlagBytes));
}

}  // namespace

Handoff::Handoff(const Kernels* kernels, Pool& pool, std::vector<Layer> layers, uint8_t* requests,
                 uint8_t* answers, const std::array<Slot, 2>& slots, const Scratch& scratch, int max_tokens,
                 int top_k, double timeout_s, DiskExperts* disk)
    : kernels_(kernels),
      pool_(pool),
      layers_(std::move(layers)),
      requests_(requests),
      answers_(answers),
      slots_(slots),
      scratch_(scratch),
      max_tokens_(max_tokens),
      top_k_(top_k),
      timeout_s_(timeout_s),
      disk_(disk),
      turns_before_{0},
      reads_(layers_.size()),
      watchdog_([this] { watch(); }) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].gate == nullptr) continue;
    const int layer = static_cast<int>(i);
    cpu_layers_.push_back(layer);
    const int turns = is_on_disk(disk_, layer) ? disk_->most_operations(layer) : 1;
    turns_before_.push_back(turns_before_.back() + static_cast<uint32_t>(turns));
    parts_.fit(pool_, max_tokens_ * top_k_, layers_[i].down->rows);
    if (layers_[i].gate->order != nullptr) gate_input_.fit(pool_, *layers_[i].gate, max_tokens_ * top_k_);
    if (layers_[i].up->order != nullptr) up_input_.fit(pool_, *layers_[i].up, max_tokens_ * top_k_);
  }
  if (disk_ == nullptr) return;
  disk_->reserve(max_tokens_);
  ids_.resize(static_cast<size_t>(max_tokens_) * top_k_);
}

Handoff::~Handoff() {
  if (served_.load() != begun_.load()) abandon("closed while a step was under way");
  pool_.wait();
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  watchdog_.join();
}

void Handoff::begin() {
  const uint32_t step = begun_.fetch_add(1) + 1;
  pool_.submit(ServeOp{this, step});
}

int64_t Handoff::expert_reads(const uint8_t* layers) const {
  int64_t reads = 0;
  for (size_t i = 0; i < reads_.size(); ++i)
    if (layers[i] != 0) reads += reads_[i].load(std::memory_order_relaxed);
  return reads;
}

std::string Handoff::error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Handoff::abandon(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = why;
  }
  failed_.store(true);
  answer_all();
  turns_.wakes().wake();
  changed_.notify_all();
}

// Every thread of the pool runs this.
void Handoff::serve(Team& team, uint32_t step) {
  for (int place = 0; place < static_cast<int>(cpu_layers_.size()); ++place) serve_layer(team, step, place);
  advance(served_, step);
}

// Every thread counts the phases of every possible turn, including turns that were over when it arrived and turns that
// a layer does not take.
void Handoff::serve_layer(Team& team, uint32_t step, int place) {
  constexpr int kPhases = kGatherPhases + ExpertsOp::kMostPhases;
  const int most = static_cast<int>(turns_before_[place + 1] - turns_before_[place]);
  int i = 0;
  for (bool is_last = false; i < most && !is_last; ++i) {
    const uint32_t number = number_of(step, place, i);
    int phases = 0;
    Turn turn;
    if (!prepare_in_time(team, step, place, i)) break;
    if (turns_.read(number, &turn)) {
      is_last = turn.is_last != 0;
      if (turn.has_work != 0) {
        phases = gather_inputs(team, turn.op);
        phases += turn.op.compute(team, false);
        if (turns_.end(number) && is_last) answer(cpu_layers_[place]);
      }
    }
    team.skip_phases(kPhases - phases);
  }
  team.skip_phases((most - i) * kPhases);
}

uint32_t Handoff::number_of(uint32_t step, int place, int turn) const {
  return (step - 1) * turns_before_.back() + turns_before_[place] + static_cast<uint32_t>(turn) + 1;
}

// Gathers the rows of gate's and up's inputs. Returns its number of phases.
int Handoff::gather_inputs(Team& team, const ExpertsOp& op) const {
  if (op.gate_input.rows == 0 && op.up_input.rows == 0) return 0;
  const int most = op.n * op.top_k;
  const int32_t* routed = op.starts + op.gate->experts;
  const GatherRoutesOp gate{
      {op.k, op.y.f32, op.gate->order, most, op.gate_input}, op.ids, op.routes, routed, op.top_k};
  const GatherRoutesOp up{
      {op.k, op.y.f32, op.up->order, most, op.up_input}, op.ids, op.routes, routed, op.top_k};
  const bool has_gate = op.gate_input.rows != 0;
  const bool has_up = op.up_input.rows != 0 &&
                      op.up_input.row(op.up->integer(), 0) != op.gate_input.row(op.gate->integer(), 0);
  team.for_units(most, [&](int64_t i) {
    if (has_gate) gate.row(team, i);
    if (has_up) up.row(team, i);
  });
  return kGatherPhases;
}

// Waits until the turn is ready, and prepares it unless another thread does. Returns false after a failure.
bool Handoff::prepare_in_time(Team& team, uint32_t step, int place, int turn) {
  const int layer = cpu_layers_[place];
  const uint32_t number = number_of(step, place, turn);
  for (int looks = 0; !failed_.load(std::memory_order_relaxed); ++looks) {
    const uint32_t wakes = turns_.wakes().now();
    if (turns_.is_ready(number)) return true;
    const bool looks_itself = team.thread() == 0 || looks % kLooksApart == 0 || looks > kLayerSpins;
    if (looks_itself && is_asked(layer, step) && turns_.claim(number)) {
      turns_.publish(number, turn == 0 ? prepare(layer, step) : prepare_next());
      return !failed_.load();
    }
    if (looks == 0) awaited_.store(layer, std::memory_order_relaxed);
    if (looks < kLayerSpins) {
      relax();
    } else if (team.thread() == 0) {
      std::this_thread::sleep_for(kDoze);
    } else {
      turns_.wakes().sleep(wakes, kSleep);
    }
  }
  return false;
}

bool Handoff::is_asked(int layer, uint32_t step) const {
  return static_cast<int32_t>(static_cast<uint32_t>(request(layer)) - step) >= 0;
}

// Prepares the turn of a layer whose request has come.
Turn Handoff::prepare(int layer, uint32_t step) {
  progress_.fetch_add(1, std::memory_order_relaxed);
  const uint64_t flag = request(layer);
  // If the GPU is already in a later step, it had no work for the CPU here: it always waits for the answer to a
  // request.
  const uint32_t rows = static_cast<uint32_t>(flag) == step ? static_cast<uint32_t>(flag >> 32) : 0;
  if (rows == 0) return {};
  if (rows > static_cast<uint32_t>(max_tokens_)) {
    abandon("layer " + std::to_string(layer) + ": " + std::to_string(rows) + " rows published");
    return {};
  }
  return prepare_rows(layer, rows);
}

Turn Handoff::prepare_rows(int layer, uint32_t rows) {
  const Layer& l = layers_[layer];
  const Slot& slot = slots_[layer % 2];
  Turn turn;
  turn.has_work = 1;
  turn.op = ExpertsOp{kernels_,
                      l.gate,
                      l.up,
                      l.down,
                      slot.y,
                      slot.ids,
                      slot.weights,
                      static_cast<int>(rows),
                      top_k_,
                      scratch_.h,
                      scratch_.starts,
                      scratch_.active,
                      scratch_.routes,
                      l.expert_token_counts,
                      slot.result,
                      false,
                      parts_.data(),
                      l.options};
  if (is_on_disk(disk_, layer)) {
    std::copy_n(slot.ids, static_cast<size_t>(rows) * top_k_, ids_.begin());
    turn.op.ids = ids_.data();
    turn.op.most_rows = max_tokens_;
    disk_->begin(disk_run_, turn.op, layer, ids_.data(), {});
    reads_[layer].fetch_add(static_cast<int64_t>(disk_run_.need.size()), std::memory_order_relaxed);
    return prepare_next();
  }
  if (!turn.op.sort_routes()) {
    abandon("layer " + std::to_string(layer) + ": an expert was asked for that the CPU does not have");
    return {};
  }
  reads_[layer].fetch_add(scratch_.active[0], std::memory_order_relaxed);
  turn.op.sums_at_once = scratch_.active[0] <= kFewExperts;
  turn.op.most_rows = max_tokens_;
  const int routes = static_cast<int>(rows) * top_k_;
  if (l.gate->order != nullptr) turn.op.gate_input = gate_input_.fit(pool_, *l.gate, routes);
  if (l.up->order == l.gate->order && l.up->integer() == l.gate->integer())
    turn.op.up_input = turn.op.gate_input;
  else if (l.up->order != nullptr)
    turn.op.up_input = up_input_.fit(pool_, *l.up, routes);
  return turn;
}

// Prepares the next turn of a layer whose experts are on disk. Every earlier one has ended.
Turn Handoff::prepare_next() {
  progress_.fetch_add(1, std::memory_order_relaxed);
  Turn turn;
  turn.has_work = 1;
  turn.is_last = !disk_->next(disk_run_, [] {});
  turn.op = disk_run_.op;
  return turn;
}

void Handoff::answer(int layer) {
  progress_.fetch_add(1, std::memory_order_relaxed);
  flag<uint32_t>(answers_, layer).store(1, std::memory_order_release);
}

uint64_t Handoff::request(int layer) const {
  return flag<uint64_t>(requests_, layer).load(std::memory_order_acquire);
}

uint32_t Handoff::answered(int layer) const {
  return flag<uint32_t>(answers_, layer).load(std::memory_order_acquire);
}

// The watchdog thread. Four times per timeout, but at most once a second, it checks that the running work has
// progressed. After a failure it answers every request, so that the GPU's stream can finish.
void Handoff::watch() {
  const auto timeout = std::chrono::duration<double>(timeout_s_);
  const auto period = std::min(timeout / 4, std::chrono::duration<double>(1.0));
  uint64_t seen = 0;
  Clock::time_point since = Clock::now();
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (failed_.load()) {
      answer_all();
      changed_.wait_for(lock, kPoisonPeriod);
      continue;
    }
    changed_.wait_for(lock, period);
    const uint64_t progress = progress_.load(std::memory_order_relaxed);
    const std::string still = what_stands_still();
    if (still.empty() || progress != seen) {
      seen = progress;
      since = Clock::now();
    } else if (Clock::now() - since >= timeout) {
      lock.unlock();
      abandon(still);
      lock.lock();
    }
  }
}

void Handoff::answer_all() {
  for (size_t layer = 0; layer < layers_.size(); ++layer) flag<uint32_t>(answers_, layer).store(1);
}

// Returns a description of the work that makes no progress; empty if no work is running.
std::string Handoff::what_stands_still() {
  const uint32_t begun = begun_.load(), served = served_.load();
  const std::string seconds = " for " + std::to_string(timeout_s_) + " s";
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const uint64_t r = request(static_cast<int>(layer));
    if (r >> 32 == 0 || answered(static_cast<int>(layer)) != 0) continue;
    const std::string where = "layer " + std::to_string(layer);
    if (static_cast<int32_t>(static_cast<uint32_t>(r) - begun) > 0) {
      return "a step was launched without begin(): " + where + " has waited" + seconds;
    }
    return "the CPU pool has not answered " + where + seconds;
  }
  if (begun == served) return "";
  return "the GPU has not published layer " + std::to_string(awaited_.load()) + seconds;
}

}  // namespace moeserve
