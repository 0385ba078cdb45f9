// Gated DeltaNet: the causal convolution and one token's step of a block of columns of the delta state.

// One token of n channels (n % 16 == 0): x = silu(sum_j w[j] * input[j]) over the taps - 1 inputs of `window`, the oldest
// first, and x itself; the window then moves on. w: rows of taps, `stride` apart; window: rows of n.
void conv_silu(float* window, float* x, const float* w, int64_t stride, int taps, int n) {
  const VF one = set_f(1.0f);
  for (int i = 0; i < n; i += 16) {
    const VF now = load_f(x + i);
    VF sum = zero_f();
    for (int j = 0; j + 1 < taps; ++j) {
      float* at = window + j * n + i;
      sum = fma(load_f(at), load_f(w + j * stride + i), sum);
      store_f(at, j + 2 < taps ? load_f(at + n) : now);
    }
    sum = fma(now, load_f(w + (taps - 1) * stride + i), sum);
    store_f(x + i, div(sum, add(one, exp_f(sub(zero_f(), sum)))));
  }
}

// x *= factor / sqrt(x . x + 1e-6), n % 16 == 0.
void l2_normalize(float* x, float factor, int n) {
  VF squares = zero_f();
  for (int i = 0; i < n; i += 16) squares = fma(load_f(x + i), load_f(x + i), squares);
  const VF inverse = set_f(factor / std::sqrt(reduce_add(squares) + 1e-6f));
  for (int i = 0; i < n; i += 16) store_f(x + i, mul(load_f(x + i), inverse));
}

// S [key_dim, 32]: S = decay * S + k (beta * (v - decay * S^T k))^T, out = S^T q. key_dim % 2 == 0. The new S is not read
// again: S^T q = decay * (S_before^T q) + (q . k) * change.
void delta_step(float* state, int key_dim, const float* q, const float* k, const float* v, float decay,
                float beta, float* out) {
  VF by_k[kStateRows][2], by_q[kStateRows][2];
  for (int r = 0; r < kStateRows; ++r) by_k[r][0] = by_k[r][1] = by_q[r][0] = by_q[r][1] = zero_f();
  for (int d = 0; d < key_dim; d += kStateRows) {
    for (int r = 0; r < kStateRows; ++r) {
      const float* row = state + (d + r) * 32;
      const VF s0 = load_f(row), s1 = load_f(row + 16);
      const VF kd = set_f(k[d + r]), qd = set_f(q[d + r]);
      by_k[r][0] = fma(s0, kd, by_k[r][0]);
      by_k[r][1] = fma(s1, kd, by_k[r][1]);
      by_q[r][0] = fma(s0, qd, by_q[r][0]);
      by_q[r][1] = fma(s1, qd, by_q[r][1]);
    }
  }
  for (int r = 1; r < kStateRows; ++r) {
    for (int i = 0; i < 2; ++i) {
      by_k[0][i] = add(by_k[0][i], by_k[r][i]);
      by_q[0][i] = add(by_q[0][i], by_q[r][i]);
    }
  }
  const VF g = set_f(decay), strength = set_f(beta), qk = set_f(dot(q, k, key_dim));
  VF change[2];
  for (int i = 0; i < 2; ++i) {
    change[i] = mul(fnma(g, by_k[0][i], load_f(v + 16 * i)), strength);
    store_f(out + 16 * i, fma(qk, change[i], mul(g, by_q[0][i])));
  }
  for (int d = 0; d < key_dim; ++d) {
    float* row = state + d * 32;
    const VF kd = set_f(k[d]);
    store_f(row, fma(kd, change[0], mul(g, load_f(row))));
    store_f(row + 16, fma(kd, change[1], mul(g, load_f(row + 16))));
  }
}
