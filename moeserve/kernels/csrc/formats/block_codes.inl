// Unpacks a GGUF block's codes, one byte each: the offset is not subtracted, tables are not looked up. Plain C++,
// included within an anonymous namespace: by formats.cpp and, compiled per ISA, by kernels.inl.

// Writes the field's bits of every column (Shift 0), or adds them above the bits already there.
template <BitField F, int Cols, int Shift>
inline void read_field(const uint8_t* __restrict b, uint8_t* __restrict codes) {
  constexpr int fields = 8 / F.bits, mask = (1 << F.bits) - 1;
  if constexpr (F.width == 1 && F.bits == 1 &&
                Cols == 32) {  // as 32-bit words, so that compilers vectorise it
    uint32_t word;
    std::memcpy(&word, b + F.at, 4);
    for (int l = 0; l < 32; ++l) codes[l] |= ((word >> l) & 1) << Shift;
  } else {
    for (int run = 0; run < Cols / (F.width * fields); ++run) {
      for (int f = 0; f < fields; ++f) {
        const uint8_t* in = b + F.at + run * F.width;
        uint8_t* out = codes + (run * fields + f) * F.width;
        for (int l = 0; l < F.width; ++l) {
          const int bits = ((in[l] >> (F.bits * f)) & mask) << Shift;
          out[l] = static_cast<uint8_t>(Shift == 0 ? bits : out[l] | bits);
        }
      }
    }
  }
}

inline void read_trits(const uint8_t* b, const Trits& trits, uint8_t* codes) {
  constexpr int powers[] = {1, 3, 9, 27, 81};
  for (const TritRun& run : trits.runs) {
    for (int digit = 0; digit < run.digits; ++digit, codes += run.width) {
      for (int l = 0; l < run.width; ++l) {
        codes[l] = static_cast<uint8_t>((b[run.at + l] * powers[digit] & 255) * 3 >> 8);
      }
    }
  }
}

template <Type T>
inline void read_codes(const uint8_t* b, uint8_t* codes) {
  constexpr QuantType q = kQuantType<T>;
  if constexpr (q.trits.any()) {
    read_trits(b, q.trits, codes);
  } else {
    read_field<q.low, q.block_cols, 0>(b, codes);
  }
  if constexpr (q.high.bits > 0) read_field<q.high, q.block_cols, q.low.bits>(b, codes);
}
