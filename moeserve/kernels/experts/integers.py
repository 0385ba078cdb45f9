"""Launches the routed experts for some tokens per expert, with the products of linear/integer_gemm.py: activations in
float16, gate and up, then down.

Specification: `reference.py`; blocks of routes come from `op.align_routes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.launch import multiprocessors, pdl
from moeserve.kernels.linear.integers import IntegerRows, has_integers, integer_words
from moeserve.kernels.linear.op import SILU, Gated, RouteBlocks
from moeserve.kernels.planes import Planes


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
        return IntegerMethod(IntegerTile(64, 4, 4, 2, None), IntegerTile(64, 4, 1, 4, 128))
    return IntegerMethod(IntegerTile(64, 4, 2, 3, 168), IntegerTile(64, 4, 1, 4, 128))


@dataclass(frozen=True, slots=True)
class IntegerWorkspace:
    """Buffers for the inputs of gate and up, and of down."""

    x: IntegerRows  # of a step's rows
    h: IntegerRows  # of its routes
    method: IntegerMethod


def has_gated_integers(gate: Planes, up: Planes, options: Gated) -> bool:
    """Returns whether `integers_up` supports two matrices joined in this way: SiLU without limit and biases."""
    is_plain = options.form == SILU.form and options.gate_bias is None and options.up_bias is None
    return is_plain and has_integers(gate) and has_integers(up)


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
    _launch(x, integer_words(gate), integer_words(up), gate, routing, top_k, top_k, h, tile)


def integers_down(
    h: IntegerRows, down: Planes, routing: RouteBlocks, parts: Tensor, *, tile: IntegerTile
) -> None:
    """parts[route] = down(h[route]) for every route in the blocks; other parts stay unchanged. parts [n, top_k,
    hidden], possibly part of a wider tensor [n, .., hidden]."""
    _, top_k, hidden = parts.shape
    per_token = parts.stride(0) // hidden
    if parts.stride() != (per_token * hidden, hidden, 1):
        raise ValueError(f"parts of strides {parts.stride()} are no columns of contiguous ones")
    _launch(h, integer_words(down), (None, None, None), down, routing, top_k, per_token, parts, tile)


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
        routing.routes, out, None, None, planes.rows, planes.cols, top_k, parts, len(routing.expert), 1, tile.rows,
        routing.routes.shape[1], tile.warps, tile.super_blocks, pdl(), num_warps=tile.warps, maxnreg=tile.registers,
        launch_pdl=pdl(),
    )  # fmt: skip
