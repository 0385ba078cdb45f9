// Kernels over one row: quantisation of activations, norms, rotation, gated activations.

// Quantises to int8 with a scale and two sums per 32 columns: half the error of one scale per 256, at no cost in
// decode. A group with NaN or infinity gets the scale NaN, so that its request fails instead of giving wrong numbers. A
// group whose largest magnitude is under kNothing becomes zero, because 127 / largest could overflow.
constexpr float kNothing = 1e-30f;

void quantize(const float* x, int64_t n, int8_t* codes, GroupMeta* metas) {
  for (int64_t g = 0; g < n / 32; ++g, x += 32) {
    const VF a = load_f(x), b = load_f(x + 16);
    const float largest = reduce_max(max(abs(a), abs(b)));
    const float inverse = largest > kNothing ? 127.0f / largest : 0.0f;
    const VF qa = round_even(mul(a, set_f(inverse))), qb = round_even(mul(b, set_f(inverse)));
    store_i8(codes + 32 * g, qa);
    store_i8(codes + 32 * g + 16, qb);
    const float lo = reduce_add(qa), hi = reduce_add(qb);  // exact: small integers
    const bool finite = lo + hi == lo + hi;                // x * inverse is NaN for NaN and for infinity
    GroupMeta meta;
    meta.scale = finite ? largest / 127.0f : NAN;
    meta.sum_lo = finite ? static_cast<int32_t>(lo) : 0;
    meta.sum_hi = finite ? static_cast<int32_t>(hi) : 0;
    meta.scaled_sum = meta.scale * static_cast<float>(meta.sum_lo + meta.sum_hi);
    metas[g] = meta;
  }
}

void rms_norm(const float* x, const float* w, float eps, int n, float* y) {
  VF squares = zero_f();
  for (int i = 0; i < n; i += 16) squares = fma(load_f(x + i), load_f(x + i), squares);
  const VF inverse = set_f(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(n) + eps));
  for (int i = 0; i < n; i += 16) store_f(y + i, mul(mul(load_f(x + i), inverse), load_f(w + i)));
}

void layer_norm(const float* x, const float* w, float eps, int n, float* y) {
  VF sum = zero_f();
  for (int i = 0; i < n; i += 16) sum = add(sum, load_f(x + i));
  const VF mean = set_f(reduce_add(sum) / static_cast<float>(n));
  VF squares = zero_f();
  for (int i = 0; i < n; i += 16) {
    const VF centered = sub(load_f(x + i), mean);
    squares = fma(centered, centered, squares);
  }
  const VF inverse = set_f(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(n) + eps));
  for (int i = 0; i < n; i += 16) {
    store_f(y + i, mul(mul(sub(load_f(x + i), mean), inverse), load_f(w + i)));
  }
}

void rope(float* head, const float* cos, const float* sin, int n) {
  float* other = head + n / 2;
  for (int i = 0; i < n / 2; i += 16) {
    const VF a = load_f(head + i), b = load_f(other + i), c = load_f(cos + i), s = load_f(sin + i);
    store_f(head + i, fnma(b, s, mul(a, c)));
    store_f(other + i, fma(a, s, mul(b, c)));
  }
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += 16) {
    const VF g = load_f(gate + i);
    const VF silu = div(g, add(set_f(1.0f), exp_f(sub(zero_f(), g))));
    store_f(out + i, mul(silu, load_f(up + i)));
  }
}

// GELU in its tanh form: g * (1 + tanh(z)) / 2 equals g * sigmoid(2 z).
void gelu_mul(const float* gate, const float* up, int n, float* out) {
  const VF linear = set_f(-1.5957691216f),
           cubic = set_f(-0.0713548162726f);  // -2 sqrt(2 / pi), and 0.044715 times that
  for (int i = 0; i < n; i += 16) {
    const VF g = load_f(gate + i);
    const VF z = mul(g, fma(mul(g, g), cubic, linear));
    store_f(out + i, mul(div(g, add(set_f(1.0f), exp_f(z))), load_f(up + i)));
  }
}

// tanh(z) = 1 - 2 / (1 + exp(2 z)).
void softcap(float cap, int n, float* x) {
  const VF inverse = set_f(2.0f / cap), one = set_f(1.0f);
  for (int i = 0; i < n; i += 16) {
    const VF e = exp_f(mul(load_f(x + i), inverse));
    store_f(x + i, mul(set_f(cap), sub(one, div(set_f(2.0f), add(one, e)))));
  }
}

void sigmoid_mul(const float* gate, int n, float* x) {
  for (int i = 0; i < n; i += 16) {
    const VF g = load_f(gate + i);
    store_f(x + i, div(load_f(x + i), add(set_f(1.0f), exp_f(sub(zero_f(), g)))));
  }
}

// The value to clamp is the second operand of min and max, so that NaN stays NaN.
void clamped_silu_mul(const float* gate, const float* up, int n, float most_silu, float most_up, float* out) {
  const VF limit = set_f(most_silu), highest = set_f(most_up), lowest = set_f(-most_up), one = set_f(1.0f);
  for (int i = 0; i < n; i += 16) {
    const VF g = load_f(gate + i);
    const VF u = max(lowest, min(highest, load_f(up + i)));
    store_f(out + i, mul(min(limit, div(g, add(one, exp_f(sub(zero_f(), g))))), u));
  }
}

// ReGLU; the square of ReLU if gate and up are the same.
void relu_mul(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += 16) store_f(out + i, mul(max(load_f(gate + i), zero_f()), load_f(up + i)));
}

// gpt-oss's gated activation: gate <= most, up in [-most, most].
void swiglu_oai(const float* gate, const float* up, int n, float most, float alpha, float* out) {
  const VF limit = set_f(most), least = set_f(-most), one = set_f(1.0f);
  for (int i = 0; i < n; i += 16) {
    const VF g = min(limit, load_f(gate + i));
    const VF u = max(least, min(limit, load_f(up + i)));
    const VF swish = div(g, add(one, exp_f(mul(set_f(-alpha), g))));
    store_f(out + i, mul(add(u, one), swish));
  }
}

// Kimi-K3's gated activation: beta * tanh(g / beta) * sigmoid(g) * u', u' = most * tanh(u / most), or u if most is 0.
void situ_mul(const float* gate, const float* up, int n, float beta, float most, float* out) {
  const VF scale = set_f(beta), inverse = set_f(1.0f / beta), one = set_f(1.0f);
  const VF up_scale = set_f(most), up_inverse = set_f(most > 0 ? 1.0f / most : 0.0f);
  for (int i = 0; i < n; i += 16) {
    const VF g = load_f(gate + i);
    VF u = load_f(up + i);
    if (most > 0) u = mul(up_scale, tanh_f(mul(u, up_inverse)));
    const VF bounded = mul(scale, tanh_f(mul(g, inverse)));
    store_f(out + i, mul(div(bounded, add(one, exp_f(sub(zero_f(), g)))), u));
  }
}

float dot(const float* a, const float* b, int n) {
  VF sum = zero_f();
  for (int i = 0; i < n; i += 16) sum = fma(load_f(a + i), load_f(b + i), sum);
  return reduce_add(sum);
}

void axpy(float w, const float* x, int n, float* y) {
  const VF v = set_f(w);
  for (int i = 0; i < n; i += 16) store_f(y + i, fma(v, load_f(x + i), load_f(y + i)));
}

void scale(float w, int n, float* x) {
  const VF v = set_f(w);
  for (int i = 0; i < n; i += 16) store_f(x + i, mul(v, load_f(x + i)));
}

void to_half_row(const float* x, int n, uint16_t* y) {
  for (int i = 0; i < n; i += 16) store_half(y + i, load_f(x + i));
}

void from_half_row(const uint16_t* x, int n, float* y) {
  for (int i = 0; i < n; i += 16) store_f(y + i, load_half(x + i));
}
