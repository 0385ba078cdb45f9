// Mamba-2: one token's step of a block of columns of the state.

// `Halves` halves of the columns of mamba2_step, from column 16 * `half` on.
template <int Halves>
inline void mamba2_halves(float* state, int key_dim, const float* q, const float* k, const float* v, VF decay,
                          VF dt, int half, float* out) {
  VF x[Halves], sums[2][Halves];  // sums: of even and of odd rows (delta_net.inl)
  for (int i = 0; i < Halves; ++i) {
    x[i] = mul(dt, load_f(v + 16 * (half + i)));
    sums[0][i] = sums[1][i] = zero_f();
  }
  for (int d = 0; d < key_dim; d += 2) {
    for (int r = 0; r < 2; ++r) {
      float* row = state + (d + r) * 32 + 16 * half;
      const VF kd = set_f(k[d + r]), qd = set_f(q[d + r]);
      for (int i = 0; i < Halves; ++i) {
        const VF s = fma(kd, x[i], mul(decay, load_f(row + 16 * i)));
        store_f(row + 16 * i, s);
        sums[r][i] = fma(s, qd, sums[r][i]);
      }
    }
  }
  for (int i = 0; i < Halves; ++i) store_f(out + 16 * (half + i), add(sums[0][i], sums[1][i]));
}

// S [key_dim, 32]: S = decay * S + k (dt * v)^T, out = S^T q. key_dim % 2 == 0. Nothing of S is needed before it changes,
// so that one pass reads and writes it.
void mamba2_step(float* state, int key_dim, const float* q, const float* k, const float* v, float decay,
                 float dt, float* out) {
  for (int half = 0; half < 2; half += kHalvesTogether) {
    mamba2_halves<kHalvesTogether>(state, key_dim, q, k, v, set_f(decay), set_f(dt), half, out);
  }
}
