"""Decode attention: one query row per sequence, with its keys split over several programs, in one launch.

The grid is fixed (rows, KV heads, SPLITS). Each program derives its keys, possibly none, from the row's position on
the device, so a CUDA graph can be replayed at any length (flash-decoding: https://pytorch.org/blog/flash-decoding).
The last split of a row to finish combines the partial results; an atomic counter, which it resets to 0, tells which
is last.

Optionally the kernel takes a row's own token as projected ("new") and does norm, RoPE and the store to the KV pool
itself, which saves a launch. All other keys and values are from earlier steps, so the first ones are loaded before
the wait for that projection.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.kv_triton import by_halves, from_halves, load_kv, store_kv
from moeserve.kernels.quantize.triton import quantize_groups
from moeserve.kernels.rope.triton import load_value, norm_and_rotate, rotation, section_positions

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_block(
    keys, values, key_scales, value_scales, held, first, end,
    NEW: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, V_DIM: tl.constexpr,
    V_SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Loads keys [BLOCK, SIZE], values [BLOCK, V_SIZE] and numbers [BLOCK] of the row's tokens from `first` up to
    `end` (exclusive). Values with scales are `by_halves`. Token NEW + j is in slot held[j]; with NEW, token 0 is not
    in the pool yet. Bypasses the L1 cache, which may be stale. MASKED: load zeros beyond the tokens; else the last
    token is repeated, which needs `first` below `end`."""
    token = first + tl.arange(0, BLOCK)
    if MASKED:
        there = (token >= NEW) & (token < end)
        slot = tl.load(held + token - NEW, there, 0, cache_modifier=".cg").to(tl.int64)
    else:
        there = tl.full([BLOCK], True, tl.int1)
        slot = tl.load(held + tl.minimum(token, end - 1) - NEW, cache_modifier=".cg").to(tl.int64)
    k = load_kv(keys, key_scales, slot * (KV_HEADS * DIM), there, DIM, BLOCK, SIZE, True, False)
    v = load_kv(values, value_scales, slot * (KV_HEADS * V_DIM), there, V_DIM, BLOCK, V_SIZE, True, True)
    return k, v, token


@triton.jit
def cap_scores(scores, CAP: tl.constexpr):
    """Returns CAP * tanh(scores / CAP), float32 in the shape of `scores` (Gemma 2's soft cap,
    https://arxiv.org/abs/2408.00118). The exponential cannot overflow, because its argument is at most 0."""
    power = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E / CAP))
    size = (1.0 - power) / (1.0 + power)
    return CAP * tl.where(scores < 0.0, -size, size)


@triton.jit
def attend(q, k, v, live, acc, largest, total, SCALE: tl.constexpr, CAP: tl.constexpr = 0.0):
    """Attends one head group q [G, SIZE] to one more block of keys. Returns the running unnormalised sum [G, V_SIZE],
    the largest score [G], and the weights [G, BLOCK] accumulated over all blocks, which are summed at the end. Scores
    are exponents of two. CAP above 0: the scores' cap, for exponents of two as well."""
    scores = tl.dot(q, tl.trans(k)) * SCALE
    if CAP > 0:
        scores = cap_scores(scores, CAP)
    scores = tl.where(live[None, :], scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    shrink = tl.exp2(largest - new)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, new, total * shrink[:, None] + weights


@triton.jit
def new_token(
    k, v, keys, values, key_scales, value_scales, place, own, other, is_stored, behind,
    DIM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, V_DIM: tl.constexpr,
    V_EPS: tl.constexpr, V_SCALE: tl.constexpr, V_SIZE: tl.constexpr,
):  # fmt: skip
    """Computes the row's own key [1, SIZE] and value [1, V_SIZE], and stores them to the pool if is_stored. k, v:
    pointers to the KV head as projected; place: its slot, in heads; behind: weight of a norm after RoPE."""
    one = tl.zeros([1, 1], tl.int32)
    key = norm_and_rotate(k + one, one == 0, own, other, None, behind, DIM, ROTARY, EPS, SIZE)
    value = load_value(v, V_DIM, V_EPS, V_SCALE, V_SIZE)
    key = store_kv(keys, key_scales, place * DIM, key, is_stored, DIM, SIZE)
    return key, store_kv(values, value_scales, place * V_DIM, value, is_stored, V_DIM, V_SIZE)


@triton.jit
def combine(part_sums, part_stats, at, splits, HEADS: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr):
    """Combines the partial results of `splits` splits, from part `at` on, into one normalised [G, SIZE], four at a
    time."""
    g, d = tl.arange(0, G), tl.arange(0, SIZE)
    acc = tl.zeros([G, SIZE], tl.float32)
    top = tl.full([G], float("-inf"), tl.float32)
    whole = tl.zeros([G], tl.float32)
    for first in range(0, splits, 4):
        largest, total, sums = (), (), ()
        for j in tl.static_range(4):  # so that four loads are in flight together
            part = (at + first + j) * G + g
            here = first + j < splits
            largest = largest + (tl.load(part_stats + part * 2, here, float("-inf"), cache_modifier=".cg"),)
            total = total + (tl.load(part_stats + part * 2 + 1, here, 0.0, cache_modifier=".cg"),)
            from_sums = part_sums + part[:, None] * SIZE + d[None, :]
            live = here & (g < HEADS)[:, None]
            sums = sums + (tl.load(from_sums, live, 0.0, cache_modifier=".cg"),)
        for j in tl.static_range(4):
            new = tl.maximum(top, largest[j])
            shrink, share = tl.exp2(top - new), tl.exp2(largest[j] - new)
            acc = acc * shrink[:, None] + sums[j] * share[:, None]
            whole = whole * shrink + total[j] * share
            top = new
    return acc / whole[:, None]


@triton.jit
def store_heads(
    result,
    out,
    codes,
    scales,
    at,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Stores result [G, SIZE], HEADS heads of DIM, from column `at` on, as floats and as int8, where pointers are
    given."""
    g, d = tl.arange(0, G)[:, None], tl.arange(0, SIZE)[None, :]
    live = (g < HEADS) & (d < DIM)
    if out is not None:
        tl.store(out + at + g * DIM + d, result.to(out.dtype.element_ty), live)
    if codes is not None:
        groups: tl.constexpr = SIZE // 32
        q, s = quantize_groups(tl.reshape(result, [G * groups, 32]))
        n = tl.arange(0, G * groups)
        column = n // groups * DIM + n % groups * 32
        live = (n // groups < HEADS) & (n % groups * 32 < DIM)
        tl.store(codes + at + column[:, None] + tl.arange(0, 32)[None, :], q, live[:, None])
        tl.store(scales + (at + column) // 32, s, live)


@triton.jit
def store_split(
    acc, largest, total, i, h, split, splits, part_sums, part_stats, counters, out, codes, scales,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, G: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Stores the partial result of one of row i's `splits` splits for KV head h: the unnormalised sum acc [G, SIZE],
    the largest scores and the sums of weights [G]. The last split to finish combines all, with SPLITS above 1."""
    group: tl.constexpr = HEADS // KV_HEADS
    row = i.to(tl.int64)
    to = row * (HEADS * DIM) + h * (group * DIM)
    if splits == 1:
        store_heads(acc / total[:, None], out, codes, scales, to, group, DIM, G, SIZE)
    elif SPLITS > 1:
        at = (row * KV_HEADS + h) * SPLITS
        g, c = tl.arange(0, G), tl.arange(0, SIZE)
        part = (at + split) * G + g
        tl.store(part_sums + part[:, None] * SIZE + c[None, :], acc, (g < group)[:, None])
        tl.store(part_stats + part * 2, largest)
        tl.store(part_stats + part * 2 + 1, total)
        tl.debug_barrier()  # all threads must have written before the counter says so
        arrived = tl.atomic_add(counters + i * KV_HEADS + h, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(counters + i * KV_HEADS + h, 0)
            result = combine(part_sums, part_stats, at, splits, group, G, SIZE)
            store_heads(result, out, codes, scales, to, group, DIM, G, SIZE)


@kernel
def decode_kernel(
    q, k, v, q_norm, k_norm, cos, sin, rotary, keys, values, key_scales, value_scales, sinks, table, req_slots,
    positions, ends, slots, count, part_sums, part_stats, counters, out, codes, scales,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, ROTARY: tl.constexpr,
    Q_EPS: tl.constexpr, K_EPS: tl.constexpr, V_EPS: tl.constexpr, V_SCALE: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, FILL: tl.constexpr, LONG: tl.constexpr, BEHIND: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TIME: tl.constexpr, PDL: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Computes decode attention: row i < count[0] attends to the keys in slots table[req_slots[i], : positions[i] + 1].
    Grid (rows, KV heads, SPLITS).

    q [n, HEADS * DIM]; keys [slots, KV_HEADS, DIM], values [slots, KV_HEADS, V_DIM], optionally with scales [..,
    DIM / 32] and [.., V_DIM / 32] (quantize/kv.py). Without k, q is rotated and scaled, in the dtype that keys are
    read as. With k, q, k and v are as projected, and the row's token is stored in slots[i] of the pool; the row
    must not attend to any other token of this step. part_sums [n, KV_HEADS, SPLITS, G, V_SIZE] and part_stats [..,
    2] float32: scratch; counters int32 [n, KV_HEADS]: zero before and after. out [n, HEADS * V_DIM], and codes with
    scales: the result, each optional. G, SIZE, V_SIZE: powers of two that hold a group, a head, its value. V_SCALE:
    multiplies v. LEAST: minimum of key blocks per split. FILL: splits per row that fill the GPU if all rows are
    equally long. A row whose splits would then exceed LONG blocks gets up to SPLITS, so that the launch does not
    wait for one long row among short ones. sinks float32 [HEADS], optional: an additional logit per head, counted
    by the first split. WINDOW: number of last positions that a row sees; 0: all. SCALE: multiplies scores, for
    powers of two. BEHIND: the norms of heads come after RoPE. rotary, HEIGHT, WIDTH, TIME: see `section_positions`;
    None: rows rotate by positions. ends int32 [n], optional, without k and with a WINDOW: row i sees the slots below
    ends[i]. CAP: see `attend`.
    """
    if PDL:
        gdc_launch_dependents()
        if k is None:
            gdc_wait()
    i, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    existing, position, req_slot = tl.load(count), tl.load(positions + i), tl.load(req_slots + i)
    if i >= existing:
        return
    length = position + 1
    first_seen = 0
    if WINDOW > 0:
        first_seen = tl.maximum(length - WINDOW, 0)
        if ends is not None:
            length = tl.load(ends + i)
        length -= first_seen
    blocks = tl.cdiv(length, BLOCK)
    per = (
        tl.maximum(tl.maximum(tl.cdiv(blocks, SPLITS), tl.minimum(tl.cdiv(blocks, FILL), LONG)), LEAST)
        * BLOCK
    )
    splits = tl.cdiv(length, per)
    if split >= splits:
        return  # other programs wait too, so that the next kernel can rely on the previous one having ended
    NEW: tl.constexpr = 0 if k is None else 1
    g, d = tl.arange(0, G), tl.arange(0, SIZE)
    head = h * (group * DIM) + g[:, None] * DIM
    live_heads = (g < group)[:, None]
    held = table + req_slot.to(tl.int64) * TABLE_STRIDE
    if WINDOW > 0:
        held += first_seen  # tokens are counted from the first visible one
    keys += h * DIM
    values += h * V_DIM
    if key_scales is not None:
        scale_of: tl.constexpr = DIM if keys.dtype.element_ty == tl.float8e4nv else 32
        key_scales += h * (DIM // scale_of)
        value_scales += h * (V_DIM // (V_DIM if scale_of == DIM else 32))
    start, end = split * per, tl.minimum(length, (split + 1) * per)
    some_k, some_v, tokens = load_block(
        keys, values, key_scales, value_scales, held, start, end, NEW, KV_HEADS, DIM, SIZE, V_DIM, V_SIZE, BLOCK, True
    )  # fmt: skip
    token = i.to(tl.int64)
    if k is None:
        query = tl.load(q + token * Q_STRIDE + head + d[None, :], live_heads & (d < DIM)[None, :], 0.0)
    else:
        slot = tl.load(slots + i).to(tl.int64)
        if rotary is None:
            angles = position.to(tl.int64) * (ROTARY // 2)
        else:
            angles = section_positions(rotary + token * 3, HEIGHT, WIDTH, TIME, ROTARY, SIZE) * (ROTARY // 2)
        own, other = rotation(None if BEHIND else q_norm, cos + angles, sin + angles, DIM, ROTARY, SIZE)
        own_k, other_k = rotation(None if BEHIND else k_norm, cos + angles, sin + angles, DIM, ROTARY, SIZE)
        if PDL:
            gdc_wait()
        query = norm_and_rotate(
            q + token * Q_STRIDE + head, live_heads, own, other, None, q_norm if BEHIND else None, DIM, ROTARY, Q_EPS,
            SIZE,
        )  # fmt: skip
        query = (query * DIM**-0.5).to(some_k.dtype)
        new_k, new_v = new_token(
            k + token * K_STRIDE + h * DIM, v + token * V_STRIDE + h * V_DIM, keys, values, key_scales, value_scales,
            slot * KV_HEADS, own_k, other_k, (slot >= 0) & (split == 0), k_norm if BEHIND else None,
            DIM, ROTARY, K_EPS, SIZE, V_DIM, V_EPS, V_SCALE, V_SIZE,
        )  # fmt: skip
        if value_scales is not None:
            new_v = by_halves(new_v)
        some_k = tl.where((tokens == 0)[:, None], new_k, some_k)
        some_v = tl.where((tokens == 0)[:, None], new_v, some_v)
    acc, total = tl.zeros([G, V_SIZE], tl.float32), tl.zeros([G, BLOCK], tl.float32)
    largest = tl.full([G], float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + h * group + g, g < group, 0.0) * LOG2E
        largest = tl.where(split == 0, sink, largest)
        total = tl.where((split == 0) & (tl.arange(0, BLOCK) == 0)[None, :], 1.0, total)
    acc, largest, total = attend(query, some_k, some_v, tokens < end, acc, largest, total, SCALE, CAP)
    for first in range(start + BLOCK, end, BLOCK):
        some_k, some_v, tokens = load_block(
            keys, values, key_scales, value_scales, held, first, end, NEW, KV_HEADS, DIM, SIZE, V_DIM, V_SIZE, BLOCK,
            False,
        )  # fmt: skip
        acc, largest, total = attend(query, some_k, some_v, tokens < end, acc, largest, total, SCALE, CAP)
    total = tl.sum(total, 1)
    if value_scales is not None:
        acc = from_halves(acc)
    store_split(
        acc, largest, total, i, h, split, splits, part_sums, part_stats, counters, out, codes, scales, HEADS, KV_HEADS,
        V_DIM, SPLITS, G, V_SIZE,
    )  # fmt: skip
