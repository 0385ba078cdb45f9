// arch/in_order.h for the instruction set being compiled, which defines before
//   add_half_group<F, N>   adds N tokens' products with a half's group of 32 columns to their accumulators [N][2]
// and includes this file within an anonymous namespace.

// Codebook types compute for longer than they read.
template <Type T>
constexpr bool kIsReadInOrder =
    !kQuantType<T>.takes_floats() && !kQuantType<T>.has_book() && !kQuantType<T>.trits.any();

// Tokens at most: with more, computing takes longer than reading. Codes of 8 bits are the most to read and need no
// unpacking.
template <Type T>
constexpr int kMostInOrder = kQuantType<T>.low.bits == 8 ? 4 : 2;

// A block column's header, read before its codes.
template <class F>
class Header {
 public:
  explicit Header(const uint8_t* block) : bytes_(block) {
    if constexpr (kIsCopied) {
      for (int i = 0; i < kBytes; i += 64) store_b(copy_ + i, load_b(block + i));
      bytes_ = copy_;
    }
  }
  Scales scales(int group, int half) const { return F::scales(bytes_, group, half); }

 private:
  static constexpr bool kIsCopied = F::layout.cols > 32;  // else it has one group's scales, used at once
  static constexpr int kBytes = kIsCopied ? (F::layout.header_bytes + 63) / 64 * 64 : 64;
  static_assert(!kIsCopied || kBytes <= F::layout.block_bytes);
  alignas(64) uint8_t copy_[kBytes];
  const uint8_t* bytes_;
};

// Scales and mins of six bits are unpacked for all rows and groups at once, 64 of them in a vector.
template <class F>
  requires(F::type.scales == StoredScales::SixBitMin)
class Header<F> {
 public:
  explicit Header(const uint8_t* block) {
    for (int half = 0; half < 2; ++half) {
      d_[half] = half_field(block, 0, half);
      dmin_[half] = half_field(block, 1, half);
    }
    const uint8_t* bytes = block + 64 * F::type.halves();
    for (int i = 0; i < 2 * 64; i += 64) {  // two groups of the first four, and of the last
      const VB first = load_b(bytes + i), second = load_b(bytes + 128 + i), third = load_b(bytes + 256 + i);
      store_b(scales_ + i, and_b(first, 63));
      store_b(mins_ + i, and_b(second, 63));
      store_b(scales_ + 128 + i, or_b(and_b(third, 15), and_b(shr_b<2>(first), 48)));
      store_b(mins_ + 128 + i, or_b(and_b(shr_b<4>(third), 15), and_b(shr_b<2>(second), 48)));
    }
  }
  Scales scales(int group, int half) const {
    const int at = 32 * group + 16 * half;
    return {mul(d_[half], to_float(load_u8(scales_ + at))), zero_f(),
            mul(dmin_[half], to_float(load_u8(mins_ + at))), zero_f()};
  }

 private:
  VF d_[2], dmin_[2];
  alignas(64) uint8_t scales_[8 * 32], mins_[8 * 32];  // [groups][32 rows]
};

// First bytes of the panel to be read next, if it does not follow this one in memory: the panels of gate and up
// alternate. These bytes are prefetched with the last kLastBytes of this panel, because the CPU's prefetchers need some
// lines of a new stream before they follow it. docs/results/cpu-kernels.md has its effect on alternating panels.
constexpr int kNextBytes = 768, kLastBytes = 4096;

// The first half's products are computed before the next half's codes are read. With both halves at once the compiler
// reads Q6_K's lines in another order, and the prefetchers lose the stream.
template <class F, int N>
[[gnu::noinline, gnu::flatten]] void panel_in_order(const uint8_t* panel, const uint8_t* end,
                                                    const uint8_t* next, int64_t cols,
                                                    const void* const* rows, float* out) {
  constexpr PanelLayout layout = F::layout;
  constexpr int last_bytes = (kLastBytes + layout.block_bytes - 1) / layout.block_bytes * layout.block_bytes;
  VF acc[N][2];
  for (int t = 0; t < N; ++t) acc[t][0] = acc[t][1] = zero_f();
  for (int64_t group = 0; panel < end; panel += layout.block_bytes) {
    if (next != nullptr && end - panel <= last_bytes) {
      prefetch(next, kNextBytes);
      next = nullptr;
    }
    const Header<F> header(panel);
    const uint8_t* codes = panel + layout.header_bytes;
#pragma GCC unroll 1
    for (int g = 0; g < layout.cols / 32; ++g, ++group) {
      for (int half = 0; half < 2; ++half, codes += F::kHalfBytes) {
        add_half_group<F, N>(codes, header.scales(g, half), rows, cols, group, half, acc);
      }
    }
  }
  for (int t = 0; t < N; ++t) {
    store_f(out + kPanelRows * t, acc[t][0]);
    store_f(out + kPanelRows * t + 16, acc[t][1]);
  }
}

template <Type T, int N>
void gemm_in_order(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int,
                   float* out) {
  const uint8_t* end = panel.data + cols / kLayout<T>.cols * kLayout<T>.block_bytes;
  panel_in_order<Format<T>, N>(panel.data, end, next == end ? nullptr : next, cols, rows, out);
}

// The product of `tokens` rows, at least N of them.
template <Type T, int N = 1>
constexpr PanelGemm product_of(int tokens) {
  if constexpr (kIsReadInOrder<T> && N <= kMostInOrder<T>) {
    return tokens == N ? gemm_in_order<T, N> : product_of<T, N + 1>(tokens);
  } else {
    return nullptr;
  }
}

// The product of `tokens` rows with panels of `type`; nullptr: none.
PanelGemm product_in_order(int type, int tokens) {
#define MOESERVE_PRODUCT(name, number, ...) \
  if (type == number) return product_of<Type::name>(tokens);
  MOESERVE_QUANT_TYPES(MOESERVE_PRODUCT)
#undef MOESERVE_PRODUCT
  return nullptr;
}
