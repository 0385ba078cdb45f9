// Codebook types: unpacks a quad for sixteen rows at a time. book_blocks.inl specifies the same, one entry at a time.
// An entry of 4 columns, or half an entry of 8, is one row's share of a quad.

// Where a half's group keeps its codebook data.
template <Type T>
struct BookParts {
  const uint8_t *low, *word, *high;
  explicit BookParts(const uint8_t* p)
      : low(p),
        word(p + 16 * kQuantType<T>.book.low_bytes()),
        high(word + 16 * kQuantType<T>.book.word_bytes()) {}
};

template <Type T, int Entry>
inline VI book_indices(const BookParts<T>& parts) {
  constexpr Codebook k = kQuantType<T>.book;
  VI high;
  if constexpr (k.signs == Signs::High7) {
    high = and_i(shr_i<8 * Entry>(load_i(parts.word)), 1);
  } else if constexpr (k.signs == Signs::DeltaEntry) {
    high = and_i(shr_i<4 * (Entry % 2)>(load_u8(parts.high + 16 * (Entry / 2))), 7);
  } else if constexpr (k.high_bytes() == 1) {
    high = and_i(shr_i<k.high_bits * Entry>(load_u8(parts.high)), (1 << k.high_bits) - 1);
  } else if constexpr (k.high_bytes() == 2) {
    high = and_i(shr_i<3 * Entry>(or_i(load_u8(parts.high), shl_i<8>(load_u8(parts.high + 16)))), 7);
  } else {
    return load_u8(parts.low + 16 * Entry);
  }
  return or_i(load_u8(parts.low + 16 * Entry), shl_i<8>(high));
}

// Returns the signs of 32 columns, a bit each.
template <Type T>
inline VI book_sign_words(const BookParts<T>& parts) {
  constexpr Signs signs = kQuantType<T>.book.signs;
  const VI word = load_i(parts.word);
  if constexpr (signs == Signs::Bytes) return word;
  VI sevens;
  if constexpr (signs == Signs::High7) {
    sevens = and_i(shr_i<1>(word), 0x7f7f7f7f);
  } else {
    sevens = or_i(or_i(and_i(word, 0x7f), and_i(shl_i<1>(word), 0x7f00)),
                  or_i(and_i(shl_i<2>(word), 0x7f0000), and_i(shl_i<3>(word), 0x7f000000)));
  }
  VI odd = xor_i(sevens, and_i(shr_i<4>(sevens), 0x0f0f0f0f));
  odd = xor_i(odd, and_i(shr_i<2>(odd), 0x03030303));
  odd = xor_i(odd, and_i(shr_i<1>(odd), 0x01010101));
  return or_i(sevens, shl_i<7>(and_i(odd, 0x01010101)));
}

// Returns 1 in each byte of a row or, if an eighth is subtracted, -1.
template <Type T, int Entry>
inline VB book_deltas(const BookParts<T>& parts) {
  VI bit;
  if constexpr (kQuantType<T>.book.signs == Signs::DeltaGroup) {
    bit = shr_i<7>(load_u8(parts.high + 16));
  } else {
    bit = and_i(shr_i<4 * (Entry % 2) + 3>(load_u8(parts.high + 16 * (Entry / 2))), 1);
  }
  return as_bytes(or_i(sub_i(set_i(0), bit), set_i(0x01010101)));
}

// Reads the unsigned values of quads 2 * Pair and 2 * Pair + 1, one entry of 8 columns or two of 4, by gathers.
template <Type T>
class GatheredEntries {
 public:
  explicit GatheredEntries(const BookParts<T>& parts) : parts_(parts) {}

  template <int Pair>
  void numbers(VB& even, VB& odd) const {
    const uint32_t* words = codebook_words[static_cast<int>(T)];
    if constexpr (kQuantType<T>.book.columns == 8 && kGathersPairs) {
      const BookLevels& book = *codebook_levels[static_cast<int>(T)];
      const VB levels = gather(book.pairs, book_indices<T, Pair>(parts_));
      even = lookup(book.numbers, levels);  // which takes a byte's lowest four bits, if its highest is 0
      odd = lookup(book.numbers, shr_b<4>(levels));
    } else if constexpr (kQuantType<T>.book.columns == 8) {
      gather_pairs(words, book_indices<T, Pair>(parts_), even, odd);
    } else {
      even = gather(words, book_indices<T, 2 * Pair>(parts_));
      odd = gather(words, book_indices<T, 2 * Pair + 1>(parts_));
    }
  }

 private:
  const BookParts<T>& parts_;
};

// Unpacks a half's group at once. It reads the data that all quads share before calling `put`, which may store bytes,
// so that compilers need not reload it. Entries: how entries are read, as GatheredEntries.
template <Type T, template <Type> class Entries, class Put>
inline void unpack_book(const uint8_t* p, const Put& put) {
  constexpr Codebook k = kQuantType<T>.book;
  const BookParts<T> parts(p);
  const Entries<T> entries(parts);
  VI signs = set_i(0);
  if constexpr (!k.has_delta()) signs = book_sign_words<T>(parts);
  for_quads<0, 4>([&](auto pair) {
    constexpr int i = decltype(pair)::value;
    VB even, odd;
    entries.template numbers<i>(even, odd);
    if constexpr (k.has_delta()) {
      const VB deltas = book_deltas<T, i>(parts);
      put(Quad<2 * i>{}, add_b(even, deltas));
      put(Quad<2 * i + 1>{}, add_b(odd, deltas));
    } else {
      put(Quad<2 * i>{}, with_signs<i, 0>(even, signs, k.zero()));
      put(Quad<2 * i + 1>{}, with_signs<i, 1>(odd, signs, k.zero()));
    }
  });
}

// Returns d, for the type that keeps it in the highest nibbles of its four scale words.
template <Type T>
inline VF threes_d(const uint8_t* block, int half) {
  VI bits = set_i(0);
  for (int i = 3; i >= 0; --i) bits = or_i(shl_i<4>(bits), shr_i<4>(scale_bytes<T>(block, 2 * i + 1, half)));
  return half_bits(bits);
}

template <Type T>
inline Scales book_scales(const uint8_t* block, int g, int half) {
  constexpr QuantType q = kQuantType<T>;
  constexpr PanelLayout layout = kLayout<T>;
  const BookParts<T> parts(block + layout.header_bytes + g * layout.group_bytes() +
                           half * layout.half_bytes());
  const VF d = q.book.scales == BookScales::Threes ? threes_d<T>(block, half) : half_field(block, 0, half);
  auto scale = [&](VI n) {
    const VI odd = or_i(shl_i<1>(n), set_i(1));
    return mul(mul(d, to_float(odd)), set_f(q.book.eighths / 8.0f));
  };
  if constexpr (q.book.scales == BookScales::WordTop) {
    return {scale(and_i(shr_i<28>(load_i(parts.word)), 15)), zero_f(), zero_f(), zero_f()};
  } else if constexpr (q.book.scales == BookScales::HighTop3) {
    return {scale(and_i(shr_i<4>(load_u8(parts.high + 16)), 7)), zero_f(), zero_f(), zero_f()};
  } else if constexpr (q.book.scales == BookScales::Nibbles32) {
    const VI pair = scale_bytes<T>(block, g / 2, half);
    return {scale(g % 2 ? shr_i<4>(pair) : and_i(pair, 15)), zero_f(), zero_f(), zero_f()};
  } else if constexpr (q.book.scales == BookScales::Nibbles16) {
    const VI pair = scale_bytes<T>(block, g, half);
    return {scale(and_i(pair, 15)), scale(shr_i<4>(pair)), zero_f(), zero_f()};
  } else {
    const int first = g / 2 * 2;
    const VI word =
        or_i(scale_bytes<T>(block, first, half), shl_i<8>(scale_bytes<T>(block, first + 1, half)));
    const VI two = g % 2 ? shr_i<6>(word) : word;
    return {scale(and_i(two, 7)), scale(and_i(shr_i<3>(two), 7)), zero_f(), zero_f()};
  }
}
