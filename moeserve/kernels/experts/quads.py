"""Launches the routed experts for some tens of rows per expert, with the products of quad_gemm.py: activations in
quad order, routes in blocks, gate and up, then down.

Specification: `reference.py`; blocks of routes come from `op.align_routes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from moeserve.kernels.experts.op import num_blocks
from moeserve.kernels.launch import HOPPER_SHARED_MEMORY, pdl, shared_memory
from moeserve.kernels.linear.operands import SILU, Gated, RouteBlocks, Weight, weight_of
from moeserve.kernels.linear.quad_gemm import gated_quad_gemm_kernel, quad_gemm_kernel
from moeserve.kernels.linear.quad_order import quad_order_kernel
from moeserve.kernels.planes import Planes
from moeserve.kernels.planes.layout import K_BLOCK

K_BLOCKS: Final = 2  # K blocks per loop iteration: 32 bytes of each row's part, a sector


@dataclass(frozen=True, slots=True)
class QuadTile:
    rows: int  # rows of the matrix, or of each of the two
    warps: int  # four per 64 rows; otherwise weights and their tokens go through shared memory
    stages: int


@dataclass(frozen=True, slots=True)
class QuadMethod:
    """Block size and tiles of the products, chosen by the number of rows in the step."""

    block: int  # routes per block
    up: QuadTile
    down: QuadTile


def quad_method(tokens: int) -> QuadMethod:
    """Returns the method for a padded number of rows; measured (docs/results/gpu-kernels.md). Three stages keep the
    operands of two iterations in flight or ready; two stages, as in gemm.py's tiles, only of one. tokens: padded
    number of rows of the step."""
    small, large = QuadTile(64, 4, 3), QuadTile(128, 8, 3)
    if tokens <= 256:
        return QuadMethod(32, small, small)
    if tokens <= 1024:  # for 1,024 rows blocks of 128 are as fast, for 768 a third slower
        return QuadMethod(64, small, large)
    return QuadMethod(128, large, small)


def takes_quads(*planes: Planes) -> bool:
    """Returns whether these matrices have supported widths, and the types of Q4_K_M files (Q4_K, Q6_K) or Q4_0. Types
    with codebooks and other widths are not supported, and neither are GPUs with less shared memory than Hopper, which
    lack warpgroup products."""
    return shared_memory() >= HOPPER_SHARED_MEMORY and all(_takes_quads(p) for p in planes)


def _takes_quads(planes: Planes) -> bool:
    f = planes.type.layout
    if f is None or f.is_signed or f.low_bits != 4 or f.high_bits not in (0, 2):
        return False
    # The mins of Q4_1, rounded to bfloat16, are too inexact (paired_weights.py).
    has_near_min = not f.has_own_min or (f.has_min_word and f.high_bits == 0)
    return has_near_min and planes.cols % (K_BLOCK * K_BLOCKS) == 0


class QuadWorkspace:
    """Buffers for steps of up to `tokens` rows."""

    def __init__(
        self, tokens: int, top_k: int, experts: int, x: Tensor, method: QuadMethod | None = None
    ) -> None:
        """x: [tokens, hidden], for activations in quad order. method: None: the default."""
        self.x = x
        self.method = quad_method(tokens) if method is None else method
        block = self.method.block
        blocks = num_blocks(tokens, top_k, experts, block)
        self.expert = torch.empty(blocks, dtype=torch.int32, device=x.device)
        self.routes = torch.empty(blocks, block, dtype=torch.int32, device=x.device)


def quad_order(x: Tensor, count: Tensor, out: Tensor, top_k: int = 1) -> None:
    """Computes out[i] = x[i] in the order of linear/quad_order.py, for i < count[0] * top_k. Both [n, cols]."""
    n, cols = x.shape
    quad_order_kernel(
        (n, -(-cols // 1024)),
        x,
        count,
        out,
        cols,
        top_k,
        K_BLOCKS,
        1024,
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )


def quads_up(
    x: Tensor,
    gate: list[Tensor],
    gate_kind: int,
    up: list[Tensor],
    up_kind: int,
    cols: int,
    routing: RouteBlocks,
    top_k: int,
    h: Tensor,
    *,
    tile: QuadTile,
    options: Gated = SILU,
) -> None:
    """Computes h[route] = gated(gate(x[route // top_k]), up(x[route // top_k])) for every route in the blocks. x [n,
    hidden] and h [n * top_k, ff], with columns permuted as in linear/quad_order.py. Biases in `options` are indexed by
    expert. gate_kind, up_kind: ggml's numbers of the matrices' types."""
    g, u = weight_of(gate, gate_kind, cols), weight_of(up, up_kind, cols)
    gated_quad_gemm_kernel(
        (-(-g.rows // tile.rows), len(routing.expert)), x, *_planes(g), *_planes(u), options.gate_bias,
        options.up_bias, routing.expert, routing.routes, selectors(h.device), h, g.rows, g.cols, g.format, u.format,
        options.form, top_k, routing.routes.shape[1], tile.rows, K_BLOCKS, pdl(),
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl(),
    )  # fmt: skip


def quads_down(
    h: Tensor,
    down: list[Tensor],
    down_kind: int,
    cols: int,
    routing: RouteBlocks,
    parts: Tensor,
    *,
    tile: QuadTile,
    bias: Tensor | None = None,
) -> None:
    """Computes parts[route] = down(h[route]) + bias for every route in the blocks; other parts stay unchanged. h [n *
    top_k, ff] in quad order; parts [n, top_k, hidden], possibly part of a wider tensor [n, .., hidden]; bias float32
    [experts, hidden]. down_kind: ggml's number of the matrix's type. Raises ValueError if `parts` has other strides."""
    w = weight_of(down, down_kind, cols)
    _, top_k, hidden = parts.shape
    per_token = parts.stride(0) // hidden
    if parts.stride() != (per_token * hidden, hidden, 1):
        raise ValueError(f"parts of strides {parts.stride()} must be columns of a contiguous tensor")
    quad_gemm_kernel(
        (-(-w.rows // tile.rows), len(routing.expert)), h, *_planes(w), bias, routing.expert, routing.routes,
        selectors(h.device), parts, w.rows, w.cols, w.format, top_k, per_token, routing.routes.shape[1], tile.rows,
        K_BLOCKS, pdl(), num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl(),
    )  # fmt: skip


@cache
def selectors(device: torch.device) -> Tensor:
    """Returns int32 [4]: operands of the prmt instruction that put byte i of a word into bits 8 .. 15 of 2^15. They
    are in memory because numbers that depend on the loop would keep Triton from moving layouts to the loads
    (linear/quad_weights.py)."""
    return torch.tensor([0x3040 + 0x10 * i for i in range(4)], dtype=torch.int32, device=device)


def _planes(weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.codes, weight.scales, weight.supers
