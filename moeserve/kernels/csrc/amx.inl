// The integer sums of 16 tokens at a time on the AMX tile unit (int8). Sums of integers are exact, and what follows
// is the same as for one token: the results equal those without AMX bit for bit.
//
// Tiles: 0..3 sums [16 tokens][16 rows] of (half 0, half 1) x (lo, hi); 4, 5 activations [16 tokens][K] lo, hi;
// 6, 7 weights [K / 4][16 rows x 4] of half 0, half 1. K is 16 where the scales are per 16 columns, else 32; without
// the split only lo exists. The panel's vectors are a weight tile's rows as they stand.

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Configures this thread's tiles for a format while it lives, where there are tokens enough; the unit is handed back
// afterwards, so that a context switch need not save 8 KB.
template <class F>
class Tiles {
 public:
  explicit Tiles(int tokens) : used_(tokens >= 16) {
    if (!used_) return;
    constexpr int k = F::kSplit ? 16 : 32;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = tile == 4 || tile == 5 ? k : 64;
      config.rows[tile] = tile < 6 ? 16 : k / 4;
    }
    _tile_loadconfig(&config);
  }
  ~Tiles() {
    if (used_) _tile_release();
  }
  Tiles(const Tiles&) = delete;

 private:
  bool used_;
};

// The sums of 16 tokens: those of half h at sums[h], and at sums[2 + h] of the second 16 columns (kSplit).
using TileSums = int32_t[4][16][16];

template <class F>
inline void tile_sums(const uint8_t (&weights)[2][8][64], const int8_t (&x)[16][32], TileSums& sums) {
  _tile_loadd(4, x, 32);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (F::kSplit) {
    _tile_loadd(5, x[0] + 16, 32);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(6, weights[0][0], 64);
    _tile_loadd(7, weights[1][0], 64);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(6, weights[0][4], 64);
    _tile_loadd(7, weights[1][4], 64);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  } else {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
}

// Tokens that the tile unit has dealt with: n rounded down to 16. A Tiles<F> must live, n <= kMostTokens.
// All tiles' work is issued before any of the scaling, so that the two overlap: a tile's result is far away (52 cycles
// and a round through L1).
template <class F>
inline int tile_tokens(const VB (&w)[2][8], const Scales (&s)[2], const void* const* rows, int n,
                       int64_t cols, int64_t group, float* out) {
  if (n < 16) return 0;
  alignas(64) uint8_t weights[2][8][64];
  alignas(64) int8_t x[kMostTokens / 16][16][32];
  alignas(64) TileSums sums[kMostTokens / 16];
  const int tiles = n / 16;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 8; ++i) store_b(weights[half][i], w[half][i]);
  }
  for (int t = 0; t < 16 * tiles; ++t) {
    std::memcpy(x[t / 16][t % 16], static_cast<const int8_t*>(rows[t]) + 32 * group, 32);
  }
  if constexpr (!F::kSplit) {
    _tile_loadd(6, weights[0], 64);
    _tile_loadd(7, weights[1], 64);
  }
  for (int tile = 0; tile < tiles; ++tile) tile_sums<F>(weights, x[tile], sums[tile]);
  for (int t = 0; t < 16 * tiles; ++t) {
    const TileSums& sum = sums[t / 16];
    const GroupMeta meta = load_meta(rows[t], cols, group);
    for (int half = 0; half < 2; ++half) {
      const Dots<F> d = {load_i(sum[half][t % 16]), load_i(sum[2 + half][t % 16])};
      accumulate<F>(d, s[half], meta, out + kPanelRows * t + 16 * half);
    }
  }
  return 16 * tiles;
}
