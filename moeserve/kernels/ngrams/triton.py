"""N-gram embeddings as three Triton kernels: how far each stream lets a token's value in (a program per row and
stream), the convolution (a program per row and block of channels), and the advance of the states (a program per
sequence and block). `reference.py` has the arithmetic."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.ngrams import reference

LEAST_AGREEMENT = tl.constexpr(reference.LEAST_AGREEMENT)


@kernel
def gate_kernel(
    x, key, value, query_norm, key_norm, conv_norm, count, factors, inputs,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    EPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes factors[i, s] = the gate of stream s for value[i]; inputs[i, s] = RMSNorm(factors[i, s] * value[i]) *
    conv_norm[s]. Grid (n, STREAMS), for rows below count[0].

    x float32 [n, STREAMS * HIDDEN]; key [n, STREAMS * HIDDEN] and value [n, HIDDEN], floats, rows KEY_STRIDE and
    VALUE_STRIDE apart; norms float32 [STREAMS, HIDDEN]; factors float32 [n, STREAMS]; inputs float32 [n, STREAMS *
    HIDDEN]. SIZE: HIDDEN or the power of two above."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, stream = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row, first = i.to(tl.int64), stream * HIDDEN
    c = tl.arange(0, SIZE)
    live = c < HIDDEN
    query = tl.load(x + row * STREAMS * HIDDEN + first + c, live, 0.0)
    query *= tl.rsqrt(tl.sum(query * query, 0) / HIDDEN + EPS) * tl.load(query_norm + first + c, live, 0.0)
    mine = tl.load(key + row * KEY_STRIDE + first + c, live, 0.0).to(tl.float32)
    mine *= tl.rsqrt(tl.sum(mine * mine, 0) / HIDDEN + EPS) * tl.load(key_norm + first + c, live, 0.0)
    agreement = tl.sum(mine * query, 0) * (HIDDEN**-0.5)
    size = tl.sqrt(tl.maximum(tl.abs(agreement), LEAST_AGREEMENT))
    root = tl.where(agreement > 0.0, size, tl.where(agreement < 0.0, -size, 0.0))
    factor = 1.0 / (1.0 + tl.exp(-root))
    let_in = factor * tl.load(value + row * VALUE_STRIDE + c, live, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(let_in * let_in, 0) / HIDDEN + EPS)
    tl.store(factors + row * STREAMS + stream, factor)
    normed = let_in * scale * tl.load(conv_norm + first + c, live, 0.0)
    tl.store(inputs + row * STREAMS * HIDDEN + first + c, normed, live)


@kernel
def conv_kernel(
    inputs, factors, value, weight, states, row_sequence, seq_first, seq_slot, count, x,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, VALUE_STRIDE: tl.constexpr, SLOT: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes x[i, s] += factors[i, s] * value[i] + silu(convolution of inputs), of TAPS taps DILATION tokens apart.
    Grid (n, blocks of channels), for rows below count[0].

    inputs, factors, value: gate_kernel's; weight float32 [TAPS, channels], the oldest token's first; states
    float32, slots SLOT apart: the inputs before a sequence's first row, [(TAPS - 1) * DILATION, channels], the oldest
    first; row_sequence int32 [n]: each row's sequence; seq_first, seq_slot int32: each sequence's first row and state
    slot. x float32 [n, channels]. A block of channels may cover two streams."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels: tl.constexpr = STREAMS * HIDDEN
    kept: tl.constexpr = (TAPS - 1) * DILATION
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    sequence = tl.load(row_sequence + i)
    first, slot = tl.load(seq_first + sequence), tl.load(seq_slot + sequence).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TAPS):
        source = i - (TAPS - 1 - j) * DILATION
        here = tl.load(inputs + source.to(tl.int64) * channels + channel, live & (source >= first), 0.0)
        old = states + slot * SLOT + (kept + source - first) * channels
        before = tl.load(old + channel, live & (source < first), 0.0)
        total += (here + before) * tl.load(weight + j * channels + channel, live, 0.0)
    row = i.to(tl.int64)
    factor = tl.load(factors + row * STREAMS + channel // HIDDEN, live, 0.0)
    added = factor * tl.load(value + row * VALUE_STRIDE + channel % HIDDEN, live, 0.0).to(tl.float32)
    at = x + row * channels + channel
    tl.store(at, tl.load(at, live, 0.0) + added + total / (1.0 + tl.exp(-total)), live)


@kernel
def state_kernel(
    inputs, states, seq_first, seq_count, seq_slot,
    CHANNELS: tl.constexpr, SLOT: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Replaces a sequence's state by its last KEPT inputs. seq_count int32: number of rows of each sequence; 0:
    padding. Works in place, because each state row takes its content from a later one. Grid (sequences, blocks of
    CHANNELS), after conv_kernel."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0)
    tokens = tl.load(seq_count + sequence)
    if tokens == 0:
        return
    first = tl.load(seq_first + sequence)
    state = states + tl.load(seq_slot + sequence).to(tl.int64) * SLOT
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < CHANNELS
    for j in range(KEPT):
        source = tokens - KEPT + j  # negative: still from the previous state
        at = inputs + (first + source).to(tl.int64) * CHANNELS + channel
        here = tl.load(at, live & (source >= 0), 0.0)
        before = tl.load(state + (KEPT + source) * CHANNELS + channel, live & (source < 0), 0.0)
        tl.store(state + j * CHANNELS + channel, here + before, live)
