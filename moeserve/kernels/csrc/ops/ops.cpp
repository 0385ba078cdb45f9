#include "ops.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <new>

#include "huge_pages.h"

namespace moeserve {

Matrix::Matrix(int type_, int64_t rows_, int64_t cols_, int64_t experts_, int nodes_,
               const uint8_t* file_rows)
    : type(type_),
      rows(rows_),
      cols(cols_),
      experts(experts_),
      panels((rows_ + kPanelRows - 1) / kPanelRows),
      panel_bytes(row_bytes(type_, cols_) * kPanelRows),
      bytes(file_rows == nullptr ? panel_bytes * panels * experts_
                                 : row_bytes(type_, cols_) * rows_ * experts_),
      nodes(nodes_),
      file_rows_(file_rows) {
  if (!packed()) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  madvise(p, bytes, MADV_HUGEPAGE);  // fewer TLB misses; a kernel without huge pages may ignore it
  data_ = static_cast<uint8_t*>(p);
}

Matrix::~Matrix() {
  if (data_ != nullptr) munmap(data_, bytes);
}

void Matrix::use_huge_pages() const {
  constexpr uintptr_t kHugePage = 2 << 20;
  if (!packed()) return;
  const auto begin = reinterpret_cast<uintptr_t>(data_);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage,
                  last = (begin + bytes) / kHugePage * kHugePage;
  if (first >= last || madvise(reinterpret_cast<void*>(first), last - first, kMadviseCollapse) == 0) return;
  for (uintptr_t page = first; page < last;
       page += kHugePage) {  // the call stops at the first page that fails
    madvise(reinterpret_cast<void*>(page), kHugePage, kMadviseCollapse);
  }
}

void PackOp::operator()(Team& team) const {
  const size_t stride = row_bytes(out->type, out->cols);
  team.for_panels(out->experts, out->panels, [&](int64_t expert, int64_t panel) {
    k->pack[out->type](source + (expert * out->rows + panel * kPanelRows) * stride, stride,
                       out->valid_rows(panel), out->cols, out->packed_panel(expert, panel));
  });
}

void EmbedOp::operator()(Team& team) const {
  const size_t stride = row_bytes(type, cols);
  team.last_phase();
  team.for_units(n, [&](int64_t t) {
    float* row = x + t * copies * cols;
    dequantize_row(type, table + ids[t] * stride, cols, row);
    if (scale != 1.0f) {
      for (int64_t i = 0; i < cols; ++i) row[i] *= scale;
    }
    for (int copy = 1; copy < copies; ++copy) std::copy_n(row, cols, row + copy * cols);
  });
}

void NormOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t i) {
    const float* row = x + (rows != nullptr ? rows[i] : i) * y.cols;
    float* out = y.f32 + i * y.cols;
    (centered ? k->layer_norm : k->rms_norm)(row, w, eps, static_cast<int>(y.cols), out);
    if (y.q8 != nullptr) k->quantize(out, y.cols, y.codes(i), y.metas(i));
  });
}

void AddNormOp::operator()(Team& team) const {
  team.last_phase();
  auto* normed = static_cast<float*>(team.scratch(sizeof(float) * cols));
  team.for_units(n, [&](int64_t t) {
    float* row = x + t * cols;
    k->rms_norm(source + t * cols, w, eps, cols, normed);
    k->axpy(1.0f, normed, cols, row);
    if (factor != 1.0f) k->scale(factor, cols, row);
  });
}

void GeluGateOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t t) {
    float* row = out.f32 + t * out.cols;
    if (gate == nullptr) {
      std::copy_n(up + t * stride, out.cols, row);
    } else {
      k->gelu_mul(gate + t * out.cols, up + t * stride, static_cast<int>(out.cols), row);
    }
    if (out.q8 != nullptr) k->quantize(row, out.cols, out.codes(t), out.metas(t));
  });
}

void SoftcapOp::operator()(Team& team) const {
  constexpr int64_t kPart = 1 << 12;
  const int64_t parts = (cols + kPart - 1) / kPart;
  team.for_units(n * parts, [&](int64_t unit) {
    const int64_t from = unit % parts * kPart;
    k->softcap(cap, static_cast<int>(std::min(kPart, cols - from)), x + unit / parts * cols + from);
  });
}

bool LinearOp::is_halved(const Team& team) const {
  int64_t panels = 0;
  for (int j = 0; j < count; ++j) {
    if (w[j]->type != static_cast<int>(Type::F32) || !w[j]->packed()) return false;
    panels += w[j]->panels;
  }
  return panels < team.threads();
}

// Computes the 32 outputs of one panel of matrix j for all tokens; half 0 or 1: only 16 of them.
void LinearOp::compute(int j, int64_t panel, int half, Claim& claim) const {
  const Matrix& m = *w[j];
  const int first = half == 1 ? kPanelRows / 2 : 0;
  const int valid =
      half < 0 ? m.valid_rows(panel) : std::clamp(m.valid_rows(panel) - first, 0, kPanelRows / 2);
  alignas(64) float tile[kMostTokens * kPanelRows];
  const void* rows[kMostTokens];
  const int64_t row0 = panel * kPanelRows + first;
  for (int t0 = 0; t0 < n; t0 += kMostTokens) {
    const int tokens = std::min(kMostTokens, n - t0);
    for (int t = 0; t < tokens; ++t) rows[t] = x.row(m.integer(), t0 + t);
    if (half < 0) {
      k->multiply(m.type, m.panel(0, panel), nullptr, m.cols, rows, tokens, tile);
    } else {
      k->gemm_f32_half(m.panel(0, panel).data + first * sizeof(float), m.cols, rows, tokens, tile);
    }
    if (bias[j] != nullptr) add_bias(bias[j] + row0, valid, tokens, tile);
    if (!claim()) return;
    for (int t = 0; t < tokens; ++t) {
      float* o = out[j] + (t0 + t) * m.rows + row0;
      const float* from = tile + t * kPanelRows;
      for (int r = 0; r < valid; ++r) o[r] = add ? o[r] + from[r] : from[r];
    }
  }
}

void LinearOp::operator()(Team& team) const {
  team.last_phase();
  const bool halved = is_halved(team);
  team.for_claimed_matrices(
      count, [&](int j) { return halved ? 2 * w[j]->panels : w[j]->panels; },
      [&](int j, int64_t piece, Claim& claim) {
        compute(j, halved ? piece / 2 : piece, halved ? static_cast<int>(piece % 2) : -1, claim);
      });
}

BytesAhead LinearOp::reads_first(const Team& team) const {
  const bool halved = is_halved(team);
  const auto [j, piece, pieces] =
      team.own_panels(count, [&](int i) { return halved ? 2 * w[i]->panels : w[i]->panels; });
  if (pieces == 0 || !w[j]->packed()) return {};
  const auto bytes = static_cast<ptrdiff_t>(w[j]->panel_bytes);
  if (!halved) return {w[j]->panel(0, piece).data, pieces * bytes};
  constexpr int kColumn = kPanelRows * sizeof(float);
  return {w[j]->panel(0, piece / 2).data + piece % 2 * (kColumn / 2), bytes, kColumn};
}

void PanelsOp::operator()(Team& team) const {
  team.last_phase();
  team.for_claimed_units(count, [&](int64_t unit, Claim& claim) {
    alignas(64) float tile[kMostTokens * kPanelRows];
    const void* rows[kMostTokens];
    const int64_t panel = panels[unit];
    const int valid = w->valid_rows(panel);
    for (int t0 = 0; t0 < n; t0 += kMostTokens) {
      const int tokens = std::min(kMostTokens, n - t0);
      for (int t = 0; t < tokens; ++t) rows[t] = x.row(w->integer(), t0 + t);
      k->multiply(w->type, w->panel(0, panel), nullptr, w->cols, rows, tokens, tile);
      if (!claim()) return;
      for (int t = 0; t < tokens; ++t) {
        float* o = out + ((t0 + t) * int64_t{count} + unit) * kPanelRows;
        std::copy_n(tile + t * kPanelRows, valid, o);
        std::fill(o + valid, o + kPanelRows, -std::numeric_limits<float>::infinity());
      }
    }
  });
}

void KvPool::store(const Kernels& k, const float* x, int count, int64_t at) const {
  if (is_q8()) {
    k.quantize_kv(x, count, codes() + at, scales + at / 32);
  } else {
    k.to_half(x, count, halves() + at);
  }
}

void RopeStoreOp::norm_rotate(float* x, int num, const float* norm, bool full, int64_t angle) const {
  if (norm != nullptr && full) k->rms_norm(x, norm, eps, num * dim, x);
  for (int h = 0; h < num; ++h) {
    float* head = x + h * dim;
    if (norm != nullptr && !full && !norm_after) k->rms_norm(head, norm, eps, dim, head);
    k->rope(head, cos + angle * (rotary / 2), sin + angle * (rotary / 2), rotary);
    if (norm != nullptr && norm_after) k->rms_norm(head, norm, eps, dim, head);
  }
}

void RopeStoreOp::operator()(Team& team) const {
  // A unit is one KV head with its query heads; if a norm is over all heads, there is a single unit.
  const int parts = full_q_norm || full_k_norm ? 1 : kv_heads;
  team.last_phase();
  const int q_count = heads / parts, kv_count = kv_heads / parts;
  team.for_units(int64_t{n} * parts, [&](int64_t unit) {
    const int64_t t = unit / parts, angle = positions == nullptr ? t : positions[t];
    float* own_q = q + unit * q_count * dim;
    const int values_count = kv_count * value_dim;
    const int64_t kv = unit * kv_count * dim,
                  v = unit * values_count;  // offsets of its first numbers in `key` and `value`
    norm_rotate(own_q, q_count, q_norm, full_q_norm, angle);
    k->scale(scale, q_count * dim, own_q);
    if (key == nullptr) return;
    for (int h = 0; v_norm != nullptr && h < kv_count; ++h) {
      k->rms_norm(value_source + v + h * value_dim, v_norm, eps, value_dim, value + v + h * value_dim);
    }
    if (v_scale != 1.0f) k->scale(v_scale, values_count, value + v);
    norm_rotate(key + kv, kv_count, k_norm, full_k_norm, angle);
    const int64_t at = int64_t{slots[t]} * parts + unit % parts;
    keys.store(*k, key + kv, kv_count * dim, at * kv_count * dim);
    values.store(*k, value + v, values_count, at * values_count);
  });
}

void ReadOp::operator()(Team& team) const {
  constexpr int64_t kChunk = 1 << 16;
  team.for_units(static_cast<int64_t>(matrix->bytes) / kChunk, [&](int64_t unit) {
    const uint8_t* p = matrix->begin() + unit * kChunk;
    for (int64_t i = 0; i < kChunk; i += 64) {
      __builtin_prefetch(p + i + 4096);
      // One load fetches the whole line; the empty assembly keeps the compiler from removing it.
      const uint64_t word = *reinterpret_cast<const uint64_t*>(p + i);
      asm volatile("" ::"r"(word));
    }
  });
}

}  // namespace moeserve
