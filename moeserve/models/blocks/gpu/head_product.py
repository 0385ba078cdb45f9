"""The head's buffers, and its product for 17 rows and more.

The product uses the kernels of kernels/experts/quads.py, with the head as one expert that all rows go to: they unpack a
weight once for up to 256 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.quads import QuadTile, quad_order, quads_down, takes_quads
from moeserve.kernels.linear.op import int8_tokens
from moeserve.kernels.linear.operands import RouteBlocks
from moeserve.models.blocks.gpu.arena_views import views_of
from moeserve.models.blocks.gpu.residual_workspace import StreamsWorkspace, streams_workspace
from moeserve.models.blocks.gpu.workspace import FLOATS
from moeserve.models.interface import ModelShape
from moeserve.models.loading.gpu_weights import plane_tensors
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.step_buffers import head_stream_buffers

LEAST_ROWS = 17  # linear's tiles are as fast for 16 rows (docs/results/gpu-kernels.md)


def quad_tile(rows: int) -> tuple[int, QuadTile]:
    """Returns rows per block, and the tile: the fastest measured (docs/results/gpu-kernels.md)."""
    if rows > 128:
        return 256, QuadTile(128, 8, 3)
    return (128 if rows > 64 else 64), QuadTile(64, 4, 3)


class GpuHead:
    """Buffers of the head for up to `rows` rows."""

    def __init__(
        self, shape: ModelShape, logits: Tensor, rows: int, floats: torch.dtype, arena: Tensor
    ) -> None:
        """logits: float32 [rows or more, vocab]. arena: uint8 [`head_arena_bytes`], shared with heads of other
        sizes."""
        small = rows <= int8_tokens(logits.shape[1])
        self.final = GpuActivations.empty(
            rows,
            shape.hidden_size,
            logits.device,
            dtype=torch.float32 if small else floats,
            quantised=small,
        )
        self.logits = logits[:rows]
        self.streams: StreamsWorkspace | None = None  # None: the residual is one vector
        if shape.streams is not None:
            views = views_of(arena, head_stream_buffers(shape, rows, FLOATS[floats]))
            self.streams = streams_workspace(views, shape.streams)


class HeadProduct:
    """The head's product for up to `rows` rows; owns the buffer that holds its input in quad order."""

    def __init__(
        self,
        rows: int,
        hidden: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        block, self._tile = quad_tile(rows)
        routes = torch.arange(-(-rows // block) * block, dtype=torch.int32, device=device).view(-1, block)
        routes[routes >= rows] = -1
        self._routing = RouteBlocks(torch.zeros(len(routes), dtype=torch.int32, device=device), routes)
        self._ordered = torch.empty(rows, hidden, dtype=dtype, device=device)

    def __call__(self, weights: MergedLinear, x: GpuActivations, count: Tensor, logits: Tensor) -> None:
        """Launches logits[i] = W x[i] for i < count[0]. x: [rows, hidden] of the constructor's dtype. logits:
        float32 [rows, vocab]."""
        first = weights.first
        assert x.x is not None
        quad_order(x.x, count, self._ordered)
        quads_down(
            self._ordered, plane_tensors(first), int(first.type), first.cols, self._routing, logits[:, None],
            tile=self._tile,
        )  # fmt: skip


def head_product(
    weights: MergedLinear | None, rows: int, floats: torch.dtype, device: torch.device
) -> HeadProduct | None:
    """Returns the quad-order product for the head; None if `multiply` is to compute it. floats: dtype that the
    tensor cores multiply."""
    if weights is None or weights.second is not None or weights.bias is not None:
        return None
    if rows < LEAST_ROWS or floats != torch.bfloat16 or not takes_quads(weights.first):
        return None
    return HeadProduct(rows, weights.first.cols, device)
