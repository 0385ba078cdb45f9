#include "ops/choose.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

#include "ops/ops.h"

namespace moeserve {
namespace {

constexpr int64_t kCols = 2048;  // a common hidden size
constexpr int kTogether = 8;  // panels timed together: for a single one the clock call would weigh too much
constexpr int kRounds = 5;    // per candidate, alternating; the fastest counts
constexpr std::chrono::seconds kMostTime{1};
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
  PanelGemm gemm;
  const Matrix* w;
  const void* const* rows;
  int n;
  std::atomic<double>* seconds;  // sum over all threads
  void operator()(Team& team) const {
    team.last_phase();
    team.for_panels(1, w->panels / kTogether, [&](int64_t, int64_t group) {
      alignas(64) float tile[kFewTokens * kPanelRows];
      const double start = thread_seconds();
      for (int64_t panel = group * kTogether; panel < (group + 1) * kTogether; ++panel) {
        gemm(w->panel(0, panel), nullptr, w->cols, rows, n, tile);
      }
      seconds->fetch_add(thread_seconds() - start);
    });
  }
};

// kFewTokens quantised activation rows of arbitrary values.
struct ActivationRows {
  ActivationRows() : bytes(kFewTokens * quantized_row_bytes(kCols), 1) {
    for (int t = 0; t < kFewTokens; ++t) rows[t] = bytes.data() + t * quantized_row_bytes(kCols);
  }
  std::vector<uint8_t> bytes;
  const void* rows[kFewTokens];
};

double seconds_of(Pool& pool, PanelGemm gemm, const Matrix& w, const ActivationRows& x, int n) {
  std::atomic<double> seconds{0.0};
  pool.submit(TimedProductsOp{gemm, &w, x.rows, n, &seconds});
  pool.wait();
  return seconds;
}

// Returns how many times as fast `other` is as `own`.
double gain(Pool& pool, PanelGemm own, PanelGemm other, const Matrix& w, const ActivationRows& x, int n) {
  std::array<double, 2> least{1e9, 1e9};
  for (int round = 0; round < 2 * kRounds; ++round) {
    const int which = (round + 1) / 2 % 2;  // own, other, other, own, ...
    least[which] = std::min(least[which], seconds_of(pool, which == 0 ? own : other, w, x, n));
  }
  return least[0] / least[1];
}

}  // namespace

std::vector<ProductChoice> choose_products(Pool& pool, Kernels& table, const std::vector<int>& types,
                                           int64_t weight_bytes, double least_gain) {
  const auto until = std::chrono::steady_clock::now() + kMostTime;
  std::vector<ProductChoice> chosen;
  const Kernels* other = narrower_kernels(table);
  if (other == nullptr || weight_bytes < bytes_beyond_caches()) return chosen;
  const ActivationRows x;
  for (const int type : types) {
    if (type_info(type).name == nullptr || !type_info(type).integer) continue;
    if (std::chrono::steady_clock::now() > until) break;
    const int64_t rows = bytes_beyond_caches() / row_bytes(type, kCols) / kPanelRows * kPanelRows;
    const Matrix w(type, rows, kCols, 1, pool.nodes(), nullptr);
    pool.submit(FillOp{&w});
    pool.wait();
    for (int n = 1; n <= kFewTokens; ++n) {
      const double speed = gain(pool, table.gemm[type], other->gemm[type], w, x, n);
      if (speed < least_gain) break;  // with more tokens the wider instruction set gains
      table.few[type][n - 1] = other->gemm[type];
      chosen.push_back({type, n, other->name, speed});
    }
  }
  return chosen;
}

}  // namespace moeserve
