"""Multiplies tens of rows per expert by quantised matrices, by warpgroup products (Hopper's wgmma). Their left
operand, the weights, comes from the registers in which codes are unpacked (quad_weights.py).

A loop iteration has one product per matrix, so that Triton lets the tensor cores compute it while the next
iteration's weights are unpacked. With several products per iteration, as in gemm.py, it waits for each.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.gated import gated
from moeserve.kernels.linear.gemm import add_bias, add_gate_bias, part_rows, route_pointers, store_tile
from moeserve.kernels.linear.k_blocks import expert_planes
from moeserve.kernels.linear.quad_order import quad_columns
from moeserve.kernels.linear.quad_weights import quad_weights


@triton.jit
def multiply_quads(
    codes, scales, supers, up_codes, up_scales, up_supers, selectors, x, live, r,
    COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, BM: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Returns float32 [BN, BM]: rows r times the rows that x [BM] points to, in quad order, for the matrix and,
    unless F_UP is None, for up. An iteration takes two low parts of KB K blocks."""
    tl.static_assert(COLS % (128 * KB) == 0)
    SPAN: tl.constexpr = 64 * KB  # columns per iteration
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros([r.shape[0], BM], tl.float32)
    up_acc = acc
    k = tl.arange(0, SPAN)
    for step in range(COLS // SPAN):
        first, q = step // 2 * KB, step % 2
        a = tl.trans(tl.load(x[:, None] + (step * SPAN + k)[None, :], live[:, None], 0.0))
        w = quad_weights(codes, scales, supers, selectors, r, first, q, COLS, F, KB, dtype)
        acc = tl.dot(w, a, acc)
        if F_UP is not None:
            w = quad_weights(up_codes, up_scales, up_supers, selectors, r, first, q, COLS, F_UP, KB, dtype)
            up_acc = tl.dot(w, a, up_acc)
    return acc, up_acc


@kernel
def quad_gemm_kernel(
    x, codes, scales, supers, bias, block_expert, block_routes, selectors, out,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[route] = W x[route], [.., ROWS], for blocks of routes; x in quad order. Other arguments as for
    gemm.gemm_kernel, with one matrix."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    routes, live, rows = route_pointers(x, block_routes, None, block * BM + tl.arange(0, BM), COLS, 1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    r = tl.minimum(row, ROWS - 1)
    y, _up = multiply_quads(
        codes, scales, supers, None, None, None, selectors, rows, live, r, COLS, F, None, BM, KB
    )
    y = add_bias(y, bias, expert, row, ROWS)
    store_tile(y, out, part_rows(routes, TOP_K, PARTS), live, row, ROWS, ROWS)


@kernel
def gated_quad_gemm_kernel(
    x, codes, scales, supers, up_codes, up_scales, up_supers, bias, up_bias, block_expert, block_routes,
    selectors, out,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, FORM: tl.constexpr,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes gated(W x[route // TOP_K], W_up x[route // TOP_K]) to row `route` of out [.., ROWS]; x and out are in
    quad order, so the matrices' rows are taken in that order. Other arguments as for gemm.gated_gemm_kernel."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    routes, live, rows = route_pointers(x, block_routes, None, block * BM + tl.arange(0, BM), COLS, TOP_K)
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    row = quad_columns(place, KB)
    r = tl.minimum(row, ROWS - 1)
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    up_codes, up_scales, up_supers = expert_planes(up_codes, up_scales, up_supers, expert, ROWS, COLS, F_UP)
    y, z = multiply_quads(
        codes,
        scales,
        supers,
        up_codes,
        up_scales,
        up_supers,
        selectors,
        rows,
        live,
        r,
        COLS,
        F,
        F_UP,
        BM,
        KB,
    )
    y = add_gate_bias(y, bias, expert, routes, live, row, ROWS, False)
    z = add_gate_bias(z, up_bias, expert, routes, live, row, ROWS, False)
    store_tile(gated(y, z, FORM), out, routes, live, place, ROWS, ROWS)
