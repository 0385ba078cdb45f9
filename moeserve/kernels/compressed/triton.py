"""The operations before and after compressed attention, as Triton kernels: `reference.py` has the arithmetic.

A sequence's state holds, for each entry in progress, [3, DIM]: the greatest gate, the sum of weights, and the
weighted sum of its tokens. With OVERLAPS the same follows for the next entry. A sum of weights of 0 means that there
is no token yet.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def rotate_pairs(
    x, cos, sin, BACK: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, SIZE: tl.constexpr
):
    """Returns heads x [any, SIZE] with the pairs of neighbours among their last ROTARY of DIM numbers rotated. cos,
    sin: pointers to the position's angles; BACK: by the negative angles."""
    pair = 2 * tl.arange(0, SIZE // 2) - (DIM - ROTARY)
    turns = (pair >= 0) & (pair < ROTARY)
    c = tl.load(cos + pair // 2, turns, 1.0)[None, :]
    s = tl.load(sin + pair // 2, turns, 0.0)[None, :]
    if BACK:
        s = -s
    a, b = tl.split(tl.reshape(x, [x.shape[0], SIZE // 2, 2]))
    return tl.reshape(tl.join(a * c - b * s, b * c + a * s), [x.shape[0], SIZE])


@triton.jit
def sequence_of(sequence, first, positions, i):
    """Returns, as int32 scalars, the index of row i's sequence among the step's sequences, that sequence's first row,
    and the position of that row."""
    mine = tl.load(sequence + i)
    row = tl.load(first + mine)
    return mine, row, tl.load(positions + row)


@triton.jit
def key_row(slot, row, position, step_first, fits, ring_first, ring_end, RING: tl.constexpr):
    """Returns the row (integer, in the shape of `position`) of a position's key: in the ring of state slot `slot`, or
    among the step's keys behind the rings, if the position is at least step_first and the ring has no room for the
    step's keys (fits is 0). row: the row of position step_first in the step."""
    in_step = (position >= step_first) & (fits == 0)
    return tl.where(
        in_step, ring_end + row + position - step_first, ring_first + slot * RING + position % RING
    )


@triton.jit
def rotate_head(x, cos, sin, out, DIM: tl.constexpr, ROTARY: tl.constexpr, SIZE: tl.constexpr):
    """Stores at `out` the head of DIM numbers to which x points, with its last ROTARY numbers rotated in pairs; in
    float32, rounded to out's dtype."""
    d = tl.arange(0, SIZE)[None, :]
    turned = rotate_pairs(tl.load(x + d, d < DIM, 0.0).to(tl.float32), cos, sin, False, DIM, ROTARY, SIZE)
    tl.store(out + d, turned.to(out.dtype.element_ty), d < DIM)


@kernel
def compressed_store_kernel(
    q, kv, norm, cos, sin, positions, index_q, sequence, first, counts, slots, rings, count, queries, keys,
    index_queries, Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr, INDEX_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, SIZE: tl.constexpr, INDEX_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """For rows i < count[0], normalises, scales and rotates the heads of q; normalises and rotates the key, and stores
    it; rotates the index heads. Grid (n, HEADS + 1 + INDEX_HEADS).

    q [n, HEADS * DIM], kv [n, DIM] and index_q [n, INDEX_HEADS * INDEX_DIM], rows at their strides; norm float32 [DIM];
    cos, sin float32 [positions, ROTARY / 2]. sequence int32 [n]; first, counts, slots int32 [sequences]: StepSequences.
    rings int64 [2]: the keys' first row of rings, and the first one behind them. queries [n, HEADS, DIM], keys [rows,
    DIM], index_queries [n, INDEX_HEADS, INDEX_DIM]. *SIZE: powers of two that hold the heads.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, part = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row, position = i.to(tl.int64), tl.load(positions + i)
    cos += position.to(tl.int64) * (ROTARY // 2)
    sin += position.to(tl.int64) * (ROTARY // 2)
    if part > HEADS:
        if INDEX_HEADS > 0:
            head = part - HEADS - 1
            rotate_head(
                index_q + row * INDEX_STRIDE + head * INDEX_DIM, cos, sin,
                index_queries + (row * INDEX_HEADS + head) * INDEX_DIM, INDEX_DIM, ROTARY, INDEX_SIZE,
            )  # fmt: skip
    else:
        d = tl.arange(0, SIZE)[None, :]
        live = d < DIM
        if part < HEADS:
            x = tl.load(q + row * Q_STRIDE + part * DIM + d, live, 0.0).to(tl.float32)
            x *= SCALE * tl.rsqrt(tl.sum(x * x, 1) / DIM + EPS)[:, None]
            to = queries + (row * HEADS + part) * DIM + d
        else:
            x = tl.load(kv + row * KV_STRIDE + d, live, 0.0).to(tl.float32)
            x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + EPS)[:, None] * tl.load(norm + d, live, 0.0)
            mine, of_first, step_first = sequence_of(sequence, first, positions, i)
            fits = (tl.load(counts + mine) <= RING - WINDOW + 1).to(tl.int32)
            slot = tl.load(slots + mine).to(tl.int64)
            ring_first, ring_end = tl.load(rings), tl.load(rings + 1)
            at = key_row(slot, of_first, position, step_first, fits, ring_first, ring_end, RING)
            to = keys + at * DIM + d
        x = rotate_pairs(x, cos, sin, False, DIM, ROTARY, SIZE)
        tl.store(to, x.to(keys.dtype.element_ty), live)


@triton.jit
def load_state(state, c, live, DIM: tl.constexpr):
    """Returns the state of an entry in progress at the columns c, float32 in the shape of c: the greatest gate (-inf
    without tokens), the sum of weights and the weighted sum. In memory the state is [3, DIM]; a weight of 0 means no
    tokens."""
    weight = tl.load(state + DIM + c, live, 0.0)
    most = tl.where(weight > 0.0, tl.load(state + c, live, 0.0), float("-inf"))
    return most, weight, tl.load(state + 2 * DIM + c, live, 0.0)


@triton.jit
def store_state(state, most, weight, total, c, live, DIM: tl.constexpr):
    tl.store(state + c, tl.where(weight > 0.0, most, 0.0), live)
    tl.store(state + DIM + c, weight, live)
    tl.store(state + 2 * DIM + c, total, live)


@triton.jit
def add_tokens(
    most, weight, total, kv, gate, bias, row, begin, end, block, c, live, STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds the tokens of positions begin .. end - 1 to an entry in progress, and returns its (most, weight, total),
    float32 in the shape of c: the greatest gate, the sum of weights, the weighted sum. kv, gate: pointers to the
    columns that take part, rows STRIDE and GATE_STRIDE apart; bias: of gates, [position in the block, WIDTH]; row: the
    row that position 0 would have in the step; block: the first position of the tokens' block."""
    for position in range(begin, end):
        at = (row + position).to(tl.int64)
        x = tl.load(kv + at * STRIDE + c, live, 0.0).to(tl.float32)
        g = tl.load(gate + at * GATE_STRIDE + c, live, 0.0).to(tl.float32)
        g += tl.load(bias + (position - block) * WIDTH + c, live, 0.0)
        new = tl.maximum(most, g)
        shrink, share = tl.exp(most - new), tl.exp(g - new)
        weight = weight * shrink + share
        total = total * shrink + share * x
        most = new
    return most, weight, total


@triton.jit
def entry_until(
    kv, gate, bias, state, row, step_first, start, end, c, live,
    STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, DIM: tl.constexpr, RATIO: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Returns (most, weight, total) of `add_tokens` for the entry of the block from position `start` on, with the
    tokens up to position end - 1. An entry pools RATIO tokens; with OVERLAPS also the RATIO tokens before them. state:
    float32, the sequence's entries in progress before the step, whose tokens begin with row `row` and position
    step_first."""
    width: tl.constexpr = 2 * DIM if OVERLAPS else DIM
    own: tl.constexpr = DIM if OVERLAPS else 0
    before = start // RATIO - step_first // RATIO  # blocks that end in this step before it
    has = before == 0
    if OVERLAPS:
        has = before <= 1
    most, weight, total = load_state(state + tl.where(before == 0, 0, 3 * DIM), c, live & has, DIM)
    row -= step_first
    if OVERLAPS:
        block = start - RATIO
        begin = tl.maximum(block, step_first)
        most, weight, total = add_tokens(
            most, weight, total, kv, gate, bias, row, begin, start, block, c, live, STRIDE, GATE_STRIDE, width
        )
    begin = tl.maximum(start, step_first)
    return add_tokens(
        most, weight, total, kv + own, gate + own, bias + own, row, begin, end, start, c, live, STRIDE, GATE_STRIDE,
        width,
    )  # fmt: skip


@kernel
def entries_kernel(
    kv, gate, bias, norm, cos, sin, positions, sequence, first, slots, kv_slots, states, count, entries,
    STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, DIM: tl.constexpr,
    RATIO: tl.constexpr, OVERLAPS: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows i < count[0] whose token is the last of a block of RATIO store the block's entry, normalised and rotated,
    in row kv_slots[i] of entries [any, DIM], unless it is negative. Grid (n).

    kv, gate floats [n, DIM], with OVERLAPS [n, 2 * DIM], rows at their strides; bias float32 [RATIO, the same]; norm
    float32 [DIM]; states float32, rows STATE_STRIDE apart, as before the step; SIZE: a power of two that holds DIM.
    Other arguments as for `compressed_store_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    position, kv_slot = tl.load(positions + i), tl.load(kv_slots + i).to(tl.int64)
    if ((position + 1) % RATIO != 0) | (kv_slot < 0):
        return
    mine, row, step_first = sequence_of(sequence, first, positions, i)
    state = states + tl.load(slots + mine).to(tl.int64) * STATE_STRIDE
    c, start = tl.arange(0, SIZE), position + 1 - RATIO
    live = c < DIM
    _, weight, total = entry_until(
        kv, gate, bias, state, row, step_first, start, position + 1, c, live, STRIDE, GATE_STRIDE, DIM, RATIO, OVERLAPS
    )  # fmt: skip
    x = tl.where(live, total / weight, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + EPS) * tl.load(norm + c, live, 0.0)
    angles = start.to(tl.int64) * (ROTARY // 2)
    x = rotate_pairs(x[None, :], cos + angles, sin + angles, False, DIM, ROTARY, SIZE)
    to = entries + kv_slot * DIM + c[None, :]
    tl.store(to, x.to(entries.dtype.element_ty), (c < DIM)[None, :])


@kernel
def advance_kernel(
    kv, gate, bias, positions, first, counts, slots, states,
    STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, DIM: tl.constexpr,
    RATIO: tl.constexpr, OVERLAPS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Advances the sequences' states, in place, by the step's tokens. Arguments as for `entries_kernel`, which comes
    before it. Grid (sequences, parts of COLUMNS columns)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.program_id(0)
    tokens = tl.load(counts + mine)
    if tokens == 0:
        return
    row = tl.load(first + mine)
    step_first = tl.load(positions + row)
    end = step_first + tokens
    start = end // RATIO * RATIO
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = c < DIM
    state = states + tl.load(slots + mine).to(tl.int64) * STATE_STRIDE
    most, weight, total = entry_until(
        kv, gate, bias, state, row, step_first, start, end, c, live, STRIDE, GATE_STRIDE, DIM, RATIO, OVERLAPS
    )  # fmt: skip
    if OVERLAPS:
        has = start // RATIO == step_first // RATIO
        most_after, weight_after, total_after = load_state(state + 3 * DIM, c, live & has, DIM)
        begin = tl.maximum(start, step_first)
        most_after, weight_after, total_after = add_tokens(
            most_after, weight_after, total_after, kv, gate, bias, row - step_first, begin, end, start, c, live, STRIDE,
            GATE_STRIDE, 2 * DIM,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read the state
        store_state(state + 3 * DIM, most_after, weight_after, total_after, c, live, DIM)
    store_state(state, most, weight, total, c, live, DIM)


@kernel
def keep_keys_kernel(
    positions, first, counts, slots, rings, keys,
    DIM: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies the last WINDOW - 1 keys of a sequence from the step's rows to the sequence's ring, if the ring had no
    room for the keys of this step. Arguments as for `compressed_store_kernel`. Grid (sequences, WINDOW - 1)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.program_id(0)
    tokens = tl.load(counts + mine)
    t = tokens - 1 - tl.program_id(1)
    if (tokens <= RING - WINDOW + 1) | (t < 0):
        return
    row = tl.load(first + mine)
    position, d = tl.load(positions + row) + t, tl.arange(0, SIZE)
    key = tl.load(keys + (tl.load(rings + 1) + row + t) * DIM + d, d < DIM, 0.0)
    to = tl.load(rings) + tl.load(slots + mine).to(tl.int64) * RING + position % RING
    tl.store(keys + to * DIM + d, key, d < DIM)
