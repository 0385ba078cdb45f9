"""Multiplies many tokens by float matrices, on the tensor cores: the products after `unpack.py`.

out = x W^T, with tokens as the left operand. For a gated product, the rows of gate and up alternate, so that a
thread holds both numbers of a pair.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.gated import gated
from moeserve.kernels.linear.gemm import part_rows, route_pointers


@triton.jit
def multiply_rows(x, w, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Returns float32 [BM, BN]: the products of the rows that x [BM] and w [BN] point to."""
    acc = tl.zeros([BM, BN], tl.float32)
    k = tl.arange(0, BK)
    for first in range(0, COLS, BK):
        if COLS % BK == 0:
            a = tl.load(x[:, None] + first + k[None, :])
            b = tl.load(w[:, None] + first + k[None, :])
        else:
            live = (first + k < COLS)[None, :]
            a = tl.load(x[:, None] + first + k[None, :], live, 0.0)
            b = tl.load(w[:, None] + first + k[None, :], live, 0.0)
        if a.dtype == tl.float32:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="tf32x3")
        else:
            acc = tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def column_bias(y, bias, expert, column, COLUMNS: tl.constexpr):
    """Returns y [BM, BN], plus an expert's bias float32 [.., COLUMNS] if there is one."""
    if bias is not None:
        y += tl.load(bias + expert * COLUMNS + column, column < COLUMNS, 0.0)[None, :]
    return y


@triton.jit
def gate_bias(y, bias, expert, routes, live, column, COLUMNS: tl.constexpr, BY_ROUTE: tl.constexpr):
    """Adds the biases of a gated product; BY_ROUTE: each route has its own, bias [.., COLUMNS]."""
    if BY_ROUTE:
        at = bias + tl.where(live, routes, 0).to(tl.int64)[:, None] * COLUMNS + column[None, :]
        y += tl.load(at, live[:, None] & (column < COLUMNS)[None, :], 0.0).to(tl.float32)
    else:
        y = column_bias(y, bias, expert, column, COLUMNS)
    return y


@triton.jit
def multiply_block(
    x, w, bias, up_bias, expert, block_routes, count, out, first, tile,
    ROWS: tl.constexpr, COLS: tl.constexpr, FORM: tl.constexpr, BY_ROUTE: tl.constexpr, X_TOP_K: tl.constexpr,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes float_gemm_kernel's tile `tile` for BM tokens or routes, of which `first` is the first one's place."""
    routes, live, rows = route_pointers(x, block_routes, count, first + tl.arange(0, BM), COLS, X_TOP_K)
    n = tile * BN + tl.arange(0, BN)
    y = multiply_rows(rows, w + tl.minimum(n, ROWS - 1) * COLS, COLS, BM, BN, BK)
    to = tl.where(live, part_rows(routes, TOP_K, PARTS), 0).to(tl.int64)[:, None]
    if FORM is not None:
        column = tile * (BN // 2) + tl.arange(0, BN // 2)
        gate, up = tl.split(tl.reshape(y, [BM, BN // 2, 2]))
        gate = gate_bias(gate, bias, expert, routes, live, column, ROWS // 2, BY_ROUTE)
        up = gate_bias(up, up_bias, expert, routes, live, column, ROWS // 2, BY_ROUTE)
        y = gated(gate, up, FORM)
        at = out + to * (ROWS // 2) + column[None, :]
        tl.store(at, y.to(out.dtype.element_ty), live[:, None] & (column < ROWS // 2)[None, :])
    else:
        y = column_bias(y, bias, expert, n, ROWS)
        tl.store(
            out + to * ROWS + n[None, :], y.to(out.dtype.element_ty), live[:, None] & (n < ROWS)[None, :]
        )


@kernel
def float_gemm_kernel(
    x, w, bias, up_bias, block_expert, block_routes, group, count, out,
    ROWS: tl.constexpr, COLS: tl.constexpr, FORM: tl.constexpr, BY_ROUTE: tl.constexpr, X_TOP_K: tl.constexpr,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[i] = W x[i // X_TOP_K] + bias; with a FORM: gated(products of even rows, products of odd rows),
    with a bias for each (BY_ROUTE: per route). Grid (tiles of ROWS, blocks of BM tokens or routes as in gemm_kernel).

    w: [experts of the group, ROWS, COLS] of x's dtype; group: int32 [2], its first expert and the one after its
    last; blocks of other experts are skipped. out has PARTS rows per token, the first TOP_K for its routes.
    HALVES: the tile of a block that is at most half full has half of the rows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, block = tl.program_id(0), tl.program_id(1)
    expert = tl.full([], 0, tl.int64)
    is_full = True
    if block_expert is not None:
        expert = tl.load(block_expert + block).to(tl.int64)
        first = tl.load(group)
        if (expert < first) | (expert >= tl.load(group + 1)):
            return
        w += (expert - first) * ROWS * COLS
        if HALVES:
            is_full = tl.load(block_routes + block * BM + BM // 2) >= 0
    elif block * BM >= tl.load(count):
        return
    if is_full:
        multiply_block(
            x, w, bias, up_bias, expert, block_routes, count, out, block * BM, tile,
            ROWS, COLS, FORM, BY_ROUTE, X_TOP_K, TOP_K, PARTS, BM, BN, BK,
        )  # fmt: skip
    else:
        multiply_block(
            x, w, bias, up_bias, expert, block_routes, count, out, block * BM, tile,
            ROWS, COLS, FORM, BY_ROUTE, X_TOP_K, TOP_K, PARTS, BM // 2, BN, BK,
        )  # fmt: skip
