"""The specification of `op.py`, in float64 where numbers are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def joined_rows(x: Tensor, states: Tensor, token_norm: Tensor, state_norm: Tensor, eps: float) -> Tensor:
    """Returns float64 [n, 2 * hidden]: RMSNorm(x) * token_norm and RMSNorm(states) * state_norm side by side. x [n,
    hidden]: embeddings of tokens; states [n, hidden]: the hidden state before each; the norms' weights: [hidden]. eps:
    added to the mean square under the norm's root."""

    def normed(rows: Tensor, weight: Tensor) -> Tensor:
        rows = rows.double()
        return rows * torch.rsqrt((rows * rows).mean(dim=1, keepdim=True) + eps) * weight.double()

    return torch.cat([normed(x, token_norm), normed(states, state_norm)], dim=1)


def states_before(
    states: Tensor, positions: list[int], req_slots: list[int], kept: Tensor, kept_position: list[int]
) -> Tensor:
    """Returns, in the shape of states [n, hidden], the hidden state at the position before each of a step's rows: the
    previous row's, if that row is the same request's previous position; else the request's kept state (kept [request
    slots, hidden]), if the row is at its kept_position; otherwise 0."""
    found = torch.zeros_like(states)
    for i, (position, request) in enumerate(zip(positions, req_slots, strict=True)):
        if i and req_slots[i - 1] == request and positions[i - 1] == position - 1:
            found[i] = states[i - 1]
        elif position and kept_position[request] == position:
            found[i] = kept[request]
    return found


def accepted_drafts(tokens: list[int], drafts: list[int]) -> int:
    """Returns how many of a request's drafts are accepted: the longest prefix that agrees with the tokens sampled, of
    which there is one more than drafts."""
    for number, draft in enumerate(drafts):
        if tokens[number] != draft:
            return number
    return len(drafts)
