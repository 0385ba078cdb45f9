"""Launches the routed experts for thousands of tokens, or of types with codebooks for some tokens: unpacks some experts
at a time to floats, then multiplies.

Specification: `reference.py`; blocks of routes come from `op.align_routes`.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.linear.large_batch import (
    FEW_BLOCK,
    ExpertsInScratch,
    UnpackScratch,
    run_float_gemm,
    unpack,
)
from moeserve.kernels.linear.operands import SILU, Gated, RouteBlocks, Weight, weight_of


def large_batch_up(
    x: Tensor,
    gate: list[Tensor],
    gate_kind: int,
    up: list[Tensor],
    up_kind: int,
    cols: int,
    routing: RouteBlocks,
    top_k: int,
    h: Tensor,
    scratch: UnpackScratch,
    *,
    options: Gated = SILU,
    unpacked: Tensor | None = None,
) -> None:
    """Computes h[route] = gated(gate(x[route // top_k]), up(x[route // top_k])) for every route in the blocks, which
    have BLOCK or FEW_BLOCK routes of `linear/large_batch.py`. h [n * top_k, ff]. unpacked: `unpack_gate_up` of all
    experts; None: they are unpacked into the scratch. gate_kind, up_kind: ggml's numbers of the matrices' types."""
    g, u = weight_of(gate, gate_kind, cols), weight_of(up, up_kind, cols)
    if unpacked is not None:
        experts = ExpertsInScratch(scratch.group(0, len(g.codes)), routing, top_k)
        run_float_gemm(x, unpacked, None, h, experts=experts, options=options)
        return
    used = _used(routing)
    for first, end in scratch.groups(len(g.codes), 2 * g.rows, cols):
        in_turn = scratch.view(end - first, 2 * g.rows, cols)
        unpack_gate_up(g, u, in_turn, first, used=used)
        experts = ExpertsInScratch(scratch.group(first, end), routing, top_k)
        run_float_gemm(x, in_turn, None, h, experts=experts, options=options)


def large_batch_down(
    h: Tensor,
    down: list[Tensor],
    down_kind: int,
    cols: int,
    routing: RouteBlocks,
    parts: Tensor,
    scratch: UnpackScratch,
    *,
    bias: Tensor | None = None,
    unpacked: Tensor | None = None,
) -> None:
    """Computes parts[route] = down(h[route]) + bias for every route in the blocks; other parts stay unchanged. parts
    [n, top_k, hidden], possibly part of a wider tensor [n, .., hidden]; bias float32 [experts, hidden]. unpacked: all
    experts' matrices as floats; None: they are unpacked into the scratch. down_kind: ggml's number of the matrix's
    type. Raises ValueError if `parts` has other strides."""
    w = weight_of(down, down_kind, cols)
    _, top_k, hidden = parts.shape
    per_token = parts.stride(0) // hidden
    if parts.stride() != (per_token * hidden, hidden, 1):
        raise ValueError(f"parts of strides {parts.stride()} must be columns of a contiguous tensor")
    if unpacked is not None:
        experts = ExpertsInScratch(scratch.group(0, len(w.codes)), routing, 1, top_k, per_token)
        run_float_gemm(h, unpacked, None, parts, experts=experts, bias=bias)
        return
    for first, end in scratch.groups(len(w.codes), w.rows, cols):
        floats = scratch.view(end - first, w.rows, cols)
        unpack(w, floats, first, used=_used(routing))
        experts = ExpertsInScratch(scratch.group(first, end), routing, 1, top_k, per_token)
        run_float_gemm(h, floats, None, parts, experts=experts, bias=bias)


def unpack_gate_up(
    gate: Weight, up: Weight, out: Tensor, first: int = 0, *, used: Tensor | None = None
) -> None:
    """Unpacks experts from `first` on, rows of gate and of up in turn. out [experts, 2 * width, hidden]; used: as in
    `unpack`."""
    unpack(gate, out, first, every=2, used=used)
    unpack(up, out, first, every=2, at=1, used=used)


def _used(routing: RouteBlocks) -> Tensor | None:
    """Returns the experts that have routes, if there may be others: in steps of few tokens."""
    return routing.expert if routing.routes.shape[1] == FEW_BLOCK else None
