#include "ops.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

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
    float* row = x + t * cols;
    dequantize_row(type, table + ids[t] * stride, cols, row);
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < cols; ++i) row[i] *= scale;
  });
}

void NormOp::operator()(Team& team) const {
  team.last_phase();
  team.for_units(n, [&](int64_t i) {
    const float* row = x + (rows != nullptr ? rows[i] : i) * y.cols;
    float* out = y.f32 + i * y.cols;
    k->rms_norm(row, w, eps, static_cast<int>(y.cols), out);
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

void SoftcapOp::operator()(Team& team) const {
  constexpr int64_t kPart = 1 << 12;
  const int64_t parts = (cols + kPart - 1) / kPart;
  team.for_units(n * parts, [&](int64_t unit) {
    const int64_t from = unit % parts * kPart;
    k->softcap(cap, static_cast<int>(std::min(kPart, cols - from)), x + unit / parts * cols + from);
  });
}

namespace {

// The 32 outputs of one panel of matrix j for all tokens.
void linear_panel(const LinearOp& op, int j, int64_t panel, Claim& claim) {
  const Matrix& m = *op.w[j];
  const int valid = m.valid_rows(panel);
  alignas(64) float tile[kMostTokens * kPanelRows];
  const void* rows[kMostTokens];
  for (int t0 = 0; t0 < op.n; t0 += kMostTokens) {
    const int tokens = std::min(kMostTokens, op.n - t0);
    for (int t = 0; t < tokens; ++t) rows[t] = op.x.row(m.integer(), t0 + t);
    op.k->gemm[m.type](m.panel(0, panel), nullptr, m.cols, rows, tokens, tile);
    if (op.bias[j] != nullptr) add_bias(op.bias[j] + panel * kPanelRows, valid, tokens, tile);
    if (!claim()) return;
    for (int t = 0; t < tokens; ++t) {
      float* o = op.out[j] + (t0 + t) * m.rows + panel * kPanelRows;
      const float* from = tile + t * kPanelRows;
      for (int r = 0; r < valid; ++r) o[r] = op.add ? o[r] + from[r] : from[r];
    }
  }
}

}  // namespace

void LinearOp::operator()(Team& team) const {
  team.last_phase();
  team.for_claimed_matrices(
      count, [&](int j) { return w[j]->panels; },
      [&](int j, int64_t panel, Claim& claim) { linear_panel(*this, j, panel, claim); });
}

BytesAhead LinearOp::reads_first(const Team& team) const {
  const auto [j, panel, panels] = team.own_panels(count, [&](int i) { return w[i]->panels; });
  if (panels == 0 || !w[j]->packed()) return {};
  return {w[j]->panel(0, panel).data, static_cast<ptrdiff_t>(panels * w[j]->panel_bytes)};
}

void KvPool::store(const Kernels& k, const float* x, int count, int64_t at) const {
  if (is_q8()) {
    k.quantize_kv(x, count, codes() + at, scales + at / 32);
  } else {
    k.to_half(x, count, halves() + at);
  }
}

void RopeStoreOp::norm_rotate(float* x, int num, const float* norm, bool full, int64_t token) const {
  if (norm != nullptr && full) k->rms_norm(x, norm, eps, num * dim, x);
  for (int h = 0; h < num; ++h) {
    float* head = x + h * dim;
    if (norm != nullptr && !full) k->rms_norm(head, norm, eps, dim, head);
    k->rope(head, cos + token * (rotary / 2), sin + token * (rotary / 2), rotary);
  }
}

void RopeStoreOp::operator()(Team& team) const {
  // A KV head and its heads are a piece of work, but where a norm is over all heads.
  const int parts = full_q_norm || full_k_norm ? 1 : kv_heads;
  team.last_phase();
  const int q_count = heads / parts, kv_count = kv_heads / parts;
  team.for_units(int64_t{n} * parts, [&](int64_t unit) {
    const int64_t t = unit / parts;
    float* own_q = q + unit * q_count * dim;
    const int64_t kv = unit * kv_count * dim;  // where its numbers of `key` and `value` begin
    norm_rotate(own_q, q_count, q_norm, full_q_norm, t);
    k->scale(scale, q_count * dim, own_q);
    for (int h = 0; v_norm != nullptr && h < kv_count; ++h) {
      k->rms_norm(value_source + kv + h * dim, v_norm, eps, dim, value + kv + h * dim);
    }
    norm_rotate(key + kv, kv_count, k_norm, full_k_norm, t);
    const int64_t at = (int64_t{slots[t]} * parts + unit % parts) * kv_count * dim;
    keys.store(*k, key + kv, kv_count * dim, at);
    values.store(*k, value + kv, kv_count * dim, at);
  });
}

void ReadOp::operator()(Team& team) const {
  constexpr int64_t kChunk = 1 << 16;
  team.for_units(static_cast<int64_t>(matrix->bytes) / kChunk, [&](int64_t unit) {
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
