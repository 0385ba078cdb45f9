"""Launches the routed experts for some tokens per expert, with the products of linear/integer_gemm.py: activations in
float16, gate and up, then down.

Specification: `reference.py`; blocks of routes come from `op.align_routes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.experts.op import num_blocks
from moeserve.kernels.linear.integers import (
    IntegerRows,
    IntegerTile,
    has_integers,
    has_six_bits,
    launch,
    six_bit_tile,
)
from moeserve.kernels.linear.operands import SILU, Gated, RouteBlocks
from moeserve.kernels.planes import Planes


@dataclass(frozen=True, slots=True)
class IntegerMethod:
    """Block size and tiles of the products, chosen by the number of rows in the step."""

    block: int  # routes per block
    up: IntegerTile
    down: IntegerTile


def integer_method(tokens: int) -> IntegerMethod:
    """Returns the method for a padded number of rows; measured (docs/results/gpu-kernels.md). tokens: padded number of
    rows of the step."""
    if tokens <= 64:
        return IntegerMethod(8, IntegerTile(1, 2, 3), IntegerTile(1, 2, 3))
    if tokens <= 128:
        return IntegerMethod(16, IntegerTile(2, 2, 4), IntegerTile(1, 2, 3))
    return IntegerMethod(32, IntegerTile(2, 2, 3), IntegerTile(1, 1, 4))


class IntegerWorkspace:
    """Buffers for steps of up to `tokens` rows."""

    def __init__(
        self,
        tokens: int,
        top_k: int,
        experts: int,
        x: IntegerRows,
        h: IntegerRows,
        *,
        takes_six_bits: bool,
    ) -> None:
        """x: memory for the inputs of gate and up, one per row; h: memory for the inputs of down, one per route.
        takes_six_bits: whether down in Q6_K is multiplied so."""
        self.x, self.h = x, h
        self.method = integer_method(tokens)
        self._takes_six_bits = takes_six_bits
        blocks = num_blocks(tokens, top_k, experts, self.method.block)
        device = x.x.device
        self.routing = RouteBlocks(
            torch.empty(blocks, dtype=torch.int32, device=device),
            torch.empty(blocks, self.method.block, dtype=torch.int32, device=device),
        )

    def takes_down(self, down: Planes) -> bool:
        """Returns whether `integers_down` is to compute products with a matrix."""
        return has_integers(down) and (self._takes_six_bits or not has_six_bits(down))


def has_gated_integers(gate: Planes, up: Planes, options: Gated) -> bool:
    """Returns whether `integers_up` supports two matrices joined in this way: SiLU without limit and biases."""
    is_plain = options.form == SILU.form and options.gate_bias is None and options.up_bias is None
    return is_plain and all(has_integers(m) and not has_six_bits(m) for m in (gate, up))


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
    """Computes h[route] = silu(gate(x[route // top_k])) * up(x[route // top_k]) for every route in the blocks. h [n *
    top_k, ff]."""
    launch(x, gate, up, routing, h, tile=tile, top_k=top_k)


def down_tile(down: Planes, method: IntegerMethod) -> IntegerTile:
    return six_bit_tile(method.block) if has_six_bits(down) else method.down


def integers_down(
    h: IntegerRows, down: Planes, routing: RouteBlocks, parts: Tensor, *, tile: IntegerTile
) -> None:
    """Computes parts[route] = down(h[route]) for every route in the blocks; other parts stay unchanged. parts [n,
    top_k, hidden], possibly part of a wider tensor [n, .., hidden]. Raises ValueError if `parts` has other strides."""
    _, top_k, hidden = parts.shape
    per_token = parts.stride(0) // hidden
    if parts.stride() != (per_token * hidden, hidden, 1):
        raise ValueError(f"parts of strides {parts.stride()} must be columns of a contiguous tensor")
    launch(h, down, None, routing, parts, tile=tile, top_k=top_k, stride=per_token * hidden)
