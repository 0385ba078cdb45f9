"""The adapters' terms of products, for many adapters in one launch: B (A x) with each row's own A and B.

A block of rows is processed adapter by adapter, so that rows need no sorting: consecutive rows of a prompt have the
same adapter. Adapters are found by address, which a CUDA graph reads anew at each replay.

table int64 [slots, products, 4]: for each product of an adapter, the addresses of A [rank, cols] and B [rows,
rank], of FLOAT, and the rank, a multiple of 16 (padded with zeros); rank 0: the adapter does not change the
product. A launch uses PARTS * EXPERTS consecutive products, and `table` points to the first one of slot 0.

An item is a row or, for experts, a route: row * TOP_K + j, to expert ids[row, j]. Blocks of BM items are
consecutive, or are the blocks of experts/align.py.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def block_items(
    slots, ids, block_expert, block_routes, count, block, TOP_K: tl.constexpr, IDS_STRIDE: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Returns the items [BM] of a block, a mask of the items that exist, their adapters' slots (-1: no adapter), and
    the expert that all of them have."""
    items = block * BM + tl.arange(0, BM)
    expert = tl.full([], 0, tl.int32)
    if block_routes is not None:
        expert = tl.load(block_expert + block)
        items = tl.load(block_routes + items, (items >= 0) & (expert >= 0), -1)
        live = items >= 0
    else:
        live = items < tl.load(count) * TOP_K
    items = tl.where(live, items, 0)
    rows = items // TOP_K
    if ids is not None:
        of_items = tl.load(ids + rows * IDS_STRIDE + items % TOP_K, live, -1)
        live = of_items >= 0
        expert = tl.max(of_items, 0)  # of a block with one item
    return items, live, tl.load(slots + rows, live, -1), expert


@triton.jit
def next_slot(slot, s):
    """Returns the highest adapter slot (int32) in `slot` that is below s; -1 if there is none."""
    return tl.max(tl.where(slot < s, slot, -1), 0)


@triton.jit
def table_entry(
    table, s, part, expert, PARTS: tl.constexpr, EXPERTS: tl.constexpr, SLOT_STRIDE: tl.constexpr
):
    return table + s.to(tl.int64) * SLOT_STRIDE + (part * EXPERTS + expert) * 4


@triton.jit
def matrix_and_rank(entry, COLUMN: tl.constexpr, FLOAT: tl.constexpr):
    """Returns the pointer to A (COLUMN 0) or B (1) of a table entry (int64 [4]), and the rank as int32. FLOAT: the
    matrix's dtype. `multiple_of` must be on the typed pointer, not on the integer address: else the compiler does not
    vectorize the loads of the matrix."""
    matrix = tl.multiple_of(tl.load(entry + COLUMN).to(tl.pointer_type(FLOAT)), 16)
    return matrix, tl.multiple_of(tl.load(entry + 2).to(tl.int32), 16)


@triton.jit
def shrink_row(x, codes, scales, a, r, COLS: tl.constexpr, BK: tl.constexpr):
    """Returns [1, BR]: rows r of a [.., COLS] times one row, of floats or of int8 with a scale per 32 columns."""
    acc = tl.zeros([r.shape[0], BK], tl.float32)
    for first in range(0, COLS, BK):
        k = first + tl.arange(0, BK)
        if codes is not None:
            value = tl.load(codes + k, k < COLS, 0).to(tl.float32)
            value *= tl.load(scales + k // 32, k < COLS, 0.0)
        else:
            value = tl.load(x + k, k < COLS, 0.0).to(tl.float32)
        w = tl.load(a + r[:, None] * COLS + k[None, :], (k < COLS)[None, :], 0.0)
        acc += w.to(tl.float32) * value[None, :]
    return tl.sum(acc, 1)[None, :]


@triton.jit
def shrink_rows(x, live, a, r, COLS: tl.constexpr, BK: tl.constexpr):
    """Returns [BM, BR]: rows r of a [.., COLS] times the rows that x points to."""
    acc = tl.zeros([x.shape[0], r.shape[0]], tl.float32)
    for first in range(0, COLS, BK):
        k = first + tl.arange(0, BK)
        value = tl.load(x[:, None] + k[None, :], live[:, None] & (k < COLS)[None, :], 0.0)
        w = tl.load(a + r[:, None] * COLS + k[None, :], (k < COLS)[None, :], 0.0)
        if value.dtype == tl.float32:
            acc = tl.dot(value, tl.trans(w.to(tl.float32)), acc, input_precision="tf32x3")
        else:
            acc = tl.dot(value, tl.trans(w.to(value.dtype)), acc)
    return acc


@kernel
def shrink_kernel(
    x, codes, scales, slots, table, ids, block_expert, block_routes, count, shrunk,
    COLS: tl.constexpr, X_STRIDE: tl.constexpr, X_TOP_K: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, TOP_K: tl.constexpr, IDS_STRIDE: tl.constexpr, RANK: tl.constexpr,
    FLOAT: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes shrunk[item, part] = A x[item // X_TOP_K], float32 [items, PARTS, RANK], up to the adapter's rank. Grid
    (programs that take the ranks' tiles in turn, PARTS, blocks). codes int8 with scales float32 instead of x: only
    with blocks of one item."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    items, live, slot, expert = block_items(
        slots, ids, block_expert, block_routes, count, block, TOP_K, IDS_STRIDE, BM
    )
    from_row = (items // X_TOP_K).to(tl.int64)
    s = tl.max(slot, 0)
    while s >= 0:
        entry = table_entry(table, s, part, expert, PARTS, EXPERTS, SLOT_STRIDE)
        a, rank = matrix_and_rank(entry, 0, FLOAT)
        for first in range(tile * BR, rank, tl.num_programs(0) * BR):
            r = first + tl.arange(0, BR)
            if BM == 1:
                i = tl.max(from_row, 0)
                if codes is not None:
                    y = shrink_row(None, codes + i * COLS, scales + i * (COLS // 32), a, r, COLS, BK)
                else:
                    y = shrink_row(x + i * X_STRIDE, None, None, a, r, COLS, BK)
            else:
                y = shrink_rows(x + from_row * X_STRIDE, live, a, r, COLS, BK)
            at = shrunk + (items * PARTS + part).to(tl.int64)[:, None] * RANK + r[None, :]
            tl.store(at, y, (slot == s)[:, None])
        s = next_slot(slot, s)


@triton.jit
def expand_block(
    shrunk, table, items, slot, expert, part, c, there,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANK: tl.constexpr, FLOAT: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Returns float32 [BM, BN]: rows c of each item's B times its shrunk vector; zeros for items without adapter."""
    acc = tl.zeros([items.shape[0], c.shape[0]], tl.float32)
    at = shrunk + (items * PARTS + part).to(tl.int64)[:, None] * RANK
    s = tl.max(slot, 0)
    while s >= 0:
        entry = table_entry(table, s, part, expert, PARTS, EXPERTS, SLOT_STRIDE)
        b, rank = matrix_and_rank(entry, 1, FLOAT)
        for first in range(0, rank, BR):
            r = first + tl.arange(0, BR)
            inner = tl.load(at + r[None, :], (slot == s)[:, None], 0.0)
            w = tl.load(b + c[:, None] * rank + r[None, :], there[:, None], 0.0)
            if items.shape[0] == 1:
                acc += tl.sum(w.to(tl.float32) * inner, 1)[None, :]
            else:
                acc = tl.dot(inner.to(w.dtype), tl.trans(w), acc)
        s = next_slot(slot, s)
    return acc


@triton.jit
def expand_part(
    shrunk, table, bias, out, items, live, slot, expert, part, tile,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr, OUT_TOP_K: tl.constexpr, RANK: tl.constexpr, ADDS: tl.constexpr, FLOAT: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Computes BN columns, from tile * BN on, of one part's products with B for a block of items, plus the bias, and
    stores them in `out` or (ADDS) adds them to it: see expand_kernel."""
    c = tile * BN + tl.arange(0, BN)
    there = c < ROWS
    y = expand_block(
        shrunk, table, items, slot, expert, part, c, there, PARTS, EXPERTS, SLOT_STRIDE, RANK, FLOAT, BR
    )
    if bias is not None:
        y += tl.load(bias + expert * ROWS + c, there, 0.0)[None, :]
    to = items
    if OUT_TOP_K != TOP_K:
        to += items // TOP_K * (OUT_TOP_K - TOP_K)
    at = out + to.to(tl.int64)[:, None] * STRIDE + c[None, :]
    mask = live[:, None] & there[None, :]
    if ADDS:
        mask = mask & (slot >= 0)[:, None]
        y += tl.load(at, mask, 0.0).to(tl.float32)
    tl.store(at, y.to(out.dtype.element_ty), mask)


@kernel
def expand_kernel(
    shrunk, slots, table, ids, block_expert, block_routes, count, bias, second_bias, out, second, third,
    ROWS: tl.constexpr, SECOND_ROWS: tl.constexpr, THIRD_ROWS: tl.constexpr, STRIDE: tl.constexpr,
    SECOND_STRIDE: tl.constexpr, THIRD_STRIDE: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, TOP_K: tl.constexpr, OUT_TOP_K: tl.constexpr, IDS_STRIDE: tl.constexpr,
    RANK: tl.constexpr, ADDS: tl.constexpr, FLOAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[item] += B shrunk[item, 0], second[item] += B shrunk[item, 1] and so on for PARTS outputs, each
    with its product's B. Without ADDS: = instead of +=, 0 for items without an adapter, plus an optional bias float32
    [EXPERTS, ROWS]. out has OUT_TOP_K rows per row, the first TOP_K for its items. Grid (the outputs' tiles of BN
    columns, blocks)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, block = tl.program_id(0), tl.program_id(1)
    items, live, slot, expert = block_items(
        slots, ids, block_expert, block_routes, count, block, TOP_K, IDS_STRIDE, BM
    )
    if ADDS:
        if tl.max(slot, 0) < 0:
            return
    elif tl.max(live.to(tl.int32), 0) == 0:
        return
    TILES: tl.constexpr = (ROWS + BN - 1) // BN
    SECOND_TILES: tl.constexpr = (SECOND_ROWS + BN - 1) // BN
    if tile < TILES:
        expand_part(
            shrunk, table, bias, out, items, live, slot, expert, 0, tile, ROWS, STRIDE, PARTS, EXPERTS, SLOT_STRIDE,
            TOP_K, OUT_TOP_K, RANK, ADDS, FLOAT, BN, BR,
        )  # fmt: skip
    elif PARTS > 1:
        if tile < TILES + SECOND_TILES:
            expand_part(
                shrunk, table, second_bias, second, items, live, slot, expert, 1, tile - TILES, SECOND_ROWS,
                SECOND_STRIDE, PARTS, EXPERTS, SLOT_STRIDE, TOP_K, OUT_TOP_K, RANK, ADDS, FLOAT, BN, BR,
            )  # fmt: skip
        elif PARTS > 2:
            expand_part(
                shrunk, table, None, third, items, live, slot, expert, 2, tile - TILES - SECOND_TILES, THIRD_ROWS,
                THIRD_STRIDE, PARTS, EXPERTS, SLOT_STRIDE, TOP_K, OUT_TOP_K, RANK, ADDS, FLOAT, BN, BR,
            )  # fmt: skip


@kernel
def expand_sum_kernel(
    shrunk, slots, table, ids, weights, count, out,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, EXPERTS: tl.constexpr, SLOT_STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    IDS_STRIDE: tl.constexpr, WEIGHTS_STRIDE: tl.constexpr, RANK: tl.constexpr, FLOAT: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[row] += sum over j of weights[row, j] * B shrunk[row * TOP_K + j], with the B of expert ids[row,
    j], skipped if negative. Grid (tiles of BN columns, rows)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    if row >= tl.load(count):
        return
    s = tl.load(slots + row)
    if s < 0:
        return
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    there = c < ROWS
    acc = tl.zeros([BN], tl.float32)
    for j in range(TOP_K):
        expert = tl.load(ids + row * IDS_STRIDE + j)
        if expert >= 0:
            entry = table_entry(table, s, 0, expert, 1, EXPERTS, SLOT_STRIDE)
            b, rank = matrix_and_rank(entry, 1, FLOAT)
            share = tl.load(weights + row * WEIGHTS_STRIDE + j)
            for first in range(0, rank, BR):
                r = first + tl.arange(0, BR)
                inner = tl.load(shrunk + (row * TOP_K + j).to(tl.int64) * RANK + r)
                w = tl.load(b + c[:, None] * rank + r[None, :], there[:, None], 0.0)
                acc += share * tl.sum(w.to(tl.float32) * inner[None, :], 1)
    at = out + row.to(tl.int64) * STRIDE + c
    tl.store(at, (acc + tl.load(at, there, 0.0).to(tl.float32)).to(out.dtype.element_ty), there)
