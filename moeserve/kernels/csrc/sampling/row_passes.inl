// The passes of row_passes.h. arch/kernels.inl includes this file in a namespace of its own, and every ISA compiles it
// with its own flags.
//
// It uses the compiler's generic vectors, adds in one fixed order and does not fuse multiply-adds (-ffp-contract=off),
// so that every instruction set gives the same bits.

constexpr int kLanes = kRowLanes;
constexpr int kHalf = kLanes / 2;
constexpr double kRoundDouble = 0x1.8p52;  // x + this - this rounds x to an integer
typedef float VF __attribute__((vector_size(4 * kLanes)));
typedef float VFHalf __attribute__((vector_size(4 * kHalf)));
typedef int32_t VI __attribute__((vector_size(4 * kLanes)));
typedef double VD __attribute__((vector_size(8 * kHalf)));

template <class V>
inline __attribute__((always_inline)) void load(V& v, const float* p) {
  __builtin_memcpy(&v, p, sizeof v);
}

template <int... i>
inline __attribute__((always_inline)) void join(VF& v, const VFHalf& lo, const VFHalf& hi,
                                                std::integer_sequence<int, i...>) {
  v = __builtin_shufflevector(lo, hi, i...);
}
template <int... i>
inline __attribute__((always_inline)) void split(const VF& v, VFHalf& lo, VFHalf& hi,
                                                 std::integer_sequence<int, i...>) {
  lo = __builtin_shufflevector(v, v, i...);
  hi = __builtin_shufflevector(v, v, (kHalf + i)...);
}

// Returns the block of a row that starts at `begin`; if the row ends within it, a copy padded with -inf.
template <int size>
inline const float* block_at(const float* x, int n, int begin, float* padded) {
  if (n - begin >= size) [[likely]]
    return x + begin;
  for (int i = 0; i < size; ++i) padded[i] = begin + i < n ? x[begin + i] : -INFINITY;
  return padded;
}

// block_max[b] = the largest of x[b * kMaxBlock ...]. Returns false if any value is NaN or +inf.
bool scan_row(const float* x, int n, float* block_max) {
  float padded[kMaxBlock];
  VI good = VI{} - 1;
  for (int begin = 0; begin < n; begin += kMaxBlock) {
    const float* p = block_at<kMaxBlock>(x, n, begin, padded);
    VF m = VF{} - INFINITY;
    for (int i = 0; i < kMaxBlock; i += kLanes) {
      VF v;
      load(v, p + i);
      m = v > m ? v : m;
      good &= v < VF{} + INFINITY;
    }
    float lane[kLanes];
    __builtin_memcpy(lane, &m, sizeof m);
    for (int width = kHalf; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lane[i] = lane[i + width] > lane[i] ? lane[i + width] : lane[i];
    }
    *block_max++ = lane[0];
  }
  int all = -1;
  for (int i = 0; i < kLanes; ++i) all &= good[i];
  return all != 0;
}

// w[i] = 2^((x[i] - max) * scale) with a relative error under 1.2e-7, 0 below 2^-126; x[i] <= max, scale > 0.
// The range reduction is in double, so that neither huge logits nor extreme temperatures cost accuracy; the
// polynomial (relative error 2e-9 on [-1/2, 1/2], exactly 1 at 0) in float.
inline __attribute__((always_inline)) void weigh(const float* x, double max, double scale, float* w,
                                                 VD* sum) {
  VFHalf half[2], power[2];
  for (int h = 0; h < 2; ++h) {
    load(half[h], x + h * kHalf);
    VD t = (__builtin_convertvector(half[h], VD) - max) * scale;
    t = t > VD{} - 127.0 ? t : VD{} - 127.0;
    const VD n = (t + kRoundDouble) - kRoundDouble;
    half[h] = __builtin_convertvector(t - n, VFHalf);
    power[h] = __builtin_convertvector(n, VFHalf);
  }
  VF f, n;
  join(f, half[0], half[1], std::make_integer_sequence<int, kLanes>());
  join(n, power[0], power[1], std::make_integer_sequence<int, kLanes>());
  VF p = f * 0x1.41fbbcp-13f + 0x1.5f3e54p-10f;
  p = p * f + 0x1.3b2d4cp-7f;
  p = p * f + 0x1.c6aee8p-5f;
  p = p * f + 0x1.ebfbdcp-3f;
  p = p * f + 0x1.62e430p-1f;
  p = p * f + 1.0f;
  p *= (VF)((__builtin_convertvector(n, VI) + 127) << 23);  // 2^n; n = -127 makes it 0
  __builtin_memcpy(w, &p, sizeof p);
  split(p, half[0], half[1], std::make_integer_sequence<int, kHalf>());
  sum[0] += __builtin_convertvector(half[0], VD);
  sum[1] += __builtin_convertvector(half[1], VD);
}

// The same for a row; block_sum[b] = the sum of w[b * kSumBlock ...]. `w` has room for n rounded up to 16.
void weigh_row(const float* x, int n, double max, double scale, float* w, double* block_sum) {
  float padded[16];
  for (int block = 0; block < n; block += kSumBlock) {
    const int end = n - block < kSumBlock ? n : block + kSumBlock;
    VD sum[16 / kHalf] = {};
    for (int i = block; i < end; i += 16) {
      const float* p = block_at<16>(x, n, i, padded);
      for (int j = 0; j < 16; j += kLanes) weigh(p + j, max, scale, w + i + j, sum + j / kHalf);
    }
    double lane[16];
    __builtin_memcpy(lane, sum, sizeof lane);
    for (int width = 8; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    }
    *block_sum++ = lane[0];
  }
}

// Returns how many values of x are greater than `bound`.
int count_greater(const float* x, int n, float bound) {
  VI count = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    VF v;
    load(v, x + i);
    count -= v > VF{} + bound;
  }
  int total = 0;
  for (int j = 0; j < kLanes; ++j) total += count[j];
  for (; i < n; ++i) total += x[i] > bound;
  return total;
}
