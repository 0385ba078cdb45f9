"""Launches the embedding, and the replacement of placeholder ids before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.embed.triton import add_deep_kernel, embed_kernel, take_sampled_kernel
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.linear.operands import weight_of
from moeserve.kernels.planes.layout import k_blocks_of


@dataclass(frozen=True, slots=True)
class KvPlaces:
    """Entries for the block tables: slot_table[req_slots[i], positions[i]] = kv_slots[i]. int32; slot_table
    [requests, length], others [n]. window_table, window_slots: the same for windowed layers with separate slots."""

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
    streams: int = 1,
    fills: bool = False,
) -> None:
    """Looks up the rows of tokens: x[i] = scale * row ids[i] of the table, repeated in each of `streams` equal parts,
    for i < count[0]. An id out of range reads the nearest row. Where ids[i] is EMBEDDED, x[i] is left unchanged, or,
    with `fills`, becomes row 0. ids int32 [n], x float32 [n, streams * hidden]; planes: codes, scales and supers of the
    table (`Planes`); kind: ggml's number of its type. places: the slot tables, in which the same launch writes an entry
    for each of these rows."""
    n, hidden = len(x), x.shape[1] // streams
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
        streams,
        fills,
        pdl(),
        num_warps=1,
    )


def add_deep(ids: Tensor, count: Tensor, deep: Tensor, x: Tensor) -> None:
    """Computes x[i] += deep[i] where ids[i] is EMBEDDED, for i < count[0]. ids int32 [n], deep float32 [n, hidden]
    with rows at any stride, x float32 [n, hidden]."""
    n, hidden = x.shape
    block = min(1024, next_power_of_2(hidden))
    add_deep_kernel(
        (n, -(-hidden // block)),
        *(ids, count, deep, x, deep.stride(0), hidden, block, pdl()),
        num_warps=4,
        launch_pdl=pdl(),
    )


def take_sampled(ids: Tensor, sampled: Tensor) -> None:
    """Replaces placeholders in place: an id -1 - i becomes sampled[i], or 0 if that is negative; EMBEDDED
    stays. ids int32 [n], sampled int32 [m]. For steps launched before the host has seen the previous step's tokens."""
    n = len(ids)
    block = min(256, next_power_of_2(n))
    take_sampled_kernel((-(-n // block),), ids, sampled, n, len(sampled), block, num_warps=1)
