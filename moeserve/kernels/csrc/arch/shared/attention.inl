// Attention of many query vectors to one block of 32 keys. Lanes are keys for the scores, and head dimensions for the
// values. A query's arithmetic is the same alone, in a tile, in prefill and in decode: blocks come in order of
// positions, each query has its own accumulators, and masked keys add exact zeros.

constexpr int kBlockKeys = 32;
// Vectors of 16 keys, and of 16 value dimensions, whose sums with four queries fit in the registers.
constexpr int kKeysTogether = std::min(2, kSumsInRegisters / 4), kVectorsTogether = kSumsInRegisters / 4;

void gather_keys(const uint16_t* base, int64_t stride, const int32_t* slots, int count, int dim, float* out) {
  alignas(64) float block[16][16];
  for (int key0 = 0; key0 < kBlockKeys; key0 += 16) {
    for (int d = 0; d < dim; d += 16) {
      for (int key = 0; key < 16; ++key) {
        const bool exists = key0 + key < count;
        store_f(block[key], exists ? load_half(base + slots[key0 + key] * stride + d) : zero_f());
      }
      VB columns[16];
      transpose_words(reinterpret_cast<const uint8_t*>(block), sizeof block[0], columns);
      for (int i = 0; i < 16; ++i)
        store_b(reinterpret_cast<uint8_t*>(out + (d + i) * kBlockKeys + key0), columns[i]);
    }
  }
}

void gather_values(const uint16_t* base, int64_t stride, const int32_t* slots, int count, int dim,
                   float* out) {
  for (int key = 0; key < count; ++key) {
    const uint16_t* v = base + slots[key] * stride;
    for (int d = 0; d < dim; d += 16) store_f(out + key * dim + d, load_half(v + d));
  }
  if (count < kBlockKeys) std::memset(out + count * dim, 0, sizeof(float) * dim * (kBlockKeys - count));
}

// Computes the scores of 16 * KEYS keys for N queries.
template <int N, int KEYS>
inline void scores(const float* const* queries, const float* keys, int dim, float* out, Upcoming& upcoming) {
  upcoming.ask();  // outside the loop: inside it, GCC would keep the sums in memory
  VF acc[N][KEYS];
  for (auto& a : acc) {
    for (VF& x : a) x = zero_f();
  }
  for (int d = 0; d < dim; ++d) {
    VF k[KEYS];
    for (int i = 0; i < KEYS; ++i) k[i] = load_f(keys + d * kBlockKeys + 16 * i);
    for (int q = 0; q < N; ++q) {
      const VF x = set_f(queries[q][d]);
      for (int i = 0; i < KEYS; ++i) acc[q][i] = fma(x, k[i], acc[q][i]);
    }
  }
  for (int q = 0; q < N; ++q) {
    for (int i = 0; i < KEYS; ++i) store_f(out + q * kBlockKeys + 16 * i, acc[q][i]);
  }
}

template <int N>
inline void score_floats(const float* const* queries, const float* keys, int dim, float* out,
                         Upcoming& upcoming) {
  for (int key = 0; key < kBlockKeys; key += 16 * kKeysTogether)
    scores<N, kKeysTogether>(queries, keys + key, dim, out + key, upcoming);
}

// Turns scores into probabilities relative to the running maximum, and returns the factor for the earlier sums. N
// queries at a time, so that their dependency chains overlap.
template <int N>
inline void update_softmax(float* const* scores, const int* first, const int* end, Softmax* const* states,
                           float* factors) {
  VF a[N], b[N];
  float new_max[N];
  for (int q = 0; q < N; ++q) {
    for (int key = 0; key < first[q]; ++key) scores[q][key] = -INFINITY;
    for (int key = end[q]; key < kBlockKeys; ++key) scores[q][key] = -INFINITY;
    a[q] = load_f(scores[q]);
    b[q] = load_f(scores[q] + 16);
  }
  for (int q = 0; q < N; ++q) {
    const float block_max = reduce_max(max(a[q], b[q]));
    new_max[q] = block_max > states[q]->max ? block_max : states[q]->max;
  }
  for (int q = 0; q < N; ++q) {
    const VF m = set_f(new_max[q]);
    a[q] = exp_f(sub(a[q], m));
    b[q] = exp_f(sub(b[q], m));
    store_f(scores[q], a[q]);
    store_f(scores[q] + 16, b[q]);
  }
  for (int q = 0; q < N; ++q) {
    float factor = 1.0f;  // exp(0), for most blocks after the first few
    if (new_max[q] != states[q]->max) {
      alignas(64) float old[16];
      store_f(old, exp_f(set_f(states[q]->max - new_max[q])));
      factor = old[0];
    }
    factors[q] = factor;
    *states[q] = {new_max[q], states[q]->sum * factor + reduce_add(add(a[q], b[q]))};
  }
}

// acc[q] = acc[q] * factor[q] + p[q] . values, for 16 * VECTORS of the head's dimensions at a time.
template <int N, int VECTORS>
inline void weigh(float* const* p, const float* factor, const float* values, int dim, int d,
                  float* const* acc, Upcoming& upcoming) {
  upcoming.ask();
  VF a[N][VECTORS];
#pragma GCC unroll 4
  for (int q = 0; q < N; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) a[q][v] = mul(load_f(acc[q] + d + 16 * v), set_f(factor[q]));
  }
  for (int key = 0; key < kBlockKeys; ++key) {
    VF x[VECTORS];
    for (int v = 0; v < VECTORS; ++v) x[v] = load_f(values + key * dim + d + 16 * v);
#pragma GCC unroll 4
    for (int q = 0; q < N; ++q) {
      const VF w = set_f(p[q][key]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) a[q][v] = fma(w, x[v], a[q][v]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < N; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) store_f(acc[q] + d + 16 * v, a[q][v]);
  }
}

// A block's values as float32, [32][dim]; attention_q8.inl has the q8_0 form.
struct FloatValues {
  const float* rows;
  int dim;

  template <int N>
  void weigh_all(float* const* p, const float* factor, float* const* acc, Upcoming& upcoming) const {
    constexpr int kWidth = 16 * kVectorsTogether;
    int d = 0;
    for (; d + kWidth <= dim; d += kWidth) weigh<N, kVectorsTogether>(p, factor, rows, dim, d, acc, upcoming);
    if constexpr (kVectorsTogether > 2) {
      for (; d + 32 <= dim; d += 32) weigh<N, 2>(p, factor, rows, dim, d, acc, upcoming);
    }
    for (; d < dim; d += 16) weigh<N, 1>(p, factor, rows, dim, d, acc, upcoming);
  }
};

// Attends one block for n queries whose scores are known: [n][32], overwritten.
template <class Values>
inline void attend_scored(float* scored, const int* first, const int* end, int n, const Values& values,
                          Softmax* state, float* acc, Upcoming& upcoming) {
  float* p[4];
  float* out[4];
  Softmax* states[4];
  float factors[4];
  int from[4], to[4], pending = 0;
  for (int q = 0; q < n; ++q) {
    if (end[q] > first[q]) {
      p[pending] = scored + q * kBlockKeys;
      out[pending] = acc + static_cast<int64_t>(q) * values.dim;
      states[pending] = state + q;
      from[pending] = first[q];
      to[pending++] = end[q];
    }
    if (pending == 4) {
      update_softmax<4>(p, from, to, states, factors);
      values.template weigh_all<4>(p, factors, out, upcoming);
      pending = 0;
    }
  }
  for (int i = 0; i < pending; ++i) {
    update_softmax<1>(p + i, from + i, to + i, states + i, factors);
    values.template weigh_all<1>(p + i, factors, out + i, upcoming);
  }
}

// Computes the scores of n queries with a block's keys: [n][32].
inline void score_all(const float* const* queries, int n, const float* keys, int dim, float* out,
                      Upcoming& upcoming) {
  int q = 0;
  for (; q + 4 <= n; q += 4) score_floats<4>(queries + q, keys, dim, out + q * kBlockKeys, upcoming);
  for (; q < n; ++q) score_floats<1>(queries + q, keys, dim, out + q * kBlockKeys, upcoming);
}

constexpr int turns_of(int n) { return n / 4 + n % 4; }
constexpr int score_calls(int n) { return turns_of(n) * (2 / kKeysTogether); }

void attend_block(const float* const* queries, const int* first, const int* end, int n, const float* keys,
                  const float* values, int dim, int value_dim, Softmax* state, float* acc, float* scratch,
                  Upcoming& upcoming) {
  upcoming.spread(score_calls(n) + turns_of(n) * (value_dim / (16 * kVectorsTogether)));
  score_all(queries, n, keys, dim, scratch, upcoming);
  attend_scored(scratch, first, end, n, FloatValues{values, value_dim}, state, acc, upcoming);
}

void score_block(const float* const* queries, int n, const float* keys, int dim, float* out,
                 Upcoming& upcoming) {
  upcoming.spread(score_calls(n));
  score_all(queries, n, keys, dim, out, upcoming);
}

void weigh_block(float* scored, const int* first, const int* end, int n, const float* values, int value_dim,
                 Softmax* state, float* acc, Upcoming& upcoming) {
  upcoming.spread(turns_of(n) * std::max(1, value_dim / (16 * std::min(2, kVectorsTogether))));
  attend_scored(scored, first, end, n, FloatValues{values, value_dim}, state, acc, upcoming);
}
