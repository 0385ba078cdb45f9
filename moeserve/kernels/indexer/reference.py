"""The specification of the indexer of sparse attention (DeepSeek Sparse Attention, https://arxiv.org/abs/2512.02556,
section 2.1).

Each token has an index key, and each query some index queries. A key's score is the weighted sum, over the heads, of
ReLU(query . key). A query attends to the `top` keys with the highest scores. Positive factors that all scores of a
query share (of the number of heads, of the width) are left out, because they do not change the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.latent.reference import rotate_pairs


def rotate_halves(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [n, any number, rotary], float64, with pairs that are half the width apart rotated by the angles
    cos, sin [n, rotary / 2]."""
    a, b = heads.double().chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def index_store(
    q: Tensor,
    keys: Tensor,
    norm: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    index_keys: Tensor,
    *,
    in_pairs: bool,
) -> Tensor:
    """Returns the index queries, rotated, in float64 [n, heads, dim]. Stores each token's LayerNorm(key), rotated, in
    the KV pool.

    q [n, heads, dim]; keys [n, dim]; norm, bias [dim]; cos, sin [n, rotary / 2]: the first `rotary` numbers of a head
    rotate, in pairs of neighbours or in halves. slots [n]; index_keys [slots, 1, dim], float16 (or wider): rows `slots`
    are written. eps: added to the variance under the LayerNorm's root.
    """
    rotary, rotate = 2 * cos.shape[1], rotate_pairs if in_pairs else rotate_halves

    def rotated(heads: Tensor) -> Tensor:
        return torch.cat([rotate(heads[..., :rotary], cos, sin), heads[..., rotary:].double()], dim=-1)

    x = keys.double()
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:], norm.double(), bias.double(), eps)
    index_keys[slots.long(), 0] = rotated(normed[:, None])[:, 0].to(index_keys.dtype)
    return rotated(q)


def index_scores(q: Tensor, weights: Tensor, index_keys: Tensor) -> Tensor:
    """Returns the score of each key for one row, float32 [keys]. q [heads, dim]; weights [heads]; index_keys [keys,
    dim], in the order of positions."""
    return weights.float() @ torch.relu(q.float() @ index_keys.float().T)


def choose_keys(scores: Tensor, top: int) -> Tensor:
    """Returns the positions of the `top` highest scores in ascending order, int64; all if there are no more. If scores
    are equal, the first positions are chosen. scores [keys]."""
    highest = torch.sort(scores, descending=True, stable=True).indices[:top]
    return highest.sort().values
