// Gated DeltaNet and Kimi Delta Attention: the causal convolution (also LFM2's gated one), and one token's step of a
// block of columns of the delta state.

// One token of n channels (n % 16 == 0): x = silu(bias + sum_j w[j] * input[j]). The inputs are the taps - 1 entries of
// `window`, oldest first, then x itself. The window then shifts by one token. w: rows of taps, `stride` apart; window:
// rows of n; bias: [n] or nullptr.
void conv_silu(float* window, float* x, const float* w, int64_t stride, const float* bias, int taps, int n) {
  const VF one = set_f(1.0f);
  for (int i = 0; i < n; i += 16) {
    const VF now = load_f(x + i);
    VF sum = bias == nullptr ? zero_f() : load_f(bias + i);
    for (int j = 0; j + 1 < taps; ++j) {
      float* at = window + j * n + i;
      sum = fma(load_f(at), load_f(w + j * stride + i), sum);
      store_f(at, j + 2 < taps ? load_f(at + n) : now);
    }
    sum = fma(now, load_f(w + (taps - 1) * stride + i), sum);
    store_f(x + i, div(sum, add(one, exp_f(sub(zero_f(), sum)))));
  }
}

// One token of n channels of a gated convolution (n % 16 == 0): x = b * x, out = c * sum_j w[j] * input[j]. Inputs, window and
// w as for conv_silu.
void gated_conv(float* window, const float* b, const float* c, float* x, const float* w, int64_t stride,
                int taps, int n, float* out) {
  for (int i = 0; i < n; i += 16) {
    const VF now = mul(load_f(b + i), load_f(x + i));
    store_f(x + i, now);
    VF sum = zero_f();
    for (int j = 0; j + 1 < taps; ++j) {
      float* at = window + j * n + i;
      sum = fma(load_f(at), load_f(w + j * stride + i), sum);
      store_f(at, j + 2 < taps ? load_f(at + n) : now);
    }
    sum = fma(now, load_f(w + (taps - 1) * stride + i), sum);
    store_f(out + i, mul(load_f(c + i), sum));
  }
}

// x *= factor / sqrt(x . x + 1e-6), n % 16 == 0.
void l2_normalize(float* x, float factor, int n) {
  VF squares = zero_f();
  for (int i = 0; i < n; i += 16) squares = fma(load_f(x + i), load_f(x + i), squares);
  const VF inverse = set_f(factor / std::sqrt(reduce_add(squares) + 1e-6f));
  for (int i = 0; i < n; i += 16) store_f(x + i, mul(load_f(x + i), inverse));
}

// A block of a state has 32 columns, two vectors of 16. Sums over its rows are kept of even and of odd rows, with every
// instruction set, so that all give the same bits. If registers cannot hold these sums for all columns, one half of the
// columns is computed after the other.
constexpr int kHalvesTogether = kSumsInRegisters < 8 ? 1 : 2;

// by_k = S^T k, by_q = S^T q for `Halves` halves of the columns of S [key_dim, 32]. key_dim % 2 == 0.
template <int Halves>
inline void sums_of_halves(const float* state, int key_dim, const float* k, const float* q, VF* by_k,
                           VF* by_q) {
  VF of_k[2][Halves], of_q[2][Halves];
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < Halves; ++i) of_k[r][i] = of_q[r][i] = zero_f();
  }
  for (int d = 0; d < key_dim; d += 2) {
    for (int r = 0; r < 2; ++r) {
      const float* row = state + (d + r) * 32;
      const VF kd = set_f(k[d + r]), qd = set_f(q[d + r]);
      for (int i = 0; i < Halves; ++i) {
        const VF s = load_f(row + 16 * i);
        of_k[r][i] = fma(s, kd, of_k[r][i]);
        of_q[r][i] = fma(s, qd, of_q[r][i]);
      }
    }
  }
  for (int i = 0; i < Halves; ++i) {
    by_k[i] = add(of_k[0][i], of_k[1][i]);
    by_q[i] = add(of_q[0][i], of_q[1][i]);
  }
}
inline void sums_by_key(const float* state, int key_dim, const float* k, const float* q, VF (&by_k)[2],
                        VF (&by_q)[2]) {
  for (int i = 0; i < 2; i += kHalvesTogether) {
    sums_of_halves<kHalvesTogether>(state + 16 * i, key_dim, k, q, by_k + i, by_q + i);
  }
}

// S [key_dim, 32]: S = decay * S + k (beta * (v - decay * S^T k))^T, out = S^T q. key_dim % 2 == 0. The new S is not
// read again: S^T q = decay * (S_before^T q) + (q . k) * change.
void delta_step(float* state, int key_dim, const float* q, const float* k, const float* v, float decay,
                float beta, float* out) {
  VF by_k[2], by_q[2];
  sums_by_key(state, key_dim, k, q, by_k, by_q);
  const VF g = set_f(decay), strength = set_f(beta), qk = set_f(dot(q, k, key_dim));
  VF change[2];
  for (int i = 0; i < 2; ++i) {
    change[i] = mul(fnma(g, by_k[i], load_f(v + 16 * i)), strength);
    store_f(out + 16 * i, fma(qk, change[i], mul(g, by_q[i])));
  }
  for (int d = 0; d < key_dim; ++d) {
    float* row = state + d * 32;
    const VF kd = set_f(k[d]);
    store_f(row, fma(kd, change[0], mul(g, load_f(row))));
    store_f(row + 16, fma(kd, change[1], mul(g, load_f(row + 16))));
  }
}

// The same with a decay per row: row d of S decays by decay[d]; key_dim % 16 == 0.
void delta_step_by_channel(float* state, int key_dim, const float* q, const float* k, const float* v,
                           const float* decay, float beta, float* out) {
  alignas(64) float faded_k[kMostKeyDim], faded_q[kMostKeyDim];
  for (int d = 0; d < key_dim; d += 16) {
    const VF g = load_f(decay + d);
    store_f(faded_k + d, mul(g, load_f(k + d)));
    store_f(faded_q + d, mul(g, load_f(q + d)));
  }
  VF by_k[2], by_q[2];
  sums_by_key(state, key_dim, faded_k, faded_q, by_k, by_q);
  const VF strength = set_f(beta), qk = set_f(dot(q, k, key_dim));
  VF change[2];
  for (int i = 0; i < 2; ++i) {
    change[i] = mul(sub(load_f(v + 16 * i), by_k[i]), strength);
    store_f(out + 16 * i, fma(qk, change[i], by_q[i]));
  }
  for (int d = 0; d < key_dim; ++d) {
    float* row = state + d * 32;
    const VF kd = set_f(k[d]), g = set_f(decay[d]);
    store_f(row, fma(kd, change[0], mul(g, load_f(row))));
    store_f(row + 16, fma(kd, change[1], mul(g, load_f(row + 16))));
  }
}

// a = exp(rate * log(1 + exp(a + bias))), n % 16 == 0. log(1 + t) = 2 artanh(t / (2 + t)) with t = exp(-|x|) <= 1, by
// its series, whose next term is below 1e-8.
void channel_decays(float* a, const float* bias, float rate, int n) {
  const VF one = set_f(1.0f), two = set_f(2.0f), speed = set_f(rate);
  for (int i = 0; i < n; i += 16) {
    const VF x = add(load_f(a + i), load_f(bias + i));
    const VF t = exp_f(sub(zero_f(), abs(x)));
    const VF s = div(t, add(two, t)), square = mul(s, s);
    VF series = set_f(1.0f / 13);
    for (int odd = 11; odd > 0; odd -= 2) series = fma(series, square, odd == 1 ? one : set_f(1.0f / odd));
    const VF softplus = fma(mul(two, s), series, max(x, zero_f()));
    store_f(a + i, exp_f(mul(speed, softplus)));
  }
}

// a = exp(bound / (1 + exp(rate * (a + bias)))), n % 16 == 0: the logarithms of decays lie between bound and 0.
void bounded_decays(float* a, const float* bias, float rate, float bound, int n) {
  const VF one = set_f(1.0f), speed = set_f(rate), least = set_f(bound);
  for (int i = 0; i < n; i += 16) {
    const VF x = mul(speed, add(load_f(a + i), load_f(bias + i)));
    store_f(a + i, exp_f(div(least, add(one, exp_f(x)))));
  }
}
