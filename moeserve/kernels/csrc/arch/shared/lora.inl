// The two small products of a low-rank adapter (LoRA): the input times A, then that times B.

// out[j] = a_j . x for four rows of a, `stride` apart; n % 16 == 0. Each gives the same bits as `dot`.
void dot_four(const float* a, int64_t stride, const float* x, int n, float* out) {
  VF sums[4] = {zero_f(), zero_f(), zero_f(), zero_f()};
  for (int i = 0; i < n; i += 16) {
    const VF v = load_f(x + i);
    for (int j = 0; j < 4; ++j) sums[j] = fma(load_f(a + j * stride + i), v, sums[j]);
  }
  for (int j = 0; j < 4; ++j) out[j] = reduce_add(sums[j]);
}

// y += sum_r s[r] * b[r], b [rank, 32].
void add_low_rank(const float* s, const float* b, int rank, float* y) {
  VF low = zero_f(), high = zero_f();
  for (int r = 0; r < rank; ++r, b += 32) {
    const VF v = set_f(s[r]);
    low = fma(v, load_f(b), low);
    high = fma(v, load_f(b + 16), high);
  }
  store_f(y, add(load_f(y), low));
  store_f(y + 16, add(load_f(y + 16), high));
}
