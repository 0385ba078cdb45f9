// Panel times activation rows.
//
// Integer formats: a weight is  s * code - z  with an unsigned 8-bit code, a scale s per 32 columns (Q2_K, Q3_K and
// Q6_K: per 16) and either a min z per group or an integer zero point. Per group of 32 columns and token:
//   dot = sum(code * x) - zero * sum(x)          int32, exact in any order of summation
//   acc = fma(dot, s * xs, acc)                  float32, xs the activation's scale
//   acc = fnma(z, xs * sum(x), acc)              formats with a min
// so an output's float32 accumulator goes through one fixed order of operations, whatever the number of tokens.
// A weight vector is unpacked once for all tokens of the call; the tile of accumulators stays in L1. format_traits.inl
// has what differs between formats, group_gemm.inl a group's products.

// One block column for all tokens. `first_group` counts groups of 32 columns from the start of the row. `ahead` is
// prefetched meanwhile, a group's bytes at a time, so that the line fill buffers never fill up. to_l2: see Panel.
template <class F>
inline void block_gemm(const uint8_t* block, const uint8_t* ahead, bool to_l2, int64_t first_group,
                       int64_t cols, const void* const* rows, int n, float* out) {
  constexpr PanelLayout layout = F::layout;
  constexpr int groups = layout.cols / 32;
  alignas(64) uint8_t unpacked[F::type.trits.any() ? groups * 2 * F::kHalfBytes : 1];
  if constexpr (F::type.trits.any()) F::unpack(block + layout.header_bytes, unpacked);
  for (int g = 0; g < groups; ++g) {
    constexpr int bytes = layout.block_bytes / groups;
    if (to_l2) {
      prefetch_to_l2(ahead + g * bytes, bytes);
    } else {
      prefetch(ahead + g * bytes, bytes);
    }
    const uint8_t* codes = F::type.trits.any() ? unpacked + g * 2 * F::kHalfBytes
                                               : block + layout.header_bytes + g * layout.group_bytes();
    const Scales scales[2] = {F::scales(block, g, 0), F::scales(block, g, 1)};
    group_gemm<F>(codes, scales, rows, cols, first_group + g, n, out);
  }
}

template <Type T>
void gemm_integer(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
                  float* out) {
  constexpr PanelLayout layout = kLayout<T>;
  constexpr int groups = layout.cols / 32;
  std::memset(out, 0, sizeof(float) * kPanelRows * n);
  if (panel.stride == 0) {
    const uint8_t* end = panel.data + cols / layout.cols * layout.block_bytes;
    if (panel_gemm<Format<T>>(panel.data, end, next, cols, rows, n, out)) return;
    const int distance = panel.to_l2 ? kPrefetchBytesToL2 : kPrefetchBytes;
    for (int64_t b = 0; b < cols / layout.cols; ++b) {
      const uint8_t* block = panel.data + b * layout.block_bytes;
      const uint8_t* ahead = reading_ahead(block, end, next, distance);
      block_gemm<Format<T>>(block, ahead, panel.to_l2, b * groups, cols, rows, n, out);
    }
  } else {
    constexpr int source_block = layout.block_bytes / kPanelRows;
    alignas(64) uint8_t block[layout.block_bytes];
    for (int64_t b = 0; b < cols / layout.cols; ++b) {
      const uint8_t* source = panel.data + b * source_block;
      for (int r = 0; r < panel.valid_rows; ++r)
        prefetch(source + r * panel.stride + source_block, source_block);
      pack_column<T>(source, panel.stride, panel.valid_rows, block);
      block_gemm<Format<T>>(block, block, false, b * groups, cols, rows, n, out);
    }
  }
}

// Float formats: acc = fma(w, x, acc) over the columns in order, accumulators in registers.
struct HalfElement {
  using Stored = uint16_t;
  static constexpr int kBytes = 2;
  static VF load(const uint8_t* p) { return load_half(reinterpret_cast<const uint16_t*>(p)); }
};
struct BfloatElement {
  using Stored = uint16_t;
  static constexpr int kBytes = 2;
  static VF load(const uint8_t* p) { return load_bfloat(reinterpret_cast<const uint16_t*>(p)); }
};
struct FloatElement {
  using Stored = uint32_t;
  static constexpr int kBytes = 4;
  static VF load(const uint8_t* p) { return load_f(reinterpret_cast<const float*>(p)); }
};

// `cols` columns of packed elements, added to the accumulators at `out`.
template <class E, int N>
inline void float_tile(const uint8_t* panel, const uint8_t* ahead, int64_t first_col, int64_t cols,
                       const void* const* rows, float* out) {
  VF acc[N][2];
  for (int t = 0; t < N; ++t) {
    acc[t][0] = load_f(out + kPanelRows * t);
    acc[t][1] = load_f(out + kPanelRows * t + 16);
  }
  for (int64_t c = 0; c < cols; ++c, panel += kPanelRows * E::kBytes) {
    prefetch(ahead + c * kPanelRows * E::kBytes, kPanelRows * E::kBytes);
    const VF w[2] = {E::load(panel), E::load(panel + 16 * E::kBytes)};
    for (int t = 0; t < N; ++t) {
      const VF x = set_f(static_cast<const float*>(rows[t])[first_col + c]);
      acc[t][0] = fma(w[0], x, acc[t][0]);
      acc[t][1] = fma(w[1], x, acc[t][1]);
    }
  }
  for (int t = 0; t < N; ++t) {
    store_f(out + kPanelRows * t, acc[t][0]);
    store_f(out + kPanelRows * t + 16, acc[t][1]);
  }
}

template <class E>
inline void float_rows(const uint8_t* panel, const uint8_t* ahead, int64_t first_col, int64_t cols,
                       const void* const* rows, int n, float* out) {
  int t = 0;
  for (; t + 8 <= n; t += 8) float_tile<E, 8>(panel, ahead, first_col, cols, rows + t, out + kPanelRows * t);
  for (; t + 4 <= n; t += 4) float_tile<E, 4>(panel, ahead, first_col, cols, rows + t, out + kPanelRows * t);
  for (; t < n; ++t) float_tile<E, 1>(panel, ahead, first_col, cols, rows + t, out + kPanelRows * t);
}

// 64 columns at a time: 4 or 8 KB, which stay in L1 for all tokens.
template <class E>
void gemm_float(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
                float* out) {
  constexpr int64_t kChunk = 64;
  alignas(64) uint8_t packed[kChunk * kPanelRows * E::kBytes];
  std::memset(out, 0, sizeof(float) * kPanelRows * n);
  const uint8_t* end = panel.data + cols * kPanelRows * E::kBytes;
  for (int64_t c = 0; c < cols; c += kChunk) {
    const int64_t count = std::min(kChunk, cols - c);
    const uint8_t* chunk = panel.data + c * kPanelRows * E::kBytes;
    const uint8_t* ahead = reading_ahead(chunk, end, next);
    if (panel.stride != 0) {
      pack_float<typename E::Stored>(panel.data + c * E::kBytes, panel.stride, panel.valid_rows, count,
                                     packed);
      chunk = ahead = packed;
    }
    float_rows<E>(chunk, ahead, c, count, rows, n, out);
  }
}

// 16 of a packed F32 panel's 32 rows, from `half` on (its first row, first column): the same bits.
template <int N>
inline void half_tile(const uint8_t* half, int64_t first_col, int64_t cols, const void* const* rows,
                      float* out) {
  constexpr int kColumn = kPanelRows * sizeof(float);
  VF acc[N];
  for (int t = 0; t < N; ++t) acc[t] = load_f(out + kPanelRows * t);
  for (int64_t c = 0; c < cols; ++c, half += kColumn) {
    __builtin_prefetch(half + kPrefetchBytes * 2);  // only half of it is read
    const VF w = load_f(reinterpret_cast<const float*>(half));
    for (int t = 0; t < N; ++t) {
      acc[t] = fma(w, set_f(static_cast<const float*>(rows[t])[first_col + c]), acc[t]);
    }
  }
  for (int t = 0; t < N; ++t) store_f(out + kPanelRows * t, acc[t]);
}

[[maybe_unused]] void gemm_f32_half(const uint8_t* half, int64_t cols, const void* const* rows, int n,
                                    float* out) {
  constexpr int64_t kChunk = 64;
  for (int t = 0; t < n; ++t) std::memset(out + kPanelRows * t, 0, sizeof(float) * kPanelRows / 2);
  for (int64_t c = 0; c < cols; c += kChunk, half += kChunk * kPanelRows * sizeof(float)) {
    const int64_t count = std::min(kChunk, cols - c);
    int t = 0;
    for (; t + 8 <= n; t += 8) half_tile<8>(half, c, count, rows + t, out + kPanelRows * t);
    for (; t + 4 <= n; t += 4) half_tile<4>(half, c, count, rows + t, out + kPanelRows * t);
    for (; t < n; ++t) half_tile<1>(half, c, count, rows + t, out + kPanelRows * t);
  }
}
