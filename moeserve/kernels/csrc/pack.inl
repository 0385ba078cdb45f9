// GGUF rows to panels. Every integer format goes the same way: unpack the codes of a block to one byte each, copy
// the scales row by row, then turn 16 rows x 64 columns of codes into 16 vectors of [16 rows][4 columns] (a transpose
// of 32-bit words) and squeeze those into the panel's nibbles, pairs and bits.

// Codes of one block column, a byte each, before interleaving.
struct Codes {
  alignas(64) uint8_t at[kPanelRows][256];
};

inline void read_k(const uint8_t* low, const uint8_t* high, uint8_t* out) {
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
inline void read_pairs(const uint8_t* pairs, const uint8_t* bits, uint8_t* out) {
  for (int group = 0; group < 8; ++group) {
    for (int l = 0; l < 32; ++l) {
      const int low = (pairs[group / 4 * 32 + l] >> (2 * (group % 4))) & 3;
      out[group * 32 + l] = bits == nullptr ? low : low | ((bits[l] >> group) & 1) << 2;
    }
  }
}

inline void read_q6_k(const uint8_t* b, uint8_t* out) {
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
inline void read_nibbles_32(const uint8_t* p, uint32_t high, uint8_t* out) {
  for (int l = 0; l < 16; ++l) {
    out[l] = (p[l] & 15) | ((high >> l) & 1) << 4;
    out[l + 16] = (p[l] >> 4) | ((high >> (l + 16)) & 1) << 4;
  }
}

// Reads the codes of one block into `codes`, its scales into the panel's header at the row's place.
inline void read_block(Type type, const uint8_t* b, int row, uint8_t* header, uint8_t* codes) {
  auto put_half = [&](int field, const uint8_t* p) { std::memcpy(header + field * 64 + row * 2, p, 2); };
  auto put_bytes = [&](int offset, const uint8_t* p, int n) {
    for (int i = 0; i < n; ++i) header[offset + i * kPanelRows + row] = p[i];
  };
  switch (type) {
    case Type::Q2_K:
      put_half(0, b + 80);
      put_half(1, b + 82);
      put_bytes(128, b, 16);
      return read_pairs(b + 16, nullptr, codes);
    case Type::Q3_K:
      put_half(0, b + 108);
      put_bytes(64, b + 96, 12);
      return read_pairs(b + 32, b, codes);
    case Type::MXFP4:
      put_bytes(0, b, 1);
      return read_nibbles_32(b + 1, 0, codes);
    case Type::Q4_K:
    case Type::Q5_K:
      put_half(0, b);
      put_half(1, b + 2);
      put_bytes(128, b + 4, 12);
      return type == Type::Q4_K ? read_k(b + 16, nullptr, codes) : read_k(b + 48, b + 16, codes);
    case Type::Q6_K:
      put_half(0, b + 208);
      put_bytes(64, b + 192, 16);
      return read_q6_k(b, codes);
    case Type::IQ4_XS:
      put_half(0, b);
      put_bytes(64, b + 2, 6);
      for (int g = 0; g < 8; ++g) read_nibbles_32(b + 8 + 16 * g, 0, codes + 32 * g);
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
      return read_nibbles_32(p, high, codes);
    }
  }
}

// Squeezes the 8 code vectors of a group of one half into the vectors described in panel_layout.h.
template <Type T>
inline void squeeze(const VB* w, uint8_t* out) {
  constexpr PanelLayout layout = kLayout<T>;
  if constexpr (layout.bit_vectors > 0) {
    VB bits = and_b(shr_b<layout.bit_shift()>(w[0]), 1);
    bits = or_b(bits, shl_b<1>(and_b(shr_b<layout.bit_shift()>(w[1]), 1)));
    bits = or_b(bits, shl_b<2>(and_b(shr_b<layout.bit_shift()>(w[2]), 1)));
    bits = or_b(bits, shl_b<3>(and_b(shr_b<layout.bit_shift()>(w[3]), 1)));
    bits = or_b(bits, shl_b<4>(and_b(shr_b<layout.bit_shift()>(w[4]), 1)));
    bits = or_b(bits, shl_b<5>(and_b(shr_b<layout.bit_shift()>(w[5]), 1)));
    bits = or_b(bits, shl_b<6>(and_b(shr_b<layout.bit_shift()>(w[6]), 1)));
    bits = or_b(bits, shl_b<7>(and_b(shr_b<layout.bit_shift()>(w[7]), 1)));
    store_b(out, bits);
    out += 64;
  }
  for (int v = 0; v < layout.pair_vectors; ++v, out += 64) {
    constexpr int shift = layout.pair_shift();
    VB pairs = and_b(shr_b<shift>(w[4 * v]), 3);
    pairs = or_b(pairs, shl_b<2>(and_b(shr_b<shift>(w[4 * v + 1]), 3)));
    pairs = or_b(pairs, shl_b<4>(and_b(shr_b<shift>(w[4 * v + 2]), 3)));
    pairs = or_b(pairs, shl_b<6>(and_b(shr_b<shift>(w[4 * v + 3]), 3)));
    store_b(out, pairs);
  }
  for (int i = 0; i < layout.code_vectors; ++i, out += 64) {
    store_b(out, layout.code_vectors == 8 ? w[i] : or_b(and_b(w[i], 15), shl_b<4>(and_b(w[i + 4], 15))));
  }
}

// One block column: `rows` points at the block of the first row, the next rows' are `stride` bytes apart. A row from
// `valid_rows` on does not exist: it keeps zero scales, so whatever its codes, it adds nothing.
template <Type T>
void pack_block(const uint8_t* rows, size_t stride, int valid_rows, uint8_t* block) {
  constexpr PanelLayout layout = kLayout<T>;
  constexpr int chunk = layout.cols < 64 ? 32 : 64;
  Codes codes;
  if (valid_rows < kPanelRows) {
    std::memset(&codes, 0, sizeof codes);
    std::memset(block, 0, layout.header_bytes);
  }
  for (int r = 0; r < valid_rows; ++r) read_block(T, rows + r * stride, r, block, codes.at[r]);
  for (int half = 0; half < 2; ++half) {
    for (int c = 0; c < layout.cols; c += chunk) {
      VB w[16];  // 32-column formats use the first 8 of them
      transpose_words(&codes.at[16 * half][c], sizeof codes.at[0], w);
      for (int g = 0; g < chunk / 32; ++g) {
        squeeze<T>(w + 8 * g, block + layout.header_bytes + (c / 32 + g) * layout.group_bytes() +
                                  half * layout.half_bytes());
      }
    }
  }
}

template <Type T>
void pack_integer(const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel) {
  constexpr PanelLayout layout = kLayout<T>;
  for (int64_t block = 0; block < cols / layout.cols; ++block) {
    pack_block<T>(rows + block * (layout.block_bytes / kPanelRows), stride, valid_rows,
                  panel + block * layout.block_bytes);
  }
}

template <class Element>
void pack_float(const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel) {
  constexpr int64_t kLine = 64 / sizeof(Element);  // columns of a cache line: all rows' lines stay in L1
  auto* out = reinterpret_cast<Element*>(panel);
  if (valid_rows < kPanelRows) std::memset(panel, 0, sizeof(Element) * cols * kPanelRows);
  for (int64_t c0 = 0; c0 < cols; c0 += kLine) {
    for (int r = 0; r < valid_rows; ++r) {
      const uint8_t* row = rows + r * stride;
      for (int64_t c = c0; c < std::min(c0 + kLine, cols); ++c) {
        std::memcpy(&out[c * kPanelRows + r], row + c * sizeof(Element), sizeof(Element));
      }
    }
  }
}
