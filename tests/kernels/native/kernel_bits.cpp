// Prints a checksum of each kernel's results on numbers made from a fixed seed, one a line: kernel_bits ISA.
//
// Two machines, or two instruction sets, whose kernels compute the same bits print the same lines. Needs no Python, so
// that it runs under qemu-user too. tests/kernels/pool/test_aarch64.py compares.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernel_inputs.h"
#include "pool/pool.h"
#include "sampling/sampling.h"

namespace moeserve {
namespace {

// Prints `name`, a checksum (FNV-1a) and, of float32 results, "finite" or "not-finite".
void print_bytes(const std::string& name, const void* data, size_t bytes, const char* note = "") {
  uint64_t sum = 14695981039346656037ull;
  for (size_t i = 0; i < bytes; ++i) sum = (sum ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211ull;
  std::printf("%s %016llx%s\n", name.c_str(), static_cast<unsigned long long>(sum), note);
}
template <class T>
void print(const std::string& name, const std::vector<T>& values) {
  print_bytes(name, values.data(), values.size() * sizeof(T));
}
void print(const std::string& name, const Floats& values) {
  bool finite = true;
  for (float x : values) finite &= std::isfinite(x);
  print_bytes(name, values.data(), values.size() * sizeof(float), finite ? " finite" : " not-finite");
}

constexpr int kCols = 768, kMostRows = 16;

// Packing of one panel, and its products with 1 to kMostRows rows of activations, packed and as in the file.
template <Type T>
void print_type(const Kernels& k, const char* name) {
  constexpr int number = static_cast<int>(T);
  constexpr QuantType q = kQuantType<T>;
  Random random(number + 1);
  set_test_codebook(number, q.book, random);
  const size_t stride = static_cast<size_t>(kCols) / q.block_cols * q.block_bytes;
  const std::vector<uint8_t> file = test_weights(T, q, kCols, kPanelRows, random);
  std::vector<uint8_t> packed(stride * kPanelRows);
  k.pack[number](file.data(), stride, kPanelRows, kCols, packed.data());
  print(std::string("pack/") + name, packed);
  std::vector<uint8_t> partly(stride * kPanelRows);
  k.pack[number](file.data(), stride, 19, kCols, partly.data());
  print(std::string("pack-19-rows/") + name, partly);

  std::vector<std::vector<uint8_t>> rows;
  std::vector<const void*> pointers;
  for (int t = 0; t < kMostRows; ++t) {
    const Floats x = random.activations(kCols);
    std::vector<uint8_t> row(q.takes_floats() ? kCols * sizeof(float) : quantized_row_bytes(kCols));
    if (q.takes_floats()) {
      std::memcpy(row.data(), x.data(), row.size());
    } else {
      k.quantize(x.data(), kCols, reinterpret_cast<int8_t*>(row.data()),
                 reinterpret_cast<GroupMeta*>(row.data() + kCols));
    }
    rows.push_back(std::move(row));
  }
  for (const auto& row : rows) pointers.push_back(row.data());
  for (int n : {1, 2, 3, 4, 8, 13, kMostRows}) {
    Floats out(static_cast<size_t>(n) * kPanelRows);
    k.gemm[number]({packed.data(), 0, kPanelRows}, nullptr, kCols, pointers.data(), n, out.data());
    print(std::string("product/") + name + "/" + std::to_string(n), out);
    Floats in_place(out.size());
    k.gemm[number]({file.data(), stride, kPanelRows}, nullptr, kCols, pointers.data(), n, in_place.data());
    if (std::memcmp(out.data(), in_place.data(), out.size() * sizeof(float)) != 0) {
      std::printf("product-in-place/%s/%d differs\n", name, n);
    }
  }
}

void print_rowwise(const Kernels& k) {
  Random random(1000);
  for (int n : {32, 768, 4096}) {
    const std::string size = "/" + std::to_string(n);
    const Floats x = random.activations(n), y = random.activations(n);
    Floats positive = random.activations(n);
    for (float& p : positive) p = std::fabs(p);
    std::vector<int8_t> codes(n);
    std::vector<GroupMeta> metas(n / 32);
    k.quantize(x.data(), n, codes.data(), metas.data());
    print("quantize-codes" + size, codes);
    print("quantize-metas" + size, metas);
    auto two = [&](const char* name, auto call) {
      Floats out(n);
      call(x.data(), y.data(), out.data());
      print(name + size, out);
    };
    auto one = [&](const char* name, auto call) {
      Floats out = x;
      call(out.data());
      print(name + size, out);
    };
    using In = const float*;
    two("rms_norm", [&](In a, In b, float* o) { k.rms_norm(a, b, 1e-6f, n, o); });
    two("silu_mul", [&](In a, In b, float* o) { k.silu_mul(a, b, n, o); });
    two("clamped_silu_mul", [&](In a, In b, float* o) { k.clamped_silu_mul(a, b, n, 7.0f, 5.0f, o); });
    two("swiglu_oai", [&](In a, In b, float* o) { k.swiglu_oai(a, b, n, 7.0f, 1.702f, o); });
    two("gelu_mul", [&](In a, In b, float* o) { k.gelu_mul(a, b, n, o); });
    two("situ_mul", [&](In a, In b, float* o) { k.situ_mul(a, b, n, 4.0f, 25.0f, o); });
    two("relu_mul", [&](In a, In b, float* o) { k.relu_mul(a, b, n, o); });
    two("dot", [&](In a, In b, float* o) { o[0] = k.dot(a, b, n); });
    two("dot_four", [&](In a, In b, float* o) { k.dot_four(a, 0, b, n, o); });
    one("rope", [&](float* o) { k.rope(o, y.data(), positive.data(), n / 32 * 32); });
    one("softcap", [&](float* o) { k.softcap(30.0f, n, o); });
    one("sigmoid_mul", [&](float* o) { k.sigmoid_mul(y.data(), n, o); });
    one("l2_normalize", [&](float* o) { k.l2_normalize(o, 0.5f, n); });
    one("channel_decays", [&](float* o) { k.channel_decays(o, y.data(), -0.7f, n); });
    one("axpy", [&](float* o) { k.axpy(0.3f, y.data(), n, o); });
    one("scale", [&](float* o) { k.scale(-1.7f, n, o); });
    std::vector<uint16_t> halves(n);
    k.to_half(x.data(), n, halves.data());
    print("to_half" + size, halves);
  }
}

void print_recurrent(const Kernels& k) {
  Random random(1001);
  constexpr int kKeys = 128;
  const Floats q = random.activations(kKeys), key = random.activations(kKeys), v = random.activations(32);
  Floats decays = random.uniform(kKeys, 0.5f, 1.0f), state = random.uniform(kKeys * 32, -1, 1), out(32);
  auto step = [&](const char* name, auto call) {
    for (int token = 0; token < 3; ++token) call();
    print(std::string(name) + "-state", state);
    print(std::string(name) + "-out", out);
  };
  step("delta_step",
       [&] { k.delta_step(state.data(), kKeys, q.data(), key.data(), v.data(), 0.9f, 0.01f, out.data()); });
  step("delta_step_by_channel", [&] {
    k.delta_step_by_channel(state.data(), kKeys, q.data(), key.data(), v.data(), decays.data(), 0.01f,
                            out.data());
  });
  step("mamba2_step",
       [&] { k.mamba2_step(state.data(), kKeys, q.data(), key.data(), v.data(), 0.9f, 0.1f, out.data()); });
  Floats window = random.activations(3 * 64), x = random.activations(64);
  const Floats w = random.uniform(4 * 64, -1, 1), bias = random.uniform(64, -1, 1);
  k.conv_silu(window.data(), x.data(), w.data(), 64, bias.data(), 4, 64);
  print("conv_silu", x);
  print("conv_silu-window", window);
  const Floats gate = random.activations(64), gate_out = random.activations(64);
  Floats convolved(64);
  k.gated_conv(window.data(), gate.data(), gate_out.data(), x.data(), w.data(), 64, 4, 64, convolved.data());
  print("gated_conv", convolved);
  const Floats s = random.activations(16), b = random.activations(16 * 32);
  Floats y = random.activations(32);
  k.add_low_rank(s.data(), b.data(), 16, y.data());
  print("add_low_rank", y);
}

// Two blocks of keys for seven queries, the second of which none sees whole; then the merge with another segment.
void print_attention(const Kernels& k) {
  constexpr int kQueries = 7, kSlots = 96;
  for (const int dim : {64, 96, 128}) {
    Random random(2000 + dim);
    const std::string size = "/" + std::to_string(dim);
    const AttentionInputs in(random, kQueries, kSlots, dim);
    Floats keys(dim * 32), values(dim * 32), acc(kQueries * dim), scratch(kQueries * 32);
    std::vector<Softmax> state(kQueries, Softmax{-INFINITY, 0});
    for (int block = 0; block < 2; ++block) {
      const int count = block == 0 ? 32 : 21;
      k.gather_keys(in.halves.data(), dim, in.slots[block], count, dim, keys.data());
      k.gather_values(in.halves.data(), dim, in.slots[block], count, dim, values.data());
      Upcoming upcoming{nullptr, 0};
      k.attend_block(in.queries.data(), in.first[block], in.end[block], kQueries, keys.data(), values.data(),
                     dim, dim, state.data(), acc.data(), scratch.data(), upcoming);
    }
    print("gather_keys" + size, keys);
    print("gather_values" + size, values);
    print("attend_block" + size, acc);
    print_bytes("attend_block-state" + size, state.data(), state.size() * sizeof(Softmax));
    Softmax other{state[1].max - 0.5f, 1.25f};
    merge_segments(k, state[0], acc.data(), other, acc.data() + dim, dim);
    print("merge_segments" + size, Floats(acc.begin(), acc.begin() + dim));
  }
}

void print_attention_q8(const Kernels& k) {
  constexpr int kQueries = 7, kSlots = 96;
  for (const int dim : {64, 96, 128}) {
    Random random(3000 + dim);
    const std::string size = "/" + std::to_string(dim);
    const AttentionInputs in(random, kQueries, kSlots, dim);
    std::vector<int8_t> codes(kSlots * dim);
    std::vector<uint16_t> scales(kSlots * dim / 32);
    k.quantize_kv(in.floats.data(), kSlots * dim, codes.data(), scales.data());
    print("quantize_kv-codes" + size, codes);
    print("quantize_kv-scales" + size, scales);
    std::vector<int16_t> query_codes(kQueries * dim), keys(dim * 32), values(dim * 32);
    Floats query_scales(kQueries * dim / 32), key_scales(dim), value_scales(dim);
    std::vector<QueryRow> queries;
    for (int i = 0; i < kQueries; ++i) {
      queries.push_back({query_codes.data() + i * dim, query_scales.data() + i * (dim / 32)});
      k.quantize_query(in.queries[i], dim, queries[i]);
    }
    print("quantize_query" + size, query_codes);
    Floats acc(kQueries * dim), scratch(kQueries * 32);
    std::vector<Softmax> state(kQueries, Softmax{-INFINITY, 0});
    for (int block = 0; block < 2; ++block) {
      const int count = block == 0 ? 32 : 21;
      const Q8Rows rows{codes.data(), scales.data(), dim};
      k.gather_keys_q8(rows, in.slots[block], count, dim, keys.data(), key_scales.data());
      k.gather_values_q8(rows, in.slots[block], count, dim, values.data(), value_scales.data());
      Upcoming upcoming{nullptr, 0};
      k.attend_block_q8(queries.data(), in.first[block], in.end[block], kQueries, keys.data(),
                        key_scales.data(), values.data(), value_scales.data(), dim, state.data(), acc.data(),
                        scratch.data(), upcoming);
    }
    print("gather_keys_q8" + size, keys);
    print("gather_values_q8" + size, values);
    print("attend_block_q8" + size, acc);
  }
}

void print_sampling(const char* isa) {
  for (const int vocab : {997, 32003}) {
    Random random(vocab);
    const Floats logits = random.activations(vocab);
    Scratch scratch(vocab, isa);
    std::vector<int32_t> tokens;
    std::vector<double> logprobs;
    for (int i = 0; i < 64; ++i) {
      SampleParams p;
      p.temperature = 0.25f * static_cast<float>(i % 5);
      p.top_k = i % 3 * 20;
      p.top_p = i % 4 == 0 ? 1.0 : 0.9;
      p.min_p = i % 7 == 0 ? 0.02 : 0.0;
      p.num_logprobs = 3;
      p.seed = 7;
      p.position = i;
      SampleResult r;
      sample_row(logits.data(), vocab, p, r, scratch);
      tokens.push_back(r.token_id);
      logprobs.push_back(r.logprobs.logprob);
      logprobs.insert(logprobs.end(), r.logprobs.top_logprobs, r.logprobs.top_logprobs + r.logprobs.num_top);
    }
    print("sampled-tokens/" + std::to_string(vocab), tokens);
    print("sampled-logprobs/" + std::to_string(vocab), logprobs);
  }
}

// A pool's threads treat denormal numbers as zero, as operands and as results.
struct Denormals {
  float* out;
  void operator()(Team& team) const {
    team.last_phase();
    team.for_units(64, [this](int64_t unit) {
      volatile float denormal = 1e-40f, small = 1.2e-38f, tenth = 0.1f;
      out[unit] = denormal * 2.0f + small * tenth;
    });
  }
};
void print_pool() {
  Pool pool(std::vector<ThreadPlacement>(3));
  Floats out(64, 1.0f);
  for (int i = 0; i < 100; ++i) pool.submit(Denormals{out.data()});
  pool.wait();
  float sum = 0;
  for (float x : out) sum += std::fabs(x);
  std::printf("pool-denormals %s\n", sum == 0 ? "zero" : "kept");
}

void print_all(const Kernels& k) {
#define MOESERVE_PRINT(name, number, ...) print_type<Type::name>(k, #name);
  MOESERVE_QUANT_TYPES(MOESERVE_PRINT)
#undef MOESERVE_PRINT
  print_rowwise(k);
  print_recurrent(k);
  print_attention(k);
  print_attention_q8(k);
  print_sampling(k.name);
  print_pool();
}

}  // namespace
}  // namespace moeserve

int main(int count, char** arguments) {
  const char* isa = count == 2 ? arguments[1] : nullptr;
  const moeserve::Kernels* kernels = isa == nullptr ? nullptr : moeserve::select_kernels(isa);
  if (kernels == nullptr) {
    std::fprintf(stderr, "usage: kernel_bits ISA, one that this CPU has; the best is %s\n",
                 moeserve::select_kernels(nullptr)->name);
    return 2;
  }
  moeserve::print_all(*kernels);
}
