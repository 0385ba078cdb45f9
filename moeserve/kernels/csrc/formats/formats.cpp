#include "formats.h"

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace moeserve {

namespace {

#include "block_codes.inl"
#include "book_blocks.inl"

float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

// Unpacks sub-block j's 6-bit scale and min from the 12 packed bytes of a Q4_K or Q5_K block.
void scale_min(const uint8_t* s, int j, int& scale, int& min) {
  if (j < 4) {
    scale = s[j] & 63;
    min = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    min = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

// Q3_K's 16 six-bit scales: low nibbles in bytes 0..7, the top bit pairs in bytes 8..11.
int q3_scale(const uint8_t* s, int j) {
  const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
  return (low | ((s[8 + j % 4] >> (2 * (j / 4))) & 3) << 4) - 32;
}

// IQ4_XS's 8 six-bit scales: the top bit pairs in bytes 0..1, low nibbles in bytes 2..5.
int iq4_scale(const uint8_t* s, int j) {
  return (((s[2 + j / 2] >> (4 * (j % 2))) & 15) | ((s[j / 4] >> (2 * (j % 4))) & 3) << 4) - 32;
}

float bfloat_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return bfloat_to_float(h);
}

float float_at(const uint8_t* p) {
  float f;
  std::memcpy(&f, p, sizeof f);
  return f;
}

struct GroupScale {
  float s, m;  // a weight is s * (code - offset) - m
};

template <Type T>
GroupScale group_scale(const uint8_t* b, int g) {
  constexpr QuantType q = kQuantType<T>;
  const uint8_t* octets = b + q.octets_at;
  [[maybe_unused]] constexpr int zero_excess = q.low.bits == 8 ? 128 : 0;
  if constexpr (q.scales == StoredScales::E8M0) {
    return {half_e8m0(octets[0]), 0.0f};
  } else if constexpr (q.scales == StoredScales::UE4M3) {
    return {half_ue4m3(octets[g]), 0.0f};
  } else if constexpr (q.scales == StoredScales::F32) {
    return {float_at(octets), 0.0f};
  } else if constexpr (q.scales == StoredScales::UE4M3F32) {
    return {half_ue4m3(octets[4 + g]) * float_at(octets), 0.0f};
  } else {
    const float d = half_at(b + q.halves_at), second = q.halves() > 1 ? half_at(b + q.halves_at + 2) : 0.0f;
    switch (q.scales) {
      case StoredScales::F16Min:
        return {d, -second};
      case StoredScales::F16Zero:
        return {d, d * (octets[0] - zero_excess)};
      case StoredScales::BF16Zero:
        return {bfloat_at(b + q.halves_at), bfloat_at(b + q.halves_at) * (octets[0] - zero_excess)};
      case StoredScales::I8:
        return {d * static_cast<int8_t>(octets[g]), 0.0f};
      case StoredScales::NibbleMin:
        return {d * (octets[g] & 15), second * (octets[g] >> 4)};
      case StoredScales::SixBitMin: {
        int scale, min;
        scale_min(octets, g, scale, min);
        return {d * scale, second * min};
      }
      case StoredScales::SixBitQ3K:
        return {d * q3_scale(octets, g), 0.0f};
      case StoredScales::SixBitIQ4XS:
        return {d * iq4_scale(octets, g), 0.0f};
      case StoredScales::Book:
        return {half_to_float(book_d(b, q)) * (2 * book_scale(b, q, g) + 1) * (q.book.eighths / 8.0f), 0.0f};
      default:
        return {d, 0.0f};
    }
  }
}

template <Type T>
void dequantize_block(const uint8_t* b, float* out) {
  constexpr QuantType q = kQuantType<T>;
  if constexpr (T == Type::F32) {
    std::memcpy(out, b, 4);
  } else if constexpr (T == Type::F16) {
    *out = half_at(b);
  } else if constexpr (T == Type::BF16) {
    *out = bfloat_at(b);
  } else if constexpr (q.has_book()) {
    const uint32_t* words = codebook_words[static_cast<int>(T)];
    for (int col = 0; col < q.block_cols; ++col) {
      out[col] = group_scale<T>(b, col / q.group).s * book_number(b, q.book, words, col / 32, col % 32);
    }
  } else {
    uint8_t codes[q.block_cols];
    read_codes<T>(b, codes);
    for (int g = 0; g < q.block_cols / q.group; ++g) {
      const GroupScale scale = group_scale<T>(b, g);
      for (int col = g * q.group; col < (g + 1) * q.group; ++col) {
        if constexpr (q.e4m3) {
          out[col] = scale.s * e4m3_to_float(codes[col]);
          continue;
        }
        int number = codes[col];
        if (q.low.bits == 8) number = static_cast<int8_t>(codes[col]);
        if (q.table != CodeTable::None) number = kLevels[static_cast<int>(q.table)][codes[col]];
        const float value = scale.s * (number - q.offset);
        out[col] = q.has_min() ? value - scale.m : value;
      }
    }
  }
}

// Throws std::invalid_argument for too many distinct numbers.
std::unique_ptr<BookLevels> book_levels(const Codebook& k, const uint32_t* words) {
  auto number = [&](int column) { return words[column / 4] >> 8 * (column % 4) & 255; };
  std::array<int, 256> level{};
  for (int column = 0; column < k.entries * k.columns; ++column) level[number(column)] = 1;
  const int most_levels = k.columns == 4 ? 8 : 4, bits = k.columns == 4 ? 4 : 2;
  auto levels = std::make_unique<BookLevels>();
  int count = 0;
  for (int value = 0; value < 256; ++value) {
    if (level[value] == 0) continue;
    if (count == most_levels) throw std::invalid_argument("entries: too many distinct magnitudes");
    level[value] = count;
    levels->numbers[count] = static_cast<uint8_t>(value);
    const int plus = k.has_delta() ? value : k.zero() + value;
    for (int i = count++; i < 64; i += most_levels) {
      const bool is_minus = k.columns == 4 && i & 8;
      levels->codes[i] = static_cast<uint8_t>(is_minus ? k.zero() - value : plus);
    }
  }
  for (int column = 0; column < k.entries * k.columns; ++column) {
    const int entry = column / k.columns, place = column % k.columns, half = k.columns / 2;
    levels->planes[place / half * k.entries + entry] |=
        static_cast<uint8_t>(level[number(column)] << bits * (place % half));
    if (k.columns == 8) {
      levels->pairs[entry] |= static_cast<uint32_t>(level[number(column)])
                              << (8 * (place % 4) + 4 * (place / 4));
    }
  }
  return levels;
}

struct Entry {
  TypeInfo info = {nullptr, 1, 0, false};
  void (*dequantize)(const uint8_t* block, float* out) = nullptr;
  const Codebook* book = nullptr;  // nullptr: not a codebook type
};

constexpr std::array<Entry, kMaxType> make_table() {
  std::array<Entry, kMaxType> t{};
#define MOESERVE_ENTRY(name, number, ...)                                                     \
  t[number] = {{#name, kQuantType<Type::name>.block_cols, kQuantType<Type::name>.block_bytes, \
                !kQuantType<Type::name>.takes_floats()},                                      \
               dequantize_block<Type::name>,                                                  \
               kQuantType<Type::name>.has_book() ? &kQuantType<Type::name>.book : nullptr};
  MOESERVE_QUANT_TYPES(MOESERVE_ENTRY)
#undef MOESERVE_ENTRY
  return t;
}
constexpr auto kTable = make_table();
#define MOESERVE_CHECK(name, number, ...) static_assert(kQuantType<Type::name>.book.entries <= 2048, #name);
MOESERVE_QUANT_TYPES(MOESERVE_CHECK)
#undef MOESERVE_CHECK
constexpr TypeInfo kUnsupported = {nullptr, 1, 0, false};

}  // namespace

const uint32_t* codebook_words[kMaxType] = {};
const BookLevels* codebook_levels[kMaxType] = {};

const TypeInfo& type_info(int type) {
  if (type < 0 || type >= kMaxType) return kUnsupported;
  const Entry& entry = kTable[type];
  return entry.book != nullptr && codebook_words[type] == nullptr ? kUnsupported : entry.info;
}

void set_codebook(int type, const int8_t* entries, int64_t count) {
  if (type < 0 || type >= kMaxType || kTable[type].book == nullptr) {
    throw std::invalid_argument("type: has no codebook");
  }
  const Codebook& k = *kTable[type].book;
  if (count != int64_t{k.entries} * k.columns) throw std::invalid_argument("entries: another number of them");
  static std::array<std::unique_ptr<uint32_t[]>, kMaxType> owned;
  static std::array<std::unique_ptr<BookLevels>, kMaxType> owned_levels;
  auto words = std::make_unique<uint32_t[]>(count / 4);
  for (int64_t i = 0; i < count; ++i) {
    const int number = k.has_delta() ? 8 * entries[i] + k.zero() : entries[i];
    if (number < 0 || number > (k.has_delta() ? k.zero() : 0) + k.most) {
      throw std::invalid_argument("entries: a number that no kernel multiplies");
    }
    words[i / 4] |= static_cast<uint32_t>(number) << 8 * (i % 4);
  }
  auto levels = book_levels(k, words.get());
  if (codebook_words[type] != nullptr) return;
  owned_levels[type] = std::move(levels);
  codebook_levels[type] = owned_levels[type].get();
  owned[type] = std::move(words);
  codebook_words[type] = owned[type].get();
}

void dequantize_row(int type, const uint8_t* row, int64_t cols, float* out) {
  const TypeInfo& info = type_info(type);
  for (int64_t c = 0; c < cols; c += info.block_cols, row += info.block_bytes) {
    kTable[type].dequantize(row, out + c);
  }
}

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | mantissa << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else if (mantissa == 0) {
    bits = sign;
  } else {  // subnormal half: normalise
    exponent = 113;
    while (!(mantissa & 1024)) {
      mantissa <<= 1;
      --exponent;
    }
    bits = sign | exponent << 23 | (mantissa & 1023) << 13;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

float half_e8m0(uint8_t e) {
  // 2^(e - 128) has exponent field e - 1; for e of 0 and 1 it is a subnormal.
  const uint32_t bits = e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

float e4m3_to_float(uint8_t e) {
  return 256.0f * half_to_float(static_cast<uint16_t>((e & 0x80) << 8 | (e & 0x7f) << 7));
}

float half_ue4m3(uint8_t e) {
  if (e == 127) return 0.0f;  // NaN, which ggml reads as 0
  const int exponent = e >> 3 & 15, mantissa = e & 7;
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -10)
                       : std::ldexp(static_cast<float>(8 + mantissa), exponent - 11);
}

float bfloat_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

}  // namespace moeserve
