"""Causal depthwise convolution, SiLU and the normalisation of q and k, as a Triton kernel; one program per row and
head."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@kernel
def conv_kernel(
    qkv, weight, states, row_sequence, seq_first, seq_slot, count, out,
    STRIDE: tl.constexpr, SLOT: tl.constexpr, CONV: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out = silu(causal depthwise convolution of qkv) for rows below count[0], then divides each head of q and
    k by its Euclidean norm. Grid (n, 2 * KEY_HEADS + VALUE_HEADS): heads of q, of k, of v.

    qkv [n, channels], rows STRIDE apart; weight float32 [TAPS, channels]; states float32, slots SLOT apart, with the
    inputs before a sequence's first row, [TAPS - 1, channels], at offset CONV; row_sequence int32 [n]: each row's
    sequence; seq_first, seq_slot int32: each sequence's first row and state slot. out [n, channels], with q also
    multiplied by KEY_DIM^-0.5. The states are not changed. SIZE: a power of two that holds a head.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    i, head = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    sequence = tl.load(row_sequence + i)
    first, slot = tl.load(seq_first + sequence), tl.load(seq_slot + sequence).to(tl.int64)
    is_value = head >= 2 * KEY_HEADS
    column = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
    lane = tl.arange(0, SIZE)
    live = lane < tl.where(is_value, VALUE_DIM, KEY_DIM)
    channel = column + lane
    total = tl.zeros([SIZE], tl.float32)
    for j in tl.static_range(TAPS):
        source = i - (TAPS - 1) + j
        here = tl.load(qkv + source.to(tl.int64) * STRIDE + channel, live & (source >= first), 0.0).to(
            tl.float32
        )
        old = states + slot * SLOT + CONV + (TAPS - 1 + source - first) * channels
        before = tl.load(old + channel, live & (source < first), 0.0)
        total += (here + before) * tl.load(weight + j * channels + channel, live, 0.0)
    x = total / (1.0 + tl.exp(-total))
    inverse = tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
    factor = tl.where(head < KEY_HEADS, inverse * (KEY_DIM**-0.5), tl.where(is_value, 1.0, inverse))
    tl.store(out + i.to(tl.int64) * channels + channel, (x * factor).to(out.dtype.element_ty), live)
