"""The specification of index keys that are pooled by learnt weights: GLM-5.3-Flash
(https://huggingface.co/zai-org/GLM-5.3-Flash).

A block of keys (`ChoiceRule`, without local blocks) has one index key, a mean of its tokens' by column. A token's
weight in a column is the softmax, over the block, of its gate and a bias of its place in the block. Nothing rotates.
Blocks are scored as in `reference.index_scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pooled_keys(keys: Tensor, gates: Tensor, norm: Tensor, bias: Tensor, eps: float, ape: Tensor) -> Tensor:
    """Returns the index keys of a sequence's complete blocks, float64 [blocks, dim]. keys, gates [tokens, dim]: keys
    before their LayerNorm, whose weight and bias are norm and bias, [dim]; ape [keys of a block, dim]. eps: added to
    the variance under the LayerNorm's root."""
    pooled, dim = ape.shape
    blocks = len(keys) // pooled
    normed = torch.nn.functional.layer_norm(keys.double(), (dim,), norm.double(), bias.double(), eps)
    normed, gates = (x[: blocks * pooled].double().view(blocks, pooled, dim) for x in (normed, gates))
    return ((gates + ape.double()).softmax(dim=1) * normed).sum(dim=1)
