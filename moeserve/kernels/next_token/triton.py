"""The inputs of a next-token block, and the choice of its drafts, as Triton kernels."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import kernel


@kernel
def places_kernel(
    ids, positions, kv_slots, count, block_ids, block_positions, block_slots, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Converts a step's rows to rows of the next-token block: block_ids are the ids of tokens (0 for embeddings),
    block_positions the positions - 1, and block_slots the KV slots, -1 for a text's first token, which has no row in
    the block. int32 [N] each, of which the first count[0] are written. Grid (N / BLOCK)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < tl.minimum(tl.load(count), N)
    position = tl.load(positions + i, live, 0)
    tl.store(block_ids + i, tl.maximum(tl.load(ids + i, live, 0), 0), live)
    tl.store(block_positions + i, tl.maximum(position - 1, 0), live)
    tl.store(block_slots + i, tl.where(position > 0, tl.load(kv_slots + i, live, -1), -1), live)


@triton.jit
def _normed(x, weight, at, live, COLS: tl.constexpr, EPS: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, 0) / COLS + EPS)
    return x * scale * tl.load(weight + at, live, 0.0)


@kernel
def join_kernel(
    x, states, positions, req_slots, kept, kept_position, token_norm, state_norm, count, joined,
    FIRST: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Computes joined[i] = [norm of x[i], norm of the state before row FIRST + i], for i < count[0]. Grid (n).

    x float32 [n, COLS]; joined float32 [n, 2 * COLS]. states float32 [any, COLS]: of the rows themselves where
    positions is None, otherwise of a step's rows: the state before a row is the previous row's of the same request, or
    the one kept for its request slot if that is the one before its position, or 0. positions, req_slots int32 [any];
    kept float32 [request slots, COLS], kept_position int32 [request slots]."""
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    c = tl.arange(0, SIZE)
    live = c < COLS
    out = joined + i.to(tl.int64) * (2 * COLS) + c
    token = tl.load(x + i.to(tl.int64) * COLS + c, live, 0.0)
    tl.store(out, _normed(token, token_norm, c, live, COLS, EPS), live)
    row = FIRST + i
    if positions is None:
        state = tl.load(states + row.to(tl.int64) * COLS + c, live, 0.0)
    else:
        position, request = tl.load(positions + row), tl.load(req_slots + row)
        before = tl.maximum(row - 1, 0)
        follows = (
            (row > 0)
            & (tl.load(req_slots + before) == request)
            & (tl.load(positions + before) == position - 1)
        )
        is_kept = (tl.load(kept_position + request) == position) & (position > 0)
        own = tl.load(states + before.to(tl.int64) * COLS + c, live & follows, 0.0)
        earlier = tl.load(kept + request.to(tl.int64) * COLS + c, live & is_kept & (follows == 0), 0.0)
        state = own + earlier
    tl.store(out + COLS, _normed(state, state_norm, c, live, COLS, EPS), live)


@kernel
def keep_step_kernel(
    states, positions, req_slots, count, kept, kept_position,
    COLS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Keeps the state of each request's last row in a step, for the position after it. Grid (N)."""
    i = tl.program_id(0)
    n = tl.load(count)
    if i >= n:
        return
    request, position = tl.load(req_slots + i), tl.load(positions + i)
    after = tl.minimum(i + 1, N - 1)
    is_followed = (tl.load(req_slots + after) == request) & (tl.load(positions + after) == position + 1)
    is_last = (i + 1 == n) | (is_followed == 0)
    c = tl.arange(0, SIZE)
    state = tl.load(states + i.to(tl.int64) * COLS + c, c < COLS, 0.0)
    tl.store(kept + request.to(tl.int64) * COLS + c, state, (c < COLS) & is_last)
    tl.store(kept_position + request, position + 1, is_last)


@kernel
def keep_rows_kernel(
    states, chosen, kept, kept_position, STRIDE: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Copies the states of chosen rows to their request slots in `kept`, and the next positions to `kept_position`.
    Grid (requests). states [rows, COLS], kept [request slots, COLS] float32; kept_position int32, -1: nothing kept.
    chosen int32, rows STRIDE apart: request slot, row of the last step (negative: keep none), and the position after
    it, of each request."""
    i = tl.program_id(0)
    request, row = tl.load(chosen + i), tl.load(chosen + STRIDE + i)
    c = tl.arange(0, SIZE)
    state = tl.load(states + tl.maximum(row, 0).to(tl.int64) * COLS + c, c < COLS, 0.0)
    tl.store(kept + request.to(tl.int64) * COLS + c, state, (c < COLS) & (row >= 0))
    tl.store(kept_position + request, tl.where(row < 0, -1, tl.load(chosen + 2 * STRIDE + i)))


@kernel
def clear_kernel(rows, slots, count, COLS: tl.constexpr, SIZE: tl.constexpr):
    """Grid (n). rows uint8 [any, COLS]: row slots[i] becomes 0, for i < count[0] and slots[i] >= 0."""
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    slot = tl.load(slots + i)
    c = tl.arange(0, SIZE)
    tl.store(rows + slot.to(tl.int64) * COLS + c, 0, (c < COLS) & (slot >= 0))


@kernel
def likeliest_kernel(
    logits, count, panels, num_panels, best, ids, sums, VOCAB: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """Finds in each row's logits float32 [VOCAB], from part * SPAN on, the highest, its id (the lowest, if several are
    equal), and the sum of exp(logit - highest). best, sums float32, ids int32 [n, PARTS]. Grid (n, PARTS).

    panels, num_panels: the shortlist whose logits they are, ascending, as in `panel_gemv_kernel`; None: the whole
    vocabulary."""
    i, part = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    valid = VOCAB
    if panels is not None:
        valid = tl.load(num_panels) * PANEL
    highest, at, total = -float("inf"), 0, 0.0
    for first in range(0, SPAN, BLOCK):
        c = part * SPAN + first + tl.arange(0, BLOCK)
        token = c
        if panels is not None:
            token = tl.load(panels + c // PANEL, c < valid, 0) * PANEL + c % PANEL
        there = (c < valid) & (token < VOCAB)
        x = tl.load(logits + i.to(tl.int64) * VOCAB + c, there, -float("inf"))
        top = tl.max(x, 0)
        if top > highest:
            at = tl.min(tl.where(there & (x == top), token, VOCAB), 0)
            total = total * tl.exp(highest - top)
            highest = top
        # a part beyond the vocabulary has no finite logit
        total += tl.sum(tl.exp(x - tl.maximum(highest, -3e38)), 0)
    tl.store(best + i * PARTS + part, highest)
    tl.store(ids + i * PARTS + part, at)
    tl.store(sums + i * PARTS + part, total)


@kernel
def advance_kernel(
    best, ids, sums, count, depth, most, planned_slots, token_ids, positions, kv_slots, drafts, probabilities, rotary,
    planned_rotary, token_of, PARTS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Writes each row's draft, and makes it the row's next input. Grid (n).

    best, ids, sums [n, PARTS]: of `likeliest_kernel`. depth int32 [n]: drafts of the row before this one. most int32
    [n]: how many it may have; after the last one, position and KV slot stay. planned_slots int32, drafts int32 and
    probabilities float32, rows STRIDE apart, by depth. token_ids, positions, kv_slots int32 [n]. rotary int32 [n,
    SECTIONS], planned_rotary [.., STRIDE, SECTIONS], by depth: RoPE positions; None: rows rotate by `positions`.
    token_of int32: the tokens that `ids` stand for; None: themselves."""
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    p = tl.arange(0, SIZE)
    there = p < PARTS
    tops = tl.load(best + i * PARTS + p, there, -float("inf"))
    top = tl.max(tops, 0)
    tokens = tl.load(ids + i * PARTS + p, there & (tops == top), 2147483647)
    token = tl.min(tokens, 0)
    if token_of is not None:
        token = tl.load(token_of + token)
    total = tl.sum(tl.where(there, tl.load(sums + i * PARTS + p, there, 0.0) * tl.exp(tops - top), 0.0), 0)
    before = tl.load(depth + i)
    tl.store(drafts + before * STRIDE + i, token)
    tl.store(probabilities + before * STRIDE + i, 1.0 / total)
    tl.store(depth + i, before + 1)
    tl.store(token_ids + i, token)
    if before + 1 < tl.load(most + i):
        tl.store(positions + i, tl.load(positions + i) + 1)
        tl.store(kv_slots + i, tl.load(planned_slots + (before + 1) * STRIDE + i))
        if rotary is not None:
            for section in range(SECTIONS):
                planned = planned_rotary + ((before + 1) * STRIDE + i) * SECTIONS + section
                tl.store(rotary + i * SECTIONS + section, tl.load(planned))


@kernel
def place_drafts_kernel(ids, count, drafts, probabilities, least, BLOCK: tl.constexpr):
    """Replaces each placeholder -1 - i in ids int32 [count[0]], at most BLOCK, by drafts[i]; and lowers the count to
    end before the first draft whose probability is below least[0]. The drafts are a step's last rows, of one request.
    drafts int32, probabilities float32, least float32 [1]. Grid (1)."""
    row, n = tl.arange(0, BLOCK), tl.load(count)
    id = tl.load(ids + row, row < n, 0)
    is_late = id < 0
    place = tl.where(is_late, -1 - id, 0)
    tl.store(ids + row, tl.load(drafts + place, is_late, 0), is_late)
    is_unlikely = is_late & (tl.load(probabilities + place, is_late, 1.0) < tl.load(least))
    tl.store(count, tl.minimum(n, tl.min(tl.where(is_unlikely, row, BLOCK), 0)))


@kernel
def start_after_step_kernel(
    tokens, ids, count, states, places, rows, drafted, positions, shifts, slots, req_slots, valid, token_ids,
    row_positions, kv_slots, planned_slots, rotary, planned_rotary, chain_states, kept, kept_position,
    DEPTHS: tl.constexpr, STRIDE: tl.constexpr, SECTIONS: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Makes the first rows of a chain from the tokens that the step before it has sampled. Grid (n).

    The step's rows have ids int32 [count[0]] and states float32 [.., COLS]. Request i, of the first valid[0], sampled a
    token at row rows[i] and at each of the drafted[i] rows after it, which are drafts: the j-th is
    tokens[places[j, i]], of position positions[i] + j. Those that agree with the drafts count, and one more. The rest
    is as `SampledRows`, `ChainRows` and `KeptStates` say. places, slots, planned_slots: rows STRIDE apart."""
    i = tl.program_id(0)
    if i >= tl.load(valid):
        return
    first, n, most = tl.load(rows + i), tl.load(count), tl.load(drafted + i)
    token = tl.load(tokens + tl.load(places + i))
    accepted, agrees = 0, 1
    for number in range(DEPTHS):
        row = first + 1 + number
        draft = tl.load(ids + row, (number < most) & (row < n), -1)
        # tokens are not negative where a draft agrees
        agrees = agrees * ((draft >= 0) & (token == draft)).to(tl.int32)
        accepted += agrees
        place = tl.load(places + (number + 1) * STRIDE + i, agrees > 0, 0)
        token = tl.load(tokens + place, agrees > 0, token)
    tl.store(token_ids + i, tl.maximum(token, 0))
    position = tl.load(positions + i) + accepted
    tl.store(row_positions + i, position - 1)
    tl.store(kv_slots + i, tl.load(slots + accepted * STRIDE + i))
    for depth in range(DEPTHS):
        tl.store(planned_slots + depth * STRIDE + i, tl.load(slots + (accepted + depth) * STRIDE + i))
    if rotary is not None:
        rotated = position - 1 + tl.load(shifts + i)
        for section in range(SECTIONS):
            tl.store(rotary + i * SECTIONS + section, rotated)
            for depth in range(DEPTHS):
                planned = planned_rotary + (depth * STRIDE + i) * SECTIONS + section
                tl.store(planned, rotated + depth)
    c = tl.arange(0, SIZE)
    request = tl.load(req_slots + i)
    state = tl.load(states + (first + accepted).to(tl.int64) * COLS + c, c < COLS, 0.0)
    tl.store(chain_states + i.to(tl.int64) * COLS + c, state, c < COLS)
    tl.store(kept + request.to(tl.int64) * COLS + c, state, c < COLS)
    tl.store(kept_position + request, position)
