// Inputs of kernel_bits, the same on every machine: numbers from a seed by integer arithmetic and exact conversions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "arch/kernels.h"

namespace moeserve {

using Floats = std::vector<float>;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(88172645463325252ull ^ seed * 0x9e3779b97f4a7c15ull) {
    for (int i = 0; i < 8; ++i) next();
  }
  uint64_t next() {  // xorshift64
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    return state_ ^= state_ << 17;
  }
  float uniform(float low, float high) {
    return low + (high - low) * (static_cast<float>(next() >> 40) * 0x1p-24f);
  }
  Floats uniform(int n, float low, float high) {
    Floats x(n);
    for (float& v : x) v = uniform(low, high);
    return x;
  }
  // Heavy-tailed, within [-30, 30].
  Floats activations(int n) {
    Floats x = uniform(n, -1, 1);
    for (float& v : x) v = v * v * v * 30.0f;
    return x;
  }

 private:
  uint64_t state_;
};

// Entries that the kernels accept, in place of gguf-py's: the columns' magnitudes or, with a delta, -1, 0 and 1.
inline void set_test_codebook(int type, const Codebook& book, Random& random) {
  if (book.entries == 0) return;
  std::vector<int8_t> entries(static_cast<size_t>(book.entries) * book.columns);
  const int levels = book.columns == 4 ? 8 : 4;  // BookLevels has no more
  for (int8_t& e : entries) {
    const int level = static_cast<int>(random.next() % levels);
    e = static_cast<int8_t>(book.has_delta() ? level % 3 - 1 : level * book.most / (levels - 1));
  }
  set_codebook(type, entries.data(), static_cast<int64_t>(entries.size()));
}

// GGUF rows of random bytes, whose floating-point fields are numbers of ordinary size.
inline std::vector<uint8_t> test_weights(Type type, const QuantType& q, int cols, int rows, Random& random) {
  const int64_t blocks = int64_t{cols} / q.block_cols * rows;
  std::vector<uint8_t> bytes(blocks * q.block_bytes);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.next() >> 32);
  auto put = [](uint8_t* to, auto value) { std::memcpy(to, &value, sizeof value); };
  for (int64_t i = 0; i < blocks; ++i) {
    uint8_t* block = bytes.data() + i * q.block_bytes;
    if (type == Type::F32) put(block, random.uniform(-2, 2));
    if (type == Type::F16 || type == Type::BF16) block[1] &= 0xbf;  // below 2, small and denormal numbers too
    for (int half = 0; half < q.halves(); ++half) {  // 2^-7 to 2^-4; a bfloat16 of the same bits is small
      put(block + q.halves_at + 2 * half, static_cast<uint16_t>(0x2000 + random.next() % 0x0c00));
    }
    uint8_t* octets = block + q.octets_at;
    if (q.scales == StoredScales::E8M0)
      octets[0] = static_cast<uint8_t>(random.next() % 20);  // denormal ones too
    if (q.scales == StoredScales::E8M0 && i % 3 > 0)
      octets[0] = static_cast<uint8_t>(115 + random.next() % 16);
    if (q.scales == StoredScales::F32 || q.scales == StoredScales::UE4M3F32)
      put(octets, random.uniform(0.01f, 1));
    if (q.has_book() && q.book.scales == BookScales::Threes) octets[7] &= 0xbf;  // the top of its float16 d
  }
  return bytes;
}

// Queries, and a pool of keys or values, as float32 and as float16; two blocks of slots, and what each query sees.
struct AttentionInputs {
  Floats floats, query_numbers;
  std::vector<uint16_t> halves;
  std::vector<const float*> queries;
  std::vector<int32_t> order;
  const int32_t* slots[2];
  int first[2][16], end[2][16];

  AttentionInputs(Random& random, int num_queries, int num_slots, int dim)
      : floats(random.uniform(num_slots * dim, -2, 2)),
        query_numbers(random.uniform(num_queries * dim, -0.5f, 0.5f)),
        halves(floats.size()),
        order(num_slots) {
    plain_kernels()->to_half(floats.data(), static_cast<int>(floats.size()), halves.data());
    for (int i = 0; i < num_queries; ++i) queries.push_back(query_numbers.data() + i * dim);
    for (int i = 0; i < num_slots; ++i) order[i] = i;
    for (int i = num_slots - 1; i > 0; --i) std::swap(order[i], order[random.next() % (i + 1)]);
    slots[0] = order.data();
    slots[1] = order.data() + 32;
    for (int i = 0; i < num_queries; ++i) {
      first[0][i] = i % 3;
      end[0][i] = 32;
      first[1][i] = 0;
      end[1][i] = i * 3;  // the first query sees nothing of the second block
    }
  }
  AttentionInputs(const AttentionInputs&) = delete;
};

}  // namespace moeserve
