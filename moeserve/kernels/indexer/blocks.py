"""The specification of indexers that choose blocks of keys (`ChoiceRule`).

Each token has an index key, and each query some index queries; both are RMS-normalised and rotated. In
Qwen3.8-Flash-Next (https://huggingface.co/Qwen/Qwen3.8-Flash-Next) the index key of a block is the mean of its
tokens', normalised and rotated after that, and its score is the sum, over the heads, of ReLU(query . key). In
MiniMax-M3 (https://huggingface.co/MiniMaxAI/MiniMax-M3) each KV head has an index query, and a block's score is the
highest of query . key. Positive factors that all scores of a query share are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.kernels.indexer.reference import choose_keys, rotate_halves


def normed_and_rotated(x: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [n, heads, dim] RMS-normalised, and their first `rotary` numbers rotated as halves, in float64.
    norm [dim]; cos, sin [n, rotary / 2]. eps: added to the mean square under the norm's root."""
    x, rotary = x.double(), 2 * cos.shape[1]
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.double()
    return torch.cat([rotate_halves(normed[..., :rotary], cos, sin), normed[..., rotary:]], dim=-1)


def block_keys(keys: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, rule: ChoiceRule) -> Tensor:
    """Returns the index keys of a sequence, float64 [count, dim]: one of each complete block, or with `rule.local` of
    each token. keys [tokens, dim], before the norm; norm [dim]; cos, sin [tokens, rotary / 2], by position. eps: added
    to the mean square under the norm's root."""
    pooled = 1 if rule.local else rule.block
    count = len(keys) // pooled
    means = keys[: count * pooled].double().view(count, pooled, -1).mean(1)
    first = slice(0, count * pooled, pooled)
    return normed_and_rotated(means[:, None], norm, eps, cos[first], sin[first])[:, 0]


def block_scores(q: Tensor, index_keys: Tensor, position: int, rule: ChoiceRule) -> Tensor:
    """Returns the scores of the blocks before the tail of the query at `position`, float64 [choices, blocks]. q
    [heads, dim], index_keys [any, dim], both normalised and rotated."""
    blocks = rule.scored_blocks(position)
    if not rule.local:
        scores = torch.relu(q.double() @ index_keys[:blocks].double().T).sum(0, keepdim=True)
    else:
        keys = index_keys[: blocks * rule.block].double()
        scores = (q.double() @ keys.T).view(len(q), blocks, rule.block).amax(-1)
    return scores


def attended_positions(scores: Tensor, position: int, rule: ChoiceRule) -> list[list[int]]:
    """Returns the positions that the query at `position` attends to, ascending, a list for each row of scores: the
    positions of its rule.top chosen blocks, then those after the last scored block. scores: float32 [choices, blocks],
    see `block_scores`."""
    tail = range(rule.scored_blocks(position) * rule.block, position + 1)
    return [
        [
            *(
                block * rule.block + i
                for block in choose_keys(row, rule.top).tolist()
                for i in range(rule.block)
            ),
            *tail,
        ]
        for row in scores
    ]
