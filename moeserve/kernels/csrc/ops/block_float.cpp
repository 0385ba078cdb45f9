#include "ops/block_float.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>

namespace moeserve {
namespace {

// Calls f(unit) for units 0 .. units - 1 on up to `threads` threads, one of which is the caller's.
template <class F>
void for_units(int threads, int64_t units, const F& f) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) f(unit);
  };
  std::vector<std::thread> others;
  others.reserve(threads);
  try {
    for (int64_t i = 1; i < std::min<int64_t>(threads, units); ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system allows no more threads: the existing ones do all the work.
  }
  work();
  for (std::thread& thread : others) thread.join();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Scratch memory of a thread, kept for the thread's lifetime.
void* attend_scratch() {
  static thread_local Codes memory(kAttendBytes / sizeof(int16_t));
  return memory.data();
}

// Writes n codes into every other place of a panel's lane: pair p at panel + p * step.
void spread(const int16_t* codes, int n, int step, int16_t* lane) {
  for (int i = 0; i < n; ++i) lane[i / 2 * step + i % 2] = codes[i];
}

}  // namespace

Codes::Codes(size_t count)
    : data_(static_cast<int16_t*>(
          ::operator new(std::max<size_t>(count, 1) * sizeof(int16_t), std::align_val_t(64)))) {
  std::memset(data_.get(), 0, count * sizeof(int16_t));
}

BlockFloatMatrix::BlockFloatMatrix(const BlockFloatKernels& kernels, const float* matrix, int64_t rows,
                                   int64_t cols, int threads)
    : kernels_(kernels),
      rows_(rows),
      cols_(cols),
      blocks_(ceil_div(cols, kFloatBlock)),
      panels_(ceil_div(rows, kFloatPanel)),
      codes_(panels_ * kFloatPanel * (cols + cols % 2)),
      scales_(panels_ * blocks_ * kFloatPanel, 0.0f) {
  const int64_t panel_codes = kFloatPanel * (cols_ + cols_ % 2);
  for_units(threads, rows, [&](int64_t row) {
    const int64_t panel = row / kFloatPanel, lane = row % kFloatPanel;
    for (int64_t block = 0; block < blocks_; ++block) {
      int16_t codes[kFloatBlock];
      const int64_t first = block * kFloatBlock;
      const int n = static_cast<int>(std::min<int64_t>(kFloatBlock, cols_ - first));
      scales_[(panel * blocks_ + block) * kFloatPanel + lane] =
          kernels_.quantize(matrix + row * cols_ + first, 1, n, kBlockNorm, codes);
      spread(codes, n, 2 * kFloatPanel, codes_.data() + panel * panel_codes + first * kFloatPanel + 2 * lane);
    }
  });
}

void BlockFloatMatrix::multiply(const float* x, int64_t n, const float* bias, float* out, int threads) const {
  Codes codes(blocks_ * n * kFloatBlock);  // [blocks][n][kFloatBlock]
  std::vector<float> scales(blocks_ * n);
  for_units(threads, ceil_div(n, kRowGroup), [&](int64_t group) {
    for (int64_t row = group * kRowGroup; row < std::min(n, (group + 1) * kRowGroup); ++row) {
      for (int64_t block = 0; block < blocks_; ++block) {
        const int64_t first = block * kFloatBlock;
        const int size = static_cast<int>(std::min<int64_t>(kFloatBlock, cols_ - first));
        scales[block * n + row] = kernels_.quantize(x + row * cols_ + first, 1, size, kBlockNorm,
                                                    codes.data() + (block * n + row) * kFloatBlock);
      }
    }
  });
  const int64_t panel_codes = kFloatPanel * (cols_ + cols_ % 2);
  // All panels of a group of rows follow one another: the rows stay in the cache.
  for_units(threads, ceil_div(n, kRowGroup) * panels_, [&](int64_t unit) {
    const int64_t panel = unit % panels_, first_row = unit / panels_ * kRowGroup,
                  column = panel * kFloatPanel;
    const int rows = static_cast<int>(std::min<int64_t>(kRowGroup, n - first_row));
    const int64_t columns = std::min<int64_t>(kFloatPanel, rows_ - column);
    alignas(64) float sums[kRowGroup * kFloatPanel] = {};
    if (bias != nullptr) {
      for (int r = 0; r < rows; ++r) std::copy_n(bias + column, columns, sums + r * kFloatPanel);
    }
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t first = block * kFloatBlock;
      const int64_t pairs = (std::min<int64_t>(kFloatBlock, cols_ - first) + 1) / 2;
      kernels_.multiply(
          codes.data() + (block * n + first_row) * kFloatBlock, scales.data() + block * n + first_row, rows,
          codes_.data() + panel * panel_codes + first * kFloatPanel,
          scales_.data() + (panel * blocks_ + block) * kFloatPanel, static_cast<int>(pairs), sums);
    }
    for (int r = 0; r < rows; ++r)
      std::copy_n(sums + r * kFloatPanel, columns, out + (first_row + r) * rows_ + column);
  });
}

void attend(const BlockFloatKernels& kernels, const float* q, const float* k, const float* v, int64_t heads,
            int64_t n, int dim, float scale, float* out, int threads) {
  const int64_t blocks = ceil_div(n, kKeyBlock), keys = blocks * kKeyBlock;
  const int vectors = (dim + 15) / 16, width = 16 * vectors;
  Codes key_codes(heads * keys * dim), value_codes(heads * keys * width);
  std::vector<float> key_scales(heads * keys, 0.0f), value_scales(heads * blocks * width, 0.0f);
  for_units(threads, heads * blocks, [&](int64_t unit) {
    const int64_t head = unit / blocks, first = unit % blocks * kKeyBlock;
    const int count = static_cast<int>(std::min<int64_t>(kKeyBlock, n - first));
    int16_t codes[kFloatBlock];
    for (int i = 0; i < count; ++i) {
      const int64_t key = first + i;
      key_scales[head * keys + key] = kernels.quantize(k + (head * n + key) * dim, 1, dim, kBlockNorm, codes);
      int16_t* panel = key_codes.data() + (head * keys + key / kFloatPanel * kFloatPanel) * dim;
      spread(codes, dim, 2 * kFloatPanel, panel + key % kFloatPanel * 2);
    }
    for (int c = 0; c < dim; ++c) {
      value_scales[unit * width + c] =
          kernels.quantize(v + (head * n + first) * dim + c, dim, count, kValueNorm, codes);
      spread(codes, count, 32,
             value_codes.data() + unit * kKeyBlock * width + c / 16 * 16 * kKeyBlock + c % 16 * 2);
    }
  });
  const int64_t groups = ceil_div(n, kRowGroup);
  for_units(threads, heads * groups, [&](int64_t unit) {
    const int64_t head = unit / groups, first = unit % groups * kRowGroup;
    const PackedHead packed{key_codes.data() + head * keys * dim,
                            key_scales.data() + head * keys,
                            value_codes.data() + head * keys * width,
                            value_scales.data() + head * blocks * width,
                            n,
                            dim};
    kernels.attend(packed, q + (head * n + first) * dim,
                   static_cast<int>(std::min<int64_t>(kRowGroup, n - first)), scale,
                   out + first * heads * dim + head * dim, heads * dim, attend_scratch());
  });
}

}  // namespace moeserve
