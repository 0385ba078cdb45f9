"""The specification of the router's choice. The defaults are Qwen3's: softmax over all experts, top-k, renormalised."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.routing.options import DEFAULT_ROUTER, RouterOptions

# Added to the sum of sigmoid or sqrt_softplus scores before the division (DeepSeek-V3): if all scores are 0, weights
# are 0 instead of NaN.
SIGMOID_EPS = 1e-20


def route(
    logits: Tensor,
    top_k: int,
    router: RouterOptions = DEFAULT_ROUTER,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns each token's experts, best first (ties: lower id first), and their weights.

    logits [n, experts], finite; bias [experts]: added to scores for choosing, not to weights. expert_scale
    [experts]: multiplies the weights. given, [n, top_k]: the experts, where they are not chosen by score. Returns ids
    int32 [n, top_k] and weights float64 [n, top_k], which sum to 1 with the default options.
    """
    router.check(logits.shape[1], top_k)
    logits = logits.double()
    scores = _scores(logits, router)
    # Scores rise with logits: without bias and groups, logits choose the same experts, even where scores round to ties.
    choosing = logits if bias is None and router.groups == 1 else scores
    if bias is not None:
        choosing = choosing + bias.double()
    ids = torch.sort(_within_groups(choosing, router), dim=1, descending=True, stable=True).indices[:, :top_k]
    if given is not None:
        ids = given.long()
    if router.scoring == "softmax_topk" or (router.scoring == "softmax" and router.normalize):
        # A softmax over all experts and its renormalisation over the chosen is a softmax over the chosen.
        weights = logits.gather(1, ids).softmax(dim=1)
    else:
        weights = scores.gather(1, ids)
        if router.normalize:
            weights = weights / (weights.sum(dim=1, keepdim=True) + SIGMOID_EPS)
    if expert_scale is not None:
        weights = weights * expert_scale.double()[ids]
    return ids.int(), weights * router.scale


def _scores(logits: Tensor, router: RouterOptions) -> Tensor:
    if router.scoring == "sigmoid":
        return logits.sigmoid()
    if router.scoring == "sqrt_softplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return logits.softmax(dim=1) if router.scoring == "softmax" else logits


def _within_groups(choosing: Tensor, router: RouterOptions) -> Tensor:
    """Returns the scores with -inf outside each row's top groups; ties go to the lower group."""
    if router.groups == 1:
        return choosing
    groups: Tensor = choosing.unflatten(1, (router.groups, -1))
    best = groups.topk(min(router.group_best, groups.shape[2]), dim=2).values.sum(dim=2)
    kept = torch.sort(best, dim=1, descending=True, stable=True).indices[:, : router.top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
    return groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)


def select_streamed_routes(
    ids: Tensor, expert_map: Tensor, local_expert_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the indices of routes ids int32 [n, top_k] in expert_map int32 [experts] (-1 for negative ids), and
    the maximum of these and `local_expert_ids`."""
    streamed_ids = torch.where(ids >= 0, expert_map[ids.clamp(min=0)], -1)
    return streamed_ids, torch.maximum(local_expert_ids, streamed_ids)
