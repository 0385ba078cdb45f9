"""The gated delta rule for prompts, by chunks of CHUNK tokens, which turns it into matrix products
(https://arxiv.org/abs/2412.06464, section 3.3); two Triton kernels.

Let S be the state before a chunk, g its tokens' decays and G their running products. The changes v' of all its
tokens solve (I + A) v' = beta * (v - G * K S), where A[i, j] = beta[i] * (k[i] . k[j]) * G[i] / G[j] for j < i.
Then o = G * Q S + (Q K^T * G[i] / G[j] for j <= i) v', and the state after the chunk is G[last] * S + (K * G[last]
/ G)^T v'.

(I + A)^-1 does not depend on the state: `inverse_kernel` computes it for all chunks at once, then `scan_kernel`
goes through the chunks of each sequence. G is kept as a logarithm.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.delta_net.heads import DELTA_CHUNK
from moeserve.kernels.delta_net.recurrent import log_decay, move_conv_state, sigmoid
from moeserve.kernels.launch import kernel

CHUNK = tl.constexpr(DELTA_CHUNK)


@triton.jit
def invert(a, PRECISION: tl.constexpr):
    """Returns (I + a)^-1 for a strictly lower triangular [CHUNK, CHUNK], doubling the block size each time: the
    inverse of a block [[P, 0], [L, Q]] is [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]. (A sum of powers of a would amplify
    rounding errors.)"""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    x = tl.where(i == j, 1.0, tl.where((i // 2 == j // 2) & (i > j), -a, 0.0))
    for level in tl.static_range(1, 6):
        half = 1 << level
        between = tl.where((i // (2 * half) == j // (2 * half)) & (i // half != j // half), a, 0.0)
        x -= tl.dot(tl.dot(x, between, input_precision=PRECISION), x, input_precision=PRECISION)
    return x


@kernel
def inverse_kernel(
    mixed, b, a, rate, dt_bias, chunks, inverse,
    B_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, GROUP: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes (I + A)^-1 of every chunk and value head (see the head of this file). Grid (chunks, VALUE_HEADS). chunks
    int32 [chunks, 2]: first row, rows (at most CHUNK). inverse [n, VALUE_HEADS, CHUNK], written: for each token, its
    row of its chunk's (I + A)^-1. Other arguments as for `recurrent_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    r: tl.constexpr = VALUE_HEADS // KEY_HEADS
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, tokens = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    key_head = head % KEY_HEADS if TILED else head // r
    gate = head // r * GROUP + head % r
    i, d = tl.arange(0, CHUNK), tl.arange(0, SIZE)
    live = i < tokens
    row = (first + i).to(tl.int64)
    place = mixed + row[:, None] * channels + (KEY_HEADS + key_head) * KEY_DIM + d[None, :]
    k = tl.load(place, live[:, None] & (d < KEY_DIM)[None, :], 0.0)
    beta = tl.where(live, sigmoid(tl.load(b + row * B_STRIDE + gate, live, 0.0)), 0.0)
    step = log_decay(
        tl.load(a + row * A_STRIDE + gate, live, 0.0), tl.load(rate + head), tl.load(dt_bias + head)
    )
    total = tl.cumsum(tl.where(live, step, 0.0), 0)
    below = i[:, None] > i[None, :]
    decay = tl.exp(tl.where(below, total[:, None] - total[None, :], float("-inf")))
    x = invert(tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None], PRECISION)
    at = (row * VALUE_HEADS + head)[:, None] * CHUNK + i[None, :]
    tl.store(inverse + at, x.to(inverse.dtype.element_ty), live[:, None])


@kernel
def scan_kernel(
    qkv, mixed, b, a, rate, dt_bias, states, seq_first, seq_count, seq_slot, inverse, out,
    QKV_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, GROUP: tl.constexpr, SLOT: tl.constexpr,
    CONV: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TILED: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the delta rule chunk by chunk, writes `out`, and advances the sequences' states and convolution states
    in place. Grid (sequences, VALUE_HEADS, VALUE_DIM / BLOCK). inverse: `inverse_kernel`'s result, for chunks counted
    from each sequence's first row. Other arguments as for `recurrent_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    r: tl.constexpr = VALUE_HEADS // KEY_HEADS
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tl.load(seq_count + sequence)
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
    gate = head // r * GROUP + head % r
    speed, bias = tl.load(rate + head), tl.load(dt_bias + head)
    i, d, c = tl.arange(0, CHUNK), tl.arange(0, SIZE), block * BLOCK + tl.arange(0, BLOCK)
    in_key = (d < KEY_DIM)[None, :]
    at = state + (head * KEY_DIM + d)[:, None] * VALUE_DIM + c[None, :]
    s = tl.load(at, (d < KEY_DIM)[:, None], 0.0)
    seen = i[:, None] >= i[None, :]
    for start in range(0, tokens, CHUNK):
        live = start + i < tokens
        row = (first + start + i).to(tl.int64)
        base = mixed + row[:, None] * channels
        q = tl.load(base + key_head * KEY_DIM + d[None, :], live[:, None] & in_key, 0.0)
        k = tl.load(base + (KEY_HEADS + key_head) * KEY_DIM + d[None, :], live[:, None] & in_key, 0.0)
        v = tl.load(base + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + c[None, :], live[:, None], 0.0)
        beta = tl.where(live, sigmoid(tl.load(b + row * B_STRIDE + gate, live, 0.0)), 0.0)
        step = tl.where(live, log_decay(tl.load(a + row * A_STRIDE + gate, live, 0.0), speed, bias), 0.0)
        total = tl.cumsum(step, 0)
        whole = tl.sum(step, 0)
        grown = tl.exp(total)[:, None]
        x = tl.load(inverse + (row * VALUE_HEADS + head)[:, None] * CHUNK + i[None, :], live[:, None], 0.0)
        before = s.to(k.dtype)
        known = tl.dot(k, before, input_precision=PRECISION) * grown
        change = (beta[:, None] * (v.to(tl.float32) - known)).to(k.dtype)
        change = tl.dot(x, change, input_precision=PRECISION).to(k.dtype)
        decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
        scores = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay).to(k.dtype)
        o = tl.dot(q, before, input_precision=PRECISION) * grown
        o += tl.dot(scores, change, input_precision=PRECISION)
        faded = (k.to(tl.float32) * tl.exp(whole - total)[:, None]).to(k.dtype)
        s = s * tl.exp(whole) + tl.dot(tl.trans(faded), change, input_precision=PRECISION)
        place = out + row[:, None] * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + c[None, :]
        tl.store(place, o.to(out.dtype.element_ty), live[:, None])
    tl.store(at, s, (d < KEY_DIM)[:, None])
