"""The specification of sampling, in plain torch: one row at a time, float64, with a sort.

Sources: the OpenAI API for the presence and frequency penalties and logit_bias; Keskar et al., "CTRL", 2019, for the
repetition penalty; Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Meister et al.
2022 (typical-p), Tang et al. 2024 (top-n-sigma); Weidmann's proposals for DRY (text-generation-webui #5677) and XTC
(#6335). The order of the filters is vLLM's, with llama.cpp's others between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeserve.sampling.order import DEFAULT_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The settings of moeserve/sampling/parameters.py, and the other values that determine a row's token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    order: Sequence[str] = ()  # order of the samplers; empty: DEFAULT_ORDER
    dry_breakers: Sequence[Sequence[int]] = ()  # token sequences that end a repetition
    seed: int = 0
    min_tokens: int = 0
    bias_ids: Sequence[int] = ()
    bias_values: Sequence[float] = ()
    stop_ids: Sequence[int] = ()
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed: Sequence[int] | None = None  # token ids that a grammar's mask allows

    def runs(self, sampler: str) -> bool:
        return sampler in (self.order or DEFAULT_ORDER)


def dry_penalties(p: Params) -> dict[int, float]:
    """Returns DRY's penalties by token, to be subtracted from the logits.

    If the text's last tokens also occur `lag` tokens earlier, the token that followed them there would lengthen the
    repetition, unless it is a breaker. A repetition is counted back at most to the window's beginning and to the
    last breaker.
    """
    text = [*p.prompt, *p.output]
    window = len(text) if p.dry_penalty_last_n < 0 else min(p.dry_penalty_last_n, len(text))
    if not p.runs("dry") or p.dry_multiplier == 0 or window <= p.dry_allowed_length:
        return {}
    unbroken = len(text)
    for end in range(1, len(text) + 1):
        if any(tuple(text[max(end - len(b), 0) : end]) == tuple(b) for b in p.dry_breakers):
            unbroken = len(text) - end
    singles = {tuple(breaker) for breaker in p.dry_breakers if len(breaker) == 1}
    longest: dict[int, int] = {}
    for lag in range(1, window):
        run = 0
        while run < min(window - lag, unbroken) and text[-1 - run] == text[-1 - run - lag]:
            run += 1
        if run >= p.dry_allowed_length and (text[-lag],) not in singles:
            longest[text[-lag]] = max(run, longest.get(text[-lag], 0))
    most = float(np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        growth = {
            token: np.float64(p.dry_base) ** (run - p.dry_allowed_length) for token, run in longest.items()
        }
        return {token: min(float(p.dry_multiplier * factor), most) for token, factor in growth.items()}


def edited_logits(logits: Tensor, p: Params) -> Tensor:
    """Returns float32 [vocab]: the logits after logit_bias, penalties, DRY and the two masks, in that order."""
    x = logits.clone()
    for token, value in zip(p.bias_ids, p.bias_values, strict=True):
        x[token] += value
    output = torch.tensor(list(p.output), dtype=torch.long)
    counts = torch.bincount(output, minlength=len(x)).to(torch.float32)
    seen = counts > 0
    seen[torch.tensor(list(p.prompt), dtype=torch.long)] = True
    if p.runs("penalties"):
        repeated = torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
        x = torch.where(seen, repeated, x)
        x = x - p.frequency_penalty * counts
        x = x - p.presence_penalty * (counts > 0)
    for token, penalty in dry_penalties(p).items():
        x[token] -= penalty
    if len(p.output) < p.min_tokens:
        x[torch.tensor(list(p.stop_ids), dtype=torch.long)] = -torch.inf
    if p.allowed is not None:
        forbidden = torch.ones(len(x), dtype=torch.bool)
        forbidden[torch.tensor(list(p.allowed), dtype=torch.long)] = False
        x[forbidden] = -torch.inf
    return x


def survivors(logits: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    """Returns the tokens that can be drawn from logits [vocab]: their ids, int64, ascending, and their probabilities,
    float64, which sum to 1.

    The filters see the tokens in order of falling logit, then ascending id.
    """
    x = edited_logits(logits, p)
    ordered, ids = torch.sort(x, descending=True, stable=True)
    ids = ids[ordered > -torch.inf]
    z = ordered[ordered > -torch.inf].double()
    z, heat = z - z[0], 1.0
    for name in p.order or DEFAULT_ORDER:
        if name == "temperature" and p.temperature == 0:
            ids, z = ids[:1], z[:1]
        elif name == "temperature":
            heat = float(np.float32(p.temperature))
        elif name in FILTERS:
            kept = FILTERS[name](ids, z, ((z - z[0]) / heat).exp(), p)
            ids, z = ids[kept], z[kept]
    weights = ((z - z[0]) / heat).exp()
    ids, order = torch.sort(ids)
    return ids, (weights / weights.sum())[order]


# Each filter gets the tokens' ids, logits and weights (probability over the first token's), in order of falling logit,
# and returns the ones to keep.
def _top_k(ids: Tensor, z: Tensor, weights: Tensor, p: Params) -> slice:
    return slice(p.top_k if p.top_k > 0 else None)


def _min_p(ids: Tensor, z: Tensor, weights: Tensor, p: Params) -> Tensor:
    return weights >= p.min_p


def _top_p(ids: Tensor, z: Tensor, weights: Tensor, p: Params) -> Tensor:
    if p.top_p >= 1:
        return weights >= 0
    return weights.cumsum(0) - weights < p.top_p * weights.sum()


def _typical_p(ids: Tensor, z: Tensor, weights: Tensor, p: Params) -> Tensor:
    """A token's surprise minus the entropy equals the expected logit minus its own."""
    if p.typical_p >= 1:
        return weights >= 0
    distance = (z - (weights * z).sum() / weights.sum()).abs().float()
    nearest = torch.from_numpy(np.lexsort((ids.numpy(), distance.numpy())))
    before = weights[nearest].cumsum(0) - weights[nearest]
    kept = torch.zeros(len(z), dtype=torch.bool)
    kept[nearest] = before < p.typical_p * weights.sum()
    return kept


def _top_n_sigma(ids: Tensor, z: Tensor, weights: Tensor, p: Params) -> Tensor:
    if p.top_n_sigma <= 0:
        return weights >= 0
    return z >= z[0] - p.top_n_sigma * z.std(correction=0)


def _xtc(ids: Tensor, z: Tensor, weights: Tensor, p: Params) -> slice:
    if p.xtc_threshold > 0.5 or uniform_at(p.seed, len(p.output), 1) >= p.xtc_probability:
        return slice(None)
    return slice(max(int((weights >= p.xtc_threshold * weights.sum()).sum()) - 1, 0), None)


FILTERS: dict[str, Callable[[Tensor, Tensor, Tensor, Params], slice | Tensor]] = {
    "top_k": _top_k,
    "min_p": _min_p,
    "top_p": _top_p,
    "typical_p": _typical_p,
    "top_n_sigma": _top_n_sigma,
    "xtc": _xtc,
}


def uniform_at(seed: int, position: int, stream: int = 0) -> float:
    """Returns a number in [0, 1): the top 53 bits of the first word of Philox4x64-10, key (seed, 0), counter
    (position, stream, 0, 0)."""
    # numpy increments the counter before it generates a block.
    counter = (position + (stream << 64) - 1) % (1 << 256)
    return float(np.random.Philox(key=seed, counter=counter).random_raw() >> 11) * 2.0**-53


def sample(logits: Tensor, p: Params) -> int:
    """Returns the token id at output position len(p.output), drawn from logits [vocab] with parameters p; -1 if the row
    holds NaN, +inf or only -inf, -2 if the masks leave no token."""
    x = edited_logits(logits, p)
    if logits.isnan().any() or (logits == torch.inf).any() or not (logits > -torch.inf).any():
        return -1
    if not (x > -torch.inf).any():
        return -2
    ids, probabilities = survivors(logits, p)
    above = probabilities.cumsum(0) > uniform_at(p.seed, len(p.output))
    return int(ids[above][0]) if above.any() else int(ids[-1])


def logprobs(logits: Tensor, target: int, top_n: int) -> tuple[float, int, list[int], list[float]]:
    """Returns, for raw logits [vocab], the natural log-softmax at token id `target` and its rank (1: the likeliest),
    then the ids and log-softmaxes of the `top_n` most likely tokens."""
    lp = torch.log_softmax(logits.double(), 0)
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    top = ids[: min(top_n, int((ordered > -torch.inf).sum()))]
    rank = 1 + int((logits > logits[target]).sum())
    return float(lp[target]), rank, top.tolist(), lp[top].tolist()
