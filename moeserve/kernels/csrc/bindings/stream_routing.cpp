// Stream's operations of routers: argument checks.
#include "stream.h"
#include "stream_checks.h"

namespace moeserve {
namespace {

Scoring scoring_named(const std::string& name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "sqrt_softplus") return Scoring::kSqrtSoftplus;
  if (name == "softmax_topk") return Scoring::kSoftmaxTopK;
  reject("router", "no scoring '" + name + "'");
}

struct ExpertTable {
  const int32_t *experts, *tokens;
};

// table: int32 [vocabulary, top_k], or None; tokens: int32 [n] then.
ExpertTable expert_table_arg(nanobind::handle table, nanobind::handle tokens, int n, int top_k,
                             int64_t experts) {
  if (table.is_none()) return {nullptr, nullptr};
  const int64_t vocabulary = tensor_arg(table, "table", Element::kInt32).rows;
  const ExpertTable found{rows_arg<int32_t>(table, "table", vocabulary, top_k),
                          rows_arg<int32_t>(tokens, "tokens", n, 1)};
  check_ids("token id", found.tokens, n, vocabulary);
  for (int i = 0; i < n; ++i) {
    check_ids("expert", found.experts + int64_t{found.tokens[i]} * top_k, top_k, experts);
  }
  return found;
}

}  // namespace

void Stream::route(Tensor logits, int n, Tensor ids, Tensor weights, const std::string& scoring,
                   bool normalize, float scale, int groups, int top_groups, int group_best, Tensor bias,
                   Tensor expert_scale, Tensor table, Tensor tokens) {
  const int64_t experts = tensor_arg(logits, "logits", Element::kFloat32).cols;
  const int64_t top_k = tensor_arg(ids, "workspace.ids", Element::kInt32).cols;
  if (groups < 1 || experts % groups != 0 || top_groups < 1 || top_groups > groups) {
    reject("router", std::to_string(experts) + " experts in " + std::to_string(groups) +
                         " groups, of which " + std::to_string(top_groups));
  }
  if (group_best < 1 || group_best > 2) reject("router", "a group_best of 1 or 2 wanted");
  if (top_k < 1 || top_k > experts / groups * top_groups) {
    reject("workspace.ids", "there are no " + std::to_string(top_k) + " experts to choose");
  }
  const ExpertTable by_token = expert_table_arg(table, tokens, n, static_cast<int>(top_k), experts);
  pool_.submit(RouteOp{rows_arg<float>(logits, "logits", n, experts),
                       optional_arg<float>(bias, "bias", experts),
                       optional_arg<float>(expert_scale, "expert_scale", experts),
                       by_token.experts,
                       by_token.tokens,
                       n,
                       static_cast<int>(experts),
                       static_cast<int>(top_k),
                       {scoring_named(scoring), normalize, scale, groups, top_groups, group_best},
                       rows_arg<int32_t>(ids, "workspace.ids", n, top_k),
                       rows_arg<float>(weights, "workspace.weights", n, top_k)});
}

void Stream::shared_gate(const Activations& y, int n, Tensor weight, Tensor ids, Tensor weights) {
  if (!weight.is_none()) {
    if (y.cols % 16 != 0) reject("y", "columns that 16 divides wanted");
    check_activations(y, "y", n, y.cols, false);
  }
  pool_.submit(SharedGateOp{&kernels_, y.f32, optional_arg<float>(weight, "weight", y.cols), n,
                            static_cast<int>(y.cols), rows_arg<int32_t>(ids, "routing.ids", n, 1),
                            rows_arg<float>(weights, "routing.weights", n, 1)});
}

}  // namespace moeserve
