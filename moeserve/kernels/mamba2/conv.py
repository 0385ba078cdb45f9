"""Causal depthwise convolution with a bias and SiLU, as a Triton kernel: a program per row and block of channels."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@kernel
def conv_kernel(
    x, weight, bias, states, row_sequence, seq_first, seq_slot, count, out,
    STRIDE: tl.constexpr, SLOT: tl.constexpr, CONV: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [n, CHANNELS] = silu(bias + causal convolution of x), for rows below count[0]. Grid (n, blocks of
    CHANNELS).

    x: rows STRIDE apart; weight float32 [TAPS, CHANNELS]; bias float32 [CHANNELS]; states float32, slots SLOT apart,
    with the inputs before a sequence's first row, [TAPS - 1, CHANNELS], at offset CONV; row_sequence int32 [n]: each
    row's sequence; seq_first, seq_slot int32: each sequence's first row and state slot."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    sequence = tl.load(row_sequence + i)
    first, slot = tl.load(seq_first + sequence), tl.load(seq_slot + sequence).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < CHANNELS
    total = tl.load(bias + channel, live, 0.0)
    for j in tl.static_range(TAPS):
        source = i - (TAPS - 1) + j
        here = tl.load(x + source.to(tl.int64) * STRIDE + channel, live & (source >= first), 0.0)
        old = states + slot * SLOT + CONV + (TAPS - 1 + source - first) * CHANNELS
        before = tl.load(old + channel, live & (source < first), 0.0)
        total += (here.to(tl.float32) + before) * tl.load(weight + j * CHANNELS + channel, live, 0.0)
    y = total / (1.0 + tl.exp(-total))
    tl.store(out + i.to(tl.int64) * CHANNELS + channel, y.to(out.dtype.element_ty), live)
