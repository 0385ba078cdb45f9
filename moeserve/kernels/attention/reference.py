"""The specification of paged attention: causal, grouped queries (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245),
KV in slots of one token (paged as in https://arxiv.org/abs/2309.06180); sliding windows (Beltagy et al. 2020,
https://arxiv.org/abs/2004.05150); sinks as one logit a head (gpt-oss's model card, https://arxiv.org/abs/2508.10925)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence's part of a step: rows `row` .. `row + count - 1` of the step are its positions `position` ..
    `position + count - 1`. It is a prefill chunk or, with count 1, a decode row."""

    row: int
    count: int
    position: int
    slots: Tensor  # integers, at least [position + count]: the KV slot of each position
    # integers [count]: number of positions that each row sees, at least itself and none after the sequence's last
    # row. A picture's rows, for example, see the whole picture. None: each row sees itself and everything before
    # it.
    ends: Tensor | None = None


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: Iterable[Sequence],
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    gate_softplus: bool = False,
    score_cap: float = 0.0,
) -> Tensor:
    """Returns softmax(q k^T) v over the keys that each row sees, float64 [n, heads * value_dim].

    q [n, heads, dim], already scaled. keys [slots, kv_heads, dim], values [slots, kv_heads, value_dim]; query head
    h reads KV head h // (heads / kv_heads). Rows of no sequence are zero. window above 0: position p sees nothing
    before p - window + 1. sinks [heads]: an additional logit in each softmax, whose value is zero. gate [n, heads *
    value_dim], or one number per head, [n, heads]: its sigmoid (or softplus) multiplies the result. score_cap c above
    0: a score s becomes c tanh(s / c) (Gemma 2, https://arxiv.org/abs/2408.00118).
    """
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros(*q.shape[:2], values.shape[2], dtype=torch.float64)
    for s in sequences:
        rows, context = slice(s.row, s.row + s.count), s.slots[: s.position + s.count].long()
        k = keys[context].double().repeat_interleave(group, dim=1)
        v = values[context].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k)
        if score_cap > 0:
            scores = score_cap * torch.tanh(scores / score_cap)
        position = torch.arange(s.position, s.position + s.count)[:, None]
        key = torch.arange(len(context))
        unseen = key > position if s.ends is None else key >= s.ends[:, None]
        if window > 0:
            unseen |= key <= position - window
        scores.masked_fill_(unseen, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, s.count, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(context)]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
    if gate is None:
        return out.flatten(1)
    factor = softplus(gate.double()) if gate_softplus else gate.double().sigmoid()
    return (out * factor.view(len(out), q.shape[1], -1)).flatten(1)
