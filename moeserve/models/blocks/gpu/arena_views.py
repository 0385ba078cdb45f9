"""Views of a step's buffers in the arena that the workspaces of all step sizes share."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.models.buffers import ALIGNMENT, INT8_GROUP, Buffer, arena_bytes


def views_of(arena: Tensor, buffers: tuple[Buffer, ...]) -> dict[str, Tensor]:
    """Returns the buffers by name, one after another in the arena, uint8."""
    views: dict[str, Tensor] = {}
    start = 0
    for buffer in buffers:
        region = arena[start : start + buffer.nbytes]
        views[buffer.name] = region.view(getattr(torch, buffer.dtype)).view(buffer.shape)
        start += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
    return views


def spare(arena: Tensor, buffers: tuple[Buffer, ...], dtype: torch.dtype) -> Tensor:
    """Returns the rest of the arena after the buffers, which only larger steps use: [n] of `dtype`."""
    rest = arena[arena_bytes(buffers) :]
    return rest[: len(rest) // ALIGNMENT * ALIGNMENT].view(dtype)


def activations(views: dict[str, Tensor], name: str, cols: int | None = None) -> GpuActivations:
    """Returns the activations named `name`: floats, and int8 codes with scales if they exist. cols: columns of a
    narrower view of the same memory; None: all."""
    x, codes, scales = views[name], views.get(f"{name}_codes"), views.get(f"{name}_scales")
    if cols is None or cols == x.shape[1]:
        return GpuActivations(x, codes, scales)
    return GpuActivations(
        narrowed(x, cols),
        None if codes is None else narrowed(codes, cols),
        None if scales is None else narrowed(scales, cols // INT8_GROUP),
    )


def narrowed(rows: Tensor, count: int) -> Tensor:
    """Returns [n, count, ...], a contiguous view of the beginning of [n, m, ...], count <= m."""
    n, _, *rest = rows.shape
    return rows.view(-1)[: n * count * prod(rest)].view(n, count, *rest)


def part_of(flat: GpuActivations, rows: int, cols: int) -> GpuActivations:
    """Returns activations [rows, cols], a view of the beginning of [1, n], rows * cols <= n."""
    x, codes, scales = (
        None if part is None else narrowed(part, rows * width).view(rows, width)
        for part, width in ((flat.x, cols), (flat.codes, cols), (flat.scales, cols // INT8_GROUP))
    )
    return GpuActivations(x, codes, scales)
