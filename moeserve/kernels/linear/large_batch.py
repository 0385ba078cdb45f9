"""Launches products of many tokens with unpacked weights: thousands of tokens with experts, or 65 and more without,
if the step has room for the unpacked matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.launch import next_power_of_2, pdl, shared_memory
from moeserve.kernels.linear.float_gemm import float_gemm_kernel
from moeserve.kernels.linear.operands import Gated, RouteBlocks, Weight
from moeserve.kernels.linear.unpack import unpack_kernel
from moeserve.kernels.planes.layout import k_blocks_of

BLOCK = 128  # routes per program, or tokens of a large batch
FEW_BLOCK = 64  # routes per program, if an expert has few


@dataclass(frozen=True, slots=True)
class FloatTile:
    tokens: int
    columns: int  # columns of the output
    depth: int
    warps: int
    stages: int  # at most


_LARGE = FloatTile(BLOCK, 256, 64, 8, 4)  # 533 and 479 TFLOP/s on an H200, for gate and up, and for down
_ROUTE_TILES = {tile.tokens: tile for tile in (_LARGE, FloatTile(FEW_BLOCK, 128, 64, 4, 4))}


def dense_float_tile(tokens: int, rows: int) -> FloatTile:
    """Returns the tile of a product without experts: for few tokens small enough to give at least 128 programs.
    Measured up to 256 tokens (docs/results/gpu-kernels.md)."""
    if tokens > 1024:
        return _LARGE
    if tokens > 512:
        return FloatTile(128, 128, 64, 8, 4)
    if tokens > 256:
        return FloatTile(64, 128, 64, 4, 4)
    if tokens * rows > 256 * 2048:
        return FloatTile(64, 64, 64, 4, 4)
    return FloatTile(64, 64 if tokens > 128 or tokens * rows > 128 * 2048 else 32, 128, 4, 6)


class UnpackScratch:
    """A step arena's 16-bit floats for one unpacked matrix at a time, or for some of its experts. Owns no memory."""

    def __init__(self, floats: Tensor) -> None:
        """floats: [n], of the dtype that the tensor cores multiply."""
        self.floats = floats
        self._groups: dict[tuple[int, int], Tensor] = {}

    def fits(self, rows: int, cols: int) -> bool:
        return rows * cols <= self.floats.numel()

    def view(self, experts: int, rows: int, cols: int) -> Tensor:
        """Returns a view [experts, rows, cols]."""
        return self.floats[: experts * rows * cols].view(experts, rows, cols)

    def groups(self, experts: int, rows: int, cols: int) -> list[tuple[int, int]]:
        """Returns groups of as many experts as fit at a time: (first, one after the last)."""
        room = self.floats.numel() // (rows * cols)
        return [(first, min(first + room, experts)) for first in range(0, experts, room)]

    def group(self, first: int, end: int) -> Tensor:
        """Returns the group as int32 [2] on the device."""
        if (first, end) not in self._groups:
            self._groups[first, end] = torch.tensor(
                [first, end], dtype=torch.int32, device=self.floats.device
            )
        return self._groups[first, end]


@dataclass(frozen=True, slots=True)
class ExpertsInScratch:
    """Says which experts' matrices are in the scratch as 16-bit floats, and which rows of activations and results
    belong to them."""

    group: Tensor  # int32 [2]: first expert, and the one after the last
    routing: RouteBlocks
    x_top_k: int  # routes that share a row of x
    top_k: int = 1  # routes per token
    parts: int = 1  # rows of out per token, the first `top_k` for its routes


def can_unpack(weight: Weight) -> bool:
    """Returns whether the weight can be unpacked; float32 weights are multiplied without unpacking."""
    return weight.codes.dtype != torch.float32


def unpack(
    weight: Weight,
    out: Tensor,
    first: int = 0,
    *,
    every: int = 1,
    at: int = 0,
    used: Tensor | None = None,
    is_early: bool = False,
) -> None:
    """Unpacks row r of expert first + e to out[e, r * every + at]. out [experts, rows, cols], contiguous. used: int32
    [n], the experts to unpack, in any order, also several times; None: all. is_early: no kernel of a step writes the
    matrix, so it may be read before the previous kernel has ended."""
    experts, rows, cols = out.shape
    codes = weight.codes[first : first + experts]
    if weight.format is None:
        out[:, at : at + weight.rows * every : every].copy_(codes)
        return
    k_blocks = k_blocks_of(cols)
    bn, kb = 16, min(4, next_power_of_2(k_blocks))
    unpack_kernel(
        (-(-weight.rows // bn), -(-k_blocks // kb), experts),
        codes,
        weight.scales[first : first + experts],
        weight.supers[first : first + experts] if weight.format.has_super else weight.supers,
        out,
        used,
        first,
        weight.rows,
        cols,
        weight.format,
        rows,
        every,
        at,
        bn,
        kb,
        0 if used is None else len(used),
        pdl() and is_early,
        num_warps=8,
        launch_pdl=pdl() and is_early,
    )


def large_batch_linear(
    x: Tensor,
    weight: Weight,
    other: Weight | None,
    count: Tensor,
    out: Tensor,
    scratch: UnpackScratch,
    *,
    bias: Tensor | None = None,
) -> None:
    """Computes out[i] = W x[i] + bias for rows i < count[0], like `linear`; `other` gives the last columns."""
    rows = weight.rows + (0 if other is None else other.rows)
    both = scratch.view(1, rows, weight.cols)
    unpack(weight, both, is_early=True)
    if other is not None:
        unpack(other, both, at=weight.rows, is_early=True)
    run_float_gemm(x, both, count, out, bias=bias, tile=dense_float_tile(len(out), rows))


def narrow_float_linear(
    x: Tensor, weight: Weight, count: Tensor, out: Tensor, *, bias: Tensor | None = None
) -> None:
    """Computes out[i] = W x[i] + bias for rows i < count[0], W and x float32: a router's product of thousands of
    tokens. 8,192 tokens and 128 rows take 69 us where gemm_kernel takes 121, and 256 rows 113 instead of 233 (one
    H200)."""
    tile = FloatTile(BLOCK, 128 if weight.rows > 128 else 64, 64, 8, 4)
    run_float_gemm(x, weight.codes, count, out, bias=bias, tile=tile)


def run_float_gemm(
    x: Tensor,
    w: Tensor,
    count: Tensor | None,
    out: Tensor,
    *,
    experts: ExpertsInScratch | None = None,
    options: Gated | None = None,
    bias: Tensor | None = None,
    tile: FloatTile = _LARGE,
) -> None:
    """Launches float_gemm_kernel. w [experts, rows, cols] of x's dtype; options: for a gated product, with out
    [routes, rows / 2]; count: int32 [1], for a product without experts. tile: of such a product; blocks of BLOCK or
    FEW_BLOCK routes have their own."""
    _, rows, cols = w.shape
    routing = None if experts is None else experts.routing
    if routing is not None:
        tile = _ROUTE_TILES[routing.routes.shape[1]]
    float_gemm_kernel(
        (-(-rows // tile.columns), -(-len(out) // tile.tokens) if routing is None else len(routing.expert)),
        x,
        w,
        bias if options is None else options.gate_bias,
        None if options is None else options.up_bias,
        None if routing is None else routing.expert,
        None if routing is None else routing.routes,
        None if experts is None else experts.group,
        count,
        out,
        rows,
        cols,
        None if options is None else options.form,
        options is not None and options.by_route,
        1 if experts is None else experts.x_top_k,
        1 if experts is None else experts.top_k,
        1 if experts is None else experts.parts,
        tile.tokens,
        tile.columns,
        tile.depth,
        routing is not None and tile.tokens == BLOCK,
        pdl(),
        num_warps=tile.warps,
        num_stages=_stages(w, tile),
        launch_pdl=pdl(),
    )


def _stages(w: Tensor, tile: FloatTile) -> int:
    """Returns the number of pipeline stages: as many as fit in shared memory."""
    stage = (tile.tokens + tile.columns) * tile.depth * w.element_size()
    return max(2, min(tile.stages, shared_memory() // stage))
