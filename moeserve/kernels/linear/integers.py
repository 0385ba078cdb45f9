"""Launches products with weights as integers in float16 (integer_gemm.py): which matrices have them, activations in
their form, and the product of a step's rows with a whole matrix.

The routed experts' products are in experts/integers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.launch import multiprocessors, next_power_of_2, pdl, warpgroups
from moeserve.kernels.linear.integer_order import integer_order_kernel
from moeserve.kernels.linear.integer_pieces import (
    MOST_PIECES,
    PIECE_TOKENS,
    SUPER_BLOCKS,
    has_whole_super_blocks,
    piece_tokens,
    pieces_by_columns,
)
from moeserve.kernels.linear.operands import RouteBlocks
from moeserve.kernels.linear.wide_matrices import is_wide
from moeserve.kernels.planes import Planes
from moeserve.quantization import Scale
from moeserve.quantization.quant_type import SUPER_BLOCK


@dataclass(frozen=True, slots=True)
class IntegerTile:
    warpgroups: int  # 1 or 2, each with 64 rows
    super_blocks: int  # of a stage: 1 or 2
    stages: int

    @property
    def programs(self) -> int:
        """Programs per multiprocessor."""
        return 2 // self.warpgroups

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread: on average, of a second multiplying warpgroup, of the copying one."""
        return (128, 0, 80) if self.warpgroups == 1 else (168, 224, 56)


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Activations for `integer_gemm_kernel`: columns in the order of its products, each row divided by its factor, so
    that float16 holds it. sums: for each super-block of 256 columns the sums of its 8 groups, then the rounding errors
    of these."""

    x: Tensor  # float16 [n, cols]
    sums: Tensor  # float16 [n, cols / 16]
    factors: Tensor  # float32 [n]


def has_integers(planes: Planes) -> bool:
    """Returns whether the products support a matrix, on this GPU: Q4_K's scales and codes, whole super-blocks; Hopper,
    where they were measured."""
    f = planes.type.layout
    if f is None or f.is_signed or f.table is not None or not has_whole_super_blocks(planes.cols):
        return False
    return f.scale == Scale.U8_MIN and (f.low_bits, f.high_bits) == (4, 0) and warpgroups()


def integer_order(x: Tensor, count: Tensor, rows: IntegerRows, top_k: int = 1) -> None:
    """Prepares rows below count[0] * top_k of x [n, cols]."""
    n, cols = x.shape
    block = next_power_of_2(cols)
    integer_order_kernel(
        (n,), x, count, rows.x, rows.sums, rows.factors, cols, top_k, block, pdl(),
        num_warps=min(16, max(4, block // 2048)), launch_pdl=pdl(),
    )  # fmt: skip


def launch(
    x: IntegerRows,
    first: Planes,
    second: Planes | None,
    routing: RouteBlocks,
    out: Tensor,
    *,
    tile: IntegerTile,
    top_k: int = 1,
    parts: int = 1,
    split: int = 1,
    partials: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    """Launches `integer_gemm_kernel`, which explains the arguments, and writes `out`: products of x with the matrices
    `first`, or with `first` and `second` joined by the activation. partials (float32) and counters (int32, zeros):
    needed where split > 1."""
    # Gluon's modules are imported where its kernels run.
    from moeserve.kernels.linear.code_boxes import code_boxes
    from moeserve.kernels.linear.integer_gemm import integer_gemm

    def words(planes: Planes) -> tuple[object, Tensor, Tensor]:
        boxes = code_boxes(planes.codes.view(torch.int32), planes.cols, tile.super_blocks)
        return boxes, planes.scales, planes.supers

    blocks, block = routing.routes.shape
    registers, multiplying, copying = tile.registers
    integer_gemm(
        (tile.programs * multiprocessors(),), x.x, x.sums, x.factors, *words(first),
        *((None, None, None) if second is None else words(second)), routing.expert, routing.routes, out, partials,
        counters, first.rows, first.cols, top_k, parts, blocks, split, block, tile.super_blocks, tile.stages,
        tile.warpgroups, multiplying, copying, pdl(), num_warps=4, maxnreg=registers, launch_pdl=pdl(),
    )  # fmt: skip


class DenseIntegers:
    """Products of up to `rows` rows with whole matrices. Owns the pieces' counters, which are 0 between launches."""

    def __init__(self, ordered: IntegerRows, partials: Tensor, *, only_wide: bool = False) -> None:
        """ordered: memory for the activations, of the widest input. partials: float32, `partial_numbers` of the
        rows. only_wide: whether a GEMV is faster for matrices that are not wide."""
        rows = len(ordered.x)
        self._ordered, self._partials, self._only_wide = ordered, partials, only_wide
        block = piece_tokens(rows)
        device = partials.device
        routes = torch.arange(-(-rows // block) * block, dtype=torch.int32, device=device).view(-1, block)
        routes[routes >= rows] = -1
        self._routing = RouteBlocks(torch.zeros(len(routes), dtype=torch.int32, device=device), routes)
        self._counters = torch.zeros(MOST_PIECES, dtype=torch.int32, device=device)

    def takes(self, planes: Planes) -> bool:
        """Returns whether `multiply` is to compute products with a matrix."""
        if self._only_wide and not is_wide(planes.rows, planes.cols):
            return False
        return planes.cols <= self._ordered.x.shape[1] and has_integers(planes)

    def order(self, x: Tensor, count: Tensor) -> IntegerRows:
        """Launches the preparation of x [rows, cols] for `multiply`. Returns views that the next call overwrites."""
        cols, own = x.shape[1], self._ordered
        ordered, sums = (
            memory.view(-1)[: len(x) * width].view(len(x), width)
            for memory, width in ((own.x, cols), (own.sums, cols // 16))
        )
        rows = IntegerRows(ordered, sums, own.factors)
        integer_order(x, count, rows)
        return rows

    def multiply(self, x: IntegerRows, matrices: Sequence[Planes], out: Tensor) -> None:
        """Launches the products of x with matrices that have integers, of equally many rows, side by side in out [rows,
        rows of all matrices], floats."""
        routing = self._routing
        blocks, block = routing.routes.shape
        tile = IntegerTile(1, SUPER_BLOCKS, 2 if block == PIECE_TOKENS else 3)
        for i, planes in enumerate(matrices):
            split = pieces_by_columns(planes.rows, planes.cols // SUPER_BLOCK, blocks)
            launch(
                x, planes, None, routing, out.view(-1)[i * planes.rows :], tile=tile, parts=len(matrices), split=split,
                partials=self._partials, counters=self._counters,
            )  # fmt: skip
