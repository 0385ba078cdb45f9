// Products of few tokens with codebook types, summed while entries are loaded. Signs are applied to the activations,
// not the entries: unsigned entries are smaller, so that more of their products fit in 16 bits.

// With more tokens, storing signed codes pays; the limit is lower if several of their products fit in 16 bits.
template <class F>
constexpr int kMostBookTokens = quads_in_16_bits(F::kMostCode) == 1 ? 4 : 2;

// The format with unsigned entries, which have no zero point.
template <class F>
struct SignedEntries : F {
  static constexpr int kZero = F::type.book.has_delta() ? F::type.book.zero() : 0;
};

// How many products with entries fit in 16 bits. Activations are in [-127, 127]; where one is not finite, the scale is
// NaN and the codes do not matter.
constexpr int book_products_in_16_bits(const Codebook& k) {
  const int most = k.has_delta() ? k.zero() + k.most + 1 : k.most;
  int count = 8;
  while (count * 2 * 127 * most > kMostInt16) count /= 2;
  return count;
}

// Repeats a row's byte Byte of 32 bits for each column of an entry. Vector: which of load_entries' vectors.
template <Type T, int Byte, int Vector>
inline __m256i spread_to_columns(__m256i words) {
  const __m256i wide = Vector == 0 ? _mm256_set_epi64x(0x0404040404040404, 0, 0x0404040404040404, 0)
                                   : _mm256_set_epi64x(0x0c0c0c0c0c0c0c0c, 0x0808080808080808,
                                                       0x0c0c0c0c0c0c0c0c, 0x0808080808080808);
  const __m256i narrow =
      _mm256_set_epi64x(0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000);
  const __m256i from = _mm256_add_epi8(kEntryVectors<T> == 2 ? wide : narrow, _mm256_set1_epi8(Byte));
  return _mm256_shuffle_epi8(words, from);
}

// A half's group's signs, or its bytes with deltas: 32 bits per row.
template <Type T>
inline VI entry_signs(const BookParts<T>& parts) {
  constexpr Codebook k = kQuantType<T>.book;
  if constexpr (!k.has_delta()) return book_sign_words<T>(parts);
  if constexpr (k.signs == Signs::DeltaEntry) {
    const VI word = or_i(load_u8(parts.high), shl_i<8>(load_u8(parts.high + 16)));
    return or_i(word, shl_i<12>(word));  // odd entries' deltas come to bits 3 of bytes 2 and 3
  }
  return set_i(0);
}

// Returns 1 for each column, or -1 where it has a minus.
template <Type T, int Step, int Vector>
inline __m256i column_signs(__m256i words) {
  constexpr Codebook k = kQuantType<T>.book;
  if constexpr (k.signs == Signs::DeltaEntry) {
    const __m256i eighths = spread_to_columns<T, Step / 2 + Step % 2 * 2, Vector>(words);
    const __m256i by_nibble = _mm256_set_epi64x(0xff, 1, 0xff, 1);  // of 8: -1; of 0: 1
    return _mm256_shuffle_epi8(by_nibble, _mm256_and_si256(eighths, _mm256_set1_epi8(8)));
  } else {
    const __m256i bits = k.columns == 8
                             ? _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201))
                             : _mm256_set1_epi32(Step % 2 ? static_cast<int>(0x80402010) : 0x08040201);
    const __m256i spread = spread_to_columns<T, Step * k.columns / 8, Vector>(words);
    const __m256i minus = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
    return _mm256_or_si256(minus, _mm256_set1_epi8(1));
  }
}

// Repeats the activations of an entry's columns.
template <Type T>
inline __m256i broadcast_entry(const int8_t* x) {
  if constexpr (kEntryVectors<T> == 1) return broadcast_quad(x).lo;
  int64_t eight;
  std::memcpy(&eight, x, sizeof eight);
  return _mm256_set1_epi64x(eight);
}

// The sums of eight rows and N tokens; lo and hi are arguments of `added`.
template <class F, int N>
inline void octet_sums(const BookIndices<F::kType>& indices, int octet, __m256i signs,
                       const int8_t* const (&x)[N], __m256i (&lo)[N], __m256i (&hi)[N]) {
  constexpr Type T = F::kType;
  constexpr Codebook k = F::type.book;
  constexpr int vectors = kEntryVectors<T>, steps = 32 / k.columns, sum_steps = F::kSplit ? steps / 2 : steps;
  constexpr int run = std::min(sum_steps, book_products_in_16_bits(k));
  __m256i narrow[N][vectors], wide[N][vectors];
  for_quads<0, steps>([&](auto step) {
    constexpr int s = decltype(step)::value;
    __m256i entries[vectors];
    load_entries(indices, s, octet, entries);
    for_quads<0, vectors>([&](auto vector) {
      constexpr int v = decltype(vector)::value;
      __m256i column_sign;
      if constexpr (k.signs != Signs::DeltaGroup) column_sign = column_signs<T, s, v>(signs);
      if constexpr (k.signs == Signs::DeltaEntry) entries[v] = _mm256_add_epi8(entries[v], column_sign);
#pragma GCC unroll 4
      for (int t = 0; t < N; ++t) {
        __m256i a = broadcast_entry<T>(x[t] + k.columns * s);
        if constexpr (!k.has_delta()) a = _mm256_sign_epi8(a, column_sign);
        if constexpr (kVnni) {
          wide[t][v] = dot_bytes(s % sum_steps == 0 ? _mm256_setzero_si256() : wide[t][v], entries[v], a);
          continue;
        }
        const __m256i product = _mm256_maddubs_epi16(entries[v], a);
        narrow[t][v] = s % run == 0 ? product : _mm256_add_epi16(narrow[t][v], product);
        if constexpr (s % run == run - 1) {
          const __m256i sum = _mm256_madd_epi16(narrow[t][v], _mm256_set1_epi16(1));
          wide[t][v] = s % sum_steps < run ? sum : _mm256_add_epi32(wide[t][v], sum);
        }
      }
    });
    if constexpr (s % sum_steps == sum_steps - 1) {
#pragma GCC unroll 4
      for (int t = 0; t < N; ++t) {
        __m256i& sum = s < sum_steps ? lo[t] : hi[t];
        if constexpr (vectors == 1) {
          sum = wide[t][0];
        } else {
          __m256i second;
          words_apart(wide[t], sum, second);
          sum = _mm256_add_epi32(sum, second);
        }
      }
    }
  });
}

// The term of the deltas: an eighth is added or subtracted for all columns of an entry, so it is a multiple of the sum
// of the activations.
template <Type T>
inline VI group_deltas(const BookParts<T>& parts, const GroupMeta& meta) {
  const VI sign = or_i(sub_i(set_i(0), shr_i<7>(load_u8(parts.high + 16))), set_i(1));
  const __m256i sum = _mm256_set1_epi32(meta.sum_lo + meta.sum_hi);
  return {_mm256_sign_epi32(sum, sign.lo), _mm256_sign_epi32(sum, sign.hi)};
}

// Adds a half's group to N tokens' accumulators.
template <class F, int N>
inline void book_half(const uint8_t* codes, const Scales& s, const void* const* rows, int64_t cols,
                      int64_t group, float* out) {
  const BookParts<F::kType> parts(codes);
  const BookIndices<F::kType> indices(parts);
  const VI signs = entry_signs<F::kType>(parts);
  const int8_t* x[N];
  group_of(rows, group, x);
  __m256i lo[2][N], hi[2][N];
#pragma GCC unroll 1
  for (int octet = 0; octet < 2; ++octet) {
    octet_sums<F, N>(indices, octet, octet == 0 ? signs.lo : signs.hi, x, lo[octet], hi[octet]);
  }
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t) {
    const GroupMeta& meta = meta_of(rows[t], cols, group);
    VI first{lo[0][t], lo[1][t]};
    VI second = first;
    if constexpr (F::kSplit) second = {hi[0][t], hi[1][t]};
    if constexpr (F::type.book.signs == Signs::DeltaGroup) {
      const VI deltas = group_deltas<F::kType>(parts, meta);
      first = {_mm256_add_epi32(first.lo, deltas.lo), _mm256_add_epi32(first.hi, deltas.hi)};
    }
    accumulate<SignedEntries<F>>(first, second, s, meta, out + kPanelRows * t);
  }
}

// A whole panel in one loop: a call for each half would take a tenth of the time.
template <class F, int N>
[[gnu::noinline, gnu::flatten]] void book_panel(const uint8_t* panel, const uint8_t* end, const uint8_t* next,
                                                int64_t cols, const void* const* rows, float* out) {
  constexpr PanelLayout layout = F::layout;
  constexpr int groups = layout.cols / 32;
  for (int64_t group = 0; panel < end; panel += layout.block_bytes) {
    const uint8_t* ahead = reading_ahead(panel, end, next);
    const uint8_t* codes = panel + layout.header_bytes;
#pragma GCC unroll 1
    for (int g = 0; g < groups; ++g, ++group) {
      prefetch(ahead + g * (layout.block_bytes / groups), layout.block_bytes / groups);
#pragma GCC unroll 1
      for (int half = 0; half < 2; ++half, codes += F::kHalfBytes) {
        book_half<F, N>(codes, F::scales(panel, g, half), rows, cols, group, out + 16 * half);
      }
    }
  }
}
