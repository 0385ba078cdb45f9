"""Prefill attention on Hopper: the same results as prefill.py, bit for bit, for keys and values of 16 bits.

Two warpgroups attend, each with half of a tile's query rows; a third copies keys and values into shared memory ahead of
them (the division of FlashAttention 3: https://arxiv.org/abs/2407.08608). The score product of the next block runs on
the tensor cores during the softmax of the current block. The tensor memory accelerator (TMA) copies a block whose slots
are consecutive; other blocks are copied row by row. So the speed depends on how contiguous a request's slots are.

Written in Gluon, Triton's language with explicit layouts and barriers, which has no interpreter.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moeserve.kernels.launch import Kernel

LOG2E = gl.constexpr(1.4426950408889634)
NO_SCORE = gl.constexpr(-1e30)  # less than any score
COPY_WARPS = gl.constexpr(4)
COPY_THREADS = gl.constexpr(128)


@gluon.jit
def slots_of_block(table, first, end, BLOCK: gl.constexpr):
    """Returns the KV slot (int32) of position `first`, and whether the slots of the BLOCK positions from it on are
    consecutive. A block that reaches beyond `end` does not count as consecutive, because the slots after `end` may be
    another request's."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [COPY_WARPS], [0])
    row = gl.arange(0, BLOCK, layout=layout)
    start = gl.load(table + first, first < end, 0)
    slot = gl.load(table + first + row, first + row < end, -1)
    return start, gl.max((slot != start + row).to(gl.int32), 0) == 0


@gluon.jit
def copy_rows(pool, table, first, end, smem, ROW: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr):
    """Starts asynchronous copies of one block to `smem` [BLOCK, WIDTH]: for each position from `first` on, WIDTH 16-bit
    columns of its slot in `pool`, whose rows are ROW columns apart. Rows from position `end` on become zero."""
    chunks: gl.constexpr = WIDTH // 8  # of 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // chunks, chunks], [COPY_WARPS, 1], [1, 0])
    position = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    live = position < end
    slot = gl.load(table + position, live, 0).to(gl.int64)
    async_copy.async_copy_global_to_shared(
        smem, pool + slot[:, None] * ROW + column[None, :], mask=live[:, None]
    )


@gluon.jit
def copy_block(
    pool, boxes, column, table, first, end, start, is_run, smem, full,
    ROW: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Starts the copy of one block to `smem` [BLOCK, WIDTH]: by TMA from slot `start` on if its slots are consecutive
    (is_run), else row by row. The barrier `full` completes when the rows are in `smem`: it counts every copying thread,
    plus one for TMA's bytes."""
    if is_run:
        mbarrier.expect(full, boxes.block_type.nbytes)
        tma.async_copy_global_to_shared(boxes, [start, column], full, smem)
    else:
        copy_rows(pool, table, first, end, smem, ROW, WIDTH, BLOCK)
        mbarrier.arrive(full)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def copy_ahead(
    keys, values, key_boxes, value_boxes, table, h, block, last, end,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Runs the copying warpgroup: copies keys [BLOCK, DIM] and values [BLOCK, V_DIM] of KV head `h`, blocks `block` to
    `last` - 1, to shared memory as stages become free. end: number of positions that hold keys."""
    start, is_run = slots_of_block(table, block * BLOCK, end, BLOCK)
    for n in range(last - block):
        stage = n % STAGES
        phase = (n // STAGES) & 1
        first = (block + n) * BLOCK
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        copy_block(
            keys, key_boxes, h * DIM, table, first, end, start, is_run, k_smem.index(stage), k_full.index(stage),
            KV_HEADS * DIM, DIM, BLOCK,
        )  # fmt: skip
        next_start, next_is_run = slots_of_block(table, first + BLOCK, end, BLOCK)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        copy_block(
            values, value_boxes, h * V_DIM, table, first, end, start, is_run, v_smem.index(stage), v_full.index(stage),
            KV_HEADS * V_DIM, V_DIM, BLOCK,
        )  # fmt: skip
        start = next_start
        is_run = next_is_run


@gluon.jit
def softmax(
    scores, largest, total, first, position, unmasked, masked,
    BLOCK: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Returns the weights of one block's scores, float32 [rows, BLOCK]; and float32 [rows]: the new maximum, the new
    sum, and the factor that rescales earlier blocks' results. Blocks from position `unmasked` up to `masked` need no
    mask. SCALE: of scores, for powers of two."""
    if (first < unmasked) | (first >= masked):
        key = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    new = gl.maximum(largest, gl.max(scores, 1) * SCALE)
    if WINDOW > 0:
        new = gl.maximum(new, NO_SCORE)  # a row may see none of its tile's first keys
    weights = gl.exp2(scores * SCALE - new[:, None])
    shrink = gl.exp2(largest - new)
    return weights, new, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def attend(
    q, sinks, out, row, rows, start, h, block, last, unmasked, masked,
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    HALF: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr,
    WINDOW: gl.constexpr, SCALE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Runs an attending warpgroup: computes query rows HALF * ROWS to (HALF + 1) * ROWS - 1 of the tile and stores
    their results in `out`. A tile has `rows` tokens from row `row` of the step on, at positions from `start` on, each
    with the query heads of KV head `h`."""
    group: gl.constexpr = HEADS // KV_HEADS
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    chunks: gl.constexpr = DIM // 8
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // chunks, chunks], [4, 1], [1, 0])
    m = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, q_layout))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, q_layout))
    at = (row + m // group).to(gl.int64) * (HEADS * DIM) + (h * group + m % group) * DIM
    q_smem.store(gl.load(q + at[:, None] + d[None, :], (m // group < rows)[:, None], 0.0))
    fence_async_shared()
    gl.thread_barrier()

    m = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    # Rows beyond the tile attend to the keys of its last row, so that no row has no keys.
    position = start + gl.minimum(m // group, rows - 1)
    largest = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, s_layout))
    if sinks is not None:
        largest = gl.load(sinks + h * group + m % group) * LOG2E
        total += 1.0
    acc = gl.zeros([ROWS, V_DIM], gl.float32, layout=o_layout)
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, layout=s_layout)

    # The fence makes other threads' copies visible to the tensor cores.
    mbarrier.wait(k_full.index(0), 0)
    fence_async_shared()
    scores = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(k_empty.index(0))
    weights, largest, total, shrink = softmax(
        scores, largest, total, block * BLOCK, position, unmasked, masked, BLOCK, WINDOW, SCALE, s_layout
    )
    p = gl.convert_layout(weights.to(dtype), p_layout)
    for n in range(1, last - block):
        stage = n % STAGES
        before = (n - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        scores = warpgroup_mma(
            q_smem, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((n - 1) // STAGES) & 1)
        fence_async_shared()
        acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        weights, largest, total, shrink = softmax(
            scores,
            largest,
            total,
            (block + n) * BLOCK,
            position,
            unmasked,
            masked,
            BLOCK,
            WINDOW,
            SCALE,
            s_layout,
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(weights.to(dtype), p_layout)
    n = last - block - 1
    mbarrier.wait(v_full.index(n % STAGES), (n // STAGES) & 1)
    fence_async_shared()
    acc = warpgroup_mma(p, v_smem.index(n % STAGES), acc)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]

    m = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    c = gl.arange(0, V_DIM, layout=gl.SliceLayout(0, o_layout))
    to = (row + m // group).to(gl.int64) * (HEADS * V_DIM) + (h * group + m % group) * V_DIM
    gl.store(out + to[:, None] + c[None, :], acc.to(out.dtype.element_ty), (m // group < rows)[:, None])


@gluon.jit
def warpgroup_prefill_kernel(
    q, keys, values, key_boxes, value_boxes, sinks, table, tiles, out,
    TABLE_STRIDE: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr,
    WINDOW: gl.constexpr, SCALE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    ATTENDING: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    """Computes what `prefill_kernel` computes, on Hopper. Grid (tiles, KV heads), with 4 warps; the other arguments as
    in `prefill_kernel`, but ROWS are a warpgroup's.

    key_boxes, value_boxes: TMA descriptors of the pools as [slots, KV_HEADS * DIM], [.., KV_HEADS * V_DIM], with
    boxes of BLOCK rows and one head's columns. ATTENDING, COPYING: registers of a thread in either kind of warpgroup.
    """
    dtype: gl.constexpr = keys.dtype.element_ty
    # A sequence's last tiles have the most keys, so they start first.
    tile = tiles + (gl.num_programs(0) - 1 - gl.program_id(0)) * 4
    h = gl.program_id(1)
    row, rows, start, req_slot = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)
    table += req_slot.to(gl.int64) * TABLE_STRIDE
    end = start + rows
    # An empty tile also has one block, which is masked entirely.
    block, last = 0, gl.maximum(end + BLOCK - 1, BLOCK) // BLOCK
    unmasked, masked = 0, (start + 1) // BLOCK * BLOCK
    if WINDOW > 0:
        block = gl.maximum(start - WINDOW + 1, 0) // BLOCK
        unmasked = gl.maximum(end - WINDOW, 0)

    q_smem = gl.allocate_shared_memory(
        dtype, [2, ROWS, DIM], gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    )
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], key_boxes.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, V_DIM], value_boxes.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=COPY_THREADS + 1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=COPY_THREADS + 1)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize([
        (attend, (
            q, sinks, out, row, rows, start, h, block, last, unmasked, masked,
            q_smem.index(0), k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            0, HEADS, KV_HEADS, DIM, V_DIM, WINDOW, SCALE, BLOCK, STAGES, ROWS,
        )),
        (attend, (
            q, sinks, out, row, rows, start, h, block, last, unmasked, masked,
            q_smem.index(1), k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            1, HEADS, KV_HEADS, DIM, V_DIM, WINDOW, SCALE, BLOCK, STAGES, ROWS,
        )),
        (copy_ahead, (
            keys + h * DIM, values + h * V_DIM, key_boxes, value_boxes, table, h, block, last, end,
            k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            KV_HEADS, DIM, V_DIM, BLOCK, STAGES,
        )),
    ], [4, COPY_WARPS], [ATTENDING, COPYING])  # fmt: skip


warpgroup_prefill = Kernel(warpgroup_prefill_kernel)
