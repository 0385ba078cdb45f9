"""The change that norms behind a block make to its output, computed on the CPU for an observer."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.norm import reference
from moeserve.kernels.norm.sandwich_norms import SandwichNorms


def added_behind_norms(x: Tensor, dense: Tensor, rest: Tensor, norms: SandwichNorms, eps: float) -> Tensor:
    """What a layer adds to x, float32 [rows, hidden] on the CPU. dense: the output of what every token passes, used
    where parts are normalised by themselves; rest: the sum of the others, or of all."""
    x, factor = x.cpu(), torch.ones(1) if norms.factor is None else norms.factor.cpu()
    if norms.parts is None:
        after = (x + reference.norm(rest, norms.output.cpu(), eps)) * factor
        return (after - x).float()
    after = reference.sandwich_sum(
        x, dense.cpu(), rest, norms.parts.dense_output.cpu(), norms.parts.experts_output.cpu(), norms.output.cpu(),
        factor, eps,
    )  # fmt: skip
    return (after - x).float()
