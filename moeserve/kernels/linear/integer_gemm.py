"""Multiplies some tokens by matrices of Q4_K or Q6_K, with weights as integers in float16, on Hopper's tensor cores.

A weight of Q4_K is d * (scale * code) - dmin * min. d and dmin belong to its super-block of 256 columns, scale and min
to its group of 32. scale * code is an integer that float16 holds exactly (integer_weights.py), so a super-block's
products are multiplied by d once for all its columns, and mins are one product more, with the sums of the activations
by group. A weight takes half as many instructions as in sliced_k_gemm.py. A weight of Q6_K is d * (scale * (code -
32)), whose integer float16 rounds (six_bit_weights.py), without mins.

One or two warpgroups multiply, each 64 rows of a matrix by the same tokens: weights from their registers, activations
from shared memory, in the order of integer_order.py. Another warpgroup copies ahead of them (integer_copies.py).

In Gluon, Triton's language with explicit layouts; it has no interpreter. The specification is experts/reference.py.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import Kernel
from moeserve.kernels.linear.integer_copies import copy_ahead, count_blocks
from moeserve.kernels.linear.integer_layouts import (
    axis,
    box_layout,
    code_layout,
    code_memory,
    high_memory,
    powers,
    row_box_layout,
    row_layout,
    shared_bits,
    sums_of,
)
from moeserve.kernels.linear.integer_weights import (
    by_super_block,
    codes_by_super_block,
    high_half,
    low_half,
    operands,
)
from moeserve.kernels.linear.six_bit_weights import bits_of_parts, six_bit_operand


@gluon.jit
def start_products(weights, mins, x, sums):
    """Starts a super-block's products with x [TOKENS, 256] and sums [TOKENS, 16]."""
    TOKENS: gl.constexpr = x.shape[0]
    zeros = gl.zeros([64, TOKENS], gl.float32, layout=sums_of(TOKENS))
    total = warpgroup_mma(weights, x.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return total, warpgroup_mma(mins, sums.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_scaled(acc, supers, total, least):
    """Adds a super-block's products. supers [64, 1]: words of d and dmin. least: products of mins; None: no mins."""
    d = gl.convert_layout(gl.reshape(supers, [64]), gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    acc += low_half(d)[:, None] * total
    if least is not None:
        acc -= high_half(d)[:, None] * least
    return acc


@gluon.jit
def add_stage(
    acc, n, code_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
    G: gl.constexpr, IS_GATED: gl.constexpr, BLOCKS: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Returns acc (float32 [64 rows, TOKENS]) plus the products of the first COUNT super-blocks of the n-th stage.
    Waits for the stage's copies before, and frees it after. While the tensor cores multiply one super-block, the next
    one's weights are prepared."""
    TOKENS: gl.constexpr = acc.shape[1]
    stage = n % STAGES
    at, own = stage * BLOCKS, stage * GROUPS + G
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    fence_async_shared()  # makes other threads' copies visible to the tensor cores
    codes = code_smem.index(2 * own)._reinterpret(
        gl.int32, [64, 4, 2 * BLOCKS, 4], code_memory(BLOCKS, IS_GATED)
    )
    words = codes_by_super_block(codes.load(code_layout(2 * BLOCKS)), BLOCKS)
    scales = by_super_block(scale_smem.index(own).load(row_layout(4 * BLOCKS)), BLOCKS)
    supers = by_super_block(super_smem.index(own).load(row_layout(BLOCKS)), BLOCKS)
    weights, mins = operands(words[0], scales[0], TOKENS)
    total, least = start_products(weights, mins, x_smem.index(at), sum_smem.index(at))
    for i in gl.static_range(1, COUNT):
        weights, mins = operands(words[i], scales[i], TOKENS)
        done, done_least = warpgroup_mma_wait(0, deps=[total, least])
        total, least = start_products(weights, mins, x_smem.index(at + i), sum_smem.index(at + i))
        acc = add_scaled(acc, supers[i - 1], done, done_least)
    total, least = warpgroup_mma_wait(0, deps=[total, least])
    gl.thread_barrier()  # all threads have read the stage
    mbarrier.arrive(empty.index(stage))
    return add_scaled(acc, supers[COUNT - 1], total, least)


@gluon.jit
def add_six_bit_stage(
    acc, n, code_smem, high_smem, scale_smem, super_smem, x_smem, full, empty,
    G: gl.constexpr, BLOCKS: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The same for Q6_K, whose products have no mins."""
    TOKENS: gl.constexpr = acc.shape[1]
    stage = n % STAGES
    at, own = stage * BLOCKS, stage * GROUPS + G
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    fence_async_shared()
    codes = code_smem.index(own)._reinterpret(gl.int32, [64, 4, 2 * BLOCKS, 4], code_memory(BLOCKS, False))
    high = high_smem.index(own)._reinterpret(gl.int32, [64, 2, 2 * BLOCKS, 4], high_memory(BLOCKS))
    words = codes_by_super_block(codes.load(code_layout(2 * BLOCKS)), BLOCKS)
    bits = bits_of_parts(high.load(gl.SliceLayout(2, shared_bits(2 * BLOCKS))), BLOCKS)
    bits = codes_by_super_block(bits, BLOCKS)
    scales = by_super_block(scale_smem.index(own).load(row_layout(4 * BLOCKS)), BLOCKS)
    supers = by_super_block(super_smem.index(own).load(row_layout(BLOCKS)), BLOCKS)
    zeros = gl.zeros([64, TOKENS], gl.float32, layout=sums_of(TOKENS))
    weights = six_bit_operand(words[0], bits[0], scales[0], TOKENS)
    total = warpgroup_mma(weights, x_smem.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, COUNT):
        weights = six_bit_operand(words[i], bits[i], scales[i], TOKENS)
        done = warpgroup_mma_wait(0, deps=[total])
        x = x_smem.index(at + i).permute((1, 0))
        total = warpgroup_mma(weights, x, zeros, use_acc=False, is_async=True)
        acc = add_scaled(acc, supers[i - 1], done, None)
    total = warpgroup_mma_wait(0, deps=[total])
    gl.thread_barrier()  # all threads have read the stage
    mbarrier.arrive(empty.index(stage))
    return add_scaled(acc, supers[COUNT - 1], total, None)


@gluon.jit
def store_gated(acc, routes, out, first, ROWS: gl.constexpr):
    """Writes silu(gate) * up, whose rows take turns in acc by eight, to rows `routes` of out [.., ROWS]."""
    TOKENS: gl.constexpr = acc.shape[1]
    y, z = gl.split(gl.permute(gl.reshape(acc, [4, 2, 8, TOKENS]), [0, 2, 3, 1]))
    h = gl.reshape(y / (1.0 + gl.exp(-y)) * z, [32, TOKENS])
    layout: gl.constexpr = gl.DistributedLinearLayout(
        axis(1, 2, [1]) + axis(1, 2, powers(8, TOKENS)), axis(1, 2, [2, 4]) + axis(0, 2, [1, 2, 4]),
        axis(0, 2, [8, 16]), [], [32, TOKENS],
    )  # fmt: skip
    h = gl.convert_layout(h, layout, assert_trivial=True)
    routes = gl.convert_layout(routes, gl.SliceLayout(0, layout), assert_trivial=True)
    row = first + gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    to = out + gl.maximum(routes, 0).to(gl.int64)[None, :] * ROWS + row[:, None]
    gl.store(to, h.to(out.dtype.element_ty), (routes >= 0)[None, :] & (row < ROWS)[:, None])


@gluon.jit
def store_parts(acc, routes, out, first, ROWS: gl.constexpr, TOP_K: gl.constexpr, STRIDE: gl.constexpr):
    """Writes acc to out, where tokens are STRIDE numbers apart: a token's first TOP_K * ROWS are of its routes."""
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
    route = gl.maximum(routes, 0).to(gl.int64)
    to = out + (route // TOP_K * STRIDE + route % TOP_K * ROWS)[None, :] + row[:, None]
    gl.store(to, acc.to(out.dtype.element_ty), (routes >= 0)[None, :] & (row < ROWS)[:, None])


@gluon.jit
def sum_pieces(acc, partials, counters, piece, SPLIT: gl.constexpr):
    """Stores acc, float32 [rows, tokens], in `partials`, where SPLIT programs each leave their part of a result.
    Returns whether the other parts were there already, and in this case their sum, which does not depend on the
    programs' order. counters: int32 [results], 0 before and after."""
    rows: gl.constexpr = acc.shape[0]
    tokens: gl.constexpr = acc.shape[1]
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, acc.type.layout))
    token = gl.arange(0, tokens, layout=gl.SliceLayout(0, acc.type.layout))
    place = row[:, None] * tokens + token[None, :]
    at = partials + piece.to(gl.int64) * (rows * tokens)
    gl.store(at + place, acc)
    gl.thread_barrier()  # all threads must have written before the counter says so
    result = piece // SPLIT
    is_last = gl.atomic_add(counters + result, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        gl.store(counters + result, 0)
        at -= (piece % SPLIT).to(gl.int64) * (rows * tokens)
        acc = gl.load(at + place, cache_modifier=".cg")
        for i in gl.static_range(1, SPLIT):
            acc += gl.load(at + i * (rows * tokens) + place, cache_modifier=".cg")
    return is_last, acc


@gluon.jit
def add_next(
    acc, n, code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
    G: gl.constexpr, IS_GATED: gl.constexpr, BLOCKS: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Adds the n-th stage, by the matrix's type."""
    if high_smem is None:
        acc = add_stage(
            acc, n, code_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty, G, IS_GATED, BLOCKS, COUNT,
            STAGES, GROUPS,
        )  # fmt: skip
    else:
        acc = add_six_bit_stage(
            acc, n, code_smem, high_smem, scale_smem, super_smem, x_smem, full, empty, G, BLOCKS, COUNT, STAGES, GROUPS
        )  # fmt: skip
    return acc


@gluon.jit
def multiply(
    factors, block_routes, out, partials, counters, pieces,
    code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
    G: gl.constexpr, IS_GATED: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, TOP_K: gl.constexpr,
    STRIDE: gl.constexpr, SPLIT: gl.constexpr, TOKENS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Runs multiplying warpgroup G of GROUPS: for each piece, computes its 64 rows of weights (with a gate: 32 of gate
    and of up) by TOKENS tokens, and stores the products in `out`. A piece is a tile of a result, or one of SPLIT column
    ranges of it."""
    OWN: gl.constexpr = 32 if IS_GATED else 64
    TILES: gl.constexpr = (ROWS + OWN * GROUPS - 1) // (OWN * GROUPS)
    OF_PIECE: gl.constexpr = COLS // 256 // SPLIT
    STAGES_OF_PIECE: gl.constexpr = (OF_PIECE + BLOCKS - 1) // BLOCKS
    layout: gl.constexpr = sums_of(TOKENS)
    n = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        first = piece // SPLIT % TILES * (OWN * GROUPS) + G * OWN
        token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
        routes = gl.load(block_routes + piece // (TILES * SPLIT) * TOKENS + token)
        factor = gl.load(factors + gl.maximum(routes, 0) // (TOP_K if IS_GATED else 1))
        acc = gl.zeros([64, TOKENS], gl.float32, layout=layout)
        for k in range(OF_PIECE // BLOCKS):
            acc = add_next(
                acc, n + k, code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
                G, IS_GATED, BLOCKS, BLOCKS, STAGES, GROUPS,
            )  # fmt: skip
        if OF_PIECE % BLOCKS > 0:
            acc = add_next(
                acc, n + OF_PIECE // BLOCKS, code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full,
                empty, G, IS_GATED, BLOCKS, OF_PIECE % BLOCKS, STAGES, GROUPS,
            )  # fmt: skip
        n += STAGES_OF_PIECE
        acc = acc * factor[None, :]
        if IS_GATED:
            store_gated(acc, routes, out, first, ROWS)
        else:
            if SPLIT == 1:
                store_parts(acc, routes, out, first, ROWS, TOP_K, STRIDE)
            else:
                own = (piece // SPLIT * GROUPS + G) * SPLIT + piece % SPLIT
                is_last, acc = sum_pieces(acc, partials, counters, own, SPLIT)
                if is_last:
                    store_parts(acc, routes, out, first, ROWS, TOP_K, STRIDE)


@gluon.jit
def integer_gemm_kernel(
    x, sums, factors, codes, high, scales, supers, up_codes, up_scales, up_supers, block_expert, block_routes, out,
    partials, counters,
    ROWS: gl.constexpr, COLS: gl.constexpr, TOP_K: gl.constexpr, STRIDE: gl.constexpr, ROUTE_BLOCKS: gl.constexpr,
    SPLIT: gl.constexpr, TOKENS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    MULTIPLYING: gl.constexpr, COPYING: gl.constexpr, PAIR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiplies blocks of routes by one matrix or two. With a second matrix, `up`, it writes silu(W x[route //
    TOP_K]) * (W_up x[route // TOP_K]) to row `route` of out [.., ROWS]; else W x[route] to out, where tokens are STRIDE
    numbers apart and begin with their TOP_K routes' ROWS. For blocks of TOKENS routes.

    Grid: any number of programs of 4 warps, which take pieces of GROUPS * 64 rows in turn (gated: of 32 rows of each
    matrix). codes, up_codes: `code_boxes`; for Q6_K, codes and high: `six_bit_boxes`, and no second matrix. BLOCKS:
    super-blocks of a stage. SPLIT, which divides the super-blocks into whole stages: pieces that share a result's
    columns; the last of them sums their results in partials, float32 [pieces * GROUPS * 64 * TOKENS], with an int32 of
    counters per result, which it leaves at 0. MULTIPLYING, COPYING: registers of a thread in the second multiplying
    warpgroup and in the copying one; the first has the rest.

    PAIR: 1 and 2 of two kernels launched one after the other that read the same x and share no other memory, which may
    overlap; else 0. The second one starts when all programs of the first have waited for the kernels before."""
    if PDL:
        if PAIR == 1:
            gdc_wait()
        gdc_launch_dependents()
        if PAIR == 0:
            gdc_wait()
    IS_GATED: gl.constexpr = up_codes is not None
    PIECE: gl.constexpr = (32 if IS_GATED else 64) * GROUPS
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    of_x: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    of_sums: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    if high is None:
        high_smem: gl.constexpr = None
        code_smem = gl.allocate_shared_memory(
            gl.int32, [2 * STAGES * GROUPS, 128, 8 * BLOCKS], box_layout(BLOCKS)
        )
        sum_smem = gl.allocate_shared_memory(gl.float16, [STAGES * BLOCKS, TOKENS, 16], of_sums)
    else:
        sum_smem: gl.constexpr = None
        of_rows: gl.constexpr = row_box_layout(BLOCKS)
        code_smem = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, 64, 4, 8 * BLOCKS], of_rows)
        high_smem = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, 64, 2, 8 * BLOCKS], of_rows)
    scale_smem = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, 64, 4 * BLOCKS], plain)
    super_smem = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, 64, BLOCKS], plain)
    x_smem = gl.allocate_shared_memory(gl.float16, [STAGES * BLOCKS, TOKENS, 256], of_x)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=GROUPS)
    pieces = count_blocks(block_expert, ROUTE_BLOCKS) * ((ROWS + PIECE - 1) // PIECE * SPLIT)
    # The count is read from shared memory, where the arguments of the other warpgroups are written next, without a
    # barrier of Triton's (3.6) between.
    gl.thread_barrier()
    if GROUPS == 1:
        gl.warp_specialize([
            (multiply, (
                factors, block_routes, out, partials, counters, pieces,
                code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
                0, IS_GATED, ROWS, COLS, TOP_K, STRIDE, SPLIT, TOKENS, BLOCKS, STAGES, GROUPS,
            )),
            (copy_ahead, (
                x, sums, codes, high, scales, supers, up_codes, up_scales, up_supers, block_expert, block_routes,
                pieces, code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
                ROWS, COLS, TOP_K if IS_GATED else 1, SPLIT, TOKENS, BLOCKS, STAGES, GROUPS,
            )),
        ], [4], [COPYING])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply, (
                factors, block_routes, out, partials, counters, pieces,
                code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
                0, IS_GATED, ROWS, COLS, TOP_K, STRIDE, SPLIT, TOKENS, BLOCKS, STAGES, GROUPS,
            )),
            (multiply, (
                factors, block_routes, out, partials, counters, pieces,
                code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
                1, IS_GATED, ROWS, COLS, TOP_K, STRIDE, SPLIT, TOKENS, BLOCKS, STAGES, GROUPS,
            )),
            (copy_ahead, (
                x, sums, codes, high, scales, supers, up_codes, up_scales, up_supers, block_expert, block_routes,
                pieces, code_smem, high_smem, scale_smem, super_smem, x_smem, sum_smem, full, empty,
                ROWS, COLS, TOP_K if IS_GATED else 1, SPLIT, TOKENS, BLOCKS, STAGES, GROUPS,
            )),
        ], [4, 4], [MULTIPLYING, COPYING])  # fmt: skip
    if PDL and PAIR == 2:
        gdc_wait()  # whoever waits for this kernel waits for the first one too


integer_gemm = Kernel(integer_gemm_kernel)
