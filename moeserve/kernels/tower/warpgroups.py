"""Attention among all patches of a picture on Hopper, for heads of 65 to 80 numbers.

torch's kernels pad a head of 72 numbers to 128 or 96: 16,192 patches with 16 heads take 3.4 and 5.5 ms on an H200, here
2.7. Here a head is 64 numbers and 16, of which those beyond the head are zero in q. Otherwise as
kernels/attention/warpgroups.py: two warpgroups attend, a third copies keys and values ahead of them, and the score
product of the next block runs during the softmax of the current one.

Written in Gluon, Triton's language with explicit layouts and barriers, which has no interpreter.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moeserve.kernels.launch import Kernel

WIDE = gl.constexpr(64)  # numbers of a head's first part
NARROW = gl.constexpr(16)  # and of its second
COPY_WARPS = gl.constexpr(4)


@gluon.jit
def copy_part(wide, narrow, first, column, full, wide_smem, narrow_smem):
    """Starts the copies by TMA of one head's rows `first` .. of one block to shared memory: WIDE columns from `column`
    on, then the rest (narrow). Rows beyond the last patch become zero. `full` completes when all bytes are there."""
    mbarrier.expect(full, wide.block_type.nbytes + narrow.block_type.nbytes)
    tma.async_copy_global_to_shared(wide, [first, column], full, wide_smem)
    tma.async_copy_global_to_shared(narrow, [first, column + WIDE], full, narrow_smem)


@gluon.jit
def copy_ahead(
    k_wide, k_narrow, v_wide, v_narrow, column, blocks,
    kw_smem, kn_smem, vw_smem, vn_smem, k_full, k_empty, v_full, v_empty,
    BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Runs the copying warpgroup: copies the 16-bit keys and values of `blocks` blocks of BLOCK patches of one head,
    from `column` on, to shared memory as stages become free."""
    for n in range(blocks):
        stage = n % STAGES
        phase = (n // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        copy_part(
            k_wide, k_narrow, n * BLOCK, column, k_full.index(stage), kw_smem.index(stage), kn_smem.index(stage)
        )  # fmt: skip
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        copy_part(
            v_wide, v_narrow, n * BLOCK, column, v_full.index(stage), vw_smem.index(stage), vn_smem.index(stage)
        )  # fmt: skip


@gluon.jit
def softmax(
    scores, largest, total, first, patches, BLOCK: gl.constexpr, SCALE: gl.constexpr, layout: gl.constexpr
):
    """Returns the weights of one block's scores, float32 [rows, BLOCK]; and float32 [rows]: the new maximum, the new
    sum, and the factor that rescales earlier blocks' results. SCALE: of scores, for powers of two."""
    if first + BLOCK > patches:
        key = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
        scores = gl.where((key < patches)[None, :], scores, float("-inf"))
    new = gl.maximum(largest, gl.max(scores, 1) * SCALE)
    weights = gl.exp2(scores * SCALE - new[:, None])
    shrink = gl.exp2(largest - new)
    return weights, new, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def attend(
    q, out, patches, column, blocks, row,
    qw_smem, qn_smem, kw_smem, kn_smem, vw_smem, vn_smem, k_full, k_empty, v_full, v_empty,
    HALF: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr, SCALE: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Runs an attending warpgroup: computes attention for patches row + HALF * ROWS to row + (HALF + 1) * ROWS - 1 of
    one head and stores the results in `out` [patches, WIDTH], from `column` on."""
    dtype: gl.constexpr = kw_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    w_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    n_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 16])
    pw_layout: gl.constexpr = gl.DotOperandLayout(0, w_layout, 2)
    pn_layout: gl.constexpr = gl.DotOperandLayout(0, n_layout, 2)
    qw_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    qn_layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    first = row + HALF * ROWS

    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, qw_layout))
    d = gl.arange(0, WIDE, layout=gl.SliceLayout(0, qw_layout))
    at = m.to(gl.int64)[:, None] * WIDTH + column + d[None, :]
    qw_smem.store(gl.load(q + at, (m < patches)[:, None], 0.0))
    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, qn_layout))
    d = WIDE + gl.arange(0, NARROW, layout=gl.SliceLayout(0, qn_layout))
    at = m.to(gl.int64)[:, None] * WIDTH + column + d[None, :]
    qn_smem.store(gl.load(q + at, (m < patches)[:, None] & (d < DIM)[None, :], 0.0))
    fence_async_shared()
    gl.thread_barrier()

    largest = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, s_layout))
    acc_w = gl.zeros([ROWS, WIDE], gl.float32, layout=w_layout)
    acc_n = gl.zeros([ROWS, NARROW], gl.float32, layout=n_layout)
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, layout=s_layout)

    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(qw_smem, kw_smem.index(0).permute((1, 0)), zeros, use_acc=False)
    scores = warpgroup_mma(qn_smem, kn_smem.index(0).permute((1, 0)), scores)
    mbarrier.arrive(k_empty.index(0))
    weights, largest, total, shrink = softmax(scores, largest, total, 0, patches, BLOCK, SCALE, s_layout)
    p = weights.to(dtype)
    for n in range(1, blocks):
        stage = n % STAGES
        before = (n - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
        scores = warpgroup_mma(
            qw_smem, kw_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(qn_smem, kn_smem.index(stage).permute((1, 0)), scores, is_async=True)
        mbarrier.wait(v_full.index(before), ((n - 1) // STAGES) & 1)
        acc_w = warpgroup_mma(gl.convert_layout(p, pw_layout), vw_smem.index(before), acc_w, is_async=True)
        acc_n = warpgroup_mma(gl.convert_layout(p, pn_layout), vn_smem.index(before), acc_n, is_async=True)
        scores = warpgroup_mma_wait(2, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        weights, largest, total, shrink = softmax(
            scores, largest, total, n * BLOCK, patches, BLOCK, SCALE, s_layout
        )
        acc_w, acc_n = warpgroup_mma_wait(0, deps=[acc_w, acc_n])
        mbarrier.arrive(v_empty.index(before))
        acc_w = acc_w * gl.convert_layout(shrink, gl.SliceLayout(1, w_layout))[:, None]
        acc_n = acc_n * gl.convert_layout(shrink, gl.SliceLayout(1, n_layout))[:, None]
        p = weights.to(dtype)
    last = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((blocks - 1) // STAGES) & 1)
    acc_w = warpgroup_mma(gl.convert_layout(p, pw_layout), vw_smem.index(last), acc_w)
    acc_n = warpgroup_mma(gl.convert_layout(p, pn_layout), vn_smem.index(last), acc_n)
    acc_w = acc_w / gl.convert_layout(total, gl.SliceLayout(1, w_layout))[:, None]
    acc_n = acc_n / gl.convert_layout(total, gl.SliceLayout(1, n_layout))[:, None]

    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, w_layout))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, w_layout))
    to = m.to(gl.int64)[:, None] * WIDTH + column + c[None, :]
    gl.store(out + to, acc_w.to(out.dtype.element_ty), (m < patches)[:, None])
    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, n_layout))
    c = WIDE + gl.arange(0, NARROW, layout=gl.SliceLayout(0, n_layout))
    to = m.to(gl.int64)[:, None] * WIDTH + column + c[None, :]
    gl.store(out + to, acc_n.to(out.dtype.element_ty), (m < patches)[:, None] & (c < DIM)[None, :])


@gluon.jit
def tower_attention_kernel(
    q, k_wide, k_narrow, v_wide, v_narrow, count, out,
    WIDTH: gl.constexpr, DIM: gl.constexpr, SCALE: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    ATTENDING: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    """Computes attention in which all patches of a picture see each other, and writes `out`. Grid (patches / (2 *
    ROWS), heads), with 4 warps. q and out [patches, WIDTH]; count: the number of patches.

    k_wide to v_narrow: TMA descriptors of keys and values [patches, WIDTH], with boxes of BLOCK rows and the columns of
    a head's part. ATTENDING, COPYING: registers of a thread in either kind of warpgroup.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    patches = gl.load(count)
    row = gl.program_id(0) * (2 * ROWS)
    column = gl.program_id(1) * DIM
    blocks = (patches + BLOCK - 1) // BLOCK
    qw_smem = gl.allocate_shared_memory(
        dtype, [2, ROWS, WIDE], gl.NVMMASharedLayout.get_default_for([ROWS, WIDE], dtype)
    )
    qn_smem = gl.allocate_shared_memory(
        dtype, [2, ROWS, NARROW], gl.NVMMASharedLayout.get_default_for([ROWS, NARROW], dtype)
    )
    kw_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDE], k_wide.layout)
    kn_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, NARROW], k_narrow.layout)
    vw_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDE], v_wide.layout)
    vn_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, NARROW], v_narrow.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize([
        (attend, (
            q, out, patches, column, blocks, row,
            qw_smem.index(0), qn_smem.index(0), kw_smem, kn_smem, vw_smem, vn_smem, k_full, k_empty, v_full, v_empty,
            0, WIDTH, DIM, SCALE, BLOCK, STAGES, ROWS,
        )),
        (attend, (
            q, out, patches, column, blocks, row,
            qw_smem.index(1), qn_smem.index(1), kw_smem, kn_smem, vw_smem, vn_smem, k_full, k_empty, v_full, v_empty,
            1, WIDTH, DIM, SCALE, BLOCK, STAGES, ROWS,
        )),
        (copy_ahead, (
            k_wide, k_narrow, v_wide, v_narrow, column, blocks,
            kw_smem, kn_smem, vw_smem, vn_smem, k_full, k_empty, v_full, v_empty,
            BLOCK, STAGES,
        )),
    ], [4, COPY_WARPS], [ATTENDING, COPYING])  # fmt: skip


tower_attention = Kernel(tower_attention_kernel)
