// Block floating point with AVX-512 VNNI. Compiled with the flags of this instruction set (CMakeLists.txt).
#include "arch/block_float.h"

#include <immintrin.h>

namespace moeserve {
namespace {

constexpr int kTile = 12;  // rows of a tile of 32 columns: 24 accumulators and 2 weights of 32 registers
constexpr float kLogE = 1.44269504f;

inline __mmask16 tail(int n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

float quantize(const float* x, int64_t stride, int n, float norm, int16_t* codes) {
  __m512 v[kFloatBlock / 16];
  const int vectors = (n + 15) / 16;
  const __m512i steps =
      _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                         _mm512_set1_epi32(static_cast<int>(stride)));
  __m512 most = _mm512_setzero_ps();
  for (int i = 0; i < vectors; ++i) {
    const __mmask16 m = tail(n - 16 * i);
    v[i] = stride == 1 ? _mm512_maskz_loadu_ps(m, x + 16 * i)
                       : _mm512_mask_i32gather_ps(_mm512_setzero_ps(), m, steps, x + 16 * i * stride, 4);
    most = _mm512_max_ps(_mm512_abs_ps(v[i]), most);  // NaN: the second operand, so NaN is found below
  }
  const float largest = _mm512_reduce_max_ps(most);
  const float first = largest > 1e-30f ? 32767.0f / largest : 0.0f;
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < vectors; ++i) {
    const __m512 y = _mm512_mul_ps(v[i], _mm512_set1_ps(first));
    squares = _mm512_fmadd_ps(y, y, squares);
  }
  const float square = _mm512_reduce_add_ps(squares);
  // An infinite number has made `first` 0, and NaN or 0 times infinity the sum NaN.
  const bool is_finite = square <= 1.5e11f;
  const float factor = square > norm * norm ? first * (norm / __builtin_sqrtf(square)) : first;
  for (int i = 0; i < vectors; ++i) {
    __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], _mm512_set1_ps(factor)));
    if (!is_finite) code = _mm512_setzero_si512();
    _mm256_mask_storeu_epi16(codes + 16 * i, tail(n - 16 * i), _mm512_cvtsepi32_epi16(code));
  }
  if (!is_finite) return __builtin_nanf("");
  return factor > 0.0f ? 1.0f / factor : 0.0f;
}

// sums[r][v] = sum over pairs p of row r's pair times 16 columns of pairs, at columns + p * step + v * apart. A
// separate function that ends by storing the sums: if GCC sees how they are used, it stores them in every iteration.
template <int Rows, int Vectors>
[[gnu::noipa]] void tile(const int16_t* x, int64_t x_stride, const int16_t* columns, int step, int apart,
                         int pairs, __m512i* sums) {
  __m512i sum[Rows][Vectors];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm512_setzero_si512();
  }
#pragma GCC unroll 1
  for (int p = 0; p < pairs; ++p) {
    __m512i w[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) w[v] = _mm512_load_si512(columns + p * step + v * apart);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * x_stride + 2 * p, 4);
      const __m512i both = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm512_dpwssd_epi32(sum[r][v], both, w[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) _mm512_store_si512(sums + r * Vectors + v, sum[r][v]);
  }
}

template <int Rows>
void multiply_tile(const int16_t* x, const float* x_scales, const int16_t* panel, const float* scales,
                   int pairs, float* out) {
  __m512i sums[Rows * 2];
  tile<Rows, 2>(x, kFloatBlock, panel, 2 * kFloatPanel, 32, pairs, sums);
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < 2; ++v) {
      float* at = out + r * kFloatPanel + 16 * v;
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x_scales[r]), _mm512_loadu_ps(scales + 16 * v));
      _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[2 * r + v]), scale, _mm512_loadu_ps(at)));
    }
  }
}

void multiply(const int16_t* x, const float* x_scales, int rows, const int16_t* panel, const float* scales,
              int pairs, float* out) {
  int r = 0;
  const auto run = [&]<int Rows>() {
    for (; r + Rows <= rows; r += Rows) {
      multiply_tile<Rows>(x + r * kFloatBlock, x_scales + r, panel, scales, pairs, out + r * kFloatPanel);
    }
  };
  run.template operator()<kTile>();
  run.template operator()<4>();
  run.template operator()<1>();
}

// 2^x for x <= 0, relative error below 6e-6: less than half a step of the largest code.
inline __m512 exp2_ps(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.59024e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.587031e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4023678e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312804e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}
inline float exp2_of(float x) { return _mm512_cvtss_f32(exp2_ps(_mm512_set1_ps(x))); }

// The working memory of a unit.
struct Attention {
  int16_t q[kRowGroup * kFloatBlock];
  int16_t weights[kTile * kKeyBlock];
  float q_scales[kRowGroup];  // times the softmax's scale, by powers of 2
  float most[kRowGroup];
  float sum[kRowGroup];
  float old_factor[kTile], new_factor[kTile];
  alignas(64) float scores[kTile * kKeyBlock];
  alignas(64) float acc[kRowGroup * kFloatBlock];
};

static_assert(sizeof(Attention) <= kAttendBytes);

// Scores of kTile queries, and their weights as codes relative to the block's greatest.
void weigh(const PackedHead& head, int64_t block, int first, Attention& a) {
  for (int half = 0; half < 2; ++half) {
    const int64_t panel = 2 * block + half;
    __m512i sums[kTile * 2];
    tile<kTile, 2>(a.q + first * kFloatBlock, kFloatBlock, head.keys + panel * head.dim * kFloatPanel,
                   2 * kFloatPanel, 32, head.dim / 2, sums);
    for (int i = 0; i < 2 * kTile; ++i) {
      const int r = i / 2, v = i % 2;
      const __m512 scale = _mm512_loadu_ps(head.key_scales + panel * kFloatPanel + 16 * v);
      const __m512 score = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[i]), scale);
      _mm512_store_ps(a.scores + r * kKeyBlock + 32 * half + 16 * v, score);
    }
  }
  const int valid = static_cast<int>(
      head.count - block * kKeyBlock < kKeyBlock ? head.count - block * kKeyBlock : kKeyBlock);
  for (int r = 0; r < kTile; ++r) {
    __m512 s[4];
    __m512 most = _mm512_set1_ps(-__builtin_inff());
    const __m512 scale = _mm512_set1_ps(a.q_scales[first + r]);
    for (int v = 0; v < 4; ++v) {
      const __mmask16 m = valid >= 16 * v ? tail(valid - 16 * v) : 0;
      s[v] = _mm512_mask_mul_ps(_mm512_set1_ps(-__builtin_inff()), m,
                                _mm512_load_ps(a.scores + r * kKeyBlock + 16 * v), scale);
      most = _mm512_max_ps(most, s[v]);
    }
    const float block_most = _mm512_reduce_max_ps(most);
    __m512i codes[4];
    for (int v = 0; v < 4; ++v) {
      const __m512 w = exp2_ps(_mm512_sub_ps(s[v], _mm512_set1_ps(block_most)));
      codes[v] = _mm512_cvtps_epi32(_mm512_mul_ps(w, _mm512_set1_ps(kWeightCode)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(a.weights + r * kKeyBlock + 16 * v),
                          _mm512_cvtepi32_epi16(codes[v]));
    }
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(codes[0], codes[1]), _mm512_add_epi32(codes[2], codes[3]));
    const float old_most = a.most[first + r], new_most = block_most > old_most ? block_most : old_most;
    a.old_factor[r] = exp2_of(old_most - new_most);
    a.new_factor[r] = exp2_of(block_most - new_most);
    a.most[first + r] = new_most;
    a.sum[first + r] = a.sum[first + r] * a.old_factor[r] +
                       a.new_factor[r] * static_cast<float>(_mm512_reduce_add_epi32(sum));
  }
}

// Adds `Vectors` vectors of columns of a block's weighted values to kTile rows of `acc_rows`, `width` floats apart.
template <int Vectors>
void add_columns(const int16_t* values, const float* scales, int width, float* acc_rows, const Attention& a) {
  __m512i sums[kTile * Vectors];
  tile<kTile, Vectors>(a.weights, kKeyBlock, values, 32, 16 * kKeyBlock, kKeyBlock / 2, sums);
  for (int r = 0; r < kTile; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      float* at = acc_rows + r * width + 16 * v;
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(a.new_factor[r]), _mm512_loadu_ps(scales + 16 * v));
      const __m512 old = _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(a.old_factor[r]));
      _mm512_store_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r * Vectors + v]), scale, old));
    }
  }
}

void add_values(const PackedHead& head, int64_t block, int first, Attention& a) {
  const int vectors = (head.dim + 15) / 16, width = 16 * vectors;
  const int16_t* values = head.values + block * kKeyBlock * width;
  const float* scales = head.value_scales + block * width;
  float* acc = a.acc + first * width;
  int v = 0;
  for (; v + 2 <= vectors; v += 2) {
    add_columns<2>(values + v * 16 * kKeyBlock, scales + 16 * v, width, acc + 16 * v, a);
  }
  if (v < vectors) add_columns<1>(values + v * 16 * kKeyBlock, scales + 16 * v, width, acc + 16 * v, a);
}

void attend(const PackedHead& head, const float* q, int rows, float scale, float* out, int64_t out_stride,
            void* scratch) {
  auto& a = *static_cast<Attention*>(scratch);
  const int width = (head.dim + 15) / 16 * 16;
  for (int r = 0; r < kRowGroup; ++r) {
    // Rows that fill the last tile repeat the first.
    a.q_scales[r] =
        scale * kLogE *
        quantize(q + (r < rows ? r : 0) * head.dim, 1, head.dim, kBlockNorm, a.q + r * kFloatBlock);
    a.most[r] = -__builtin_inff();
    a.sum[r] = 0.0f;
  }
  __builtin_memset(a.acc, 0, kRowGroup * width * sizeof(float));
  const int64_t blocks = (head.count + kKeyBlock - 1) / kKeyBlock;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int first = 0; first < rows; first += kTile) {
      weigh(head, block, first, a);
      add_values(head, block, first, a);
    }
  }
  for (int r = 0; r < rows; ++r) {
    const __m512 factor = _mm512_set1_ps(1.0f / a.sum[r]);
    for (int c = 0; c < head.dim; c += 16) {
      _mm512_mask_storeu_ps(out + r * out_stride + c, tail(head.dim - c),
                            _mm512_mul_ps(_mm512_load_ps(a.acc + r * width + c), factor));
    }
  }
}

}  // namespace

const BlockFloatKernels* avx512_block_float() {
  static const BlockFloatKernels table{quantize, multiply, attend};
  return &table;
}

}  // namespace moeserve
