"""Decode attention on Hopper whose programs have equal shares of all rows' keys, for keys and values of 16 bits.

The keys of all rows and KV heads, in blocks of BLOCK, form one list: row by row, head by head. Each program takes an
equal, contiguous part of it, so that neither one long row nor many short ones leave multiprocessors idle. A row and
head whose blocks belong to several programs is combined by the last of them to finish.

One warpgroup attends; another copies keys and values into shared memory ahead of it, beyond the ends of rows, so that
the memory is never idle. Products are transposed, keys times queries: a group of 8 query heads fills the tensor cores.

Written in Gluon, Triton's language with explicit layouts and barriers, which has no interpreter. The specification is
decode.py's kernel.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.attention.shared_decode_parts import (
    leave_part,
    rotated_key,
    rotated_queries,
    rotation,
    section_positions,
    store_heads,
)
from moeserve.kernels.launch import Kernel

LOG2E = gl.constexpr(1.4426950408889634)
COPY_WARPS = gl.constexpr(4)
COPY_THREADS = gl.constexpr(128)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def tokens_in_pool(position, NEW: gl.constexpr, WINDOW: gl.constexpr):
    """Returns how many tokens of the KV pool a row at `position` attends to, and the position of the first of them
    (int32). NEW: 1 if the row's own token is not in the pool yet, else 0. WINDOW: tokens that a row sees, itself
    included; 0: all."""
    end = position + 1
    first = end * 0
    if WINDOW > 0:
        first = gl.maximum(end - WINDOW, 0)
    return end - first - NEW, first


@gluon.jit
def blocks_of(tokens, BLOCK: gl.constexpr):
    """Returns the number of blocks of BLOCK keys that hold a row's `tokens` keys (int32); 1 for a row without tokens in
    the pool, whose one block is empty."""
    return gl.maximum((tokens + BLOCK - 1) // BLOCK, 1)


@gluon.jit
def load_slots(held, block, tokens, layout: gl.constexpr, BLOCK: gl.constexpr):
    """Returns the slots of a block's tokens [BLOCK], and a mask of the tokens that exist. held: points to the first
    token's slot."""
    token = block * BLOCK + gl.arange(0, BLOCK, layout=layout)
    live = token < tokens
    return gl.load(held + token, live, 0, cache_modifier=".cg"), live


@gluon.jit
def copy_ahead(
    keys, values, table, req_slots, positions, count, row, h, block, units, k_smem, v_smem, full, empty,
    IS_NEW: gl.constexpr, TABLE_STRIDE: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
    WINDOW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Runs the copying warpgroup: copies `units` blocks of BLOCK keys and values (16-bit, [BLOCK, DIM]) to shared
    memory, STAGES of them ahead, beginning with block `block` of row `row` and KV head `h`; then follow the row's
    further blocks, the next head's or row's."""
    chunks: gl.constexpr = DIM // 8  # of 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // chunks, chunks], [COPY_WARPS, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    existing = gl.load(count)
    here = row < existing
    tokens, first = tokens_in_pool(gl.load(positions + row, here, 0), 1 if IS_NEW else 0, WINDOW)
    held = table + gl.load(req_slots + row, here, 0).to(gl.int64) * TABLE_STRIDE + first
    here = row + 1 < existing
    next_position, next_request = gl.load(positions + row + 1, here, 0), gl.load(req_slots + row + 1, here, 0)
    slots, live = load_slots(held, block, tokens, of_rows, BLOCK)
    for n in range(units):
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        at = slots.to(gl.int64)[:, None] * (KV_HEADS * DIM) + (h * DIM + column)[None, :]
        async_copy.async_copy_global_to_shared(k_smem.index(stage), keys + at, mask=live[:, None])
        async_copy.async_copy_global_to_shared(v_smem.index(stage), values + at, mask=live[:, None])
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        block += 1
        if block == blocks_of(tokens, BLOCK):
            block = 0
            h += 1
            if h == KV_HEADS:
                h = 0
                row += 1
                tokens, first = tokens_in_pool(next_position, 1 if IS_NEW else 0, WINDOW)
                held = table + next_request.to(gl.int64) * TABLE_STRIDE + first
                here = row + 1 < existing
                next_position = gl.load(positions + row + 1, here, 0)
                next_request = gl.load(req_slots + row + 1, here, 0)
        slots, live = load_slots(held, block, tokens, of_rows, BLOCK)


@gluon.jit
def begin_heads(
    query, sinks, is_first, head, group: gl.constexpr, of_scores: gl.constexpr, DIM: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Returns the state of the online softmax before any key, float32: largest scores [H], weights [BLOCK, H] and sums
    [DIM, H]. With is_first, the attention sinks of `group` heads from `head` on count as a key without a value."""
    H: gl.constexpr = query.shape[0]
    per_head: gl.constexpr = gl.SliceLayout(0, of_scores)
    largest = gl.full([H], float("-inf"), gl.float32, layout=per_head)
    total = gl.zeros([BLOCK, H], gl.float32, layout=of_scores)
    if sinks is not None:
        n = gl.arange(0, H, layout=per_head)
        sink = gl.load(sinks + head + n, n < group, 0.0) * LOG2E
        largest = gl.where(is_first, sink, largest)
        lead = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, of_scores)) == 0
        total += (lead & is_first).to(gl.float32)[:, None]
    return largest, total, gl.zeros([DIM, H], gl.float32, layout=of_scores)


@gluon.jit
def add_key(query, key, value, largest, total, SCALE: gl.constexpr):
    """Returns the results of `begin_heads` with one more key [DIM] and value [DIM] added. It must be the first value:
    earlier sums are dropped."""
    of_scores: gl.constexpr = total.type.layout
    BLOCK: gl.constexpr = total.shape[0]
    score = gl.sum(query.to(gl.float32) * key.to(gl.float32)[None, :], 1) * SCALE
    score = gl.convert_layout(score, gl.SliceLayout(0, of_scores))
    new = gl.maximum(largest, score)
    weight = gl.exp2(score - new)
    lead = (gl.arange(0, BLOCK, layout=gl.SliceLayout(1, of_scores)) == 0).to(gl.float32)
    total = total * gl.exp2(largest - new)[None, :] + lead[:, None] * weight[None, :]
    value = gl.convert_layout(value.to(gl.float32), gl.SliceLayout(1, of_scores))
    return new, total, value[:, None] * weight[None, :]


@gluon.jit
def add_block(
    acc, largest, total, first, tokens, q_smem, k_smem, v_smem, p_smem, SCALE: gl.constexpr,
):  # fmt: skip
    """Adds a block of BLOCK keys to the online softmax of H query heads and returns (acc, largest, total): the weighted
    sum of values float32, the maxima float32 [H], the sums float32 [BLOCK, H]. Keys from number `tokens` of the row on
    are masked; first: number of the block's first key."""
    of_scores: gl.constexpr = total.type.layout
    BLOCK: gl.constexpr = total.shape[0]
    H: gl.constexpr = total.shape[1]
    zeros = gl.zeros([BLOCK, H], gl.float32, layout=of_scores)
    scores = warpgroup_mma(k_smem, q_smem.permute((1, 0)), zeros, use_acc=False)
    token = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, of_scores))
    scores = gl.where((token < tokens)[:, None], scores * SCALE, float("-inf"))
    new = gl.maximum(largest, gl.max(scores, 0))
    weights = gl.exp2(scores - new[None, :])
    shrink = gl.exp2(largest - new)
    p_smem.permute((1, 0)).store(weights.to(p_smem.dtype))
    fence_async_shared()
    gl.thread_barrier()
    acc = warpgroup_mma(v_smem.permute((1, 0)), p_smem.permute((1, 0)), acc * shrink[None, :])
    return acc, new, total * shrink[None, :] + weights


@gluon.jit
def attend(
    q, k, v, q_norm, k_norm, cos, sin, rotary, keys, values, sinks, positions, slots, part_sums, part_stats, counters,
    out, codes, scales, row, before, h, block, unit, units, share, q_smem, k_smem, v_smem, p_smem, full, empty,
    Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, ROTARY: gl.constexpr, EPS: gl.constexpr, WINDOW: gl.constexpr,
    SCALE: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, TIME: gl.constexpr, H: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Runs the attending warpgroup: attends to the blocks that `copy_ahead` brings to shared memory, and stores each
    row's result, or its part of it if other programs have further blocks of the row. before: number of blocks of the
    rows before `row`; unit: place of `block` in the list of all rows' blocks."""
    NEW: gl.constexpr = 0 if k is None else 1
    group: gl.constexpr = HEADS // KV_HEADS
    by_head: gl.constexpr = gl.BlockedLayout([1, DIM // 32], [1, 32], [4, 1], [1, 0])
    of_heads: gl.constexpr = gl.SliceLayout(1, by_head)
    of_columns: gl.constexpr = gl.SliceLayout(0, by_head)
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    g = gl.arange(0, H, layout=of_heads)
    d = gl.arange(0, DIM, layout=of_columns)
    begin = unit
    n = 0
    if PDL:
        gdc_wait()
    while units > 0:
        position, token = gl.load(positions + row), row.to(gl.int64)
        tokens, _ = tokens_in_pool(position, NEW, WINDOW)
        blocks = blocks_of(tokens, BLOCK)
        here = gl.minimum(blocks - block, units)
        heads = q + token * Q_STRIDE + h * (group * DIM) + g * DIM
        if NEW:
            angles = position.to(gl.int64) * (ROTARY // 2)
            if rotary is not None:
                of_sections = section_positions(
                    rotary + token * 3, of_columns, HEIGHT, WIDTH, TIME, ROTARY, DIM
                )
                angles = of_sections * (ROTARY // 2)
            own, other = rotation(q_norm, cos + angles, sin + angles, of_columns, DIM, ROTARY)
            query = rotated_queries(heads, g < group, own, other, by_head, DIM, ROTARY, EPS)
            query = (query * DIM**-0.5).to(q_smem.dtype)
        else:
            query = gl.load(heads[:, None] + d[None, :], (g < group)[:, None], 0.0).to(q_smem.dtype)
        gl.thread_barrier()  # all warps have ended their products with the queries before
        q_smem.store(query)
        fence_async_shared()
        gl.thread_barrier()
        largest, total, acc = begin_heads(query, sinks, block == 0, h * group, group, of_scores, DIM, BLOCK)
        if NEW:  # noqa: SIM102 (the compiler must not see the rest where k is None)
            if block == 0:
                own, other = rotation(k_norm, cos + angles, sin + angles, of_columns, DIM, ROTARY)
                key = rotated_key(k + token * K_STRIDE + h * DIM, own, other, of_columns, DIM, ROTARY, EPS)
                key = key.to(q_smem.dtype)
                value = gl.load(v + token * V_STRIDE + h * DIM + d).to(q_smem.dtype)
                slot = gl.load(slots + row).to(gl.int64)
                to = (slot * KV_HEADS + h) * DIM + d
                gl.store(keys + to, key, slot >= 0)
                gl.store(values + to, value, slot >= 0)
                largest, total, acc = add_key(query, key, value, largest, total, SCALE)
        for j in range(here):
            stage = (n + j) % STAGES
            mbarrier.wait(full.index(stage), ((n + j) // STAGES) & 1)
            fence_async_shared()  # makes other threads' copies visible to the tensor cores
            acc, largest, total = add_block(
                acc, largest, total, (block + j) * BLOCK, tokens, q_smem, k_smem.index(stage), v_smem.index(stage),
                p_smem, SCALE,
            )  # fmt: skip
            gl.thread_barrier()  # all warps have read the stage
            mbarrier.arrive(empty.index(stage))
        n += here
        weight = gl.convert_layout(gl.sum(total, 0), of_heads)
        sums = gl.convert_layout(gl.permute(acc, [1, 0]), by_head)
        to = token * (HEADS * DIM) + h * (group * DIM)
        if here == blocks:
            store_heads(sums / weight[:, None], out, codes, scales, to, group, DIM)
        else:
            part = gl.program_id(0) * 2 + (unit != begin).to(gl.int32)
            is_last, result = leave_part(
                sums, gl.convert_layout(largest, of_heads), weight, part_sums, part_stats,
                counters + row * KV_HEADS + h, part, before * KV_HEADS + h * blocks, blocks, share, by_head, TOGETHER,
            )  # fmt: skip
            if is_last:
                store_heads(result, out, codes, scales, to, group, DIM)
        units -= here
        unit += here
        block = 0
        h += 1
        if h == KV_HEADS:
            h = 0
            row += 1
            before += blocks


@gluon.jit
def shared_decode_kernel(
    q, k, v, q_norm, k_norm, cos, sin, rotary, keys, values, sinks, table, req_slots, positions, slots, count,
    part_sums, part_stats, counters, out, codes, scales,
    Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, ROTARY: gl.constexpr, EPS: gl.constexpr,
    WINDOW: gl.constexpr, SCALE: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, TIME: gl.constexpr,
    ROWS: gl.constexpr, H: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
    COPYING: gl.constexpr, WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Computes what decode.py's kernel computes, on Hopper, with equal shares of the keys for all programs. Grid: any
    number of programs of 4 warps. Arguments as decode.py's kernel's, but: ROWS, a power of two: at least the number of
    rows. H, a power of two from 8 on: at least a group's heads. part_sums float32 [programs, 2, H, DIM], part_stats
    [programs, 2, H, 2]: a program's partial results, of the row and head it begins with and of the one it ends with, of
    which TOGETHER are combined at once. counters int32 [rows, KV_HEADS]: 0 before and after. COPYING: registers of a
    thread that copies. WHOLE, for a single row: it is not divided if it has at most this many blocks; 0: any row may
    be."""
    IS_NEW: gl.constexpr = k is not None
    if PDL:
        gdc_launch_dependents()
        if not IS_NEW:
            gdc_wait()
    dtype: gl.constexpr = keys.dtype.element_ty
    of_pool: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], dtype)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], of_pool)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], of_pool)
    q_smem = gl.allocate_shared_memory(dtype, [H, DIM], gl.NVMMASharedLayout.get_default_for([H, DIM], dtype))
    p_smem = gl.allocate_shared_memory(
        dtype, [H, BLOCK], gl.NVMMASharedLayout.get_default_for([H, BLOCK], dtype)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=COPY_THREADS)
        mbarrier.init(empty.index(i), count=1)
    rows = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    is_row = rows < gl.load(count)
    tokens, _ = tokens_in_pool(gl.load(positions + rows, is_row, 0), 1 if IS_NEW else 0, WINDOW)
    until = gl.associative_scan(gl.where(is_row, blocks_of(tokens, BLOCK), 0), 0, add)
    all_units = gl.max(until, 0) * KV_HEADS
    share = gl.maximum((all_units + gl.num_programs(0) - 1) // gl.num_programs(0), 1)
    if WHOLE > 0:
        blocks = gl.max(until, 0)
        share = gl.where(blocks <= WHOLE, gl.maximum(share, blocks), share)
    unit = gl.program_id(0) * share
    units = gl.minimum(share, all_units - unit)
    is_behind = until * KV_HEADS <= unit
    row = gl.sum(is_behind.to(gl.int32), 0)
    before = gl.max(gl.where(is_behind, until, 0), 0)
    blocks = gl.maximum(gl.min(gl.where(is_behind, 1 << 30, until), 0) - before, 1)
    h = (unit - before * KV_HEADS) // blocks
    block = (unit - before * KV_HEADS) % blocks
    # The last reduction's result is read from shared memory, where the arguments of the copying warpgroup are written
    # next, without a barrier of Triton's (3.6) between.
    gl.thread_barrier()
    gl.warp_specialize([
        (attend, (
            q, k, v, q_norm, k_norm, cos, sin, rotary, keys, values, sinks, positions, slots, part_sums, part_stats,
            counters, out, codes, scales, row, before, h, block, unit, units, share,
            q_smem, k_smem, v_smem, p_smem, full, empty,
            Q_STRIDE, K_STRIDE, V_STRIDE, HEADS, KV_HEADS, DIM, ROTARY, EPS, WINDOW, SCALE, HEIGHT, WIDTH,
            TIME, H, BLOCK, STAGES, TOGETHER, PDL,
        )),
        (copy_ahead, (
            keys, values, table, req_slots, positions, count, row, h, block, units, k_smem, v_smem, full, empty,
            IS_NEW, TABLE_STRIDE, KV_HEADS, DIM, WINDOW, BLOCK, STAGES,
        )),
    ], [COPY_WARPS], [COPYING])  # fmt: skip


shared_decode = Kernel(shared_decode_kernel)
