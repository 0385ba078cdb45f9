// The scores of an indexer, which chooses the keys that a query attends to.

// out[key] = sum over heads, in order, of weights[h] * max(scored[h][key], 0), for a block of 32 keys; weights nullptr:
// all are 1. Adding begins at +0, so no result is -0.
void index_scores(const float* scored, const float* weights, int heads, float* out) {
  VF low = zero_f(), high = zero_f();
  for (int h = 0; h < heads; ++h, scored += kBlockKeys) {
    const VF w = set_f(weights == nullptr ? 1.0f : weights[h]);
    low = fma(w, max(load_f(scored), zero_f()), low);
    high = fma(w, max(load_f(scored + 16), zero_f()), high);
  }
  store_f(out, low);
  store_f(out + 16, high);
}
