"""Launches the routed experts for many tokens: sorts routes into blocks, then computes gate and up with SiLU, then
down.

Few tokens are handled by `small_batch.py`; `method_for` decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.experts.align import align_kernel, count_kernel, place_kernel
from moeserve.kernels.experts.shared_gate import shared_gate_kernel
from moeserve.kernels.launch import next_power_of_2, pdl, row_stride
from moeserve.kernels.linear.op import GemmTile, run_gated_gemm, run_gemm
from moeserve.kernels.linear.operands import SILU, Gated, RouteBlocks, weight_of


@dataclass(frozen=True, slots=True)
class Method:
    """Block size and tiles of the products, chosen by the number of rows in the batch."""

    block: int  # routes per block; 1: `small_batch.py`, without sorting
    up: GemmTile | None = None
    down: GemmTile | None = None


def method_for(tokens: int) -> Method:
    """Returns the method for a padded number of rows. The limits were measured (benchmarks/gpu_kernels.py). tokens:
    padded number of rows of the step."""
    if tokens <= 8:
        return Method(1)
    if tokens <= 64:
        # Three stages: gate and up of 64 tokens take 99 us instead of 105. Down, also with four warps instead of
        # two,
        # takes 74 instead of 90 us in 6 bits and 58 instead of 60 in 4 (on an H100).
        return Method(8, GemmTile(8, 32, 4, 4, 3, sliced_k=True), GemmTile(8, 64, 2, 4, 3, sliced_k=True))
    if tokens <= 128:
        return Method(16, GemmTile(16, 32, 2, 2, 3), GemmTile(16, 64, 2, 2, 3))
    if tokens <= 512:  # of 512 rows 256 and 125 us instead of 298 and 137 with blocks of 64 (an H100)
        return Method(32, GemmTile(32, 32, 2, 2, 2, sliced_k=True), GemmTile(32, 64, 2, 2, 2))
    if tokens <= 2048:
        return Method(64, GemmTile(64, 64, 2, 4, 2), GemmTile(64, 128, 2, 4, 2))
    # Gate and up of 8,192 tokens: 1.8 ms a layer instead of 2.6.
    return Method(128, GemmTile(128, 128, 2, 8, 2), GemmTile(128, 128, 2, 8, 2))


def num_blocks(tokens: int, top_k: int, experts: int, block: int) -> int:
    """Returns the largest number of blocks that any routing of `tokens` tokens needs."""
    routes = tokens * top_k
    return routes if block == 1 else min(routes, experts + routes // block)


# Routes from which on they are counted first (8,192 rows with 8 of 128 experts: 55 us instead of 75, of 256 experts 65
# instead of 195; 4,096 rows: 31 instead of 43). With fewer the second launch costs the host more than it gains.
COUNTED_ROUTES = 32768
COUNTED = 512  # routes that one program counts
SUMMED = 16  # programs whose counts are summed at once


def counts_shape(routes: int, experts: int) -> tuple[int, int] | None:
    """Returns the shape of the counts that `align_routes` needs for `routes` routes; None: it needs none."""
    return None if routes < COUNTED_ROUTES else (-(-routes // COUNTED), 1 << experts.bit_length())


def align_routes(
    ids: Tensor,
    count: Tensor,
    experts: int,
    block_expert: Tensor,
    block_routes: Tensor,
    counts: Tensor | None = None,
) -> None:
    """Sorts the routes of rows below count[0] by expert, see experts/align.py. ids int32 [n, top_k], negative: no
    route; may be columns of a wider tensor. block_expert int32 [blocks], block_routes int32 [blocks, block], with at
    least `num_blocks` blocks. counts: int32, room for `counts_shape`; None: in one launch, however many routes there
    are."""
    shape = None if counts is None else counts_shape(ids.numel(), experts)
    if counts is not None and shape is not None:
        _align_counted(ids, count, experts, block_expert, block_routes, counts, shape)
        return
    blocks, block = block_routes.shape
    chunk, warps = routes_at_once(ids.numel())
    align_kernel(
        (experts,),
        ids,
        count,
        block_expert,
        block_routes,
        experts,
        ids.shape[1],
        row_stride(ids),
        block,
        blocks,
        chunk,
        1 << experts.bit_length(),
        pdl(),
        num_warps=warps,
        launch_pdl=pdl(),
    )


def routes_at_once(routes: int) -> tuple[int, int]:
    """Returns the routes per pass over `routes` routes, and its warps."""
    if routes >= 8192:
        return 8192, 16
    return min(1024, max(64, next_power_of_2(routes))), 4


def _align_counted(
    ids: Tensor,
    count: Tensor,
    experts: int,
    block_expert: Tensor,
    block_routes: Tensor,
    counts: Tensor,
    shape: tuple[int, int],
) -> None:
    chunks, size = shape
    blocks, block = block_routes.shape
    top_k, stride = ids.shape[1], row_stride(ids)
    count_kernel(
        (chunks,), ids, count, counts, experts, top_k, stride, COUNTED, size, pdl(),
        num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
    place_kernel(
        (chunks + experts,), ids, count, counts, block_expert, block_routes,
        experts, top_k, stride, block, blocks, COUNTED, chunks, size, SUMMED, pdl(),
        num_warps=8, launch_pdl=pdl(),
    )  # fmt: skip


def experts_up(
    x: Tensor,
    gate: list[Tensor],
    gate_kind: int,
    up: list[Tensor],
    up_kind: int,
    cols: int,
    block_expert: Tensor,
    block_routes: Tensor,
    top_k: int,
    h: Tensor,
    *,
    options: Gated = SILU,
) -> None:
    """Computes h[route] = gated(gate(x[route // top_k]), up(x[route // top_k])) for every route in the blocks of
    `align_routes`: block_expert int32 [blocks], block_routes int32 [blocks, block]. x [n, hidden], h [n * top_k, ff]:
    floats; cols: hidden. gate, up: codes, scales and supers of `Planes`; gate_kind, up_kind: ggml's numbers of the
    matrices' types."""
    g, u = weight_of(gate, gate_kind, cols), weight_of(up, up_kind, cols)
    tile_up = _METHODS[block_routes.shape[1]].up
    assert tile_up is not None
    run_gated_gemm(x, g, u, RouteBlocks(block_expert, block_routes), top_k, h, tile=tile_up, options=options)


def experts_down(
    h: Tensor,
    down: list[Tensor],
    down_kind: int,
    cols: int,
    block_expert: Tensor,
    block_routes: Tensor,
    count: Tensor,
    parts: Tensor,
    *,
    bias: Tensor | None = None,
) -> None:
    """Computes parts[route] = down(h[route]) + bias for every route in the blocks, which are given as for `experts_up`;
    other parts stay unchanged. h [n * top_k, ff]; cols: ff. parts [n, top_k, hidden], possibly part of a wider tensor
    [n, .., hidden]; norm.add_norm later multiplies them by weights and adds them. bias float32 [experts, hidden].
    down_kind: ggml's number of the matrix's type. Raises ValueError if `parts` has other strides."""
    w = weight_of(down, down_kind, cols)
    _, top_k, hidden = parts.shape
    per_token = parts.stride(0) // hidden
    if parts.stride() != (per_token * hidden, hidden, 1):
        raise ValueError(f"parts of strides {parts.stride()} must be columns of a contiguous tensor")
    tile = _METHODS[block_routes.shape[1]].down
    assert tile is not None
    run_gemm(
        h,
        w,
        None,
        RouteBlocks(block_expert, block_routes),
        count,
        parts,
        tile=tile,
        bias=bias,
        top_k=top_k,
        parts=per_token,
    )


def shared_gate(
    x: Tensor, weight: Tensor | None, count: Tensor, weights_out: Tensor, ids_out: Tensor | None = None
) -> None:
    """Computes weights_out[i] = sigmoid(weight . x[i]), or 1 without weight, for i < count[0]: the factor of a shared
    expert's output.

    x [n, hidden], any float dtype; weight float32 [hidden]; weights_out float32 [n], any stride: a column of the
    routing weights. ids_out int32 [n], likewise: 0, the shared expert's index, and -1 from row count[0] on."""
    hidden = x.shape[1]
    shared_gate_kernel(
        (len(x),),
        x,
        weight,
        count,
        weights_out,
        ids_out,
        hidden,
        weights_out.stride(0),
        0 if ids_out is None else ids_out.stride(0),
        next_power_of_2(hidden),
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )


# Block sizes identify the methods.
_METHODS = {m.block: m for m in map(method_for, (64, 128, 512, 2048, 8192))}


class BlockWorkspace:
    """Buffers for sorted routes, for batches of up to `tokens` rows with their method, or for `large_batch.py`."""

    def __init__(
        self,
        tokens: int,
        top_k: int,
        experts: int,
        device: torch.device | str,
        *,
        large_batch_block: int | None = None,
    ) -> None:
        """large_batch_block: routes per block for `large_batch.py`; None: not for it."""
        self.is_large_batch = large_batch_block is not None
        self.method = method_for(tokens) if large_batch_block is None else Method(large_batch_block)
        blocks = num_blocks(tokens, top_k, experts, self.method.block)
        self.expert = torch.empty(blocks, dtype=torch.int32, device=device)
        self.routes = torch.empty(blocks, self.method.block, dtype=torch.int32, device=device)
        shape = counts_shape(tokens * top_k, experts)
        self.counts = None if shape is None else torch.empty(shape, dtype=torch.int32, device=device)
