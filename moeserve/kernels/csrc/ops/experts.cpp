// The routed experts of a layer: divides panels and experts among threads, and fixes the order in which a token's
// experts are added.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace moeserve {
namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

int ExpertsOp::compute(Team& team, bool is_whole) const {
  if (lora.any()) shrink_inputs(team);
  BytesAhead ahead = down_first(team);
  team.for_claimed_panels(
      num_active(), gate->panels,
      [&](int64_t rank, int64_t panel, Claim& claim) { gate_up(rank, panel, claim); },
      [&] { return ahead.fetch(); });
  if (lora.down != nullptr) shrink_intermediates(team);
  const int adapted = lora.any() + (lora.down != nullptr);
  if (sums_at_once) {
    if (is_whole) team.last_phase();
    team.for_claimed_panels(
        1, down->panels, [&](int64_t, int64_t panel, Claim& claim) { down_panel(team, panel, claim); },
        Team::no_idle);
    return adapted + 2;
  }
  if (keeps_parts()) {
    if (wave.only_products && is_whole) team.last_phase();
    team.for_claimed_panels(
        num_active(), down->panels,
        [&](int64_t rank, int64_t panel, Claim& claim) { down_part(rank, panel, claim); }, Team::no_idle);
    if (wave.only_products) return adapted + 2;
    if (is_whole) team.last_phase();
    team.for_claimed_panels(
        1, down->panels, [&](int64_t, int64_t panel, Claim& claim) { add_parts(team, panel, claim); },
        Team::no_idle);
    return adapted + 3;
  }
  if (is_whole) team.last_phase();
  team.for_panels(1, down->panels, [&](int64_t, int64_t panel) {
    Claim alone(nullptr, 0);
    down_panel(team, panel, alone);
  });
  return adapted + 2;
}

// For threads that finish early between the two products: prefetches what the thread will read first, so that memory is
// not idle. Saves 3% of a layer's time at 1 and at 4 tokens with 16 threads (medians of four alternating runs with and
// without; runs varied by 5%).
BytesAhead ExpertsOp::down_first(const Team& team) const {
  if (num_active() == 0 || !down->packed() || n * top_k > kMostParts) return {};
  const auto [rank, panel] = team.first_pair(sums_at_once ? 1 : num_active(), down->panels);
  return {down->panel(place_of(active_expert(rank)), panel).data,
          static_cast<ptrdiff_t>((down->panels - panel) * down->panel_bytes)};
}

ExpertsOp::Rows ExpertsOp::rows_of(int expert) const {
  const volatile int32_t* now = starts + expert;
  return {now[0], now[1]};
}

int ExpertsOp::active_expert(int64_t rank) const {
  const volatile int32_t* now = active + 1 + wave.first + rank;
  const int32_t expert = *now;
  return std::min(expert, static_cast<int32_t>(num_experts()) - 1);
}

ExpertsOp::Rows ExpertsOp::wave_rows() const {
  if (wave.count < 0 || wave.adds_all) return {0, std::min(starts[num_experts()], n * top_k)};
  if (wave.count == 0) return {0, 0};
  return {rows_of(active_expert(0)).begin, rows_of(active_expert(wave.count - 1)).end};
}

float* ExpertsOp::begin_sums(Team& team, int64_t panel) const {
  const size_t rows = std::max(n, most_rows);
  auto* sums = static_cast<float*>(team.scratch(round_up(sizeof(float) * rows * kPanelRows, 64)));
  std::fill(sums, sums + static_cast<int64_t>(n) * kPanelRows, 0.0f);
  if (wave.is_first) return sums;
  const int valid = down->valid_rows(panel);
  for (int t = 0; t < n; ++t) {
    std::copy_n(wave.sums + t * down->rows + panel * kPanelRows, valid, sums + t * kPanelRows);
  }
  return sums;
}

// Counting sort of the n * top_k routes by expert, on one thread: at 512 tokens it takes 10 us of a layer's 20 ms.
bool ExpertsOp::sort_routes() const {
  const int routes_n = n * top_k;
  const int experts = static_cast<int>(num_experts());
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
    if (expert_token_counts != nullptr) {
      expert_token_counts[e] += starts[e + 1];
      expert_token_counts[experts + e] += starts[e + 1] > 0;
    }
    starts[e + 1] += starts[e];
  }
  const int routed = starts[experts];
  for (int i = routes_n - 1; i >= 0; --i)
    if (ids[i] >= 0) routes[--starts[ids[i] + 1]] = i;  // now starts[e + 1] is e's start
  for (int e = 0; e < experts; ++e) starts[e] = starts[e + 1];
  starts[experts] = routed;
  return true;
}

// Computes y times the adapters' A of gate and up, by row of h.
void ExpertsOp::shrink_inputs(Team& team) const {
  const int routed = starts[num_experts()], parts = lora.stride / kLoraRows;
  const Rows mine = wave_rows();
  team.for_units(int64_t{2} * routed * parts, [&](int64_t unit) {
    const int64_t item = unit / parts, i = item % routed;
    if (i < mine.begin || i >= mine.end) return;
    const LoraTable* table = item < routed ? lora.gate : lora.up;
    const int route = routes[i], adapter = lora.adapters[route / top_k];
    if (table == nullptr || adapter < 0) return;
    shrink(*k, table->pair(adapter, ids[route]), y.cols, static_cast<int>(unit % parts),
           y.f32 + route / top_k * y.cols, lora.shrunk + item * lora.stride);
  });
}

// Computes h times the adapters' A of down; h must be complete.
void ExpertsOp::shrink_intermediates(Team& team) const {
  const int routed = starts[num_experts()], parts = lora.stride / kLoraRows;
  const Rows mine = wave_rows();
  team.for_units(int64_t{routed} * parts, [&](int64_t unit) {
    const int64_t i = unit / parts;
    if (i < mine.begin || i >= mine.end) return;
    const int route = routes[i], adapter = lora.adapters[route / top_k];
    if (adapter < 0) return;
    shrink(*k, lora.down->pair(adapter, ids[route]), h.cols, static_cast<int>(unit % parts),
           h.f32 + i * h.cols, lora.shrunk + i * lora.stride);
  });
}

void ExpertsOp::add_lora(const LoraTable* table, int part, int expert, int64_t panel, int i0, int tokens,
                         float* tile) const {
  if (table == nullptr) return;
  const float* shrunk = lora.shrunk + (int64_t{part} * starts[num_experts()] + i0) * lora.stride;
  for (int i = 0; i < tokens; ++i) {
    const int adapter = lora.adapters[routes[i0 + i] / top_k];
    if (adapter < 0) continue;
    expand(*k, table->pair(adapter, expert), panel, shrunk + int64_t{i} * lora.stride, tile + i * kPanelRows);
  }
}

// Applies the activation to n gates and ups; the result replaces g.
void ExpertsOp::activate(float* g, const float* u, int n) const {
  if (options.activation == Activation::kSwigluOai)
    return k->swiglu_oai(g, u, n, options.limit, options.alpha, g);
  if (options.activation == Activation::kGelu) return k->gelu_mul(g, u, n, g);
  if (options.activation == Activation::kRelu) return k->relu_mul(g, u, n, g);
  if (options.activation == Activation::kSitu) return k->situ_mul(g, u, n, options.alpha, options.limit, g);
  // SiLU is negative only for negative gates, so SiLU(min(gate, limit)) = min(SiLU(gate), SiLU(limit)).
  const float limit = options.limit;
  const float most_silu =
      options.activation == Activation::kClampedSilu ? limit / (1.0f + std::exp(-limit)) : limit;
  if (limit > 0) return k->clamped_silu_mul(g, u, n, most_silu, limit, g);
  k->silu_mul(g, u, n, g);
}

// Computes 32 rows of gate and up of the rank-th active expert, for all its tokens.
void ExpertsOp::gate_up(int64_t rank, int64_t panel, Claim& claim) const {
  const int expert = active_expert(rank);
  const int64_t row0 = panel * kPanelRows;
  const int64_t place = place_of(expert);
  const Panel gate_panel = gate->panel(place, panel), up_panel = up->panel(place, panel);
  const bool last = panel + 1 == gate->panels;
  const uint8_t* next = last && rank + 1 < num_active()
                            ? gate->panel(place_of(active_expert(rank + 1)), 0).data
                            : gate_panel.data + gate->panel_bytes;
  const bool gated = gate != up;
  alignas(64) float g[kMostTokens * kPanelRows], of_up[kMostTokens * kPanelRows];
  float* u = gated ? of_up : g;
  const void* gate_rows[kMostTokens];
  const void* up_rows[kMostTokens];
  const auto [begin, end] = rows_of(expert);
  for (int i0 = begin; i0 < end; i0 += kMostTokens) {
    const int tokens = std::min(kMostTokens, end - i0);
    for (int i = 0; i < tokens; ++i) {
      const int token = routes[i0 + i] / top_k;
      gate_rows[i] =
          gate_input.rows > 0 ? gate_input.row(gate->integer(), i0 + i) : y.row(gate->integer(), token);
      up_rows[i] = up_input.rows > 0 ? up_input.row(up->integer(), i0 + i) : y.row(up->integer(), token);
    }
    k->multiply(gate->type, gate_panel, gated ? up_panel.data : next, gate->cols, gate_rows, tokens, g);
    if (gated) k->multiply(up->type, up_panel, next, up->cols, up_rows, tokens, u);
    if (options.gate_bias != nullptr) {
      add_bias(options.gate_bias + expert * gate->rows + row0, kPanelRows, tokens, g);
    }
    if (gated && options.up_bias != nullptr) {
      add_bias(options.up_bias + expert * up->rows + row0, kPanelRows, tokens, u);
    }
    add_lora(lora.gate, 0, expert, panel, i0, tokens, g);
    if (gated) add_lora(lora.up, 1, expert, panel, i0, tokens, u);
    for (int i = 0; options.weighs_input && i < tokens;
         ++i) {  // the products are linear in the input, so its weight can be applied afterwards
      const float weight = weights[routes[i0 + i]];
      k->scale(weight, kPanelRows, g + i * kPanelRows);
      if (gated) k->scale(weight, kPanelRows, u + i * kPanelRows);
    }
    activate(g, u, tokens * kPanelRows);
    if (!claim()) return;
    for (int i = 0; i < tokens; ++i) {
      const float* row = g + i * kPanelRows;
      if (down->integer()) {
        k->quantize(row, kPanelRows, h.codes(i0 + i) + row0, h.metas(i0 + i) + panel);
      }
      if (!down->integer() || lora.down != nullptr) {
        std::copy(row, row + kPanelRows, h.f32 + int64_t{i0 + i} * h.cols + row0);
      }
    }
  }
}

// One thread owns the panel's 32 output rows for all experts, so no reduction is needed. A token's experts are added in
// ascending order of their ids, independent of the rest of the step.
void ExpertsOp::down_panel(Team& team, int64_t panel, Claim& claim) const {
  float* sums = begin_sums(team, panel);
  alignas(64) float tile[kMostTokens * kPanelRows];
  const void* rows[kMostTokens];
  const int count = num_active();
  for (int rank = 0; rank < count; ++rank) {
    const int expert = active_expert(rank);
    const uint8_t* next =
        rank + 1 < count ? down->panel(place_of(active_expert(rank + 1)), panel).data : nullptr;
    const auto [begin, end] = rows_of(expert);
    for (int i0 = begin; i0 < end; i0 += kMostTokens) {
      const int tokens = std::min(kMostTokens, end - i0);
      for (int i = 0; i < tokens; ++i) rows[i] = h.row(down->integer(), i0 + i);
      k->multiply(down->type, down->panel(place_of(expert), panel), next, down->cols, rows, tokens, tile);
      add_down_bias(expert, panel, tokens, tile);
      add_lora(lora.down, 0, expert, panel, i0, tokens, tile);
      for (int i = 0; i < tokens; ++i) {
        const int route = routes[i0 + i];
        k->axpy(weight_of(route), tile + i * kPanelRows, kPanelRows, sums + route / top_k * kPanelRows);
      }
    }
  }
  if (claim()) put(panel, sums);
}

void ExpertsOp::add_down_bias(int expert, int64_t panel, int tokens, float* tile) const {
  if (options.down_bias == nullptr) return;
  const float* bias = options.down_bias + expert * down->rows + panel * kPanelRows;
  add_bias(bias, down->valid_rows(panel), tokens, tile);
}

// The same in two passes, with the same bits. First pass: the products of one expert.
void ExpertsOp::down_part(int64_t rank, int64_t panel, Claim& claim) const {
  const int expert = active_expert(rank);
  const Panel own = down->panel(place_of(expert), panel);
  const bool last = panel + 1 == down->panels;
  const uint8_t* next = last && rank + 1 < num_active()
                            ? down->panel(place_of(active_expert(rank + 1)), 0).data
                            : own.data + down->panel_bytes;
  alignas(64) float tile[kMostTokens * kPanelRows];
  const void* rows[kMostTokens];
  const int valid = down->valid_rows(panel);
  const auto [begin, end] = rows_of(expert);
  for (int i0 = begin; i0 < end; i0 += kMostTokens) {
    const int tokens = std::min(kMostTokens, end - i0);
    for (int i = 0; i < tokens; ++i) rows[i] = h.row(down->integer(), i0 + i);
    k->multiply(down->type, own, next, down->cols, rows, tokens, tile);
    add_down_bias(expert, panel, tokens, tile);
    add_lora(lora.down, 0, expert, panel, i0, tokens, tile);
    if (!claim()) return;
    for (int i = 0; i < tokens; ++i) {
      std::copy_n(tile + i * kPanelRows, valid, parts + (i0 + i) * down->rows + panel * kPanelRows);
    }
  }
}

// Second pass: their weighted sums.
void ExpertsOp::add_parts(Team& team, int64_t panel, Claim& claim) const {
  float* sums = begin_sums(team, panel);
  const int valid = down->valid_rows(panel);
  alignas(64) float tile[kPanelRows] = {};
  const auto [begin, end] = wave_rows();
  for (int i = begin; i < std::min(end, n * top_k); ++i) {
    const int route = routes[i];
    std::copy_n(parts + i * down->rows + panel * kPanelRows, valid, tile);
    k->axpy(weight_of(route), tile, kPanelRows, sums + route / top_k * kPanelRows);
  }
  if (claim()) put(panel, sums);
}

// Writes or adds sums [n, 32] to the panel's rows of x; before the last wave, keeps them for the next one.
void ExpertsOp::put(int64_t panel, const float* sums) const {
  const int valid = down->valid_rows(panel);
  if (!wave.is_last) {
    for (int t = 0; t < n; ++t)
      std::copy_n(sums + t * kPanelRows, valid, wave.sums + t * down->rows + panel * kPanelRows);
    return;
  }
  for (int t = 0; t < n; ++t) {
    float* out = x + t * down->rows + panel * kPanelRows;
    const float* sum = sums + t * kPanelRows;
    for (int r = 0; r < valid; ++r) out[r] = add ? out[r] + sum[r] : sum[r];
  }
}

}  // namespace moeserve
