"""The gated delta rule token by token, as a Triton kernel; a program holds some columns of one head's state."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def log_decay(a, rate, dt_bias):
    """-exp(A_log) * softplus(a + dt_bias), with rate = -exp(A_log)."""
    x = a.to(tl.float32) + dt_bias
    return rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def move_conv_state(
    qkv, state, first, tokens, share,
    STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Replaces state [TAPS - 1, CHANNELS] by the last inputs of a sequence with `tokens` rows from `first` on. Only
    the `share`th part, of SHARE channels. Works in place, because each state row takes its content from a later one."""
    channel = share * SHARE + tl.arange(0, SHARE)
    live = channel < CHANNELS
    for j in tl.static_range(TAPS - 1):
        source = tokens - (TAPS - 1) + j  # negative: still from the previous state
        here = tl.load(qkv + (first + source).to(tl.int64) * STRIDE + channel, live & (source >= 0), 0.0)
        before = tl.load(state + (TAPS - 1 + source) * CHANNELS + channel, live & (source < 0), 0.0)
        tl.store(state + j * CHANNELS + channel, here.to(tl.float32) + before, live)


@kernel
def recurrent_kernel(
    qkv, mixed, b, a, rate, dt_bias, states, seq_first, seq_count, seq_slot, out,
    QKV_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, GROUP: tl.constexpr, SLOT: tl.constexpr,
    CONV: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TILED: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, BY_CHANNEL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, VALUE_HEADS, VALUE_DIM / BLOCK). seq_first, seq_count, seq_slot int32: a sequence's first
    row, number of rows (0: padding) and state slot.

    mixed [n, channels]: the convolution's output; qkv, rows QKV_STRIDE apart: its input, whose last rows become the
    convolution state. b, a: of value head h, at h // R * GROUP + h % R with R = VALUE_HEADS / KEY_HEADS.
    BY_CHANNEL: a and dt_bias are per dimension of the key heads instead (there are VALUE_HEADS key heads). states
    float32, slots SLOT apart: [VALUE_HEADS, KEY_DIM, VALUE_DIM], and [TAPS - 1, channels] at offset CONV. out
    float32 [n, VALUE_HEADS * VALUE_DIM]. SIZE: a power of two that holds KEY_DIM; SHARE: a power of two that holds
    a program's part of the channels.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    r: tl.constexpr = VALUE_HEADS // KEY_HEADS
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tl.load(seq_count + sequence)
    if tokens == 0:
        return
    first = tl.load(seq_first + sequence)
    state = states + tl.load(seq_slot + sequence).to(tl.int64) * SLOT
    move_conv_state(
        qkv,
        state + CONV,
        first,
        tokens,
        head * (VALUE_DIM // BLOCK) + block,
        QKV_STRIDE,
        channels,
        TAPS,
        SHARE,
    )
    key_head = head % KEY_HEADS if TILED else head // r
    d, c = tl.arange(0, SIZE), block * BLOCK + tl.arange(0, BLOCK)
    live = d < KEY_DIM
    at = state + (head * KEY_DIM + d)[:, None] * VALUE_DIM + c[None, :]
    s = tl.load(at, live[:, None], 0.0)
    gate = head // r * GROUP + head % r
    speed = tl.load(rate + head)
    if BY_CHANNEL:
        bias = tl.load(dt_bias + head * KEY_DIM + d, live, 0.0)
    else:
        bias = tl.load(dt_bias + head)
    for t in range(tokens):
        row = (first + t).to(tl.int64)
        q = tl.load(mixed + row * channels + key_head * KEY_DIM + d, live, 0.0).to(tl.float32)
        k = tl.load(mixed + row * channels + (KEY_HEADS + key_head) * KEY_DIM + d, live, 0.0).to(tl.float32)
        v = tl.load(mixed + row * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + c).to(tl.float32)
        beta = sigmoid(tl.load(b + row * B_STRIDE + gate))
        if BY_CHANNEL:
            x = tl.load(a + row * A_STRIDE + head * KEY_DIM + d, live, 0.0)
            s *= tl.exp(log_decay(x, speed, bias))[:, None]
        else:
            s *= tl.exp(log_decay(tl.load(a + row * A_STRIDE + gate), speed, bias))
        change = (v - tl.sum(s * k[:, None], 0)) * beta
        s += k[:, None] * change[None, :]
        tl.store(out + row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + c, tl.sum(s * q[:, None], 0))
    tl.store(at, s, live[:, None])
