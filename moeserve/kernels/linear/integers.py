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
    PIECE_ROWS,
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

_FOUR_BITS, _SIX_BITS = (Scale.U8_MIN, 4, 0), (Scale.I8, 4, 2)


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


def six_bit_tile(block: int) -> IntegerTile:
    """Returns the tile of products with Q6_K, for blocks of `block` routes or rows."""
    if block <= 8:
        return IntegerTile(1, 2, 3)
    return IntegerTile(1, 1, 5 if block <= 16 else 3)


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Activations for `integer_gemm_kernel`: columns in the order of its products, each row divided by its factor, so
    that float16 holds it. sums: for each super-block of 256 columns the sums of its 8 groups, then the rounding errors
    of these."""

    x: Tensor  # float16 [n, cols]
    sums: Tensor  # float16 [n, cols / 16]
    factors: Tensor  # float32 [n]


def has_integers(planes: Planes) -> bool:
    """Returns whether the products support a matrix, on this GPU: Q4_K's or Q6_K's scales and codes, whole
    super-blocks; Hopper, where they were measured."""
    f = planes.type.layout
    if f is None or f.is_signed or f.table is not None or not has_whole_super_blocks(planes.cols):
        return False
    return (f.scale, f.low_bits, f.high_bits) in (_FOUR_BITS, _SIX_BITS) and warpgroups()


def has_six_bits(planes: Planes) -> bool:
    """Returns whether a matrix that has integers is of Q6_K, and not of Q4_K."""
    return planes.type.layout is not None and planes.type.layout.high_bits > 0


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
    stride: int = 0,
    split: int = 1,
    partials: Tensor | None = None,
    counters: Tensor | None = None,
    pair: int = 0,
) -> None:
    """Launches `integer_gemm_kernel`, which explains the arguments, and writes `out`: products of x with the matrices
    `first`, or with `first` and `second` joined by the activation. stride: numbers of out per token. partials (float32)
    and counters (int32, zeros): needed where split > 1."""
    # Gluon's modules are imported where its kernels run.
    from moeserve.kernels.linear.code_boxes import code_boxes, six_bit_boxes
    from moeserve.kernels.linear.integer_gemm import integer_gemm

    def words(planes: Planes) -> tuple[object, Tensor, Tensor]:
        boxes = code_boxes(planes.codes.view(torch.int32), planes.cols, tile.super_blocks)
        return boxes, planes.scales, planes.supers

    if has_six_bits(first):
        boxes = six_bit_boxes(first.codes.view(torch.int32), first.cols, tile.super_blocks)
        of_first: tuple[object, ...] = (*boxes, first.scales, first.supers)
    else:
        codes, *scales = words(first)
        of_first = (codes, None, *scales)
    blocks, block = routing.routes.shape
    registers, multiplying, copying = tile.registers
    integer_gemm(
        (tile.programs * multiprocessors(),), x.x, x.sums, x.factors, *of_first,
        *((None, None, None) if second is None else words(second)), routing.expert, routing.routes, out, partials,
        counters, first.rows, first.cols, top_k, stride, blocks, split, block, tile.super_blocks, tile.stages,
        tile.warpgroups, multiplying, copying, pair, pdl(), num_warps=4, maxnreg=registers, launch_pdl=pdl(),
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
        """Launches the products of x with matrices that have integers, side by side in out [rows, rows of all
        matrices], floats."""
        routing, at = self._routing, 0
        blocks, block = routing.routes.shape
        used = 0  # pieces of the first of two products, which may still be computed
        for i, planes in enumerate(matrices):
            split = pieces_by_columns(planes.rows, planes.cols // SUPER_BLOCK, blocks)
            pieces = split * -(-planes.rows // PIECE_ROWS) * blocks if split > 1 else 0
            pair = 0 if len(matrices) != 2 or used + pieces > MOST_PIECES else i + 1
            first = used if pair == 2 else 0
            used = pieces
            tile = IntegerTile(1, SUPER_BLOCKS, 2 if block == PIECE_TOKENS else 3)
            if has_six_bits(planes):
                tile = six_bit_tile(block)
            launch(
                x, planes, None, routing, out.view(-1)[at:], tile=tile, stride=out.shape[1], split=split,
                partials=self._partials[first * PIECE_ROWS * block :], counters=self._counters[first:], pair=pair,
            )  # fmt: skip
            at += planes.rows
