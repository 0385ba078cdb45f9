"""The contributions of a sandwiched layer to x, computed on the CPU for an observer."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.norm import reference
from moeserve.kernels.norm.sandwich_norms import SandwichNorms


def added_after_norms(x: Tensor, dense: Tensor, rest: Tensor, norms: SandwichNorms, eps: float) -> Tensor:
    """Returns what a layer adds to x, float32 [rows, hidden] on the CPU. dense: output of the feed-forward that all
    tokens pass, used only if parts have norms of their own. rest: the sum of the other parts, or of all parts if they
    have no norms of their own. eps: added to the mean square under the norm's root."""
    x, factor = x.cpu(), torch.ones(1) if norms.factor is None else norms.factor.cpu()
    if norms.parts is None:
        post_eps = eps if norms.post_norm_eps is None else norms.post_norm_eps
        after = (x + reference.norm(rest, norms.output.cpu(), post_eps)) * factor
        return (after - x).float()
    after = reference.sandwich_sum(
        x, dense.cpu(), rest, norms.parts.dense_output.cpu(), norms.parts.experts_output.cpu(), norms.output.cpu(),
        factor, eps,
    )  # fmt: skip
    return (after - x).float()


def around_own_input(
    x: Tensor, change: Tensor, projected: Tensor, norms: SandwichNorms, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the residual after attention, and the sum of what the layer's feed-forward and its own input add to it:
    float32 [rows, hidden] each, on the CPU. x: the residual after the feed-forward, which changed it by `change`.
    projected: what the layer adds after `norms`. eps: added to the mean square under the norm's root."""
    before = x.cpu() - change
    return before, change + added_after_norms(x, projected, projected, norms, eps)
