"""Launches the router's choice."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.launch import PDL
from moeserve.kernels.routing.triton import route_kernel, take_over_kernel

BLOCK = 256  # routes


def route(
    logits: Tensor,
    expert_map: Tensor | None,
    count: Tensor,
    ids: Tensor,
    local_ids: Tensor | None,
    weights: Tensor,
    heat: Tensor | None,
) -> None:
    """ids int32, weights float32 [n, top_k] of logits [n, experts]; rows from count[0] on get -1 and 0.

    local_ids int32 [n, top_k] = expert_map[ids], int32 [experts]: an expert's place on this device, below 0 elsewhere.
    heat int64 [experts]: to which each expert's tokens are added.
    """
    n, experts = logits.shape
    per_program = 4 if n % 4 == 0 and n >= 1024 else 1
    top_k = ids.shape[1]
    route_kernel(
        (n // per_program,),
        logits,
        expert_map,
        count,
        ids,
        local_ids,
        weights,
        heat,
        experts,
        top_k,
        per_program,
        1 << (experts - 1).bit_length(),
        1 << (top_k - 1).bit_length(),
        PDL,
        num_warps=per_program,
        launch_pdl=PDL,
    )


def take_over(ids: Tensor, expert_map: Tensor, taken: Tensor, places: Tensor) -> None:
    """Of routes ids int32 [n, top_k], those to the experts of expert_map int32 [experts] (below 0: not one of them) as
    well: taken int32 [n, top_k] = expert_map[ids], -1 for ids below 0, and places = max(places, taken)."""
    take_over_kernel(
        (-(-ids.numel() // BLOCK),), ids, expert_map, taken, places, ids.numel(), BLOCK, num_warps=4
    )
