"""Experts for few tokens: routes are not sorted; integer dot products of linear/k_blocks.py.

Two routes of the same expert share its bytes through the L2 cache. Sorting would save these reads but waste as much
on unpacking for the empty places of blocks (measured at 8 tokens).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.gated import gated
from moeserve.kernels.linear.k_blocks import (
    dot_floats,
    dot_k_blocks,
    expert_planes,
    k_block_indices,
    load_columns,
    load_k_blocks,
    multiply_columns,
    tile_rows,
)
from moeserve.kernels.quantize.triton import store_quantized


@triton.jit
def gate_and_up(
    x_codes, x_scales, codes, scales, supers, up_codes, up_scales, up_supers, r,
    COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Returns the products of rows r [1, BR, NB] of both matrices with a row of activations: float32 [BR, NB] each."""
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    u = k_block_indices(BK // 128, r.shape[1])
    y = tl.zeros((u + r).shape, tl.float32)
    z = y
    for at in tl.static_range(0, K_BLOCKS, BK // 128):
        v = at + u
        live = (v < K_BLOCKS) & (r >= 0)
        gate = load_k_blocks(codes, scales, supers, r, v, live, COLS, F)
        up = load_k_blocks(up_codes, up_scales, up_supers, r, v, live, COLS, F_UP)
        for h in tl.static_range(4):
            column = v * 128 + h * 32
            x = load_columns(x_codes, x_scales, column, column < COLS, F)
            y += multiply_columns(x, gate, h, F)
            if F.is_book != F_UP.is_book:
                x = load_columns(x_codes, x_scales, column, column < COLS, F_UP)
            z += multiply_columns(x, up, h, F_UP)
    return tl.sum(y, 0), tl.sum(z, 0)


@triton.jit
def dot_row(
    x, x_codes, x_scales, codes, scales, supers, r, COLS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr
):
    """Returns the products of rows r [1, BR, NB] of one matrix (floats if F is None) with a row of activations."""
    if F is None:
        out = dot_floats(codes, x, r, COLS, BK)
    else:
        u = k_block_indices(BK // 128, r.shape[1])
        acc = tl.zeros((u + r).shape, tl.float32)
        for at in tl.static_range(0, (COLS + 127) // 128, BK // 128):
            v = at + u
            live = (v < (COLS + 127) // 128) & (r >= 0)
            k_blocks = load_k_blocks(codes, scales, supers, r, v, live, COLS, F)
            acc = dot_k_blocks(acc, k_blocks, v, x_codes, x_scales, COLS, F)
        out = tl.sum(acc, 0)
    return out


@triton.jit
def load_bias(bias, expert, r, ROWS: tl.constexpr):
    """Returns float32 [BR, NB], the bias of rows r [1, BR, NB] for an expert (or route); 0 for rows of -1, beyond
    ROWS."""
    rows = tl.reshape(r, [r.shape[1], r.shape[2]])
    return tl.load(bias + expert * ROWS + rows, (rows >= 0) & (rows < ROWS), 0.0).to(tl.float32)


@kernel
def up_kernel(
    x, x_codes, x_scales, codes, scales, supers, up_codes, up_scales, up_supers, bias, up_bias, experts, out, out_codes,
    out_scales,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, FORM: tl.constexpr,
    BY_ROUTE: tl.constexpr, TOP_K: tl.constexpr, X_TOP_K: tl.constexpr, STRIDE: tl.constexpr, BR: tl.constexpr,
    NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes gated(W x[route // X_TOP_K], W_up x[route // X_TOP_K]) to row `route` of out [.., ROWS], or as int8 to
    out_codes and out_scales, with the matrices of experts[route]; nothing if that is negative. experts [..,
    TOP_K], rows STRIDE apart. bias, up_bias: [experts, ROWS], optional; BY_ROUTE: [routes, ROWS]. Grid (row
    tiles, routes)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, route = tl.program_id(0), tl.program_id(1)
    at = route
    if STRIDE != TOP_K:
        at = route // TOP_K * STRIDE + route % TOP_K
    expert = tl.load(experts + at).to(tl.int64)
    if expert < 0:
        return
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    up_codes, up_scales, up_supers = expert_planes(up_codes, up_scales, up_supers, expert, ROWS, COLS, F_UP)
    first_row = tile * (BR * NB)
    r = tile_rows(first_row, ROWS, BR, NB)
    token = (route // X_TOP_K).to(tl.int64)
    if x_codes is not None:
        x_codes += token * (COLS // 4)
        x_scales += token * (COLS // 32)
    if x is not None:
        x += token * COLS
    if F is not None and F_UP is not None:
        y, z = gate_and_up(
            x_codes, x_scales, codes, scales, supers, up_codes, up_scales, up_supers, r, COLS, F, F_UP, BK
        )
    else:
        y = dot_row(x, x_codes, x_scales, codes, scales, supers, r, COLS, F, BK)
        z = dot_row(x, x_codes, x_scales, up_codes, up_scales, up_supers, r, COLS, F_UP, BK)
    owner = route.to(tl.int64) if BY_ROUTE else expert
    if bias is not None:
        y += load_bias(bias, owner, r, ROWS)
    if up_bias is not None:
        z += load_bias(up_bias, owner, r, ROWS)
    h = tl.reshape(gated(y, z, FORM), [BR * NB])
    at = route.to(tl.int64) * ROWS
    if out_codes is not None:
        store_quantized(h, out_codes + at, out_scales + at // 32, first_row, ROWS, BR * NB)
    else:
        row = first_row + tl.arange(0, BR * NB)
        tl.store(out + at + row, h.to(out.dtype.element_ty), row < ROWS)


@triton.jit
def dot_experts(
    x_codes, x_scales, codes, scales, supers, experts, weights, r,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Returns the weighted sum over a token's experts of the products of rows r [1, BR, NB] of their matrices with
    their rows of activations: float32 [BR, NB]. All pointers except the matrices' point to the token's first route.

    The experts are treated as one long row of TOP_K times as many K blocks, of which each thread takes every KB-th.
    """
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    every = k_block_indices(KB, r.shape[1])
    acc = tl.zeros((every + r).shape, tl.float32)
    for at in tl.static_range(0, TOP_K * K_BLOCKS, KB):
        j, u = (at + every) // K_BLOCKS, (at + every) % K_BLOCKS
        expert = tl.load(experts + j, j < TOP_K, -1).to(tl.int64)
        there = expert >= 0
        share = tl.load(weights + j, there, 0.0)
        c, s, d = expert_planes(codes, scales, supers, tl.where(there, expert, 0), ROWS, COLS, F)
        k_blocks = load_k_blocks(c, s, d, r, u, there & (r >= 0), COLS, F)
        for h in tl.static_range(4):
            column = u * 128 + h * 32
            x = load_columns(x_codes, x_scales, j * COLS + column, there & (column < COLS), F)
            acc += share * multiply_columns(x, k_blocks, h, F)
    return tl.sum(acc, 0)


@kernel
def down_kernel(
    x, x_codes, x_scales, codes, scales, supers, bias, experts, weights, count, out,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, IDS_STRIDE: tl.constexpr,
    WEIGHTS_STRIDE: tl.constexpr, ADDS: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[token] = sum over j of weights[token, j] * W x[token * TOP_K + j] with the matrix W of
    experts[token, j], skipped if that is negative; ADDS: added to out[token]. For tokens below count[0], which is read
    before the previous kernel has ended. bias float32 [experts, ROWS], optional, is added to each product. Grid (row
    tiles, tokens)."""
    if PDL:
        gdc_launch_dependents()
    first_row = tl.program_id(0) * (BR * NB)
    token = tl.program_id(1).to(tl.int64)
    existing = tl.load(count)
    if PDL:
        gdc_wait()
    if token >= existing:
        return
    experts += token * IDS_STRIDE
    weights += token * WEIGHTS_STRIDE
    r = tile_rows(first_row, ROWS, BR, NB)
    if F is None:
        y = tl.zeros([BR, NB], tl.float32)
        for j in range(TOP_K):
            expert = tl.load(experts + j).to(tl.int64)
            if expert >= 0:
                mine = codes + expert * (ROWS * COLS)
                y += tl.load(weights + j) * dot_floats(mine, x + (token * TOP_K + j) * COLS, r, COLS, BK)
    else:
        x_codes += token * (TOP_K * COLS // 4)
        x_scales += token * (TOP_K * COLS // 32)
        y = dot_experts(
            x_codes, x_scales, codes, scales, supers, experts, weights, r, ROWS, COLS, F, TOP_K, BK // 128
        )
    if bias is not None:
        for j in range(TOP_K):
            expert = tl.load(experts + j).to(tl.int64)
            if expert >= 0:
                y += tl.load(weights + j) * load_bias(bias, expert, r, ROWS)
    row = first_row + tl.arange(0, BR * NB)
    at = out + token * ROWS + row
    y = tl.reshape(y, [BR * NB])
    if ADDS:
        y += tl.load(at, row < ROWS, 0.0).to(tl.float32)
    tl.store(at, y.to(out.dtype.element_ty), row < ROWS)
