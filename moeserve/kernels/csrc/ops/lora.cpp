#include "lora.h"

#include <stdexcept>

namespace moeserve {

LoraTable::LoraTable(int64_t cols_, int64_t rows_, int64_t experts_, int adapters)
    : cols(cols_), rows(rows_), experts(experts_), panels((rows_ + 31) / 32) {
  if (cols < 1 || cols % 16 != 0 || rows < 1 || experts < 1 || adapters < 0) {
    throw std::invalid_argument("cols: a multiple of 16 wanted, and rows, experts and adapters");
  }
  pairs_.resize(adapters * experts);
}

void LoraTable::set(int adapter, int64_t expert, const LoraPair& pair) {
  pairs_[adapter * experts + expert] = pair;
  most_rank_ = 0;
  for (const LoraPair& each : pairs_) most_rank_ = std::max(most_rank_, each.rank);
}

void LoraOp::operator()(Team& team) const {
  const int parts = stride / kLoraRows;
  team.for_units(int64_t{count} * num_rows * parts, [&](int64_t unit) {
    const int64_t item = unit / parts, j = item / num_rows;
    if (tables[j] == nullptr) return;
    const int32_t row = rows[item % num_rows];
    shrink(*k, tables[j]->pair(adapters[row], 0), tables[j]->cols, static_cast<int>(unit % parts),
           x + row * tables[j]->cols, shrunk + item * stride);
  });
  for (int j = 0; j < count; ++j) {
    const LoraTable* table = tables[j];
    if (table == nullptr) continue;
    team.for_panels(1, table->panels, [&](int64_t, int64_t panel) {
      const int valid = static_cast<int>(std::min<int64_t>(32, table->rows - panel * 32));
      alignas(64) float tile[32] = {};
      for (int i = 0; i < num_rows; ++i) {
        float* o = out[j] + rows[i] * table->rows + panel * 32;
        std::copy_n(o, valid, tile);
        expand(*k, table->pair(adapters[rows[i]], 0), panel, shrunk + (int64_t{j} * num_rows + i) * stride,
               tile);
        std::copy_n(tile, valid, o);
      }
    });
  }
}

}  // namespace moeserve
