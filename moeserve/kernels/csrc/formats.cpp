#include "formats.h"

#include <array>
#include <cstring>

namespace moeserve {

const int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t kMxfp4Levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

namespace {

constexpr std::array<TypeInfo, kMaxType> make_table() {
  std::array<TypeInfo, kMaxType> t{};
  auto set = [&t](Type type, TypeInfo info) { t[static_cast<int>(type)] = info; };
  set(Type::F32, {"F32", 1, 4, false});
  set(Type::F16, {"F16", 1, 2, false});
  set(Type::BF16, {"BF16", 1, 2, false});
  set(Type::Q4_0, {"Q4_0", 32, 18, true});
  set(Type::Q4_1, {"Q4_1", 32, 20, true});
  set(Type::Q5_0, {"Q5_0", 32, 22, true});
  set(Type::Q5_1, {"Q5_1", 32, 24, true});
  set(Type::Q8_0, {"Q8_0", 32, 34, true});
  set(Type::Q2_K, {"Q2_K", 256, 84, true});
  set(Type::Q3_K, {"Q3_K", 256, 110, true});
  set(Type::MXFP4, {"MXFP4", 32, 17, true});
  set(Type::Q4_K, {"Q4_K", 256, 144, true});
  set(Type::Q5_K, {"Q5_K", 256, 176, true});
  set(Type::Q6_K, {"Q6_K", 256, 210, true});
  set(Type::IQ4_NL, {"IQ4_NL", 32, 18, true});
  set(Type::IQ4_XS, {"IQ4_XS", 256, 136, true});
  return t;
}
constexpr auto kTable = make_table();
constexpr TypeInfo kUnsupported = {nullptr, 1, 0, false};

float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

// Sub-block j's 6-bit scale and min from the 12 packed bytes of a Q4_K or Q5_K block.
void scale_min(const uint8_t* s, int j, int& scale, int& min) {
  if (j < 4) {
    scale = s[j] & 63;
    min = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    min = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

void dequantize_k(const uint8_t* b, bool five_bits, float* out) {
  const float d = half_at(b), dmin = half_at(b + 2);
  const uint8_t* high = b + 16;
  const uint8_t* low = five_bits ? b + 48 : b + 16;
  for (int col = 0; col < 256; ++col) {
    const int group = col / 32, l = col % 32;
    int scale, min;
    scale_min(b + 4, group, scale, min);
    const uint8_t byte = low[group / 2 * 32 + l];
    int q = group % 2 ? byte >> 4 : byte & 15;
    if (five_bits) q |= ((high[l] >> group) & 1) << 4;
    out[col] = d * scale * q - dmin * min;
  }
}

void dequantize_q2_k(const uint8_t* b, float* out) {
  const float d = half_at(b + 80), dmin = half_at(b + 82);
  for (int col = 0; col < 256; ++col) {
    const uint8_t scale = b[col / 16];
    const int q = (b[16 + col / 128 * 32 + col % 32] >> (col % 128 / 32 * 2)) & 3;
    out[col] = d * (scale & 15) * q - dmin * (scale >> 4);
  }
}

// Q3_K's 16 six-bit scales: low nibbles in bytes 0..7, the top bit pairs in bytes 8..11.
int q3_scale(const uint8_t* s, int j) {
  const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
  return (low | ((s[8 + j % 4] >> (2 * (j / 4))) & 3) << 4) - 32;
}

void dequantize_q3_k(const uint8_t* b, float* out) {
  const float d = half_at(b + 108);
  for (int col = 0; col < 256; ++col) {
    const int low = (b[32 + col / 128 * 32 + col % 32] >> (col % 128 / 32 * 2)) & 3;
    const int high = (b[col % 32] >> (col / 32)) & 1;
    out[col] = d * q3_scale(b + 96, col / 16) * (low + 4 * high - 4);
  }
}

void dequantize_mxfp4(const uint8_t* b, float* out) {
  const float d = half_e8m0(b[0]);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * kMxfp4Levels[b[1 + i] & 15];
    out[i + 16] = d * kMxfp4Levels[b[1 + i] >> 4];
  }
}

void dequantize_q6_k(const uint8_t* b, float* out) {
  const float d = half_at(b + 208);
  const auto* scales = reinterpret_cast<const int8_t*>(b + 192);
  for (int col = 0; col < 256; ++col) {
    const int part = col / 128, within = col % 128, l = within % 32, quarter = within / 32;
    const uint8_t low = b[part * 64 + (quarter % 2) * 32 + l];
    const int q =
        (quarter < 2 ? low & 15 : low >> 4) | (((b[128 + part * 32 + l] >> (2 * quarter)) & 3) << 4);
    out[col] = d * scales[col / 16] * (q - 32);
  }
}

void dequantize_iq4_xs(const uint8_t* b, float* out) {
  const float d = half_at(b);
  const int high = b[2] | b[3] << 8;
  for (int col = 0; col < 256; ++col) {
    const int group = col / 32, l = col % 32;
    const int scale =
        (((b[4 + group / 2] >> (4 * (group % 2))) & 15) | (((high >> (2 * group)) & 3) << 4)) - 32;
    const uint8_t byte = b[8 + group * 16 + l % 16];
    out[col] = d * scale * kIq4Levels[l < 16 ? byte & 15 : byte >> 4];
  }
}

// The 32-column formats: scale, perhaps a min, perhaps fifth bits, nibbles.
void dequantize_32(Type type, const uint8_t* b, float* out) {
  const float d = half_at(b);
  const bool has_min = type == Type::Q4_1 || type == Type::Q5_1;
  const bool five_bits = type == Type::Q5_0 || type == Type::Q5_1;
  const float m = has_min ? half_at(b + 2) : 0.0f;
  const uint8_t* p = b + (has_min ? 4 : 2);
  uint32_t high = 0;
  if (five_bits) {
    std::memcpy(&high, p, 4);
    p += 4;
  }
  for (int col = 0; col < 32; ++col) {
    int q = col < 16 ? p[col] & 15 : p[col - 16] >> 4;
    q |= ((high >> col) & 1) << 4;
    if (type == Type::IQ4_NL) {
      out[col] = d * kIq4Levels[q];
    } else if (has_min) {
      out[col] = d * q + m;
    } else {
      out[col] = d * (q - (five_bits ? 16 : 8));
    }
  }
}

void dequantize_block(Type type, const uint8_t* b, float* out) {
  switch (type) {
    case Type::F32:
      std::memcpy(out, b, 4);
      return;
    case Type::F16:
      *out = half_at(b);
      return;
    case Type::BF16: {
      uint16_t h;
      std::memcpy(&h, b, 2);
      *out = bfloat_to_float(h);
      return;
    }
    case Type::Q8_0: {
      const float d = half_at(b);
      for (int i = 0; i < 32; ++i) out[i] = d * reinterpret_cast<const int8_t*>(b)[2 + i];
      return;
    }
    case Type::Q2_K:
      return dequantize_q2_k(b, out);
    case Type::Q3_K:
      return dequantize_q3_k(b, out);
    case Type::MXFP4:
      return dequantize_mxfp4(b, out);
    case Type::Q4_K:
      return dequantize_k(b, false, out);
    case Type::Q5_K:
      return dequantize_k(b, true, out);
    case Type::Q6_K:
      return dequantize_q6_k(b, out);
    case Type::IQ4_XS:
      return dequantize_iq4_xs(b, out);
    default:
      return dequantize_32(type, b, out);
  }
}

}  // namespace

const TypeInfo& type_info(int type) { return type >= 0 && type < kMaxType ? kTable[type] : kUnsupported; }

void dequantize_row(int type, const uint8_t* row, int64_t cols, float* out) {
  const TypeInfo& info = type_info(type);
  for (int64_t c = 0; c < cols; c += info.block_cols, row += info.block_bytes) {
    dequantize_block(static_cast<Type>(type), row, out + c);
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

float bfloat_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

}  // namespace moeserve
