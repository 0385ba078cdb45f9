"""Launches the routed experts for some tokens per expert, with the products of linear/integer_gemm.py: activations in
float16, gate and up, then down.

Specification: `reference.py`; blocks of routes come from `op.align_routes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.launch import multiprocessors, next_power_of_2, pdl, warpgroups
from moeserve.kernels.linear.integer_order import integer_order_kernel
from moeserve.kernels.linear.op import SILU, Gated, RouteBlocks
from moeserve.kernels.planes import Planes
from moeserve.quantization import Scale
from moeserve.quantization.quant_type import SUPER_BLOCK


@dataclass(frozen=True, slots=True)
class IntegerTile:
    rows: int  # of all matrices of a program
    warps: int
    super_blocks: int  # copied at once: 1, 2 or 4
    programs: int  # per multiprocessor
    registers: int | None  # of a thread, at most


@dataclass(frozen=True, slots=True)
class IntegerMethod:
    """The tiles for a step of some size."""

    up: IntegerTile
    down: IntegerTile


def integer_method(tokens: int) -> IntegerMethod:
    """Returns the tiles for a padded number of rows; measured (docs/results/gpu-kernels.md)."""
    if tokens <= 64:
        return IntegerMethod(IntegerTile(64, 4, 2, 3, 168), IntegerTile(64, 4, 1, 4, 128))
    return IntegerMethod(IntegerTile(128, 8, 2, 1, None), IntegerTile(128, 8, 2, 2, 128))


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """Rows of activations as the products take them."""

    x: Tensor  # float16 [n, cols]
    sums: Tensor  # float16 [n, cols / 16]
    factors: Tensor  # float32 [n]


@dataclass(frozen=True, slots=True)
class IntegerWorkspace:
    """Buffers for the inputs of gate and up, and of down."""

    x: IntegerRows  # of a step's rows
    h: IntegerRows  # of its routes
    method: IntegerMethod


def has_integers(planes: Planes) -> bool:
    """Returns whether the products support a matrix, on this GPU: Q4_K's scales and codes, whole super-blocks; Hopper,
    where they were measured."""
    f = planes.type.layout
    if f is None or f.is_signed or f.table is not None or planes.cols % SUPER_BLOCK:
        return False
    return f.scale == Scale.U8_MIN and (f.low_bits, f.high_bits) == (4, 0) and warpgroups()


def has_gated_integers(gate: Planes, up: Planes, options: Gated) -> bool:
    """Returns whether `integers_up` supports two matrices joined in this way: SiLU without limit and biases."""
    is_plain = options.form == SILU.form and options.gate_bias is None and options.up_bias is None
    return is_plain and has_integers(gate) and has_integers(up)


def integer_order(x: Tensor, count: Tensor, rows: IntegerRows, top_k: int = 1) -> None:
    """Prepares rows below count[0] * top_k of x [n, cols]."""
    n, cols = x.shape
    integer_order_kernel(
        (n,), x, count, rows.x, rows.sums, rows.factors, cols, top_k, next_power_of_2(cols), pdl(), num_warps=4,
        launch_pdl=pdl(),
    )  # fmt: skip


def integers_up(
    x: IntegerRows,
    gate: Planes,
    up: Planes,
    routing: RouteBlocks,
    top_k: int,
    h: Tensor,
    *,
    tile: IntegerTile,
) -> None:
    """h[route] = silu(gate(x[route // top_k])) * up(x[route // top_k]) for every route in the blocks. h [n * top_k,
    ff]."""
    _launch(x, _words(gate), _words(up), gate, routing, top_k, top_k, h, tile)


def integers_down(
    h: IntegerRows, down: Planes, routing: RouteBlocks, parts: Tensor, *, tile: IntegerTile
) -> None:
    """parts[route] = down(h[route]) for every route in the blocks; other parts stay unchanged. parts [n, top_k,
    hidden], possibly part of a wider tensor [n, .., hidden]."""
    _, top_k, hidden = parts.shape
    per_token = parts.stride(0) // hidden
    if parts.stride() != (per_token * hidden, hidden, 1):
        raise ValueError(f"parts of strides {parts.stride()} are no columns of contiguous ones")
    _launch(h, _words(down), (None, None, None), down, routing, top_k, per_token, parts, tile)


def _launch(
    x: IntegerRows,
    words: tuple[Tensor, Tensor, Tensor],
    up_words: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None],
    planes: Planes,
    routing: RouteBlocks,
    top_k: int,
    parts: int,
    out: Tensor,
    tile: IntegerTile,
) -> None:
    # Gluon's module is imported where its kernels run.
    from moeserve.kernels.linear.integer_gemm import integer_gemm

    integer_gemm(
        (tile.programs * multiprocessors(),), x.x, x.sums, x.factors, *words, *up_words, routing.expert,
        routing.routes, out, planes.rows, planes.cols, top_k, parts, len(routing.expert), tile.rows,
        routing.routes.shape[1], tile.warps, tile.super_blocks, pdl(), num_warps=tile.warps, maxnreg=tile.registers,
        launch_pdl=pdl(),
    )  # fmt: skip


def _words(planes: Planes) -> tuple[Tensor, Tensor, Tensor]:
    return planes.codes.view(torch.int32), planes.scales, planes.supers
