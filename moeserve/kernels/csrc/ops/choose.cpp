#include "ops/choose.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>

#include "arch/in_order.h"
#include "ops/measuring_time.h"
#include "ops/ops.h"

namespace moeserve {
namespace {

constexpr int64_t kCols = 2048;  // a common hidden size
constexpr int kTogether = 8;  // panels timed together: for a single one the clock call would weigh too much
// Passes per candidate, alternating; the fastest counts. Fewer than the most once MeasuringTime is over: a pass over a
// type with codebooks takes a tenth of a second.
constexpr int kMostRounds = 5, kLeastRounds = 2;
// After kLeastRounds a form is measured no further if it takes this many times as long as the best one, or as the one in use.
constexpr double kClear = 1.15;
constexpr int64_t kLeastBytes = 64 << 20, kMostBytes = 256 << 20;

// Twice the last level cache, so that each pass reads from memory.
int64_t bytes_beyond_caches() {
  return std::clamp<int64_t>(2 * sysconf(_SC_LEVEL3_CACHE_SIZE), kLeastBytes, kMostBytes);
}

// Returns this thread's CPU time, which leaves out time that its core gave to other processes.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

void fill_randomly(uint64_t seed, size_t bytes, uint8_t* out) {
  uint64_t state = (seed + 1) * 0x9e3779b97f4a7c15;
  for (size_t at = 0; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    const uint64_t number = next_random(state);
    std::memcpy(out + at, &number, sizeof number);
  }
}

struct FillOp {
  const Matrix* w;
  void operator()(Team& team) const {
    team.last_phase();
    team.for_panels(1, w->panels, [&](int64_t, int64_t panel) {
      fill_randomly(panel, w->panel_bytes, w->packed_panel(0, panel));
    });
  }
};

struct TimedProductsOp {
  Product product;
  const Matrix* w;
  const void* const* rows;
  int n;
  std::atomic<double>* seconds;  // sum over all threads
  void operator()(Team& team) const {
    team.last_phase();
    team.for_panels(1, w->panels / kTogether, [&](int64_t, int64_t group) {
      alignas(64) float tile[kManyTokens * kPanelRows];
      const double start = thread_seconds();
      for (int64_t panel = group * kTogether; panel < (group + 1) * kTogether; ++panel) {
        Panel read = w->panel(0, panel);
        read.to_l2 = product.to_l2;
        product.gemm(read, nullptr, w->cols, rows, n, tile);
      }
      seconds->fetch_add(thread_seconds() - start);
    });
  }
};

// kManyTokens quantised activation rows of arbitrary values.
struct ActivationRows {
  ActivationRows() : bytes(kManyTokens * quantized_row_bytes(kCols), 1) {
    for (int t = 0; t < kManyTokens; ++t) rows[t] = bytes.data() + t * quantized_row_bytes(kCols);
  }
  std::vector<uint8_t> bytes;
  const void* rows[kManyTokens];
};

double seconds_of(Pool& pool, const Product& product, const Matrix& w, const ActivationRows& x, int n) {
  std::atomic<double> seconds{0.0};
  pool.submit(TimedProductsOp{product, &w, x.rows, n, &seconds});
  pool.wait();
  return seconds;
}

using Clock = MeasuringTime::Clock;

// A form of a type's product with some number of tokens.
struct Form {
  const char* name;
  Product product;
};

// The forms of a type's products, by the number of tokens.
class Forms {
 public:
  Forms(const Kernels& table, int type, double least_gain)
      : table_(table), other_(narrower_kernels(table)), type_(type), least_gain_(least_gain) {}

  // Returns those with `tokens` tokens, the table's own first. `tokens` increases from call to call.
  std::vector<Form> with(int tokens) const {
    const PanelGemm own = table_.gemm[type_];
    std::vector<Form> forms{{table_.name, {own, false}}};
    if (tokens <= kFewTokens && others_gain_) {
      if (other_ != nullptr) forms.push_back({other_->name, {other_->gemm[type_], false}});
      const InOrderProduct in_order = in_order_product(table_, type_, tokens);
      if (in_order.gemm != nullptr) forms.push_back({in_order.name, {in_order.gemm, false}});
    }
    const bool has_book = codebook_levels[type_] != nullptr;
    if (!has_book) forms.push_back({"prefetch_to_l2", {own, true}});
    return forms;
  }

  // Takes note of the speeds of with(tokens), all but the first: with more tokens the wider instruction set gains.
  void note(const std::vector<Form>& forms, const std::vector<double>& speeds) {
    bool gain = false;
    for (size_t i = 0; i < speeds.size(); ++i) {
      gain |= !forms[1 + i].product.to_l2 && speeds[i] >= least_gain_;
    }
    others_gain_ &= gain;
  }

 private:
  const Kernels& table_;
  const Kernels* other_;
  int type_;
  double least_gain_;
  bool others_gain_ = true;  // of the other products
};

// The numbers of tokens that are measured; the index is that of Kernels::chosen.
constexpr int kMeasured = kFewTokens + 1;
constexpr int tokens_of(int index) { return index < kFewTokens ? index + 1 : kManyTokens; }

// Which of several forms more passes may choose.
class Contest {
 public:
  explicit Contest(size_t forms) : least_(forms, 1e9), is_open_(forms, true) {}

  bool is_open(size_t form) const { return is_open_[form]; }
  void note(size_t form, double seconds) { least_[form] = std::min(least_[form], seconds); }
  // How many times as fast as the first form each other one is.
  std::vector<double> speeds() const {
    std::vector<double> speeds;
    for (size_t form = 1; form < least_.size(); ++form) speeds.push_back(least_[0] / least_[form]);
    return speeds;
  }
  // Ends the forms that are clearly not the best, or not `least_gain` times as fast as the first. Returns whether passes
  // are left to do.
  bool narrow(double least_gain) {
    const std::vector<double> now = speeds();
    const double best = *std::max_element(now.begin(), now.end());
    int open = 0;
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] * kClear < std::max(best, least_gain)) is_open_[1 + i] = false;
      open += is_open_[1 + i];
    }
    return open > 1 || (open == 1 && best < least_gain * kClear);
  }

 private:
  std::vector<double> least_;  // seconds
  std::vector<bool> is_open_;
};

// Returns how many times as fast as the first form each other one is.
std::vector<double> gains(Pool& pool, const std::vector<Form>& forms, const Matrix& w,
                          const ActivationRows& x, int n, double least_gain, MeasuringTime& time) {
  Contest contest(forms.size());
  for (int round = 0; round < kMostRounds && (round < kLeastRounds || !time.is_over(Clock::now())); ++round) {
    for (size_t turn = 0; turn < forms.size(); ++turn) {  // forwards, backwards, ...
      const size_t which = round % 2 == 0 ? turn : forms.size() - 1 - turn;
      if (!contest.is_open(which)) continue;
      const double seconds = seconds_of(pool, forms[which].product, w, x, n);
      contest.note(which, seconds);
      time.spend(seconds);
    }
    if (round + 1 >= kLeastRounds && !contest.narrow(least_gain)) break;
  }
  return contest.speeds();
}

// Random weights of one type, filled in at the first measurement.
class MeasuredWeights {
 public:
  MeasuredWeights(Pool& pool, int type) : pool_(pool), type_(type) {}
  const Matrix& filled() {
    if (weights_ == nullptr) {
      const int64_t rows = bytes_beyond_caches() / row_bytes(type_, kCols) / kPanelRows * kPanelRows;
      weights_ = std::make_unique<Matrix>(type_, rows, kCols, 1, pool_.nodes(), nullptr);
      pool_.submit(FillOp{weights_.get()});
      pool_.wait();
      weights_->use_huge_pages();  // as the model's weights are; in small pages other forms are the fastest
    }
    return *weights_;
  }

 private:
  Pool& pool_;
  int type_;
  std::unique_ptr<Matrix> weights_;
};

// Types that can be read in order come first: they gain the most, and a type with a codebook may take all the time.
std::vector<int> by_gain(std::vector<int> types, const Kernels& table) {
  std::stable_partition(types.begin(), types.end(),
                        [&](int type) { return in_order_product(table, type, 1).gemm != nullptr; });
  return types;
}

// Whether `known` decides the choice among `forms`.
bool suffices(const std::vector<std::vector<double>>& known, Forms forms) {
  for (int i = 0; i < kMeasured; ++i) {
    const std::vector<Form> now = forms.with(tokens_of(i));
    if (now.size() == 1) return true;
    if (static_cast<size_t>(i) >= known.size() || known[i].size() != now.size() - 1) return false;
    forms.note(now, known[i]);
  }
  return true;
}

}  // namespace

std::vector<ProductSpeed> choose_products(Pool& pool, Kernels& table, const std::vector<int>& types,
                                          int64_t weight_bytes, double least_gain, const KnownSpeeds& known) {
  MeasuringTime time(pool.threads(), Clock::now());
  std::vector<ProductSpeed> speeds;
  const bool is_plain =
      std::strcmp(table.name, plain_kernels()->name) == 0;  // computes for longer than it reads
  if (is_plain || weight_bytes < bytes_beyond_caches()) return speeds;
  const ActivationRows x;
  for (const int type : by_gain(types, table)) {
    if (type_info(type).name == nullptr || !type_info(type).integer) continue;
    const auto found = known.find(type);
    Forms all(table, type, least_gain);
    const bool is_known = found != known.end() && suffices(found->second, all);
    if (!is_known && time.is_over(Clock::now())) continue;
    MeasuredWeights w(pool, type);
    for (int i = 0; i < kMeasured; ++i) {
      const std::vector<Form> forms = all.with(tokens_of(i));
      if (forms.size() == 1) break;
      const std::vector<double> now =
          is_known ? found->second[i] : gains(pool, forms, w.filled(), x, tokens_of(i), least_gain, time);
      all.note(forms, now);
      const auto best = std::max_element(now.begin(), now.end());
      const Form& form = forms[*best >= least_gain ? 1 + (best - now.begin()) : 0];
      speeds.push_back({type, tokens_of(i), form.name, now, is_known});
      if (*best >= least_gain) table.chosen[type][i] = form.product;
    }
  }
  return speeds;
}

}  // namespace moeserve
