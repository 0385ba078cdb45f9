// Mamba-2: one token's step of a block of columns of the state.

// S [key_dim, 32]: S = decay * S + k (dt * v)^T, out = S^T q. key_dim % kStateRows == 0. Nothing of S is needed before it
// changes, so that one pass reads and writes it.
void mamba2_step(float* state, int key_dim, const float* q, const float* k, const float* v, float decay,
                 float dt, float* out) {
  const VF g = set_f(decay), speed = set_f(dt);
  const VF x[2] = {mul(speed, load_f(v)), mul(speed, load_f(v + 16))};
  VF sums[kStateRows][2];
  for (int r = 0; r < kStateRows; ++r) sums[r][0] = sums[r][1] = zero_f();
  for (int d = 0; d < key_dim; d += kStateRows) {
    for (int r = 0; r < kStateRows; ++r) {
      float* row = state + (d + r) * 32;
      const VF kd = set_f(k[d + r]), qd = set_f(q[d + r]);
      for (int i = 0; i < 2; ++i) {
        const VF s = fma(kd, x[i], mul(g, load_f(row + 16 * i)));
        store_f(row + 16 * i, s);
        sums[r][i] = fma(s, qd, sums[r][i]);
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    for (int r = 1; r < kStateRows; ++r) sums[0][i] = add(sums[0][i], sums[r][i]);
    store_f(out + 16 * i, sums[0][i]);
  }
}
