"""Launches the embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.embed.triton import embed_kernel
from moeserve.kernels.launch import PDL
from moeserve.kernels.linear.cuda import weight_of
from moeserve.kernels.planes.formats import units_of


def embed(ids: Tensor, count: Tensor, planes: list[Tensor], kind: int, x: Tensor) -> None:
    """x[i] = row ids[i] of the table in planes, for i < count[0]. ids int32 [n], x float32 [n, hidden]."""
    n, hidden = x.shape
    table = weight_of(planes, kind, hidden)
    embed_kernel(
        (n, units_of(hidden)),
        ids,
        count,
        table.codes if table.format is None else table.codes.view(torch.uint8),
        table.scales,
        table.supers,
        x,
        hidden,
        table.format,
        PDL,
        num_warps=1,
    )
