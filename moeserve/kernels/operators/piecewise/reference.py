"""The specification of piecewise attention, as in FlagAttention (https://github.com/FlagOpen/FlagAttention):
positions are embedded differently beyond a distance."""

from __future__ import annotations

import torch
from torch import Tensor


def piecewise_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    distance: int,
    causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns softmax(s) v and logsumexp(s) in float64: [batch, heads, m, dim] and [batch, heads, m].

    s = scale * q1 k1^T if the key is less than `distance` before the query or after it, else scale * q2 k2^T. q1,
    q2 [batch, heads, m, dim]; k1, k2, v [batch, kv_heads, n, dim]; query head h reads KV head h // (heads /
    kv_heads). The last query is at the last key's position. causal: a query sees no key after it; a query that sees
    none gives zeros and -inf. scale: default 1 / sqrt(dim).
    """
    weights, total, _ = _weights(q1, k1, q2, k2, distance, causal, _scale(q1, scale))
    return weights @ _for_heads(v, q1), total


def gradients(
    inputs: tuple[Tensor, ...], out_gradient: Tensor, distance: int, causal: bool, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Returns the gradients of q1, k1, q2, k2 and v from the result's: computed in float64, returned in the inputs'
    dtypes."""
    q1, k1, q2, k2, v = inputs
    scale = _scale(q1, scale)
    weights, _, is_far = _weights(q1, k1, q2, k2, distance, causal, scale)
    given = out_gradient.double()
    of_weights = given @ _for_heads(v, q1).mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    near, far = of_scores.masked_fill(is_far, 0.0), of_scores.masked_fill(~is_far, 0.0)
    found = (
        near @ _for_heads(k1, q1),
        _of_groups(near.mT @ q1.double(), v),
        far @ _for_heads(k2, q1),
        _of_groups(far.mT @ q2.double(), v),
        _of_groups(weights.mT @ given, v),
    )
    return tuple(gradient.to(x.dtype) for gradient, x in zip(found, inputs, strict=True))


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[3] ** -0.5) if scale is None else scale


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    """Returns keys or values repeated for each query head, in float64."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _of_groups(gradient: Tensor, v: Tensor) -> Tensor:
    """Returns sums over the query heads of each KV head."""
    batch, heads, *shape = gradient.shape
    return gradient.reshape(batch, v.shape[1], heads // v.shape[1], *shape).sum(2)


def _weights(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, distance: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the softmax of the scores and its logsumexp, and a mask of scores of the second pair: [m, n]."""
    m, n = q1.shape[2], k1.shape[2]
    near, far = (q.double() @ _for_heads(k, q).mT * scale for q, k in ((q1, k1), (q2, k2)))
    behind = (torch.arange(m, device=q1.device) + n - m)[:, None] - torch.arange(n, device=q1.device)
    is_far = behind >= distance
    scores = torch.where(is_far, far, near)
    if not causal:
        return scores.softmax(-1), scores.logsumexp(-1), is_far
    seen = behind >= 0
    some = seen.any(-1)
    # Rows that see nothing are treated as seeing everything until the end, so that no infinity enters their
    # gradients.
    scores = scores.masked_fill(~seen & some[:, None], -torch.inf)
    total = scores.logsumexp(-1).masked_fill(~some, -torch.inf)
    return scores.softmax(-1) * some[:, None], total, is_far
