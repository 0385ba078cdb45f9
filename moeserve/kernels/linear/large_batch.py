"""Launches products of many tokens by way of unpacked weights: of thousands with experts, of 65 and more without them,
where a step has room for the unpacked matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.launch import next_power_of_2, pdl, shared_memory
from moeserve.kernels.linear.float_gemm import float_gemm_kernel
from moeserve.kernels.linear.op import Gated, RouteBlocks, Weight
from moeserve.kernels.linear.unpack import unpack_kernel
from moeserve.kernels.planes.layout import k_blocks_of

BLOCK = 128  # routes of a program, or tokens of many


@dataclass(frozen=True, slots=True)
class FloatTile:
    tokens: int
    columns: int  # of the output
    depth: int
    warps: int
    stages: int  # at most


_LARGE = FloatTile(BLOCK, 256, 64, 8, 4)  # 533 and 479 TFLOP/s of an H200 for gate and up, and down


def dense_float_tile(tokens: int, rows: int) -> FloatTile:
    """The tile of a product without experts: for few tokens small enough that there are 128 programs or more. Measured
    up to 256 tokens (docs/results/gpu-kernels.md)."""
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
    """Owns nothing: 16-bit floats of a step's arena in which one matrix lies at a time, or some experts of it."""

    def __init__(self, floats: Tensor) -> None:
        """floats: [n], of the type that the tensor cores multiply."""
        self.floats = floats
        self._groups: dict[tuple[int, int], Tensor] = {}

    def fits(self, rows: int, cols: int) -> bool:
        return rows * cols <= self.floats.numel()

    def view(self, experts: int, rows: int, cols: int) -> Tensor:
        """[experts, rows, cols]."""
        return self.floats[: experts * rows * cols].view(experts, rows, cols)

    def groups(self, experts: int, rows: int, cols: int) -> list[tuple[int, int]]:
        """As many experts as there is room for at a time: the first, and the one behind the last."""
        room = self.floats.numel() // (rows * cols)
        return [(first, min(first + room, experts)) for first in range(0, experts, room)]

    def group(self, first: int, end: int) -> Tensor:
        """int32 [2], the same on the device."""
        if (first, end) not in self._groups:
            self._groups[first, end] = torch.tensor(
                [first, end], dtype=torch.int32, device=self.floats.device
            )
        return self._groups[first, end]


@dataclass(frozen=True, slots=True)
class ExpertsInScratch:
    """Which experts' matrices a product finds, and which routes are theirs."""

    group: Tensor  # int32 [2]: the first, and the one behind the last
    routing: RouteBlocks
    x_top_k: int  # routes that share a row of x
    top_k: int = 1  # routes of a token
    parts: int = 1  # rows of out of a token, the first `top_k` for its routes


def can_unpack(weight: Weight) -> bool:
    """float32 is multiplied as it is."""
    return weight.codes.dtype != torch.float32


def unpack(
    weight: Weight, out: Tensor, first: int = 0, *, every: int = 1, at: int = 0, is_early: bool = False
) -> None:
    """Row r of expert first + e to out[e, r * every + at]. out [experts, rows, cols], contiguous. is_early: no kernel
    of a step writes the matrix, which may then be read before the kernel ahead has ended."""
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
        weight.rows,
        cols,
        weight.format,
        rows,
        every,
        at,
        bn,
        kb,
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
    tile: FloatTile | None = None,
) -> None:
    """As `linear`: out[i] = W x[i] + bias for rows i < count[0], the last columns by the other matrix."""
    rows = weight.rows + (0 if other is None else other.rows)
    both = scratch.view(1, rows, weight.cols)
    unpack(weight, both, is_early=True)
    if other is not None:
        unpack(other, both, at=weight.rows, is_early=True)
    run_float_gemm(x, both, count, out, bias=bias, tile=tile or dense_float_tile(len(out), rows))


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
    """float_gemm_kernel. w [experts, rows, cols] of x's type; options: a gated product, out [routes, rows / 2]; count:
    of a product without experts, int32 [1]. tile: with experts its tokens are BLOCK."""
    _, rows, cols = w.shape
    routing = None if experts is None else experts.routing
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
        pdl(),
        num_warps=tile.warps,
        num_stages=_stages(w, tile),
        launch_pdl=pdl(),
    )


def _stages(w: Tensor, tile: FloatTile) -> int:
    """As many tiles on their way as fit into the shared memory."""
    stage = (tile.tokens + tile.columns) * tile.depth * w.element_size()
    return max(2, min(tile.stages, shared_memory() // stage))
