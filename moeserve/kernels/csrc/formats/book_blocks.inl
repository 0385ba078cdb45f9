// Reads a GGUF block of a codebook type one entry at a time: the specification of what the kernels do sixteen rows at a
// time. Plain C++, included within an anonymous namespace by formats.cpp.

inline uint8_t run_byte(const uint8_t* b, const ByteRun& run, int g, int i) {
  return b[run.at + g * run.group + i * run.step];
}

inline uint32_t book_word(const uint8_t* b, const Codebook& k, int g) {
  uint32_t word = 0;
  for (int e = 0; e < 4; ++e) word |= static_cast<uint32_t>(run_byte(b, k.word, g, e)) << 8 * e;
  return word;
}

// Returns entry i of group g: an index into the codebook.
inline int book_index(const uint8_t* b, const Codebook& k, int g, int i) {
  int high = 0;
  if (k.signs == Signs::High7) {
    high = run_byte(b, k.word, g, i) & 1;
  } else if (k.signs == Signs::DeltaEntry) {
    high = run_byte(b, k.high, g, i / 2) >> 4 * (i % 2) & 7;
  } else if (k.high_bytes() == 1) {
    high = run_byte(b, k.high, g, 0) >> k.high_bits * i & ((1 << k.high_bits) - 1);
  } else if (k.high_bytes() == 2) {
    high = (run_byte(b, k.high, g, 0) | run_byte(b, k.high, g, 1) << 8) >> 3 * i & 7;
  }
  return run_byte(b, k.low, g, i) | high << 8;
}

// Returns the signs of columns 8 e .. 8 e + 7 of group g, a bit each.
inline int book_signs(const uint8_t* b, const Codebook& k, int g, int e) {
  if (k.signs == Signs::Bytes) return run_byte(b, k.word, g, e);
  const int seven =
      k.signs == Signs::Packed7 ? book_word(b, k, g) >> 7 * e & 127 : run_byte(b, k.word, g, e) >> 1;
  return seven | (__builtin_popcount(seven) & 1) << 7;
}

// Returns whether an eighth is subtracted from entry i of group g.
inline bool book_delta_is_negative(const uint8_t* b, const Codebook& k, int g, int i) {
  if (k.signs == Signs::DeltaGroup) return run_byte(b, k.high, g, 1) & 128;
  return run_byte(b, k.high, g, i / 2) >> 4 * (i % 2) & 8;
}

inline uint16_t threes_word(const uint8_t* octets, int i) {
  return static_cast<uint16_t>(octets[2 * i] | octets[2 * i + 1] << 8);
}

// Returns scale j as the integer n.
inline int book_scale(const uint8_t* b, const QuantType& q, int j) {
  const uint8_t* octets = b + q.octets_at;
  switch (q.book.scales) {
    case BookScales::WordTop:
      return static_cast<int>(book_word(b, q.book, j) >> 28);
    case BookScales::HighTop3:
      return run_byte(b, q.book.high, j, 1) >> 4 & 7;
    case BookScales::Threes:
      return threes_word(octets, j / 4) >> 3 * (j % 4) & 7;
    default:
      return octets[j / 2] >> 4 * (j % 2) & 15;
  }
}

inline uint16_t book_d(const uint8_t* b, const QuantType& q) {
  uint16_t half = 0;
  if (q.book.scales != BookScales::Threes) {
    std::memcpy(&half, b + q.halves_at, 2);
  } else {
    for (int i = 0; i < 4; ++i)
      half = static_cast<uint16_t>(half | threes_word(b + q.octets_at, i) >> 12 << 4 * i);
  }
  return half;
}

// Returns the value of column `col` of group g in the codebook's units: a signed magnitude, or 8 times an entry's value
// plus or minus 1.
inline int book_number(const uint8_t* b, const Codebook& k, const uint32_t* words, int g, int col) {
  const int i = col / k.columns, byte = col % k.columns;
  const int entry = book_index(b, k, g, i) * (k.columns / 4) + byte / 4;
  const int stored = words[entry] >> 8 * (byte % 4) & 255;
  if (k.has_delta()) return stored - k.zero() + (book_delta_is_negative(b, k, g, i) ? -1 : 1);
  return book_signs(b, k, g, col / 8) >> (col % 8) & 1 ? -stored : stored;
}
