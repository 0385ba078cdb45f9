"""LFM2's short convolution as two Triton kernels: the first computes the rows (a program per row and block of
channels), the second advances the states (a program per sequence and block)."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.delta_net.recurrent import move_conv_state
from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.triton import store_quantized


@kernel
def conv_kernel(
    rows, weight, states, row_sequence, seq_first, seq_slot, count, y, codes, scales,
    STRIDE: tl.constexpr, SLOT: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes y = c * causal convolution of b * x, for rows below count[0]. Grid (n, blocks of CHANNELS).

    rows: b, c, x [CHANNELS] each, rows STRIDE apart; weight float32 [TAPS, CHANNELS]; states float32, slots SLOT apart:
    the inputs b * x before a sequence's first row, [TAPS - 1, CHANNELS]; row_sequence int32 [n]: each row's sequence;
    seq_first, seq_slot int32: each sequence's first row and state slot. y, and codes with scales: [n, CHANNELS], each
    optional."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, block = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    sequence = tl.load(row_sequence + i)
    first, slot = tl.load(seq_first + sequence), tl.load(seq_slot + sequence).to(tl.int64)
    start = block * BLOCK
    channel = start + tl.arange(0, BLOCK)
    live = channel < CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TAPS):
        source = i - (TAPS - 1) + j
        at = rows + source.to(tl.int64) * STRIDE + channel
        here = live & (source >= first)
        b = tl.load(at, here, 0.0).to(tl.float32)
        x = tl.load(at + 2 * CHANNELS, here, 0.0).to(tl.float32)
        old = states + slot * SLOT + (TAPS - 1 + source - first) * CHANNELS
        before = tl.load(old + channel, live & (source < first), 0.0)
        total += (b * x + before) * tl.load(weight + j * CHANNELS + channel, live, 0.0)
    row = i.to(tl.int64)
    out = total * tl.load(rows + row * STRIDE + CHANNELS + channel, live, 0.0).to(tl.float32)
    if y is not None:
        tl.store(y + row * CHANNELS + channel, out.to(y.dtype.element_ty), live)
    if codes is not None:
        store_quantized(out, codes + row * CHANNELS, scales + row * (CHANNELS // 32), start, CHANNELS, BLOCK)


@kernel
def state_kernel(
    rows, states, seq_first, seq_count, seq_slot, seq_drafts, seq_record, records,
    STRIDE: tl.constexpr, SLOT: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Replaces a sequence's state by its last inputs b * x. seq_count int32: number of rows of each sequence; 0:
    padding. Works in place, because each state row takes its content from a later one. Grid (sequences, blocks of
    CHANNELS), after conv_kernel.

    seq_drafts, seq_record int32: how many of a sequence's last rows are drafts, whose inputs are written to records
    instead, and the first of these; records float32 [drafts, CHANNELS]. All None: there are no drafts."""
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
    if seq_drafts is not None:
        drafts = tl.load(seq_drafts + sequence)
        tokens -= drafts
        record = records + tl.load(seq_record + sequence).to(tl.int64) * CHANNELS + channel
        for t in range(drafts):
            at = rows + (first + tokens + t).to(tl.int64) * STRIDE + channel
            b = tl.load(at, live, 0.0).to(tl.float32)
            x = tl.load(at + 2 * CHANNELS, live, 0.0).to(tl.float32)
            tl.store(record + tl.cast(t, tl.int64) * CHANNELS, b * x, live)
    for j in tl.static_range(TAPS - 1):
        source = tokens - (TAPS - 1) + j  # negative: still from the previous state
        at = rows + (first + source).to(tl.int64) * STRIDE + channel
        here = live & (source >= 0)
        b = tl.load(at, here, 0.0).to(tl.float32)
        x = tl.load(at + 2 * CHANNELS, here, 0.0).to(tl.float32)
        before = tl.load(state + (TAPS - 1 + source) * CHANNELS + channel, live & (source < 0), 0.0)
        tl.store(state + j * CHANNELS + channel, b * x + before, live)


@kernel
def commit_kernel(
    records, states, layer_first, moved,
    MOVED_STRIDE: tl.constexpr, LAYERS: tl.constexpr, LAYER: tl.constexpr, SLOT: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Advances the states of all layers, in place, by the accepted drafts' inputs, which `state_kernel` recorded. Grid
    (sequences * LAYERS, blocks of CHANNELS). records float32 [LAYERS, drafts, CHANNELS], layers LAYER apart;
    layer_first, moved: as for the delta rule's `commit_kernel`."""
    sequence, layer = tl.program_id(0) // LAYERS, tl.program_id(0) % LAYERS
    tokens = tl.load(moved + 2 * MOVED_STRIDE + sequence)
    state = states + tl.load(moved + sequence).to(tl.int64) * SLOT + tl.load(layer_first + layer)
    records += tl.cast(layer, tl.int64) * LAYER
    record = records + tl.load(moved + MOVED_STRIDE + sequence).to(tl.int64) * CHANNELS
    move_conv_state(record, state, 0, tokens, tl.program_id(1), CHANNELS, CHANNELS, TAPS, BLOCK)
