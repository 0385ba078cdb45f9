// Attention over a q8_0 cache, by integer products of int8 codes and int16, both with a scale per 32 columns. For the
// scores, the int16 are the query. For the values, they are the block's weights: a key's probability times its value's
// scale. A query's arithmetic is fixed as in attention.inl: its weights are scaled by the keys that it sees itself.

constexpr int kLargestCode = 127;
constexpr float kLargestWeight = 32767.0f;
constexpr int kScalesTogether = 4;

// Like `quantize`, but the codes are relative to the stored scale, which float16 has rounded.
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
  constexpr int kOrder[4] = {0, 2, 1,
                             3};  // order of a quad's four key codes after splitting even and odd bytes
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

// Gathers the scales of `groups` column groups from `first` on, of all keys: [32][groups], zero from `count` on. groups
// <= 4.
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

// The same for a whole head: [dim / 32][32 keys].
inline void gather_scales_by_group(const Q8Rows& rows, const int32_t* slots, int count, int dim, float* out) {
  alignas(64) float by_key[kBlockKeys * kScalesTogether];
  for (int first = 0; first < dim / 32; first += kScalesTogether) {
    const int groups = std::min(kScalesTogether, dim / 32 - first);
    gather_scales(rows, slots, count, first, groups, by_key);
    for (int g = 0; g < groups; ++g) {
      for (int key = 0; key < kBlockKeys; ++key) {
        out[(first + g) * kBlockKeys + key] = by_key[key * groups + g];
      }
    }
  }
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
  gather_scales_by_group(rows, slots, count, dim, scales);
}

void gather_values_q8(const Q8Rows& rows, const int32_t* slots, int count, int dim, int16_t* codes,
                      float* scales) {
  alignas(64) static constexpr uint8_t kNoKey[32] = {};
  for (int key = 0; key < kBlockKeys; key += 2) {
    for (int d = 0; d < dim; d += 32) {
      const uint8_t* from[2] = {kNoKey, kNoKey};
      for (int i = 0; i < 2 && key + i < count; ++i)
        from[i] = reinterpret_cast<const uint8_t*>(rows.codes + slots[key + i] * rows.stride + d);
      int16_t* to = codes + key * dim + 2 * d;
      store_byte_pairs(to, from[0], from[1]);
      store_byte_pairs(to + 32, from[0] + 16, from[1] + 16);
    }
  }
  gather_scales_by_group(rows, slots, count, dim, scales);
}

// Computes the scores of 16 * KEYS keys for N queries.
template <int N, int KEYS>
inline void scores_q8(const QueryRow* queries, const int16_t* keys, const float* key_scales, int dim,
                      float* out, Upcoming& upcoming) {
  upcoming.ask();
  VF sum[N][KEYS];
  for (auto& s : sum) {
    for (VF& x : s) x = zero_f();
  }
  for (int g = 0; g < dim / 32; ++g) {
    VI acc[N][KEYS];
    for (auto& a : acc) {
      for (VI& x : a) x = set_i(0);
    }
#pragma GCC unroll 16
    for (int d = 0; d < 32; d += 2, keys += 2 * kBlockKeys) {
      VI k[KEYS];
      for (int i = 0; i < KEYS; ++i) k[i] = load_pairs(keys + 32 * i);
      for (int q = 0; q < N; ++q) {
        const VI pair = broadcast_pair(queries[q].codes + 32 * g + d);
        for (int i = 0; i < KEYS; ++i) acc[q][i] = dot2(acc[q][i], k[i], pair);
      }
    }
    for (int i = 0; i < KEYS; ++i) {
      const VF key_scale = load_f(key_scales + g * kBlockKeys + 16 * i);
      for (int q = 0; q < N; ++q) {
        sum[q][i] = fma(mul(to_float(acc[q][i]), set_f(queries[q].scales[g])), key_scale, sum[q][i]);
      }
    }
  }
  for (int q = 0; q < N; ++q) {
    for (int i = 0; i < KEYS; ++i) store_f(out + q * kBlockKeys + 16 * i, sum[q][i]);
  }
}

// Quantises the weights of one query's 32 keys for 32 columns to int16; returns their scale.
inline float quantize_weights(const float* p, const float* value_scales, int16_t* weights) {
  const VF a = mul(load_f(p), load_f(value_scales)), b = mul(load_f(p + 16), load_f(value_scales + 16));
  const float largest = reduce_max(max(a, b));
  const VF inverse = set_f(largest > kNothing ? kLargestWeight / largest : 0.0f);
  store_i16(weights, mul(a, inverse), mul(b, inverse));
  return largest * (1.0f / kLargestWeight);
}

// acc[q] = acc[q] * factor[q] + weight_scales[q] * weights[q] . codes, for 16 * VECTORS columns from d on.
template <int N, int VECTORS>
inline void weigh_codes(const int16_t (*weights)[kBlockKeys], const float* weight_scales, const float* factor,
                        const int16_t* codes, int dim, int d, float* const* acc) {
  VI sum[N][VECTORS];
  for (auto& s : sum) {
    for (VI& x : s) x = set_i(0);
  }
#pragma GCC unroll 16
  for (int key = 0; key < kBlockKeys; key += 2) {
    VI x[VECTORS];
    for (int v = 0; v < VECTORS; ++v) x[v] = load_pairs(codes + key * dim + 2 * d + 32 * v);
    for (int q = 0; q < N; ++q) {
      const VI pair = broadcast_pair(weights[q] + key);
      for (int v = 0; v < VECTORS; ++v) sum[q][v] = dot2(sum[q][v], x[v], pair);
    }
  }
  for (int q = 0; q < N; ++q) {
    for (int v = 0; v < VECTORS; ++v) {
      float* to = acc[q] + d + 16 * v;
      store_f(to, fma(to_float(sum[q][v]), set_f(weight_scales[q]), mul(load_f(to), set_f(factor[q]))));
    }
  }
}

// A block's values: codes as pairs of keys [16][dim][2], scales [dim / 32][32 keys].
struct Q8Values {
  const int16_t* codes;
  const float* scales;
  int dim;

  template <int N>
  void weigh_all(float* const* p, const float* factor, float* const* acc, Upcoming& upcoming) const {
    constexpr int kVectors = kKeysTogether;
    for (int d = 0; d < dim; d += 32) {
      upcoming.ask();
      alignas(64) int16_t weights[N][kBlockKeys];
      float weight_scales[N];
      const float* s = scales + d / 32 * kBlockKeys;
      // NaN if a scale is not finite; the maximum would not show it.
      const float poison = reduce_add(mul(add(load_f(s), load_f(s + 16)), zero_f()));
      for (int q = 0; q < N; ++q) weight_scales[q] = quantize_weights(p[q], s, weights[q]) + poison;
      for (int half = 0; half < 32; half += 16 * kVectors) {
        weigh_codes<N, kVectors>(weights, weight_scales, factor, codes, dim, d + half, acc);
      }
    }
  }
};

template <int N>
inline void score_block(const QueryRow* queries, const int16_t* keys, const float* key_scales, int dim,
                        float* out, Upcoming& upcoming) {
  for (int key = 0; key < kBlockKeys; key += 16 * kKeysTogether)
    scores_q8<N, kKeysTogether>(queries, keys + 2 * key, key_scales + key, dim, out + key, upcoming);
}

void attend_block_q8(const QueryRow* queries, const int* first, const int* end, int n, const int16_t* keys,
                     const float* key_scales, const int16_t* values, const float* value_scales, int dim,
                     Softmax* state, float* acc, float* scratch, Upcoming& upcoming) {
  upcoming.spread((n / 4 + n % 4) * (2 / kKeysTogether + dim / 32));
  int q = 0;
  for (; q + 4 <= n; q += 4)
    score_block<4>(queries + q, keys, key_scales, dim, scratch + q * kBlockKeys, upcoming);
  for (; q < n; ++q) score_block<1>(queries + q, keys, key_scales, dim, scratch + q * kBlockKeys, upcoming);
  attend_scored(scratch, first, end, n, Q8Values{values, value_scales, dim}, state, acc, upcoming);
}
