"""The specification of sampling, in plain torch: one row at a time, float64, with a sort.

Params has the keyword arguments of `SamplerState.bind` (see cpu.py). Sources: the OpenAI API for the presence and
frequency penalties and logit_bias; Keskar et al., "CTRL", 2019, for the repetition penalty; Fan et al. 2018
(top-k), Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p); the order of the filters is vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    bias_ids: Sequence[int] = ()
    bias_values: Sequence[float] = ()
    stop_ids: Sequence[int] = ()
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed: Sequence[int] | None = None  # the token ids of a grammar's mask; not an argument of `bind`


def edited_logits(logits: Tensor, p: Params) -> Tensor:
    """float32 [vocab] after logit_bias, penalties and the two masks, in that order."""
    x = logits.clone()
    for token, value in zip(p.bias_ids, p.bias_values, strict=True):
        x[token] += value
    output = torch.tensor(list(p.output), dtype=torch.long)
    counts = torch.bincount(output, minlength=len(x)).to(torch.float32)
    seen = counts > 0
    seen[torch.tensor(list(p.prompt), dtype=torch.long)] = True
    repeated = torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
    x = torch.where(seen, repeated, x)
    x = x - p.frequency_penalty * counts
    x = x - p.presence_penalty * (counts > 0)
    if len(p.output) < p.min_tokens:
        x[torch.tensor(list(p.stop_ids), dtype=torch.long)] = -torch.inf
    if p.allowed is not None:
        forbidden = torch.ones(len(x), dtype=torch.bool)
        forbidden[torch.tensor(list(p.allowed), dtype=torch.long)] = False
        x[forbidden] = -torch.inf
    return x


def survivors(logits: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    """The tokens that can be drawn: their ids, rising, and their probabilities (float64). temperature > 0.

    In the order of falling logit, then rising id, every filter keeps a head.
    """
    x = edited_logits(logits, p)
    ordered, ids = torch.sort(x, descending=True, stable=True)
    ids = ids[ordered > -torch.inf]
    z = ordered[ordered > -torch.inf].double()
    z = (z - z[0]) / float(np.float32(p.temperature))
    if p.top_k > 0:
        z = z[: p.top_k]
    if p.min_p > 0:
        z = z[z >= np.log(p.min_p)]
    weights = z.exp()
    if p.top_p < 1:
        before = weights.cumsum(0) - weights
        weights = weights[before < p.top_p * weights.sum()]
    kept, order = torch.sort(ids[: len(weights)])
    return kept, (weights / weights.sum())[order]


def uniform_at(seed: int, position: int) -> float:
    """In [0, 1): top 53 bits of the first word of Philox4x64-10, key (seed, 0), counter (position, 0, 0, 0)."""
    # numpy steps the counter before it makes a block.
    bits = np.random.Philox(key=seed, counter=(position - 1) % (1 << 256)).random_raw()
    return float(bits >> 11) * 2.0**-53


def sample(logits: Tensor, p: Params) -> int:
    """The token at output position len(p.output); -1 where the row holds NaN, +inf or nothing but -inf, -2 where masks
    leave nothing of one that does not."""
    x = edited_logits(logits, p)
    if logits.isnan().any() or (logits == torch.inf).any() or not (logits > -torch.inf).any():
        return -1
    if not (x > -torch.inf).any():
        return -2
    if p.temperature == 0:
        return int(torch.nonzero(x == x.max())[0])
    ids, probabilities = survivors(logits, p)
    above = probabilities.cumsum(0) > uniform_at(p.seed, len(p.output))
    return int(ids[above][0]) if above.any() else int(ids[-1])


def logprobs(logits: Tensor, target: int, top_n: int) -> tuple[float, int, list[int], list[float]]:
    """log-softmax (natural) of the raw logits at `target`, its rank, and the `top_n` most likely tokens."""
    lp = torch.log_softmax(logits.double(), 0)
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    top = ids[: min(top_n, int((ordered > -torch.inf).sum()))]
    rank = 1 + int((logits > logits[target]).sum())
    return float(lp[target]), rank, top.tolist(), lp[top].tolist()
