// GGUF rows to panels. Every format goes the same way: unpack the codes of a block to one byte each, copy the
// scales row by row, then interleave the codes of 32 rows four columns (one 32-bit word) at a time.
#include <cstring>

#include "panel_layout.h"

namespace moeserve {
namespace {

// Codes of one block column, a byte each, before interleaving.
struct Codes {
  alignas(64) uint8_t at[kPanelRows][256];
  uint32_t quad(int row, int col) const {
    uint32_t v;
    std::memcpy(&v, &at[row][col], 4);
    return v;
  }
};

void unpack_k(const uint8_t* low, const uint8_t* high, uint8_t* out) {
  for (int pair = 0; pair < 4; ++pair) {
    for (int l = 0; l < 32; ++l) {
      const uint8_t byte = low[pair * 32 + l];
      uint8_t a = byte & 15, b = byte >> 4;
      if (high != nullptr) {
        a |= ((high[l] >> (2 * pair)) & 1) << 4;
        b |= ((high[l] >> (2 * pair + 1)) & 1) << 4;
      }
      out[pair * 64 + l] = a;
      out[pair * 64 + 32 + l] = b;
    }
  }
}

// Columns 32 at a time in bit pairs of the same 32 bytes, as Q2_K and Q3_K have them; `bits`: Q3_K's third bits.
void unpack_pairs(const uint8_t* pairs, const uint8_t* bits, uint8_t* out) {
  for (int group = 0; group < 8; ++group) {
    for (int l = 0; l < 32; ++l) {
      const int low = (pairs[group / 4 * 32 + l] >> (2 * (group % 4))) & 3;
      out[group * 32 + l] = bits == nullptr ? low : low | ((bits[l] >> group) & 1) << 2;
    }
  }
}

void unpack_q6_k(const uint8_t* b, uint8_t* out) {
  for (int part = 0; part < 2; ++part) {
    const uint8_t* low = b + part * 64;
    const uint8_t* high = b + 128 + part * 32;
    uint8_t* o = out + part * 128;
    for (int l = 0; l < 32; ++l) {
      o[l] = (low[l] & 15) | (high[l] & 3) << 4;
      o[l + 32] = (low[l + 32] & 15) | ((high[l] >> 2) & 3) << 4;
      o[l + 64] = (low[l] >> 4) | ((high[l] >> 4) & 3) << 4;
      o[l + 96] = (low[l + 32] >> 4) | (high[l] >> 6) << 4;
    }
  }
}

// Sixteen bytes of nibbles: the low ones are columns 0..15, the high ones 16..31.
void unpack_nibbles_32(const uint8_t* p, uint32_t high, uint8_t* out) {
  for (int l = 0; l < 16; ++l) {
    out[l] = (p[l] & 15) | ((high >> l) & 1) << 4;
    out[l + 16] = (p[l] >> 4) | ((high >> (l + 16)) & 1) << 4;
  }
}

// Reads the codes of one block into `codes`, its scales into the panel's header at the row's place.
void unpack_block(Type type, const uint8_t* b, int row, uint8_t* header, uint8_t* codes) {
  auto put_half = [&](int field, const uint8_t* p) { std::memcpy(header + field * 64 + row * 2, p, 2); };
  auto put_bytes = [&](int offset, const uint8_t* p, int n) {
    for (int i = 0; i < n; ++i) header[offset + i * kPanelRows + row] = p[i];
  };
  switch (type) {
    case Type::Q2_K:
      put_half(0, b + 80);
      put_half(1, b + 82);
      put_bytes(128, b, 16);
      return unpack_pairs(b + 16, nullptr, codes);
    case Type::Q3_K:
      put_half(0, b + 108);
      put_bytes(64, b + 96, 12);
      return unpack_pairs(b + 32, b, codes);
    case Type::MXFP4:
      put_bytes(0, b, 1);
      return unpack_nibbles_32(b + 1, 0, codes);
    case Type::Q4_K:
    case Type::Q5_K:
      put_half(0, b);
      put_half(1, b + 2);
      put_bytes(128, b + 4, 12);
      return type == Type::Q4_K ? unpack_k(b + 16, nullptr, codes) : unpack_k(b + 48, b + 16, codes);
    case Type::Q6_K:
      put_half(0, b + 208);
      put_bytes(64, b + 192, 16);
      return unpack_q6_k(b, codes);
    case Type::IQ4_XS:
      put_half(0, b);
      put_bytes(64, b + 2, 6);
      for (int g = 0; g < 8; ++g) unpack_nibbles_32(b + 8 + 16 * g, 0, codes + 32 * g);
      return;
    case Type::Q8_0:
      put_half(0, b);
      for (int i = 0; i < 32; ++i) codes[i] = b[2 + i] ^ 0x80;  // two's complement to excess-128
      return;
    default: {
      const bool has_min = type == Type::Q4_1 || type == Type::Q5_1;
      const uint8_t* p = b + 2;
      put_half(0, b);
      if (has_min) {
        put_half(1, p);
        p += 2;
      }
      uint32_t high = 0;
      if (type == Type::Q5_0 || type == Type::Q5_1) {
        std::memcpy(&high, p, 4);
        p += 4;
      }
      return unpack_nibbles_32(p, high, codes);
    }
  }
}

void store_words(uint8_t* out, const uint32_t (&words)[16]) {
  std::memcpy(out, words, 64);
}

// One group of 32 columns of one half: the vectors described in panel_layout.h.
void interleave(const PanelLayout& layout, const Codes& codes, int row0, int col0, uint8_t* out) {
  uint32_t words[16];
  for (int v = 0; v < layout.bit_vectors; ++v, out += 64) {
    for (int r = 0; r < 16; ++r) {
      uint32_t w = 0;
      for (int q = 0; q < 8; ++q) {
        w |= ((codes.quad(row0 + r, col0 + 4 * q) >> layout.bit_shift()) & 0x01010101u) << q;
      }
      words[r] = w;
    }
    store_words(out, words);
  }
  for (int v = 0; v < layout.pair_vectors; ++v, out += 64) {
    for (int r = 0; r < 16; ++r) {
      uint32_t w = 0;
      for (int i = 0; i < 4; ++i) {
        w |= ((codes.quad(row0 + r, col0 + 16 * v + 4 * i) >> layout.pair_shift()) & 0x03030303u) << (2 * i);
      }
      words[r] = w;
    }
    store_words(out, words);
  }
  for (int i = 0; i < layout.code_vectors; ++i, out += 64) {
    for (int r = 0; r < 16; ++r) {
      const uint32_t a = codes.quad(row0 + r, col0 + 4 * i);
      words[r] = layout.code_vectors == 8
                     ? a
                     : (a & 0x0f0f0f0fu) | (codes.quad(row0 + r, col0 + 16 + 4 * i) & 0x0f0f0f0fu) << 4;
    }
    store_words(out, words);
  }
}

template <Type T>
void pack_integer(const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel) {
  constexpr PanelLayout layout = kLayout<T>;
  Codes codes;
  std::memset(&codes, 0, sizeof codes);
  const int source_block = layout.block_bytes / kPanelRows;
  for (int64_t block = 0; block < cols / layout.cols; ++block, panel += layout.block_bytes) {
    // A row that does not exist keeps zero scales, so whatever its codes, it adds nothing.
    std::memset(panel, 0, layout.header_bytes);
    for (int r = 0; r < valid_rows; ++r) {
      unpack_block(T, rows + r * stride + block * source_block, r, panel, codes.at[r]);
    }
    uint8_t* out = panel + layout.header_bytes;
    for (int g = 0; g < layout.cols / 32; ++g) {
      for (int half = 0; half < 2; ++half, out += layout.half_bytes()) {
        interleave(layout, codes, 16 * half, 32 * g, out);
      }
    }
  }
}

template <class Element>
void pack_float(const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel) {
  auto* out = reinterpret_cast<Element*>(panel);
  std::memset(panel, 0, sizeof(Element) * cols * kPanelRows);
  for (int r = 0; r < valid_rows; ++r) {
    const uint8_t* row = rows + r * stride;
    for (int64_t c = 0; c < cols; ++c)
      std::memcpy(&out[c * kPanelRows + r], row + c * sizeof(Element), sizeof(Element));
  }
}

}  // namespace

void pack_panel(int type, const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel) {
  switch (static_cast<Type>(type)) {
    case Type::F32:
      return pack_float<uint32_t>(rows, stride, valid_rows, cols, panel);
    case Type::F16:
    case Type::BF16:
      return pack_float<uint16_t>(rows, stride, valid_rows, cols, panel);
    case Type::Q4_0:
      return pack_integer<Type::Q4_0>(rows, stride, valid_rows, cols, panel);
    case Type::Q4_1:
      return pack_integer<Type::Q4_1>(rows, stride, valid_rows, cols, panel);
    case Type::Q5_0:
      return pack_integer<Type::Q5_0>(rows, stride, valid_rows, cols, panel);
    case Type::Q5_1:
      return pack_integer<Type::Q5_1>(rows, stride, valid_rows, cols, panel);
    case Type::Q8_0:
      return pack_integer<Type::Q8_0>(rows, stride, valid_rows, cols, panel);
    case Type::Q2_K:
      return pack_integer<Type::Q2_K>(rows, stride, valid_rows, cols, panel);
    case Type::Q3_K:
      return pack_integer<Type::Q3_K>(rows, stride, valid_rows, cols, panel);
    case Type::MXFP4:
      return pack_integer<Type::MXFP4>(rows, stride, valid_rows, cols, panel);
    case Type::Q4_K:
      return pack_integer<Type::Q4_K>(rows, stride, valid_rows, cols, panel);
    case Type::Q5_K:
      return pack_integer<Type::Q5_K>(rows, stride, valid_rows, cols, panel);
    case Type::Q6_K:
      return pack_integer<Type::Q6_K>(rows, stride, valid_rows, cols, panel);
    case Type::IQ4_NL:
      return pack_integer<Type::IQ4_NL>(rows, stride, valid_rows, cols, panel);
    case Type::IQ4_XS:
      return pack_integer<Type::IQ4_XS>(rows, stride, valid_rows, cols, panel);
  }
}

}  // namespace moeserve
