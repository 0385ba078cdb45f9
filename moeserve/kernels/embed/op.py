"""Launches the embedding, and before it what completes its ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.embed.triton import embed_kernel, take_sampled_kernel
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.linear.op import weight_of
from moeserve.kernels.planes.layout import k_blocks_of


@dataclass(frozen=True, slots=True)
class KvPlaces:
    """Where a step's tokens have their KV, for who attends to them later: slot_table[req_slots[i], positions[i]] =
    kv_slots[i]. int32; slot_table [requests, length], the others [n]. window_table, window_slots: the same of windowed
    layers that have slots of their own."""

    slot_table: Tensor
    req_slots: Tensor
    positions: Tensor
    kv_slots: Tensor
    window_table: Tensor | None = None
    window_slots: Tensor | None = None


def embed(
    ids: Tensor,
    count: Tensor,
    planes: list[Tensor],
    kind: int,
    x: Tensor,
    places: KvPlaces | None = None,
    *,
    scale: float = 1.0,
) -> None:
    """x[i] = row ids[i] of the table in planes, times `scale`, for i < count[0]; the nearest row for an id beyond
    them. ids int32 [n], x float32 [n, hidden]. places: to be noted for the same i, by the same launch."""
    n, hidden = x.shape
    table = weight_of(planes, kind, hidden)
    embed_kernel(
        (n, k_blocks_of(hidden)),
        ids,
        count,
        table.codes if table.format is None else table.codes.view(torch.uint8),
        table.scales,
        table.supers,
        x,
        None if places is None else places.slot_table,
        None if places is None else places.req_slots,
        None if places is None else places.positions,
        None if places is None else places.kv_slots,
        None if places is None else places.window_table,
        None if places is None else places.window_slots,
        table.rows,
        hidden,
        table.format,
        *((0, 0) if places is None else places.slot_table.shape),
        scale,
        pdl(),
        num_warps=1,
    )


def take_sampled(ids: Tensor, sampled: Tensor) -> None:
    """In place: where an id is -1 - i, it becomes sampled[i], 0 where that is no token (below 0). ids int32 [n],
    sampled int32 [m]. For a step that is launched before the host has seen the tokens of the one before."""
    n = len(ids)
    block = min(256, next_power_of_2(n))
    take_sampled_kernel((-(-n // block),), ids, sampled, n, len(sampled), block, num_warps=1)
