// Loads entries of codebooks one by one, because gathers take longer (docs/results/cpu-kernels.md). With AVX-VNNI entries of
// four columns are gathered: Intel's CPUs that have it combine the lanes of a register more slowly than they gather.

// One entry's indices for eight rows, in registers. Loading the indices one by one would occupy the load units as long
// as loading the entries does.
template <Type T>
struct EightIndices {
  static constexpr bool kAreBytes = kQuantType<T>.book.entries == 256;  // as they are in the panel
  uint64_t first, second;  // the second half of indices of 16 bits

  explicit EightIndices(const void* p) {
    std::memcpy(&first, p, 8);
    if constexpr (!kAreBytes) std::memcpy(&second, static_cast<const uint8_t*>(p) + 8, 8);
    // Without this, GCC loads the indices again one by one.
    asm("" : "+r"(first));
    if constexpr (!kAreBytes) asm("" : "+r"(second));
  }
  size_t operator[](int row) const {
    if constexpr (kAreBytes) return first >> 8 * row & 0xff;
    return (row < 4 ? first : second) >> 16 * (row % 4) & 0xffff;
  }
};

inline __m256i widen_16(const uint8_t* p) { return _mm256_cvtepu8_epi16(load_128(p)); }

// The indices of a half's group.
template <Type T>
class BookIndices {
 public:
  explicit BookIndices(const BookParts<T>& parts) : bytes_(parts.low) {
    if constexpr (!EightIndices<T>::kAreBytes) {
      __m256i high = _mm256_setzero_si256();
      if constexpr (k.high_bytes() > 0) high = widen_16(parts.high);
      if constexpr (k.high_bytes() == 2) {
        high = _mm256_or_si256(high, _mm256_slli_epi16(widen_16(parts.high + 16), 8));
      }
      for_quads<0, kEntries>([&](auto entry) {
        constexpr int e = decltype(entry)::value;
        const __m256i index = _mm256_or_si256(above<e>(parts, high), widen_16(parts.low + 16 * e));
        _mm256_store_si256(reinterpret_cast<__m256i*>(words_[e]), index);
      });
    }
  }

  // The indices of rows 8 * octet to 8 * octet + 7, for loads and for gathers.
  EightIndices<T> eight(int entry, int octet) const { return EightIndices<T>(at(entry, octet)); }
  __m256i vector(int entry, int octet) const {
    if constexpr (EightIndices<T>::kAreBytes) {
      return _mm256_cvtepu8_epi32(load_64(at(entry, octet)));
    } else {
      return _mm256_cvtepu16_epi32(load_128(at(entry, octet)));
    }
  }

 private:
  const void* at(int entry, int octet) const {
    if constexpr (EightIndices<T>::kAreBytes) {
      return bytes_ + 16 * entry + 8 * octet;
    } else {
      return words_[entry] + 8 * octet;
    }
  }

  static constexpr Codebook k = kQuantType<T>.book;
  static constexpr int kEntries = 32 / k.columns;
  const uint8_t* bytes_;
  alignas(32) uint16_t words_[EightIndices<T>::kAreBytes ? 1 : kEntries][16];

  // The index bits above the low eight of one entry, for 16 rows.
  template <int Entry>
  static __m256i above(const BookParts<T>& parts, __m256i high) {
    if constexpr (k.signs == Signs::High7) {
      const VI word = load_i(parts.word);
      const VI bit = and_i(Entry == 0 ? shl_i<8>(word) : shr_i<std::max(8 * Entry - 8, 0)>(word), 0x100);
      return _mm256_permute4x64_epi64(_mm256_packus_epi32(bit.lo, bit.hi), 0xd8);
    } else {
      constexpr int at = (k.signs == Signs::DeltaEntry ? 4 : k.high_bits) * Entry;
      const __m256i moved = at > 8 ? _mm256_srli_epi16(high, std::max(at - 8, 0))
                                   : _mm256_slli_epi16(high, std::max(8 - at, 0));
      return _mm256_and_si256(moved, _mm256_set1_epi16(((1 << k.high_bits) - 1) << 8));
    }
  }
};

inline __m128i two_entries(const uint32_t* words, size_t a, size_t b) {
  const auto* second = reinterpret_cast<const __m64*>(words + 2 * b);
  return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(load_64(words + 2 * a)), second));
}
inline __m128i four_entries(const uint32_t* words, size_t a, size_t b, size_t c, size_t d) {
  __m128i x = _mm_cvtsi32_si128(static_cast<int>(words[a]));
  x = _mm_insert_epi32(x, static_cast<int>(words[b]), 1);
  x = _mm_insert_epi32(x, static_cast<int>(words[c]), 2);
  return _mm_insert_epi32(x, static_cast<int>(words[d]), 3);
}

// Loads an entry of eight rows: of 4 columns into one vector, of 8 columns into two, rows 0, 1, 4, 5 and 2, 3, 6, 7.
template <Type T>
constexpr int kEntryVectors = kQuantType<T>.book.columns / 4;
template <Type T>
inline void load_entries(const BookIndices<T>& indices, int entry, int octet,
                         __m256i (&entries)[kEntryVectors<T>]) {
  const uint32_t* words = codebook_words[static_cast<int>(T)];
  if constexpr (kVnni && kEntryVectors<T> == 1) {
    const auto* table = reinterpret_cast<const int*>(words);
    entries[0] = _mm256_i32gather_epi32(table, indices.vector(entry, octet), 4);
    return;
  }
  const EightIndices<T> at = indices.eight(entry, octet);
  if constexpr (kEntryVectors<T> == 1) {
    entries[0] = _mm256_set_m128i(four_entries(words, at[4], at[5], at[6], at[7]),
                                  four_entries(words, at[0], at[1], at[2], at[3]));
  } else {
    entries[0] = _mm256_set_m128i(two_entries(words, at[4], at[5]), two_entries(words, at[0], at[1]));
    entries[1] = _mm256_set_m128i(two_entries(words, at[6], at[7]), two_entries(words, at[2], at[3]));
  }
}

// Separates the first and second words of the rows' 64 bits, in the order of the rows.
inline void words_apart(const __m256i (&rows)[2], __m256i& first, __m256i& second) {
  const __m256 a = _mm256_castsi256_ps(rows[0]), b = _mm256_castsi256_ps(rows[1]);
  first = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
  second = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
}

// Numbers of two quads of sixteen rows, for unpack_book.
template <Type T>
class LoadedEntries {
 public:
  explicit LoadedEntries(const BookParts<T>& parts) : indices_(parts) {}

  template <int Pair>
  void numbers(VB& even, VB& odd) const {
    octet<Pair>(0, even.lo, odd.lo);
    octet<Pair>(1, even.hi, odd.hi);
  }

 private:
  BookIndices<T> indices_;

  template <int Pair>
  void octet(int octet, __m256i& even, __m256i& odd) const {
    __m256i entries[kEntryVectors<T>];
    if constexpr (kEntryVectors<T> == 2) {
      load_entries(indices_, Pair, octet, entries);
      words_apart(entries, even, odd);
    } else {
      load_entries(indices_, 2 * Pair, octet, entries);
      even = entries[0];
      load_entries(indices_, 2 * Pair + 1, octet, entries);
      odd = entries[0];
    }
  }
};
