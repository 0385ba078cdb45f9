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

// Configures this thread's tiles for a format while it lives, if there are tokens enough; the unit is handed back
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

// Tokens that the tile unit has dealt with: n rounded down to 16. A Tiles<F> must live.
template <class F>
inline int tile_tokens(const VB (&w)[2][8], const Scales (&s)[2], const void* const* rows, int n,
                       int64_t cols, int64_t group, float* out) {
  if (n < 16) return 0;
  alignas(64) uint8_t weights[2][8][64];
  alignas(64) int8_t x[16][32];
  alignas(64) int32_t sums[4][16][16];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 8; ++i) store_b(weights[half][i], w[half][i]);
  }
  if constexpr (!F::kSplit) {
    _tile_loadd(6, weights[0], 64);
    _tile_loadd(7, weights[1], 64);
  }
  int t = 0;
  for (; t + 16 <= n; t += 16) {
    for (int i = 0; i < 16; ++i) std::memcpy(x[i], static_cast<const int8_t*>(rows[t + i]) + 32 * group, 32);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x, 32);
    if constexpr (F::kSplit) {
      _tile_zero(2);
      _tile_zero(3);
      _tile_loadd(5, x[0] + 16, 32);
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
    for (int i = 0; i < 16; ++i) {
      const GroupMeta meta = load_meta(rows[t + i], cols, group);
      for (int half = 0; half < 2; ++half) {
        const Dots<F> d = {load_i(sums[half][i]), load_i(sums[2 + half][i])};
        accumulate<F>(d, s[half], meta, out + kPanelRows * (t + i) + 16 * half);
      }
    }
  }
  return t;
}
