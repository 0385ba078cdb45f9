"""Mamba-2's recurrence as Triton kernels: token by token, and by chunks as products of matrices (state space duality,
https://arxiv.org/abs/2405.21060, section 6). A program holds some columns of one head's state.

Let S be the state before a chunk, g its tokens' decays and G their running products. Then o = G * C S + (C B^T * G[i] /
G[j] for j <= i) (dt x), and the state after the chunk is G[last] * S + (B * G[last] / G)^T (dt x). G is kept as a
logarithm.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.delta_net.recurrent import move_conv_state, record_channels
from moeserve.kernels.launch import kernel


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@kernel
def scan_kernel(
    rows, mixed, rate, dt_bias, skip, states, seq_first, seq_count, seq_slot, seq_drafts, seq_record, records, out,
    STRIDE: tl.constexpr, SLOT: tl.constexpr, CONV: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, BY_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, RECORD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes Mamba-2's recurrence, writes `out`, and advances the sequences' states and convolution states in place.
    Grid (sequences, HEADS, HEAD_DIM / BLOCK). seq_first, seq_count, seq_slot int32: each sequence's first row, number
    of rows (0: padding) and state slot. seq_drafts, seq_record, records: as for the delta rule's `recurrent_kernel`;
    all None: there are no drafts, which BY_CHUNKS requires.

    rows [n, any], rows STRIDE apart: the convolution's inputs x, B and C, whose last rows become the convolution state,
    then a dt for each head. mixed [n, channels]: the convolution's output. rate, dt_bias, skip float32 [HEADS]. states
    float32, slots SLOT apart: [HEADS, STATE_DIM, HEAD_DIM], and [TAPS - 1, channels] at offset CONV. out [n, HEADS *
    HEAD_DIM]: C^T S + skip * x. SIZE: a power of two that holds STATE_DIM; SHARE: a power of two that holds a program's
    part of the channels. BY_CHUNKS: computes in chunks of CHUNK tokens, a power of two; False: token by token.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    width: tl.constexpr = HEADS * HEAD_DIM
    channels: tl.constexpr = width + 2 * GROUPS * STATE_DIM
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tl.load(seq_count + sequence)
    if tokens == 0:
        return
    first = tl.load(seq_first + sequence)
    state = states + tl.load(seq_slot + sequence).to(tl.int64) * SLOT
    part = head * (HEAD_DIM // BLOCK) + block
    kept = tokens
    if seq_drafts is not None:
        drafts = tl.load(seq_drafts + sequence)
        kept = tokens - drafts
        record = records + tl.load(seq_record + sequence).to(tl.int64) * RECORD
        record = record_channels(
            rows, mixed, record, first + kept, drafts, part, STRIDE, RECORD, channels, SHARE
        )
    move_conv_state(rows, state + CONV, first, kept, part, STRIDE, channels, TAPS, SHARE)
    group = head // (HEADS // GROUPS)
    d, c = tl.arange(0, SIZE), block * BLOCK + tl.arange(0, BLOCK)
    inside = d < STATE_DIM
    at = state + (head * STATE_DIM + d)[:, None] * HEAD_DIM + c[None, :]
    s = tl.load(at, inside[:, None], 0.0)
    speed, bias, factor = tl.load(rate + head), tl.load(dt_bias + head), tl.load(skip + head)
    of_b, of_c = mixed + width + group * STATE_DIM + d, mixed + width + (GROUPS + group) * STATE_DIM + d
    of_x, of_dt, to = mixed + head * HEAD_DIM + c, rows + channels + head, out + head * HEAD_DIM + c
    if BY_CHUNKS:
        i = tl.arange(0, CHUNK)
        seen = i[:, None] >= i[None, :]
        for start in range(0, tokens, CHUNK):
            live = start + i < tokens
            row = (first + start + i).to(tl.int64)
            whole_rows = live[:, None] & inside[None, :]
            key = tl.load(of_b[None, :] + row[:, None] * channels, whole_rows, 0.0)
            query = tl.load(of_c[None, :] + row[:, None] * channels, whole_rows, 0.0)
            x = tl.load(of_x[None, :] + row[:, None] * channels, live[:, None], 0.0).to(tl.float32)
            dt = tl.load(of_dt + row * STRIDE, live, 0.0).to(tl.float32)
            dt = tl.where(live, softplus(dt + bias), 0.0)
            total = tl.cumsum(speed * dt, 0)
            last = tl.sum(speed * dt, 0)
            v = (dt[:, None] * x).to(key.dtype)
            decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
            scores = (tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay).to(key.dtype)
            o = tl.dot(query, s.to(key.dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
            o += tl.dot(scores, v, input_precision=PRECISION) + factor * x
            faded = (key.to(tl.float32) * tl.exp(last - total)[:, None]).to(key.dtype)
            s = s * tl.exp(last) + tl.dot(tl.trans(faded), v, input_precision=PRECISION)
            tl.store(to[None, :] + row[:, None] * width, o.to(out.dtype.element_ty), live[:, None])
    else:
        for t in range(tokens):
            row = (first + t).to(tl.int64)
            key = tl.load(of_b + row * channels, inside, 0.0).to(tl.float32)
            query = tl.load(of_c + row * channels, inside, 0.0).to(tl.float32)
            x = tl.load(of_x + row * channels).to(tl.float32)
            dt = softplus(tl.load(of_dt + row * STRIDE).to(tl.float32) + bias)
            decay = tl.exp(speed * dt)
            if seq_drafts is not None:  # noqa: SIM102 - known when compiled
                if (t >= kept) & (block == 0):
                    gates = record + tl.cast(t - kept, tl.int64) * RECORD + head
                    tl.store(gates, dt)
                    tl.store(gates + HEADS, decay)
            s = s * decay + key[:, None] * (dt * x)[None, :]
            o = tl.sum(s * query[:, None], 0) + factor * x
            tl.store(to + row * width, o.to(out.dtype.element_ty))
            if seq_drafts is not None:  # noqa: SIM102 - known when compiled
                if t + 1 == kept:
                    tl.store(at, s, inside[:, None])
    if seq_drafts is None:
        tl.store(at, s, inside[:, None])


@kernel
def commit_kernel(
    records, states, layer_first, moved,
    MOVED_STRIDE: tl.constexpr, LAYERS: tl.constexpr, LAYER: tl.constexpr, RECORD: tl.constexpr, SLOT: tl.constexpr,
    CONV: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    TAPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Advances the states of all layers, in place, by the accepted drafts, from the records that `scan_kernel` wrote
    and with its arithmetic token by token. Grid (sequences * LAYERS, HEADS, HEAD_DIM / BLOCK).

    records float32 [LAYERS, drafts, RECORD], layers LAYER apart: the channels before and after the convolution, then
    dt of each head, then the decays. layer_first, moved: as for the delta rule's `commit_kernel`; others: as for
    `scan_kernel`.
    """
    width: tl.constexpr = HEADS * HEAD_DIM
    channels: tl.constexpr = width + 2 * GROUPS * STATE_DIM
    sequence, layer = tl.program_id(0) // LAYERS, tl.program_id(0) % LAYERS
    head, block = tl.program_id(1), tl.program_id(2)
    tokens = tl.load(moved + 2 * MOVED_STRIDE + sequence)
    state = states + tl.load(moved + sequence).to(tl.int64) * SLOT + tl.load(layer_first + layer)
    records += tl.cast(layer, tl.int64) * LAYER
    record = records + tl.load(moved + MOVED_STRIDE + sequence).to(tl.int64) * RECORD
    part = head * (HEAD_DIM // BLOCK) + block
    move_conv_state(record, state + CONV, 0, tokens, part, RECORD, channels, TAPS, SHARE)
    group = head // (HEADS // GROUPS)
    d, c = tl.arange(0, SIZE), block * BLOCK + tl.arange(0, BLOCK)
    inside = d < STATE_DIM
    at = state + (head * STATE_DIM + d)[:, None] * HEAD_DIM + c[None, :]
    s = tl.load(at, inside[:, None], 0.0)
    for t in range(tokens):
        mixed = record + tl.cast(t, tl.int64) * RECORD + channels
        key = tl.load(mixed + width + group * STATE_DIM + d, inside, 0.0)
        x = tl.load(mixed + head * HEAD_DIM + c)
        dt = tl.load(mixed + channels + head)
        s = s * tl.load(mixed + channels + HEADS + head) + key[:, None] * (dt * x)[None, :]
    tl.store(at, s, inside[:, None])
