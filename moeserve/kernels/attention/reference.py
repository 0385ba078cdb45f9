"""The specification of paged attention: causal, grouped queries (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245),
KV in slots of one token (paged as in https://arxiv.org/abs/2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequence:
    """Rows `row` .. `row + count - 1` of a step are positions `position` .. of one sequence: a prefill chunk, or with
    count 1 a decode row."""

    row: int
    count: int
    position: int
    slots: Tensor  # integers, at least [position + count]: the KV slot of each position


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: Iterable[Sequence],
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T) v over the keys at or before each row's position, in float64: [n, heads * dim].

    q [n, heads, dim], multiplied by 1/sqrt(dim) already. keys, values [slots, kv_heads, dim]; query head h reads KV
    head h // (heads / kv_heads). Rows of no sequence are zero.
    window: a row at position p sees the keys p - window + 1 .. p, 0: all before it (Beltagy et al. 2020,
    https://arxiv.org/abs/2004.05150). sinks [heads]: a logit more in each softmax, of a key whose value is zero
    (gpt-oss, https://arxiv.org/abs/2508.10925). scale: what scores are multiplied with in place of 1/sqrt(dim).
    """
    group, dim = q.shape[1] // keys.shape[1], q.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for s in sequences:
        rows, context = slice(s.row, s.row + s.count), s.slots[: s.position + s.count].long()
        k = keys[context].double().repeat_interleave(group, dim=1)
        v = values[context].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k)
        if scale is not None:
            scores *= scale * dim**0.5
        key = torch.arange(len(context))
        position = torch.arange(s.position, s.position + s.count)[:, None]
        unseen = key > position
        if window:
            unseen |= key <= position - window
        scores.masked_fill_(unseen, -torch.inf)
        if sinks is not None:
            extra = sinks.double()[:, None, None].expand(-1, s.count, 1)
            weights = torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
    return out.flatten(1)
