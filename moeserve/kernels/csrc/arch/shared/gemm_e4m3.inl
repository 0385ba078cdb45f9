// Panel of 8-bit floats times float32 activation rows.
//
// A block column's products are summed without its scale, over the columns in order, and scaled once:
//   sum = fma(w, x, sum)                         float32
//   acc = fma(sum * -256, s, acc)
// An e4m3 with zeros appended to its mantissa is a float16 whose exponent is 8 too low. The conversion is exact, also
// for small numbers, even if the thread treats denormal numbers as zero. Panels store bytes in excess-128, which
// inverts the sign bit.

constexpr float kFromHalf = -256.0f;

// Calls put(column of the quad, 16 rows' numbers / kFromHalf) for a quad of columns of a half, in order.
template <class Put>
inline void unpack_e4m3(const uint8_t* quad, const Put& put) {
  auto halves = [](VI bytes) {  // bytes 1 and 3 of each lane to float16
    return or_i(and_i(bytes, static_cast<int>(0x80008000)), and_i(shr_i<1>(bytes), 0x3f803f80));
  };
  const VI bytes = load_i(quad), even = halves(shl_i<8>(bytes)), odd = halves(bytes);
  put(0, half_bits(and_i(even, 0xffff)));
  put(1, half_bits(and_i(odd, 0xffff)));
  put(2, half_bits(and_i(shr_i<16>(even), 0xffff)));
  put(3, half_bits(and_i(shr_i<16>(odd), 0xffff)));
}

// Adds a block column's products of one row of activations to `out` [32].
template <Type T>
inline void e4m3_row(const uint8_t* block, const uint8_t* ahead, const float* x, float* out) {
  constexpr PanelLayout layout = kLayout<T>;
  constexpr int groups = layout.cols / 32;
  VF sums[2] = {zero_f(), zero_f()};
  const uint8_t* codes = block + layout.header_bytes;
  for (int g = 0; g < groups; ++g, codes += layout.group_bytes()) {
    prefetch(ahead + g * (layout.block_bytes / groups), layout.block_bytes / groups);
    for (int quad = 0; quad < 8; ++quad, x += 4) {  // of both halves in turn: each sum waits for itself
      for (int half = 0; half < 2; ++half) {
        unpack_e4m3(codes + half * layout.half_bytes() + 64 * quad,
                    [&](int col, VF w) { sums[half] = fma(w, set_f(x[col]), sums[half]); });
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const VF s = Format<T>::scales(block, 0, half).s;
    store_f(out + 16 * half, fma(mul(sums[half], set_f(kFromHalf)), s, load_f(out + 16 * half)));
  }
}

// The same for several rows: a group of 32 columns is unpacked once for all of them.
template <Type T>
inline void e4m3_rows(const uint8_t* block, const uint8_t* ahead, int64_t first_col, const void* const* rows,
                      int n, float* out) {
  constexpr PanelLayout layout = kLayout<T>;
  constexpr int groups = layout.cols / 32;
  alignas(64) float sums[kMostTokens * kPanelRows];
  alignas(64) float weights[32 * kPanelRows];
  std::memset(sums, 0, sizeof(float) * kPanelRows * n);
  const uint8_t* codes = block + layout.header_bytes;
  for (int g = 0; g < groups; ++g, codes += layout.group_bytes()) {
    prefetch(ahead + g * (layout.block_bytes / groups), layout.block_bytes / groups);
    for (int quad = 0; quad < 16; ++quad) {  // of one half, then of the other
      float* to = weights + quad % 8 * 4 * kPanelRows + quad / 8 * 16;
      unpack_e4m3(codes + 64 * quad, [&](int col, VF w) { store_f(to + kPanelRows * col, w); });
    }
    const auto* panel = reinterpret_cast<const uint8_t*>(weights);
    float_rows<FloatElement>(panel, panel, first_col + 32 * g, 32, rows, n, sums);
  }
  for (int half = 0; half < 2; ++half) {
    const VF s = Format<T>::scales(block, 0, half).s;
    for (int at = 16 * half; at < kPanelRows * n; at += kPanelRows) {
      store_f(out + at, fma(mul(load_f(sums + at), set_f(kFromHalf)), s, load_f(out + at)));
    }
  }
}

template <Type T>
void gemm_e4m3(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
               float* out) {
  constexpr PanelLayout layout = kLayout<T>;
  alignas(64) uint8_t packed[layout.block_bytes];
  std::memset(out, 0, sizeof(float) * kPanelRows * n);
  const uint8_t* end = panel.data + cols / layout.cols * layout.block_bytes;
  for (int64_t b = 0; b < cols / layout.cols; ++b) {
    const uint8_t* block = panel.data + b * layout.block_bytes;
    const uint8_t* ahead = reading_ahead(block, end, next);
    if (panel.stride != 0) {
      pack_column<T>(panel.data + b * kQuantType<T>.block_bytes, panel.stride, panel.valid_rows, packed);
      block = ahead = packed;
    }
    if (n == 1) {
      e4m3_row<T>(block, ahead, static_cast<const float*>(rows[0]) + b * layout.cols, out);
    } else {
      e4m3_rows<T>(block, ahead, b * layout.cols, rows, n, out);
    }
  }
}
