"""Kimi Delta Attention for prompts, by chunks of CHUNK tokens; two Triton kernels. As `chunked.py`, but each dimension
of a key has its own decay (https://arxiv.org/abs/2510.26692, section 3.2), so that the running products G are vectors:

    A[i, j] = beta[i] * sum_d k[i, d] k[j, d] G[i, d] / G[j, d]   for j < i
    P[i, j] = sum_d q[i, d] k[j, d] G[i, d] / G[j, d]             for j <= i

and q G, k G and k G[last] / G take the places of q, k and k in the products with the state.

G[i] / G[j] as a product of G[i] and 1 / G[j] would overflow. Rows are in groups of GROUP: between two groups both
factors are divided by G before the later one, which leaves neither above 1; within a group each pair's decay is summed.

`weights_kernel` computes (I + A)^-1 and P for all chunks at once; `scan_kernel` goes through the chunks of each
sequence.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.delta_net.chunked import CHUNK, invert
from moeserve.kernels.delta_net.recurrent import bounded_log_decay, log_decay, move_conv_state, sigmoid
from moeserve.kernels.launch import kernel

GROUP = tl.constexpr(16)


@triton.jit
def log_decays(a, at, live, rate, bias, BOUND: tl.constexpr):
    """Returns the natural logarithms of the decays at offsets `at` of `a`, float32 in the shape of `at`; 0 (no decay)
    where `live` is false. rate, bias: as in `log_decay`; BOUND: that of `bounded_log_decay` if below 0."""
    x = tl.load(a + at, live, 0.0)
    found = bounded_log_decay(x, rate, bias, BOUND) if BOUND < 0 else log_decay(x, rate, bias)
    return tl.where(live, found, 0.0)


@kernel
def weights_kernel(
    mixed, b, a, rate, dt_bias, chunks, inverse, scores,
    B_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, SIZE: tl.constexpr, BOUND: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes (I + A)^-1 and P of every chunk and head (see the head of this file). Grid (chunks, HEADS). chunks int32
    [chunks, 2]: first row, rows (at most CHUNK). inverse, scores [n, HEADS, CHUNK], written: each row's rows of (I +
    A)^-1 and of P. BOUND: see `recurrent_kernel`, as for other arguments."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels: tl.constexpr = HEADS * (2 * KEY_DIM + VALUE_DIM)
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, tokens = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i, d = tl.arange(0, CHUNK), tl.arange(0, SIZE)
    own = head * KEY_DIM + d
    row = (first + i).to(tl.int64)
    live = (i < tokens)[:, None] & (d < KEY_DIM)[None, :]
    speed, bias = tl.load(rate + head), tl.load(dt_bias + own, d < KEY_DIM, 0.0)[None, :]
    of_q = mixed + row[:, None] * channels + own[None, :]
    of_k, of_a = of_q + HEADS * KEY_DIM, row[:, None] * A_STRIDE + own[None, :]
    q, k = tl.load(of_q, live, 0.0), tl.load(of_k, live, 0.0)
    step = log_decays(a, of_a, live, speed, bias, BOUND)
    total = tl.cumsum(step, 0)
    between, seen = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in tl.static_range(GROUP, CHUNK, GROUP):
        before = tl.sum(tl.where(i[:, None] < start, step, 0.0), 0)[None, :]
        later = (i[:, None] >= start) & (i[:, None] < start + GROUP)
        left = tl.exp(tl.where(later, total - before, float("-inf")))
        right = tl.exp(tl.where(i[:, None] < start, before - total, float("-inf")))
        right = tl.trans((k.to(tl.float32) * right).to(k.dtype))
        between += tl.dot((k.to(tl.float32) * left).to(k.dtype), right, input_precision=PRECISION)
        seen += tl.dot((q.to(tl.float32) * left).to(k.dtype), right, input_precision=PRECISION)
    # Pairs of a group's rows that are `apart`; `faded` is the logarithm of G[i] / G[i - apart].
    faded = tl.zeros([CHUNK, SIZE], tl.float32)
    for apart in range(GROUP):
        paired = live & (i % GROUP >= apart)[:, None]
        other = tl.load(of_k - apart * channels, paired, 0.0).to(tl.float32) * tl.exp(faded)
        here = i[:, None] - i[None, :] == apart
        here &= (i % GROUP >= apart)[:, None]
        seen += tl.where(here, tl.sum(q.to(tl.float32) * other, 1)[:, None], 0.0)
        if apart > 0:
            between += tl.where(here, tl.sum(k.to(tl.float32) * other, 1)[:, None], 0.0)
        faded += log_decays(a, of_a - apart * A_STRIDE, paired, speed, bias, BOUND)
    beta = tl.where(i < tokens, sigmoid(tl.load(b + row * B_STRIDE + head, i < tokens, 0.0)), 0.0)
    x = invert(between * beta[:, None], PRECISION)
    at = (row * HEADS + head)[:, None] * CHUNK + i[None, :]
    tl.store(inverse + at, x.to(inverse.dtype.element_ty), (i < tokens)[:, None])
    tl.store(scores + at, seen.to(scores.dtype.element_ty), (i < tokens)[:, None])


@kernel
def scan_kernel(
    qkv, mixed, b, a, rate, dt_bias, states, seq_first, seq_count, seq_slot, inverse, scores, out,
    QKV_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, SLOT: tl.constexpr, CONV: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, BOUND: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes Kimi Delta Attention chunk by chunk, writes `out`, and advances the sequences' states and convolution
    states in place. Grid (sequences, HEADS, VALUE_DIM / BLOCK). inverse, scores: of `weights_kernel`, for chunks
    counted from each sequence's first row. Other arguments as for `recurrent_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels: tl.constexpr = HEADS * (2 * KEY_DIM + VALUE_DIM)
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, tokens = tl.load(seq_first + sequence), tl.load(seq_count + sequence)
    state = states + tl.load(seq_slot + sequence).to(tl.int64) * SLOT
    share = head * (VALUE_DIM // BLOCK) + block
    move_conv_state(qkv, state + CONV, first, tokens, share, QKV_STRIDE, channels, TAPS, SHARE)
    i, d, c = tl.arange(0, CHUNK), tl.arange(0, SIZE), block * BLOCK + tl.arange(0, BLOCK)
    own, in_key = head * KEY_DIM + d, d < KEY_DIM
    speed, bias = tl.load(rate + head), tl.load(dt_bias + own, in_key, 0.0)[None, :]
    at = state + own[:, None] * VALUE_DIM + c[None, :]
    s = tl.load(at, in_key[:, None], 0.0)
    for start in range(0, tokens, CHUNK):
        exists = start + i < tokens
        live = exists[:, None] & in_key[None, :]
        row = (first + start + i).to(tl.int64)
        of_q = mixed + row[:, None] * channels + own[None, :]
        q, k = tl.load(of_q, live, 0.0), tl.load(of_q + HEADS * KEY_DIM, live, 0.0)
        of_v = mixed + row[:, None] * channels + 2 * HEADS * KEY_DIM + head * VALUE_DIM + c[None, :]
        v = tl.load(of_v, exists[:, None], 0.0).to(tl.float32)
        beta = tl.where(exists, sigmoid(tl.load(b + row * B_STRIDE + head, exists, 0.0)), 0.0)
        step = log_decays(a, row[:, None] * A_STRIDE + own[None, :], live, speed, bias, BOUND)
        total, whole = tl.cumsum(step, 0), tl.sum(step, 0)
        grown = tl.exp(total)
        of_chunk = (row * HEADS + head)[:, None] * CHUNK + i[None, :]
        x = tl.load(inverse + of_chunk, exists[:, None], 0.0)
        before = s.to(k.dtype)
        known = tl.dot((k.to(tl.float32) * grown).to(k.dtype), before, input_precision=PRECISION)
        change = (beta[:, None] * (v - known)).to(k.dtype)
        change = tl.dot(x, change, input_precision=PRECISION).to(k.dtype)
        o = tl.dot((q.to(tl.float32) * grown).to(k.dtype), before, input_precision=PRECISION)
        p = tl.load(scores + of_chunk, exists[:, None], 0.0)
        o += tl.dot(p, change, input_precision=PRECISION)
        faded = (k.to(tl.float32) * tl.exp(whole[None, :] - total)).to(k.dtype)
        s = s * tl.exp(whole)[:, None] + tl.dot(tl.trans(faded), change, input_precision=PRECISION)
        place = out + row[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM + c[None, :]
        tl.store(place, o.to(out.dtype.element_ty), exists[:, None])
    tl.store(at, s, in_key[:, None])
