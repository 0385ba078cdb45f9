"""The specification of the steps before and after attention in latent attention (MLA,
https://arxiv.org/abs/2405.04434, section 2.1).

In absorbed form, the keys' up-projection multiplies q's non-rotary part instead of every cached vector. So all
heads attend to one vector per token, [latent | rotated key], whose latent part is also the value. The values'
up-projection comes after attention. Attention itself is attention/reference.py's with one KV head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.norm.reference import norm as rms_norm


def rotate_pairs(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [n, any number, rotary] with pairs of neighbours rotated by the angles whose cosines and sines are
    cos, sin [n, rotary / 2], in float64, as in https://arxiv.org/abs/2104.09864. A pair's results are placed half the
    width apart; products of q and k do not depend on that order."""
    a, b = heads[..., 0::2].double(), heads[..., 1::2].double()
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def latent_store(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the two parts of q, both times `scale`, in float64: [n, heads, nope], not rotated, and [n, heads,
    rotary], rotated. Stores each token's [norm(latent) | rotated key] in the KV pool.

    q [n, heads, nope + rotary]; latent [n, rank + rotary]; norm [rank]; cos, sin [n, rotary / 2]; slots [n]; keys
    [slots, 1, rank + rotary], float16 (or wider): rows `slots` are written. eps: added to the mean square under the
    norm's root."""
    rank, rotary = len(norm), 2 * cos.shape[1]
    rotated = rotate_pairs(latent[:, None, rank:], cos, sin)[:, 0]
    stored = torch.cat([rms_norm(latent[:, :rank], norm, eps).double(), rotated], dim=-1)
    keys[slots.long(), 0] = stored.to(keys.dtype)
    nope = q.shape[-1] - rotary
    return q[..., :nope].double() * scale, rotate_pairs(q[..., nope:], cos, sin) * scale


def linear_by_head(x: Tensor, weights: Tensor) -> Tensor:
    """Returns W_h x[t, h] for each head, float64 [n, heads, rows]. x [n, heads, cols]; weights [heads, rows, cols]."""
    return torch.einsum("thc,hrc->thr", x.double(), weights.double())
