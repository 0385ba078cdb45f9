#include "ops.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <new>

namespace moeserve {
namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

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

void PackOp::operator()(Team& team) const {
  const size_t stride = row_bytes(out->type, out->cols);
  team.for_last_panels(out->experts, out->panels, [&](int64_t expert, int64_t panel) {
    k->pack[out->type](source + (expert * out->rows + panel * kPanelRows) * stride, stride,
                       out->valid_rows(panel), out->cols, out->packed_panel(expert, panel));
  });
}

void EmbedOp::operator()(Team& team) const {
  const size_t stride = row_bytes(type, cols);
  team.for_last_units(n,
                      [&](int64_t t) { dequantize_row(type, table + ids[t] * stride, cols, x + t * cols); });
}

void NormOp::operator()(Team& team) const {
  team.for_last_units(n, [&](int64_t i) {
    const float* row = x + (rows != nullptr ? rows[i] : i) * y.cols;
    float* out = y.f32 + i * y.cols;
    k->rms_norm(row, w, eps, static_cast<int>(y.cols), out);
    if (y.q8 != nullptr) k->quantize(out, y.cols, y.codes(i), y.metas(i));
  });
}

namespace {

// The 32 outputs of one panel for all tokens.
void linear_panel(const LinearOp& op, const Matrix& m, int64_t panel, float* out) {
  const int valid = m.valid_rows(panel);
  alignas(64) float tile[kMostTokens * kPanelRows];
  const void* rows[kMostTokens];
  for (int t0 = 0; t0 < op.n; t0 += kMostTokens) {
    const int tokens = std::min(kMostTokens, op.n - t0);
    for (int t = 0; t < tokens; ++t) rows[t] = op.x.row(m.integer(), t0 + t);
    op.k->gemm[m.type](m.panel(0, panel), nullptr, m.cols, rows, tokens, tile);
    for (int t = 0; t < tokens; ++t) {
      float* o = out + (t0 + t) * m.rows + panel * kPanelRows;
      const float* from = tile + t * kPanelRows;
      for (int r = 0; r < valid; ++r) o[r] = op.add ? o[r] + from[r] : from[r];
    }
  }
}

}  // namespace

void LinearOp::operator()(Team& team) const {
  for (int j = 0; j < count; ++j) {
    // No barrier between the matrices: a thread that is done with one goes on with the next.
    team.for_last_panels(1, w[j]->panels,
                         [&](int64_t, int64_t panel) { linear_panel(*this, *w[j], panel, out[j]); });
  }
}

void RopeStoreOp::operator()(Team& team) const {
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  team.for_last_units(n, [&](int64_t t) {
    const float* c = cos + t * (dim / 2);
    const float* s = sin + t * (dim / 2);
    for (int h = 0; h < heads; ++h) {
      float* head = q + (t * heads + h) * dim;
      k->rms_norm(head, q_norm, eps, dim, head);
      k->rope(head, c, s, dim);
      k->scale(q_scale, dim, head);
    }
    for (int h = 0; h < kv_heads; ++h) {
      float* head = key + (t * kv_heads + h) * dim;
      k->rms_norm(head, k_norm, eps, dim, head);
      k->rope(head, c, s, dim);
    }
    const int width = kv_heads * dim;
    k->to_half(key + t * width, width, key_pool + static_cast<int64_t>(slots[t]) * width);
    k->to_half(value + t * width, width, value_pool + static_cast<int64_t>(slots[t]) * width);
  });
}

void RouteOp::operator()(Team& team) const {
  team.for_last_units(n, [&](int64_t t) {
    const float* row = logits + t * experts;
    int32_t* id = ids + t * top_k;
    float* weight = weights + t * top_k;
    const float largest = *std::max_element(row, row + experts);
    // Softmax is monotone and the sum over all experts cancels in the renormalisation: choose by logit, then
    // normalise over the chosen.
    float sum = 0;
    for (int j = 0; j < top_k; ++j) {
      int best = -1;
      for (int e = 0; e < experts; ++e) {
        if (std::find(id, id + j, e) != id + j) continue;
        if (best < 0 || row[e] > row[best]) best = e;
      }
      id[j] = best;
      weight[j] = std::exp(row[best] - largest);
      sum += weight[j];
    }
    for (int j = 0; j < top_k; ++j) weight[j] /= sum;
  });
}

void ExpertsOp::operator()(Team& team) const {
  if (team.thread() == 0) sort_routes();
  team.barrier();
  compute(team);
}

void ExpertsOp::compute(Team& team) const {
  team.for_last_panels(active[0], gate->panels, [&](int64_t rank, int64_t panel) { gate_up(rank, panel); });
  if (n * top_k <= kMostParts) {
    barrier_fetching_down(team);
    team.for_panels(active[0], down->panels, [&](int64_t rank, int64_t panel) { down_part(rank, panel); });
    team.for_last_panels(1, down->panels, [&](int64_t, int64_t panel) { add_parts(team, panel); });
  } else {
    team.barrier();
    team.for_last_panels(1, down->panels, [&](int64_t, int64_t panel) { down_panel(team, panel); });
  }
}

// Between the two products. A thread that is done early brings what it will read first into its cache, so that the
// memory is not idle while it waits: 3% of a layer's time at 1 and at 4 tokens with 16 threads (medians of four turns
// each with and without, where a turn varied by 5%).
void ExpertsOp::barrier_fetching_down(Team& team) const {
  constexpr int64_t kMostBytes = 1 << 18;
  const uint8_t *p = nullptr, *end = nullptr;
  if (active[0] > 0 && down->packed()) {
    const auto [rank, panel] = team.first_pair(active[0], down->panels);
    p = down->panel(active[1 + rank], panel).data;
    end = p + std::min<int64_t>((down->panels - panel) * down->panel_bytes, kMostBytes);
  }
  team.barrier_doing([&] {
    for (int line = 0; line < 8 && p < end; ++line, p += 64) __builtin_prefetch(p, 0, 2);
  });
}

// Counting sort of the n * top_k routes by expert. One thread: at 512 tokens it takes 10 us of a layer's 20 ms.
bool ExpertsOp::sort_routes() const {
  const int routes_n = n * top_k;
  const int experts = static_cast<int>(gate->experts);
  std::fill(starts, starts + experts + 1, 0);
  active[0] = 0;
  for (int i = 0; i < routes_n; ++i) {
    if (ids[i] >= experts) {
      std::fill(starts, starts + experts + 1, 0);
      return false;
    }
    if (ids[i] >= 0) ++starts[ids[i] + 1];
  }
  for (int e = 0; e < experts; ++e) {
    if (starts[e + 1] > 0) active[++active[0]] = e;
    heat[e] += starts[e + 1];
    heat[experts + e] += starts[e + 1] > 0;
    starts[e + 1] += starts[e];
  }
  const int routed = starts[experts];
  for (int i = routes_n - 1; i >= 0; --i)
    if (ids[i] >= 0) routes[--starts[ids[i] + 1]] = i;  // now starts[e + 1] is e's start
  for (int e = 0; e < experts; ++e) starts[e] = starts[e + 1];
  starts[experts] = routed;
  return true;
}

// 32 rows of gate and up of the rank-th active expert, for all its tokens.
void ExpertsOp::gate_up(int64_t rank, int64_t panel) const {
  const int expert = active[1 + rank];
  const int64_t row0 = panel * kPanelRows;
  const Panel gate_panel = gate->panel(expert, panel), up_panel = up->panel(expert, panel);
  const bool last = panel + 1 == gate->panels;
  const uint8_t* next = last && rank + 1 < active[0] ? gate->panel(active[2 + rank], 0).data
                                                     : gate_panel.data + gate->panel_bytes;
  alignas(64) float g[kMostTokens * kPanelRows], u[kMostTokens * kPanelRows];
  const void* gate_rows[kMostTokens];
  const void* up_rows[kMostTokens];
  for (int i0 = starts[expert]; i0 < starts[expert + 1]; i0 += kMostTokens) {
    const int tokens = std::min(kMostTokens, starts[expert + 1] - i0);
    for (int i = 0; i < tokens; ++i) {
      const int token = routes[i0 + i] / top_k;
      gate_rows[i] = y.row(gate->integer(), token);
      up_rows[i] = y.row(up->integer(), token);
    }
    k->gemm[gate->type](gate_panel, up_panel.data, gate->cols, gate_rows, tokens, g);
    k->gemm[up->type](up_panel, next, up->cols, up_rows, tokens, u);
    k->silu_mul(g, u, tokens * kPanelRows, g);
    for (int i = 0; i < tokens; ++i) {
      const float* row = g + i * kPanelRows;
      if (down->integer()) {
        k->quantize(row, kPanelRows, h.codes(i0 + i) + row0, h.metas(i0 + i) + panel);
      } else {
        std::copy(row, row + kPanelRows, h.f32 + (i0 + i) * h.cols + row0);
      }
    }
  }
}

// A thread owns the panel's 32 rows of the output for all experts: no reduction. A token's experts are added in
// ascending order of their ids, whatever else is in the step.
void ExpertsOp::down_panel(Team& team, int64_t panel) const {
  auto* sums = static_cast<float*>(team.scratch(round_up(sizeof(float) * n * kPanelRows, 64)));
  std::fill(sums, sums + static_cast<int64_t>(n) * kPanelRows, 0.0f);
  alignas(64) float tile[kMostTokens * kPanelRows];
  const void* rows[kMostTokens];
  for (int a = 1; a <= active[0]; ++a) {
    const int expert = active[a];
    const uint8_t* next = a < active[0] ? down->panel(active[a + 1], panel).data : nullptr;
    for (int i0 = starts[expert]; i0 < starts[expert + 1]; i0 += kMostTokens) {
      const int tokens = std::min(kMostTokens, starts[expert + 1] - i0);
      for (int i = 0; i < tokens; ++i) rows[i] = h.row(down->integer(), i0 + i);
      k->gemm[down->type](down->panel(expert, panel), next, down->cols, rows, tokens, tile);
      for (int i = 0; i < tokens; ++i) {
        const int route = routes[i0 + i];
        k->axpy(weights[route], tile + i * kPanelRows, kPanelRows, sums + route / top_k * kPanelRows);
      }
    }
  }
  put(panel, sums);
}

// The same in two passes, with the same bits: first the products of one expert.
void ExpertsOp::down_part(int64_t rank, int64_t panel) const {
  const int expert = active[1 + rank];
  const Panel own = down->panel(expert, panel);
  const bool last = panel + 1 == down->panels;
  const uint8_t* next =
      last && rank + 1 < active[0] ? down->panel(active[2 + rank], 0).data : own.data + down->panel_bytes;
  alignas(64) float tile[kMostTokens * kPanelRows];
  const void* rows[kMostTokens];
  const int valid = down->valid_rows(panel);
  for (int i0 = starts[expert]; i0 < starts[expert + 1]; i0 += kMostTokens) {
    const int tokens = std::min(kMostTokens, starts[expert + 1] - i0);
    for (int i = 0; i < tokens; ++i) rows[i] = h.row(down->integer(), i0 + i);
    k->gemm[down->type](own, next, down->cols, rows, tokens, tile);
    for (int i = 0; i < tokens; ++i) {
      std::copy_n(tile + i * kPanelRows, valid, parts + (i0 + i) * down->rows + panel * kPanelRows);
    }
  }
}

// Then their weighted sums.
void ExpertsOp::add_parts(Team& team, int64_t panel) const {
  auto* sums = static_cast<float*>(team.scratch(round_up(sizeof(float) * n * kPanelRows, 64)));
  std::fill(sums, sums + static_cast<int64_t>(n) * kPanelRows, 0.0f);
  const int valid = down->valid_rows(panel);
  alignas(64) float tile[kPanelRows] = {};
  for (int i = 0; i < starts[down->experts]; ++i) {
    const int route = routes[i];
    std::copy_n(parts + i * down->rows + panel * kPanelRows, valid, tile);
    k->axpy(weights[route], tile, kPanelRows, sums + route / top_k * kPanelRows);
  }
  put(panel, sums);
}

// sums [n, 32]: the panel's rows of x.
void ExpertsOp::put(int64_t panel, const float* sums) const {
  const int valid = down->valid_rows(panel);
  for (int t = 0; t < n; ++t) {
    float* out = x + t * down->rows + panel * kPanelRows;
    const float* sum = sums + t * kPanelRows;
    for (int r = 0; r < valid; ++r) out[r] = add ? out[r] + sum[r] : sum[r];
  }
}

void ReadOp::operator()(Team& team) const {
  constexpr int64_t kChunk = 1 << 16;
  team.for_last_units(static_cast<int64_t>(matrix->bytes) / kChunk, [&](int64_t unit) {
    const uint8_t* p = matrix->begin() + unit * kChunk;
    for (int64_t i = 0; i < kChunk; i += 64) {
      __builtin_prefetch(p + i + 4096);
      // One load brings the whole line; the empty assembly keeps it from being optimised away.
      const uint64_t word = *reinterpret_cast<const uint64_t*>(p + i);
      asm volatile("" ::"r"(word));
    }
  });
}

}  // namespace moeserve
