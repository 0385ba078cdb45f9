// Attention over a q8_0 cache. Scores are integer products of int8 key codes and queries of 16 bits, both with a scale for
// each 32 columns; values become float32 as they are gathered. A query's arithmetic is as fixed as in attention.inl.

constexpr int kLargestCode = 127;
constexpr int kScalesTogether = 4;

// Like `quantize`, but the codes are of the scale as it is kept, which float16 has rounded.
void quantize_kv(const float* x, int n, int8_t* codes, uint16_t* scales) {
  for (int g = 0; g < n / 32; ++g, x += 32) {
    const VF a = load_f(x), b = load_f(x + 16);
    alignas(64) uint16_t halves[16];
    store_half(halves, set_f(reduce_max(max(abs(a), abs(b))) / kLargestCode));
    alignas(64) float kept[16];
    store_f(kept, load_half(halves));
    const float inverse = kept[0] > 0.0f ? 1.0f / kept[0] : 0.0f;
    const VF low = set_f(-kLargestCode), high = set_f(kLargestCode);
    const VF qa = max(low, min(high, round_even(mul(a, set_f(inverse)))));
    const VF qb = max(low, min(high, round_even(mul(b, set_f(inverse)))));
    store_i8(codes + 32 * g, qa);
    store_i8(codes + 32 * g + 16, qb);
    const float sum = reduce_add(add(mul(a, set_f(inverse)), mul(b, set_f(inverse))));
    scales[g] = sum == sum ? halves[0] : 0x7e00;
  }
}

void quantize_query(const float* x, int dim, QueryRow row) {
  constexpr int kOrder[4] = {0, 2, 1, 3};  // in which even and odd bytes of four key codes come
  for (int g = 0; g < dim / 32; ++g, x += 32) {
    const VF a = load_f(x), b = load_f(x + 16);
    const float largest = reduce_max(max(abs(a), abs(b)));
    const float inverse = largest > kNothing ? 32767.0f / largest : 0.0f;
    alignas(64) float whole[32];
    store_f(whole, round_even(mul(a, set_f(inverse))));
    store_f(whole + 16, round_even(mul(b, set_f(inverse))));
    const float check = reduce_add(add(load_f(whole), load_f(whole + 16)));
    const bool finite = check == check;
    row.scales[g] = finite ? largest / 32767.0f : NAN;
    for (int i = 0; i < 32; ++i) {
      row.codes[32 * g + i] = finite ? static_cast<int16_t>(whole[i / 4 * 4 + kOrder[i % 4]]) : int16_t{0};
    }
  }
}

// Scales of `groups` groups of columns from `first` on, of all keys: [32][groups], zero from `count` on. groups <= 4.
inline void gather_scales(const Q8Rows& rows, const int32_t* slots, int count, int first, int groups,
                          float* out) {
  alignas(64) uint16_t halves[kBlockKeys * kScalesTogether] = {};
  const uint16_t* scales = rows.scales + first;
  const int64_t stride = rows.stride / 32;
  for (int key = 0; key < count; ++key) {
    for (int g = 0; g < groups; ++g) halves[key * groups + g] = scales[slots[key] * stride + g];
  }
  for (int i = 0; i < kBlockKeys * groups; i += 16) store_f(out + i, load_half(halves + i));
}

void gather_keys_q8(const Q8Rows& rows, const int32_t* slots, int count, int dim, int16_t* codes,
                    float* scales) {
  alignas(64) int8_t block[16][64] = {};
  for (int key0 = 0; key0 < kBlockKeys; key0 += 16) {
    for (int d = 0; d < dim; d += 64) {
      const int width = std::min(64, dim - d);
      for (int key = 0; key < 16; ++key) {
        if (key0 + key >= count) {
          std::memset(block[key], 0, 64);
        } else {
          const int8_t* from = rows.codes + slots[key0 + key] * rows.stride + d;
          std::memcpy(block[key], from, 32);
          if (width == 64) std::memcpy(block[key] + 32, from + 32, 32);
        }
      }
      VB words[16];
      transpose_words(reinterpret_cast<const uint8_t*>(block), sizeof block[0], words);
      for (int w = 0; w < width / 4; ++w) {
        int16_t* pairs = codes + (d + 4 * w) * kBlockKeys + 2 * key0;
        store_even_bytes(pairs, words[w]);
        store_odd_bytes(pairs + 2 * kBlockKeys, words[w]);
      }
    }
  }
  alignas(64) float by_key[kBlockKeys * kScalesTogether];
  for (int first = 0; first < dim / 32; first += kScalesTogether) {
    const int groups = std::min(kScalesTogether, dim / 32 - first);
    gather_scales(rows, slots, count, first, groups, by_key);
    for (int g = 0; g < groups; ++g) {
      for (int key = 0; key < kBlockKeys; ++key) {
        scales[(first + g) * kBlockKeys + key] = by_key[key * groups + g];
      }
    }
  }
}

void gather_values_q8(const Q8Rows& rows, const int32_t* slots, int count, int dim, float* out) {
  alignas(64) float scales[kBlockKeys * kScalesTogether];
  for (int first = 0; first < dim / 32; first += kScalesTogether) {
    const int groups = std::min(kScalesTogether, dim / 32 - first);
    gather_scales(rows, slots, count, first, groups, scales);
    for (int key = 0; key < count; ++key) {
      const auto* codes =
          reinterpret_cast<const uint8_t*>(rows.codes + slots[key] * rows.stride + 32 * first);
      float* to = out + key * dim + 32 * first;
      for (int g = 0; g < groups; ++g, codes += 32, to += 32) {
        const VF scale = set_f(scales[key * groups + g]);
        store_f(to, mul(to_float(load_i8(codes)), scale));
        store_f(to + 16, mul(to_float(load_i8(codes + 16)), scale));
      }
    }
  }
  if (count < kBlockKeys) std::memset(out + count * dim, 0, sizeof(float) * dim * (kBlockKeys - count));
}

template <int N>
inline void scores_q8(const QueryRow* queries, const int16_t* keys, const float* key_scales, int dim,
                      float* out) {
  VF sum[N][2];
  for (auto& s : sum) s[0] = s[1] = zero_f();
  for (int g = 0; g < dim / 32; ++g) {
    VI acc[N][2];
    for (auto& a : acc) a[0] = a[1] = set_i(0);
#pragma GCC unroll 16
    for (int d = 0; d < 32; d += 2, keys += 2 * kBlockKeys) {
      const VI k0 = load_pairs(keys), k1 = load_pairs(keys + kBlockKeys);
      for (int q = 0; q < N; ++q) {
        const VI pair = broadcast_pair(queries[q].codes + 32 * g + d);
        acc[q][0] = dot2(acc[q][0], k0, pair);
        acc[q][1] = dot2(acc[q][1], k1, pair);
      }
    }
    const VF s0 = load_f(key_scales + g * kBlockKeys), s1 = load_f(key_scales + g * kBlockKeys + 16);
    for (int q = 0; q < N; ++q) {
      const VF scale = set_f(queries[q].scales[g]);
      sum[q][0] = fma(mul(to_float(acc[q][0]), scale), s0, sum[q][0]);
      sum[q][1] = fma(mul(to_float(acc[q][1]), scale), s1, sum[q][1]);
    }
  }
  for (int q = 0; q < N; ++q) {
    store_f(out + q * kBlockKeys, sum[q][0]);
    store_f(out + q * kBlockKeys + 16, sum[q][1]);
  }
}

void attend_block_q8(const QueryRow* queries, const int* first, const int* end, int n, const int16_t* keys,
                     const float* key_scales, const float* values, int dim, Softmax* state, float* acc,
                     float* scratch) {
  int q = 0;
  for (; q + 4 <= n; q += 4) scores_q8<4>(queries + q, keys, key_scales, dim, scratch + q * kBlockKeys);
  for (; q < n; ++q) scores_q8<1>(queries + q, keys, key_scales, dim, scratch + q * kBlockKeys);
  attend_scored(scratch, first, end, n, values, dim, state, acc);
}
