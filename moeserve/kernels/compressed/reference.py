"""The specification of compressed attention, in float64: DeepSeek-V4
(https://huggingface.co/docs/transformers/model_doc/deepseek_v4).

All heads attend to one vector per token, which is both its key and its value, within a window. Besides, each block of
`ratio` tokens has an entry, a vector of the same kind. A row attends to the entries of all complete blocks up to its
own token, or only to the ones among them that an indexer chooses. Keys are rotated by their positions, an entry by the
first position of its block. Values are the same rotated vectors, so the output is rotated back by the row's position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.indexer.reference import choose_keys, index_scores
from moeserve.kernels.norm.reference import norm as rms_norm


class Angles(NamedTuple):
    """The angles of all positions: [positions, rotary / 2]."""

    cos: Tensor
    sin: Tensor


def rotate_tail(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [n, any number, dim], float64, with pairs of neighbours in their last `rotary` numbers rotated,
    each pair in its own place. cos, sin: [n, rotary / 2]."""
    rotary = 2 * cos.shape[1]
    head, tail = heads.double().split([heads.shape[-1] - rotary, rotary], dim=-1)
    a, b, c, s = tail[..., 0::2], tail[..., 1::2], cos.double()[:, None], sin.double()[:, None]
    return torch.cat([head, torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2)], dim=-1)


def queries(q: Tensor, eps: float, scale: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns q [n, heads, dim], with each head normalised without a weight, multiplied by `scale`, and its last
    numbers rotated by cos and sin [n, rotary / 2], in float64. eps: added to the mean square under the norm's root."""
    return rotate_tail(rms_norm(q, torch.ones(q.shape[-1]), eps).double() * scale, cos, sin)


def keys(kv: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the tokens' keys, float64 [n, dim]: kv [n, dim] after RMSNorm with the weight norm [dim], with its last
    numbers rotated by cos and sin [n, rotary / 2]. eps: added to the mean square under the norm's root."""
    return rotate_tail(rms_norm(kv, norm, eps)[:, None], cos, sin)[:, 0]


def compress(kv: Tensor, gate: Tensor, bias: Tensor, norm: Tensor, eps: float, angles: Angles) -> Tensor:
    """Returns the entries of a sequence's complete blocks, normalised and rotated, float64 [blocks, dim].

    kv, gate [n, width] of its tokens from the first on; bias [ratio, width]; norm [dim]. By column, an entry is the
    mean of its tokens' kv, weighed by the softmax of gate + bias. With width == 2 * dim the tokens of the block before
    take part with their first `dim` columns, and its own with the last. eps: added to the mean square under the norm's
    root."""
    (ratio, width), dim = bias.shape, len(norm)
    blocks = len(kv) // ratio
    kv, gate = (x[: blocks * ratio].double().view(blocks, ratio, width) for x in (kv, gate))
    gate = gate + bias.double()
    if width == 2 * dim:
        before = torch.full((1, ratio, dim), -torch.inf, dtype=torch.float64)
        gate = torch.cat([torch.cat([before, gate[:-1, :, :dim]]), gate[:, :, dim:]], dim=1)
        kv = torch.cat([torch.cat([torch.zeros_like(before), kv[:-1, :, :dim]]), kv[:, :, dim:]], dim=1)
    entries = (gate.softmax(dim=1) * kv).sum(dim=1)
    first = torch.arange(blocks) * ratio
    return rotate_tail(rms_norm(entries, norm, eps)[:, None], angles.cos[first], angles.sin[first])[:, 0]


def chosen_entries(q: Tensor, weights: Tensor, index_keys: Tensor, complete: int, top: int) -> Tensor:
    """Returns the entries that a row attends to, int64, in ascending order: all `complete` ones if there are no more
    than `top`. q [heads, dim]; weights [heads]; index_keys [entries, dim]."""
    return choose_keys(index_scores(q, weights, index_keys[:complete]), top)


def attend(q: Tensor, attended: Tensor, sinks: Tensor) -> Tensor:
    """Computes one row's attention, softmax(q K^T) K, before its output is rotated back; returns float64 [heads, dim].
    q [heads, dim], scaled; attended [any, dim]: keys that are also values; sinks [heads]: one more logit per head,
    without a value."""
    scores = torch.cat([q.double() @ attended.double().T, sinks.double()[:, None]], dim=1)
    return scores.softmax(dim=1)[:, :-1] @ attended.double()


def rotate_back(out: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns attention's output [n, heads, dim] rotated by the negative angles of the rows' positions."""
    return rotate_tail(out, cos, -sin)
