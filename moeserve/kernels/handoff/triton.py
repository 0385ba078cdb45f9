"""The GPU's side of the hand-off: writes rows to shared memory, sets a flag, waits, and reads the result. All memory
except x, ids, weights, expert_map, the counters and out is in the shared region (region.py)."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel

# The share of missed experts that the GPU fetches, in 1 / ONE: its range, and its change per layer whose two sides did
# not end together.
ONE = tl.constexpr(1 << 16)
LEAST, MOST, CHANGE = tl.constexpr(ONE // 16), tl.constexpr(ONE // 2), tl.constexpr(ONE // 1024)

GROUP = tl.constexpr(32)
NOTHING = tl.constexpr(1e-30)  # a group whose largest value is at most this counts as zero


@triton.jit
def store_row(value, codes, metas, COLS: tl.constexpr, SIZE: tl.constexpr):
    """Stores a row, float32 [SIZE] of which the first COLS are valid, in the layout that the CPU's kernels read:
    bit for bit their own quantisation (../quantize/reference.py). codes int8, metas int32: pointers to the row's
    two parts."""
    groups: tl.constexpr = SIZE // GROUP
    x = tl.reshape(value, [groups, GROUP])
    largest = tl.max(tl.abs(x), axis=1)
    inverse = tl.where(largest > NOTHING, tl.div_rn(tl.full([groups], 127.0, tl.float32), largest), 0.0)
    # Adding 1.5 * 2^23 rounds to an integer, ties to even.
    q = (x * inverse[:, None] + 12582912.0) - 12582912.0
    sums = tl.sum(tl.reshape(q, [groups, 2, GROUP // 2]), axis=2)
    total = tl.sum(sums, axis=1)
    finite = total == total  # NaN and infinity times the inverse are NaN
    scale = tl.where(finite, tl.div_rn(largest, tl.full([groups], 127.0, tl.float32)), float("nan"))
    scaled = scale * tl.where(finite, total, 0.0)
    halves = tl.where(finite[:, None], sums, 0.0).to(tl.int32)
    # Adjacent (scale, scaled_sum, sum_lo, sum_hi), 16 bytes per group.
    floats = tl.join(scale, scaled).to(tl.int32, bitcast=True)
    meta = tl.reshape(tl.permute(tl.join(floats, halves), (0, 2, 1)), [groups * 4])
    c = tl.arange(0, SIZE)
    tl.store(codes + c, tl.reshape(q, [SIZE]).to(tl.int8), c < COLS)
    m = tl.arange(0, groups * 4)
    tl.store(metas + m, meta, m < COLS // GROUP * 4)


@kernel
def publish_kernel(
    x, ids, weights, expert_map, on_gpu, codes, metas, floats, out_ids, out_weights,
    request, answer, steps, ticket, present, waits,
    COLS: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Copies each row with an expert on the CPU to the shared region, with the experts' indices and weights; the last
    program to finish raises the request flag for the pool. A program per row. x [n, COLS]; ids int32, weights float32
    [n, TOP_K], rows STRIDE apart; expert_map int32 [experts]; on_gpu int32 [n, TOP_K], optional, rows STRIDE apart: the
    GPU computes routes with a value >= 0.

    Optional: codes int8 [.., 1.5 * COLS], metas int32 (the same rows' second part), floats float32 [.., COLS].
    steps int32: how often this layer was published; ticket int64: 0 between launches. present int32 [n]: 1 if the
    row has an expert on the CPU, else 0. waits int32: whether the GPU has to wait for the answer.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K)
    live = k < TOP_K
    expert = tl.load(ids + row * STRIDE + k, live, -1)
    weight = tl.load(weights + row * STRIDE + k, live, 0.0)
    local = tl.load(expert_map + expert, expert >= 0, -1)
    if on_gpu is not None:
        local = tl.where(tl.load(on_gpu + row * STRIDE + k, live, -1) >= 0, -1, local)
    tl.store(out_ids + row * TOP_K + k, local, live)
    tl.store(out_weights + row * TOP_K + k, weight, live)
    has_expert = tl.max((local >= 0).to(tl.int32), 0)
    tl.store(present + row, has_expert)
    if has_expert > 0:
        c = tl.arange(0, SIZE)
        value = tl.load(x + row * COLS + c, c < COLS, 0.0).to(tl.float32)
        if codes is not None:
            store_row(
                value, codes + row * (COLS + COLS // 2), metas + row * (COLS // 4 + COLS // 8), COLS, SIZE
            )
        if floats is not None:
            tl.store(floats + row * COLS + c, value, c < COLS)
    # The last program raises the flag. The barrier orders the whole program's stores before the ticket; the ticket
    # orders the other programs' stores before the step's number, whose release at system scope covers them all.
    tl.debug_barrier()
    rows = tl.num_programs(0)
    mine = 1 + (has_expert.to(tl.int64) << 20)
    arrived = mine
    if rows > 1:
        arrived += tl.atomic_add(ticket, mine, sem="acq_rel", scope="gpu")
    if (arrived & 0xFFFFF) == rows:
        tl.store(ticket, 0)
        waited = (arrived >> 20) > 0
        tl.store(waits, waited.to(tl.int32))
        tl.store(answer, (waited == 0).to(tl.int32))
        step = tl.atomic_add(steps, 1, sem="acq_rel", scope="sys") + 1
        wanted = tl.where(waited, rows.to(tl.int64), 0)
        tl.store(request, (wanted << 32) | (step.to(tl.int64) & 0xFFFFFFFF))


@kernel
def poll_kernel(answer, waits, control, fetched, PDL: tl.constexpr):
    """Waits until the int32 flag at `answer` is not 0, which tells that the CPU's answer is complete. The flag is in
    host memory and each read crosses PCIe, so it is read only if `waits` points to a number other than 0. A single
    program of one warp, so that at most one read is in flight.

    Optional: control int32 [2] and fetched int32 [2], see fetch.py. If the GPU has to wait for the pool, it fetches
    more of the missed experts from now on; if the pool had ended before, fewer."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(waits) != 0:
        seen = tl.load(answer, volatile=True)
        if control is not None:
            share = tl.load(control)
            fewer = tl.where(tl.load(fetched) > 0, tl.maximum(share - CHANGE, LEAST), share)
            tl.store(control, tl.where(seen == 0, tl.minimum(share + CHANGE, MOST), fewer))
        while seen == 0:
            seen = tl.load(answer, volatile=True)


@kernel
def combine_kernel(
    result, present, out,
    COLS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies the pool's results from the shared region to out, float32 [n, COLS]; a row without an expert on the CPU
    becomes zeros (its `present` is 0, see publish_kernel). A program per row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    has_expert = tl.load(present + row)
    c = tl.arange(0, SIZE)
    # Volatile: read from memory, not from a stale cache line.
    value = tl.load(result + row * COLS + c, (c < COLS) & (has_expert != 0), 0.0, volatile=True)
    tl.store(out + row * COLS + c, value, c < COLS)
