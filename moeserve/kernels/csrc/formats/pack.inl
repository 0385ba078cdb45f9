// Packs GGUF rows into panels. All integer formats follow the same steps: unpack the codes of a block to one byte each;
// copy the scales row by row; transpose 16 rows x 64 columns of codes, as 32-bit words, into 16 vectors of [16 rows][4
// columns]; pack those into the panel's nibbles, pairs and bits.

// Codes of one block column, a byte each, before interleaving.
struct Codes {
  alignas(64) uint8_t at[kPanelRows][256];
};

// Reads one block's codes into `codes`, and its scales into the panel's header at the row's place.
template <Type T>
inline void read_block(const uint8_t* b, int row, uint8_t* header, uint8_t* codes) {
  constexpr QuantType q = kQuantType<T>;
  for (int i = 0; i < q.halves(); ++i)
    std::memcpy(header + 64 * i + 2 * row, b + q.halves_at + 2 * i, sizeof(uint16_t));
  uint8_t* octets = header + 64 * q.halves();
  for (int i = 0; i < q.octets; ++i) octets[i * kPanelRows + row] = b[q.octets_at + i];
  read_codes<T>(b, codes);
  if constexpr (q.low.bits == 8) {
    for (int i = 0; i < q.block_cols; ++i) codes[i] ^= 0x80;  // two's complement to excess-128
  }
}

// Packs the 8 code vectors of one half's group into the vectors described in panel_layout.h.
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

// Packs one block column. `rows` points to the block of the first row; the other rows' are `stride` bytes apart. Rows
// from `valid_rows` on do not exist: their scales stay zero, so they contribute nothing, whatever their codes.
template <Type T>
void pack_block(const uint8_t* rows, size_t stride, int valid_rows, uint8_t* block) {
  constexpr PanelLayout layout = kLayout<T>;
  constexpr int chunk = layout.cols < 64 ? 32 : 64;
  Codes codes;
  if (valid_rows < kPanelRows) {
    std::memset(&codes, 0, sizeof codes);
    std::memset(block, 0, layout.header_bytes);
  }
  for (int r = 0; r < valid_rows; ++r) read_block<T>(rows + r * stride, r, block, codes.at[r]);
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

// The same for a type with base-3 digits.
template <Type T>
void pack_trits(const uint8_t* rows, size_t stride, int valid_rows, uint8_t* block) {
  constexpr PanelLayout layout = kLayout<T>;
  constexpr int quads = layout.cols / 4;
  Codes codes;
  std::memset(&codes, 0, sizeof codes);
  std::memset(block, 0, layout.header_bytes);
  for (int r = 0; r < valid_rows; ++r) read_block<T>(rows + r * stride, r, block, codes.at[r]);
  uint8_t* out = block + layout.header_bytes;
  for (int half = 0; half < 2; ++half) {
    alignas(64) uint8_t turned[quads][64];
    for (int c = 0; c < layout.cols; c += 64) {
      VB w[16];
      transpose_words(&codes.at[16 * half][c], sizeof codes.at[0], w);
      for (int i = 0; i < 16; ++i) store_b(turned[c / 4 + i], w[i]);
    }
    for (int first = 0; first < quads; first += 5, out += 64) {
      for (int i = 0; i < 64; ++i) {
        int number = 0;
        for (int digit = 0; digit < 5; ++digit) {
          number = 3 * number + (first + digit < quads ? turned[first + digit][i] : 0);
        }
        out[i] = static_cast<uint8_t>((number * 256 + 242) / 243);
      }
    }
  }
}

// The same for a codebook type: bytes are moved, nothing is looked up.
template <Type T>
void pack_book(const uint8_t* rows, size_t stride, int valid_rows, uint8_t* block) {
  constexpr QuantType q = kQuantType<T>;
  constexpr Codebook k = q.book;
  constexpr PanelLayout layout = kLayout<T>;
  if (valid_rows < kPanelRows) std::memset(block, 0, layout.block_bytes);
  for (int r = 0; r < valid_rows; ++r) {
    const uint8_t* b = rows + r * stride;
    if constexpr (q.halves() > 0) std::memcpy(block + 2 * r, b + q.halves_at, 2);
    uint8_t* octets = block + 64 * q.halves();
    for (int i = 0; i < q.octets; ++i) octets[i * kPanelRows + r] = b[q.octets_at + i];
    uint8_t* half = block + layout.header_bytes + r / 16 * layout.half_bytes();
    for (int g = 0; g < layout.cols / 32; ++g, half += layout.group_bytes()) {
      uint8_t* out = half;
      for (int i = 0; i < k.low_bytes(); ++i, out += 16)
        out[r % 16] = b[k.low.at + g * k.low.group + i * k.low.step];
      for (int i = 0; i < k.word_bytes(); ++i)
        out[r % 16 * 4 + i] = b[k.word.at + g * k.word.group + i * k.word.step];
      out += 16 * k.word_bytes();
      for (int i = 0; i < k.high_bytes(); ++i, out += 16) out[r % 16] = b[k.high.at + g * k.high.group + i];
    }
  }
}

template <Type T>
void pack_column(const uint8_t* rows, size_t stride, int valid_rows, uint8_t* block) {
  if constexpr (kQuantType<T>.has_book()) {
    pack_book<T>(rows, stride, valid_rows, block);
  } else if constexpr (kQuantType<T>.trits.any()) {
    pack_trits<T>(rows, stride, valid_rows, block);
  } else {
    pack_block<T>(rows, stride, valid_rows, block);
  }
}

template <Type T>
void pack_integer(const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel) {
  constexpr PanelLayout layout = kLayout<T>;
  for (int64_t block = 0; block < cols / layout.cols; ++block) {
    pack_column<T>(rows + block * (layout.block_bytes / kPanelRows), stride, valid_rows,
                   panel + block * layout.block_bytes);
  }
}

template <class Element>
void pack_float(const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel) {
  constexpr int64_t kLine = 64 / sizeof(Element);  // columns per cache line: all rows' lines stay in L1
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
